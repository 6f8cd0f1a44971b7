"""Many servers, one timer."""

from __future__ import annotations

import asyncio

import pytest

from penstock.config import EngineModelConfig
from penstock.simulator.clock import run_virtual
from penstock.simulator.fleet import Fleet
from penstock.simulator.server_model import Request

MODEL = EngineModelConfig(step_s=1.0, sequence_s=0.0, prefill_token_s=0.0)


class Reports:
    """Requests, and when each was reported."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.found: list[tuple[int, float]] = []

    def submit(self, length: int) -> Request:
        request = Request([length], 0, self._note, key=length)
        self._fleet.submit(request)
        return request

    def _note(self, request: Request) -> None:
        self.found.append((request.lengths[0], asyncio.get_running_loop().time()))


def test_each_request_is_reported_at_its_own_moment() -> None:
    async def main() -> None:
        fleet = Fleet(MODEL, num_servers=3, num_slots=1)
        reports = Reports(fleet)
        for length in (5, 3, 7, 2, 9):  # two of them wait in line
            reports.submit(length)
        await asyncio.sleep(30.0)
        assert dict(reports.found) == {5: 5.0, 3: 3.0, 7: 7.0, 2: 5.0 + 2.0, 9: 3.0 + 9.0}

    run_virtual(main())


@pytest.mark.parametrize("before_s", [1e-12, 0.4])
def test_a_cancel_just_before_a_request_is_complete_moves_no_other(before_s: float) -> None:
    async def main() -> None:
        fleet = Fleet(MODEL, num_servers=1, num_slots=2)
        reports = Reports(fleet)
        first = reports.submit(10)
        reports.submit(20)
        asyncio.get_running_loop().call_at(10.0 - before_s, fleet.cancel, [first])
        await asyncio.sleep(60.0)
        assert reports.found[-1] == (20, pytest.approx(20.0))

    run_virtual(main())


@pytest.mark.parametrize("at", [4.3, 5.0])
def test_what_a_release_ends_is_reported_before_it_returns(at: float) -> None:
    async def main() -> None:
        fleet = Fleet(MODEL, num_servers=2, num_slots=2)
        reports = Reports(fleet)
        for length in (10, 20, 30):
            reports.submit(length)
        await asyncio.sleep(at)
        await fleet.release()
        assert asyncio.get_running_loop().time() == pytest.approx(5.0)
        assert [length for length, _ in sorted(reports.found)] == [10, 20, 30]

    run_virtual(main())
