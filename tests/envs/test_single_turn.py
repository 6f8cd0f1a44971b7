"""One question and one answer. The rule of the dataset scores it, or another process does."""

from __future__ import annotations

from typing import Any

import pytest
from test_manager import play, work

from penstock.config import ConfigError, EnvironmentConfig
from penstock.envs.rewards.dataset_rule import DatasetRule, is_scored_apart
from penstock.envs.single_turn import SingleTurn
from penstock.model.chat import ChatTokenizer
from penstock.types import Task


def task(**payload: Any) -> Task:
    return Task(task_id="t", tag="train", index=0, payload={"question": "2+2?", "answer": "4", **payload})


def test_a_task_of_reasoning_gym_has_its_own_rule() -> None:
    world = SingleTurn(task(metadata={"source_dataset": "simple_equations"}))
    assert world.reset(1)[0] == "2+2?"
    assert (world.step("4")[1], world.step("5")[1]) == (1.0, 0.0)


def test_of_any_other_task_it_gives_no_reward(chat: ChatTokenizer) -> None:
    (trajectory,) = play(chat, ["4"], make=lambda _: SingleTurn(task()), job=work(1))  # type: ignore[arg-type]
    assert trajectory.status == "failed"
    assert "SingleTurn.step of t: no reward: set env.reward" in str(trajectory.error)


def test_an_unknown_dataset_is_named_unless_the_reward_is_another_one() -> None:
    payload = task(metadata={"source_dataset": "my_scrape"})
    assert SingleTurn(payload).step("4")[1] is None
    assert is_scored_apart(EnvironmentConfig(name="single_turn"), payload.payload)
    assert not is_scored_apart(EnvironmentConfig(name="single_turn", reward="math"), payload.payload)
    with pytest.raises(ValueError, match=r"reasoning-gym has no dataset my_scrape"):
        DatasetRule().check(payload.payload)


def test_a_task_that_the_prompt_does_not_fit_fails_alone(chat: ChatTokenizer) -> None:
    made = SingleTurn(task(), prompt="{metadata[word]}")
    (trajectory,) = play(chat, ["4"], make=lambda _: made, job=work(1))  # type: ignore[arg-type]
    assert trajectory.status == "failed"
    assert "env.options.prompt '{metadata[word]}' does not fit task t, which has question" in str(trajectory.error)


@pytest.mark.parametrize("dataset", [["gcd"], {"name": "gcd"}, 5])
def test_a_dataset_that_is_no_text_fails_its_episode_alone(chat: ChatTokenizer, dataset: Any) -> None:
    payload = task(metadata={"source_dataset": dataset})
    assert is_scored_apart(EnvironmentConfig(name="single_turn"), payload.payload), "asked outside the episode"
    (trajectory,) = play(chat, ["4"], make=lambda _: SingleTurn(payload), job=work(1))  # type: ignore[arg-type]
    assert trajectory.status == "failed"
    assert f"metadata.source_dataset of a task is {dataset}, not text" in str(trajectory.error)
    with pytest.raises(ValueError, match=r"metadata\.source_dataset of a task is .* not text"):
        DatasetRule().check(payload.payload)


def test_a_prompt_is_text() -> None:
    with pytest.raises(ConfigError, match=r"env.options.prompt is {'question': None}, not text: quote it"):
        SingleTurn(task(), prompt={"question": None})  # type: ignore[arg-type]
