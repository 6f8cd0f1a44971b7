"""Worked examples: as long as the policy's own episodes may be, and nothing is left open."""

from __future__ import annotations

from typing import Any

import pytest
from fake_ports import NumberedTasks

from penstock.config import ConfigError
from penstock.data.sources import TaskStream
from penstock.envs.demonstrations import demonstrations
from penstock.model.chat import ChatTokenizer
from penstock.types import Task

NUM_TASKS = 2


class Endless:
    """Goes on as long as it is played."""

    num_open = 0

    def __init__(self, task: Task) -> None:
        Endless.num_open += 1

    def reset(self, seed: int) -> Any:
        return "begin", {}

    def step(self, action: str) -> Any:
        return "more", 0.0, False, False, {}

    def close(self) -> None:
        Endless.num_open -= 1


class Shown(Endless):
    def demonstrate(self) -> str:
        return "on"


def examples(kind: Any, chat: ChatTokenizer, **settings: Any) -> list[tuple[list[int], list[int]]]:
    tasks = TaskStream(NumberedTasks("train", size=NUM_TASKS))
    return list(demonstrations(tasks.next, make=kind, max_turns=lambda task: 3, chat=chat, seed=0, **settings))


def test_they_end_after_their_turns_and_are_closed(chat: ChatTokenizer) -> None:
    found = examples(Shown, chat)
    assert len(found) == NUM_TASKS and Endless.num_open == 0
    for token_ids, mask in found:
        said = [token for token, is_said in zip(token_ids, mask, strict=True) if is_said]
        assert said == [*chat.encode("on"), chat.eos_ids[0]] * 3
        assert mask[-1] == 1, "what nobody answers is not shown"


class LongSometimes(Shown):
    """The first task shows a text beyond the context; the others do so later, or never."""

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        self._index = task.index

    def reset(self, seed: int) -> Any:
        return ("x" * 1_000_000 if self._index == 0 else "begin"), {}


def test_one_beyond_the_context_is_left_out_before_it_is_tokenised(
    chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = examples(LongSometimes, chat)
    longest = len(whole[1][0])
    seen: list[int] = []
    prompt = chat.prompt
    monkeypatch.setattr(chat, "prompt", lambda messages: seen.append(len(messages[0]["content"])) or prompt(messages))
    assert examples(LongSometimes, chat, max_context=longest) == whole[1:]
    assert max(seen) < 100 and Endless.num_open == 0
    assert examples(LongSometimes, chat, max_context=longest - 1) == []


def test_many_beyond_the_context_are_refused(chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.envs.demonstrations.MOST_LEFT_OUT", NUM_TASKS)
    with pytest.raises(ConfigError, match=r"2 demonstrations in a row exceed model\.max_context 4 .*task train/1"):
        examples(Shown, chat, max_context=4)


def test_one_that_shows_nothing_is_refused_and_closed(chat: ChatTokenizer) -> None:
    with pytest.raises(ConfigError, match=r"demonstrate\(\); Endless has none"):
        examples(Endless, chat)
    assert Endless.num_open == 0


class Five(Endless):
    def demonstrate(self) -> Any:
        return 5


def test_one_that_shows_no_text_is_named_and_closed(chat: ChatTokenizer) -> None:
    with pytest.raises(ConfigError, match=r"Five\.demonstrate returned 5, not a string"):
        examples(Five, chat)
    assert Endless.num_open == 0


class Unprepared(Endless):
    def demonstrate(self) -> str:
        raise KeyError("answer")


def test_one_that_raises_is_named_with_task_and_line_and_closed(chat: ChatTokenizer) -> None:
    with pytest.raises(
        ConfigError, match=r"Unprepared failed .* task \S+: KeyError: 'answer' \(test_demonstrations.py:\d+\)"
    ):
        examples(Unprepared, chat)
    assert Endless.num_open == 0


class Numbered(Endless):
    """Its expert counts on over all episodes."""

    count = 0

    def demonstrate(self) -> str:
        Numbered.count += 1
        return str(Numbered.count)


def test_noise_replaces_a_fraction_of_the_actions_by_earlier_ones(
    chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"{__name__}.NUM_TASKS", 400)
    Numbered.count, shown = 0, []
    for token_ids, mask in examples(Numbered, chat, noise=0.25):
        learnt = [token for token, is_learnt in zip(token_ids, mask, strict=True) if is_learnt]
        shown += actions(chat, learnt)
    right = range(1, len(shown) + 1)
    assert len(shown) == 1200 and all(found <= expected for found, expected in zip(shown, right, strict=True))
    mistakes = sum(found != expected for found, expected in zip(shown, right, strict=True))
    assert mistakes == pytest.approx(300, abs=60)


def actions(chat: ChatTokenizer, token_ids: list[int]) -> list[int]:
    """The numbers between the ends of turns."""
    found: list[list[int]] = [[]]
    for token in token_ids:
        if token == chat.eos_ids[0]:
            found.append([])
        else:
            found[-1].append(token)
    return [int(chat.decode(each)) for each in found[:-1]]
