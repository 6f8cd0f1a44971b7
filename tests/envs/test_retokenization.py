"""Whoever shows the policy its own words back: the recorded tokens count."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_policy import ScriptedPolicy
from test_manager import Always, work

from penstock.config import Config
from penstock.envs.agents import Conversation, NothingAsked
from penstock.envs.dialogue import new_part
from penstock.envs.episode import Episode, OpenTurn
from penstock.envs.manager import EnvManager
from penstock.model.chat import ChatTokenizer
from penstock.model.tiny import USER
from penstock.samples import ROOT, Segment, Trajectory, VersionSpan
from penstock.scheduler.segments import SegmentPolicy
from penstock.simulator.clock import run_virtual
from penstock.types import Sampling, SegmentGrant, Task


@pytest.mark.parametrize(
    ("text", "said", "new"),
    [
        ("1-15\n8\nlower", ["1-15", "8"], "\nlower"),
        ("1-15 [you] 8 [game] lower [you] 4 yes", ["1-15", "8", "lower", "4"], " yes"),
        ("  1-15 8", ["1-15", " 8 "], ""),
        ("lower", ["1-15", "8"], None),
        ("1-15, once more", ["1-15", "8"], None),
        ("1-15 lower 8", ["1-15", "8", "lower"], None),
        ("1-15" + " " * 100 + "8", ["1-15", "8"], None),
        ("1-15, and nothing said", ["1-15", ""], None),
        ("guess\nThat was wrong (-1 point)", ["guess", "g"], None),
        ("guess\nThat was wrong. The number is higher than 5.", ["guess", "5"], None),
        ("guess\n<|im_start|>assistant\n5\nhigher", ["guess", "5"], "\nhigher"),
        ("anything", [], "anything"),
    ],
)
def test_what_is_new_in_a_text(text: str, said: list[str], new: str | None) -> None:
    assert new_part(text, said) == new


class Recounting:
    """Every observation tells the whole story again, or only what is new."""

    def __init__(self, task: Task, *, whole: bool) -> None:
        self._whole, self._story, self._hints = whole, "say a", iter("bcd")

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return self._story, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        new = f" then {next(self._hints)}"
        self._story += f" {action}{new}"
        return (self._story if self._whole else new), 0.0, False, False, {}


def recounted(chat: ChatTokenizer, *, whole: bool) -> tuple[list[list[int]], float]:
    """What the policy is shown in each turn, and how many drifts were counted."""
    config = Config.model_validate({"env": {"max_turns": 3}})
    policy = ScriptedPolicy([[*chat.encode(answer), chat.eos_ids[0]] for answer in "abc"])
    manager = EnvManager(
        config, make=lambda task: Recounting(task, whole=whole), policy=policy, grants=Always(), chat=chat
    )
    ended: list[Trajectory] = []
    run_virtual(manager.play(work(1), lambda trajectory, text: ended.append(trajectory)))
    return [turn.observation_ids for turn in ended[0].turns], manager.counts()["drifts"]


def test_an_environment_that_tells_it_all_again_is_healed(chat: ChatTokenizer) -> None:
    (healed, num_drifts), (plain, none) = recounted(chat, whole=True), recounted(chat, whole=False)
    assert healed == plain and len(plain) == 3
    assert (num_drifts, none) == (2, 0)


class Talk:
    """An agent's conversation with a policy that gives these answers."""

    def __init__(self, chat: ChatTokenizer, answers: list[list[int]]) -> None:
        lease = work(1).leases[0]
        self._answers = iter(answers)
        self.episode = Episode(
            lease=lease,
            grant=SegmentGrant(episode=lease.episode, max_tokens=64),
            task=Task(task_id="t", tag="train", index=0),
            settings=Config.model_validate({"env": {"max_turns": 9}}).env,
            sampling=Sampling(),
            bounds=SegmentPolicy.from_config(Config(), Config().env),
            on_end=lambda episode: None,
        )
        self.conversation = Conversation(self.episode, chat, self._generate, max_context=512)

    async def _generate(self, turn: OpenTurn) -> Segment:
        tokens = next(self._answers)
        return Segment(
            token_ids=tokens,
            logprobs=[-1.0] * len(tokens),
            spans=[VersionSpan(0, 0, len(tokens))],
            finish_reason="stop",
        )

    @property
    def context(self) -> list[int]:
        """All tokens of the latest branch."""
        return self.episode.context_after(len(self.episode.turns) - 1)

    async def say(self, messages: list[dict[str, str]]) -> str:
        """What the policy answers."""
        prompt_ids, asked = self.conversation.prompt(messages)
        await self.conversation.answer(prompt_ids, 64, asked)
        return self.episode.text


ASKED, AGAIN = {"role": "user", "content": "hello"}, {"role": "user", "content": "again"}


async def test_an_answer_that_comes_back_in_other_tokens_keeps_its_own(chat: ChatTokenizer) -> None:
    """The policy sampled the mark of a turn's start in its answer; its text does not show that."""
    sampled = chat.encode(f"a{USER}b")
    talk = Talk(chat, [[*sampled, chat.eos_ids[0]], [chat.eos_ids[0]]])
    answer = await talk.say([ASKED])
    assert answer == "ab"
    await talk.say([ASKED, {"role": "assistant", "content": answer}, AGAIN])
    assert [token for part in talk.episode.turns[0].segments for token in part.token_ids][:-1] == sampled
    assert talk.episode.num_drifts == 1


async def test_a_client_that_cuts_off_spaces_is_healed(chat: ChatTokenizer) -> None:
    talk = Talk(chat, [[*chat.encode(" ok "), chat.eos_ids[0]], [chat.eos_ids[0]]])
    assert await talk.say([ASKED]) == " ok "
    await talk.say([ASKED, {"role": "assistant", "content": "ok"}, AGAIN])
    assert len(talk.episode.turns) == 2 and talk.episode.num_drifts == 1


async def test_what_comes_back_unchanged_is_no_drift(chat: ChatTokenizer) -> None:
    talk = Talk(chat, [[*chat.encode("ok"), chat.eos_ids[0]], [chat.eos_ids[0]]])
    answer = await talk.say([ASKED])
    await talk.say([ASKED, {"role": "assistant", "content": answer}, AGAIN])
    assert talk.episode.num_drifts == 0


async def test_an_answer_that_a_stop_string_ends_is_no_drift(chat: ChatTokenizer) -> None:
    """Its tokens hold the stop string, and the client has the text before it."""
    talk = Talk(chat, [chat.encode("ok STOP"), [*chat.encode("fine"), chat.eos_ids[0]]])
    prompt_ids, asked = talk.conversation.prompt([ASKED])
    await talk.conversation.answer(prompt_ids, 64, asked, shown=lambda _: "ok")
    await talk.say([ASKED, {"role": "assistant", "content": "ok"}, AGAIN])
    assert talk.episode.num_drifts == 0


async def test_tokens_of_the_same_text_are_replaced_by_those_recorded(chat: ChatTokenizer) -> None:
    """A client that speaks tokens made them of text."""
    end = chat.decode([chat.eos_ids[0]], skip_special=False)
    spelled = [token for letter in f"a{end}b" for token in chat.encode(letter)]
    talk = Talk(chat, [[*spelled, chat.eos_ids[0]], [chat.eos_ids[0]]])
    await talk.say([ASKED])
    context = talk.context
    retold = chat.encode(chat.decode(context, skip_special=False) + "more")
    assert retold[: len(context)] != context
    await talk.conversation.answer(retold, 64)
    assert talk.context[: len(context)] == context
    assert talk.episode.turns[1].observation_ids == chat.encode("more")
    assert talk.episode.num_drifts == 1


async def test_a_prompt_that_goes_on_with_bytes_of_no_text_is_healed_in_linear_time() -> None:
    class Bytes:
        num_decoded = 0

        def decode(self, token_ids: list[int], *, skip_special: bool) -> str:
            self.num_decoded += 1
            return bytes(token_ids).decode(errors="replace")

        def encode_answer(self, text: str) -> list[int]:
            return list(text.encode())

    tokenizer = Bytes()
    conversation = Conversation.__new__(Conversation)
    conversation._chat = tokenizer  # type: ignore[assignment]
    rest = [0xFF] * 5000
    found = conversation._tokens_after("abc", [*b"abc", *rest])
    assert found[-4000:] == rest[-4000:] and tokenizer.num_decoded < 60


async def test_another_history_begins_a_branch(chat: ChatTokenizer) -> None:
    talk = Talk(chat, [[*chat.encode("ok"), chat.eos_ids[0]], [chat.eos_ids[0]]])
    await talk.say([ASKED])
    never = [ASKED, {"role": "assistant", "content": "no"}, AGAIN]
    await talk.say(never)
    assert talk.episode.turns[1].parent == ROOT
    assert talk.episode.turns[1].observation_ids == chat.prompt(never)
    assert talk.context == [*chat.prompt(never), chat.eos_ids[0]]


async def test_a_prompt_that_ends_with_the_answer_is_refused(chat: ChatTokenizer) -> None:
    talk = Talk(chat, [[*chat.encode("ok"), chat.eos_ids[0]], [chat.eos_ids[0]]])
    await talk.say([ASKED])
    with pytest.raises(NothingAsked, match="add something"):
        await talk.conversation.answer(talk.context, 64)


async def test_text_that_spells_a_recorded_conversation_stays_text(chat: ChatTokenizer) -> None:
    talk = Talk(chat, [[*chat.encode("ok"), chat.eos_ids[0]], [chat.eos_ids[0]]])
    await talk.say([ASKED])
    spelled = chat.decode(talk.context, skip_special=False).removeprefix(USER)
    forged = [{"role": "user", "content": f"{spelled}more"}]
    await talk.say(forged)
    assert talk.episode.turns[1].parent == ROOT and talk.episode.num_drifts == 0
    assert talk.episode.turns[1].observation_ids == chat.prompt(forged)


async def test_what_is_said_again_is_kept_once(chat: ChatTokenizer) -> None:
    talk = Talk(chat, [[*chat.encode("ok"), chat.eos_ids[0]], [chat.eos_ids[0]]])
    answer = await talk.say([ASKED])
    await talk.say([dict(ASKED), {"role": "assistant", "content": f" {answer}"}, AGAIN])
    first, second = talk.conversation._said
    assert [mine is other for mine, other in zip(first.messages, second.messages, strict=False)] == [True, True]
