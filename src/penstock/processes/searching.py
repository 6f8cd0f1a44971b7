"""The controller's searcher: a child process of low priority, within a share of the run's processor time."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from penstock.deadline import Stalled, deadline
from penstock.ports.settings_search import Answer, Question
from penstock.runtime import frames
from penstock.runtime.child_process import ChildProcess
from penstock.simulator.search_process import OVERRUN, SearchAnswerer, SearchRequest

ANSWERER = f"{SearchAnswerer.__module__}:{SearchAnswerer.__name__}"
START_CPU_S, LEAST_CPU_S = 0.6, 0.5
"""Processor time that the start of the child is charged with, and the least that a search must be allowed."""
ENOUGH = 8
"""After at least so many simulated runs, a search that was cut short was long enough: the next one gets the same time.
"""
MAX_CPU_S = 120.0
"""Bound on the processor time of one search."""
SLOWER = 60.0
"""Seconds that a search may take for each second of processor time, because other processes go first."""


class ProcessSearcher:
    """`ports.Searcher` in a child process. `close` ends it."""

    def __init__(
        self,
        config_path: Path,
        *,
        max_cpu_share: float,
        run_cpu_s: Callable[[], float],
        costs: Callable[[], Mapping[str, float]],
    ) -> None:
        """`run_cpu_s` returns the processor time of all processes of the run; `costs` the sums over the decode steps of
        all servers."""
        self._path, self._share, self._run_cpu_s, self._costs = config_path, max_cpu_share, run_cpu_s, costs
        self._child: ChildProcess | None = None
        self._starting, self._is_closed = threading.Lock(), False
        self._costs_before: Mapping[str, float] = {}
        self._least_s = LEAST_CPU_S
        """Least processor time for the next search: what the latest one took, or twice as much if it was cut early."""
        self.cpu_s = 0.0
        """Processor time of all searches so far."""

    async def search(self, question: Question) -> Answer:
        start_s = 0.0 if self._child is not None else START_CPU_S
        allowed_s = self._share * self._run_cpu_s() - self.cpu_s - start_s
        if allowed_s < self._least_s:
            return Answer(reason="searches may take no more processor time now", was_postponed=True)
        costs = self._latest_costs()
        if not costs.get("nn"):
            return Answer(reason="the servers report no times of their steps, which a search needs")
        limit_s = min(allowed_s, MAX_CPU_S)
        request = SearchRequest(config=str(self._path), question=question, costs=costs, max_cpu_s=limit_s)
        try:
            async with deadline(SLOWER * limit_s, waiter="controller", resource="better settings", holder="the search"):
                found = await asyncio.to_thread(self._ask, msgspec.msgpack.encode(request))
            needed_s = 2 * limit_s if found.was_cut and found.num_simulated < ENOUGH else found.cpu_s
            self._least_s = min(max(LEAST_CPU_S, needed_s), MAX_CPU_S)
        except (EOFError, OSError, Stalled) as error:
            self._end_child()
            found = Answer(reason=f"the search failed: {type(error).__name__}: {error}", cpu_s=OVERRUN * limit_s)
        found = msgspec.structs.replace(found, cpu_s=found.cpu_s + start_s)
        self.cpu_s += found.cpu_s
        return found

    def _latest_costs(self) -> dict[str, float]:
        """Return the sums since the last search; all sums at the first one."""
        now = dict(self._costs())
        latest = {name: total - self._costs_before.get(name, 0.0) for name, total in now.items()}
        self._costs_before = now
        return latest

    def _ask(self, request: bytes) -> Answer:
        with self._starting:
            if self._is_closed:
                raise EOFError("the run has ended")
            child = self._child = self._child or ChildProcess(ANSWERER)
        frames.send(child.pipe, [request])
        return msgspec.msgpack.decode(frames.receive(child.pipe)[0], type=Answer)

    def close(self) -> None:
        """End the child, and with it a search that still runs. No search begins afterwards."""
        with self._starting:
            self._is_closed = True
        self._end_child()

    def _end_child(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child.pipe.close()
            self._child = None
