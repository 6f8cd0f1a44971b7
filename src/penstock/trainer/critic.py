"""A value function beside the policy: PPO's own baseline, for tasks where a group of siblings is too dear."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.config import CriticConfig
from penstock.trainer.forward import Autocast, pass_cost
from penstock.trainer.optimizer import adamw
from penstock.trainer.packing import MicroBatch, TokenTable, micro_batches
from penstock.trainer.shards import load_module, load_optimizer, whole
from penstock.trainer.strategy import Strategy

Floats = npt.NDArray[np.float32]


class ValueFunction(torch.nn.Module):
    """The policy's body with one output."""

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.body = copy.deepcopy(policy.base_model)
        self.head = torch.nn.Linear(policy.config.get_text_config().hidden_size, 1, device=policy.device)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)

    def forward(self, inputs: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """[R, L] token ids, and [N] places in them -> V there, [N, 1] in float32."""
        hidden = self.body(input_ids=inputs, use_cache=False).last_hidden_state[rows, columns].float()
        with torch.autocast(hidden.device.type, enabled=False):
            values: Tensor = self.head(hidden)
        return values


class Critic:
    """A copy of the policy's body with one output: V(s), what an episode will earn from before a token on.

    Gradients are summed as groups arrive, and divided by the step's tokens when the step is taken, as the policy's are.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        config: CriticConfig,
        *,
        strategy: Strategy,
        autocast: Autocast,
        max_tokens: int,
    ) -> None:
        """`policy` is whole. `autocast`: what forward passes run in. `max_tokens`: padded tokens per forward pass."""
        self._config, self._strategy = config, strategy
        self._autocast, self._max_tokens = autocast, max_tokens
        self._device, self._pass_cost = policy.device, pass_cost(policy)
        self._function = ValueFunction(policy)
        strategy.place(self._function)
        self._parameters = list(self._function.parameters())
        self._optimizer = adamw(self._parameters, learning_rate=config.learning_rate)
        self._loss, self._tokens = 0.0, 0

    def values(self, table: TokenTable) -> Floats:
        """V before each trained token, [S]; 0 elsewhere."""
        found = np.zeros(len(table.token_ids), dtype=np.float32)
        with torch.no_grad():
            for micro in self._micro_batches(table):
                found[micro.tokens] = self._forward(micro).cpu().numpy()
        return found

    def learn(self, table: TokenTable, returns: Floats, values: Floats) -> None:
        """Add the gradient of the value loss of the trained tokens. All [S]; `values` are those before this step.

        max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) / 2: PPO's clipped value loss (as in arXiv 2005.12729).
        """
        for micro in self._micro_batches(table):
            value = self._forward(micro)
            target, before = (torch.from_numpy(array[micro.tokens]).to(value.device) for array in (returns, values))
            near = before + (value - before).clamp(-self._config.clip, self._config.clip)
            loss = 0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2)
            loss.sum().backward()  # type: ignore[no-untyped-call]
            self._loss += float(loss.detach().sum())
            self._tokens += len(value)

    def step(self, max_grad_norm: float) -> dict[str, float]:
        """One optimizer step; without a token, or with a gradient that is not finite, everything stays as it was."""
        counted = self._strategy.ranks.total([self._tokens, self._loss], "count what the critic learned from")
        (tokens, loss), self._tokens, self._loss = counted, 0, 0.0
        if not tokens:
            return {"value_loss": 0.0, "value_grad_norm": 0.0, "value_skipped": 0.0}
        torch._foreach_div_(self._strategy.summed(self._parameters, in_place=True), tokens)
        norm = whole(torch.nn.utils.clip_grad_norm_(self._parameters, max_grad_norm, foreach=True))
        finite = bool(torch.isfinite(norm))
        if finite:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {
            "value_loss": loss / tokens,
            "value_grad_norm": float(norm) if finite else 0.0,
            "value_skipped": float(not finite),
        }

    def state_dict(self) -> dict[str, Any]:
        """Weights and optimizer."""
        return {"function": self._function.state_dict(), "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state, whole; gradients accumulated so far are dropped."""
        load_module(self._function, state["function"])
        load_optimizer(self._optimizer, state["optimizer"])
        self._loss, self._tokens = 0.0, 0

    def _micro_batches(self, table: TokenTable) -> Iterator[MicroBatch]:
        made = micro_batches(table, self._max_tokens, self._device, share_prefixes=False, pass_cost=self._pass_cost)
        return self._strategy.passes(made, self._device)

    def _forward(self, micro: MicroBatch) -> Tensor:
        with self._autocast():
            value: Tensor = self._function(micro.inputs, micro.rows, micro.columns)
        return value[:, 0]
