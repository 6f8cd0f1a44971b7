"""The first-come-first-served queue of requests that wait for a slot and memory. It computes each prompt as rarely as
possible.

A prompt that begins with cached tokens reuses their keys and values. A prompt with more other tokens than one step may
compute is computed in parts: each step computes a part, the prefix cache keeps it, and the next step finds it there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Protocol

from penstock.rollout.prefix_cache import Node, PrefixCache
from penstock.rollout.slot_rows import RunningRequest, SlotSequence
from penstock.routed_experts import Record

PREFILL_TOKENS = 4096
"""Prompt tokens that one step may add to its forward. This bounds memory and the delay of running sequences."""


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
        self._line: deque[RunningRequest] = deque()
        self._returned: deque[SlotSequence] = deque()
        """Samples that lost their slot. They are admitted before all other samples."""

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
        self._line.append(running)

    def requeue(self, sequences: Iterable[SlotSequence]) -> None:
        """Put samples at the head of the queue, the oldest first. Their keys and values are computed again. Their
        tokens so far count as part of the prompt."""
        self._returned = deque(sorted((*self._returned, *sequences), key=lambda sequence: sequence.number))

    def remove(self, running: RunningRequest) -> list[SlotSequence]:
        """Remove a request from the queue and return its samples that have no slot."""
        mine = [sequence for sequence in self._returned if sequence.running is running]
        if mine:
            self._returned = deque(sequence for sequence in self._returned if sequence.running is not running)
        if running.num_waiting:
            self._line.remove(running)
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
            prompt_ids = sequence.running.request.prompt_ids + sequence.token_ids
            admission = self._admission(sequence.running, prompt_ids, sequence.num_routed)
            num_blocks, _ = self._memory.needs(len(prompt_ids), admission.prefix)
            if num_blocks >= room and (admissions or not is_idle):
                break
            if admissions and admission.num_computed > budget:
                break
            if self._has_parts(admission):
                return [self._part(admission)]
            admission.sequences.append(self._returned.popleft())
            admissions.append(admission)
            free -= 1
            room -= num_blocks + 1
            budget -= admission.num_computed
        while new and self._line and not self._returned:
            running, request = self._line[0], self._line[0].request
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
            admission.sequences += self._start(running, min(running.num_waiting, free, num_fitting))
            admissions.append(admission)
            free -= len(admission.sequences)
            room -= first + 1 + (len(admission.sequences) - 1) * (further + 1)
            budget -= admission.num_computed
            if not running.num_waiting:
                self._line.popleft()
        return sorted(admissions, key=lambda admission: (len(admission.prompt_ids), admission.start))

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
