"""All modelled servers: `ports.RolloutServers`, with requests sent to the least loaded server. One timer serves all
servers; it is set for the next moment at which a request is complete."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush

from penstock.config import EngineModelConfig
from penstock.simulator.activity import Activity
from penstock.simulator.server_model import Request, ServerModel, Totals
from penstock.types import WeightsHandle, WeightsTransport


class Fleet:
    """The modelled servers, on the clock of the running event loop."""

    def __init__(self, model: EngineModelConfig, *, num_servers: int, num_slots: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._model = model
        self._servers = [ServerModel(model, num_slots) for _ in range(num_servers)]
        self._due: list[tuple[float, int]] = []
        """Heap of (time at which a request is complete, server number), with outdated entries."""
        self._armed: list[float | None] = [None] * num_servers
        """The current heap entry of each server; None if the server has none."""
        self._timer: asyncio.TimerHandle | None = None
        self._touched: dict[int, None] = {}
        """Servers with a next completion time that may have changed; checked once for all events of one moment."""
        self._load = [0] * num_servers
        self._by_load = [(0, number) for number in range(num_servers)]
        """Heap of (load, server number) with the current entry of each server, and outdated entries."""
        self.served_at: list[float] = []
        """Times at which all servers had the new weights."""
        self._number = {server: number for number, server in enumerate(self._servers)}
        self.activity: Activity | None = None
        """What is told when servers generate, pause and rest; None in a run without records."""

    def submit(self, request: Request) -> None:
        """Generate on the server with the fewest sequences."""
        while True:
            load, number = self._by_load[0]
            if load == self._load[number]:
                break
            heappop(self._by_load)
        self._change_load(number, len(request.lengths))
        self._servers[number].submit(request, self._loop.time())
        self._touch(number)

    def cancel(self, requests: Iterable[Request]) -> int:
        """Cancel requests. Return the number of tokens they had generated."""
        generated = 0
        by_server: dict[int, set[Request]] = {}
        for request in requests:
            if request.server is not None:
                by_server.setdefault(self._number[request.server], set()).add(request)
        for number, mine in by_server.items():
            num_tokens = self._servers[number].cancel(mine, self._loop.time())
            generated += num_tokens
            if self.activity is not None:
                self.activity.num_tokens[number] += num_tokens
            self._change_load(number, -sum(len(request.lengths) for request in mine))
            self._touch(number)
        return generated

    async def update_weights(self, handle: WeightsHandle) -> Mapping[WeightsTransport, int]:
        """Update all servers; each pauses at its own next step boundary."""
        now = self._loop.time()
        ends = [server.update(handle.policy_version, now, self._model.update_s) for server in self._servers]
        if self.activity is not None:
            self.activity.update_weights(handle.policy_version, ends, self._model.update_s)
        await self._until(max(ends))
        self.served_at.append(self._loop.time())
        return {"shared_memory": len(self._servers)}

    async def release(self) -> None:
        """End all running requests early, and return once every server has stopped."""
        now = self._loop.time()
        await self._until(max(server.release(now) for server in self._servers))

    async def resume(self) -> None:
        """Serve requests again."""
        for server in self._servers:
            server.resume(self._loop.time())
        self._arm_all()

    def totals(self) -> Totals:
        """Return sums over all servers so far."""
        now = self._loop.time()
        return Totals(*map(sum, zip(*(server.totals(now) for server in self._servers), strict=True)))

    async def _until(self, time: float) -> None:
        """Sleep until `time`. Requests that complete before `time` are reported on the way; those that complete at
        `time` are reported before this returns."""
        self._arm_all()
        await asyncio.sleep(max(time - self._loop.time(), 0.0))
        self._arm_touched()
        while self._timer is not None and self._timer.when() <= self._loop.time():
            self._report_due()
            self._arm_touched()

    def _arm_all(self) -> None:
        for number in range(len(self._servers)):
            self._arm(number)

    def _touch(self, number: int) -> None:
        if not self._touched:
            self._loop.call_soon(self._arm_touched)
        self._touched[number] = None

    def _arm_touched(self) -> None:
        touched, self._touched = self._touched, {}
        for number in touched:
            self._arm(number)

    def _arm(self, number: int) -> None:
        due = self._servers[number].due
        if due == self._armed[number]:
            return
        self._armed[number] = due
        if due is not None:
            heappush(self._due, (due, number))
            if self._timer is None or due < self._timer.when():
                self._set_timer()

    def _set_timer(self) -> None:
        """Set the timer for the first entry that is not outdated."""
        while self._due and self._due[0][0] != self._armed[self._due[0][1]]:
            heappop(self._due)
        due = self._due[0][0] if self._due else None
        if self._timer is not None:
            if self._timer.when() == due:
                return
            self._timer.cancel()
        self._timer = None if due is None else self._loop.call_at(due, self._report_due)

    def _report_due(self) -> None:
        assert self._timer is not None
        reached = self._timer.when()
        self._timer.cancel()
        self._timer = None
        while self._due and self._due[0][0] <= reached:
            due, number = heappop(self._due)
            if due == self._armed[number] and number not in self._touched:
                self._report(number)
            elif due == self._armed[number]:
                self._armed[number] = None  # checked again at this moment
        self._set_timer()

    def _report(self, number: int) -> None:
        """Report the complete requests of a server."""
        self._armed[number] = None
        complete = self._servers[number].take()
        if self.activity is not None:
            self.activity.num_tokens[number] += sum(sum(request.generated) for request in complete)
        self._change_load(number, -sum(len(request.lengths) for request in complete))
        self._touch(number)
        for request in complete:
            request.on_done(request)

    def _change_load(self, number: int, change: int) -> None:
        self._load[number] += change
        if self.activity is not None:
            self.activity.change_load(number, self._load[number], self._loop.time())
        heappush(self._by_load, (self._load[number], number))
        if len(self._by_load) > 16 * len(self._load) + 1024:
            self._by_load = [(load, server) for server, load in enumerate(self._load)]
            heapify(self._by_load)
