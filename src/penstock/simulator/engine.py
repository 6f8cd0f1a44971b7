"""A rollout server as a model: K slots that decode in lock-step, first come first served, exact to the token.

A step takes d(b, c) = step_s + sequence_s * b + context_token_s * c, with b active sequences that hold c tokens, and
gives each of them one token; a sequence ends after as many steps as it has tokens. Sequences enter at step boundaries.
Time is counted in tokens (steps since the start): while nothing enters or ends, n steps take n * d(b, c) and what the
n * (n - 1) / 2 * b tokens of growing contexts add, so whole stretches are replayed at once.

Nobody outside needs to hear of a sequence, only of a request whose sequences have all ended: the next such moment is
`due`. Once nobody waits in line it can be foreseen from the ends of those that are active. Until then the server runs
ahead, and keeps the state it started from: whoever touches it earlier makes it go back and replay up to the touch. One
more in the line is no touch: it enters after the others. Pure: `now` is passed in.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from penstock.config import EngineModelConfig
from penstock.simulator.served import ServedVersions
from penstock.types import NO_VERSION

NOBODY_ENTERED = (-1, 0)
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
        (versions,) = self.server.served.between([start], [self.generated[sequence]])
        return versions

    def all_versions(self) -> list[tuple[int, int]]:
        """`versions` of all sequences, none of which was cut."""
        assert self.server is not None
        return self.server.served.between(self.start, self.lengths)

    def num_older(self, sequence: int, version: int) -> int:
        """Tokens sampled by versions before `version`."""
        if self.server is None or not self.generated[sequence]:
            return 0
        old = self.server.served.since(version) - self.start[sequence]
        return min(max(old, 0), self.generated[sequence])


class Totals(NamedTuple):
    """Sums over decode steps of 1, b, b * b, c, b * c, and over entries of p, b * p, p * p: b active sequences hold c
    tokens (not counted without `context_token_s`), p are the prompt tokens of those that enter together."""

    n: int
    b: int
    bb: int
    c: int
    bc: int
    p: int
    bp: int
    pp: int

    def busy_s(self, model: EngineModelConfig) -> float:
        """Time spent in steps."""
        decoding_s = model.step_s * self.n + model.sequence_s * self.b + model.context_token_s * self.c
        return decoding_s + model.prefill_token_s * self.p

    def slot_s(self, model: EngineModelConfig) -> float:
        """Integral of active sequences over that time."""
        decoding_s = model.step_s * self.b + model.sequence_s * self.bb + model.context_token_s * self.bc
        return decoding_s + model.prefill_token_s * self.bp


class _State(NamedTuple):
    """What changes while the server runs."""

    time: float
    tau: int
    active: list[tuple[int, int, Request, int]]
    member: int
    kv_used: int
    context: int
    entered: tuple[int, int]
    steps: tuple[int, int, int, int, int]
    prompts: tuple[int, int, int]


class ServerModel:
    """One server."""

    def __init__(self, model: EngineModelConfig, num_slots: int) -> None:
        self._slots, self._together = num_slots, max(int(model.admit_share * num_slots), 1)
        self._cost = [model.step_s + model.sequence_s * active for active in range(num_slots + 1)]
        self._prefill_s, self._kv_tokens = model.prefill_token_s, model.kv_tokens
        self._context_s = model.context_token_s
        self._admit_tokens = model.admit_tokens
        self._is_simple = model.kv_tokens is None and model.admit_tokens is None and self._together == 1 < num_slots
        """Whoever is next in line enters any free slot."""
        self._due: float | None = None
        self._is_foreseen = True
        """`_due` is what it is called."""
        self.version = NO_VERSION
        self.released = False
        self.served = ServedVersions()
        self._time, self._tau = 0.0, 0
        """The last step boundary, in seconds and in steps."""
        self._active: list[tuple[int, int, Request, int]] = []
        """(-token clock at its end, -serial, request, sequence), ascending: the first to end is the last."""
        self._line: list[Request] = []
        self._head = self._member = 0
        """The first of the line that waits, and its first sequence that does."""
        self._kv_used = self._serial = 0
        self._context = 0
        """Tokens that the active sequences hold; means nothing without `context_token_s`, which spares the counting."""
        self._entered = NOBODY_ENTERED
        """Token clock of the last step at which somebody entered, and the prompt tokens that did."""
        self._steps, self._prompts = (0, 0, 0, 0, 0), (0, 0, 0)
        """Sums of steps and of prompts; see `Totals`."""
        self._complete: list[Request] = []
        self._base: _State | None = None
        """Where the run ahead began; None if the state is that of the last touch. It ends when a request is complete or
        when nobody waits any more."""
        self._ended_ahead: list[Request] = []

    # --- from outside ----------------------------------------------------------------------------------------------

    @property
    def due(self) -> float | None:
        """When the next request is complete, if nobody touches the server before. To be asked in the same moment as the
        last touch: touches that come together cost one look ahead."""
        if not self._is_foreseen:
            self._is_foreseen = True
            self._look_ahead()
        return self._due

    def submit(self, request: Request, now: float) -> None:
        """`request` joins the line."""
        if self._kv_tokens is not None and request.context + max(request.lengths) > self._kv_tokens:
            raise ValueError(f"a sequence of {request.context} + {max(request.lengths)} tokens exceeds kv_tokens")
        request.server = self
        if self._base is None or self._is_past(now):
            self._settle(now)
            self._line.append(request)
            self._is_foreseen = False
            return
        self._line.append(request)
        if not self._complete:
            self._run_ahead()

    def take(self) -> list[Request]:
        """The requests complete at `due`."""
        due, self._base = self.due, None
        if not self._complete and due is not None:
            self._run(due)
        complete, self._complete = self._complete, []
        self._ended_ahead.clear()
        self._is_foreseen = False
        return complete

    def update(self, version: int, now: float, seconds: float) -> float:
        """Serve `version` after a pause that begins at the next step boundary; returns when it ends."""
        self._settle(now)
        self.version = version
        self.served.add(version, self._tau)
        self._time += seconds
        ends_at = self._time
        if not self._complete:
            self._due = None
        self._is_foreseen = False
        return ends_at

    def release(self, now: float) -> float:
        """End everything with what it has, at the next step boundary, which is returned; then stand still."""
        self._settle(now)
        for finish, _, request, sequence in self._active:
            self._cut(request, sequence, request.lengths[sequence] + (finish + self._tau))
        for position, request in enumerate(self._line[self._head :]):
            for sequence in range(0 if position else self._member, len(request.lengths)):
                self._cut(request, sequence, 0)
        self._active, self._line = [], []
        self._head = self._member = self._kv_used = self._context = 0
        self._entered = NOBODY_ENTERED
        self.released = True
        self._is_foreseen = False
        return self._time

    def resume(self, now: float) -> None:
        """Serve again."""
        self._settle(now)
        self.released = False
        self._is_foreseen = False

    def cancel(self, requests: Collection[Request], now: float) -> int:
        """Nobody waits for `requests` any more; returns the tokens they had generated."""
        self._settle(now)
        generated = sum(self._progress(request) for request in requests)
        gone = [entry for entry in self._active if entry[2] in requests]
        self._kv_used -= sum(request.context + request.lengths[sequence] for _, _, request, sequence in gone)
        self._active = [entry for entry in self._active if entry[2] not in requests]
        self._context = sum(request.context + self._tau - request.start[s] for _, _, request, s in self._active)
        if not self._active:
            self._entered = NOBODY_ENTERED  # the step they entered for is never taken
        waiting = self._line[self._head :]
        if waiting and waiting[0] in requests:
            self._member = 0
        self._line = [request for request in waiting if request not in requests]
        self._head = 0
        self._complete = [request for request in self._complete if request not in requests]
        self._is_foreseen = False
        return generated

    def totals(self, now: float) -> Totals:
        """Sums up to the first step boundary at or after `now`."""
        self._settle(now)
        totals = Totals(*self._steps, *self._prompts)
        self._is_foreseen = False
        return totals

    def _progress(self, request: Request) -> int:
        """Tokens that a request of this server has at the last step boundary."""
        left = sum(-finish - self._tau for finish, _, running, _ in self._active if running is request)
        waiting = 0
        if request in self._line[self._head :]:
            first = self._member if self._line[self._head] is request else 0
            waiting = sum(request.lengths[first:])
        return sum(request.generated) - left - waiting

    # --- the replay ------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Bring the state to the first step boundary at or after `now`, or to `due` if that is the one."""
        if self._base is not None and not self._is_past(now):
            self._go_back(self._base)
        elif self._complete:
            return
        self._base = None
        self._run(now)
        self._ended_ahead.clear()
        if not self._active:
            self._time = max(self._time, now)
        if self._complete:
            self._due = self._time

    def _look_ahead(self) -> None:
        """Find the next moment at which a request is complete."""
        if self._complete:
            self._due = self._time if self._due is None else min(self._due, self._time)
            return
        if self._head < len(self._line) and not self.released:
            self._time += self._admit(self._tau) * self._prefill_s
        if self._head:
            del self._line[: self._head]
            self._head = 0
        if not self._line:
            self._due = self._foresee()
            return
        place = (self._time, self._tau, self._active.copy(), self._member, self._kv_used, self._context)
        self._base = _State(*place, self._entered, self._steps, self._prompts)
        self._run_ahead()

    def _run_ahead(self) -> None:
        self._run(math.inf)
        self._due = self._time if self._complete else self._foresee()

    def _is_past(self, now: float) -> bool:
        """Whether the run ahead has ended before `now`, because nobody waits any more."""
        return self._head == len(self._line) and not self._complete and now > self._time

    def _foresee(self) -> float | None:
        """When the first request is complete, if nothing else enters."""
        active = self._active
        if not active:
            return None
        left: dict[Request, int] = {}
        cost, time, tau, num_active = self._cost, self._time, self._tau, len(active)
        context_s, context = self._context_s, self._context
        for finish, _, request, sequence in reversed(active):
            if -finish > tau:
                steps = -finish - tau
                time += steps * cost[num_active]
                tau = -finish
                if context_s:
                    time += context_s * _held(context, num_active, steps)
                    context += steps * num_active
            left[request] = left.get(request, request.num_open) - 1
            if not left[request]:
                break
            num_active -= 1
            if context_s:
                context -= request.context + request.lengths[sequence]
        return time

    def _go_back(self, base: _State) -> None:
        self._time, self._tau, self._active, self._member, self._kv_used, self._context = base[:6]
        self._entered, self._steps, self._prompts = base[6:]
        self._head = 0
        for request in self._ended_ahead:
            request.num_open += 1
        self._ended_ahead.clear()
        self._complete.clear()
        self._base, self._due = None, None

    def _run(self, until: float) -> None:
        """Whole steps up to the first boundary at or after `until`, or to one at which a request is complete."""
        if self._is_simple and len(self._active) == self._slots and self._head < len(self._line):
            self._exchange(until)
        cost, slots, tau, time = self._cost, self._slots, self._tau, self._time
        active, line, complete = self._active, self._line, self._complete
        (n, b, bb, c, bc), released, going_ahead = self._steps, self.released, self._base is not None
        context_s = self._context_s
        while not complete:
            held_back = False
            if self._head < len(line) and len(active) < slots and not released:
                time += self._admit(tau) * self._prefill_s
                if going_ahead and self._head == len(line):
                    break
                held_back = self._is_held_back(tau)
            if not active:
                break
            num_active, finish = len(active), -active[-1][0]
            step_s, steps = cost[num_active], 1 if held_back else finish - tau
            left = (until - time) / step_s - SLACK if not context_s else self._steps_within(until - time, num_active)
            reached = left <= steps - 1
            if reached:
                steps = max(math.ceil(left), 0)
            n, b, bb = n + steps, b + steps * num_active, bb + steps * num_active * num_active
            tau += steps
            time += steps * step_s
            if context_s:
                held = _held(self._context, num_active, steps)
                time += context_s * held
                c, bc = c + held, bc + num_active * held
                self._context += steps * num_active
            if finish == tau:
                self._end(tau, time)
            if reached:
                break
        self._tau, self._time, self._steps = tau, time, (n, b, bb, c, bc)

    def _exchange(self, until: float) -> None:
        """`_run` while every slot is taken and one sequence enters wherever one ends: nearly all that happens to a
        server with a line. Stops where that is no longer so."""
        active, line, slots, head, member = self._active, self._line, self._slots, self._head, self._member
        time, prefill_s, step_s, serial = self._time, self._prefill_s, self._cost[slots], self._serial
        tau = first_tau = self._tau
        p = pp = c = 0
        context_s, context = self._context_s, self._context
        going_ahead, ahead, last = self._base is not None, self._ended_ahead, len(line) - 1
        while head < last or member < len(line[head].lengths) - 1:
            finish = -active[-1][0]
            steps = finish - tau
            if active[-2][0] == -finish or active[-1][2].num_open == 1:
                break
            taken_s = steps * step_s
            if context_s:
                held = _held(context, slots, steps)
                taken_s += context_s * held
            if time + taken_s - SLACK * step_s >= until:
                break
            _, _, ended, sequence = active.pop()
            tau = finish
            time += taken_s
            ended.ended[sequence] = time
            ended.num_open -= 1
            if going_ahead:
                ahead.append(ended)
            request = line[head]
            insort(active, (-tau - request.lengths[member], -serial - member, request, member))
            serial += len(request.lengths)
            request.start[member] = tau
            prompt = request.context
            time += prompt * prefill_s
            p, pp = p + prompt, pp + prompt * prompt
            if context_s:
                context += steps * slots - ended.context - ended.lengths[sequence] + prompt
                c += held
            member += 1
            if member == len(request.lengths):
                head, member = head + 1, 0
        if tau > first_tau:
            self._count(tau - first_tau, slots, c, p, pp)
            self._context = context
            self._tau, self._time, self._head, self._member, self._serial = tau, time, head, member, serial

    def _steps_within(self, seconds: float, num_active: int) -> float:
        """How many steps take `seconds`, if contexts grow and nothing enters or ends; less the slack."""
        growth_s = self._context_s * num_active / 2
        first_s = self._cost[num_active] + self._context_s * self._context - growth_s
        if seconds <= 0 or seconds == math.inf:
            return seconds
        return 2 * seconds / (first_s + math.sqrt(first_s * first_s + 4 * growth_s * seconds)) - SLACK

    def _count(self, steps: int, num_active: int, c: int, p: int, pp: int) -> None:
        (n, b, bb, contexts, bc), (tokens, by_active, squared) = self._steps, self._prompts
        steps_of_all = b + steps * num_active, bb + steps * num_active * num_active
        self._steps = n + steps, *steps_of_all, contexts + c, bc + num_active * c
        self._prompts = tokens + p, by_active + p * num_active, squared + pp

    def _is_held_back(self, tau: int) -> bool:
        """Whether the first in line waits for nothing but the next step's share of prompts."""
        if self._admit_tokens is None or self._head == len(self._line) or self._entered[0] != tau:
            return False
        return self._line[self._head].context > self._admit_tokens - self._entered[1]

    def _admit(self, tau: int) -> int:
        """Fill free slots from the line; returns the prompt tokens that this adds to the step."""
        line, active, limit = self._line, self._active, self._admit_tokens
        free, tokens = self._slots - len(active), 0
        while free and self._head < len(line):
            request, first = line[self._head], self._member
            left = len(request.lengths) - first
            if free < self._together and free < left:
                break
            if limit is not None and self._entered[0] == tau and request.context > limit - self._entered[1]:
                break
            num_new = left if left < free else free
            if self._kv_tokens is not None:
                num_new = self._num_that_fit(request, first, num_new)
            if num_new == 0:
                break
            self._place(request, first, num_new, tau)
            tokens += request.context
            free -= num_new
            self._entered = tau, request.context + (self._entered[1] if self._entered[0] == tau else 0)
            if num_new == left:
                self._head, self._member = self._head + 1, 0
            else:
                self._member += num_new
        if tokens:
            p, bp, pp = self._prompts
            self._prompts = p + tokens, bp + tokens * len(active), pp + tokens * tokens
        return tokens

    def _place(self, request: Request, first: int, num_new: int, tau: int) -> None:
        """Sequences of `request` from `first` on become active."""
        active, lengths, serial = self._active, request.lengths, self._serial
        self._serial += len(lengths)
        self._context += num_new * request.context
        if num_new == 1:
            insort(active, (-tau - lengths[first], -serial - first, request, first))
            request.start[first] = tau
        else:
            sequences = range(first, first + num_new)
            active.extend([(-tau - lengths[sequence], -serial - sequence, request, sequence) for sequence in sequences])
            active.sort()
            request.start[first : first + num_new] = [tau] * num_new

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
        active, going_back = self._active, self._base is not None
        while active and active[-1][0] == -tau:
            _, _, request, sequence = active.pop()
            request.ended[sequence] = time
            request.num_open -= 1
            self._context -= request.context + request.lengths[sequence]
            if going_back:
                self._ended_ahead.append(request)
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


def _held(context: int, num_active: int, steps: int) -> int:
    """Tokens held, summed over `steps` that begin with `context` and add one to each of `num_active` sequences."""
    return steps * context + num_active * (steps * (steps - 1) // 2)
