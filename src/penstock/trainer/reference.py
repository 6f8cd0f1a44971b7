"""The reference policy: the policy as training began, from which it is to stay near."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from penstock.config import TrainerConfig
from penstock.groups.batch import Batch
from penstock.trainer.busy import BusyClock
from penstock.trainer.masks import Selection
from penstock.trainer.offload import Offload
from penstock.trainer.packing import TokenTable, per_sample
from penstock.trainer.passes import Passes, autocast
from penstock.trainer.ranks import Ranks
from penstock.trainer.snapshot import Snapshot
from penstock.trainer.states import read_state, write_state
from penstock.trainer.strategy import strategy_of

NAME = "reference"
"""Of its files in a checkpoint, and of the column that it gives."""


class Reference:
    """One rank's. As large as the policy, and never trained."""

    def __init__(
        self,
        policy: PreTrainedModel,
        config: TrainerConfig,
        *,
        max_staleness: int,
        temperature: float = 1.0,
        compute_dtype: torch.dtype = torch.float32,
        ranks: Ranks | None = None,
    ) -> None:
        """`policy` is the reference's own from now on. The others as the learner has them."""
        self._strategy = strategy_of(policy, config, ranks or Ranks())
        self._passes = Passes(policy, self._strategy, max_tokens=config.tokens_per_microbatch)
        self._autocast, self._temperature = autocast(self._strategy.device, compute_dtype), temperature
        self._selection = Selection(max_staleness, config.objective.segments)
        self.busy = BusyClock(self._strategy.device)
        self._strategy.place(policy.requires_grad_(False))
        self._snapshot = Snapshot(policy)
        self._offload = Offload(self._strategy.device)

    def logprobs(self, batch: Batch, policy_version: int) -> Batch:
        """Of the tokens in the loss while `policy_version` is trained: the column `reference`, an array for each
        sample, 0 elsewhere."""
        table = TokenTable.build(batch["token_ids"], self._selection.of(batch, policy_version).in_loss)
        found = np.zeros(len(table.token_ids), dtype=np.float32)
        with self.busy, self._autocast():
            for micro in self._passes.of(table):
                logprobs = self._snapshot.logprobs(micro, temperature=self._temperature)
                found[micro.tokens] = logprobs.cpu().numpy()
        return Batch(values={NAME: per_sample(found, batch["token_ids"])})

    def write(self, directory: Path) -> None:
        """Save the weights. All ranks must."""
        write_state({"model": self._snapshot.state_dict()}, directory, NAME, self._strategy)

    def read(self, directory: Path) -> None:
        """Become what was saved there."""
        self._snapshot.load_state_dict(read_state(directory, NAME)["model"])

    def release(self) -> None:
        """Give up the device until `resume`. Meanwhile nothing is computed or restored, but may be saved."""
        self._offload.release([self._snapshot.model])

    def resume(self) -> None:
        """Take the device again."""
        self._offload.resume()
