"""Every trajectory is dumped exactly once, although any process may die at any moment."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from fake_table import FakeTable
from hypothesis import given, settings
from hypothesis import strategies as st
from played_groups import Played, chat, config, payload, task

from penstock.config import Config, DumpConfig
from penstock.ports.group_records import GroupRecord, Shard
from penstock.store.dumps import writer as dump_module
from penstock.store.dumps.columns import DumpError, Row
from penstock.store.dumps.maxcompute import TablePartition
from penstock.store.dumps.targets import Folder, Target, open_target
from penstock.store.dumps.trajectory_rows import RowMaker
from penstock.store.dumps.writer import Dump, Rendering, Samples
from penstock.store.experience_pool import ExperiencePool
from penstock.types import EpisodeState

COLLECTED = EpisodeState.COLLECTED


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dump_module, "PAUSES_S", (0.0, 0.0))


class Died(Exception):
    """The controller did."""


class Hazard:
    """Ends the controller at one of the moments that it passes."""

    def __init__(self, moment: int) -> None:
        self._left = moment

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise Died


class MortalPool:
    """The pool of a controller that may die before and after whatever it writes down."""

    def __init__(self, pool: ExperiencePool, hazard: Hazard) -> None:
        self._pool, self._hazard = pool, hazard

    def put_shard(self, shard: Shard) -> None:
        self._hazard()
        self._pool.put_shard(shard)
        self._hazard()

    def sync_index(self) -> None:
        self._pool.sync_index()
        self._hazard()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


class MortalTarget:
    """A folder whose writer may die while a file is not whole, and when it is."""

    where = "a folder"

    def __init__(self, directory: Path, hazard: Hazard) -> None:
        self._directory, self._hazard = directory, hazard
        self._folder = Folder(directory, DumpConfig())

    def check(self) -> None: ...

    def write(self, shard: str, rows: Sequence[Row], *, again: bool) -> None:
        sync = os.fsync
        try:
            os.fsync = lambda _: self._hazard()  # the file has its bytes, and not yet its name
            self._folder.write(shard, rows, again=again)
        finally:
            os.fsync = sync
        self._hazard()


TABLE_TYPES = {"trajectory": "string", "reward": "double"}


def render(directory: Path, target: Target, settings: Config) -> Rendering:
    maker = RowMaker(settings, chat(), columns=settings.dump.columns)
    return Rendering(pool=directory, maker=maker, target=target)


def payload_on_the_loop(record: GroupRecord) -> dict[str, Any]:
    """Sources of tasks are for one thread."""
    asyncio.get_running_loop()
    return payload(record)


def make(
    pool: Any, directory: Path, target: Target, *, rows_per_shard: int = 4, trains: bool = False, **facts: Any
) -> tuple[Dump, list[dict[str, Any]]]:
    """A dump, and the events it tells."""
    events: list[dict[str, Any]] = []
    settings = config("train" if trains else "rollout", **facts)
    rendering = render(directory, target, settings)

    def tell(event: str, **details: Any) -> None:
        events.append({"event": event, **details})

    dump = Dump(pool, rendering, payload=payload_on_the_loop, rows_per_shard=rows_per_shard, trains=trains, tell=tell)
    return dump, events


async def to_the_end(dump: Dump | Samples, running: asyncio.Task[None] | None = None) -> None:
    """Nothing more is played. Raises what ends the dump."""
    running = running or asyncio.create_task(dump.run())
    finishing = asyncio.create_task(dump.finish())
    done, unfinished = await asyncio.wait([running, finishing], return_when=asyncio.FIRST_EXCEPTION)
    for each in unfinished:
        each.cancel()
    for each in done:
        each.result()


async def live(
    played: Played, target: Target, hazard: Hazard, sizes: Sequence[int], *, written: list[dict[str, Any]], **facts: Any
) -> None:
    """One controller: goes on where the one before died, plays what is left, ends its dump. Raises `Died`."""
    pool = MortalPool(played.pool, hazard)
    dump, events = make(pool, played.directory, target, **facts)
    known = {record.group for record in played.pool.records()}
    await dump.restore(played.pool.each_record())
    running = asyncio.create_task(dump.run())
    try:
        for group, size in enumerate(sizes):
            if group not in known:
                heard = played.play(group, size=size)
                hazard()
                dump.add_group(*heard)
                await asyncio.sleep(0)
        await to_the_end(dump, running)
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError, Died):
            await running
    written += [event for event in events if event["event"] == "dumped"]


def survive(
    make_target: Callable[[Hazard], Target], directory: Path, sizes: Sequence[int], deaths: Sequence[int], **facts: Any
) -> int:
    """Controllers after each other, each of which dies at its moment, until one does not; returns how many died."""
    num_died = 0
    for moment in [*deaths, 0]:
        hazard = Hazard(moment)
        with Played(directory / "pool") as played, suppress(Died):
            written: list[dict[str, Any]] = []
            asyncio.run(live(played, make_target(hazard), hazard, sizes, written=written, **facts))
            assert written[0]["unwritten"] == 0
            continue
        num_died += 1
    return num_died


def names_in(directory: Path) -> list[str]:
    """Of every row of every file that is whole."""
    return [
        json.loads(line)["trajectory"]
        for path in sorted(directory.rglob("*.jsonl"))
        if not path.name.startswith(".")
        for line in path.read_text().splitlines()
    ]


def expected(sizes: Sequence[int]) -> list[str]:
    return sorted(f"mine/train/{group}/{member}/0" for group, size in enumerate(sizes) for member in range(size))


SIZES = st.lists(st.integers(1, 3), min_size=1, max_size=9)
DEATHS = st.lists(st.integers(1, 40), max_size=4)


@pytest.mark.long
@settings(max_examples=60)
@given(sizes=SIZES, deaths=DEATHS, rows_per_shard=st.integers(1, 6))
def test_files_hold_each_trajectory_once(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], deaths: list[int], rows_per_shard: int
) -> None:
    directory = tmp_path_factory.mktemp("run")
    files = directory / "files"
    survive(lambda hazard: MortalTarget(files, hazard), directory, sizes, deaths, rows_per_shard=rows_per_shard)
    assert sorted(names_in(files)) == expected(sizes)


@settings(max_examples=60)
@given(sizes=SIZES, deaths=DEATHS, rows_per_shard=st.integers(1, 6))
def test_a_table_holds_each_trajectory_once(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], deaths: list[int], rows_per_shard: int
) -> None:
    columns = [["trajectory", "string"], ["reward", "double"]]
    table = FakeTable(TABLE_TYPES, ["ds"])
    url = DumpConfig.model_validate({"url": "odps://p/tables/t/ds=1", "columns": columns})

    def target(hazard: Hazard) -> Target:
        table.hazard = hazard
        return TablePartition(table, url, [("ds", "1")])

    directory = tmp_path_factory.mktemp("run")
    survive(target, directory, sizes, deaths, rows_per_shard=rows_per_shard, columns=columns)
    assert sorted(row["trajectory"] for row in table.rows) == expected(sizes)


@pytest.mark.parametrize("moment", range(1, 25))
def test_every_moment_is_one_at_which_it_may_die(tmp_path: Path, moment: int) -> None:
    sizes = [2, 2, 1, 3]
    assert survive(lambda hazard: MortalTarget(tmp_path / "files", hazard), tmp_path, sizes, [moment]) == (moment <= 18)
    assert sorted(names_in(tmp_path / "files")) == expected(sizes)
    assert len(list((tmp_path / "files").rglob("*.jsonl"))) == 2
    assert not list((tmp_path / "files").rglob(".*"))


class Broken:
    """A target that takes nothing, or nothing more than once."""

    where = "nowhere"

    def __init__(self, *, heals: bool = False) -> None:
        self._heals = heals
        self.calls: list[tuple[str, bool]] = []

    def check(self) -> None: ...

    def write(self, shard: str, rows: Sequence[Row], *, again: bool) -> None:
        self.calls.append((shard, again))
        if not (self._heals and again):
            raise DumpError("cannot write nowhere")


@pytest.fixture
def played(tmp_path: Path) -> Iterator[Played]:
    with Played(tmp_path / "pool") as played:
        yield played


def folder(played: Played) -> tuple[Folder, Path]:
    directory = played.directory.parent / "files"
    return Folder(directory, DumpConfig()), directory


async def test_a_shard_that_cannot_be_written_ends_a_run_that_only_plays(played: Played) -> None:
    target = Broken()
    dump, _ = make(played.pool, played.directory, target)
    dump.add_group(*played.play(0))
    with pytest.raises(DumpError, match="cannot write nowhere"):
        await to_the_end(dump)
    assert target.calls == [("rollout/000000", False), ("rollout/000000", True), ("rollout/000000", True)]
    assert [(shard.name, shard.written) for shard in played.pool.shards()] == [("rollout/000000", False)]


async def test_a_store_may_be_out_of_reach_for_a_moment(played: Played) -> None:
    dump, events = make(played.pool, played.directory, Broken(heals=True))
    dump.add_group(*played.play(0))
    await to_the_end(dump)
    assert [(event["event"], event["rows"], event["unwritten"]) for event in events] == [("dumped", 2, 0)]


async def test_training_goes_on_with_an_alarm_and_keeps_the_tokens(played: Played) -> None:
    dump, events = make(played.pool, played.directory, Broken(), trains=True)
    dump.add_group(*played.play(0, state=EpisodeState.READY))
    dump.stepped(1)
    await to_the_end(dump)
    alarm, dumped = events
    assert alarm["reason"] == "cannot write nowhere; `penstock resume` writes it again" and dumped["unwritten"] == 1
    assert dump.unwritten == {0}
    target, directory = folder(played)
    resumed, _ = make(played.pool, played.directory, target, trains=True)
    await resumed.restore(played.pool.each_record())
    await to_the_end(resumed)
    assert names_in(directory) == expected([2]) and not resumed.unwritten


class Defective(Broken):
    """A target with a bug in it."""

    def write(self, shard: str, rows: Sequence[Row], *, again: bool) -> None:
        raise ZeroDivisionError("by zero")


async def test_a_defect_in_a_dump_does_not_end_training(played: Played) -> None:
    dump, events = make(played.pool, played.directory, Defective(), trains=True)
    samples = Samples(played.pool, dump._rendering, directory=played.directory, keep=1, tell=dump._tell)
    for each in (dump, samples):
        each.add_group(*played.play(0, state=EpisodeState.READY))
        each.stepped(1)
        await to_the_end(each)
    failed = "the dump failed: ZeroDivisionError('by zero')"
    assert [event["reason"] for event in events if event["event"] == "alarm"] == [
        f"{failed}; `penstock resume` writes it again",
        f"no sample of step 1: {failed}",
    ]


async def test_steps_of_training_have_files_of_their_own(played: Played) -> None:
    target, directory = folder(played)
    dump, _ = make(played.pool, played.directory, target, trains=True)
    states = [EpisodeState.READY, EpisodeState.FILTERED, EpisodeState.DISCARDED_STALE, EpisodeState.READY]
    for group, state in enumerate(states):
        dump.add_group(*played.play(group, state=state))
    dump.add_group(*played.play(9)[:1], EpisodeState.PENDING, 2)
    dump.stepped(1)
    dump.add_group(*played.play(4, state=EpisodeState.READY))
    dump.stepped(2)
    dump.stepped(3)
    dump.add_group(*played.play(5, state=EpisodeState.READY))
    dump.stepped(2)  # taken again after a rewind
    await to_the_end(dump)
    files = {
        str(path.relative_to(directory)): len(path.read_text().splitlines()) for path in directory.rglob("*.jsonl")
    }
    assert files == {
        "train/step_1.0.jsonl": 4,
        "train/step_1.1.jsonl": 4,
        "train/step_2.0.jsonl": 2,
        "train/step_2.1.jsonl": 2,
    }
    steps = [json.loads(line)["step"] for line in (directory / "train/step_2.0.jsonl").read_text().splitlines()]
    assert steps == [2, 2]


async def test_trajectories_whose_tokens_are_gone_are_counted(played: Played) -> None:
    played.play(0, state=EpisodeState.TRAINED)
    for file in played.directory.glob("*.seg"):
        file.unlink()
    dump, events = make(played.pool, played.directory, Broken(), trains=True)
    await dump.restore(played.pool.each_record())
    assert [event["reason"] for event in events] == ["the tokens of 1 groups are gone: they are not in the dump"]


async def test_a_group_that_is_played_again_is_dumped_as_it_was_played_last(played: Played) -> None:
    target, directory = folder(played)
    dump, _ = make(played.pool, played.directory, target, trains=True)
    dump.add_group(*played.play(0, state=EpisodeState.READY))
    dump.stepped(1)
    dump.add_group(*played.play(0, state=EpisodeState.READY, attempt=1))
    dump.stepped(2)
    await to_the_end(dump)
    assert names_in(directory) == ["mine/train/0/0/1", "mine/train/0/1/1"]
    assert json.loads((directory / "train/step_2.0.jsonl").read_text().splitlines()[0])["attempt"] == 1


async def test_what_is_played_anew_is_in_the_next_shard_alone(played: Played) -> None:
    """A shard that could not be written is written without it."""
    target, directory = folder(played)
    dump, _ = make(played.pool, played.directory, Broken())
    for group in (0, 1):
        dump.add_group(*played.play(group))
    with pytest.raises(DumpError):
        await to_the_end(dump)
    resumed, _ = make(played.pool, played.directory, target)
    played.pool.admit_groups([(0, task(0))])
    await resumed.restore(played.pool.each_record())
    resumed.add_group(*played.play(0, attempt=1))
    await to_the_end(resumed)
    assert names_in(directory) == [f"mine/train/{name}" for name in ("1/0/0", "1/1/0", "0/0/1", "0/1/1")]


async def test_a_stop_waits_for_what_is_being_written(played: Played) -> None:
    """Else the pool is closed under it."""
    target, directory = folder(played)
    began, may_end = asyncio.Event(), threading.Event()
    loop, write = asyncio.get_running_loop(), target.write

    def slow(*args: Any, **options: Any) -> None:
        loop.call_soon_threadsafe(began.set)
        may_end.wait(60)
        write(*args, **options)

    target.write = slow  # type: ignore[method-assign]
    dump, _ = make(played.pool, played.directory, target, rows_per_shard=2)
    dump.add_group(*played.play(0))
    running = asyncio.create_task(dump.run())
    await began.wait()
    running.cancel()
    await asyncio.wait([running], timeout=0.05)
    assert not running.done()
    may_end.set()
    await asyncio.wait([running])
    assert running.cancelled() and names_in(directory) == expected([2])


async def test_only_the_files_of_a_shard_are_synced(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    target, _ = folder(played)
    (played.directory / "env-1-00000.seg").touch()
    dump, _ = make(played.pool, played.directory, target)
    dump.add_group(*played.play(0))
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink().suffix))
    await to_the_end(dump)
    assert synced.count(".seg") == 1


async def test_totals_go_on_with_another_controller(played: Played) -> None:
    target, _ = folder(played)
    totals: list[tuple[int, int, float]] = []
    for group in range(3):
        dump, events = make(played.pool, played.directory, target)
        await dump.restore(played.pool.each_record())
        dump.add_group(*played.play(group))
        await to_the_end(dump)
        totals.append((events[-1]["shards"], events[-1]["rows"], events[-1]["cpu_s"]))
    assert [each[:2] for each in totals] == [(1, 2), (2, 4), (3, 6)]
    assert 0.0 < totals[0][2] < totals[1][2] < totals[2][2]


async def test_runs_that_share_a_folder_keep_apart(tmp_path: Path) -> None:
    url = DumpConfig(url=str(tmp_path / "files"))
    for run_id in ("mine", "yours"):
        with Played(tmp_path / run_id) as played:
            target = open_target(url, run_id=run_id)
            dump, events = make(played.pool, played.directory, target, run_id=run_id)
            dump.add_group(*played.play(0))
            await to_the_end(dump)
        assert events[-1]["url"] == str(tmp_path / "files" / run_id)
    assert names_in(tmp_path / "files") == [
        f"{run}/train/0/{member}/0" for run in ("mine", "yours") for member in (0, 1)
    ]


async def test_a_table_tells_runs_and_attempts_apart(tmp_path: Path) -> None:
    """Else what is written again seems to be there."""
    columns = [["trajectory", "string"], ["reward", "double"]]
    url = DumpConfig.model_validate({"url": "odps://p/tables/t/ds=1", "columns": columns})
    table = FakeTable(TABLE_TYPES, ["ds"])
    for run_id in ("mine", "yours"):
        with Played(tmp_path / run_id) as played:
            target = TablePartition(table, url, [("ds", "1")])
            for attempt in (0, 1):
                table.hazard = Hazard(1)
                dump, _ = make(played.pool, played.directory, target, run_id=run_id, columns=columns)
                await dump.restore(played.pool.each_record())
                dump.add_group(*played.play(0, attempt=attempt))
                await to_the_end(dump)
    assert sorted(row["trajectory"] for row in table.rows) == [
        f"{run}/train/0/{member}/{attempt}" for run in ("mine", "yours") for member in (0, 1) for attempt in (0, 1)
    ]


async def test_a_column_that_nobody_fills_is_told_once(played: Played) -> None:
    columns = [["trajectory", "string"], ["levle", "bigint"], ["level", "bigint"], ["error", "string"]]
    target, _ = folder(played)
    dump, events = make(played.pool, played.directory, target, rows_per_shard=2, columns=columns)
    for group in range(3):
        dump.add_group(*played.play(group))
    await to_the_end(dump)
    alarms = [event["reason"] for event in events if event["event"] == "alarm"]
    assert len(alarms) == 1 and alarms[0].startswith("dump.columns levle: null in the whole of rollout/000000")


@pytest.mark.parametrize("trains", [False, True])
async def test_values_of_environments_that_do_not_fit_are_counted_and_told_once(played: Played, trains: bool) -> None:
    target, _ = folder(played)
    columns = [["trajectory", "string"], ["guess", "bigint"]]
    dump, events = make(played.pool, played.directory, target, rows_per_shard=2, trains=trains, columns=columns)
    for group, guess in enumerate([2**63, 2**64 - 1, 5]):
        dump.add_group(*played.play(group, state=EpisodeState.TRAINED if trains else COLLECTED, info={"guess": guess}))
    dump.stepped(1)
    await to_the_end(dump)
    (alarm,) = [event["reason"] for event in events if event["event"] == "alarm"]
    assert alarm.startswith("trajectory mine/train/0/0/0: column guess is of type bigint, and 9223372036854775808")
    assert (events[-1]["event"], events[-1]["rows"], events[-1]["misfits"]) == ("dumped", 6, 4)


async def test_samples_are_the_newest_few(played: Played) -> None:
    target, directory = folder(played)
    rendering = render(played.directory, target, config("train"))
    samples = Samples(played.pool, rendering, directory=directory, keep=2, tell=lambda *_, **__: None)
    for step in range(1, 4):
        samples.add_group(*played.play(2 * step, state=EpisodeState.READY))
        samples.add_group(*played.play(2 * step + 1, state=EpisodeState.READY))
        samples.stepped(step)
    samples.stepped(4)
    await to_the_end(samples)
    assert sorted(path.name for path in directory.iterdir()) == ["step_000002.jsonl", "step_000003.jsonl"]
    assert names_in(directory) == [f"mine/train/{group}/{member}/0" for group in (4, 6) for member in (0, 1)]
