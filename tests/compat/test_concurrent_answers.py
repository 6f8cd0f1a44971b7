"""Agents with several requests at once: their answers are generated together, within the bounds of one episode."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from fake_ports import leased
from scripted_policy import Answer, ScriptedPolicy
from test_branches import ROOMY, Seeded, ask, assistant, texts, user
from test_gateway import Always, chat, client_of, play, says

from penstock.config import Config
from penstock.model.chat import ChatTokenizer
from penstock.ports.environment import Endpoint
from penstock.rollout.session import RolloutError
from penstock.samples import ROOT, Segment
from penstock.types import Sampling

__all__ = ["chat"]


class Together(ScriptedPolicy):
    """Answers once as many requests as a `party` are there."""

    def __init__(self, answers: Answer | Sequence[Sequence[int]], *, party: int) -> None:
        super().__init__(answers, policy_version=3)
        self.let, self._party = asyncio.Event(), party
        self.most = self.num_there = 0

    async def generate(self, *args: Any) -> list[Segment]:
        self.num_there += 1
        self.most = max(self.most, self.num_there)
        if self.num_there == self._party:
            self.let.set()
        await self.let.wait()
        try:
            return await super().generate(*args)
        finally:
            self.num_there -= 1


def bounded(**env: Any) -> Config:
    tree = {"env": {"max_turns": 8, "max_new_tokens": 8, **env}, "model": {"max_context": 96}}
    return Config.model_validate(tree)


async def in_parallel(llm: Endpoint, *first: str) -> list[str]:
    async with client_of(llm, max_retries=0) as client:
        return await asyncio.gather(*(ask(client, [user(text)]) for text in first))


async def test_three_conversations_are_answered_together(chat: ChatTokenizer) -> None:
    policy, grants = Together(says(chat, "x", "yy", "zzz"), party=3), Always()

    async def agent(llm: Endpoint) -> float:
        return float(sorted(await in_parallel(llm, "a", "b", "c")) == ["x", "yy", "zzz"])

    trajectory = await play(chat, policy, agent, grants=grants)
    assert (trajectory.error, trajectory.reward, policy.most) == (None, 1.0, 3)
    assert [turn.parent for turn in trajectory.turns] == [ROOT] * 3
    assert grants.asked == [], "they share the first grant"


async def test_choices_of_one_request_are_generated_together(chat: ChatTokenizer) -> None:
    policy = Together(says(chat, *"abcde"), party=4)

    async def agent(llm: Endpoint) -> float:
        async with client_of(llm) as client:
            reply = await client.chat.completions.create(model="tiny", messages=[user("x")], n=4)
            heard = [str(choice.message.content) for choice in reply.choices]
            last = await ask(client, [user("x"), assistant("c"), user("y")])
        return float((sorted(heard), last) == (["a", "b", "c", "d"], "e"))

    trajectory = await play(chat, policy, agent, settings=bounded())
    assert (trajectory.error, trajectory.reward, policy.most) == (None, 1.0, 4)
    assert trajectory.turns[4].parent == [turn.token_ids for turn in trajectory.turns].index(says(chat, "c")[0])


async def test_cut_answers_go_on_together_with_one_grant(chat: ChatTokenizer) -> None:
    """The episode asks once for each grant that both use."""
    answers = dict(zip("au", says(chat, "abcdefghijk", "uvwxyzuvwxy"), strict=True))
    prompts = {each: chat.prompt([user(each)]) for each in answers}

    def rest(prompt: list[int], seed: int) -> list[int]:
        """What an answer has left: a prompt ends with what has been said of it."""
        (asked,) = [each for each, beginning in prompts.items() if prompt[: len(beginning)] == beginning]
        return answers[asked][len(prompt) - len(prompts[asked]) :]

    policy, grants = Together(rest, party=2), Always(max_tokens=3)

    async def agent(llm: Endpoint) -> float:
        return float(await in_parallel(llm, "a", "u") == ["abcdefghijk", "uvwxyzuvwxy"])

    settings = Config.model_validate(
        {
            "env": {"max_turns": 8, "max_new_tokens": 16},
            "model": {"max_context": 96},
            "scheduler": {"segment_length": 3},
        }
    )
    job = leased(range(1), max_tokens=8, sampling=Sampling(max_new_tokens=16), deadline_s=20.0, env_seed=7)
    trajectory = await play(chat, policy, agent, settings=settings, grants=grants, job=job)
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    assert [len(turn.segments) for turn in trajectory.turns] == [3, 3] and grants.asked == [True, True]


async def test_answers_at_once_keep_to_the_tokens_of_the_episode(chat: ChatTokenizer) -> None:
    """Each may use eight tokens, the episode twenty: the third waits until it is known what the others leave."""
    settings = Config.model_validate(
        {
            "env": {"max_turns": 8, "max_new_tokens": 8},
            "model": {"max_context": 96},
            "scheduler": {"global_max_length": 20},
        }
    )
    policy = Together(says(chat, "abc", "abc", "abcdefghijklm"), party=2)

    heard: list[str] = []

    async def agent(llm: Endpoint) -> float:
        heard.extend(await in_parallel(llm, "a", "b", "c"))
        return 1.0

    trajectory = await play(chat, policy, agent, settings=settings)
    assert (trajectory.error, policy.most, heard) == (None, 2, ["abc", "abc", "abcdefgh"])
    assert trajectory.num_tokens == 16


async def test_answers_at_once_keep_to_the_turns_of_the_episode(chat: ChatTokenizer) -> None:
    policy = Together(says(chat, "a", "b", "c"), party=2)

    async def agent(llm: Endpoint) -> float:
        async with client_of(llm, max_retries=0) as client:
            asked = [ask(client, [user(text)]) for text in "abc"]
            heard = await asyncio.gather(*asked, return_exceptions=True)
        (refused,) = [each for each in heard if isinstance(each, openai.BadRequestError)]
        return float("has used its 2 turns" in str(refused))

    trajectory = await play(chat, policy, agent, settings=bounded(max_turns=2))
    assert (trajectory.error, trajectory.reward, len(trajectory.turns)) == (None, 1.0, 2)
    assert trajectory.stop_reason == "max_turns"


async def test_an_answer_that_fails_leaves_the_others(chat: ChatTokenizer) -> None:
    class OneFails(Together):
        async def generate(self, prompt_ids: Any, *args: Any) -> list[Segment]:
            found = await super().generate(prompt_ids, *args)
            if prompt_ids == chat.prompt([user("b")]):
                raise RolloutError("http://server", "lost")
            return found

    async def agent(llm: Endpoint) -> float:
        async with client_of(llm, max_retries=0) as client:
            asked = [ask(client, [user(text)]) for text in "abc"]
            heard = await asyncio.gather(*asked, return_exceptions=True)
            assert [isinstance(each, openai.APIStatusError) for each in heard] == [False, True, False]
            return float(await ask(client, [user("c"), assistant(str(heard[2])), user("d")]) == "on")

    answers = dict(zip("abcd", says(chat, "x", "lost", "z", "on"), strict=True))

    def answer(prompt: list[int], seed: int) -> list[int]:
        (last,) = [each for each in answers if prompt[-len(chat.prompt([user(each)])) :] == chat.prompt([user(each)])]
        return answers[last]

    policy = OneFails(answer, party=3)
    trajectory = await play(chat, policy, agent)
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    sampled = [text for sample in trajectory.formulate("branches") for text in texts(chat, sample)]
    assert sorted(sampled) == ["on", "x", "z"] and trajectory.num_tokens == sum(map(len, says(chat, "on", "x", "z")))


async def test_equal_prompts_at_once_have_different_seeds_though_one_fails(chat: ChatTokenizer) -> None:
    class FirstFails(Seeded):
        async def generate(self, *args: Any) -> list[Segment]:
            found = await super().generate(*args)
            if len(self.seeds) == 1:
                raise RolloutError("http://server", "lost")
            return found

    async def agent(llm: Endpoint) -> float:
        async with client_of(llm, max_retries=0) as client:
            await asyncio.gather(*(ask(client, [user("x")]) for _ in range(3)), return_exceptions=True)
            await ask(client, [user("x")])
        return 1.0

    policy = FirstFails(says(chat, "a", "b", "c", "d"))
    trajectory = await play(chat, policy, agent, settings=ROOMY)
    assert trajectory.error is None and len(set(policy.seeds)) == 4


async def test_an_episode_that_ends_ends_its_open_answers(chat: ChatTokenizer) -> None:
    policy = Together(says(chat, "a", "b"), party=3)

    async def agent(llm: Endpoint) -> float:
        policy.let.set()
        async with client_of(llm) as client:
            await ask(client, [user("a")])
            policy.let.clear()
            left = asyncio.create_task(ask(client, [user("b")]))
            while not policy.num_there:  # noqa: ASYNC110 - until the request is there
                await asyncio.sleep(0.01)
            left.cancel()
        return 1.0

    trajectory = await play(chat, policy, agent)
    assert (trajectory.error, len(trajectory.turns)) == (None, 1)


@pytest.mark.parametrize("party", [1, 5])
async def test_conversations_that_grow_at_once_keep_their_own_tokens(chat: ChatTokenizer, party: int) -> None:
    """Every answer names its prompt's length, so that a mixed-up context shows."""

    def reply(prompt: Sequence[int], seed: int) -> list[int]:
        return [*chat.encode(f"{len(prompt)}"), chat.eos_ids[0]]

    async def agent(llm: Endpoint) -> float:
        async with client_of(llm) as client:

            async def one(name: str) -> None:
                messages: list[Any] = [user(name)]
                for _ in range(4):
                    expected = len(chat.prompt(messages))
                    heard = await ask(client, messages)
                    assert heard == f"{expected}"
                    messages += [assistant(heard), user("more")]

            await asyncio.gather(*(one(name * (number + 1)) for number, name in enumerate("abcde"[:party])))
        return 1.0

    trajectory = await play(chat, ScriptedPolicy(reply), agent, settings=ROOMY)
    assert (trajectory.error, trajectory.reward) == (None, 1.0)
    assert [len(branch) for branch in trajectory.branches()] == [4] * party
