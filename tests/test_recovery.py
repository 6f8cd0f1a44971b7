"""Whoever dies, whenever: the run goes on, and its books stay right. Real loop, scheduler and pool, virtual clock."""

from __future__ import annotations

import asyncio
import itertools
import random
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from fake_ports import RECORD, REF, ModelledServers, ModelledWorkers, MortalTrainer, NumberedTasks, Play
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock import loop
from penstock.config import Config
from penstock.data.sources import TaskStream
from penstock.observe import jsonl
from penstock.observe.recorder import Recorder
from penstock.ports.training import SavedState, TrainerLost
from penstock.ports.work import Work
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.tuning import InForce
from penstock.simulator.clock import run_virtual
from penstock.store.experience_pool import ExperiencePool
from penstock.types import EpisodeState, GroupAttempt, Task, WeightsHandle, WeightsTransport

GROUP_SIZE, GROUPS_PER_STEP, STEPS = 2, 3, 6
LIMIT_S = 600.0
"""Of virtual time: many times what a run takes."""

MODES: dict[str, dict[str, Any]] = {
    "asynchronous": {"mode": "asynchronous", "max_staleness": 2},
    "on policy": {"mode": "asynchronous", "max_staleness": 0},
    "one step off": {"mode": "one_step_off", "max_staleness": 1},
    "synchronous": {"mode": "synchronous", "max_staleness": 0},
    "colocated": {"mode": "colocated", "max_staleness": 1, "over_sampling": 1.5},
}

Victim = Literal["trainer", "controller", "both", "worker"]


@dataclass(frozen=True, slots=True)
class Death:
    """Who dies, how long after the death before."""

    victim: Victim
    after_s: float


class Servers(ModelledServers):
    """Remember all weights that they served."""

    def __init__(self) -> None:
        super().__init__(seconds=0.02)
        self.served: list[WeightsHandle] = []

    async def update_weights(self, handle: WeightsHandle) -> Mapping[WeightsTransport, int]:
        updated = await super().update_weights(handle)
        self.served.append(handle)
        return updated


class FarServers(Servers):
    """On another machine than the trainer: what is on its way from one that dies does not arrive."""

    def __init__(self, trainer: MortalTrainer) -> None:
        super().__init__()
        self._trainer = trainer
        self.num_lost = 0

    async def update_weights(self, handle: WeightsHandle) -> Mapping[WeightsTransport, int]:
        died = self._trainer._died
        await asyncio.sleep(self._seconds)
        if died.is_set():
            self.num_lost += 1
            raise TrainerLost("its weights cannot be had")
        return await super().update_weights(handle)


def config(*, redundancy: int = 0, **scheduler: Any) -> Config:
    return Config.model_validate(
        {
            "env": {"group_size": GROUP_SIZE, "redundancy": redundancy},
            "data": {"eval_tasks": 2},
            "validation": {"every": 2},
            "rollout": {"slots": 8},
            "scheduler": {"trigger": {"min_samples": 2}, **scheduler},
            "trainer": {"steps": STEPS, "groups_per_step": GROUPS_PER_STEP, "checkpoint_every": 2},
        }
    )


def play(work: Work) -> tuple[float, list[float]]:
    """The same task always takes as long and earns as much; every fifth is filtered."""
    rng = random.Random(work.task.index)
    return rng.expovariate(5.0), [
        float(member + 1 < len(work.members) or work.task.index % 5 == 0) for member in work.members
    ]


class Run:
    """A run, through the deaths of its processes."""

    def __init__(self, directory: Path, settings: Config, play: Play = play, *, far: bool = False) -> None:
        """`far`: the servers are on another machine than the trainer."""
        self.directory, self.settings, self.play = directory, settings, play
        self.payloads = directory / "pool" / REF.file
        self.payloads.parent.mkdir()
        self.payloads.write_bytes(RECORD)  # modelled workers say that all tokens are there
        self.disk: list[SavedState] = []
        self.trainer = MortalTrainer(seconds=0.03, disk=self.disk)
        self.servers = FarServers(self.trainer) if far else Servers()
        self.num_lives = 0

    async def go(self, deaths: list[Death]) -> None:
        """To its end; `deaths` that would come after it do not happen."""
        async with asyncio.timeout(LIMIT_S):
            life = self._begin()
            for death in deaths:
                await asyncio.wait([life], timeout=death.after_s)
                if life.done():
                    break
                if death.victim in ("trainer", "both"):
                    self.trainer.kill()
                if death.victim in ("controller", "both"):
                    await self._kill(life)
                    life = self._begin()
                if death.victim == "worker":
                    self._lose_worker()
            await life
        self.close()

    def _begin(self) -> asyncio.Task[None]:
        self.num_lives += 1
        scheduler = Scheduler(self.settings, now=asyncio.get_running_loop().time, log_decision=lambda *decision: None)
        held_out = [NumberedTasks("eval").task(index) for index in range(self.settings.data.eval_tasks)]
        self.workers = ModelledWorkers(
            self.play,
            lambda *played: loop.collect(self.system, *played),
            lambda: self.servers.version,
            generated=lambda *rewarding: self.system.scheduler.members.finish_generation(*rewarding),
        )
        self.system = loop.System(
            config=self.settings,
            run_dir=self.directory,
            scheduler=scheduler,
            tasks=TaskStream(NumberedTasks("train")),
            held_out=[task for task in held_out if task],
            workers=self.workers,
            trainer=self.trainer,
            servers=self.servers,
            pool=ExperiencePool(self.directory / "pool"),
            recorder=Recorder(self.directory),
        )
        scheduler.add_worker("env-0", 1000)
        return asyncio.create_task(loop.run(self.system))

    def _lose_worker(self) -> None:
        """What it played, and whatever rewards it was computing, is gone; another one comes."""
        self.workers.cancel([GroupAttempt(group, 0) for group in self.workers.playing])
        self.system.scheduler.remove_worker("env-0")
        self.system.scheduler.add_worker("env-0", 1000)

    async def _kill(self, life: asyncio.Task[None]) -> None:
        """Nothing that it was about to do happens; what others were asked to do does."""
        if self.system.stepping:
            self.system.stepping.cancel()
        life.cancel()
        await asyncio.wait([life])
        self.workers.cancel([GroupAttempt(group, 0) for group in self.workers.playing])
        self.close()

    def close(self) -> None:
        self.records, self.history = list(self.system.pool.records()), self.system.pool.history
        self.system.pool.close()
        self.system.recorder.close()

    @property
    def holds(self) -> list[list[int]]:
        """What the final weights are made of."""
        holds: list[list[int]] = self.disk[-1].state["holds"]
        return holds

    def trained_tasks(self) -> list[list[int]]:
        """Of every step, in order."""
        tasks = {record.group: record.task_index for record in self.records}
        return [sorted(tasks[group] for group in groups) for groups in self.holds]

    def check_history(self) -> None:
        """Between any two published versions lie as many optimizer steps as the pool's history says."""
        for (earlier, before), (later, after) in itertools.combinations(sorted(self.trainer.steps_of.items()), 2):
            assert self.history.steps_between(earlier, later) == len(set(before) ^ set(after))

    def check(self) -> None:
        """Of a run that has ended."""
        self.check_history()
        trained = list(itertools.chain(*self.holds))
        assert len(self.holds) == STEPS
        assert len(set(trained)) == len(trained) == STEPS * GROUPS_PER_STEP, "a group was trained twice"
        assert [r.task_index for r in self.records] == list(range(len(self.records))), "lost, or played twice"
        assert {r.group for r in self.records if r.state == EpisodeState.TRAINED} == set(trained)
        counts = Counter[str]()
        for record in self.records:
            assert record.state not in (EpisodeState.PENDING, EpisodeState.READY), f"{record.group} was left behind"
            assert sum(record.counts.values()) == self.settings.env.num_members
            counts.update(record.counts)
        ledger = self.system.scheduler.ledger.counts()
        assert {state: n for state, n in ledger.items() if n and state != "admitted"} == dict(counts)
        assert ledger["admitted"] == self.settings.env.num_members * len(self.records)
        self._check_versions()
        self._check_validations()

    def _check_validations(self) -> None:
        """None is left behind, and each played everything."""
        evaluations = self.system.scheduler.evaluations.ledger.counts()
        assert evaluations["admitted"] == evaluations["trained"]
        found = [event for event in jsonl.read(self.directory / "events.jsonl") if event["event"] == "evaluation"]
        assert {"before", "after"} <= {event["when"] for event in found}
        assert all(event["tasks"] == 2 for event in found)

    def _check_versions(self) -> None:
        weights: dict[int, str] = {}
        for handle in self.servers.served:
            assert weights.setdefault(handle.policy_version, handle.fingerprint) == handle.fingerprint, "reused"
        versions = [handle.policy_version for handle in self.servers.served]
        assert versions == sorted(versions)
        bound = self.settings.scheduler.max_staleness
        for record in self.records:
            if record.trained_in is not None:
                oldest = min(episode.version_min for episode in record.episodes)
                assert 0 <= self.history.steps_between(oldest, record.trained_in - 1) <= bound, f"{record}"


def test_the_number_of_lost_weights_is_not_used_again(tmp_path: Path) -> None:
    """The trainer dies before its first checkpoint, when its weights have been served."""
    run = Run(tmp_path, config())
    run_virtual(run.go([Death("both", 0.3)]))
    run.check()
    assert [handle.policy_version for handle in run.servers.served[:2]] == [0, 1]


def test_the_index_knows_what_is_played_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a controller that dies next would take the old tokens for ready."""
    admitted = Counter[int]()
    admit = ExperiencePool.admit_groups

    def count(pool: ExperiencePool, groups: Sequence[tuple[int, Task]]) -> None:
        admitted.update(number for number, _ in groups)
        admit(pool, groups)

    monkeypatch.setattr(ExperiencePool, "admit_groups", count)
    run = Run(tmp_path, config(**MODES["synchronous"]))
    run_virtual(run.go([Death("trainer", 1.0), Death("trainer", 0.5)]))
    run.check()
    assert max(admitted.values()) > 1


def test_groups_whose_tokens_are_gone_are_played_anew(tmp_path: Path) -> None:
    run = Run(tmp_path, config(**MODES["asynchronous"]))

    async def lose_tokens() -> None:
        life = asyncio.create_task(run.go([Death("both", 1.2)]))
        await asyncio.sleep(1.0)
        run.payloads.unlink()
        await life

    run_virtual(lose_tokens())
    run.check()
    (lost,) = [event for event in jsonl.read(tmp_path / "events.jsonl") if event["event"] == "payloads_lost"]
    assert (
        [record.attempt for record in run.records if record.group in lost["groups"]] == [1] * len(lost["groups"]) != []
    )


def test_what_a_dead_controller_did_not_validate_the_next_one_does(tmp_path: Path) -> None:
    def slow(work: Work) -> tuple[float, list[float]]:
        seconds, rewards = play(work)
        return (1.0 if work.task.purpose == "eval" else seconds), rewards

    run = Run(tmp_path, config(**MODES["asynchronous"]), slow)

    async def kill_in_mid_validation() -> None:
        life = asyncio.create_task(run.go([Death("controller", 1.9)]))
        await asyncio.sleep(1.8)
        assert 2 <= run.system.num_steps < STEPS and whens(tmp_path) == ["before"]
        await life

    run_virtual(kill_in_mid_validation())
    run.check()
    assert len(whens(tmp_path)) == 3 and whens(tmp_path)[1].startswith("step ")


def test_the_validation_after_the_last_step_is_not_played_twice(tmp_path: Path) -> None:
    def slow(work: Work) -> tuple[float, list[float]]:
        seconds, rewards = play(work)
        return (1.0 if work.task.purpose == "eval" else seconds), rewards

    run = Run(tmp_path, config(**MODES["asynchronous"]), slow)

    async def kill_in_the_last_validation() -> None:
        life = run._begin()
        await asyncio.sleep(3.0)
        assert run.system.done and whens(tmp_path)[-1] != "after"
        await run._kill(life)
        await run._begin()
        run.close()

    run_virtual(kill_in_the_last_validation())
    run.check()
    assert whens(tmp_path)[-1] == "after" and f"step {STEPS}" not in whens(tmp_path)


def test_training_that_ended_early_has_ended_for_the_next_controller_too(tmp_path: Path) -> None:
    def slow(work: Work) -> tuple[float, list[float]]:
        seconds, rewards = play(work)
        return (1.0 if work.task.purpose == "eval" else seconds), rewards

    run = Run(tmp_path, config(**MODES["asynchronous"], early_stop={"groups": 12, "filtered_share": 0.1}), slow)

    async def kill_in_the_last_validation() -> None:
        life = run._begin()
        await asyncio.sleep(2.0)
        assert run.system.ends_early
        num_steps, validated = run.system.num_steps, dict(run.system.validated)
        assert num_steps < STEPS and whens(tmp_path)[-1] != "after"
        await run._kill(life)
        await run._begin()
        run.close()
        assert run.system.num_steps == num_steps and validated.items() <= run.system.validated.items()

    run_virtual(kill_in_the_last_validation())
    assert whens(tmp_path)[-1] == "after"


@pytest.mark.parametrize("victim", ["controller", "both"])
def test_the_next_controller_has_the_settings_and_the_feedback_of_the_last_checkpoint(
    tmp_path: Path, victim: Victim
) -> None:
    run = Run(tmp_path, config(**MODES["asynchronous"], tuning="auto"))

    async def kill_after_a_checkpoint() -> None:
        life = run._begin()
        in_force = InForce(value=12, policy_version=0, reason="predicted")
        run.system.scheduler.tuning.state.changed = {"max_running": in_force}
        while len(run.disk) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        reference = run.disk[-1].state["scheduler"]["feedback"]["reference"]
        if victim == "both":
            run.trainer.kill()
        await run._kill(life)
        life = run._begin()
        await asyncio.sleep(0.2)
        scheduler = run.system.scheduler
        assert scheduler.tuning.state.changed == {"max_running": in_force}
        assert scheduler._dispatcher.capacity.max_running == 12
        assert (
            scheduler.restoring.state_dict()["feedback"]["reference"]["mean"]["count"] >= reference["mean"]["count"] > 0
        )
        await life
        run.close()

    run_virtual(kill_after_a_checkpoint())
    run.check()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("when", ["in the first update", "in a later one"])
def test_weights_that_die_with_the_trainer_hold_up_nobody(tmp_path: Path, mode: str, when: str) -> None:
    run = Run(tmp_path, config(**MODES[mode]), far=True)
    assert isinstance(run.servers, FarServers)

    async def kill_in_an_update() -> None:
        running = asyncio.create_task(run.go([]))
        updating = run.servers.update_weights
        updates = itertools.count()

        async def update(handle: WeightsHandle) -> Mapping[WeightsTransport, int]:
            if next(updates) == (0 if when == "in the first update" else 2):
                asyncio.get_running_loop().call_later(0.01, run.trainer.kill)
            return await updating(handle)

        run.servers.update_weights = update  # type: ignore[method-assign]
        await running

    run_virtual(kill_in_an_update())
    run.check()
    assert run.servers.num_lost == 1
    lost = [event["event"] for event in jsonl.read(tmp_path / "events.jsonl") if event["event"].endswith("_lost")]
    assert lost == ([] if when == "in the first update" else ["weights_lost"])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("number", [2, STEPS])
def test_a_living_trainer_publishes_what_nobody_could_have(tmp_path: Path, mode: str, number: int) -> None:
    """Of a step in the middle, and of the last one."""
    run = Run(tmp_path, config(**MODES[mode]))
    updating, updates = run.servers.update_weights, itertools.count()

    async def update(handle: WeightsHandle) -> Mapping[WeightsTransport, int]:
        if next(updates) == number:
            raise TrainerLost("cut off for a moment")
        return await updating(handle)

    run.servers.update_weights = update  # type: ignore[method-assign]
    run_virtual(run.go([]))
    run.check()
    found = {event["event"] for event in jsonl.read(tmp_path / "events.jsonl")}
    assert "weights_lost" in found and "rewound" not in found
    assert run.servers.served[-1].policy_version == run.system.scheduler.trained_version == STEPS


def whens(run_dir: Path) -> list[str]:
    """Of all validations that were brought to their end."""
    return [event["when"] for event in jsonl.read(run_dir / "events.jsonl") if event["event"] == "evaluation"]


def deaths(*victims: Victim) -> st.SearchStrategy[list[Death]]:
    moments = st.floats(0.0, 1.5, allow_nan=False)
    return st.lists(st.builds(Death, st.sampled_from(victims), moments), max_size=5)


@pytest.mark.parametrize(
    "mode", [pytest.param(mode, marks=[] if mode == "asynchronous" else [pytest.mark.long]) for mode in MODES]
)
@settings(max_examples=40, deadline=None)
@given(deaths("trainer", "controller", "both", "worker"), st.integers(0, 2), st.booleans())
@example(who=[Death("trainer", 1.25)], redundancy=0, far=True)
def test_whoever_dies_nothing_is_lost_or_trained_twice(mode: str, who: list[Death], redundancy: int, far: bool) -> None:
    with tempfile.TemporaryDirectory() as directory:
        run = Run(Path(directory), config(redundancy=redundancy, **MODES[mode]), far=far)
        run_virtual(run.go(who))
        run.check()


@pytest.mark.long
@settings(max_examples=40, deadline=None)
@given(deaths("trainer", "controller", "both"))
def test_a_synchronous_run_trains_the_same_tasks_whatever_interrupts_it(who: list[Death]) -> None:
    def trained(interruptions: list[Death]) -> list[list[int]]:
        with tempfile.TemporaryDirectory() as directory:
            run = Run(Path(directory), config(**MODES["synchronous"]))
            run_virtual(run.go(interruptions))
            return run.trained_tasks()

    assert trained(who) == trained([])
