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

Floats = npt.NDArray[np.float32]


class Critic:
    """A copy of the policy's body with one output: V(s), what an episode will earn from before a token on.

    Gradients are summed as groups arrive, and divided by the step's tokens when the step is taken, as the policy's are.
    """

    def __init__(self, policy: PreTrainedModel, config: CriticConfig, *, autocast: Autocast, max_tokens: int) -> None:
        """`autocast`: what forward passes run in. `max_tokens`: padded tokens per forward pass."""
        self._config, self._autocast, self._max_tokens = config, autocast, max_tokens
        self._body = copy.deepcopy(policy.base_model)
        self._head = torch.nn.Linear(policy.config.get_text_config().hidden_size, 1, device=policy.device)
        torch.nn.init.zeros_(self._head.weight)
        torch.nn.init.zeros_(self._head.bias)
        self._parameters = [*self._body.parameters(), *self._head.parameters()]
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
        if not self._tokens:
            return {"value_loss": 0.0, "value_grad_norm": 0.0, "value_skipped": 0.0}
        tokens, loss = self._tokens, self._loss
        self._loss, self._tokens = 0.0, 0
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        torch._foreach_div_(gradients, float(tokens))
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, max_grad_norm, foreach=True)
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
        modules = {"body": self._body, "head": self._head, "optimizer": self._optimizer}
        return {name: module.state_dict() for name, module in modules.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state; gradients accumulated so far are dropped."""
        self._body.load_state_dict(state["body"])
        self._head.load_state_dict(state["head"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._optimizer.zero_grad(set_to_none=True)
        self._loss, self._tokens = 0.0, 0

    def _micro_batches(self, table: TokenTable) -> Iterator[MicroBatch]:
        device = self._head.weight.device
        return micro_batches(table, self._max_tokens, device, share_prefixes=False, pass_cost=pass_cost(self._body))

    def _forward(self, micro: MicroBatch) -> Tensor:
        with self._autocast():
            hidden = self._body(input_ids=micro.inputs, use_cache=False).last_hidden_state
        value: Tensor = self._head(hidden[micro.rows, micro.columns].float())[:, 0]
        return value
