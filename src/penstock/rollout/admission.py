"""Requests waiting for slots: first come first served, a prompt computed as rarely as possible."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from penstock.rollout.rows import Running, Sequence

PREFILL_TOKENS = 4096
"""Prompt tokens that one step may add to its forward; bounds memory and the delay of running sequences."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """A prompt to compute and the samples that continue it."""

    prompt_ids: list[int]
    sequences: list[Sequence]


class WaitingLine:
    """The requests with samples that have no slot yet.

    The first in line waits until a whole part of its samples fits, because each part computes the prompt again. A
    part is at most an eighth of the slots, so that this never leaves more than that idle.
    """

    def __init__(self, *, num_slots: int, eos_ids: frozenset[int]) -> None:
        self._largest_part = max(num_slots // 8, 1)
        self._eos_ids = eos_ids
        self._line: deque[Running] = deque()
        self._returned: deque[Sequence] = deque()
        """Samples that lost their slot and go before everyone else."""

    @property
    def num_samples(self) -> int:
        """Samples without a slot."""
        return len(self._returned) + sum(running.num_waiting for running in tuple(self._line))  # asked from any thread

    @property
    def num_returned(self) -> int:
        """Of these, the ones that had one."""
        return len(self._returned)

    def add(self, running: Running) -> None:
        """To the end of the line."""
        self._line.append(running)

    def give_back(self, sequences: Iterable[Sequence]) -> None:
        """To the head of the line: samples whose keys and values are to be computed again, their answers so far being
        part of the prompt."""
        self._returned.extend(sequences)

    def leave(self, running: Running) -> list[Sequence]:
        """Take a request out; returns its samples that have no slot."""
        mine = [sequence for sequence in self._returned if sequence.running is running]
        if mine:
            self._returned = deque(sequence for sequence in self._returned if sequence.running is not running)
        if running.num_waiting:
            self._line.remove(running)
            mine += self._start(running, running.num_waiting)
        return mine

    def admit(self, free: int, *, new: bool = True) -> list[Admission]:
        """What goes into `free` slots now, ordered by prompt length; unless `new`, only samples that had started."""
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

    def _start(self, running: Running, num_samples: int) -> list[Sequence]:
        first = running.num_started
        started = [Sequence(running, index, self._eos_ids) for index in range(first, first + num_samples)]
        running.sequences += started
        return started
