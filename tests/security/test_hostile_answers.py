"""Hostile answers to the datasets of reasoning-gym, scored as in a run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from penstock.config import Config
from penstock.data.items import ReasoningGym
from penstock.envs.rewards.dataset_rule import AUDITED
from penstock.envs.rewards.scorer import RewardFailure, Scorer, Scorers
from penstock.envs.single_turn import SingleTurn
from penstock.types import Task

reasoning_gym = pytest.importorskip("reasoning_gym")

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("sandboxed")]

TIMEOUT_S = 1.5
LIMIT_S = 30.0
"""Time within which an answer has its score, or no score, whatever the machine does besides."""
DATASETS = sorted(reasoning_gym.factory.DATASETS.keys() - {"composite"})
"""The tasks of `composite` name the datasets that they are made of."""


def config_of(dataset: str) -> Config:
    return Config.model_validate({"data": {"dataset": dataset}, "env": {"reward_timeout_s": TIMEOUT_S}})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scorers() -> AsyncIterator[Scorers]:
    """Those of a run: the answers to all datasets meet the same worker, as long as it lives."""
    async with aclosing(Scorers(config_of(DATASETS[0]))) as found:
        yield found


@pytest.fixture
def mark(tmp_path: Path) -> Path:
    """Return a file that must not appear, although every user may create it."""
    tmp_path.chmod(0o777)
    return tmp_path / "mark"


def answers(mark: Path) -> list[str]:
    touch = f"__import__('os').system('touch {mark}')"
    classes = "[].__class__.__base__.__subclasses__()"
    opened = f"open('{mark}', 'w').write('x')"
    return [
        "",
        " ",
        touch,
        opened,
        f"[{touch}]",
        f"({touch},)",
        f"{touch} + 1",
        f"Symbol('x').__class__.__init__.__globals__['__builtins__']['__import__']('os').system('touch {mark}')",
        f"[each for each in {classes} if each.__name__ == 'Popen'][0](['touch', '{mark}'])",
        f'{{"a": "{touch}"}}',
        f"!!python/object/apply:os.system ['touch {mark}']",
        f"(lambda: {touch})()",
        "__import__('socket').create_connection(('127.0.0.1', 9))",
        "__import__('os')._exit(0)",
        "__import__('os').fork()",
        "__import__('os').kill(-1, 9)",
        "__import__('sys').exit(0)",
        "__import__('builtins').__dict__.update(float=lambda x: 1.0)",
        "9**9**9",
        "9" * 100_000,
        "-" + "9" * 5000,
        "1e999999999",
        "nan",
        "inf",
        "[" * 100_000,
        "(" * 100_000 + ")" * 100_000,
        "-" * 100_000 + "1",
        '{"a":' * 50_000,
        "\x00",
        "1\x00",
        "\u202e\u0661\u0662\u0663 \U0001f600",
        "{0.__class__} %s %n {metadata[x]}",
        "a" * 5000 + "!",
        "(a+)+$" * 500,
        "(((a*)*)*)*" + "a" * 200 + "!",
        "x" * 200_000,
        ", ".join(map(str, range(20_000))),
        "\n" * 50_000,
        "[x for x in iter(int, 1)]",
        "exec('while True: pass')",
        "None",
        "True",
        "1/0",
    ]


async def score(scorers: Scorers, config: Config, payload: dict[str, Any], answer: str) -> float | None:
    """Return the score as a run computes it; None if the answer fails its episode."""
    scorer = scorers.of(config.env, payload)
    given = SingleTurn(Task(task_id="t", tag="train", index=0, payload=payload)).step(answer)[1]
    assert (given is None) == (scorer is not None)
    if scorer is None:
        return given
    return await scored_by(scorer, payload, answer)


async def scored_by(scorer: Scorer, payload: dict[str, Any], answer: str) -> float | None:
    try:
        return await asyncio.wait_for(scorer.score(answer, payload, waiter="t"), LIMIT_S)
    except RewardFailure:
        return None


async def score_in_time(scorers: Scorers, config: Config, payload: dict[str, Any], answer: str) -> float | None:
    """Return the score of an answer that takes no time, also on a machine that is busy for a while."""
    for _ in range(20):
        timeouts = scorers.counts()["score_timeouts"]
        found = await score(scorers, config, payload, answer)
        if scorers.counts()["score_timeouts"] == timeouts:
            break
    return found


def payload_of(name: str) -> tuple[dict[str, Any], float]:
    """Return a task of a dataset as a worker receives it, and what the dataset gives to its right answer."""
    source = ReasoningGym(name, {}, seed=1, name="train")
    payload = msgspec.msgpack.decode(msgspec.msgpack.encode(source.item(0)[1]))
    dataset = reasoning_gym.create_dataset(name, seed=1, size=1)
    return payload, dataset.score_answer(str(dataset[0]["answer"]), dataset[0])


async def attack(scorers: Scorers, name: str, mark: Path, *, every: int = 1) -> dict[str, float | None]:
    """Return the scores of the hostile answers, or of one in `every`. They must not change the right answer's score."""
    config = config_of(name)
    payload, expected = payload_of(name)
    right = str(payload["answer"])
    assert await score_in_time(scorers, config, payload, right) == expected
    plain = await score_in_time(scorers, config, payload, "touch")
    given = {answer: await score(scorers, config, payload, answer) for answer in answers(mark)[2::every]}
    touched = [found for answer, found in given.items() if "touch" in answer]
    assert all(found is None or found < 1.0 or found == plain for found in touched), "an attempt earns nothing"
    assert await score_in_time(scorers, config, payload, right) == expected
    return given


def check(given: dict[str, float | None], mark: Path) -> None:
    assert not mark.exists()
    failed = [answer[:80] for answer, score in given.items() if score is None]
    assert failed == []
    assert all(score is None or math.isfinite(score) for score in given.values())


@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.parametrize(("name", "every"), [("countdown", 6), ("spell_backward", 1)])
async def test_hostile_answers_do_no_harm(scorers: Scorers, name: str, every: int, mark: Path) -> None:
    check(await attack(scorers, name, mark, every=every), mark)


@pytest.mark.long
@pytest.mark.asyncio(loop_scope="module")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that datasets leave open
@pytest.mark.parametrize("name", DATASETS)
async def test_no_dataset_is_harmed_by_hostile_answers(scorers: Scorers, name: str, mark: Path) -> None:
    check(await attack(scorers, name, mark), mark)


def test_every_audited_dataset_exists() -> None:
    assert reasoning_gym.factory.DATASETS.keys() >= AUDITED
