"""Writes what was played beside the loops: a table of everything, or a few trajectories to be read.

Exactly once, whoever dies whenever: the pool's index says which groups make a shard before the shard is written, and
that it is written after that. Its rows follow from the pool alone, and a target takes a shard whole or not at all.

    died                        what the next controller finds, and does
    before the shard's plan     groups in no shard: they go into the next one
    between plan and mark       a shard that is not marked: the same rows are written again under the same name
    after the mark              nothing to do
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec

from penstock.deadline import patient
from penstock.ports import GroupRecord, Shard
from penstock.store.dumps.columns import DumpError, Row
from penstock.store.dumps.rows import RowMaker
from penstock.store.dumps.targets import Target
from penstock.store.payload import PayloadError, PayloadReader, sync_files
from penstock.types import EpisodeState, GroupAttempt

PAUSES_S = (1.0, 4.0, 15.0)
"""Before a shard that could not be written is tried again."""
WRITE_S = 600.0
"""For one shard, before it is worth a report: an object store may be slow."""
LAST_WRITE_S = 10.0
"""For what is being written when a run is stopped, before the pool is closed under it."""
SAMPLES = "step_*.jsonl"
"""Files of what is kept to be read."""
BEHIND = 4
"""Samples that may wait to be written: more are passed over."""
KEPT = (EpisodeState.READY, EpisodeState.TRAINED, EpisodeState.FILTERED, EpisodeState.DISCARDED_STALE)
"""What a run that trains dumps: everything that was played to its end."""
COLLECTED = (EpisodeState.COLLECTED,)
"""What a run that only plays dumps: what no filter dropped."""

Payload = Mapping[str, Any]
"""Of a task."""
Tell = Callable[..., None]
"""Records an event."""

T = TypeVar("T")


class Books(Protocol):
    """The part of the pool that a dump rests on."""

    def get(self, groups: Sequence[int]) -> list[GroupRecord]: ...

    def shards(self) -> list[Shard]: ...

    def plan(self, shard: Shard) -> None:
        """Write down what the shard is made of."""
        ...

    def sync_index(self) -> None:
        """Make the plan durable. Blocks; may be called from a thread."""
        ...

    def written(self, shard: Shard) -> None:
        """It is where it belongs; `shard` says what that took."""
        ...


@dataclass(slots=True)
class Rendering:
    """From groups of the pool to rows of a target; blocks."""

    pool: Path
    maker: RowMaker
    target: Target

    def write(
        self, shard: Shard, records: Sequence[GroupRecord], payloads: Mapping[int, Payload], *, again: bool = False
    ) -> Shard:
        """Returns it with what that took; `payloads` are those of the groups' tasks. Raises `DumpError`."""
        started, reader = time.thread_time(), PayloadReader(self.pool)
        rows = [row for record in records for row in self._rows(record, reader, payloads, shard.step)]
        if rows:
            self.target.write(shard.name, rows, again=again)
        cpu_s = time.thread_time() - started
        return msgspec.structs.replace(shard, num_rows=len(rows), cpu_s=cpu_s)

    def _rows(
        self, record: GroupRecord, reader: PayloadReader, payloads: Mapping[int, Payload], step: int | None
    ) -> list[Row]:
        assert record.ref is not None
        try:
            samples = reader.read(record.ref)
        except PayloadError as error:
            raise DumpError(f"the trajectories of group {record.group} are lost: {error}") from None
        return self.maker.rows(record, samples, payloads.get(record.group, {}), step=step)


@dataclass(slots=True)
class Totals:
    """Of what is written, earlier lives of the run included."""

    shards: int = 0
    rows: int = 0
    cpu_s: float = 0.0

    def add(self, shard: Shard) -> None:
        self.shards += 1
        self.rows += shard.num_rows
        self.cpu_s += shard.cpu_s


class _Due(NamedTuple):
    """A shard that is to be written."""

    shard: Shard
    again: bool


class Dump:
    """`ports.Dump`: a table of everything that was played."""

    def __init__(
        self,
        books: Books,
        rendering: Rendering,
        *,
        payload: Callable[[GroupRecord], Payload],
        rows_per_shard: int,
        trains: bool,
        tell: Tell,
    ) -> None:
        """`payload` is called on the event loop. A run that trains goes on if a shard cannot be written, with an alarm;
        for one that only plays it is the end. What is left unwritten is written when the run is resumed."""
        self._books, self._rendering, self._payload, self._tell = books, rendering, payload, tell
        self._rows_per_shard, self._trains = rows_per_shard, trains
        self._wanted = KEPT if trains else COLLECTED
        self._names: set[str] = set()
        self._pending: dict[GroupAttempt, int] = {}
        """Groups that are in no shard, with their number of rows."""
        self._num_pending_rows = 0
        self._unwritten: dict[str, Shard] = {}
        self._due: asyncio.Queue[_Due | None] = asyncio.Queue()
        self._finished = asyncio.Event()
        self._totals = Totals()

    @property
    def unwritten(self) -> set[int]:
        """Groups whose tokens are still needed."""
        planned = {group for shard in self._unwritten.values() for group, _ in shard.groups}
        return planned | {group for group, _ in self._pending}

    def take_up(self, records: Iterable[GroupRecord]) -> None:
        """Go on where another controller was."""
        shards = self._books.shards()
        self._names = {shard.name for shard in shards}
        known = {attempt for shard in shards for attempt in shard.groups}
        for shard in shards:
            if shard.written:
                self._totals.add(shard)
            else:
                self._put(shard, again=True)
        num_gone = 0
        for record in records:
            if record.ref is None or record.state not in self._wanted or record.group_attempt in known:
                continue
            if self._is_there(record):
                self.played(record.group_attempt, EpisodeState(record.state), len(record.episodes))
            else:
                num_gone += 1
        if num_gone:
            self._tell("alarm", reason=f"the tokens of {num_gone} groups are gone: they are not in the dump")

    def _is_there(self, record: GroupRecord) -> bool:
        """Checkpoints that cover a trained group let go of its tokens."""
        assert record.ref is not None
        return not self._trains or (self._rendering.pool / record.ref.file).exists()

    def played(self, attempt: GroupAttempt, state: EpisodeState, num_rows: int) -> None:
        """A group is in the pool."""
        if state not in self._wanted:
            return
        self._pending[attempt] = num_rows
        self._num_pending_rows += num_rows
        if not self._trains and self._num_pending_rows >= self._rows_per_shard:
            self._cut(None)

    def stepped(self, step: int) -> None:
        """An optimizer step was taken: what was played since the last one makes its shards."""
        self._cut(step)

    def _cut(self, step: int | None) -> None:
        """Plan shards of all that is pending."""
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
        self._books.plan(shard)
        self._put(shard, again=False)

    def _new_name(self, step: int | None) -> str:
        """Numbers go on: a step that is taken again adds to what was written of it."""
        number = 0 if step is not None else len(self._names)
        while (name := f"train/step_{step}.{number}" if step is not None else f"rollout/{number:06d}") in self._names:
            number += 1
        self._names.add(name)
        return name

    def _put(self, shard: Shard, *, again: bool) -> None:
        self._unwritten[shard.name] = shard
        self._due.put_nowait(_Due(shard, again))

    async def run(self) -> None:
        """Write shard after shard, until `finish`. Raises `DumpError`."""
        while due := await self._next():
            try:
                written = await self._write(due)
            except Exception as error:  # whatever it is: training does not end by it
                if not self._trains:
                    raise
                self._tell("alarm", reason=f"{_say(error)}; `penstock resume` writes it again")
                continue
            self._books.written(written)
            del self._unwritten[written.name]
            self._totals.add(written)
            if self._totals.shards == 1 and (unfilled := sorted(self._rendering.maker.unfilled)):
                reason = f"dump.columns {', '.join(unfilled)}: null in the whole of {written.name}; neither the task "
                self._tell("alarm", reason=f"{reason}nor the environment's info has such names")
        self._finished.set()

    async def _next(self) -> _Due | None:
        return await self._due.get()

    async def _write(self, due: _Due) -> Shard:
        """With a few more tries: a store may be out of reach for a moment."""
        shard, again, pauses_s = due.shard, due.again, iter(PAUSES_S)
        while True:
            try:
                records = self._records(shard)
                payloads = await self._payloads(records)
                write = partial(self._write_now, shard, records, payloads, again)
                return await in_thread(write, shard.name, self._rendering.target.where)
            except DumpError:
                if (pause_s := next(pauses_s, None)) is None:
                    raise
            again = True
            await asyncio.sleep(pause_s)

    def _records(self, shard: Shard) -> list[GroupRecord]:
        """Of its groups, but for those that are played anew."""
        numbers = dict(shard.groups)
        return [r for r in self._books.get(list(numbers)) if r.ref is not None and r.attempt == numbers[r.group]]

    async def _payloads(self, records: Sequence[GroupRecord]) -> dict[int, Payload]:
        """By group. The source of tasks is the loop's, and no thread's; others have their turn between two of them."""
        payloads: dict[int, Payload] = {}
        for record in records:
            payloads[record.group] = self._payload(record)
            await asyncio.sleep(0)
        return payloads

    def _write_now(
        self, shard: Shard, records: Sequence[GroupRecord], payloads: Mapping[int, Payload], again: bool
    ) -> Shard:
        """In a thread. What a shard is made of is on disk before the shard is anywhere."""
        sync_files(self._rendering.pool, {record.ref.file for record in records if record.ref is not None})
        self._books.sync_index()
        return self._rendering.write(shard, records, payloads, again=again)

    async def finish(self) -> None:
        """Every shard is written, but for those that could not be. A run that only plays makes its last one of what is
        in none; of training, what no optimizer step followed stays in the pool."""
        started = time.monotonic()
        if not self._trains:
            self._cut(None)
        self._due.put_nowait(None)
        with patient(WRITE_S, waiter="the run", resource="the end of its dump", holder=self._rendering.target.where):
            await self._finished.wait()
        self._tell(
            "dumped",
            url=self._rendering.target.where,
            **asdict(self._totals),
            unwritten=len(self._unwritten),
            waited_s=time.monotonic() - started,
        )


class Samples:
    """`ports.Dump`: of every optimizer step one group, to be read; the newest few are kept."""

    def __init__(self, books: Books, rendering: Rendering, *, directory: Path, keep: int, tell: Tell) -> None:
        """`directory`: where `rendering` writes its files."""
        self._books, self._rendering, self._tell = books, rendering, tell
        self._directory, self._keep = directory, keep
        self._chosen: GroupAttempt | None = None
        """The first group since the latest step."""
        self._due: asyncio.Queue[Shard | None] = asyncio.Queue()
        self.unwritten: set[int] = set()
        """Nobody waits for a sample."""

    def take_up(self, records: Iterable[GroupRecord]) -> None:
        """Samples of an earlier controller stay as they are."""

    def played(self, attempt: GroupAttempt, state: EpisodeState, num_rows: int) -> None:
        """A group is in the pool; the first one after a step is the sample of the next."""
        if state in KEPT:
            self._chosen = self._chosen or attempt

    def stepped(self, step: int) -> None:
        """An optimizer step was taken."""
        if self._chosen is not None and self._due.qsize() < BEHIND:
            self._due.put_nowait(Shard(name=f"step_{step:06d}", groups=[self._chosen], step=step))
        self._chosen = None

    async def run(self) -> None:
        """Write sample after sample, until `finish`."""
        while (shard := await self._next()) is not None:
            try:
                await in_thread(partial(self._write, shard), shard.name, str(self._directory))
            except Exception as error:  # whatever it is: training does not end by it
                self._tell("alarm", reason=f"no sample of step {shard.step}: {_say(error)}")

    async def _next(self) -> Shard | None:
        return await self._due.get()

    def _write(self, shard: Shard) -> None:
        (wanted,) = shard.groups
        records = [r for r in self._books.get([wanted.group]) if r.ref is not None and r.group_attempt == wanted]
        self._rendering.write(shard, records, {})
        for old in sorted(self._directory.glob(SAMPLES))[: -self._keep]:
            old.unlink(missing_ok=True)

    async def finish(self) -> None:
        """The last ones may be missing."""
        self._due.put_nowait(None)


async def in_thread(write: Callable[[], T], shard: str, where: str) -> T:
    """What it returns. Whoever is cancelled waits for it, within bounds: it uses the pool."""
    writing = asyncio.ensure_future(asyncio.to_thread(write))
    try:
        with patient(WRITE_S, waiter="the dump", resource=shard, holder=where):
            return await asyncio.shield(writing)
    except asyncio.CancelledError:
        await asyncio.wait([writing], timeout=LAST_WRITE_S)
        raise


def _say(error: Exception) -> str:
    return str(error) if isinstance(error, DumpError) else f"the dump failed: {error!r}"
