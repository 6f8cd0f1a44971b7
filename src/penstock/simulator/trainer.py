"""A learner that only takes time, and whose entropy falls as a real one's does."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.config import TrainerModelConfig
from penstock.simulator.experience import Experience
from penstock.simulator.parts import Immortal
from penstock.types import GroupRef, LearnerState, WeightsHandle

ENTROPY_FIRST, ENTROPY_LAST, ENTROPY_STEPS = 1.0, 0.2, 40.0
"""Nats per token; falls from the first towards the last as exp(-step / steps): steep early, flat late, as measured in
arXiv 2505.22617."""


class TrainerModel(Immortal):
    """`ports.Trainer`: call_s + token_s per token for gradients, step_s per step, publish_s per publication."""

    def __init__(self, model: TrainerModelConfig, experience: Experience) -> None:
        self._model, self._experience = model, experience
        self._version = 0
        self._tokens = 0
        self.busy_s = 0.0

    async def accumulate(self, groups: Sequence[GroupRef]) -> Mapping[str, float]:
        costs = [self._experience.train(ref, self._version) for ref in groups]
        masked = sum(cost.masked_tokens for cost in costs)
        trained = sum(cost.response_tokens for cost in costs) - masked
        self._tokens += trained
        await self._work(self._model.call_s + self._model.token_s * sum(cost.tokens for cost in costs))
        return {"tokens": float(trained), "tokens_masked_stale": float(masked)}

    async def step(self) -> LearnerState:
        await self._work(self._model.step_s)
        entropy = ENTROPY_LAST + (ENTROPY_FIRST - ENTROPY_LAST) * math.exp(-self._version / ENTROPY_STEPS)
        self._version += 1
        tokens, self._tokens = self._tokens, 0
        return LearnerState(policy_version=self._version, entropy=entropy, metrics={"tokens": float(tokens)})

    async def publish(self) -> WeightsHandle:
        await self._work(self._model.publish_s)
        return WeightsHandle(policy_version=self._version, path="simulated", num_bytes=0, fingerprint="simulated")

    async def checkpoint(self, directory: Path, state: Mapping[str, Any]) -> None:
        """Takes no time and keeps nothing."""

    async def _work(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.busy_s += seconds
