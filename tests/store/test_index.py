"""The pool's index keeps what it is told, also across a restart."""

import os
from pathlib import Path

import msgspec
import pytest
from fake_ports import played
from test_payload_files import file_size_limit

from penstock.config import ConfigError
from penstock.ports.group_records import GroupRecord
from penstock.store.index import PoolIndex, PoolUnreadable, read_groups
from penstock.types import NO_VERSION, EpisodeId, EpisodeState, EpisodeSummary, PayloadRef
from penstock.version_history import VersionHistory


def record(group: int) -> GroupRecord:
    return GroupRecord(
        group=group,
        task_id=f"train/{group}",
        task_index=group,
        admitted_at=float(group),
        ref=PayloadRef(file="env-0-00000.seg", offset=group, length=1, checksum=0),
        episodes=[played(EpisodeId("train", group, 0, 0), reward=0.5, policy_version=3)],
    )


def test_put_get_and_reopen(tmp_path: Path) -> None:
    index = PoolIndex(tmp_path)
    index.put([record(group) for group in reversed(range(300))])
    trained = msgspec.structs.replace(record(5), state=EpisodeState.TRAINED, trained_in=7)
    index.put([trained])
    index.close()
    index = PoolIndex(tmp_path)
    assert index.get_whole_groups([6, 1000, 5]) == [record(6), trained]
    assert [each.group for each in index.records()] == list(range(300))
    index.close()


def test_what_environments_told_is_only_read_on_demand_and_kept_by_changes(tmp_path: Path) -> None:
    index = PoolIndex(tmp_path)
    (episode,) = record(1).episodes
    told = msgspec.structs.replace(episode, error="lost", text="hello", info={"board": [[]] * 5})
    whole = msgspec.structs.replace(record(1), episodes=[told, episode])
    index.put([whole])
    index.change([1], lambda found: msgspec.structs.replace(found, state=EpisodeState.TRAINED, trained_in=7))
    assert index.get_whole_groups([1]) == [msgspec.structs.replace(whole, state=EpisodeState.TRAINED, trained_in=7)]
    numbers = [name for name in EpisodeSummary.__struct_fields__ if name not in ("error", "text", "info")]
    for found in (*index.get_groups([1]), *index.records()):
        assert found.trained_in == 7
        for summary in found.episodes:
            assert (summary.error, summary.text, summary.info) == (None, None, {})
            assert [getattr(summary, name) for name in numbers] == [getattr(episode, name) for name in numbers]
    index.close()


def test_the_highest_version_is_kept_though_its_group_is_trained_anew(tmp_path: Path) -> None:
    index = PoolIndex(tmp_path)
    assert index.highest_version == NO_VERSION
    index.put([msgspec.structs.replace(record(1), trained_in=7)])
    index.put([record(1)])
    index.raise_version(4, weights_of=4)
    assert index.highest_version == 7 and index.history == VersionHistory()
    index.raise_version(9, weights_of=6)
    index.raise_version(12, weights_of=6)
    index.close()
    index = PoolIndex(tmp_path)
    assert index.highest_version == 12 and index.history == VersionHistory({9: 6, 12: 6})
    index.close()


def test_nobody_else_can_lock_the_index(tmp_path: Path) -> None:
    (tmp_path / "index").mkdir(mode=0o755)
    PoolIndex(tmp_path).close()
    assert (tmp_path / "index").stat().st_mode & 0o777 == 0o700


def test_an_index_without_its_last_pages_is_refused(tmp_path: Path) -> None:
    index = PoolIndex(tmp_path)
    index.put([record(group) for group in range(2000)])
    index.close()
    file = tmp_path / "index" / "data.mdb"
    for size in (3 * 4096, 1):
        os.truncate(file, size)
        for readonly in (False, True):
            with pytest.raises(PoolUnreadable, match=r"index cannot be read .* move it away"):
                PoolIndex(tmp_path, readonly=readonly)


@pytest.mark.parametrize("name", ["lock.mdb", "data.mdb"])
def test_the_index_of_a_run_is_not_read_through_links(tmp_path: Path, name: str) -> None:
    index = PoolIndex(tmp_path / "pool")
    index.put([record(1)])
    index.close()
    assert [each.group for each in read_groups(tmp_path, setting="--calibrate")] == [1]
    victim, file = tmp_path / "victim", tmp_path / "pool" / "index" / name
    victim.write_text("mine")
    file.unlink()
    file.symlink_to(victim)
    with pytest.raises(ConfigError, match=f"--calibrate: .*{name} is a link"):
        list(read_groups(tmp_path, setting="--calibrate"))
    assert victim.read_text() == "mine"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
@pytest.mark.parametrize("part", [".", "pool", "pool/index"])
def test_the_index_of_another_user_is_not_read(tmp_path: Path, part: str) -> None:
    PoolIndex(tmp_path / "pool").close()
    os.chown(tmp_path / part, 54321, -1)
    with pytest.raises(ConfigError, match=r"learn_from: .* belongs to user 54321"):
        list(read_groups(tmp_path, setting="learn_from"))


def test_a_damaged_index_is_refused_with_its_name(tmp_path: Path) -> None:
    index = PoolIndex(tmp_path)
    index.put([record(1)])
    index.close()
    (tmp_path / "index" / "data.mdb").write_bytes(b"nothing of the kind" * 1000)
    with pytest.raises(PoolUnreadable, match=r"index cannot be read .* move it away"):
        PoolIndex(tmp_path)


def test_a_full_disk_is_not_taken_for_damage(tmp_path: Path) -> None:
    with file_size_limit(100), pytest.raises(OSError, match="File too large"):
        PoolIndex(tmp_path)
    PoolIndex(tmp_path).close()
