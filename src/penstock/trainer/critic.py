"""A value function beside the policy: PPO's own baseline, for tasks where a group of siblings is too dear."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.config import CriticConfig, TrainerConfig
from penstock.groups.batch import Batch
from penstock.trainer.advantages import generalized_advantages
from penstock.trainer.busy import BusyClock
from penstock.trainer.forward import recompute_activations
from penstock.trainer.masks import Selection
from penstock.trainer.offload import Offload
from penstock.trainer.optimizer import adamw
from penstock.trainer.packing import MicroBatch, TokenTable, flatten, per_sample
from penstock.trainer.passes import Passes, autocast
from penstock.trainer.ranks import Ranks
from penstock.trainer.shards import load_module, load_optimizer, whole
from penstock.trainer.states import read_state, write_state
from penstock.trainer.strategy import strategy_of

NAME = "critic"
"""Of its files in a checkpoint."""


class ValueFunction(torch.nn.Module):
    """The policy's body with one output."""

    def __init__(self, policy: PreTrainedModel) -> None:
        super().__init__()
        self.body = policy.base_model
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
    """A policy's body with one output: V(s), what an episode will earn from before a token on. One rank's.

    Gradients are summed as groups arrive, and divided by the step's tokens when the step is taken, as the policy's are.
    """

    def __init__(
        self,
        policy: PreTrainedModel,
        config: TrainerConfig,
        *,
        max_staleness: int,
        compute_dtype: torch.dtype = torch.float32,
        ranks: Ranks | None = None,
    ) -> None:
        """`config` has a critic. `policy` is the critic's own from now on. The others as the learner has them."""
        assert config.critic is not None
        self._config, self._max_grad_norm = config.critic, config.max_grad_norm
        if config.activation_checkpointing:
            recompute_activations(policy)
        self._strategy = strategy_of(policy, config, ranks or Ranks())
        self._passes = Passes(policy, self._strategy, max_tokens=config.tokens_per_microbatch, share_prefixes=False)
        self._autocast = autocast(self._strategy.device, compute_dtype)
        self._selection = Selection(max_staleness, config.objective.segments)
        self.busy = BusyClock(self._strategy.device)
        self._function = ValueFunction(policy)
        self._strategy.place(self._function)
        self._parameters = list(self._function.parameters())
        self._optimizer = adamw(self._parameters, learning_rate=self._config.learning_rate)
        self._offload = Offload(self._strategy.device, self._optimizer)
        self._loss, self._tokens = 0.0, 0

    def values(self, batch: Batch) -> Batch:
        """V before each sampled token: the column `values`, an array for each sample, 0 elsewhere."""
        table = TokenTable.build(batch["token_ids"], flatten(batch["loss_mask"], np.bool_))
        found = np.zeros(len(table.token_ids), dtype=np.float32)
        with self.busy, torch.no_grad():
            for micro in self._passes.of(table):
                found[micro.tokens] = self._forward(micro).cpu().numpy()
        return Batch(values={"values": per_sample(found, batch["token_ids"])})

    def learn(self, batch: Batch, policy_version: int) -> None:
        """Add the gradient of the value loss of the tokens in the loss while `policy_version` is trained. The batch is
        one from `appraised`: its `values` are those before this step.

        max((V - R)^2, (V_old + clip(V - V_old, -c, c) - R)^2) / 2: PPO's clipped value loss (as in arXiv 2005.12729).
        """
        table = TokenTable.build(batch["token_ids"], self._selection.of(batch, policy_version).in_loss)
        returns, values = (flatten(batch[name], np.float32) for name in ("returns", "values"))
        with self.busy:
            for micro in self._passes.of(table):
                value = self._forward(micro)
                target, before = (torch.from_numpy(array[micro.tokens]).to(value.device) for array in (returns, values))
                near = before + (value - before).clamp(-self._config.clip, self._config.clip)
                loss = 0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2)
                loss.sum().backward()  # type: ignore[no-untyped-call]
                self._loss += float(loss.detach().sum())
                self._tokens += len(value)

    def step(self) -> dict[str, float]:
        """One optimizer step; without a token, or with a gradient that is not finite, everything stays as it was."""
        with self.busy:
            return self._step()

    def _step(self) -> dict[str, float]:
        counted = self._strategy.ranks.total([self._tokens, self._loss], "count what the critic learned from")
        (tokens, loss), self._tokens, self._loss = counted, 0, 0.0
        if not tokens:
            return {"value_loss": 0.0, "value_grad_norm": 0.0, "value_skipped": 0.0}
        torch._foreach_div_(self._strategy.summed(self._parameters, in_place=True), tokens)
        norm = whole(torch.nn.utils.clip_grad_norm_(self._parameters, self._max_grad_norm, foreach=True))
        finite = bool(torch.isfinite(norm))
        if finite:
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return {
            "value_loss": loss / tokens,
            "value_grad_norm": float(norm) if finite else 0.0,
            "value_skipped": float(not finite),
        }

    def write(self, directory: Path) -> None:
        """Save weights and optimizer as of the last step. All ranks must."""
        state = {"function": self._function.state_dict(), "optimizer": self._optimizer.state_dict()}
        write_state(state, directory, NAME, self._strategy)

    def read(self, directory: Path) -> None:
        """Go back to what was saved there; gradients accumulated so far are dropped."""
        saved = read_state(directory, NAME)
        load_module(self._function, saved["function"])
        load_optimizer(self._optimizer, saved["optimizer"])
        self._loss, self._tokens = 0.0, 0

    def release(self) -> None:
        """Give up the device until `resume`. Meanwhile nothing is computed or restored, but may be saved."""
        self._offload.release([self._function])

    def resume(self) -> None:
        """Take the device again."""
        self._offload.resume()

    def _forward(self, micro: MicroBatch) -> Tensor:
        with self._autocast():
            value: Tensor = self._function(micro.inputs, micro.rows, micro.columns)
        return value[:, 0]


def appraised(batch: Batch, values: Sequence[npt.NDArray[np.float32]], config: CriticConfig) -> Batch:
    """`batch`, from `prepare`, with a critic's `values` [n] of its tokens, and what follows from them and its rewards:
    `returns`, and generalized `advantages` instead of those against a group, all with an array for each sample."""
    ids = batch["token_ids"]
    advantages, returns = generalized_advantages(
        batch["rewards"],
        flatten(values, np.float32),
        flatten(batch["loss_mask"], np.bool_),
        [np.size(tokens) for tokens in ids],
        discount=config.discount,
        trace=config.trace,
    )
    columns = {"advantages": per_sample(advantages, ids), "returns": per_sample(returns, ids), "values": values}
    return batch.keep(name for name in batch.names if name not in columns).union(Batch(values=columns))
