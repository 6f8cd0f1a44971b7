"""A rollout server as a model: K slots that decode in lock-step, first come first served, exact to the token.

A step takes d(b) = step_s + sequence_s * b with b active sequences and gives each of them one token; a sequence ends
after as many steps as it has tokens. Sequences enter at step boundaries. Time is counted in tokens (steps since the
start): while nothing enters or ends, n steps take n * d(b), so whole stretches are replayed at once.

Nobody outside needs to hear of a sequence, only of a request whose sequences have all ended: the next such moment is
`due`. While nobody waits in line it can be foreseen from the ends of those that are active. Otherwise the server runs
ahead to it and keeps the state it started from: whoever touches it earlier (another request, a weight update, a
release) makes it go back and replay up to the touch. Pure: `now` is passed in.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from penstock.config import EngineModelConfig
from penstock.types import NO_VERSION

SLACK = 1e-9
"""Steps; a boundary that rounding has put this close before a moment is at it."""


class Request:
    """Sequences that share a prompt and are answered together."""

    __slots__ = ("context", "ended", "generated", "key", "lengths", "num_open", "on_done", "server", "start")

    def __init__(self, lengths: Sequence[int], context: int, on_done: Callable[[Request], None], key: object = None):
        self.lengths, self.context, self.on_done, self.key = lengths, context, on_done, key
        self.num_open = size = len(lengths)
        self.server: ServerModel | None = None
        self.generated = lengths
        """Tokens of each sequence; fewer than `lengths` once a release has cut it."""
        self.start = [0] * size
        """Token clock of the server when the sequence entered."""
        self.ended = [0.0] * size

    def versions(self, sequence: int) -> tuple[int, int]:
        """Oldest and newest policy version among its tokens; NO_VERSION if it has none."""
        if self.server is None or not self.generated[sequence]:
            return NO_VERSION, NO_VERSION
        start = self.start[sequence]
        return self.server.version_at(start + 1), self.server.version_at(start + self.generated[sequence])

    def all_versions(self) -> list[tuple[int, int]]:
        """`versions` of all sequences, none of which was cut."""
        assert self.server is not None
        return self.server.versions_between(self.start, self.lengths)

    def num_older(self, sequence: int, version: int) -> int:
        """Tokens sampled by versions before `version`."""
        if self.server is None or not self.generated[sequence]:
            return 0
        old = self.server.tokens_before(version) - self.start[sequence]
        return min(max(old, 0), self.generated[sequence])


class Totals(NamedTuple):
    """Sums over decode steps of 1, b, b * b, p, b * p and p * p (b active sequences, p prompt tokens computed)."""

    n: int
    b: int
    bb: int
    p: int
    bp: int
    pp: int

    def busy_s(self, model: EngineModelConfig) -> float:
        """Time spent in steps."""
        return model.step_s * self.n + model.sequence_s * self.b + model.prefill_token_s * self.p

    def slot_s(self, model: EngineModelConfig) -> float:
        """Integral of active sequences over that time."""
        return model.step_s * self.b + model.sequence_s * self.bb + model.prefill_token_s * self.bp


class _State(NamedTuple):
    """What changes while the server runs."""

    time: float
    tau: int
    active: list[tuple[int, int, Request, int]]
    head: int
    member: int
    kv_used: int
    totals: tuple[int, int, int, int, int, int]


class ServerModel:
    """One server. `due` is when the next request is complete, if nobody touches the server before."""

    def __init__(self, model: EngineModelConfig, num_slots: int) -> None:
        self._slots, self._together = num_slots, min(model.admit_together, num_slots)
        self._cost = [model.step_s + model.sequence_s * active for active in range(num_slots + 1)]
        self._prefill_s, self._kv_tokens = model.prefill_token_s, model.kv_tokens
        self.due: float | None = None
        self.version = NO_VERSION
        self.released = False
        self._served: list[int] = []
        """Policy versions."""
        self._since: list[int] = []
        """Token clock from which on each was served."""
        self._time, self._tau = 0.0, 0
        """The last step boundary, in seconds and in steps."""
        self._active: list[tuple[int, int, Request, int]] = []
        """Heap of (token clock at its end, serial, request, sequence)."""
        self._line: list[Request] = []
        self._head = self._member = 0
        """The first of the line that waits, and its first sequence that does."""
        self._kv_used = self._serial = 0
        self._totals = (0, 0, 0, 0, 0, 0)
        self._complete: list[Request] = []
        self._base: _State | None = None
        """Where the run ahead began; None if the state is that of the last touch."""
        self._ended_ahead: list[Request] = []

    # --- from outside ----------------------------------------------------------------------------------------------

    def submit(self, request: Request, now: float) -> None:
        """`request` joins the line."""
        if self._kv_tokens is not None and request.context + max(request.lengths) > self._kv_tokens:
            raise ValueError(f"a sequence of {request.context} + {max(request.lengths)} tokens exceeds kv_tokens")
        request.server = self
        if self._base is not None and self._head < len(self._line):
            self._line.append(request)  # somebody waits before it until `due`: nothing changes before that
            return
        self._settle(now)
        self._line.append(request)
        self._look_ahead()

    def take(self) -> list[Request]:
        """The requests complete at `due`."""
        if self._base is None and self.due is not None:
            self._run(self.due)
        complete, self._complete = self._complete, []
        self._base = None
        self._ended_ahead.clear()
        self._look_ahead()
        return complete

    def update(self, version: int, now: float, seconds: float) -> float:
        """Serve `version` after a pause that begins at the next step boundary; returns when it ends."""
        self._settle(now)
        self.version = version
        self._served.append(version)
        self._since.append(self._tau)
        self._time += seconds
        ends_at = self._time
        self._look_ahead()
        return ends_at

    def release(self, now: float) -> float:
        """End everything with what it has, at the next step boundary, which is returned; then stand still."""
        self._settle(now)
        for finish, _, request, sequence in self._active:
            self._cut(request, sequence, request.lengths[sequence] - (finish - self._tau))
        for position, request in enumerate(self._line[self._head :]):
            for sequence in range(0 if position else self._member, len(request.lengths)):
                self._cut(request, sequence, 0)
        self._active, self._line = [], []
        self._head = self._member = self._kv_used = 0
        self.released = True
        self._look_ahead()
        return self._time

    def resume(self, now: float) -> None:
        """Serve again."""
        self._settle(now)
        self.released = False
        self._look_ahead()

    def cancel(self, requests: Collection[Request], now: float) -> int:
        """Nobody waits for `requests` any more; returns the tokens they had generated."""
        self._settle(now)
        generated = sum(self._progress(request) for request in requests)
        gone = [entry for entry in self._active if entry[2] in requests]
        self._kv_used -= sum(request.context + request.lengths[sequence] for _, _, request, sequence in gone)
        self._active = [entry for entry in self._active if entry[2] not in requests]
        heapify(self._active)
        waiting = self._line[self._head :]
        if waiting and waiting[0] in requests:
            self._member = 0
        self._line = [request for request in waiting if request not in requests]
        self._head = 0
        self._complete = [request for request in self._complete if request not in requests]
        self._look_ahead()
        return generated

    def totals(self, now: float) -> Totals:
        """Sums up to the first step boundary at or after `now`."""
        self._settle(now)
        totals = Totals(*self._totals)
        self._look_ahead()
        return totals

    def _progress(self, request: Request) -> int:
        """Tokens that a request of this server has at the last step boundary."""
        left = sum(finish - self._tau for finish, _, running, _ in self._active if running is request)
        waiting = 0
        if request in self._line[self._head :]:
            first = self._member if self._line[self._head] is request else 0
            waiting = sum(request.lengths[first:])
        return sum(request.generated) - left - waiting

    def version_at(self, tau: int) -> int:
        """The policy version that sampled the token generated at `tau`."""
        position = bisect_left(self._since, tau)
        return self._served[position - 1] if position else NO_VERSION

    def versions_between(self, starts: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Versions of the first and the last of so many tokens, for each start of the token clock."""
        since, served = [-1, *self._since], [NO_VERSION, *self._served]
        return [
            (served[bisect_left(since, start + 1) - 1], served[bisect_left(since, start + length) - 1])
            for start, length in zip(starts, lengths, strict=True)
        ]

    def tokens_before(self, version: int) -> int:
        """Token clock at which `version`, or a newer one, was first served."""
        position = bisect_left(self._served, version)
        return self._since[position] if position < len(self._since) else self._tau

    # --- the replay ------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Bring the state to the first step boundary at or after `now`, or to `due` if that is the one."""
        if self._base is not None:
            self._go_back(self._base)
        elif self._complete:
            return
        self._run(now)
        self._ended_ahead.clear()
        if not self._active:
            self._time = max(self._time, now)
        if self._complete:
            self.due = self._time

    def _look_ahead(self) -> None:
        """Find the next moment at which a request is complete."""
        if self._complete:
            self.due = self._time if self.due is None else min(self.due, self._time)
            return
        if self._head == len(self._line):
            self.due = self._foresee()
            return
        if self._head:
            del self._line[: self._head]
            self._head = 0
        self._base = _State(self._time, self._tau, self._active.copy(), 0, self._member, self._kv_used, self._totals)
        self._run(math.inf)
        self.due = self._time if self._complete else None

    def _foresee(self) -> float | None:
        """When the first request is complete, if nothing else enters."""
        ends = sorted(self._active)
        last_end = {request: finish for finish, _, request, _ in ends}
        if not last_end:
            return None
        soonest, time, tau, num_active = min(last_end.values()), self._time, self._tau, len(ends)
        for finish, _, _, _ in ends:
            if finish > tau:
                time += (finish - tau) * self._cost[num_active]
                tau = finish
                if finish == soonest:
                    break
            num_active -= 1
        return time

    def _go_back(self, base: _State) -> None:
        self._time, self._tau, self._active, self._head, self._member, self._kv_used, self._totals = base
        for request in self._ended_ahead:
            request.num_open += 1
        self._ended_ahead.clear()
        self._complete.clear()
        self._base, self.due = None, None

    def _run(self, until: float) -> None:
        """Whole steps up to the first boundary at or after `until`, or to one at which a request is complete."""
        cost, tau, time = self._cost, self._tau, self._time
        n, b, bb, p, bp, pp = self._totals
        while not self._complete:
            if self._head < len(self._line) and not self.released:
                tokens = self._admit(tau)
                num_active = len(self._active)
                time += tokens * self._prefill_s
                p, bp, pp = p + tokens, bp + tokens * num_active, pp + tokens * tokens
            if not self._active:
                break
            num_active = len(self._active)
            step_s, steps = cost[num_active], self._active[0][0] - tau
            left = (until - time) / step_s - SLACK
            if left <= steps - 1:
                steps = max(math.ceil(left), 0)
                until = -math.inf
            n, b, bb = n + steps, b + steps * num_active, bb + steps * num_active * num_active
            tau += steps
            time += steps * step_s
            if self._active[0][0] == tau:
                self._end(tau, time)
            if until == -math.inf:
                break
        self._tau, self._time, self._totals = tau, time, (n, b, bb, p, bp, pp)

    def _admit(self, tau: int) -> int:
        """Fill free slots from the line; returns the prompt tokens that this adds to the step."""
        line, active = self._line, self._active
        free, prefill, serial = self._slots - len(active), 0, self._serial
        while self._head < len(line):
            request = line[self._head]
            first = self._member
            left = len(request.lengths) - first
            if free < min(left, self._together):
                break
            num_new = self._num_that_fit(request, first, min(left, free))
            if num_new == 0:
                break
            for sequence in range(first, first + num_new):
                serial += 1
                heappush(active, (tau + request.lengths[sequence], serial, request, sequence))
                request.start[sequence] = tau
            prefill += request.context
            free -= num_new
            if num_new == left:
                self._head, self._member = self._head + 1, 0
            else:
                self._member += num_new
        self._serial = serial
        return prefill

    def _num_that_fit(self, request: Request, first: int, most: int) -> int:
        """How many of the next `most` sequences of `request` the memory takes; it is theirs from now on."""
        if self._kv_tokens is None:
            return most
        needed = [request.context + length for length in request.lengths[first : first + most]]
        fits = 0
        while fits < len(needed) and self._kv_used + sum(needed[: fits + 1]) <= self._kv_tokens:
            fits += 1
        self._kv_used += sum(needed[:fits])
        return fits

    def _end(self, tau: int, time: float) -> None:
        active, ahead = self._active, self._ended_ahead
        while active and active[0][0] == tau:
            _, _, request, sequence = heappop(active)
            request.ended[sequence] = time
            request.num_open -= 1
            ahead.append(request)
            if self._kv_tokens is not None:
                self._kv_used -= request.context + request.lengths[sequence]
            if not request.num_open:
                self._complete.append(request)

    def _cut(self, request: Request, sequence: int, generated: int) -> None:
        if request.generated is request.lengths:
            request.generated = list(request.lengths)
        generated_so_far = request.generated
        assert isinstance(generated_so_far, list)
        generated_so_far[sequence] = generated
        request.ended[sequence] = self._time
        request.num_open -= 1
        if not request.num_open:
            self._complete.append(request)
