"""The loss of a micro-batch: the policy objective, what is left out as mastered, a penalty for leaving a reference."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.config import TrainerConfig
from penstock.trainer.forward import Autocast, token_logprobs
from penstock.trainer.losses.divergence import absolute_difference, kl_k3
from penstock.trainer.losses.mastered import mastered
from penstock.trainer.losses.normalise import denominator, shares
from penstock.trainer.losses.objective import Tokens, policy_loss
from penstock.trainer.losses.parts import ratio, sequence_ratio
from penstock.trainer.packing import MicroBatch
from penstock.trainer.parity import Parity
from penstock.trainer.snapshot import Snapshot
from penstock.trainer.strategy import Strategy

SAMPLE_WEIGHT_CAP = 2.0
"""Products of ratios are heavy-tailed; truncated where verl truncates sequence weights."""


class Criterion:
    """Owns the copies of the policy that an objective compares it with. Nothing is normalised over a step here, except
    by what belongs to a single sample."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        *,
        strategy: Strategy,
        autocast: Autocast,
        temperature: float,
        max_tokens: int,
        max_staleness: int,
    ) -> None:
        """`autocast`: what forward passes run in. `max_tokens`: of the longest answer allowed. `max_staleness`:
        versions between sampling and training."""
        self._model, self._config = model, config.objective
        self._autocast, self._strategy = autocast, strategy
        self._temperature, self._max_tokens = temperature, max_tokens
        self._proximal = Snapshot(strategy.copied(model)) if self._config.proximal == "snapshot" else None
        self._parity = Parity(model, strategy, every=config.canaries.parity_every, max_staleness=max_staleness)

    def rows(
        self,
        micro: MicroBatch,
        *,
        behaviour: Tensor,  # [N], log mu
        advantages: Tensor,  # [N]
        samples: Tensor,  # [N], number of the token's sample
        staleness: Tensor,  # [N], versions
        comparable: Tensor,  # [N], whether `compared_version` made the sample so far
        reference: Tensor | None = None,  # [N], the reference policy's log-probabilities
    ) -> dict[str, Tensor]:
        """For each of `statistics.SUMS` its values, [N]. `loss` carries the gradient; its sum is to go backward."""
        config = self._config
        with self._autocast():
            logprobs, entropy = token_logprobs(self._model, micro, temperature=self._temperature)
        proximal = self._logprobs(self._proximal, micro)
        found = policy_loss(Tokens(logprobs, behaviour, advantages, samples, staleness, proximal), config)
        rho = ratio(logprobs.detach(), behaviour)
        whole = sequence_ratio(logprobs.detach(), behaviour, samples).clamp(max=SAMPLE_WEIGHT_CAP)
        known = kl = torch.zeros_like(entropy)
        if config.mastered is not None:
            known = mastered(logprobs, entropy, advantages, samples, config.mastered)
        if reference is not None:
            kl = kl_k3(logprobs, reference)
        # A sharded copy is passed by all ranks or none, whatever each of them has to compare.
        compares = bool(comparable.any()) or self._strategy.is_sharded
        own = self._logprobs(self._parity.copy, micro) if compares else None
        loss = (found.loss * (1.0 - known) + config.kl_coef * kl) * shares(samples, config.normalize)
        return {
            "loss": loss,
            "clipped": found.clipped,
            "ratio": rho,
            "ratio_squared": rho**2,
            "sample_weight": whole * shares(samples, "sequence"),
            "sample_weight_squared": whole**2 * shares(samples, "sequence"),
            "entropy": entropy,
            "difference": absolute_difference(logprobs if own is None else own, behaviour) * comparable,
            "kl": kl,
            "mastered": known,
        }

    def divisor(self, *, tokens: int, samples: int) -> int:
        """What the step's gradient is divided by: so many tokens in the loss, of so many samples."""
        return denominator(self._config.normalize, tokens=tokens, samples=samples, max_tokens=self._max_tokens)

    def compared_version(self, policy_version: int) -> int:
        """Whose samples show whether engine and trainer agree, while `policy_version` is trained."""
        return self._parity.version(policy_version)

    def stepped(self, num_steps: int, *, policy_version: int, num_compared: int) -> None:
        """The policy has taken so many optimizer steps; the last one compared so many tokens with the engine's."""
        self._parity.stepped(policy_version, num_compared=num_compared)
        if self._proximal is not None and num_steps % self._config.proximal_every == 0:
            self._proximal.renew(self._model)

    @property
    def copies(self) -> list[PreTrainedModel]:
        """Those that there are now."""
        return [copy.model for copy in (self._proximal, self._parity.copy) if copy is not None]

    def state_dict(self) -> dict[str, Any]:
        """The copy that an objective is centred on, if it is."""
        return {} if self._proximal is None else {"proximal": self._proximal.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved copy. One that was not saved, the objective being another then, stays what it is."""
        self._parity.forget()
        if self._proximal is not None and "proximal" in state:
            self._proximal.load_state_dict(state["proximal"])

    def _logprobs(self, snapshot: Snapshot | None, micro: MicroBatch) -> Tensor | None:
        if snapshot is None:
            return None
        with self._autocast():
            return snapshot.logprobs(micro, temperature=self._temperature)
