"""The common part of learner, critic and reference: one rank's share of a model, and its passes over samples."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from transformers import PreTrainedModel

from penstock.config import TrainerConfig
from penstock.groups.batch import Batch
from penstock.model.compute import BusyClock
from penstock.ticks import tick
from penstock.trainer.forward import pass_cost, recompute_activations, shares_prefixes
from penstock.trainer.output_layer import compile_output_layer
from penstock.trainer.packing import PASSES, Ints, MicroBatch, TokenTable, flatten, micro_batches, per_sample
from penstock.trainer.ranks import Ranks
from penstock.trainer.router_replay import install
from penstock.trainer.saving import Reader, saved
from penstock.trainer.shards import write_state
from penstock.trainer.strategy import Strategy, compile_layers, strategy_of

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """Properties of a batch's S tokens while one policy_version is trained. All fields are [S]."""

    versions: Ints
    sampled: Bools
    """Tokens that a policy sampled. The remaining tokens are prompts and observations."""
    staleness: Ints
    """Versions between sampling and training; negative if this trainer has not made the version yet."""
    fresh: Bools
    """Sampled tokens with a staleness between 0 and the allowed maximum."""
    in_loss: Bools
    """Tokens that are trained."""


class Passes:
    """The micro-batches of a model, plus idle ones if its strategy needs them."""

    def __init__(self, model: PreTrainedModel, strategy: Strategy, *, max_tokens: int, share_prefixes: bool) -> None:
        """`model` is not placed yet. `max_tokens`: padded tokens per pass. `share_prefixes`: compute a prompt once for
        all samples that share it, if model and strategy allow it."""
        self._strategy, self._max_tokens = strategy, max_tokens
        alone = not strategy.is_sharded and strategy.context is None
        self._share = share_prefixes and alone and shares_prefixes(model)
        self._cost = pass_cost(model, strategy.device)

    def of(self, table: TokenTable) -> Iterator[MicroBatch]:
        """Yield micro-batches that hold every sample with a trained token exactly once. Each one is a tick of
        progress."""
        device = self._strategy.device
        made = micro_batches(
            table,
            self._max_tokens,
            device,
            share_prefixes=self._share,
            pack=self._strategy.packs,
            pass_cost=self._cost,
            context=self._strategy.context,
        )
        for micro in self._strategy.passes(made):
            yield micro
            tick()


class ModelRole(ABC):
    """One rank of a role that has a model.

    Between `release` and `resume` its state is in main memory. Every parameter remains the same object, so optimizers
    and other references stay valid. Released tensors can be read, and gathered from all ranks, but not used for
    compute.
    """

    is_trained = True
    """Whether gradients flow through the model."""
    replays_routers = False
    """Whether tokens are computed with their recorded experts."""
    shares_prefixes = True
    """Whether a prompt is computed once for all samples that share it, if model and strategy allow it."""
    _optimizers: Sequence[Optimizer] = ()
    _before_change: Callable[[], object] | None = None
    """Called before the published weights change."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        *,
        max_staleness: int,
        compute_dtype: torch.dtype = torch.float32,
        ranks: Ranks | None = None,
    ) -> None:
        """Take ownership of `model`, and place it on the ranks.

        `model`: has float32 weights, and lies where `strategy_of` expects it.
        `compute_dtype`: dtype of the passes, preferably that of the servers.
        `ranks`: None if this is the only rank.
        """
        if self.is_trained and config.activation_checkpointing:
            recompute_activations(model, offload="activations" in config.offload)
        if self.replays_routers and config.router_replay:
            install(model)
        self._config, self._ranks, self._compute_dtype = config, ranks or Ranks(), compute_dtype
        self._strategy = strategy_of(model, config, self._ranks, compute_dtype)
        self._device = self._strategy.device
        if config.compile:
            compile_layers(model)
            compile_output_layer(model)
        max_tokens = config.pass_tokens
        self._passes = Passes(model, self._strategy, max_tokens=max_tokens, share_prefixes=self.shares_prefixes)
        self._max_staleness, self._segments = max_staleness, config.objective.segments
        self.busy = BusyClock(self._device)
        self._saving: Reader | None = None
        self._publishing: Reader | None = None
        self._released: Sequence[Module] = ()
        self._released_states: list[tuple[dict[str, Any], str]] = []
        """(a parameter's optimizer state, entry name) for each entry that was on the device."""
        self._place(model)

    @abstractmethod
    def _place(self, model: PreTrainedModel) -> None:
        """Place the model on the ranks, and build what belongs to it."""

    @abstractmethod
    def write(self, directory: Path) -> None:
        """Begin to save the role's state at the last step boundary as files. All ranks must call this, with a directory
        they share. Calls of other methods may follow at once; those that change the state wait for a copy of it."""

    def is_written(self, wait_s: float = 0.0) -> bool:
        """Return whether all files of this rank are written, at the latest after `wait_s` seconds. Raises OSError on a
        full disk."""
        return self._saving is None or self._saving.is_done(wait_s)

    @abstractmethod
    def read(self, directory: Path) -> None:
        """Restore the state that `write` saved, with any number of ranks. Accumulated gradients are dropped."""

    def release(self) -> None:
        """Free the device until `resume`. Meanwhile the state can be saved; compute and restore are not allowed."""
        self._await_copy()
        self._released = self._modules()
        self._released_states = [  # step counters may be on the CPU, and stay there
            (state, name)
            for optimizer in self._optimizers
            for state in optimizer.state.values()
            for name, value in state.items()
            if isinstance(value, Tensor) and value.device == self._device
        ]
        self._strategy.released()
        self._move(torch.device("cpu"))

    def resume(self) -> None:
        """Move the state back to the device."""
        self._move(self._device)
        self._released, self._released_states = (), []

    def _move(self, device: torch.device) -> None:
        for module in self._released:
            before = list(module.parameters())
            module._apply(lambda tensor: tensor.to(device, copy=True))  # type: ignore[no-untyped-call]
            if any(parameter is not moved for parameter, moved in zip(before, module.parameters(), strict=True)):
                raise RuntimeError(
                    f"torch {torch.__version__} replaces parameters that move from {self._device}, so the optimizer "
                    "would lose them: choose another scheduler.mode than colocated"
                )
        for state, name in self._released_states:
            state[name] = state[name].to(device, copy=True)

    def _save(self, state: Mapping[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
        """Begin to save this rank's part of `state`: `write` gets a copy of it. If another rank saves the same part,
        this does nothing."""
        if self._strategy.shard.is_saved:
            self._saving = saved(state, write)

    def _write_state(self, own: Mapping[str, Any], directory: Path, name: str) -> None:
        shard = self._strategy.shard
        write_state(own, directory, name, shard=shard.number, num_shards=shard.num_shards)

    def _await_copy(self) -> None:
        """Wait until the state that is being saved or published may change."""
        for reader in (self._saving, self._publishing):
            if reader is not None:
                reader.await_read()
        if self._before_change is not None:
            self._before_change()

    def _table(self, batch: Batch, trained: Bools) -> TokenTable:
        """Return the tokens of a batch from `prepare`, or of a rank's part of it. `trained`: see `TokenTable.build`."""
        passes = batch[PASSES] if PASSES in batch.names else None
        return TokenTable.build(batch["token_ids"], trained, batch["temperatures"], passes, self._experts(batch))

    def _experts(self, batch: Batch) -> npt.NDArray[np.int16] | None:
        """Return the recorded experts with which passes compute a batch's tokens, [S, layers, k], or None."""
        return None

    @abstractmethod
    def _modules(self) -> Sequence[Module]:
        """Return the modules that are on the device now."""

    def _masks(self, batch: Batch, policy_version: int) -> TokenMasks:
        """Return the masks of a batch from `prepare`. All roles select the same tokens."""
        versions, sampled = flatten(batch["versions"], np.int64), flatten(batch["loss_mask"], np.bool_)
        staleness = policy_version - versions
        in_loss = fresh = sampled & (staleness >= 0) & (staleness <= self._max_staleness)
        if self._segments == "newest":
            newest = [np.full(np.size(sample), np.max(sample, initial=-1)) for sample in batch["versions"]]
            in_loss = fresh & (versions == flatten(newest, np.int64))
        return TokenMasks(versions, sampled, staleness, fresh, in_loss)

    def _computed(
        self, batch: Batch, wanted: Bools, compute: Callable[[MicroBatch], Tensor]
    ) -> list[npt.NDArray[np.float32]]:
        """Return the value that `compute` gives each `wanted` token, [S], and 0 for other tokens: one array per sample.

        `compute` returns the values of a micro-batch's trained tokens, [N].
        """
        table = self._table(batch, wanted)
        found = np.zeros(len(table.token_ids), dtype=np.float32)
        with self.busy, torch.no_grad(), self._strategy.computing():
            for micro in self._passes.of(table):
                found[micro.tokens] = compute(micro).cpu().numpy()
        return per_sample(found, batch["token_ids"])
