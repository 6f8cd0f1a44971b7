"""The queue of requests that wait for a slot and memory. It computes each prompt as rarely as possible.

Requests are admitted in order of arrival, with one exception: a prompt that is mostly cached may overtake others that
are not. So an episode continues while its keys and values are there, before other episodes begin and replace them. The
first request of the queue is overtaken by at most `MOST_OVERTAKING` others. So no request waits forever.

A prompt that begins with cached tokens reuses their keys and values. A prompt with more other tokens than one step may
compute is computed in parts: each step computes a part, the prefix cache keeps it, and the next step finds it there.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol

from penstock.rollout.prefix_cache import Node, PrefixCache, WaitingPrompt
from penstock.rollout.slot_rows import RunningRequest, SlotSequence
from penstock.routed_experts import Record

PREFILL_TOKENS = 4096
"""Prompt tokens that one step may add to its forward. This bounds memory and the delay of running sequences."""

MOST_OVERTAKING = 8
"""Number of requests that may overtake the first one of the queue. So a request waits for at most nine times as many
admissions as there are requests before it."""

RETURNED = -(2**62)
"""Rank of the first sample that lost its slot. The first request that ever waited has rank 0."""


@dataclass(slots=True, kw_only=True)
class Admission:
    """A prompt to compute, and the samples that continue it."""

    running: RunningRequest
    prompt_ids: list[int]
    prefix: list[Node]
    """The cached blocks that the prompt begins with."""
    block_tokens: int
    is_part: bool = False
    """The prompt continues, so there are no samples yet. A step with a part admits nothing else."""
    sequences: list[SlotSequence] = field(default_factory=list)
    experts: Record | None = None
    """The experts of the computed tokens, once they are computed. None: they are not recorded."""

    @property
    def start(self) -> int:
        """Position of the first token to compute."""
        return len(self.prefix) * self.block_tokens

    @property
    def num_computed(self) -> int:
        """Number of tokens to compute."""
        return len(self.prompt_ids) - self.start

    @property
    def num_slots(self) -> int:
        """Number of slots that get its keys and values. A part is computed in the slot after those of all samples."""
        return max(len(self.sequences), 1)

    @property
    def is_routed(self) -> bool:
        """Return whether the experts of its tokens are recorded."""
        return self.running.request.routed_from is not None

    def route(self, experts: Record) -> None:
        """Record the experts of its computed tokens, [num_computed, width], for its samples too."""
        self.experts = experts
        for sequence in self.sequences:
            if sequence.num_routed is not None:
                for number in range(sequence.num_routed // self.block_tokens, len(self.prefix)):
                    reused = self.prefix[number].experts
                    assert reused is not None  # `PrefixCache.find` ends before a block without a record
                    sequence.route(number * self.block_tokens, reused)
            sequence.route(self.start, experts)

    def record(self, start: int, end: int) -> Record | None:
        """Return the experts that computed the tokens [start, end), or None if they are not recorded here."""
        if self.experts is None or start < self.start:
            return None
        return self.experts[start - self.start : end - self.start]


class KVMemory(Protocol):
    """The memory for keys and values, in blocks of `block_tokens` tokens."""

    @property
    def block_tokens(self) -> int: ...

    @property
    def prefixes(self) -> PrefixCache: ...

    def needs(self, num_tokens: int, prefix: Sequence[Node]) -> tuple[int, int]:
        """Return how many blocks the first sample of a prompt with a cached prefix needs, and each other one."""
        ...


class AdmissionQueue:
    """The requests with samples that have no slot yet.

    The samples of a request start in batches, and each batch computes the end of the prompt again. So the first request
    waits until a whole batch fits. A batch is at most an eighth of the slots, so this wait leaves at most an eighth of
    them idle.
    """

    def __init__(self, memory: KVMemory, *, num_slots: int, eos_ids: frozenset[int]) -> None:
        self._memory, self._prefixes = memory, memory.prefixes
        self._num_slots = num_slots
        self._largest_batch = max(num_slots // 8, 1)
        self._eos_ids = eos_ids
        self._numbers = count()
        self._line: OrderedDict[RunningRequest, None] = OrderedDict()
        self._cached: OrderedDict[RunningRequest, None] = OrderedDict()
        """The requests in the line that were mostly cached when they arrived."""
        self._num_overtaking = 0
        """Number of requests that overtook the first one of the line."""
        self._returned: deque[SlotSequence] = deque()
        """Samples that lost their slot. They are admitted before all other samples."""
        self._arrivals = count()
        self._expected: dict[RunningRequest | SlotSequence, WaitingPrompt] = {}
        """What the prefix cache knows of each of these requests and samples."""

    @property
    def num_samples(self) -> int:
        """Number of samples without a slot."""
        return len(self._returned) + sum(running.num_waiting for running in tuple(self._line))  # read by any thread

    @property
    def num_returned(self) -> int:
        """Number of waiting samples that had a slot and lost it."""
        return len(self._returned)

    def add(self, running: RunningRequest) -> None:
        """Append a request to the queue."""
        self._line[running] = None
        self._expect(running, running.request.prompt_ids, next(self._arrivals))
        if self._is_cached(running):
            self._cached[running] = None

    def requeue(self, sequences: Iterable[SlotSequence]) -> None:
        """Put samples at the head of the queue, the oldest first. Their keys and values are computed again. Their
        tokens so far count as part of the prompt."""
        for sequence in sequences:
            self._expect(sequence, sequence.prompt_ids, RETURNED + sequence.number)
        self._returned = deque(sorted((*self._returned, *sequences), key=lambda sequence: sequence.number))

    def _expect(self, waiting: RunningRequest | SlotSequence, prompt_ids: Sequence[int], rank: int) -> None:
        self._expected[waiting] = self._prefixes.expect(prompt_ids, rank)

    def _forget(self, waiting: RunningRequest | SlotSequence) -> None:
        self._prefixes.forget(self._expected.pop(waiting))

    def remove(self, running: RunningRequest) -> list[SlotSequence]:
        """Remove a request from the queue and return its samples that have no slot."""
        mine = [sequence for sequence in self._returned if sequence.running is running]
        for sequence in mine:
            self._forget(sequence)
        if mine:
            self._returned = deque(sequence for sequence in self._returned if sequence.running is not running)
        if running.num_waiting:
            self._leave(running)
            mine += self._start(running, running.num_waiting)
        return mine

    def admit(self, free: int, room: int, *, new: bool = True) -> list[Admission]:
        """Return admissions for `free` slots, ordered by prompt length. Without `new`, admit only started samples.

        `room`: number of blocks for keys and values. A sample needs those of its prompt and one more, so that it can
        grow for a while. If nothing is running, the first sample gets what it needs in any case."""
        admissions: list[Admission] = []
        budget, is_idle = PREFILL_TOKENS, free == self._num_slots
        while self._returned and free:
            sequence = self._returned[0]
            prompt_ids = sequence.prompt_ids
            admission = self._admission(sequence.running, prompt_ids, sequence.num_routed)
            num_blocks, _ = self._memory.needs(len(prompt_ids), admission.prefix)
            if num_blocks >= room and (admissions or not is_idle):
                break
            if admissions and admission.num_computed > budget:
                break
            if self._has_parts(admission):
                return [self._part(admission)]
            admission.sequences.append(self._returned.popleft())
            self._forget(sequence)
            admissions.append(admission)
            free -= 1
            room -= num_blocks + 1
            budget -= admission.num_computed
        while new and self._line and not self._returned:
            running = self._next()
            request = running.request
            if min(running.num_waiting, self._largest_batch) > free:
                break
            admission = self._admission(running, request.prompt_ids, request.routed_from)
            first, further = self._memory.needs(len(request.prompt_ids), admission.prefix)
            if first >= room and (admissions or not is_idle):
                break
            if admissions and admission.num_computed > budget:
                break
            if self._has_parts(admission):
                return [self._part(admission)]
            num_fitting = 1 + max(room - first - 1, 0) // (further + 1)
            self._num_overtaking += running is not next(iter(self._line))
            admission.sequences += self._start(running, min(running.num_waiting, free, num_fitting))
            admissions.append(admission)
            free -= len(admission.sequences)
            room -= first + 1 + (len(admission.sequences) - 1) * (further + 1)
            budget -= admission.num_computed
            if not running.num_waiting:
                self._leave(running)
        return sorted(admissions, key=lambda admission: (len(admission.prompt_ids), admission.start))

    def _next(self) -> RunningRequest:
        """Return the request of the line that is admitted next."""
        first = next(iter(self._line))
        if self._num_overtaking >= MOST_OVERTAKING or self._is_cached(first):
            return first
        while self._cached:
            running = next(iter(self._cached))
            if self._is_cached(running):
                return running
            del self._cached[running]  # evicted since it arrived
        return first

    def _is_cached(self, running: RunningRequest) -> bool:
        """Return whether most of a prompt is cached, and one step may compute the other tokens."""
        num_cached = self._expected[running].num_cached * self._memory.block_tokens
        num_others = len(running.request.prompt_ids) - num_cached
        return num_others <= min(num_cached, PREFILL_TOKENS)

    def _leave(self, running: RunningRequest) -> None:
        """Remove a request from the line."""
        if running is next(iter(self._line)):
            self._num_overtaking = 0
        del self._line[running]
        self._cached.pop(running, None)
        self._forget(running)

    def _admission(self, running: RunningRequest, prompt_ids: list[int], routed_from: int | None) -> Admission:
        """Return the admission of a prompt, without samples."""
        prefix = self._prefixes.find(prompt_ids, routed_from=routed_from)
        return Admission(running=running, prompt_ids=prompt_ids, prefix=prefix, block_tokens=self._memory.block_tokens)

    def _has_parts(self, admission: Admission) -> bool:
        """Return whether the prompt is computed in parts: a step may not compute all of it, and the cache can keep the
        parts until the last one."""
        return admission.num_computed > PREFILL_TOKENS and self._prefixes.can_keep(len(admission.prompt_ids))

    def _part(self, admission: Admission) -> Admission:
        """Return the part of the prompt that this step computes."""
        end = admission.start + PREFILL_TOKENS // self._memory.block_tokens * self._memory.block_tokens
        return replace(admission, prompt_ids=admission.prompt_ids[:end], is_part=True)

    def _start(self, running: RunningRequest, num_samples: int) -> list[SlotSequence]:
        first = running.num_started
        started = [
            SlotSequence(running, index, self._eos_ids, number=next(self._numbers))
            for index in range(first, first + num_samples)
        ]
        running.sequences += started
        return started
