"""The loss of a micro-batch: the policy objective, the mask of mastered tokens, and a KL penalty to a reference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from penstock.config import TrainerConfig
from penstock.trainer.forward import token_logprobs
from penstock.trainer.lora import without_adapters
from penstock.trainer.losses.objective import OBJECTIVES, Tokens
from penstock.trainer.losses.parts import kl_k3, mastered, ratio, sequence_ratio, shares
from penstock.trainer.packing import MicroBatch
from penstock.trainer.policy_copy import AwaitCopy, Exchange, ParityCopy, PolicyCopy, snapshot_of
from penstock.trainer.router_replay import restoring
from penstock.trainer.strategy import Strategy

SAMPLE_WEIGHT_CAP = 2.0
"""Upper bound of a sample's product of ratios, which is heavy-tailed. verl truncates sequence weights at this value."""


class Parity:
    """Selects the tokens that compare engine and trainer: both must compute them with the same version.

    In a run limited by the learner, no sample of the version being trained ever arrives. The learner then keeps, from
    time to time, a copy of the published policy until samples of that version arrive.
    """

    def __init__(self, exchange: Exchange, *, every: int | None, max_staleness: int) -> None:
        """`every`: number of steps without a comparable token after which a copy is made; None: never."""
        self._exchange = exchange
        self._every, self._max_staleness = every, max_staleness
        self.copy: ParityCopy | None = None
        """Copy of the policy at version `_copied`; None while the policy itself is compared."""
        self._copied = self._num_quiet = 0

    def version(self, policy_version: int) -> int:
        """Return the version with comparable samples while `policy_version` is trained."""
        return policy_version if self.copy is None else self._copied

    def forget(self) -> None:
        """Drop the copy after the policy was restored from a saved state: its version no longer exists."""
        self.copy, self._num_quiet = None, 0

    def stepped(self, policy_version: int, *, num_compared: int) -> None:
        """Record a step that made `policy_version` and compared `num_compared` tokens. Drop or make a copy if due."""
        self._num_quiet = 0 if num_compared else self._num_quiet + 1
        if self.copy is not None and (num_compared or policy_version - self._copied > self._max_staleness):
            self.copy, self._num_quiet = None, 0
        if self.copy is None and self._every is not None and self._num_quiet >= self._every:
            self.copy, self._copied = ParityCopy(self._exchange), policy_version


class Criterion:
    """The loss function. It owns the copies of the policy with which an objective compares the policy.

    It normalises within single samples only. The learner divides by the step's count.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        *,
        strategy: Strategy,
        await_copy: AwaitCopy,
        max_staleness: int,
    ) -> None:
        """`model` is placed. `max_staleness`: largest number of versions between sampling and training."""
        self._model, self._config, self._has_adapters = model, config.objective, config.lora is not None
        exchange = Exchange(model, strategy, await_copy)
        self._proximal = snapshot_of(exchange, strategy) if self._config.proximal == "snapshot" else None
        self._parity = Parity(exchange, every=config.canaries.parity_every, max_staleness=max_staleness)

    def rows(
        self,
        micro: MicroBatch,
        *,
        behaviour: Tensor,  # [N], log mu
        advantages: Tensor,  # [N]
        samples: Tensor,  # [N], number of the token's sample, below N
        staleness: Tensor,  # [N], versions
        comparable: Tensor,  # [N], whether `compared_version` sampled all tokens of the sample up to this one
        compares: bool,  # whether any token is comparable; with shards, of any rank
        reference: Tensor | None = None,  # [N], its log-probabilities, unless it is the policy without adapters
        kept: Tensor | None = None,  # [N], whether the mask over the batch keeps the token, if there is one
    ) -> dict[str, Tensor]:
        """Return the values of each name in `statistics.SUMS`, [N].

        Only `loss` carries a gradient. The caller runs the backward pass on its sum, and both in `Strategy.computing`.
        """
        config = self._config
        logprobs, entropy = token_logprobs(self._model, micro)
        proximal = self._logprobs(self._proximal, micro)
        tokens = Tokens(logprobs, behaviour, advantages, samples, staleness, proximal, kept)
        objective = OBJECTIVES[config.name](tokens, config)
        rho = ratio(logprobs.detach(), behaviour)
        sample_weight = sequence_ratio(logprobs.detach(), behaviour, samples).clamp(max=SAMPLE_WEIGHT_CAP)
        is_mastered = kl = torch.zeros_like(entropy)
        if config.mastered is not None:
            is_mastered = mastered(logprobs, entropy, advantages, samples, config.mastered)
        if config.kl_coef and self._has_adapters:
            with without_adapters(self._model), restoring(self._model):
                reference = self._evaluated(self._model, replace(micro, prefix_experts=None, experts=None))
        if reference is not None:
            kl = kl_k3(logprobs, reference)
        compared = self._logprobs(self._parity.copy, micro) if compares else None
        difference = ((logprobs if compared is None else compared) - behaviour).abs() * comparable
        loss = (objective.loss * (1.0 - is_mastered) + config.kl_coef * kl) * shares(samples, config.normalize)
        return {
            "loss": loss,
            "clip_fraction": objective.clipped,
            "ratio_mean": rho,
            "ratio_squared": rho**2,
            "sample_weight": sample_weight * shares(samples, "sequence"),
            "sample_weight_squared": sample_weight**2 * shares(samples, "sequence"),
            "entropy": entropy,
            "difference": difference,
            "kl_reference": kl,
            "mastered_fraction": is_mastered,
        }

    @property
    def has_parity_copy(self) -> bool:
        """Return whether tokens are compared with a copy of the policy. It is the same on all ranks."""
        return self._parity.copy is not None

    def compared_version(self, policy_version: int) -> int:
        """Return the version with samples that compare engine and trainer while `policy_version` is trained."""
        return self._parity.version(policy_version)

    def stepped(self, num_steps: int, *, policy_version: int, num_compared: int) -> None:
        """Record an optimizer step, and renew the copies that are due.

        `num_steps`: steps taken so far. `num_compared`: tokens that the last step compared with the engine.
        """
        self._parity.stepped(policy_version, num_compared=num_compared)
        if self._proximal is not None and num_steps % self._config.proximal_every == 0:
            self._proximal.renew()

    @property
    def copies(self) -> list[Module]:
        """Return what copies of the policy keep on the device."""
        return [] if self._proximal is None else [self._proximal.module]

    def state_dict(self) -> dict[str, Any]:
        """Return the proximal copy's state, or nothing if the objective has no such copy."""
        return {} if self._proximal is None else {"proximal": self._proximal.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the saved proximal copy.

        If none was saved, because the objective was another one, the present copy stays unchanged.
        """
        self._parity.forget()
        if self._proximal is not None and "proximal" in state:
            self._proximal.load_state_dict(state["proximal"])

    def _logprobs(self, copy: PolicyCopy | None, micro: MicroBatch) -> Tensor | None:
        """Return the log-probabilities of the micro-batch's trained tokens under a copy of the policy, [N]."""
        if copy is None:
            return None
        with copy.placed() as model:
            return self._evaluated(model, micro)

    def _evaluated(self, model: PreTrainedModel, micro: MicroBatch) -> Tensor:
        with torch.no_grad():
            return token_logprobs(model, micro)[0]
