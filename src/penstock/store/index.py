"""The experience pool's index: what became of every group, in LMDB, written by the controller alone.

Keys are big-endian group numbers. Commits reach the page cache at once (they survive any process) and the disk at
`sync` (called with every checkpoint).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import lmdb
import msgspec

from penstock.ports import GroupRecord, Shard
from penstock.types import NO_VERSION

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(GroupRecord)

_shard_decoder = msgspec.msgpack.Decoder(Shard)

HIGHEST_VERSION = b"highest_version"


class PoolUnreadable(RuntimeError):
    """The index is damaged."""

    self_explanatory = True
    hopeless = True


class PoolIndex:
    """Group number -> `GroupRecord`; the highest policy_version there ever was; what the dump is made of."""

    def __init__(self, directory: Path, *, map_bytes: int = 16 << 30, readonly: bool = False) -> None:
        """`readonly`: of a run that may be going on, in whatever process. Raises `PoolUnreadable`, or
        OSError for want of room."""
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / "index"
        self._readonly = readonly
        how = {"readonly": True} if readonly else {"sync": False, "metasync": False}
        try:
            self._env = lmdb.open(str(self._path), map_size=map_bytes, max_readers=64, max_dbs=3, **how)
            self._groups, self._facts, self._shards = (
                self._env.open_db(name, create=not readonly) for name in (b"groups", b"facts", b"shards")
            )
        except lmdb.Error as error:
            raise _full_disk(error) or self._unreadable(error) from error

    def put(self, records: Sequence[GroupRecord]) -> None:
        """Add or replace, in one transaction. The highest version is kept with them."""
        with self._env.begin(write=True) as txn:
            for record in records:
                txn.put(_key(record.group), _encoder.encode(record), db=self._groups)
            versions = [record.trained_in for record in records if record.trained_in is not None]
            if versions and max(versions) > self._highest(txn):
                txn.put(HIGHEST_VERSION, str(max(versions)).encode(), db=self._facts)

    def get(self, groups: Sequence[int]) -> list[GroupRecord]:
        """Those of `groups` that are known."""
        with self._env.begin() as txn:
            found = [txn.get(_key(group), db=self._groups) for group in groups]
        return [_decoder.decode(data) for data in found if data is not None]

    def put_shard(self, shard: Shard) -> None:
        """Add or replace a shard of the dump."""
        with self._env.begin(write=True) as txn:
            txn.put(shard.name.encode(), _encoder.encode(shard), db=self._shards)

    def shards(self) -> list[Shard]:
        """Of the dump, by name."""
        with self._env.begin() as txn:
            return [_shard_decoder.decode(data) for _, data in txn.cursor(self._shards)]

    @property
    def highest_version(self) -> int:
        """That anything was ever trained into; `NO_VERSION` if nothing was."""
        with self._env.begin() as txn:
            return self._highest(txn)

    def raise_version(self, policy_version: int) -> None:
        """There is such a version now, though nothing was trained into it yet."""
        with self._env.begin(write=True) as txn:
            if policy_version > self._highest(txn):
                txn.put(HIGHEST_VERSION, str(policy_version).encode(), db=self._facts)

    def _highest(self, txn: lmdb.Transaction) -> int:
        return int(txn.get(HIGHEST_VERSION, db=self._facts) or NO_VERSION)

    def __iter__(self) -> Iterator[GroupRecord]:
        """In the order of their numbers. Raises `PoolUnreadable`."""
        try:
            with self._env.begin() as txn:
                for _, data in txn.cursor(self._groups):
                    yield _decoder.decode(data)
        except (lmdb.Error, msgspec.MsgspecError) as error:
            raise self._unreadable(error) from error

    def _unreadable(self, error: Exception) -> PoolUnreadable:
        return PoolUnreadable(
            f"{self._path} cannot be read ({error}): move it away, and the run goes on from its newest checkpoint "
            "without what was played and not yet trained"
        )

    def sync(self) -> None:
        """Make everything so far durable."""
        self._env.sync(True)

    def close(self) -> None:
        if not self._readonly:
            self._env.sync(True)
        self._env.close()


def _full_disk(error: lmdb.Error) -> OSError | None:
    """What LMDB says in words, if that is it; nothing is damaged then."""
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    number = next((number for number in numbers if str(error).endswith(os.strerror(number))), None)
    return None if number is None else OSError(number, str(error))


def _key(group: int) -> bytes:
    return group.to_bytes(8, "big")
