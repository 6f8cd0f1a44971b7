"""A run that only plays, on a virtual clock: every task once, whatever interrupts it."""

from __future__ import annotations

import asyncio
import io
import json
import random
from collections.abc import AsyncIterable, Collection, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from fake_ports import RECORD, REF, ModelledServers, ModelledTrainer, ModelledWorkers, NumberedTasks, Play
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from rich.console import Console

from penstock import loop
from penstock.config import Config, ConfigError
from penstock.data.sources import FirstTasks, TaskStream, open_tasks
from penstock.observe import closing_report, jsonl, summary
from penstock.observe.notices import notice
from penstock.observe.recorder import Recorder
from penstock.ports.group_records import EndedGroup, GroupRecord, Shard
from penstock.ports.work import Work
from penstock.processes.controller import tasks_to_play
from penstock.scheduler.pacing import PacingState, pace
from penstock.scheduler.scheduler import Scheduler
from penstock.simulator.clock import run_virtual
from penstock.store.experience_pool import ExperiencePool
from penstock.store.index import PoolIndex
from penstock.types import EpisodeState, EpisodeSummary, GroupAttempt, PayloadRef, Task

GROUP_SIZE, NUM_TASKS = 4, 40


def config(**scheduler: Any) -> Config:
    return Config.model_validate(
        {
            "pipeline": "rollout",
            "env": {"group_size": GROUP_SIZE},
            "rollout": {"slots": 16},
            "data": {"eval_tasks": 0},
            "scheduler": {"group_filter": [], **scheduler},
        }
    )


class Heard:
    """A dump that only listens."""

    def __init__(self) -> None:
        self.unwritten: set[int] = set()
        self.groups: list[int] = []
        self.is_finished = False

    async def restore(self, records: AsyncIterable[GroupRecord]) -> None:
        self.groups += [record.group async for record in records if record.state == EpisodeState.COLLECTED]

    def add_group(self, attempt: GroupAttempt, state: EpisodeState, num_rows: int) -> None:
        assert num_rows == GROUP_SIZE
        if state is EpisodeState.COLLECTED:
            self.groups.append(attempt.group)

    def stepped(self, step: int) -> None:
        raise AssertionError("nothing is trained")

    async def finish(self) -> None:
        self.is_finished = True


async def synthesize(
    directory: Path,
    settings: Config,
    play: Play,
    *,
    until: float = float("inf"),
    broken: Collection[int] = (),
    hopeless: bool = False,
) -> tuple[Scheduler, Heard]:
    """A controller, which dies at `until` seconds. The groups in `broken` fail whenever they are played; the worker
    knows it if they are `hopeless`."""

    def collect(group: int, ref: PayloadRef | None, episodes: Sequence[EpisodeSummary]) -> None:
        if group in broken:
            failure: dict[str, Any] = {"status": "failed", "error": "KeyError: 'answer'", "is_final": hopeless}
            ref, episodes = None, [*episodes[1:], replace(episodes[0], **failure)]
        loop.collect(system, group, ref, episodes)

    recorder, pool, heard = Recorder(directory), ExperiencePool(directory / "pool"), Heard()
    payloads(directory).write_bytes(RECORD)
    scheduler = Scheduler(settings, now=asyncio.get_running_loop().time, log_decision=recorder.decision)
    workers = ModelledWorkers(play, collect, lambda: 0)
    system = loop.System(
        config=settings,
        run_dir=directory,
        scheduler=scheduler,
        tasks=TaskStream(FirstTasks(NumberedTasks("train"), NUM_TASKS)),
        held_out=[],
        workers=workers,
        trainer=ModelledTrainer(seconds_per_group=0.0),
        servers=ModelledServers(seconds=0.0),
        pool=pool,
        recorder=recorder,
        dumps=[heard],
    )
    scheduler.add_worker("env-0", 1000)
    try:
        async with asyncio.timeout(None if until == float("inf") else until):
            await loop.synthesize(system)
    finally:
        for task in workers.playing.values():
            task.cancel()
        recorder.close()
        pool.close()
    return scheduler, heard


def payloads(directory: Path) -> Path:
    """Where modelled workers say that all tokens are."""
    return directory / "pool" / REF.file


def random_play(seed: int) -> Play:
    rng = random.Random(seed)

    def play(work: Work) -> tuple[float, list[float]]:
        return rng.expovariate(2.0), [rng.random() for _ in work.leases]

    return play


def test_what_training_would_wait_for_matters_to_nobody(tmp_path: Path) -> None:
    scheduler, _ = run_virtual(synthesize(tmp_path, config(trigger={"min_samples": 100_000}), random_play(0)))
    assert scheduler.ledger.counts()["collected"] == NUM_TASKS * GROUP_SIZE


def test_filtered_groups_end_nothing_and_are_counted(tmp_path: Path) -> None:
    settings = config(group_filter=["zero_variance"], max_filtered_in_a_row=10)
    scheduler, heard = run_virtual(synthesize(tmp_path, settings, lambda work: (0.3, [1.0] * len(work.leases))))
    assert scheduler.ledger.counts()["filtered"] == NUM_TASKS * GROUP_SIZE and not heard.groups
    last = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    assert sum(last["groups_dropped"].values()) == NUM_TASKS
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert any("groups in a row were filtered" in event["reason"] for event in events if event["event"] == "alarm")
    assert events[-1]["event"] == "completed"


@pytest.mark.parametrize(("hopeless", "attempts"), [(False, "3 attempts"), (True, "1 attempt")])
def test_groups_that_fail_among_others_are_counted_with_an_alarm_and_the_latest_reason(
    tmp_path: Path, hopeless: bool, attempts: str
) -> None:
    broken = [group for group in range(NUM_TASKS) if group % 4]
    scheduler, heard = run_virtual(synthesize(tmp_path, config(), random_play(0), broken=broken, hopeless=hopeless))
    assert scheduler.ledger.counts()["failed"] == len(broken) * GROUP_SIZE and len(heard.groups) == NUM_TASKS // 4
    played = jsonl.read_json(tmp_path / "played.json")
    assert played["groups_failed"] == len(broken)
    assert played["latest_failure"] == f"given up after {attempts}: KeyError: 'answer'"
    events = jsonl.read(tmp_path / "events.jsonl")
    (alarm,) = [event["reason"] for event in events if event["event"] == "alarm"]
    assert alarm.startswith("failures: 25 of the latest ") and alarm.endswith("the last error was: KeyError: 'answer'")


def test_a_task_that_is_given_up_is_named_and_not_counted_as_played(tmp_path: Path) -> None:
    with closing(Recorder(tmp_path)) as recorder:
        recorder.set_num_tasks(NUM_TASKS)
        recorder.decision("retry", "KeyError: 'answer'", {"group": 5, "attempt": 1})
        recorder.decision("retry", "given up after 3 attempts: KeyError: 'answer'", {"group": 5, "given_up": "rows/6"})
        recorder.progressed(NUM_TASKS, {}, {})
    (event,) = [event for event in jsonl.read(tmp_path / "events.jsonl") if event["event"] == "given_up"]
    reason = "given up after 3 attempts: KeyError: 'answer'"
    assert notice(event) == f"task rows/6 leaves no row (correct it, and play it in another run): {reason}"
    found = summary.write(tmp_path)
    assert (found["tasks"], found["tasks_played"], found["groups_failed"]) == (NUM_TASKS, NUM_TASKS - 1, 1)
    console = Console(file=io.StringIO(), width=120)
    closing_report.show(tmp_path, console, config=Config(), commands=[])
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "39 of 40 tasks played, 1 failed" in text and "! task rows/6 leaves no row" in text


def test_every_task_is_played_once(tmp_path: Path) -> None:
    scheduler, heard = run_virtual(synthesize(tmp_path, config(), random_play(0)))
    assert scheduler.ledger.counts()["collected"] == NUM_TASKS * GROUP_SIZE == scheduler.ledger.num_admitted
    assert sorted(heard.groups) == list(range(NUM_TASKS)) and heard.is_finished
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert metrics[-1]["step"] == NUM_TASKS and metrics[-1]["episodes_total"] == NUM_TASKS * GROUP_SIZE
    events = [json.loads(line)["event"] for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert events[-1] == "completed"


@settings(max_examples=25)
@given(seed=st.integers(0, 1000), deaths=st.lists(st.floats(0.01, 4.0), max_size=4))
def test_a_controller_goes_on_where_another_one_was(
    tmp_path_factory: pytest.TempPathFactory, seed: int, deaths: list[float]
) -> None:
    directory = tmp_path_factory.mktemp("run")
    for number, until in enumerate(deaths):
        with suppress(TimeoutError):
            run_virtual(synthesize(directory, config(), random_play(seed + number), until=until))
    scheduler, heard = run_virtual(synthesize(directory, config(), random_play(seed + 9)))
    assert sorted(heard.groups) == list(range(NUM_TASKS))
    assert scheduler.ledger.counts()["collected"] == scheduler.ledger.num_admitted == NUM_TASKS * GROUP_SIZE
    assert scheduler.groups.num_ended == NUM_TASKS
    found = summary.summarize(directory)
    assert found["trajectories"] == NUM_TASKS * GROUP_SIZE
    with closing(PoolIndex(directory / "pool", readonly=True)) as index:
        rewards = [episode.reward for record in index.records() for episode in record.episodes]
    last = jsonl.read(directory / "metrics.jsonl")[-1]
    assert last["reward_total"] == pytest.approx(sum(rewards)) and last["tokens_generated_total"] == 8 * len(rewards)


def test_what_was_given_up_is_counted_over_lives_and_its_siblings_are_not(tmp_path: Path) -> None:
    for until in (1.0, float("inf")):
        with suppress(TimeoutError):
            run_virtual(synthesize(tmp_path, config(), random_play(0), until=until, broken=range(3)))
        (tmp_path / "played.json").unlink()
    assert jsonl.read(tmp_path / "metrics.jsonl")[-1]["episodes_total"] == (NUM_TASKS - 3) * GROUP_SIZE
    recorder, pool = Recorder(tmp_path), ExperiencePool(tmp_path / "pool")
    asyncio.run(recorder.restore(pool.each_record()))
    recorder.close()
    pool.close()
    assert jsonl.read_json(tmp_path / "played.json")["groups_failed"] == 3


def test_a_group_that_was_whole_when_the_controller_died_is_not_played_again(tmp_path: Path) -> None:
    run_virtual(synthesize(tmp_path, config(), random_play(0)))
    pool = ExperiencePool(tmp_path / "pool")
    pool.revive_groups([3])  # as if it had died between the two lines that it writes of a group
    pool.close()

    def nothing(work: Work) -> tuple[float, list[float]]:
        raise AssertionError("everything was played")

    _, heard = run_virtual(synthesize(tmp_path, config(), nothing))
    assert sorted(heard.groups) == list(range(NUM_TASKS))


def test_a_group_whose_tokens_are_gone_before_they_are_dumped_is_played_anew(tmp_path: Path) -> None:
    run_virtual(synthesize(tmp_path, config(), random_play(0)))
    pool = ExperiencePool(tmp_path / "pool")
    dumped, damaged, whole = ([GroupAttempt(group, 0)] for group in (3, 4, 5))
    pool.put_shard(Shard(name="rollout/000000", groups=dumped))
    pool.put_shard(Shard(name="rollout/000000", groups=dumped, written=True))
    pool.put_shard(Shard(name="rollout/000001", groups=damaged + whole))
    lost = PayloadRef(file="lost-00000.seg", offset=0, length=1, checksum=0)
    for (group, _), record in ((each, pool.get_groups([each.group])[0]) for each in dumped + damaged):
        its_task = Task(task_id=record.task_id, tag="train", index=record.task_index)
        pool.admit_groups([(group, its_task)])
        pool.add_group(group, its_task, lost, record.episodes)
        pool.end_groups([EndedGroup(group=group, counts=record.counts)])
    pool.close()
    anew: list[tuple[int, int]] = []

    def play(work: Work) -> tuple[float, list[float]]:
        anew.append((work.group, work.attempt))
        return random_play(1)(work)

    scheduler, heard = run_virtual(synthesize(tmp_path, config(), play))
    assert anew == [(4, 1)] and sorted(heard.groups) == list(range(NUM_TASKS))
    assert scheduler.groups.num_ended == NUM_TASKS
    assert scheduler.ledger.counts()["collected"] == scheduler.ledger.num_admitted == NUM_TASKS * GROUP_SIZE


def test_no_group_waits_for_a_trainer() -> None:
    busy = PacingState(groups_per_step=1, num_playing=900, num_ready=0, num_unserved=0, num_leftovers=0)
    decision = pace(None, busy)
    assert decision.num_groups > 0 and "900 groups playing" in decision.reason


def test_what_has_no_end_is_named_where_all_is_to_be_played(tmp_path: Path) -> None:
    tree = {"env": {"mixture": {"sums": {"data": {"dataset": "basic_arithmetic"}}, "guess": {"name": "guess_number"}}}}
    endless = Config.model_validate(tree | {"synthesis": {"tasks": -1}})
    with closing(Recorder(tmp_path)) as recorder, pytest.raises(ConfigError, match="tasks of sums, guess are endless"):
        tasks_to_play(endless, open_tasks(endless), recorder)


def test_a_filter_that_is_asked_for_drops(tmp_path: Path) -> None:
    def play(work: Work) -> tuple[float, list[float]]:
        return 0.1, [float(work.group % 2 and member) for member in range(GROUP_SIZE)]

    scheduler, heard = run_virtual(synthesize(tmp_path, config(group_filter=["zero_variance"]), play))
    assert scheduler.ledger.counts()["filtered"] == NUM_TASKS * GROUP_SIZE // 2
    assert sorted(heard.groups) == list(range(1, NUM_TASKS, 2))
