"""The critic: a value function as the baseline, as in PPO, for tasks where groups of samples are too expensive."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from penstock.config.trainer_settings import CriticConfig
from penstock.groups.batch import Batch
from penstock.trainer import packed_attention
from penstock.trainer.advantages import EPSILON, generalized_advantages
from penstock.trainer.model_role import Bools, ModelRole
from penstock.trainer.optimizer import adamw, load_optimizer, take_step
from penstock.trainer.packing import Boundaries, MicroBatch, flatten, on_device, per_sample
from penstock.trainer.shards import load_parameters, read_state

NAME = "critic"
"""Name of the critic's files in a checkpoint."""


class ValueFunction(torch.nn.Module):
    """The policy's body with a linear head of one output, which starts at zero."""

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.body = policy.base_model
        self.head = torch.nn.Linear(policy.config.get_text_config().hidden_size, 1, device=policy.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, inputs: Tensor, rows: Tensor, columns: Tensor, boundaries: Boundaries | None = None) -> Tensor:
        """Return V at the given places, [N, 1] in float32. `inputs`: [R, L] token ids. `rows`, `columns`: [N].
        `boundaries`: of the samples, if they are packed."""
        if boundaries is None:
            others: dict[str, Any] = {"use_cache": False}
        else:
            packed_attention.check_packs(self.body.config)
            others = packed_attention.arguments(boundaries)
        hidden = self.body(input_ids=inputs, **others).last_hidden_state[rows, columns].float()
        values: Tensor = self.head(hidden)
        return values


class Critic(ModelRole):
    """One rank's critic: it estimates V(s), the episode's future reward as seen before each token.

    Gradients are summed as groups arrive. At the step they are divided by the step's tokens, like the policy's.
    """

    shares_prefixes = False

    def _place(self, model: PreTrainedModel) -> None:
        assert self._config.critic is not None
        self._settings = self._config.critic
        self._function = ValueFunction(model)
        self._strategy.place(self._function, precise=[self._function.head])
        self._parameters = list(self._function.parameters())
        self._optimizer = adamw(self._parameters, offload="optimizer" in self._config.offload)
        self._optimizers = [self._optimizer]
        self._loss, self._tokens = self._no_loss(), 0

    def values(self, batch: Batch) -> Batch:
        """Return V before each sampled token, and 0 at other tokens: the column `values`, one array per sample."""
        sampled = flatten(batch["loss_mask"], np.bool_)
        return Batch(values={"values": self._computed(batch, sampled, self._values_of)})

    def learn(self, batch: Batch, policy_version: int) -> None:
        """Add the gradient of the value loss over the tokens that are in the loss while `policy_version` is trained.

        `batch` comes from `with_values`: its `values` are V_old, from before this step. The loss is PPO's clipped value
        loss, max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) / 2 (as in arXiv 2005.12729).
        """
        table = self._table(batch, self._masks(batch, policy_version).in_loss)
        returns, values = (flatten(batch[name], np.float32) for name in ("returns", "values"))
        with self.busy, self._strategy.computing():
            for micro in self._passes.of(table):
                value = self._values_of(micro)
                target, before = (on_device(array[micro.tokens], value.device) for array in (returns, values))
                near = before + (value - before).clamp(-self._settings.clip, self._settings.clip)
                loss = 0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2)
                loss.sum().backward()  # type: ignore[no-untyped-call]
                if self._strategy.is_counted:
                    self._loss += loss.detach().sum()
                    self._tokens += len(value)

    def step(self) -> dict[str, float]:
        """Take one optimizer step, and return its metrics.

        Without tokens, or with a non-finite gradient, weights and optimizer stay unchanged.
        """
        self._await_copy()
        with self.busy:
            own = [self._tokens, float(self._loss)]
            tokens, loss = self._ranks.total(own, "add up the tokens and the loss of the critic")
            self._loss, self._tokens = self._no_loss(), 0
            norm = 0.0
            if tokens:
                torch._foreach_div_(self._strategy.summed(self._parameters, in_place=True), tokens)
                rate = self._settings.learning_rate
                norm = take_step(self._optimizer, learning_rate=rate, max_grad_norm=self._config.max_grad_norm)
                self._strategy.changed()
        skipped = not math.isfinite(norm)
        shown = 0.0 if skipped else norm
        return {"value_loss": loss / max(tokens, 1), "value_grad_norm": shown, "value_skipped": float(skipped)}

    def write(self, directory: Path) -> None:
        state = {"function": dict(self._function.named_parameters()), "optimizer": self._optimizer.state_dict()}
        self._save(state, lambda copied: self._write_state(copied, directory, NAME))

    def read(self, directory: Path) -> None:
        self._await_copy()
        saved = read_state(directory, NAME)
        load_parameters(self._function, saved["function"])
        self._strategy.changed()
        load_optimizer(self._optimizer, saved["optimizer"])
        self._loss, self._tokens = self._no_loss(), 0

    def _no_loss(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self._device)

    def _modules(self) -> Sequence[Module]:
        return [self._function]

    def _values_of(self, micro: MicroBatch) -> Tensor:
        """Return V at the micro-batch's trained tokens, [N]."""
        value: Tensor = self._function(micro.inputs, micro.rows, micro.columns, micro.boundaries)
        return micro.of_all_tokens(value)[:, 0]


def whitened(parts: Sequence[Batch]) -> list[Batch]:
    """Return the parts of a batch from `with_values` with advantages of mean 0 and standard deviation 1 over the
    sampled tokens of all parts."""
    masks = [[np.asarray(mask, dtype=np.bool_) for mask in part["loss_mask"]] for part in parts]
    sampled = [own[mask] for part, rows in zip(parts, masks, strict=True) for own, mask in _rows(part, rows)]
    values = flatten(sampled, np.float64)
    if not len(values):
        return list(parts)
    mean, deviation = float(values.mean()), float(values.std()) + EPSILON
    found = []
    for part, rows in zip(parts, masks, strict=True):
        own = [np.where(mask, (row - mean) / deviation, 0.0).astype(np.float32) for row, mask in _rows(part, rows)]
        kept = part.keep(name for name in part.names if name != "advantages")
        found.append(kept.union(Batch(values={"advantages": own})))
    return found


def _rows(part: Batch, masks: Sequence[Bools]) -> Iterator[tuple[npt.NDArray[np.float32], Bools]]:
    return zip(part["advantages"], masks, strict=True)


def with_values(batch: Batch, values: Sequence[npt.NDArray[np.float32]], config: CriticConfig) -> Batch:
    """Return `batch` with the critic's `values`, and with `returns` and generalized `advantages` computed from them.

    `batch` comes from `prepare` (`for_critic`); the new `advantages` replace its group advantages. Each of the three
    columns has one array per sample; `values` has n arrays.
    """
    ids = batch["token_ids"]
    flat_values, flat_mask = flatten(values, np.float32), flatten(batch["loss_mask"], np.bool_)
    lengths = [np.size(tokens) for tokens in ids]
    advantages, returns = generalized_advantages(
        flatten(batch["token_rewards"], np.float32),
        flat_values,
        flat_mask,
        lengths,
        discount=config.discount,
        trace=config.trace,
    )
    columns = {"advantages": per_sample(advantages, ids), "returns": per_sample(returns, ids), "values": values}
    return batch.keep(name for name in batch.names if name not in columns).union(Batch(values=columns))
