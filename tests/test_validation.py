"""Held-out tasks are always the same ones with the same seeds, and playing them changes nothing about training."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from fake_ports import played
from test_loop import Run, config

from penstock.config import Config
from penstock.observe.evaluation_results import pass_at, results
from penstock.ports.work import Work
from penstock.simulator.clock import run_virtual
from penstock.store.index import PoolIndex
from penstock.types import EpisodeId, EpisodeSummary, Task

SYNCHRONOUS = {"mode": "synchronous", "max_staleness": 0}


def by_task(work: Work) -> tuple[float, list[float]]:
    """The same task always takes as long and earns as much."""
    rng = random.Random(work.task.index)
    return rng.expovariate(5.0), [float(member % 2) for member in work.members]


class Watched(Run):
    """Keeps what was handed out to be validated."""

    def __init__(self, directory: Path, settings: Config, **seconds: float) -> None:
        super().__init__(directory, settings, self._play, **seconds)
        self.validated: list[Work] = []
        self.validating: list[tuple[int, int]] = []
        """Whenever one begins: (how many are being played, optimizer steps so far)."""
        self.validation_s = 0.2

    def _play(self, work: Work) -> tuple[float, list[float]]:
        if work.task.purpose == "train":
            return by_task(work)
        self.validated.append(work)
        evaluating = self.scheduler.evaluations.ledger.counts()["leased"]
        self.validating.append((evaluating, self.system.num_steps))
        return self.validation_s, [float(work.task.index % 2 == 0)] * len(work.members)

    def evaluations(self) -> list[dict[str, Any]]:
        return [event for event in self.events() if event["event"] == "evaluation"]

    def trained_tasks(self) -> list[tuple[str, int | None]]:
        """Task and version that it was trained into."""
        index = PoolIndex(self.directory / "pool")
        found = sorted(
            (record.task_id, record.trained_in) for record in index.records() if record.trained_in is not None
        )
        index.close()
        return found


def run_to_its_end(directory: Path, **changes: Any) -> Watched:
    run = Watched(directory, config(**changes))
    run_virtual(run.go())
    return run


def test_every_validation_plays_every_task_once_with_the_same_seeds(tmp_path: Path) -> None:
    run = run_to_its_end(tmp_path, validation={"every": 2}, data={"eval_tasks": 6})
    assert [(event["when"], event["step"]) for event in run.evaluations()] == [
        ("before", 0),
        ("step 2", 2),
        ("step 4", 4),
        ("after", 5),
    ]
    worlds = [(work.task.task_id, work.env_seed, work.sampling_seed) for work in run.validated]
    rounds = [worlds[start : start + 6] for start in range(0, len(worlds), 6)]
    assert len(rounds) == 4 and all(sorted(each) == sorted(rounds[0]) for each in rounds)
    assert len(set(rounds[0])) == 6
    assert run.scheduler.evaluations.ledger.counts()["trained"] == 4 * 6


def test_metrics_tell_what_the_latest_validation_found(tmp_path: Path) -> None:
    run = run_to_its_end(tmp_path, validation={"every": 2})
    told = {line["eval_step"]: line["eval_reward"] for line in run.metrics() if "eval_step" in line}
    assert told[0] == 0.5 and 2 in told
    assert all("reward/train" in line for line in run.metrics())


@pytest.mark.parametrize(
    "scheduler", [SYNCHRONOUS, SYNCHRONOUS | {"mode": "colocated"}], ids=["synchronous", "colocated"]
)
def test_training_is_the_same_with_validation_and_without(tmp_path: Path, scheduler: dict[str, Any]) -> None:
    def trained(name: str, **changes: Any) -> list[tuple[str, int | None]]:
        (tmp_path / name).mkdir()
        run = run_to_its_end(tmp_path / name, scheduler=scheduler, **changes)
        assert run.scheduler.ledger.counts()["trained"] == 5 * 8 * 4
        return run.trained_tasks()

    assert trained("with", validation={"every": 1}) == trained("without")


def test_one_that_is_still_running_has_the_next_passed_over(tmp_path: Path) -> None:
    run = Watched(tmp_path, config(validation={"every": 1}, trainer={"steps": 6}))
    run.validation_s = 1.5
    run_virtual(run.go())
    skipped = [event for event in run.events() if event["event"] == "validation_skipped"]
    assert skipped and all("is still running" in event["reason"] for event in skipped)
    begun = [event["step"] for event in run.evaluations() if event["when"].startswith("step")]
    assert begun[0] == 1 and not {event["step"] for event in skipped} & set(begun)
    assert sorted([*begun, *(event["step"] for event in skipped)]) == [1, 2, 3, 4, 5]
    assert run.scheduler.evaluations.ledger.counts()["trained"] == 6 * len(run.evaluations())


def test_beside_training_validation_takes_no_more_than_its_share(tmp_path: Path) -> None:
    settings = config(validation={"every": 2}, data={"eval_tasks": 60}, scheduler={"max_running": 16})
    run = Watched(tmp_path, settings)
    run.validation_s = 5.0
    run_virtual(run.go())
    beside = [at for at, num_steps in run.validating if 2 <= num_steps < 5]
    alone = [at for at, num_steps in run.validating if num_steps == 0]
    assert max(beside) == 8 and max(alone) == 16


def test_how_far_a_validation_is_is_known_while_it_is_played(tmp_path: Path) -> None:
    run = run_to_its_end(tmp_path, validation={"every": 2})
    told = [reason for decider, reason in run.decisions if decider == "evaluation"]
    assert told == [f"{ended} of 6 held-out tasks have ended" for ended in range(1, 7)] * len(run.evaluations())


def test_several_samples_of_each_task(tmp_path: Path) -> None:
    run = run_to_its_end(tmp_path, validation={"samples": 4}, env={"eval_temperature": 1.0})
    before = run.evaluations()[0]
    assert before["tasks"] == 6 and before["episodes"] == 24
    assert before["pass_at"] == {"1": 0.5, "2": 0.5, "4": 0.5}
    leases = [lease for work in run.validated[:6] for lease in work.leases]
    assert len({lease.sampling_seed for lease in leases}) == 24 and len({lease.env_seed for lease in leases}) == 6


def summaries(tag: str, group: int, rewards: Sequence[float | None]) -> list[EpisodeSummary]:
    """None: it failed."""
    return [
        played(EpisodeId(tag, group, member, 0), reward=reward or 0.0, error="no" if reward is None else None)
        for member, reward in enumerate(rewards)
    ]


def test_results_by_tag() -> None:
    tasks = [Task(task_id=str(n), tag=tag, index=n, purpose="eval") for n, tag in enumerate("aab")]
    rewards = ([1.0, 0.0], [0.0, None], [0.5, 1.0])
    found = results(
        tasks, [summaries(task.tag, task.index, r) for task, r in zip(tasks, rewards, strict=True)], solved_at=1
    )
    assert found["tags"]["a"]["reward"] == 0.25 and found["tags"]["a"]["failed"] == 1
    assert found["tags"]["a"]["pass_at"] == {"1": 0.25, "2": 0.5}
    assert found["tags"]["b"]["pass_at"] == {"1": 0.5, "2": 1.0}
    assert found["reward"] == pytest.approx(2.5 / 6) and found["episodes"] == 6


@pytest.mark.parametrize("num_solved", range(6))
def test_pass_at_k_is_what_drawing_k_samples_finds_on_average(num_solved: int) -> None:
    rewards = [1.0] * num_solved + [0.0] * (5 - num_solved)
    found = pass_at([summaries("a", 0, rewards)], solved_at=1.0)
    assert list(found) == ["1", "2", "4", "5"]
    for k, chance in found.items():
        assert chance == pytest.approx(fmean(max(draw) for draw in combinations(rewards, int(k))))
