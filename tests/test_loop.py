"""The real loop and scheduler on a virtual clock, with modelled parts: whole runs in milliseconds."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from fake_ports import ModelledServers, ModelledTrainer, ModelledWorkers, NumberedTasks, Play, played
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock import loop
from penstock.config import Config
from penstock.data.sources import TaskStream
from penstock.observe.recorder import Recorder
from penstock.ports.work import Work
from penstock.processes.controller import PIPELINES, conclude
from penstock.scheduler.failure_budget import FailureBudget, NothingToLearn, OutOfTasks, TooManyFailures
from penstock.scheduler.filters import Drop, FilterFailed, FinishedGroup, Keep
from penstock.scheduler.scheduler import Scheduler
from penstock.simulator.clock import run_virtual
from penstock.store.experience_pool import ExperiencePool
from penstock.store.index import PoolIndex
from penstock.types import EpisodeState, EpisodeSummary, PayloadRef

REF = PayloadRef(file="none", offset=0, length=0, checksum=0)


def config(**changes: Any) -> Config:
    tree: dict[str, Any] = {
        "env": {"group_size": 4},
        "data": {"eval_tasks": 6},
        "rollout": {"slots": 32},
        "scheduler": {"max_staleness": 1, "trigger": {"min_samples": 8}},
        "trainer": {"steps": 5, "groups_per_step": 8, "checkpoint_every": 2},
    }
    for section, values in changes.items():
        tree[section] = tree.get(section, {}) | values
    return Config.model_validate(tree)


class Run:
    """A run of the loop and what it left behind."""

    def __init__(self, directory: Path, settings: Config, play: Play, *, seconds_per_group: float = 0.05) -> None:
        self.directory, self.settings, self.play = directory, settings, play
        self.trainer = ModelledTrainer(seconds_per_group=seconds_per_group)
        self.servers = ModelledServers(seconds=0.02)
        self.decisions: list[tuple[str, str]] = []
        self.max_in_flight = 0

    async def go(self) -> None:
        recorder = Recorder(self.directory)
        pool = ExperiencePool(self.directory / "pool")
        self.scheduler = Scheduler(self.settings, now=asyncio.get_running_loop().time, log_decision=self._record)
        source = NumberedTasks("eval")
        held_out = [task for i in range(self.settings.data.eval_tasks) if (task := source.task(i))]
        self.workers = ModelledWorkers(
            self.play, lambda *played: loop.collect(self.system, *played), lambda: self.servers.version
        )
        self.system = loop.System(
            config=self.settings,
            run_dir=self.directory,
            scheduler=self.scheduler,
            tasks=TaskStream(NumberedTasks("train")),
            held_out=held_out,
            workers=self.workers,
            trainer=self.trainer,
            servers=self.servers,
            pool=pool,
            recorder=recorder,
        )
        self.scheduler.add_worker("env-0", 1000)
        try:
            await PIPELINES[self.settings.pipeline](self.system)
        finally:
            if self.system.stepping:
                await asyncio.wait([self.system.stepping])
            loop.cancel_rest(self.system)
            recorder.close()
            pool.close()

    def _record(self, decider: str, reason: str, inputs: Any) -> None:
        self.decisions.append((decider, reason))
        self.max_in_flight = max(self.max_in_flight, self.scheduler.num_in_flight)

    def trained_in(self) -> list[tuple[int, tuple[int, ...]]]:
        """(version being trained, groups accumulated) in order."""
        return self.trainer.history

    def states(self) -> dict[int, str]:
        """What the pool's index says became of every group."""
        index = PoolIndex(self.directory / "pool")
        found = {record.group: record.state for record in index.records()}
        index.close()
        return found

    def metrics(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "metrics.jsonl").read_text().splitlines()]

    def events(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.directory / "events.jsonl").read_text().splitlines()]


def mixed(seed: int) -> Play:
    """Random durations, random rewards."""
    rng = random.Random(seed)
    return lambda work: (rng.expovariate(5.0), [float(rng.random() < 0.5) for _ in work.leases])


def test_a_whole_run(tmp_path: Path) -> None:
    run = Run(tmp_path, config(), mixed(0))
    run_virtual(run.go())
    counts = run.scheduler.ledger.counts()
    assert counts["trained"] == 5 * 8 * 4
    assert len(set(run.trainer.trained)) == len(run.trainer.trained) == 5 * 8
    assert run.servers.version == 5
    events = [event["event"] for event in run.events()]
    assert events.count("evaluation") == 2 and events[-1] == "completed"
    assert [event["step"] for event in run.events() if event["event"] == "checkpoint"] == [2, 4, 5]
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5]
    assert {decider for decider, _ in run.decisions} >= {"admission", "dispatch", "trigger", "filter"}


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), max_staleness=st.integers(0, 3), use=st.sampled_from(["compute", "step"]))
def test_nothing_lost_or_trained_twice_or_too_stale(
    tmp_path_factory: pytest.TempPathFactory, seed: int, max_staleness: int, use: str
) -> None:
    scheduler = {"max_staleness": max_staleness, "trigger": {"min_samples": 8, "use": use}}
    run = Run(tmp_path_factory.mktemp("run"), config(scheduler=scheduler), mixed(seed))
    run_virtual(run.go())
    run.scheduler.ledger.check()
    counts = run.scheduler.ledger.counts()
    live = ("pending", "leased", "unfinished", "rewarding", "ready", "training")
    assert sum(counts[state] for state in live) == 0
    assert len(set(run.trainer.trained)) == len(run.trainer.trained)
    for version, groups in run.trained_in():
        assert all(version - run.workers.versions[group] <= max_staleness for group in groups)
    assert run.scheduler.evaluations.ledger.counts()["trained"] == 12


def test_the_pool_knows_what_became_of_every_group(tmp_path: Path) -> None:
    run = Run(tmp_path, config(), mixed(5))
    run_virtual(run.go())
    counts, states = run.scheduler.ledger.counts(), list(run.states().values())
    assert states.count("trained") * 4 == counts["trained"]
    assert states.count("filtered") * 4 == counts["filtered"]
    assert "ready" not in states


def test_a_stop_in_the_middle_of_a_step_keeps_the_books(tmp_path: Path) -> None:
    run = Run(tmp_path, config(), mixed(6))
    run.trainer.step_s = 5.0

    async def stop_in_step() -> None:
        task = asyncio.create_task(run.go())
        await run.trainer.stepping.wait()
        task.cancel()
        await asyncio.wait([task])

    run_virtual(stop_in_step())
    assert run.system.num_steps == run.trainer.version == run.scheduler.trained_version == 1
    assert run.scheduler.ledger.counts()["trained"] == 8 * 4


def test_nothing_to_learn_ends_the_run(tmp_path: Path) -> None:
    settings = config(scheduler={"max_filtered_in_a_row": 50, "trigger": {"min_samples": 8}})
    run = Run(tmp_path, settings, lambda work: (0.1, [0.0] * len(work.leases)))
    with pytest.raises(ExceptionGroup) as failure:
        run_virtual(run.go())
    root = _root(failure.value)
    assert isinstance(root, NothingToLearn) and " by zero_variance (all rewards are 0). The task" in str(root)
    (alarm,) = [event["reason"] for event in run.events() if event["event"] == "alarm"]
    assert alarm.startswith("filter: 5 groups in a row were filtered: 5 by zero_variance")


def test_training_ends_early_when_nothing_more_is_learnt(tmp_path: Path) -> None:
    def mostly_solved(work: Work) -> tuple[float, list[float]]:
        return 0.1, [1.0, 1.0, 1.0, float(work.task.index % 50 != 0)][: len(work.leases)]

    early_stop = {"groups": 200}
    run = Run(tmp_path, config(scheduler={"early_stop": early_stop, "trigger": {"min_samples": 8}}), mostly_solved)
    run_virtual(run.go())
    (end,) = [event for event in run.events() if event["event"] == "early_stop"]
    assert end["step"] == run.system.num_steps < run.system.config.trainer.steps
    assert "of the latest 200 groups were filtered" in end["reason"]
    events = [event["event"] for event in run.events()]
    assert events[-1] == "completed" and events.index("early_stop") < len(events) - 1 - events[::-1].index("evaluation")
    assert run.trainer.checkpoints


def test_a_run_that_has_trained_ends_early_when_all_groups_are_filtered(tmp_path: Path) -> None:
    def solved_later(work: Work) -> tuple[float, list[float]]:
        return 0.1, [1.0, 1.0, 1.0, float(work.task.index > 20)][: len(work.leases)]

    settings = config(scheduler={"max_filtered_in_a_row": 50, "trigger": {"min_samples": 8}})
    run = Run(tmp_path, settings, solved_later)
    run_virtual(run.go())
    (end,) = [event for event in run.events() if event["event"] == "early_stop"]
    assert 0 < end["step"] < settings.trainer.steps and "50 groups in a row were filtered" in end["reason"]
    assert run.events()[-1]["event"] == "completed"


@pytest.mark.parametrize(("every", "kept"), [(2, [None, 2, 2]), (0, [None, None, None])])
def test_the_checkpoint_with_the_best_validation_is_kept(tmp_path: Path, every: int, kept: list[int | None]) -> None:
    rewards = iter([0.2] * 6 + [0.9] * 6 + [0.5] * 100)

    def play(work: Work) -> tuple[float, list[float]]:
        if work.task.purpose == "eval":
            return 0.01, [next(rewards)] * len(work.leases)
        return 0.1, [1.0, 0.0, 0.0, 0.0][: len(work.leases)]

    trainer = {"steps": 6, "groups_per_step": 8, "checkpoint_every": 2}
    run = Run(tmp_path, config(validation={"every": every}, trainer=trainer), play)
    run_virtual(run.go())
    assert [path.name for path in run.trainer.checkpoints] == ["step_2", "step_4", "step_6"]
    assert run.trainer.best_steps == kept


def recorded(run: Run, *names: str) -> list[str]:
    """Return a list of these calls of the trainer, which grows whenever one has ended."""
    calls: list[str] = []

    def record(name: str) -> None:
        call = getattr(run.trainer, name)

        async def with_record(*arguments: Any, **named: Any) -> Any:
            result = await call(*arguments, **named)
            calls.append(name)
            return result

        setattr(run.trainer, name, with_record)

    for name in names:
        record(name)
    return calls


def test_training_goes_on_while_weights_are_written(tmp_path: Path) -> None:
    trainer = {"steps": 4, "groups_per_step": 8, "checkpoint_every": 9}
    run = Run(tmp_path, config(scheduler={"max_staleness": 4}, trainer=trainer), mixed(0))
    run.trainer.publish_s = 30.0
    calls = recorded(run, "begin_publish", "finish_publish", "accumulate")
    run_virtual(run.go())
    begun = calls.index("begin_publish", 1)  # after the weights that it begins with
    assert "accumulate" in calls[begun : calls.index("finish_publish", begun)]
    assert calls.count("finish_publish") == calls.count("begin_publish") == 5
    assert run.trainer.version == 4 and [line["step"] for line in run.metrics()] == [1, 2, 3, 4]


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path: Path) -> None:
    run = Run(tmp_path, config(trainer={"steps": 6, "groups_per_step": 8, "checkpoint_every": 1}), mixed(0))
    run.trainer.save_s = 5.0
    calls = recorded(run, "begin_checkpoint", "finish_checkpoint", "step")
    run_virtual(run.go())
    saves = [name for name in calls if name != "step"]
    assert saves == ["begin_checkpoint", "finish_checkpoint"] * 6, (
        "one is written at a time, and the run awaits the last"
    )
    assert calls[:4] == ["step", "begin_checkpoint", "step", "finish_checkpoint"]
    assert [event["step"] for event in run.events() if event["event"] == "checkpoint"] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in run.metrics()] == [1, 2, 3, 4, 5, 6]


def test_dropped_groups_are_replaced(tmp_path: Path) -> None:
    def hard_tasks(work: Work) -> tuple[float, list[float]]:
        solved = work.task.purpose == "eval" or work.task.index % 3 == 0
        return 0.1, [float(solved), 0.0, 0.0, 0.0][: len(work.leases)]

    run = Run(tmp_path, config(), hard_tasks)
    run_virtual(run.go())
    counts = run.scheduler.ledger.counts()
    assert counts["trained"] == 5 * 8 * 4
    assert counts["filtered"] >= 2 * counts["trained"] - 3 * 4
    assert all(group % 3 == 0 for group in run.trainer.trained)


class Broken:
    """A filter that cannot decide."""

    def decide(self, group: FinishedGroup) -> Keep | Drop:
        raise KeyError("difficulty")


def test_a_filter_that_raises_ends_the_run_and_loses_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path, config(scheduler={"group_filter": f"{__name__}:Broken"}), mixed(7))
    with pytest.raises(ExceptionGroup) as failure:
        run_virtual(run.go())
    root = _root(failure.value)
    assert isinstance(root, FilterFailed) and "Broken raised KeyError on" in str(root)
    assert run.trainer.trained == []
    run.scheduler.ledger.check()
    assert set(run.states().values()) <= {"pending", "cancelled"}


def test_an_evaluation_may_take_long_as_long_as_it_gets_on(tmp_path: Path) -> None:
    def slow_evaluation(work: Work) -> tuple[float, list[float]]:
        seconds = 900.0 if work.task.purpose == "eval" else 0.1
        return seconds, [0.0, 1.0, 0.0, 1.0][: len(work.leases)]

    run = Run(tmp_path, config(rollout={"slots": 2}, scheduler={"max_running": 4}), slow_evaluation)
    run_virtual(run.go())
    assert run.events()[-1]["event"] == "completed"


def test_zero_staleness_is_on_policy(tmp_path: Path) -> None:
    scheduler = {"max_staleness": 0, "group_filter": [], "trigger": {"min_samples": 8}}
    run = Run(tmp_path, config(scheduler=scheduler), mixed(1))
    run_virtual(run.go())
    assert run.scheduler.ledger.counts()["discarded_stale"] == 0
    assert run.trainer.version == 5


def test_a_slow_trainer_paces_generation(tmp_path: Path) -> None:
    run = Run(tmp_path, config(), mixed(2), seconds_per_group=10.0)
    run_virtual(run.go())
    assert run.max_in_flight == 2 * 8
    assert run.scheduler.ledger.counts()["discarded_stale"] == 0


def test_a_group_slower_than_the_bound_is_discarded_not_trained(tmp_path: Path) -> None:
    def one_straggler(work: Work) -> tuple[float, list[float]]:
        straggling = work.task.purpose == "train" and work.task.index == 0
        return (30.0 if straggling else 0.1), [0.0, 1.0, 0.0, 1.0][: len(work.leases)]

    run = Run(tmp_path, config(trainer={"steps": 100, "groups_per_step": 8}), one_straggler)
    run_virtual(run.go())
    assert run.scheduler.ledger.counts()["discarded_stale"] == 4
    assert 0 not in run.trainer.trained


def test_a_finite_source_that_runs_dry_says_so(tmp_path: Path) -> None:
    run = Run(tmp_path, config(), mixed(3))

    async def starve() -> None:
        task = asyncio.create_task(run.go())
        await asyncio.sleep(0)
        run.system.tasks = TaskStream(NumberedTasks("train", size=10))
        await task

    with pytest.raises(ExceptionGroup) as failure:
        run_virtual(starve())
    root = _root(failure.value)
    assert isinstance(root, OutOfTasks) and "used up after 10 tasks" in str(root)


def test_an_environment_that_always_fails_ends_the_run(tmp_path: Path) -> None:
    run = Run(tmp_path, config(data={"eval_tasks": 0}), mixed(4))

    async def break_workers() -> None:
        task = asyncio.create_task(run.go())
        await asyncio.sleep(0)
        run.workers.start = fail  # type: ignore[method-assign]
        await task

    def fail(worker: str, work: Work) -> None:
        episodes = [played(lease.episode, reward=0.0, error="ValueError: no such key") for lease in work.leases]
        loop.collect(run.system, work.leases[0].episode.group, None, episodes)

    with pytest.raises(ExceptionGroup) as failure:
        run_virtual(break_workers())
    root = _root(failure.value)
    assert isinstance(root, TooManyFailures) and "no such key" in str(root)
    run.scheduler.ledger.check()
    assert run.scheduler.ledger.counts()["failed"] >= FailureBudget.max_failed * 4


def test_the_last_group_of_a_finite_source_may_fail(tmp_path: Path) -> None:
    run = Run(tmp_path, config(data={"eval_tasks": 0}, env={"group_size": 4, "max_attempts": 1}), mixed(4))

    def fail(worker: str, work: Work) -> None:
        episodes = [played(episode, reward=0.0, error="ValueError: no such key") for episode in work.episodes]
        loop.collect(run.system, work.group, None, episodes)

    async def one_task() -> None:
        task = asyncio.create_task(run.go())
        await asyncio.sleep(0)
        run.system.tasks = TaskStream(NumberedTasks("train", size=1))
        run.workers.start = fail  # type: ignore[method-assign]
        async with asyncio.timeout(10):
            await task

    with pytest.raises(ExceptionGroup) as failure:
        run_virtual(one_task())
    assert isinstance(_root(failure.value), OutOfTasks)


def test_a_late_result_of_an_older_attempt_is_not_written_down(tmp_path: Path) -> None:
    run = Run(tmp_path, config(data={"eval_tasks": 0}), mixed(4))
    late: list[tuple[int, list[EpisodeSummary]]] = []

    async def lose_the_first_attempt() -> None:
        task = asyncio.create_task(run.go())
        await asyncio.sleep(0)
        start = run.workers.start

        def start_badly(worker: str, work: Work) -> None:
            if work.group == 0 and work.attempt == 0:
                failed = [played(episode, reward=0.0, error="OSError: gone") for episode in work.episodes]
                loop.collect(run.system, 0, None, failed)
                late.append((0, [played(episode, reward=0.5) for episode in work.episodes]))
                loop.collect(run.system, 0, REF, late[0][1])
                assert [record.state for record in run.system.pool.get_groups([0])] == [EpisodeState.PENDING]
            else:
                start(worker, work)

        run.workers.start = start_badly  # type: ignore[method-assign]
        await task

    run_virtual(lose_the_first_attempt())
    assert late and run.scheduler.ledger.counts()["trained"] == 5 * 8 * 4


def _root(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@pytest.mark.parametrize(("pipeline", "saved"), [("train", [0]), ("eval", [])])
def test_only_training_is_saved_when_it_is_stopped(tmp_path: Path, pipeline: str, saved: list[int]) -> None:
    run = Run(
        tmp_path, config().model_copy(update={"pipeline": pipeline}), lambda work: (5.0, [1.0] * len(work.leases))
    )

    async def stop() -> None:
        life = asyncio.create_task(run.go())
        await asyncio.sleep(1.0)
        await conclude(run.system)
        life.cancel()
        await asyncio.wait([life])

    run_virtual(stop())
    assert [event["step"] for event in run.events() if event["event"] == "checkpoint"] == saved
    assert [event["ledger"]["admitted"] > 0 for event in run.events() if event["event"] == "stopped"] == [
        pipeline == "eval"
    ]
