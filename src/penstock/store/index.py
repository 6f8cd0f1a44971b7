"""The experience pool's index: what became of every group, in LMDB, written by the controller alone.

Keys are big-endian group numbers. Commits reach the page cache at once (they survive any process) and the disk at
`sync` (called with every checkpoint).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import lmdb
import msgspec

from penstock.types import EpisodeSummary, PayloadRef


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Everything known of a played group except its tokens."""

    group: int
    task_id: str
    task_index: int
    ref: PayloadRef | None
    episodes: list[EpisodeSummary]
    state: str = "ready"
    trained_in: int | None = None
    """Policy version it was trained into."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(GroupRecord)


class PoolIndex:
    """Group number -> `GroupRecord`."""

    def __init__(self, directory: Path, *, map_bytes: int = 16 << 30) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._env = lmdb.open(str(directory / "index"), map_size=map_bytes, sync=False, metasync=False, max_readers=64)

    def put(self, record: GroupRecord) -> None:
        with self._env.begin(write=True) as txn:
            txn.put(_key(record.group), _encoder.encode(record))

    def mark(self, groups: Sequence[int], state: str, *, trained_in: int | None = None) -> None:
        """Change the state of `groups` in one transaction."""
        with self._env.begin(write=True) as txn:
            for group in groups:
                if (data := txn.get(_key(group))) is not None:
                    record = msgspec.structs.replace(_decoder.decode(data), state=state, trained_in=trained_in)
                    txn.put(_key(group), _encoder.encode(record))

    def get(self, group: int) -> GroupRecord | None:
        with self._env.begin() as txn:
            data = txn.get(_key(group))
        return None if data is None else _decoder.decode(data)

    def __iter__(self) -> Iterator[GroupRecord]:
        with self._env.begin() as txn:
            for _, data in txn.cursor():
                yield _decoder.decode(data)

    def sync(self) -> None:
        """Make everything so far durable."""
        self._env.sync(True)

    def close(self) -> None:
        self._env.sync(True)
        self._env.close()


def _key(group: int) -> bytes:
    return group.to_bytes(8, "big")
