"""The decisions of a run in pages, the newest first, read backwards from timeline.jsonl."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.dashboard.growing_file import Lines
from penstock.dashboard.timeline_index import TimelineIndex

Record = dict[str, Any]

PIECE_BYTES = 1 << 18
MOST_BYTES = 1 << 26
"""Bytes that are searched for one page. A page may have fewer decisions than it could, and the next one continues."""


class AnyDecision(msgspec.Struct):
    """The fields that every decision has."""

    kind: str
    decider: str
    time: float
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which decisions are wanted; None wants all."""

    decider: str | None = None
    group: int | None = None
    text: str | None = None
    """Text that the line must contain. The case of ASCII letters does not matter."""

    def lines_of(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the lines of whole lines that may be wanted, the last one first, each with its offset."""
        lowered = None if self.text is None else data.lower()
        searched = data if lowered is None else lowered
        end = len(data)
        while (place := searched.rfind(self._needle, 0, end)) >= 0:
            begin, stop = data.rfind(b"\n", 0, place) + 1, data.find(b"\n", place)
            yield begin, data[begin : stop if stop >= 0 else len(data)]
            end = begin

    def wants(self, line: Record) -> bool:
        """Return whether a decoded decision is wanted, by all but its text."""
        if self.decider is not None and line["decider"] != self.decider:
            return False
        return self.group is None or line.get("group") == self.group

    @property
    def _needle(self) -> bytes:
        """Return what every line has that is wanted."""
        if self.text is not None:
            return msgspec.json.encode(self.text)[1:-1].lower()
        if self.group is not None:
            return f'"group": {self.group}'.encode()
        return b'"decision"' if self.decider is None else msgspec.json.encode(self.decider)


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """Decisions, the newest first."""

    decisions: list[Record]
    before: int | None
    """Where the next page begins; None after the last page."""


def page(index: TimelineIndex, wanted: Filter, *, before: int | None, limit: int) -> Page:
    """Return up to `limit` decisions from the lines that lie before the byte `before`; None begins with the newest."""
    lines = Lines(dict[str, Any])
    end = index.file.size if before is None else min(before, index.file.size)
    found: list[Record] = []
    num_read = 0
    for begin, data in _pieces(index, wanted, end):
        num_read += len(data)
        for place, line in wanted.lines_of(data):
            record = lines.one(line)
            if record is not None and (decision := _decision(record)) is not None and wanted.wants(record):
                found.append(decision)
                if len(found) >= limit:
                    return Page(decisions=found, before=begin + place or None)
        if num_read >= MOST_BYTES and begin > 0:
            return Page(decisions=found, before=begin)
    return Page(decisions=found, before=None)


def _decision(record: Record) -> Record | None:
    """Return a decision in the form of the answer; None if the line holds none."""
    try:
        known = msgspec.convert(record, AnyDecision)
    except msgspec.ValidationError:
        return None
    if known.kind != "decision":
        return None
    inputs = {key: value for key, value in record.items() if key not in ("kind", "decider", "time", "reason", "group")}
    about = {"time": known.time, "decider": known.decider, "reason": known.reason}
    return {**about, "group": record.get("group"), "inputs": inputs}


def _pieces(index: TimelineIndex, wanted: Filter, end: int) -> Iterator[tuple[int, bytes]]:
    """Yield pieces of lines from `end` backwards, without the blocks that have no decision that is wanted."""
    ranges = index.may_have(decider=wanted.decider, group=wanted.group)
    indexed = ranges[-1][1] if ranges else 0
    if end > indexed:
        for begin, data in index.file.backwards(end, piece=PIECE_BYTES):
            if begin < indexed:
                yield indexed, data[indexed - begin :]
                break
            yield begin, data
            if begin == indexed:
                break
    for begin, stop, may_have in reversed(ranges):
        if may_have and begin < end:
            yield begin, index.file.read(begin, min(stop, end))
