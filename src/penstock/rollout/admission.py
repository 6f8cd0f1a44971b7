"""The first-come-first-served queue of requests that wait for slots. It computes each prompt as rarely as possible."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.rollout.slot_rows import RunningRequest, SlotSequence

PREFILL_TOKENS = 4096
"""Prompt tokens that one step may add to its forward. This bounds memory and the delay of running sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A prompt to compute, and the samples that continue it."""

    prompt_ids: list[int]
    sequences: list[SlotSequence]


class AdmissionQueue:
    """The requests with samples that have no slot yet.

    The samples of a request start in parts, and each part computes the prompt again. So the first request waits until a
    whole part fits. A part is at most an eighth of the slots, so this wait leaves at most an eighth of them idle.
    """

    def __init__(self, *, num_slots: int, eos_ids: frozenset[int]) -> None:
        self._largest_part = max(num_slots // 8, 1)
        self._eos_ids = eos_ids
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
        """Put samples at the head of the queue. Their keys and values are computed again. Their tokens so far count as
        part of the prompt."""
        self._returned.extend(sequences)

    def remove(self, running: RunningRequest) -> list[SlotSequence]:
        """Remove a request from the queue and return its samples that have no slot."""
        mine = [sequence for sequence in self._returned if sequence.running is running]
        if mine:
            self._returned = deque(sequence for sequence in self._returned if sequence.running is not running)
        if running.num_waiting:
            self._line.remove(running)
            mine += self._start(running, running.num_waiting)
        return mine

    def admit(self, free: int, *, new: bool = True) -> list[Admission]:
        """Return admissions for `free` slots, ordered by prompt length. Without `new`, admit only started samples."""
        admissions: list[Admission] = []
        budget = PREFILL_TOKENS
        while self._returned and free:
            sequence = self._returned[0]
            so_far = sequence.running.request.prompt_ids + sequence.token_ids
            if admissions and len(so_far) > budget:
                break
            self._returned.popleft()
            admissions.append(Admission(prompt_ids=so_far, sequences=[sequence]))
            free -= 1
            budget -= len(so_far)
        while new and self._line and not self._returned:
            running = self._line[0]
            prompt_ids = running.request.prompt_ids
            no_part_fits = min(running.num_waiting, self._largest_part) > free
            if no_part_fits or (admissions and len(prompt_ids) > budget):
                break
            sequences = self._start(running, min(running.num_waiting, free))
            admissions.append(Admission(prompt_ids=prompt_ids, sequences=sequences))
            free -= len(sequences)
            budget -= len(prompt_ids)
            if not running.num_waiting:
                self._line.popleft()
        return sorted(admissions, key=lambda admission: len(admission.prompt_ids))

    def _start(self, running: RunningRequest, num_samples: int) -> list[SlotSequence]:
        first = running.num_started
        started = [SlotSequence(running, index, self._eos_ids) for index in range(first, first + num_samples)]
        running.sequences += started
        return started
