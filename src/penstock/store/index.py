"""The index of the experience pool: the state of every group, in LMDB. Only the controller writes it.

Keys are big-endian group numbers. A commit reaches the page cache at once, where it survives the death of any process.
It reaches the disk at `sync`, which is called with every checkpoint.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import lmdb
import msgspec

from penstock.alarms import HopelessError
from penstock.config import ConfigError
from penstock.own_files import check_own_directory, open_plain
from penstock.ports.group_records import GroupRecord, Shard
from penstock.types import NO_VERSION, EpisodeId, EpisodeSummary
from penstock.version_history import VersionHistory


class _Numbers(EpisodeSummary, frozen=True, kw_only=True, rename={"error": "-", "text": "--", "info": "---"}):
    """The numbers of a stored summary. The decoder skips error, text and info, which may be large."""

    error: str | None = None
    text: str | None = None
    info: dict[str, Any] = msgspec.field(default_factory=dict)


class _NumbersRecord(GroupRecord, frozen=True, kw_only=True):
    episodes: list[_Numbers] = msgspec.field(default_factory=list)  # type: ignore[assignment]  # lists are invariant


class _RawRecord(GroupRecord, frozen=True, kw_only=True):
    """A record with its episodes in stored form, so that they can be copied without being decoded."""

    episodes: msgspec.Raw = msgspec.Raw(b"\x90")  # type: ignore[assignment]


class EpisodeOutline(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a table of groups shows of an episode."""

    episode: EpisodeId
    reward: float = 0.0


class GroupOutline(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What a table of groups shows of a `GroupRecord`. It takes a third of the time to decode."""

    group: int
    task_id: str
    episodes: list[EpisodeOutline] = []
    state: str = "pending"


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(GroupRecord)
_outline_decoder = msgspec.msgpack.Decoder(GroupOutline)
_numbers_decoder = msgspec.msgpack.Decoder(_NumbersRecord)
_raw_decoder = msgspec.msgpack.Decoder(_RawRecord)

_shard_decoder = msgspec.msgpack.Decoder(Shard)
_history_decoder = msgspec.msgpack.Decoder(VersionHistory)

DATA, LOCK = "data.mdb", "lock.mdb"
META_AT = 16
"""Bytes of the head of a page."""
META = struct.Struct("<I20xI36xQ4x36xQ8xQ")
MAGIC, NO_PAGE = 0xBEEFC0DE, 2**64 - 1
MIN_PAGE_BYTES, MAX_PAGE_BYTES = 256, 65_536
HIGHEST_VERSION, HISTORY = b"highest_version", b"version_history"

Record = TypeVar("Record", bound=GroupRecord)


class PoolUnreadable(HopelessError):
    """The index is damaged."""


class PoolIndex:
    """Map of group number -> `GroupRecord`, with the highest policy_version so far and the shards of the dump."""

    def __init__(self, directory: Path, *, map_bytes: int = 1 << 38, readonly: bool = False) -> None:
        """`readonly`: for the index of a run that another process may still write.

        Raises `PoolUnreadable`, or OSError if the disk is full.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._path = directory, directory / "index"
        self._readonly = readonly
        how = {"readonly": True} if readonly else {"sync": False, "metasync": False}
        if not readonly:
            # A user who can read the lock file can also lock it. Then the owner of the run cannot open the index.
            self._path.mkdir(exist_ok=True)
            self._path.chmod(0o700)
        self._check_size()
        try:
            self._env = lmdb.open(str(self._path), map_size=map_bytes, max_readers=64, max_dbs=3, **how)
            names = (b"groups", b"facts", b"shards")
            self._groups, self._facts, self._shards = (self._env.open_db(name, create=not readonly) for name in names)
        except lmdb.Error as error:
            raise _full_disk(error) or self._unreadable(error) from error

    def _check_size(self) -> None:
        """Raise `PoolUnreadable` if the file lacks pages that it says it has. LMDB would end the process (SIGBUS)."""
        try:
            with open_plain(self._path / DATA) as file:
                heads, size = file.read(2 * MAX_PAGE_BYTES), os.fstat(file.fileno()).st_size
        except FileNotFoundError:
            return
        needed = _needed_bytes(heads)
        if size < needed:
            raise self._unreadable(f"{DATA} has {size} bytes and needs at least {needed}")

    def put(self, records: Sequence[GroupRecord]) -> None:
        """Add or replace records, and update the highest version, in one transaction."""
        with self._env.begin(write=True) as txn:
            for record in records:
                txn.put(_key(record.group), _encoder.encode(record), db=self._groups)
            versions = [record.trained_in for record in records if record.trained_in is not None]
            self._raise_version(txn, max(versions, default=NO_VERSION))

    def change(self, groups: Sequence[int], change: Callable[[GroupRecord], GroupRecord]) -> None:
        """Replace the records of `groups` by the results of `change`. The episodes of these records are not decoded, so
        `change` can neither read nor replace them."""
        self.put([change(record) for record in self._get(groups, _raw_decoder)])

    def get_groups(self, groups: Sequence[int]) -> list[GroupRecord]:
        """Return the records of those `groups` that are known, without errors, texts and info of their episodes."""
        return self._get(groups, _numbers_decoder)

    def get_whole_groups(self, groups: Sequence[int]) -> list[GroupRecord]:
        """Return the complete records of those `groups` that are known. This may take seconds, so call it in a
        thread."""
        return self._get(groups, _decoder)

    def _get(self, groups: Sequence[int], decoder: msgspec.msgpack.Decoder[Record]) -> list[GroupRecord]:
        with self._env.begin() as txn:
            found = [txn.get(_key(group), db=self._groups) for group in groups]
        return [decoder.decode(data) for data in found if data is not None]

    def put_shard(self, shard: Shard) -> None:
        """Add or replace a shard of the dump."""
        with self._env.begin(write=True) as txn:
            txn.put(shard.name.encode(), _encoder.encode(shard), db=self._shards)

    def shards(self) -> list[Shard]:
        """Return the shards of the dump, sorted by name."""
        with self._env.begin() as txn:
            return [_shard_decoder.decode(data) for _, data in txn.cursor(self._shards)]

    @property
    def highest_version(self) -> int:
        """Return the highest policy version ever recorded; `NO_VERSION` if there is none."""
        with self._env.begin() as txn:
            return self._highest(txn)

    @property
    def history(self) -> VersionHistory:
        """Return the versions that were restored."""
        with self._env.begin() as txn:
            return self._history(txn)

    def raise_version(self, policy_version: int, *, weights_of: int) -> None:
        """Record that this version exists, even if no group was trained into it yet, and that it has the weights of
        `weights_of`: an earlier version, or itself."""
        with self._env.begin(write=True) as txn:
            self._raise_version(txn, policy_version)
            if weights_of != policy_version:
                history = self._history(txn).with_restored(policy_version, weights_of=weights_of)
                txn.put(HISTORY, _encoder.encode(history), db=self._facts)

    def _history(self, txn: lmdb.Transaction) -> VersionHistory:
        return _history_decoder.decode(found) if (found := txn.get(HISTORY, db=self._facts)) else VersionHistory()

    def _raise_version(self, txn: lmdb.Transaction, policy_version: int) -> None:
        if policy_version > self._highest(txn):
            txn.put(HIGHEST_VERSION, str(policy_version).encode(), db=self._facts)

    def _highest(self, txn: lmdb.Transaction) -> int:
        return int(txn.get(HIGHEST_VERSION, db=self._facts) or NO_VERSION)

    def records(self) -> Iterator[GroupRecord]:
        """Yield all records in the order of group numbers, without errors, texts and info of their episodes.

        Raises `PoolUnreadable`.
        """
        try:
            with self._env.begin() as txn:
                for _, data in txn.cursor(self._groups):
                    yield _numbers_decoder.decode(data)
        except (lmdb.Error, msgspec.MsgspecError, RecursionError) as error:
            raise self._unreadable(error) from error

    def outlines(self, *, first: int = 0) -> Iterator[GroupOutline]:
        """Yield the outlines of all groups from number `first` on, in the order of their numbers.

        Raises `PoolUnreadable`.
        """
        try:
            with self._env.begin() as txn, txn.cursor(self._groups) as cursor:
                if cursor.set_range(_key(first)):
                    for data in cursor.iternext(keys=False):
                        yield _outline_decoder.decode(data)
        except (lmdb.Error, msgspec.MsgspecError, RecursionError) as error:
            raise self._unreadable(error) from error

    @property
    def file(self) -> tuple[int, int]:
        """Return device and inode of the index: another index at the same place has others."""
        found = (self._path / DATA).stat()
        return found.st_dev, found.st_ino

    @property
    def num_groups(self) -> int:
        with self._env.begin() as txn:
            return int(txn.stat(self._groups)["entries"])

    @property
    def revision(self) -> int:
        """Return a number that rises with every change of the index."""
        return int(self._env.info()["last_txnid"])

    def _unreadable(self, error: Exception | str) -> PoolUnreadable:
        return PoolUnreadable(
            f"{self._path} cannot be read ({error}): move it away. The run then continues from its newest checkpoint, "
            "without the groups that were completed and not yet trained"
        )

    def sync_index(self) -> None:
        """Flush all commits to disk. May be called from a thread."""
        self._env.sync(True)

    def close(self) -> None:
        if not self._readonly:
            self._env.sync(True)
        self._env.close()


def read_groups(run_dir: Path, *, setting: str) -> Iterator[GroupRecord]:
    """Yield the records of a run's groups, as `PoolIndex.records` does; another process may still write them. `setting`
    names the run in errors.

    Raises `ConfigError` if the run has no index, and `PoolUnreadable`.
    """
    with open_index(run_dir, setting=setting) as index:
        yield from index.records()


@contextmanager
def open_index(run_dir: Path, *, setting: str) -> Iterator[PoolIndex]:
    """Yield the index of a run, to read it; another process may still write it. LMDB allows a process to open an index
    once at a time. `setting` names the run in errors.

    Raises `ConfigError` if the run has no index, and `PoolUnreadable`.
    """
    if not (run_dir / "pool" / "index").is_dir():
        raise ConfigError(f"{setting}: {run_dir} is not the directory of a run: it has no pool/index")
    try:
        _check_owner(run_dir)
    except OSError as error:
        raise ConfigError(f"{setting}: {error}") from None
    with closing(PoolIndex(run_dir / "pool", readonly=True)) as index:
        yield index


def _check_owner(run_dir: Path) -> None:
    """Raise OSError unless the index is ours. LMDB writes to its lock file even for a reader, through links too, and it
    waits for locks that another user may hold for ever."""
    for directory in (run_dir, run_dir / "pool", run_dir / "pool" / "index"):
        check_own_directory(directory)
    for name in (DATA, LOCK):
        with suppress(FileNotFoundError), open_plain(run_dir / "pool" / "index" / name, ours=True):
            pass


def _needed_bytes(heads: bytes) -> int:
    """Return how many bytes an LMDB file needs for the roots of its trees, by its meta page with the newer transaction.
    Return 0 if `heads`, its first two pages, hold none. The layout is that of `MDB_meta` in LMDB's `mdb.c`, 64 bits."""
    found = []
    page_bytes = 0
    for number in (0, 1):
        meta = heads[number * page_bytes + META_AT :]
        if len(meta) < META.size:
            break
        magic, page_bytes, free_root, main_root, transaction = META.unpack_from(meta)
        if magic != MAGIC or not MIN_PAGE_BYTES <= page_bytes <= MAX_PAGE_BYTES:
            break
        roots = [root for root in (free_root, main_root) if root != NO_PAGE]
        found.append((transaction, (max(roots, default=1) + 1) * page_bytes))
    return max(found, default=(0, 0))[1]


def _full_disk(error: lmdb.Error) -> OSError | None:
    """Return an LMDB error as OSError if it means a full disk, else None. A full disk does not damage the index."""
    numbers = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    number = next((number for number in numbers if str(error).endswith(os.strerror(number))), None)
    return None if number is None else OSError(number, str(error))


def _key(group: int) -> bytes:
    return group.to_bytes(8, "big")
