"""Model of a rollout server: K slots that decode in lock-step, first come first served, exact to the token.

A step takes d(b, c) = step_s + sequence_s * b + context_token_s * c, with b active sequences that hold c tokens. It
gives each active sequence one token; a sequence ends after as many steps as it has tokens. Sequences enter at step
boundaries. The model counts time in tokens (steps since the start). While no sequence enters or ends, n steps take n *
d(b, c), plus the cost of the n * (n - 1) / 2 * b tokens by which contexts grow. The model can therefore compute many
steps at once.

A caller hears of a request only when all its sequences have ended; the next such moment is `due`. While no request
waits in the queue, `due` follows from the ends of the active sequences. Otherwise a copy of the server's state runs
ahead. A call at an earlier time drops the copy. A new request in the queue does not, because it enters after the other
requests. The model reads no clock: `now` is passed in.
"""

from __future__ import annotations

import math
import sys
from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add
from typing import NamedTuple

from penstock.config import EngineModelConfig
from penstock.types import NO_VERSION

NOTHING_ENTERED = (-1, 0)
SLACK = 1e-9
"""Rounding tolerance in steps: a boundary this close before a moment counts as at that moment."""


class Request:
    """Sequences that share a prompt and are answered together."""

    __slots__ = ("context", "ended", "generated", "key", "lengths", "on_done", "server", "start")

    def __init__(self, lengths: Sequence[int], context: int, on_done: Callable[[Request], None], key: object = None):
        self.lengths, self.context, self.on_done, self.key = lengths, context, on_done, key
        self.server: ServerModel | None = None
        self.generated = lengths
        """Number of tokens of each sequence; smaller than in `lengths` if a release has cut the sequence."""
        self.start = [0] * len(lengths)
        """Token clock of the server when the sequence entered."""
        self.ended = [0.0] * len(lengths)

    def versions(self) -> list[tuple[int, int]]:
        """Return the oldest and newest policy version among the tokens of each sequence; NO_VERSION if it has no
        token."""
        assert self.server is not None
        spans = self.server.served.between(self.start, self.generated)
        if self.generated is self.lengths:
            return spans
        return [span if tokens else (NO_VERSION,) * 2 for span, tokens in zip(spans, self.generated, strict=True)]

    def num_older(self, sequence: int, version: int) -> int:
        """Return how many tokens of a sequence come from versions before `version`."""
        assert self.server is not None
        old = self.server.served.since(version) - self.start[sequence]
        return min(max(old, 0), self.generated[sequence])


class ServedVersions:
    """The policy versions that a server served. A token made at token clock `tau` comes from the version that was
    served before `tau`."""

    def __init__(self) -> None:
        self._versions = [NO_VERSION]
        self._since: list[int] = []
        """Token clock at which each version after NO_VERSION was first served."""

    def add(self, version: int, tau: int) -> None:
        """Record that `version` is served from `tau` on."""
        self._versions.append(version)
        self._since.append(tau)

    def between(self, starts: Sequence[int], lengths: Sequence[int]) -> list[tuple[int, int]]:
        """Return the versions of the first and the last token of each answer, from the answer's start on the token
        clock and its length."""
        since, versions = self._since, self._versions
        oldest = bisect_left(since, min(starts) + 1)
        if oldest == len(since) or since[oldest] >= max(map(add, starts, lengths)):  # all tokens have one version
            return [(versions[oldest], versions[oldest])] * len(starts)
        return [
            (versions[bisect_left(since, start + 1)], versions[bisect_left(since, start + length)])
            for start, length in zip(starts, lengths, strict=True)
        ]

    def since(self, version: int) -> int:
        """Return the token clock at which `version` or a newer one was first served; larger than any clock value if
        none was."""
        position = bisect_left(self._versions, version, lo=1) - 1
        return self._since[position] if position < len(self._since) else sys.maxsize


class Totals(NamedTuple):
    """Sums over decode steps of 1, b, b * b, c, b * c, and over entries of p, b * p, p * p. b active sequences hold c
    tokens (c is 0 without `context_token_s`); p is the number of prompt tokens that enter together."""

    n: int
    b: int
    bb: int
    c: int
    bc: int
    p: int
    bp: int
    pp: int

    def busy_s(self, model: EngineModelConfig) -> float:
        """Return the seconds spent in steps."""
        decoding_s = model.step_s * self.n + model.sequence_s * self.b + model.context_token_s * self.c
        return decoding_s + model.prefill_token_s * self.p

    def slot_s(self, model: EngineModelConfig) -> float:
        """Return the integral of the number of active sequences over that time."""
        decoding_s = model.step_s * self.b + model.sequence_s * self.bb + model.context_token_s * self.bc
        return decoding_s + model.prefill_token_s * self.bp


@dataclass(slots=True)
class _State:
    """The part of a server that changes as it runs."""

    time: float = 0.0
    tau: int = 0
    """Time of the last step boundary, in seconds and in steps."""
    active: list[tuple[int, int, Request, int]] = field(default_factory=list)
    """(-token clock at its end, -serial, request, sequence), ascending: the sequence that ends first is the last
    entry."""
    num_open: dict[Request, int] = field(default_factory=dict)
    """Number of sequences that have not ended, for requests with some ended sequences."""
    complete: list[Request] = field(default_factory=list)
    head: int = 0
    member: int = 0
    """Index of the first waiting request of the queue, and of its first waiting sequence."""
    serial: int = 0
    context: int = 0
    """Tokens that the active sequences hold."""
    kv_used: int = 0
    """Tokens that the active sequences hold when they end."""
    entered: tuple[int, int] = NOTHING_ENTERED
    """Token clock of the last step at which a sequence entered, and the number of prompt tokens that entered at it."""
    steps: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)
    prompts: tuple[int, int, int] = (0, 0, 0)
    """Sums of steps and of prompts; see `Totals`."""

    def copy(self) -> _State:
        return _State(  # `dataclasses.replace` takes several times as long
            self.time,
            self.tau,
            self.active.copy(),
            self.num_open.copy(),
            self.complete.copy(),
            self.head,
            self.member,
            self.serial,
            self.context,
            self.kv_used,
            self.entered,
            self.steps,
            self.prompts,
        )

    def place(self, request: Request, first: int, num_new: int) -> None:
        """Activate `num_new` sequences of `request`, starting at `first`."""
        for sequence in range(first, first + num_new):
            length = request.lengths[sequence]
            insort(self.active, (-self.tau - length, -self.serial - sequence, request, sequence))
            request.start[sequence] = self.tau
            self.kv_used += request.context + length
        self.serial += len(request.lengths)
        self.context += num_new * request.context

    def advance(self, steps: int, step_s: float, context_token_s: float) -> None:
        """Take `steps` steps during which no sequence enters or ends."""
        num_active = len(self.active)
        held = _held(self.context, num_active, steps) if context_token_s else 0
        n, b, bb, c, bc = self.steps
        active = steps * num_active
        self.steps = n + steps, b + active, bb + active * num_active, c + held, bc + num_active * held
        self.tau += steps
        self.time += steps * step_s + context_token_s * held
        self.context += active

    def end_due(self) -> None:
        """End the sequences that have all their tokens."""
        while self.active and self.active[-1][0] == -self.tau:
            _, _, request, sequence = self.active.pop()
            tokens = request.context + request.lengths[sequence]
            self.context -= tokens
            self.kv_used -= tokens
            self.end(request, sequence)

    def end(self, request: Request, sequence: int) -> None:
        request.ended[sequence] = self.time
        num_open = self.num_open.pop(request, len(request.lengths)) - 1
        if num_open:
            self.num_open[request] = num_open
        else:
            self.complete.append(request)


class ServerModel:
    """The model of one server."""

    def __init__(self, model: EngineModelConfig, num_slots: int) -> None:
        self._context_s, self._prefill_s = model.context_token_s, model.prefill_token_s
        self._admit_tokens, self._kv_tokens = model.admit_tokens, model.kv_tokens
        self._slots = num_slots
        self._together = max(int(model.admit_share * num_slots), 1)
        self._cost = [model.step_s + model.sequence_s * active for active in range(num_slots + 1)]
        self.released = False
        self.served = ServedVersions()
        self._line: list[Request] = []
        """The queue; requests before the head of `_state` have entered."""
        self._state = _State()
        self._ahead: _State | None = None
        """A copy of `_state` that ran ahead until a request was complete or no request waited any more."""
        self._due: float | None = None
        self._is_due_known = True

    # --- from outside ----------------------------------------------------------------------------------------------

    @property
    def due(self) -> float | None:
        """Return when the next request is complete, if no call changes the server before; None if no request runs. Read
        it at the time of the last change: several changes at one time then cost one computation."""
        if not self._is_due_known:
            self._is_due_known = True
            self._due = self._look_ahead()
        return self._due

    def submit(self, request: Request, now: float) -> None:
        """Append `request` to the queue. Raises ValueError if a sequence exceeds kv_tokens."""
        longest = request.context + max(request.lengths)
        if self._kv_tokens is not None and longest > self._kv_tokens:
            raise ValueError(f"a sequence of {longest} tokens exceeds kv_tokens ({self._kv_tokens})")
        request.server = self
        if self._ahead is None or self._has_passed(self._ahead, now):
            self._settle(now)
        self._line.append(request)
        if self._ahead is not None and not self._ahead.complete:
            self._due = self._run_ahead(self._ahead)

    def take(self) -> list[Request]:
        """Return the requests that are complete at `due`."""
        due, state = self.due, self._ahead or self._state
        self._state, self._ahead = state, None
        if not state.complete and due is not None:
            self._run(state, due)
        complete, state.complete = state.complete, []
        self._is_due_known = False
        return complete

    def update(self, version: int, now: float, seconds: float) -> float:
        """Serve `version` after a pause that begins at the next step boundary; return the time at which the pause
        ends."""
        state = self._settle(now)
        self.served.add(version, state.tau)
        state.time += seconds
        return state.time

    def release(self, now: float) -> float:
        """End all requests with the tokens they have, at the next step boundary; return its time. The server then stays
        idle until `resume`."""
        state = self._settle(now)
        cut = [(request, s, request.lengths[s] + finish + state.tau) for finish, _, request, s in state.active]
        cut += [(request, s, 0) for request, first in self._waiting() for s in range(first, len(request.lengths))]
        for request, sequence, num_generated in cut:
            request.generated = [*request.generated]
            request.generated[sequence] = num_generated
            state.end(request, sequence)
        state.active, self._line = [], []
        state.head = state.member = state.kv_used = state.context = 0
        state.entered = NOTHING_ENTERED
        self.released = True
        return state.time

    def resume(self, now: float) -> None:
        """Serve requests again."""
        self._settle(now)
        self.released = False

    def cancel(self, requests: Collection[Request], now: float) -> int:
        """Cancel `requests`. Return the number of tokens they had generated."""
        state = self._settle(now)
        num_left = sum(-finish - state.tau for finish, _, request, _ in state.active if request in requests)
        num_left += sum(sum(request.lengths[first:]) for request, first in self._waiting() if request in requests)
        num_generated = sum(sum(request.generated) for request in requests) - num_left
        state.active = [entry for entry in state.active if entry[2] not in requests]
        state.kv_used = sum(request.context + request.lengths[s] for _, _, request, s in state.active)
        state.context = sum(request.context + state.tau - request.start[s] for _, _, request, s in state.active)
        if not state.active:
            state.entered = NOTHING_ENTERED  # the step for which they entered is never taken
        if any(first and request in requests for request, first in self._waiting()):
            state.member = 0
        self._line = [request for request, _ in self._waiting() if request not in requests]
        state.head = 0
        state.num_open = {request: number for request, number in state.num_open.items() if request not in requests}
        state.complete = [request for request in state.complete if request not in requests]
        return num_generated

    def totals(self, now: float) -> Totals:
        """Return sums up to the first step boundary at or after `now`."""
        state = self._settle(now)
        return Totals(*state.steps, *state.prompts)

    # --- the replay ------------------------------------------------------------------------------------------------

    def _waiting(self) -> Iterator[tuple[Request, int]]:
        """Yield each request of the queue, and its first waiting sequence."""
        first = self._state.member
        for request in self._line[self._state.head :]:
            yield request, first
            first = 0

    def _settle(self, now: float) -> _State:
        """Bring the state to the first step boundary at or after `now`, or to `due` if a request completes earlier."""
        if self._ahead is not None and self._has_passed(self._ahead, now):
            self._state = self._ahead
        self._ahead, self._is_due_known = None, False
        state = self._state
        if not state.complete:
            self._run(state, now)
            if not state.active:
                state.time = max(state.time, now)
        return state

    def _has_passed(self, ahead: _State, now: float) -> bool:
        """Return whether the copy stopped before `now`, because no request waits any more."""
        return ahead.head == len(self._line) and not ahead.complete and now > ahead.time

    def _look_ahead(self) -> float | None:
        """Return the next moment at which a request is complete."""
        state = self._state
        if not state.complete:
            self._admit(state)
            del self._line[: state.head]
            state.head = 0
            if self._line:
                self._ahead = state.copy()
                return self._run_ahead(self._ahead)
        return self._first_complete(state)

    def _run_ahead(self, ahead: _State) -> float | None:
        self._run(ahead, math.inf)
        return self._first_complete(ahead)

    def _first_complete(self, state: _State) -> float | None:
        """Return when the first request is complete if no further sequence enters; None without active sequences."""
        if state.complete:
            return min(max(request.ended) for request in state.complete)
        if not state.active:
            return None
        cost, left, context_s = self._cost, state.num_open.copy(), self._context_s
        time, tau, context, num_active = state.time, state.tau, state.context, len(state.active)
        for finish, _, request, sequence in reversed(state.active):
            steps = -finish - tau
            if steps > 0:
                time += steps * cost[num_active]
                if context_s:
                    time += context_s * _held(context, num_active, steps)
                    context += steps * num_active
                tau = -finish
            num_left = left.get(request)
            num_left = (len(request.lengths) if num_left is None else num_left) - 1
            if not num_left:
                break
            left[request] = num_left
            num_active -= 1
            context -= request.context + request.lengths[sequence]
        return time

    def _run(self, state: _State, until: float) -> None:
        """Run whole steps up to the first boundary at or after `until`, or to a boundary at which a request is
        complete. Stop `_ahead` earlier, when its last waiting request has entered."""
        while not state.complete:
            is_held_back = False
            if state.head < len(self._line) and len(state.active) < self._slots:
                is_held_back = self._admit(state)
                if state is self._ahead and state.head == len(self._line):
                    break
            if not state.active:
                break
            finish = -state.active[-1][0]
            steps = 1 if is_held_back else finish - state.tau
            left = self._steps_within(until - state.time, state)
            is_reached = left <= steps - 1
            if is_reached:
                steps = max(math.ceil(left), 0)
            state.advance(steps, self._cost[len(state.active)], self._context_s)
            if finish == state.tau:
                state.end_due()
            if is_reached:
                break

    def _steps_within(self, seconds: float, state: _State) -> float:
        """Return how many steps take `seconds` while contexts grow and no sequence enters or ends, less the
        tolerance."""
        if seconds <= 0 or seconds == math.inf:
            return seconds
        num_active = len(state.active)
        growth_s = self._context_s * num_active / 2
        first_s = self._cost[num_active] + self._context_s * state.context - growth_s
        return 2 * seconds / (first_s + math.sqrt(first_s * first_s + 4 * growth_s * seconds)) - SLACK

    def _admit(self, state: _State) -> bool:
        """Fill free slots from the queue, and spend the time for the prompts. Return whether the next request waits
        only for the prompt-token limit of this step."""
        tokens, is_held_back = 0, False
        while not self.released and state.head < len(self._line) and len(state.active) < self._slots:
            request, free = self._line[state.head], self._slots - len(state.active)
            num_left = len(request.lengths) - state.member
            if free < self._together and free < num_left:
                break
            is_later = state.entered[0] == state.tau
            num_entered = request.context + (state.entered[1] if is_later else 0)
            is_held_back = self._admit_tokens is not None and is_later and num_entered > self._admit_tokens
            num_new = 0 if is_held_back else self._num_that_fit(request, state, min(num_left, free))
            if not num_new:
                break
            state.place(request, state.member, num_new)
            tokens += request.context
            state.entered = state.tau, num_entered
            if num_new == num_left:
                state.head, state.member = state.head + 1, 0
            else:
                state.member += num_new
        if tokens:
            p, bp, pp = state.prompts
            state.prompts = p + tokens, bp + tokens * len(state.active), pp + tokens * tokens
            state.time += tokens * self._prefill_s
        return is_held_back

    def _num_that_fit(self, request: Request, state: _State, most: int) -> int:
        """Return how many of the next `most` sequences of `request` fit into the memory."""
        if self._kv_tokens is None:
            return most
        lengths = request.lengths[state.member : state.member + most]
        needed = accumulate(request.context + length for length in lengths)
        return sum(state.kv_used + tokens <= self._kv_tokens for tokens in needed)


def _held(context: int, num_active: int, steps: int) -> int:
    """Return the tokens held, summed over `steps` steps. The first step holds `context`; each step adds one token to
    each of `num_active` sequences."""
    return steps * context + num_active * (steps * (steps - 1) // 2)
