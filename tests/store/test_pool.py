"""The pool as the controller sees it: the state of every group, and the files that a process may still need."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
from pathlib import Path

import pytest
from fake_ports import NumberedTasks, played
from msgspec.structs import replace

from penstock.ports.group_records import EndedGroup
from penstock.store import experience_pool
from penstock.store.experience_pool import ExperiencePool
from penstock.types import EpisodeId, EpisodeState, GroupAttempt, PayloadRef, Task

LONG_AGO = 1_000.0


def task(number: int) -> Task:
    found = NumberedTasks("train").task(number)
    assert found is not None
    return found


def play(pool: ExperiencePool, directory: Path, group: int, file: str) -> None:
    """Admit it, and have it played into `file`."""
    path = directory / file
    path.touch()
    os.utime(path, (LONG_AGO, LONG_AGO))
    episodes = [played(EpisodeId("train", group, 0, 0), reward=1.0)]
    pool.admit_groups([(group, task(group))])
    pool.add_group(group, task(group), PayloadRef(file=file, offset=0, length=0, checksum=0), episodes)


def train(pool: ExperiencePool, group: int, version: int) -> None:
    pool.end_groups([EndedGroup(group=group, counts={EpisodeState.TRAINED: 1}, trained_in=version)])


def states(pool: ExperiencePool) -> list[tuple[str, int | None]]:
    return [(record.state, record.trained_in) for record in pool.records()]


def files(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.glob("*.seg"))


def test_reading_records_takes_no_memory_for_what_environments_told(tmp_path: Path) -> None:
    """A policy may decide what `info` holds, up to a limit for each episode."""
    pool = ExperiencePool(tmp_path)
    for group in range(100):
        told = replace(played(EpisodeId("train", group, 0, 0), reward=1.0), info={"said": [[]] * 2000})
        pool.admit_groups([(group, task(group))])
        pool.add_group(group, task(group), PayloadRef(file="env-0-00000.seg", offset=0, length=0, checksum=0), [told])
    tracemalloc.start()
    try:
        records = list(pool.records())
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        pool.close()
    assert len(records) == 100 and peak < 1_000_000, "all of it takes over 12 MB"


async def test_other_tasks_run_while_records_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experience_pool, "AT_ONCE_S", 0.0)
    pool = ExperiencePool(tmp_path)
    pool.admit_groups([(group, task(group)) for group in range(3)])
    seen: list[int] = []

    async def read() -> None:
        async for record in pool.each_record():
            seen.append(record.group)

    reading = asyncio.create_task(read())
    for number in range(3):
        await asyncio.sleep(0)
        assert seen == list(range(number + 1))
    await reading
    pool.close()


def test_a_group_from_its_admission_to_its_end_and_back(tmp_path: Path) -> None:
    pool = ExperiencePool(tmp_path)
    pool.admit_groups([(0, task(0)), (1, task(1))])
    assert states(pool) == [("pending", None), ("pending", None)]
    play(pool, tmp_path, 0, "env-0-00000.seg")
    train(pool, 0, 7)
    pool.end_groups([EndedGroup(group=1, counts={EpisodeState.FILTERED: 1}, trained_in=None)])
    pool.close()
    pool = ExperiencePool(tmp_path)
    assert states(pool) == [("trained", 7), ("filtered", None)]
    pool.revive_groups([0])
    assert (states(pool)[0], pool.highest_version) == (("ready", None), 7)
    pool.admit_groups([(0, task(0))])
    assert states(pool)[0] == ("pending", None)
    pool.close()


def test_a_group_that_is_played_anew_has_another_attempt(tmp_path: Path) -> None:
    pool = ExperiencePool(tmp_path)
    play(pool, tmp_path, 0, "env-0-00000.seg")
    for _ in range(2):
        pool.close()
        pool = ExperiencePool(tmp_path)
        pool.admit_groups([(0, task(0))])
        assert [record.group_attempt for record in pool.records()] == [GroupAttempt(0, 1)]
    pool.close()


def test_files_go_when_no_checkpoint_can_send_anybody_back_to_them(tmp_path: Path) -> None:
    pool = ExperiencePool(tmp_path)
    for group in range(4):
        play(pool, tmp_path, group, f"env-0-0000{group}.seg")
    for group, version in ((0, 1), (1, 2)):
        train(pool, group, version)
    pool.close()
    pool = ExperiencePool(tmp_path)  # what is needed is known after a restart too
    pool.free_covered(0)
    assert len(files(tmp_path)) == 4, "a checkpoint of version 0 makes both to be trained again"
    pool.free_covered(1)
    assert files(tmp_path) == ["env-0-00001.seg", "env-0-00002.seg", "env-0-00003.seg"]
    pool.free_covered(2)
    assert files(tmp_path) == ["env-0-00002.seg", "env-0-00003.seg"], "what is ready is needed"
    pool.close()


def test_of_what_is_collected_nothing_is_kept_in_memory(tmp_path: Path) -> None:
    pool = ExperiencePool(tmp_path)
    for group, state in enumerate((EpisodeState.COLLECTED, EpisodeState.FILTERED)):
        play(pool, tmp_path, group, "env-0-00000.seg")
        pool.end_groups([EndedGroup(group=group, counts={state: 1})])
    assert pool._needed.keys() == {1}
    pool.close()
    pool = ExperiencePool(tmp_path)
    assert pool._needed.keys() == {1}
    pool.close()


def test_tokens_are_on_disk_before_the_index_that_knows_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(Path(f"/proc/self/fd/{fd}").readlink().name))
    pool = ExperiencePool(tmp_path)
    for group in range(2):
        play(pool, tmp_path, group, f"env-{group}-00000.seg")
    pool.sync()
    assert sorted(synced) == ["env-0-00000.seg", "env-1-00000.seg"]
    pool.close()
