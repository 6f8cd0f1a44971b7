"""A trainer that only takes time. Its entropy falls like that of a real run."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.config import TrainerModelConfig
from penstock.ports.training import LAGS, SavedStates, TrainerState
from penstock.simulator.activity import AddSpan
from penstock.simulator.experience import Experience
from penstock.types import GroupRef, LearnerState, WeightsHandle
from penstock.version_history import VersionHistory

TRAINER = "trainer-0"
"""Name of the process in the records."""
ENTROPY_FIRST, ENTROPY_LAST, ENTROPY_STEPS = 1.0, 0.2, 40.0
"""Entropy in nats per token. It falls from the first value towards the last as exp(-step / steps): fast early, slowly
late, as measured in arXiv 2505.22617."""


class TrainerWithoutCheckpoints:
    """The methods of `ports.Trainer` for recovery, in a trainer that is never lost and has nothing to restore."""

    async def state(self) -> TrainerState:
        return TrainerState(begun=False)

    async def saved(self, directory: Path) -> SavedStates:
        return SavedStates(newest=None)

    async def begin(self, *, policy_version: int, history: VersionHistory) -> Mapping[str, float]:
        return {}

    async def restore(self, directory: Path, *, step: int, policy_version: int, history: VersionHistory) -> None:
        """Do nothing. Never called, because there are no checkpoints."""

    async def begin_checkpoint(self, directory: Path, state: Mapping[str, Any], *, best: int | None) -> None:
        """Do nothing: a checkpoint takes no time and stores nothing."""

    async def finish_checkpoint(self) -> None:
        """Return at once."""


class TrainerModel(TrainerWithoutCheckpoints):
    """A `ports.Trainer` that takes call_s per call plus token_s per token for gradients, and step_s per step. Weights
    are written for publish_s beside that; a step waits for it."""

    def __init__(self, model: TrainerModelConfig, experience: Experience) -> None:
        self._model, self._experience = model, experience
        self._version = 0
        self._tokens = 0
        self.busy_s = 0.0
        self._written_at = 0.0
        """When the newest weights are written."""
        self._masked = 0
        self.add_span: AddSpan | None = None
        """What is told when the learner worked; None in a run without records."""

    async def accumulate(self, groups: Sequence[GroupRef]) -> Mapping[str, float]:
        costs = [self._experience.train(ref, self._version) for ref in groups]
        masked = sum(cost.masked_tokens for cost in costs)
        trained = sum(cost.response_tokens for cost in costs) - masked
        self._tokens += trained
        self._masked += masked
        await self._work("train", self._model.call_s + self._model.token_s * sum(cost.tokens for cost in costs))
        return {"tokens": float(trained), "tokens_masked_stale": float(masked)}

    async def step(self) -> LearnerState:
        await self._until_written()
        await self._work("step", self._model.step_s)
        entropy = ENTROPY_LAST + (ENTROPY_FIRST - ENTROPY_LAST) * math.exp(-self._version / ENTROPY_STEPS)
        self._version += 1
        metrics = {"tokens": float(self._tokens), "tokens_masked_stale": float(self._masked), **self._staleness()}
        self._tokens = self._masked = 0
        return LearnerState(policy_version=self._version, entropy=entropy, metrics=metrics)

    def _staleness(self) -> dict[str, float]:
        """Return the staleness of the tokens trained since the last step; empty if it was not counted."""
        lags = self._experience.take_lags()
        tokens = sum(lags.values())
        if not tokens:
            return {}
        named: Counter[str] = Counter()
        for lag, number in lags.items():
            named[LAGS[min(lag, len(LAGS) - 1)]] += number
        mean = sum(lag * number for lag, number in lags.items()) / tokens
        return {"staleness_mean": mean, "staleness_max": float(max(lags)), **named}

    async def begin_publish(self) -> int:
        began = asyncio.get_running_loop().time()
        self._written_at = began + self._model.publish_s
        if self.add_span is not None and self._model.publish_s:
            self.add_span(TRAINER, "publish", began, self._written_at, self._version)
        return self._version

    async def finish_publish(self, policy_version: int) -> WeightsHandle:
        await self._until_written()
        return WeightsHandle(policy_version=policy_version, path="simulated", num_bytes=0, fingerprint="simulated")

    async def _until_written(self) -> None:
        """Wait for the newest weights. Older ones are written before."""
        await asyncio.sleep(max(self._written_at - asyncio.get_running_loop().time(), 0.0))

    async def _work(self, kind: str, seconds: float) -> None:
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(seconds)
        self.busy_s += seconds
        if self.add_span is not None and seconds:
            self.add_span(TRAINER, kind, began, began + seconds, self._version)
