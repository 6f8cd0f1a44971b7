"""The sequences being generated, and their per-row state as dense arrays: row i lives in KV slot i."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.rollout.request import GenerateRequest
from penstock.rollout.sampling import RowParams
from penstock.types import FinishReason, Segment, VersionSpan


class Running:
    """A request inside the engine: collects its samples' segments until all are there."""

    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.sequences: list[Sequence] = []
        """Those that have started, by index."""
        self.segments: dict[int, Segment] = {}
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


class Sequence:
    """One sample of a running request."""

    __slots__ = (
        "_span_start",
        "_spans",
        "index",
        "logprobs",
        "max_new_tokens",
        "params",
        "running",
        "shapes_logits",
        "stop_ids",
        "token_ids",
        "top_logprobs",
    )

    def __init__(self, running: Running, index: int, eos_ids: frozenset[int]) -> None:
        self.params = params = running.request.params
        self.shapes_logits = params.shapes_logits
        self.running = running
        self.index = index
        self.max_new_tokens = running.request.max_new_tokens[index]
        self.stop_ids = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos_ids
        self.token_ids: list[int] = []
        self.logprobs: list[float] = []
        self.top_logprobs: list[list[tuple[float, int]]] | None = [] if params.top_logprobs else None
        self._spans: list[VersionSpan] = []
        self._span_start = 0

    def append(self, token: int, logprob: float) -> FinishReason | None:
        """Take the next token; says whether it was the last."""
        self.token_ids.append(token)
        self.logprobs.append(logprob)
        ends = self.running.request.ends
        if token in self.stop_ids or (ends is not None and ends(self.token_ids)):
            return "stop"
        return "length" if len(self.token_ids) >= self.max_new_tokens else None

    def close_span(self, policy_version: int) -> None:
        """Everything since the last span was sampled by `policy_version`."""
        end = len(self.token_ids)
        if end > self._span_start:
            start = self._span_start
            if self._spans and self._spans[-1].policy_version == policy_version:
                start = self._spans.pop().start
            self._spans.append(VersionSpan(policy_version, start, end))
            self._span_start = end

    def finish(self, reason: FinishReason, policy_version: int) -> None:
        """Hand the segment to the request."""
        self.close_span(policy_version)
        self.running.segments[self.index] = Segment(
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            spans=self._spans,
            finish_reason=reason,
            top_logprobs=self.top_logprobs,
        )


class Rows:
    """Rows 0..len-1 are active. `positions[i]` is where row i's latest token goes in its slot."""

    def __init__(self, capacity: int) -> None:
        self.sequences: list[Sequence] = []
        self.tokens = np.zeros(capacity, dtype=np.int64)
        self.positions = np.zeros(capacity, dtype=np.int64)
        self._seeds = np.zeros(capacity, dtype=np.uint64)
        self._temperatures = np.zeros(capacity, dtype=np.float32)
        self._top_ps = np.zeros(capacity, dtype=np.float32)
        self._top_ks = np.zeros(capacity, dtype=np.int64)
        self._min_ps = np.zeros(capacity, dtype=np.float32)

    def __len__(self) -> int:
        return len(self.sequences)

    def append(self, sequence: Sequence) -> None:
        """Add a row whose prompt, and answer so far, is about to be computed."""
        row, request = len(self), sequence.running.request
        self.sequences.append(sequence)
        self.positions[row] = len(request.prompt_ids) + len(sequence.token_ids) - 1
        self._seeds[row] = request.seeds[sequence.index] % 2**64
        self._temperatures[row] = request.params.temperature
        self._top_ps[row] = request.params.top_p
        self._top_ks[row] = request.params.top_k
        self._min_ps[row] = request.params.min_p

    def clear(self) -> list[Sequence]:
        """Empty all rows; returns who was in them."""
        sequences, self.sequences = self.sequences, []
        return sequences

    @property
    def seeds(self) -> npt.NDArray[np.uint64]:
        return self._seeds[: len(self)]

    @property
    def params(self) -> RowParams:
        num_rows = len(self)
        return RowParams(
            temperatures=self._temperatures[:num_rows],
            top_ps=self._top_ps[:num_rows],
            top_ks=self._top_ks[:num_rows],
            min_ps=self._min_ps[:num_rows],
        )

    def move(self, source: npt.NDArray[np.int64], target: npt.NDArray[np.int64], num_rows: int) -> None:
        """Apply slot moves and keep the first `num_rows` rows."""
        shapes = (self._temperatures, self._top_ps, self._top_ks, self._min_ps)
        for array in (self.tokens, self.positions, self._seeds, *shapes):
            array[target] = array[source]
        moved = [self.sequences[row] for row in source]
        for row, sequence in zip(target, moved, strict=True):
            self.sequences[row] = sequence
        del self.sequences[num_rows:]
