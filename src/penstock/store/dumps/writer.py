"""Writes completed groups beside the loops: a table of all of them, or a few readable samples.

The table has each group exactly once, even if a process dies at any time. The pool's index stores the groups of a shard
before the shard is written, and marks the shard after that. The rows of a shard depend only on the pool. A target holds
a whole shard or nothing of it.

    controller died             the next controller finds, and does
    before the shard's plan     groups in no shard: it puts them into the next one
    between plan and mark       a shard without a mark: it writes the same rows again under the same name
    after the mark              nothing to do
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.deadline import warn_if_stalled
from penstock.ports.group_records import GroupRecord, Shard
from penstock.store.dumps.columns import DumpError, Row
from penstock.store.dumps.targets import Target
from penstock.store.dumps.trajectory_rows import RowMaker
from penstock.store.index import PoolIndex
from penstock.store.payload_files import PayloadError, PayloadReader, sync_files
from penstock.types import EpisodeState, GroupAttempt

PAUSES_S = (1.0, 4.0, 15.0)
"""Pauses before further attempts to write a shard."""
WRITE_S = 600.0
"""Seconds for one shard before a stall is reported: an object store may be slow."""
LAST_WRITE_S = 10.0
"""Limit of the wait for the current write when a run is stopped, before the pool is closed."""
SAMPLES = "step_*.jsonl"
"""Pattern of the sample files."""
BEHIND = 4
"""Maximum number of samples that wait to be written; further ones are skipped."""
KEPT = (EpisodeState.READY, EpisodeState.TRAINED, EpisodeState.FILTERED, EpisodeState.DISCARDED_STALE)
"""States of the groups that a training run dumps: all completed groups."""
COLLECTED = (EpisodeState.COLLECTED,)
"""States of the groups that a run without training dumps: all groups that no filter dropped."""

Payload = Mapping[str, Any]
"""Payload of a task."""
Payloads = Mapping[int, Payload]
"""Payloads of the tasks of groups, by group."""
Tell = Callable[..., None]
"""Records an event."""

T = TypeVar("T")


@dataclass(slots=True)
class Rendering:
    """Turns groups of the pool into rows of a target. Its methods block."""

    pool: Path
    maker: RowMaker
    target: Target

    def write(self, shard: Shard, records: Sequence[GroupRecord], payloads: Payloads, *, again: bool = False) -> Shard:
        """Write a shard, and return it with its counts and CPU seconds. Raises `DumpError`."""
        started, reader, misfits_before = time.thread_time(), PayloadReader(self.pool), self.maker.num_misfits
        rows = [row for record in records for row in self._rows(record, reader, payloads, shard.step)]
        if rows:
            self.target.write(shard.name, rows, again=again)
        cpu_s, num_misfits = time.thread_time() - started, self.maker.num_misfits - misfits_before
        return msgspec.structs.replace(shard, num_rows=len(rows), num_misfits=num_misfits, cpu_s=cpu_s)

    def _rows(self, record: GroupRecord, reader: PayloadReader, payloads: Payloads, step: int | None) -> list[Row]:
        assert record.ref is not None
        try:
            samples = reader.read(record.ref)
        except PayloadError as error:
            raise DumpError(f"the trajectories of group {record.group} are lost: {error}") from None
        return self.maker.rows(record, samples, payloads.get(record.group, {}), step=step)


class Dump:
    """A table of all completed groups. Implements `ports.Dump`."""

    def __init__(
        self,
        index: PoolIndex,
        rendering: Rendering,
        *,
        payload: Callable[[GroupRecord], Payload],
        rows_per_shard: int,
        trains: bool,
        tell: Tell,
    ) -> None:
        """`payload` is called on the event loop.

        If a shard cannot be written, a run that trains goes on with an alarm; a run without training ends. A resumed
        run writes the missing shards.
        """
        self._index, self._rendering, self._payload, self._tell = index, rendering, payload, tell
        self._rows_per_shard, self._trains = rows_per_shard, trains
        self._wanted = KEPT if trains else COLLECTED
        self._names: set[str] = set()
        self._pending: dict[GroupAttempt, int] = {}
        """Groups in no shard, with their number of rows."""
        self._num_pending_rows = 0
        self._unwritten: dict[str, Shard] = {}
        self._due: asyncio.Queue[tuple[Shard, bool] | None] = asyncio.Queue()
        self._finished = asyncio.Event()
        self._has_written = False
        """Whether this run has written a shard, with this controller or an earlier one."""
        self._has_told_misfit = False

    @property
    def unwritten(self) -> set[int]:
        """Return the groups of which the dump still needs the tokens."""
        planned = {group for shard in self._unwritten.values() for group, _ in shard.groups}
        return planned | {group for group, _ in self._pending}

    async def restore(self, records: AsyncIterable[GroupRecord]) -> None:
        """Continue the dump of an earlier controller from its groups."""
        shards = self._index.shards()
        self._names = {shard.name for shard in shards}
        known = {attempt for shard in shards for attempt in shard.groups}
        for shard in shards:
            self._has_written |= shard.written
            if not shard.written:
                self._put(shard, again=True)
        num_gone = 0
        async for record in records:
            if record.ref is None or record.state not in self._wanted or record.group_attempt in known:
                continue
            if self._is_there(record):
                self.add_group(record.group_attempt, EpisodeState(record.state), len(record.episodes))
            else:
                num_gone += 1
        if num_gone:
            self._tell("alarm", reason=f"the tokens of {num_gone} groups are gone: they are not in the dump")

    def _is_there(self, record: GroupRecord) -> bool:
        """Return whether the group's tokens still exist. A checkpoint that covers a trained group frees them."""
        assert record.ref is not None
        return not self._trains or (self._rendering.pool / record.ref.file).exists()

    def add_group(self, attempt: GroupAttempt, state: EpisodeState, num_rows: int) -> None:
        """Add a group that is in the pool."""
        if state not in self._wanted:
            return
        self._pending[attempt] = num_rows
        self._num_pending_rows += num_rows
        if not self._trains and self._num_pending_rows >= self._rows_per_shard:
            self._cut(None)

    def stepped(self, step: int) -> None:
        """Plan shards of the groups since the last optimizer step."""
        self._cut(step)

    def _cut(self, step: int | None) -> None:
        """Plan shards of all pending groups."""
        groups: list[GroupAttempt] = []
        num_rows = 0
        for attempt, rows in self._pending.items():
            groups.append(attempt)
            num_rows += rows
            if num_rows >= self._rows_per_shard:
                self._plan(groups, step)
                groups, num_rows = [], 0
        if groups:
            self._plan(groups, step)
        self._pending.clear()
        self._num_pending_rows = 0

    def _plan(self, groups: list[GroupAttempt], step: int | None) -> None:
        shard = Shard(name=self._new_name(step), groups=groups, step=step)
        self._index.put_shard(shard)
        self._put(shard, again=False)

    def _new_name(self, step: int | None) -> str:
        """Return an unused shard name. A repeated step adds shards to those from before."""
        number = 0 if step is not None else len(self._names)
        while (name := f"train/step_{step}.{number}" if step is not None else f"rollout/{number:06d}") in self._names:
            number += 1
        self._names.add(name)
        return name

    def _put(self, shard: Shard, *, again: bool) -> None:
        self._unwritten[shard.name] = shard
        self._due.put_nowait((shard, again))

    async def run(self) -> None:
        """Write shards until `finish`. Raises `DumpError`."""
        while due := await self._due.get():
            try:
                written = await self._write(*due)
            except Exception as error:  # of any type: a failed dump must not end training
                if not self._trains:
                    raise
                self._tell("alarm", reason=f"{_say(error)}; `penstock resume` writes it again")
                continue
            self._index.put_shard(msgspec.structs.replace(written, written=True))
            del self._unwritten[written.name]
            if not self._has_written and (unfilled := sorted(self._rendering.maker.unfilled)):
                reason = f"dump.columns {', '.join(unfilled)}: null in the whole of {written.name}; neither the task "
                self._tell("alarm", reason=f"{reason}nor the environment's info has such names")
            if written.num_misfits and not self._has_told_misfit:
                self._has_told_misfit = True
                self._tell("alarm", reason=f"{self._rendering.maker.misfit}: such values of environments become null")
            self._has_written = True
        self._finished.set()

    async def _write(self, shard: Shard, again: bool) -> Shard:
        """Write a shard, with a few more attempts: a store may be unreachable for a moment."""
        pauses_s = iter(PAUSES_S)
        while True:
            try:
                records = await in_thread(partial(_records, self._index, shard), shard.name, "the pool")
                payloads = await self._payloads(records)
                write = partial(self._write_now, shard, records, payloads, again)
                return await in_thread(write, shard.name, self._rendering.target.where)
            except DumpError:
                if (pause_s := next(pauses_s, None)) is None:
                    raise
            again = True
            await asyncio.sleep(pause_s)

    async def _payloads(self, records: Sequence[GroupRecord]) -> dict[int, Payload]:
        """Return the task payloads by group. This runs on the event loop, because the task source is not thread-safe.
        Other work runs between two groups."""
        payloads: dict[int, Payload] = {}
        for record in records:
            payloads[record.group] = self._payload(record)
            await asyncio.sleep(0)
        return payloads

    def _write_now(self, shard: Shard, records: Sequence[GroupRecord], payloads: Payloads, again: bool) -> Shard:
        """Write a shard, in a thread. First flush its groups and its plan to disk."""
        sync_files(self._rendering.pool, {record.ref.file for record in records if record.ref is not None})
        self._index.sync_index()
        return self._rendering.write(shard, records, payloads, again=again)

    async def finish(self) -> None:
        """Wait until every shard is written, except shards that failed.

        A run without training puts its remaining groups into a last shard. In a training run, groups after the last
        optimizer step stay in the pool only.
        """
        started = time.monotonic()
        if not self._trains:
            self._cut(None)
        self._due.put_nowait(None)
        where = self._rendering.target.where
        with warn_if_stalled(WRITE_S, waiter="the run", resource="the end of its dump", holder=where):
            await self._finished.wait()
        written = [shard for shard in self._index.shards() if shard.written]
        rows, cpu_s = sum(shard.num_rows for shard in written), sum(shard.cpu_s for shard in written)
        totals = {"shards": len(written), "rows": rows, "cpu_s": cpu_s, "unwritten": len(self._unwritten)}
        totals["misfits"] = sum(shard.num_misfits for shard in written)
        self._tell("dumped", url=where, **totals, waited_s=time.monotonic() - started)


class Samples:
    """Readable samples: one group for each optimizer step, of which the newest few are kept. Implements
    `ports.Dump`."""

    def __init__(self, index: PoolIndex, rendering: Rendering, *, directory: Path, keep: int, tell: Tell) -> None:
        """`directory`: the folder to which `rendering` writes its files."""
        self._index, self._rendering, self._tell = index, rendering, tell
        self._directory, self._keep = directory, keep
        self._chosen: GroupAttempt | None = None
        """The first group since the latest step, which is the next sample."""
        self._due: asyncio.Queue[Shard | None] = asyncio.Queue()
        self.unwritten: set[int] = set()
        """Always empty: the pool keeps no tokens for samples."""

    async def restore(self, records: AsyncIterable[GroupRecord]) -> None:
        """Keep the samples of an earlier controller as they are."""

    def add_group(self, attempt: GroupAttempt, state: EpisodeState, num_rows: int) -> None:
        """Choose the first completed group after a step as the next sample."""
        if state in KEPT:
            self._chosen = self._chosen or attempt

    def stepped(self, step: int) -> None:
        """Queue the chosen group as the sample of this step."""
        if self._chosen is not None and self._due.qsize() < BEHIND:
            self._due.put_nowait(Shard(name=f"step_{step:06d}", groups=[self._chosen], step=step))
        self._chosen = None

    async def run(self) -> None:
        """Write samples until `finish`."""
        while (shard := await self._due.get()) is not None:
            try:
                await in_thread(partial(self._write, shard), shard.name, str(self._directory))
            except Exception as error:  # of any type: a failed dump must not end training
                self._tell("alarm", reason=f"no sample of step {shard.step}: {_say(error)}")

    def _write(self, shard: Shard) -> None:
        self._rendering.write(shard, _records(self._index, shard), {})
        for old in sorted(self._directory.glob(SAMPLES))[: -self._keep]:
            old.unlink(missing_ok=True)

    async def finish(self) -> None:
        """End `run` after the queued samples, without waiting for them. The last samples may be missing."""
        self._due.put_nowait(None)


def _records(index: PoolIndex, shard: Shard) -> list[GroupRecord]:
    """Return the records of the shard's groups, except groups that are run again."""
    groups = dict(shard.groups)
    return [r for r in index.get_whole_groups(list(groups)) if r.ref is not None and r.attempt == groups[r.group]]


async def in_thread(write: Callable[[], T], shard: str, where: str) -> T:
    """Run `write` in a thread and return its result. A cancelled caller first waits for it, up to `LAST_WRITE_S`,
    because it uses the pool."""
    writing = asyncio.ensure_future(asyncio.to_thread(write))
    try:
        with warn_if_stalled(WRITE_S, waiter="the dump", resource=shard, holder=where):
            return await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing], timeout=LAST_WRITE_S)
        raise


def _say(error: Exception) -> str:
    return str(error) if isinstance(error, DumpError) else f"the dump failed: {error!r}"
