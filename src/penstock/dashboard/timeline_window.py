"""The spans of a window of time, merged where a screen could not tell them apart. Pure functions on columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from penstock.dashboard.timeline_index import Floats, Lane, Spans

MOST_SPANS = 20_000
"""Spans in one answer. Where there are more, they are merged as if the screen had fewer pixels."""
LEAST_WIDTH = 8
"""Pixels; fewer are never assumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShownSpan:
    """One bar on the screen."""

    lane: Lane
    start: float
    end: float
    """Seconds since the epoch."""
    policy_version: int
    """The highest of the merged spans."""
    num_merged: int
    busy_share: float
    """Share of the time between start and end that the merged spans cover, at most 1."""


@dataclass(slots=True)
class _Cells:
    """Short spans of one lane, by the pixel of their middle."""

    width: int
    count: npt.NDArray[np.int64] = field(init=False)
    busy_s: Floats = field(init=False)
    start: Floats = field(init=False)
    end: Floats = field(init=False)
    policy_version: npt.NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.count = np.zeros(self.width, dtype=np.int64)
        self.busy_s = np.zeros(self.width)
        self.start = np.full(self.width, np.inf)
        self.end = np.full(self.width, -np.inf)
        self.policy_version = np.full(self.width, np.iinfo(np.int64).min)

    def add(self, pixel: npt.NDArray[np.intp], start: Floats, end: Floats, version: npt.NDArray[np.int64]) -> None:
        """Add spans."""
        self.count += np.bincount(pixel, minlength=self.width)
        self.busy_s += np.bincount(pixel, weights=end - start, minlength=self.width)
        np.minimum.at(self.start, pixel, start)
        np.maximum.at(self.end, pixel, end)
        np.maximum.at(self.policy_version, pixel, version)

    def shown(self, lane: Lane) -> list[ShownSpan]:
        """Return a span for each pixel that has some."""
        found = []
        for pixel in np.flatnonzero(self.count).tolist():
            start, end = float(self.start[pixel]), float(self.end[pixel])
            share = float(self.busy_s[pixel]) / (end - start) if end > start else 1.0
            found.append(
                ShownSpan(
                    lane=lane,
                    start=start,
                    end=end,
                    policy_version=int(self.policy_version[pixel]),
                    num_merged=int(self.count[pixel]),
                    busy_share=min(share, 1.0),
                )
            )
        return found


def shown_spans(
    read: Callable[[], Iterable[Spans]], begin: float, end: float, *, width: int, num_lanes: int
) -> list[ShownSpan]:
    """Return the spans of a window on a screen of `width` pixels, in order of their start. `read` returns the spans
    block by block; those outside of the window are left out. `num_lanes`: number of lanes that they may have."""
    width = max(LEAST_WIDTH, min(width, MOST_SPANS // max(num_lanes, 1)))
    while True:
        found = _shown(read(), begin, end, width)
        if len(found) <= 2 * MOST_SPANS or width == LEAST_WIDTH:
            return sorted(found, key=lambda span: span.start)[: 2 * MOST_SPANS]
        width = max(LEAST_WIDTH, width // 4)


def _shown(blocks: Iterable[Spans], begin: float, end: float, width: int) -> list[ShownSpan]:
    pixel_s = max(end - begin, 1e-9) / width
    cells: dict[Lane, _Cells] = {}
    long: list[ShownSpan] = []
    for block in blocks:
        in_window = (block.start <= end) & (block.end >= begin)
        is_short = block.end - block.start < pixel_s
        for place in np.flatnonzero(in_window & ~is_short).tolist():
            long.append(
                ShownSpan(
                    lane=block.lanes[block.lane[place]],
                    start=float(block.start[place]),
                    end=float(block.end[place]),
                    policy_version=int(block.policy_version[place]),
                    num_merged=1,
                    busy_share=1.0,
                )
            )
        short = in_window & is_short
        for lane in np.unique(block.lane[short]).tolist():
            chosen = short & (block.lane == lane)
            start, stop = block.start[chosen], block.end[chosen]
            pixel = np.clip((((start + stop) / 2 - begin) / pixel_s).astype(np.intp), 0, width - 1)
            cells.setdefault(block.lanes[lane], _Cells(width)).add(pixel, start, stop, block.policy_version[chosen])
    return long + [span for lane, found in cells.items() for span in found.shown(lane)]
