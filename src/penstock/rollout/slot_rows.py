"""The sequences that are being generated, and their per-row state in dense arrays. Row i has KV slot i, or
table i of blocks."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from penstock.rollout.request import GenerateRequest
from penstock.routed_experts import Record
from penstock.samples import Segment, VersionSpan
from penstock.types import FinishReason

logger = logging.getLogger(__name__)


class RunningRequest:
    """A request inside the engine. It collects the segments of its samples until all have ended."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.sequences: list[SlotSequence] = []
        """The samples that have started, in order of their index."""
        self.segments: dict[int, Segment] = {}
        self.num_in_parts = 0
        """Tokens of its prompt that were computed in parts, since samples of it started last."""
        self.error: str | None = None

    @property
    def num_started(self) -> int:
        return len(self.sequences)

    @property
    def num_waiting(self) -> int:
        return len(self.request.seeds) - self.num_started

    @property
    def done(self) -> bool:
        return self.error is not None or len(self.segments) == len(self.request.seeds)

    @contextmanager
    def failing_alone(self) -> Iterator[None]:
        """Turn an exception of the body into the failure of this request. A panic of a Rust library, such as the
        tokenizer, is a BaseException."""
        try:
            yield
        except BaseException as error:
            self.error = f"the request cannot be computed: {error!r}"
            logger.exception("request %s failed", self.request.rid)


class SlotSequence:
    """One sample of a running request."""

    def __init__(self, running: RunningRequest, index: int, eos_ids: frozenset[int], *, number: int) -> None:
        """`number`: how many samples the engine has started before."""
        self.params = params = running.request.params
        self.shapes_logits = params.shapes_logits
        self.running = running
        self.index = index
        self.number = number
        self.max_new_tokens = running.request.max_new_tokens[index]
        self.stop_ids = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos_ids
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[float, int]]] | None = [] if params.top_logprobs else None
        self.keys_are_served = True
        """Whether the served weights computed all keys and values in its slot."""
        self.num_routed = running.request.routed_from
        """Position of the first token whose experts are still to be recorded. None: none are."""
        self._kept_from = running.request.routed_from or 0
        """Position from which on the recorded experts computed the keys and values in its slot."""
        self._experts: list[Record] = []
        self._spans: list[VersionSpan] = []
        self._span_start = 0

    @property
    def is_routed(self) -> bool:
        """Return whether the experts of its tokens are recorded."""
        return self.num_routed is not None

    @property
    def prompt_ids(self) -> list[int]:
        """Return all tokens. If the sample lost its slot, they are computed again as a prompt."""
        return self.running.request.prompt_ids + self.token_ids

    @property
    def computed_ids(self) -> list[int]:
        """Return all tokens but the newest one. Their keys and values are in its slot."""
        return self.running.request.prompt_ids + self.token_ids[:-1]

    def route(self, first: int, experts: Record) -> None:
        """Record the experts of the tokens from position `first` on, [n, width]. Of tokens that are computed again the
        first record stays, since later tokens were sampled with it."""
        if self.num_routed is None:
            return
        if first < self.num_routed:
            self._kept_from = self.num_routed
        if first + len(experts) > self.num_routed:
            self._experts.append(experts[self.num_routed - first :])
            self.num_routed = first + len(experts)

    def record(self, start: int, end: int) -> Record | None:
        """Return the experts that computed the keys and values of the tokens [start, end) in its slot, or None if they
        are not recorded."""
        if self.num_routed is None or start < self._kept_from or end > self.num_routed:
            return None
        if len(self._experts) > 1:
            self._experts = [np.concatenate(self._experts)]
        first = self.num_routed - len(self._experts[0])
        return self._experts[0][start - first : end - first]

    def append(self, token: int, logprob: float) -> FinishReason | None:
        """Append the next token. Return the finish reason if it was the last token, otherwise None."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        if token in self.stop_ids or (self.running.request.ends is not None and self._ends()):
            return "stop"
        return "length" if len(self.token_ids) >= self.max_new_tokens else None

    def _ends(self) -> bool:
        """Return whether the request's own function ends the sample here."""
        assert self.running.request.ends is not None
        found = False
        with self.running.failing_alone():
            found = self.running.request.ends(self.token_ids)
        return found

    def close_span(self, policy_version: int) -> None:
        """Record that `policy_version` sampled all tokens since the last span."""
        end = len(self.token_ids)
        if end > self._span_start:
            start = self._span_start
            if self._spans and self._spans[-1].policy_version == policy_version:
                start = self._spans.pop().start
            self._spans.append(VersionSpan(policy_version, start, end))
            self._span_start = end

    def finish(self, reason: FinishReason, policy_version: int) -> None:
        """Finish the sample and pass its segment to the request."""
        self.close_span(policy_version)
        self.running.segments[self.index] = Segment(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            spans=self._spans,
            finish_reason=reason,
            top_logprobs=self.top_logprobs,
            experts=np.concatenate(self._experts) if self._experts else None,
        )


ROW = np.dtype([("seed", "u8"), ("top_k", "i8"), ("temperature", "f4"), ("top_p", "f4"), ("min_p", "f4")], align=True)
"""Sampling parameters of a row. `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 restrict nothing."""


class Rows:
    """The rows of a step. Rows 0..len-1 are active. `positions[i]` is the position of row i's latest token."""

    def __init__(self, capacity: int) -> None:
        self.sequences: list[SlotSequence] = []
        self.tokens = np.zeros(capacity, dtype=np.int64)
        self.positions = np.zeros(capacity, dtype=np.int64)
        self._params = np.zeros(capacity, dtype=ROW)

    def __len__(self) -> int:
        return len(self.sequences)

    def append(self, sequence: SlotSequence) -> None:
        """Add a row for a sequence. The next forward computes its prompt and its answer so far."""
        row, request, params = len(self), sequence.running.request, sequence.params
        self.sequences.append(sequence)
        self.positions[row] = len(request.prompt_ids) + len(sequence.token_ids) - 1
        seed = request.seeds[sequence.index] % 2**64
        self._params[row] = (seed, params.top_k, params.temperature, params.top_p, params.min_p)

    def clear(self) -> list[SlotSequence]:
        """Empty all rows and return their sequences."""
        sequences, self.sequences = self.sequences, []
        return sequences

    @property
    def params(self) -> npt.NDArray[np.void]:
        """The sampling parameters of the active rows, as `ROW`."""
        return self._params[: len(self)]

    def move(self, source: npt.NDArray[np.int64], target: npt.NDArray[np.int64], num_rows: int) -> None:
        """Apply slot moves and keep the first `num_rows` rows."""
        for array in (self.tokens, self.positions, self._params):
            array[target] = array[source]
        moved = [self.sequences[row] for row in source]
        for row, sequence in zip(target, moved, strict=True):
            self.sequences[row] = sequence
        del self.sequences[num_rows:]
