"""Reports of workers that cannot be true."""

from __future__ import annotations

import math

import msgspec
import pytest

from penstock.control.bus import ProtocolViolation
from penstock.processes.report_checks import check_summary
from penstock.types import EpisodeId, EpisodeSummary

SUMMARY = EpisodeSummary(episode=EpisodeId("main", 1, 0, 0), status="completed", seconds=2.0, env_s=1.0, reward_s=0.5)


@pytest.mark.parametrize("name", ["seconds", "env_s", "reward_s"])
@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, -1e-3, 1e308])
def test_times_that_cannot_be_are_refused(name: str, seconds: float) -> None:
    check_summary(SUMMARY)
    with pytest.raises(ProtocolViolation, match="it took"):
        check_summary(msgspec.structs.replace(SUMMARY, **{name: seconds}))
