"""Busy seconds and the merging of intervals."""

from __future__ import annotations

import pytest

from penstock.rollout import busy_meter
from penstock.rollout.busy_meter import MERGE_GAP_S, BusyMeter


class Clock:
    """Both the wall clock and the busy clock, moved by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    time = __call__


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(busy_meter, "time", clock)
    return clock


def work(meter: BusyMeter, clock: Clock, seconds: float, policy_version: int = 0) -> None:
    with meter.measure("generate", policy_version):
        clock.now += seconds


def test_short_gaps_are_merged_and_long_ones_kept(clock: Clock) -> None:
    meter = BusyMeter("rollout-0", clock)
    for gap in (MERGE_GAP_S / 2, 10 * MERGE_GAP_S, 0.0):
        work(meter, clock, 1.0)
        clock.now += gap
    assert [span.end - span.start for span in meter.drain()] == pytest.approx([2.0 + MERGE_GAP_S / 2, 1.0])
    assert meter.busy_s == pytest.approx(3.0)


def test_every_interval_is_drained_once(clock: Clock) -> None:
    meter = BusyMeter("rollout-0", clock)
    work(meter, clock, 1.0)
    assert len(meter.drain()) == 1
    assert meter.drain() == []


def test_a_new_version_starts_a_new_interval_and_updates_are_not_busy_seconds(clock: Clock) -> None:
    meter = BusyMeter("rollout-0", clock)
    work(meter, clock, 1.0, 0)
    with meter.measure("update_weights", 1):
        clock.now += 0.5
    work(meter, clock, 1.0, 1)
    assert [(span.kind, span.policy_version) for span in meter.drain()] == [
        ("generate", 0),
        ("update_weights", 1),
        ("generate", 1),
    ]
    assert meter.busy_s == pytest.approx(2.0)
