"""Agents that branch off, rewrite their history, hold several conversations or draw several answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_policy import ScriptedPolicy
from test_gateway import AGAIN, Gated, ask_natively, chat, client_of, play, says

from penstock.compat.gateway import RETRY, Retry, Session
from penstock.config import Config
from penstock.envs.agents import Answered
from penstock.model.chat import ChatTokenizer
from penstock.ports.environment import Endpoint
from penstock.rollout.http import Refused
from penstock.rollout.request import GenerateRequest, SamplingParams
from penstock.samples import ROOT, Sample, Segment, Trajectory

__all__ = ["chat"]

ROOMY = Config.model_validate({"env": {"max_turns": 64, "max_new_tokens": 16}, "model": {"max_context": 256}})


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


async def ask(client: openai.AsyncOpenAI, messages: list[Any], **settings: Any) -> str:
    reply = await client.chat.completions.create(model="tiny", messages=messages, **settings)
    return reply.choices[0].message.content or ""


class Seeded(ScriptedPolicy):
    """Remembers the seeds it was asked with."""

    def __init__(self, answers: list[list[int]]) -> None:
        super().__init__(answers, policy_version=3)
        self.seeds: list[int] = []

    async def generate(self, prompt_ids: Any, grants: Any, sampling: Any, seeds: Any) -> list[Segment]:
        self.seeds += seeds
        return await super().generate(prompt_ids, grants, sampling, seeds)


def texts(chat: ChatTokenizer, sample: Sample) -> list[str]:
    """The sampled stretches of a sample, as text."""
    edges = np.flatnonzero(np.diff(sample.loss_mask, prepend=0, append=0)).reshape(-1, 2)
    return [chat.decode(sample.token_ids[start:end].tolist()) for start, end in edges]


async def test_a_conversation_that_is_asked_twice_is_answered_twice(chat: ChatTokenizer) -> None:
    policy = Seeded(says(chat, "a", "b", "c"))

    async def agent(llm: Endpoint) -> float:
        async with client_of(llm) as client:
            heard = await asyncio.gather(*(ask(client, [user("x")]) for _ in range(3)))
        return float(sorted(heard) == ["a", "b", "c"])

    trajectory = await play(chat, policy, agent)
    assert (trajectory.reward, [turn.parent for turn in trajectory.turns]) == (1.0, [ROOT] * 3)
    assert len(set(policy.seeds)) == 3 and len(set(map(tuple, policy.prompts))) == 1
    samples = trajectory.formulate("branches")
    assert sorted(text for sample in samples for text in texts(chat, sample)) == ["a", "b", "c"]
    assert texts(chat, trajectory.formulate("trajectory")[0]) == [chat.decode(trajectory.turns[-1].token_ids)]


async def test_several_choices_are_several_branches(chat: ChatTokenizer) -> None:
    async def agent(llm: Endpoint) -> float:
        async with client_of(llm) as client:
            reply = await client.chat.completions.create(model="tiny", messages=[user("x")], n=3)
            heard = [choice.message.content for choice in reply.choices]
            assert [choice.index for choice in reply.choices] == [0, 1, 2] and heard == ["a", "b", "c"]
            return float(await ask(client, [user("x"), assistant("b"), user("y")]) == "d")

    trajectory = await play(chat, ScriptedPolicy(says(chat, "a", "b", "c", "d")), agent)
    assert (trajectory.reward, [turn.parent for turn in trajectory.turns]) == (1.0, [ROOT, ROOT, ROOT, 1])
    assert [texts(chat, sample) for sample in trajectory.formulate("branches")] == [["a"], ["c"], ["b", "d"]]


async def test_who_left_before_its_answer_gets_it_and_no_second_one(chat: ChatTokenizer) -> None:
    policy = Gated(says(chat, "once", "twice"))

    async def agent(llm: Endpoint) -> float:
        async with client_of(llm, max_retries=0) as client:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(ask(client, [user("x")]), 0.3)
            policy.let.set()
            return float([await ask(client, [user("x")]), await ask(client, [user("x")])] == ["once", "twice"])

    trajectory = await play(chat, policy, agent)
    assert (trajectory.reward, len(trajectory.turns)) == (1.0, 2)


class Talk:
    """A conversation that answers with one token after the other, once it is let."""

    name, max_context = "talk", 512

    def __init__(self) -> None:
        self.let, self.num_asked = asyncio.Event(), 0

    async def answer(self, prompt_ids: list[int], max_tokens: int, asked: Any, **how: Any) -> Answered:
        self.num_asked += 1
        number = self.num_asked
        await self.let.wait()
        return Answered(0, Segment(token_ids=[number], logprobs=[-1.0], spans=[], finish_reason="stop"))


def request() -> GenerateRequest:
    return GenerateRequest(rid="r", prompt_ids=[1, 2], params=SamplingParams(), max_new_tokens=(8,), seeds=(0,))


async def test_a_request_that_arrives_after_its_own_retry_gets_the_same_answer(chat: ChatTokenizer) -> None:
    talk = Talk()
    session = Session(talk, chat, model_name="tiny")  # type: ignore[arg-type]

    async def ask_as(retry: Retry) -> list[int]:
        RETRY.set(retry)
        return (await session.generate(request()))[0].token_ids

    async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:
        early = tasks.create_task(ask_as(Retry(number=1)))
        late = tasks.create_task(ask_as(Retry()))
        another = tasks.create_task(ask_as(Retry()))
        while talk.num_asked < 2:  # noqa: ASYNC110 - all three have asked then
            await asyncio.sleep(0)
        talk.let.set()
    assert [early.result(), late.result(), another.result()] == [[1], [1], [2]]


async def test_no_answer_begins_after_the_end_of_the_episode(chat: ChatTokenizer) -> None:
    """A request may come before the end, and be read after it."""
    talk = Talk()
    session = Session(talk, chat, model_name="tiny")  # type: ignore[arg-type]
    asking = asyncio.create_task(session.generate(request()))
    await session.close()
    with pytest.raises(Refused, match="the episode has ended") as refused:
        await asking
    assert (refused.value.status, talk.num_asked) == (410, 0)


async def test_the_same_idempotency_key_gets_the_same_answer(chat: ChatTokenizer) -> None:
    async def agent(llm: Endpoint) -> float:
        async with client_of(llm) as client:
            keys = ["k1", "k2", "k1", "k2"]
            heard = [await ask(client, [user("x")], extra_headers={"Idempotency-Key": key}) for key in keys]
        return float(heard == ["a", "b", "a", "b"])

    trajectory = await play(chat, ScriptedPolicy(says(chat, "a", "b")), agent)
    assert (trajectory.reward, len(trajectory.turns)) == (1.0, 2)


async def test_an_agent_that_goes_back_branches_off(chat: ChatTokenizer) -> None:
    async def agent(llm: Endpoint) -> float:
        async with client_of(llm) as client:
            first = [user("one"), assistant(await ask(client, [user("one")]))]
            for other in ("two", "three"):
                await ask(client, [*first, user(other)])
        return 1.0

    trajectory = await play(chat, ScriptedPolicy(says(chat, "a", "b", "c")), agent)
    assert [turn.parent for turn in trajectory.turns] == [ROOT, 0, 0]
    left, right = trajectory.formulate("branches")
    assert [texts(chat, left), texts(chat, right)] == [["a", "b"], ["c"]]
    assert texts(chat, Sample.overlaid([left, right])) == ["a", "c"]


async def test_a_compacting_agent_begins_a_branch(chat: ChatTokenizer) -> None:
    async def agent(llm: Endpoint) -> float:
        async with client_of(llm) as client:
            said = await ask(client, [user("one")])
            said = await ask(client, [user("one"), assistant(said), user("two")])
            await ask(client, [user(f"so far: {said}"), user("three")])
        return 1.0

    trajectory = await play(chat, ScriptedPolicy(says(chat, "a", "b", "c")), agent)
    assert [turn.parent for turn in trajectory.turns] == [ROOT, 0, ROOT]
    assert trajectory.turns[2].observation_ids == chat.prompt([user("so far: b"), user("three")])
    assert [texts(chat, each) for each in trajectory.formulate("branches")] == [["a", "b"], ["c"]]


async def test_a_client_that_drops_an_empty_answer_goes_on(chat: ChatTokenizer) -> None:
    async def agent(llm: Endpoint) -> float:
        async with client_of(llm) as client:
            assert await ask(client, [user("one")]) == ""
            return float(await ask(client, [user("one"), user("well?")]) == "yes")

    trajectory = await play(chat, ScriptedPolicy(says(chat, "", "yes")), agent)
    assert (trajectory.status, trajectory.reward, len(trajectory.turns)) == ("completed", 1.0, 2)


async def test_two_agents_that_talk_at_once_have_a_branch_each(chat: ChatTokenizer) -> None:
    def reply(prompt: Any) -> list[int]:
        return [*chat.encode(f"{len(prompt)}"), chat.eos_ids[0]]

    async def agent(llm: Endpoint) -> float:
        async def one(name: str) -> None:
            messages: list[Any] = [user(name)]
            for _ in range(4):
                messages += [assistant(await ask(client, messages)), user("more")]

        async with client_of(llm) as client:
            await asyncio.gather(one("red"), one("blue"), one("green"))
        return 1.0

    policy = ScriptedPolicy(lambda prompt, seed: reply(prompt))
    trajectory = await play(chat, policy, agent, settings=ROOMY)
    assert trajectory.error is None
    assert [len(branch) for branch in trajectory.branches()] == [4, 4, 4]


async def test_an_answer_ends_at_a_stop_string(chat: ChatTokenizer) -> None:
    async def agent(llm: Endpoint) -> float:
        async with client_of(llm) as client:
            first = await client.chat.completions.create(model="tiny", messages=[user("x")], stop=["END", "xyz"])
            (choice,) = first.choices
            assert (choice.message.content, choice.finish_reason) == ("say ", "stop")
            await ask(client, [user("x"), choice.message.model_dump(include={"role", "content"}), user("y")])
        return 1.0

    trajectory = await play(chat, ScriptedPolicy(says(chat, "say END and more", "b")), agent, settings=ROOMY)
    assert trajectory.error is None and trajectory.status == "completed"
    assert [turn.parent for turn in trajectory.turns] == [ROOT, 0]
    assert trajectory.turns[0].token_ids == chat.encode("say END"), "what was sampled after it is not trained"
    (sample,) = trajectory.formulate("branches")
    assert texts(chat, sample) == ["say END", "b"]


async def test_an_answer_ends_at_a_stop_token(chat: ChatTokenizer) -> None:
    (end,) = chat.encode(";")

    async def agent(llm: Endpoint) -> float:
        async with client_of(llm) as client:
            extra = {"stop_token_ids": [end]}
            return float(await ask(client, [user("x")], extra_body=extra) == "a")

    trajectory = await play(chat, ScriptedPolicy(says(chat, "a;b")), agent)
    assert (trajectory.reward, trajectory.turns[0].token_ids) == (1.0, [*chat.encode("a"), end])


async def test_other_tools_are_another_prompt(chat: ChatTokenizer) -> None:
    """The policy must see the tools that it is offered; here keywords of the template stand for them."""

    async def agent(llm: Endpoint) -> float:
        async with client_of(llm) as client:
            said = await ask(client, [user("x")])
            messages = [user("x"), assistant(said), user("y")]
            await ask(client, messages, extra_body={"chat_template_kwargs": {"style": "other"}})
        return 1.0

    trajectory = await play(chat, ScriptedPolicy(says(chat, "a", "b")), agent)
    assert trajectory.error is None
    # the tiny template ignores the keyword, so the tokens are those of the recorded conversation
    assert [turn.parent for turn in trajectory.turns] == [ROOT, 0]


async def test_a_retry_of_an_earlier_turn_is_no_branch(chat: ChatTokenizer) -> None:
    async def agent(llm: Endpoint) -> float:
        import aiohttp

        prompt_ids = chat.prompt([user("x")])
        async with aiohttp.ClientSession() as session:
            replies = [await ask_natively(session, llm, headers, input_ids=prompt_ids) for headers in ({}, AGAIN, {})]
        return float([reply["output_ids"] for _, reply in replies] == [first, first, second])

    first, second = says(chat, "a", "b")
    trajectory = await play(chat, ScriptedPolicy([first, second]), agent)
    assert (trajectory.reward, len(trajectory.turns)) == (1.0, 2)


Step = tuple[int, str]
"""What an agent does: which of its conversations it goes on with, and how."""
STEPS = st.lists(
    st.tuples(st.integers(0, 5), st.sampled_from(["go on", "repeat", "edit", "forget", "begin"])),
    min_size=1,
    max_size=8,
)


@given(steps=STEPS)
@settings(max_examples=12, deadline=None)
def test_whatever_tree_of_requests_each_token_is_trained_once_with_what_sampled_it(
    chat: ChatTokenizer, steps: list[Step]
) -> None:
    """Every answer has other tokens, so that each of them can be found again."""
    answers = [[*chat.encode(f"{n}{'abc'[n % 3]}"), chat.eos_ids[0]] for n in range(len(steps))]
    seen: list[tuple[list[int], list[int]]] = []

    class Policy(ScriptedPolicy):
        async def generate(self, prompt_ids: Any, grants: Any, sampling: Any, seeds: Any) -> list[Segment]:
            found = await super().generate(prompt_ids, grants, sampling, seeds)
            seen.append((list(prompt_ids), found[0].token_ids))
            return found

    async def agent(llm: Endpoint) -> float:
        talks: list[list[Any]] = [[]]
        async with client_of(llm, max_retries=0) as client:
            for number, (which, how) in enumerate(steps):
                talk = list(talks[which % len(talks)])
                match how:
                    case "repeat" if talk:
                        talk = talk[:-1]
                    case "edit" if talk:
                        talk = [*talk[:-1], assistant("other"), user(f"e{number}")]
                    case "forget" if talk:
                        talk = [user("summary"), user(f"f{number}")]
                    case "begin":
                        talk = [user(f"b{number}")]
                    case _:
                        talk = [*talk, user(f"g{number}")]
                talks.append([*talk, assistant(await ask(client, talk))])
        return 1.0

    trajectory: Trajectory = asyncio.run(play(chat, Policy(answers, policy_version=3), agent, settings=ROOMY))
    assert trajectory.error is None and len(trajectory.turns) == len(steps)
    wanted = Counter((tuple(prompt), tuple(answer)) for prompt, answer in seen)
    for formulation in ("branches", "step"):
        found: Counter[Any] = Counter()
        for sample in trajectory.formulate(formulation):
            edges = np.flatnonzero(np.diff(sample.loss_mask, prepend=0, append=0)).reshape(-1, 2).tolist()
            ids = sample.token_ids.tolist()
            found.update((tuple(ids[:start]), tuple(ids[start:end])) for start, end in edges)
            trained = sample.loss_mask == 1
            assert set(sample.versions[trained].tolist()) == {3} and (sample.logprobs[trained] < 0).all()
        assert found == wanted
