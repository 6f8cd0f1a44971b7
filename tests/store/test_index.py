"""The pool's index keeps what it is told, also across a restart."""

from pathlib import Path

from penstock.simulator.parts import played
from penstock.store.index import GroupRecord, PoolIndex
from penstock.types import EpisodeId, PayloadRef


def record(group: int) -> GroupRecord:
    return GroupRecord(
        group=group,
        task_id=f"train/{group}",
        task_index=group,
        ref=PayloadRef(file="env-0-00000.seg", offset=group, length=1, crc32=0),
        episodes=[played(EpisodeId("train", group, 0, 0), reward=0.5, policy_version=3)],
    )


def test_put_mark_and_reopen(tmp_path: Path) -> None:
    index = PoolIndex(tmp_path)
    for group in range(300):
        index.put(record(group))
    index.mark([5, 299, 1000], "trained", trained_in=7)
    index.close()
    index = PoolIndex(tmp_path)
    trained = index.get(5)
    assert trained is not None and (trained.state, trained.trained_in) == ("trained", 7)
    assert index.get(6) == record(6)
    assert index.get(1000) is None
    assert [r.group for r in index] == list(range(300))
    index.close()
