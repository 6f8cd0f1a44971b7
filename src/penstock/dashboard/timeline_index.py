"""What timeline.jsonl holds, without its text: the spans as columns, which deciders a range of lines has, and why
groups were dropped.

Complete blocks of about a mebibyte of text are kept in a file (`block_file.py`), the newer lines in memory. While an
old run is read for the first time, the end of its file is read apart, so that its last minutes are visible at once.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.dashboard.block_file import Block, BlockFile
from penstock.dashboard.drops import DECIDERS, KEPT, MAX_REASON, MOST_GROUPS, DropLine, Drops
from penstock.dashboard.growing_file import GrowingFile, Lines

Floats = npt.NDArray[np.float64]
Lane = tuple[str, str]
"""Process and kind of spans."""

BLOCK_BYTES = 1 << 20
"""Bytes of text that a block describes, at least."""
PIECE_BYTES = 1 << 19
"""Bytes that are decoded without a pause."""
LAST_BYTES = 4 << 20
"""Bytes at the end of a file that are read apart, while it is not read up to there."""
NO_VERSION = -1
MOST_LANES = 65_535
SPAN_BYTES = 26
"""Bytes of a span in the columns of a block."""
LATEST_S = 1e11
"""Times after this are damaged."""

_drops_decoder = msgspec.msgpack.Decoder(list[DropLine])


class TimelineLine(msgspec.Struct):
    """The fields of a line that the index needs: those of a span, or of a decision."""

    kind: str
    process: str = ""
    start: float = np.nan
    end: float = np.nan
    policy_version: int = NO_VERSION
    decider: str = ""
    time: float = np.nan
    group: Any = None
    reason: Any = None


class BlockOfLines(msgspec.Struct):
    """The header of a block. Its columns: starts and ends of the spans (float64), their policy versions (int64), and
    the places of their lanes (uint16); then the decisions by which groups were dropped (msgpack)."""

    begin: int
    end: int
    """Bytes of timeline.jsonl."""
    num_spans: int
    first: float
    """The earliest start of a span, in seconds since the epoch; infinity without spans."""
    last: float
    """The latest end of a span; minus infinity without spans."""
    lanes: list[Lane]
    deciders: dict[str, int]
    """Number of decisions."""
    lowest_group: int
    highest_group: int
    """Groups of the decisions; the lowest is above the highest if there are none."""
    num_damaged: int
    num_drop_bytes: int


@dataclass(slots=True)
class Spans:
    """Spans as columns of the same length."""

    start: Floats
    end: Floats
    """Seconds since the epoch."""
    policy_version: npt.NDArray[np.int64]
    lane: npt.NDArray[np.uint16]
    """Place in `lanes`."""
    lanes: Sequence[Lane]


@dataclass(slots=True)
class Gathered:
    """Lines that are not in a block yet."""

    begin: int
    end: int
    starts: list[float] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    lane_of: list[int] = field(default_factory=list)
    lanes: dict[Lane, int] = field(default_factory=dict)
    deciders: Counter[str] = field(default_factory=Counter)
    lowest_group: int = 1 << 62
    highest_group: int = -1
    num_damaged: int = 0
    drops: list[DropLine] = field(default_factory=list)

    def add(self, records: Sequence[TimelineLine]) -> None:
        """Take decoded lines."""
        for record in records:
            if record.kind == "decision":
                self._add_decision(record)
            elif record.start <= record.end < LATEST_S and abs(record.policy_version) < 1 << 62:
                lane = self.lanes.setdefault((record.process, record.kind), len(self.lanes))
                if lane < MOST_LANES:
                    self.starts.append(record.start)
                    self.ends.append(record.end)
                    self.versions.append(record.policy_version)
                    self.lane_of.append(lane)
            else:
                self.num_damaged += 1

    def _add_decision(self, record: TimelineLine) -> None:
        self.deciders[record.decider] += 1
        if type(record.group) is int:
            self.lowest_group = min(self.lowest_group, record.group)
            self.highest_group = max(self.highest_group, record.group)
            is_drop = record.decider in DECIDERS and isinstance(record.reason, str) and record.reason != KEPT
            if is_drop and abs(record.group) < MOST_GROUPS:
                self.drops.append((record.group, record.reason[:MAX_REASON], record.decider == "retry"))

    def spans(self) -> Spans:
        """Return the spans as columns."""
        return Spans(
            start=np.array(self.starts, dtype=np.float64),
            end=np.array(self.ends, dtype=np.float64),
            policy_version=np.array(self.versions, dtype=np.int64),
            lane=np.array(self.lane_of, dtype=np.uint16),
            lanes=list(self.lanes)[:MOST_LANES],
        )

    def header(self, *, num_drop_bytes: int = 0) -> BlockOfLines:
        """Return the header of the block of these lines."""
        return BlockOfLines(
            begin=self.begin,
            end=self.end,
            num_spans=len(self.starts),
            first=min(self.starts, default=np.inf),
            last=max(self.ends, default=-np.inf),
            lanes=list(self.lanes)[:MOST_LANES],
            deciders=dict(self.deciders),
            lowest_group=min(self.lowest_group, (1 << 63) - 1),
            highest_group=min(self.highest_group, (1 << 63) - 1),
            num_damaged=self.num_damaged,
            num_drop_bytes=num_drop_bytes,
        )


class TimelineIndex:
    """The spans and decisions of one run. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self.file = GrowingFile(run_dir / "timeline.jsonl")
        self._lines = Lines(TimelineLine)
        self._blocks = BlockFile(run_dir, "timeline", self.file, BlockOfLines)
        self._lock = threading.RLock()
        self._begin()
        if self._newest.end > self.file.size:
            self._start_again()

    def _begin(self) -> None:
        headers = [block.header for block in self._blocks.blocks]
        end = headers[-1].end if headers else 0
        self._newest = Gathered(begin=end, end=end)
        self._apart: Gathered | None = None
        """Lines at the end of the file, while it is not read up to there."""
        self._drops: Drops | None = None
        """What is read of the groups that were dropped; None before it is asked for."""

    def _start_again(self) -> None:
        self._blocks.clear()
        self._begin()

    @property
    def unread(self) -> int:
        """Return how many bytes of the file are not read yet."""
        return max(self.file.size - self._newest.end, 0)

    @property
    def indexed(self) -> float:
        """Return the share of the file that is read, at most 1."""
        unread, end = self.unread, self._newest.end
        return end / (end + unread) if unread > PIECE_BYTES else 1.0

    @property
    def warnings(self) -> list[str]:
        """Return what could not be read."""
        with self._lock:
            num_damaged = sum(block.header.num_damaged for block in self._blocks.blocks) + self._newest.num_damaged
        return [f"timeline.jsonl: {num_damaged} damaged lines"] if num_damaged else []

    def update(self) -> bool:
        """Read the next piece of the file; return whether there was one."""
        with self._lock:
            if self.file.is_replaced(self._newest.end):
                self._start_again()
            data = self.file.whole_lines(self._newest.end, PIECE_BYTES)
            if not data:
                return False
            num_drops = len(self._newest.drops)
            self._gather(self._newest, data)
            if self._drops is not None:
                self._drops.add(self._newest.drops[num_drops:])
            if self._newest.end - self._newest.begin >= BLOCK_BYTES:
                self._write_block()
            return True

    def _gather(self, gathered: Gathered, data: bytes) -> None:
        records, num_damaged = self._lines.decode(data)
        gathered.add(records)
        gathered.num_damaged += num_damaged
        gathered.end += len(data)

    def _write_block(self) -> None:
        newest, spans, drops = self._newest, self._newest.spans(), msgspec.msgpack.encode(self._newest.drops)
        columns = [each.tobytes() for each in (spans.start, spans.end, spans.policy_version, spans.lane)]
        self._blocks.append(newest.header(num_drop_bytes=len(drops)), b"".join([*columns, drops]))
        self._newest = Gathered(begin=newest.end, end=newest.end)

    def spans(self, begin: float, end: float) -> Iterator[Spans]:
        """Yield the spans that overlap with the window, and others, block by block."""
        with self._lock:
            blocks = [each for each in self._blocks.blocks if each.header.first <= end and each.header.last >= begin]
            newest = [gathered.spans() for gathered in self._unwritten()]
        for block in blocks:
            yield self._spans_of(block)
        yield from newest

    @property
    def extent(self) -> tuple[float, float] | None:
        """Return the earliest start and the latest end of a span; None without spans."""
        with self._lock:
            headers = [block.header for block in self._blocks.blocks] + [each.header() for each in self._unwritten()]
        headers = [header for header in headers if header.num_spans]
        if not headers:
            return None
        return min(header.first for header in headers), max(header.last for header in headers)

    @property
    def lanes(self) -> list[Lane]:
        """Return all lanes."""
        with self._lock:
            headers = [block.header for block in self._blocks.blocks] + [each.header() for each in self._unwritten()]
        return list(dict.fromkeys((process, kind) for header in headers for process, kind in header.lanes))

    @property
    def deciders(self) -> dict[str, int]:
        """Return the number of decisions by decider, as far as the file is read."""
        with self._lock:
            counts: Counter[str] = Counter()
            for block in self._blocks.blocks:
                counts.update(block.header.deciders)
            for gathered in self._unwritten():
                counts.update(gathered.deciders)
        return dict(counts)

    @property
    def drops(self) -> Drops:
        """Return why groups were dropped, as far as the file is read without a gap."""
        with self._lock:
            if self._drops is None:
                self._drops = Drops()
                for block in self._blocks.blocks:
                    self._drops.add(self._drops_of(block))
                self._drops.add(self._newest.drops)
            return self._drops

    def may_have(self, *, decider: str | None, group: int | None) -> list[tuple[int, int, bool]]:
        """Return the ranges of bytes that are indexed, in order, each with whether it may have a decision of a decider
        about a group."""
        with self._lock:
            headers = [block.header for block in self._blocks.blocks]
        return [
            (
                header.begin,
                header.end,
                (not decider or decider in header.deciders)
                and (group is None or header.lowest_group <= group <= header.highest_group),
            )
            for header in headers
        ]

    def close(self) -> None:
        """Close the file of blocks."""
        with self._lock:
            self._blocks.close()

    def _unwritten(self) -> list[Gathered]:
        """Return the newest lines, and those at the end of the file if it is not read up to there."""
        if self.unread <= PIECE_BYTES:
            self._apart = None
            return [self._newest]
        if self._apart is None or self._apart.begin < self._newest.end:
            size = self.file.size
            at, _ = self.file.first_line_after(max(self._newest.end, size - LAST_BYTES))
            self._apart = Gathered(begin=at, end=at)
        while data := self.file.whole_lines(self._apart.end, LAST_BYTES):
            self._gather(self._apart, data)
        return [self._newest, self._apart]

    def _spans_of(self, block: Block[BlockOfLines]) -> Spans:
        num_spans = block.header.num_spans
        data = self._blocks.read(block, 0, num_spans * SPAN_BYTES)
        return Spans(
            start=np.frombuffer(data, np.float64, num_spans),
            end=np.frombuffer(data, np.float64, num_spans, num_spans * 8),
            policy_version=np.frombuffer(data, np.int64, num_spans, num_spans * 16),
            lane=np.frombuffer(data, np.uint16, num_spans, num_spans * 24),
            lanes=[(process, kind) for process, kind in block.header.lanes],
        )

    def _drops_of(self, block: Block[BlockOfLines]) -> list[DropLine]:
        header = block.header
        with suppress(OSError, msgspec.MsgspecError):  # a damaged index says less
            return _drops_decoder.decode(self._blocks.read(block, header.num_spans * SPAN_BYTES, header.num_drop_bytes))
        return []
