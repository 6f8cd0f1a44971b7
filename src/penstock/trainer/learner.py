"""The learner: it computes a policy objective over sampled tokens, and accumulates gradients until the next step.

Invariants:
- Gradients of tokens are added as plain sums. The step divides them by its own count (`losses/parts.py`). Any
  partition of the same samples into `accumulate` calls, and over ranks, therefore gives the same update.
- One objective is an exception: with `objective.second_moment_over: batch`, the mask of `m2po` depends on all samples
  that one `accumulate` call gets on all ranks. Any partition of these samples over ranks and micro-batches gives the
  same update, but not a partition into several calls. A pass without gradients finds the mask before the other passes
  begin.
- Every rank counts its own samples. A step's divisor, decisions and metrics cover all ranks and are equal on all ranks.
  All ranks therefore make the same calls, even a rank without samples.
- Tokens older than `max_staleness` versions are counted and left out. So are tokens of versions above the current one,
  which come from another trainer.
- The behaviour log-probabilities are the engine's own. Advantages and the reference policy's log-probabilities come
  with the batch.
- Every call of `step` ends the current policy_version, even if a non-finite gradient leaves the weights unchanged.

`LearnerState.metrics` has means over the step's trained tokens:
- loss
- grad_norm: before clipping.
- clip_fraction: tokens without a gradient after a clip or a mask.
- ratio_mean
- ess: effective sample size of the tokens' ratios pi / mu, as a share.
- sample_ess: the same for the samples' truncated products of these ratios.
- mastered_fraction
- kl_reference
- entropy: of the full softmax, in nats.
- kl_engine_trainer: mean |logprob trainer - engine| over the `kl_tokens`. These are the leading tokens of each answer
  that were sampled by the version that computes them here (see `Parity`). Tokens after a weight update are left out:
  the engine computes them from keys and values of older weights, so a difference there is no fault.
- parity_gap_max: the largest such difference.
- staleness_mean, staleness_max
- tokens_of_lag_0, tokens_of_lag_1, ...: trained tokens by staleness (see `ports.training.LAGS`).
- tokens_replayed: those that were computed with the experts that the engine recorded (see `RouterReplay`).
- tokens, tokens_masked_stale, tokens_masked_foreign, tokens_masked_segments, samples, learning_rate
- skipped: 1 if the gradient was not finite.
- busy_s: seconds of model compute since the last step. It is the mean over ranks, plus the step itself on this rank.
- noise_signal, noise_trace: only with `measure_noise`, if they can be measured (see `trainer/noise.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from penstock.alarms import HopelessError
from penstock.config import TrainerConfig
from penstock.groups.batch import Batch
from penstock.ports.training import LAGS
from penstock.trainer.canaries import Canaries
from penstock.trainer.criterion import Criterion
from penstock.trainer.forward import token_logprobs
from penstock.trainer.lora import (
    Part,
    adapted_parameters,
    attach,
    is_adapter,
    merged_weights,
    weights_of,
    write_adapters,
)
from penstock.trainer.losses.objective import batch_mask
from penstock.trainer.losses.parts import denominator
from penstock.trainer.model_role import ModelRole
from penstock.trainer.noise import GradientNorm, gradient_norm, noise
from penstock.trainer.optimizer import adamw, load_optimizer, take_step
from penstock.trainer.packing import MicroBatch, flatten, on_device, per_sample
from penstock.trainer.rank_balancing import Work, attention_per_token
from penstock.trainer.ranks import Ranks
from penstock.trainer.router_replay import replay_of
from penstock.trainer.saving import Reader, Rest
from penstock.trainer.shards import WeightRows, first_row, joined, load_parameters, local, read_state, whole
from penstock.trainer.statistics import StepStatistics
from penstock.trainer.strategy import Shard
from penstock.types import LearnerState

NAME = "learner"
"""Name of the checkpoint files with optimizer, random state and counters."""
POLICY = "policy"
"""Key of the policy's shards in these files, beside the Hugging Face model."""
ADAPTED = "adapted"
"""Key of the adapters, and of the weights that they change."""
ADAPTERS = "adapter"
"""Folder of a checkpoint with the adapters alone, in peft's format."""
KEPT = "kept"
"""Column of a batch with the tokens that its mask keeps, for objectives with `masks_batch`."""
EXPORTED_SIZE = "5GB"
"""Largest weights file of a checkpoint's model. Some memory of this size is needed to write it."""


class NothingLearnt(HopelessError):
    """Too many steps in a row had a non-finite gradient or no tokens to train."""


class Learner(ModelRole):
    """One rank's learner. It owns the model's gradients and the optimizer."""

    replays_routers = True

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        *,
        max_staleness: int,
        policy_version: int = 0,
        compute_dtype: torch.dtype = torch.float32,
        max_tokens: int = 1,
        whole_step: int = 1,
        measure_noise: bool = False,
        base: str | None = None,
        ranks: Ranks | None = None,
        before_change: Callable[[], object] | None = None,
    ) -> None:
        """Place the model on the ranks, and build optimizer and criterion.

        `max_tokens`: length of the longest allowed answer.
        `whole_step`: number of samples of a full optimizer step.
        `measure_noise`: also compute the gradient's norm within a step, for the gradient noise scale.
        `base`: path of the model, to which adapters alone belong; None if it lies nowhere.
        `before_change`: called before weights that were published change.
        Other arguments: as for `ModelRole`.
        """
        self.model, self._model_cls = model, type(model)
        self.policy_version = policy_version
        self._canaries = Canaries(config.canaries)
        self._max_tokens, self._whole_step = max_tokens, whole_step
        self._pending = StepStatistics()
        self._measure_noise, self._base, self._before_change = measure_noise, base, before_change
        self._small: GradientNorm | None = None
        """Gradient norm over the first samples of the step."""
        self._num_steps = self._num_bad = 0
        super().__init__(
            model,
            config,
            max_staleness=max_staleness,
            compute_dtype=compute_dtype,
            ranks=ranks,
        )

    def _place(self, model: PreTrainedModel) -> None:
        config = self._config
        if config.lora is not None:
            attach(model, config.lora, self._compute_dtype)
        self._strategy.place(model)
        self._replay = replay_of(model)
        if self._replay is not None:
            self._replay.check(self._strategy.computing, self._ranks)
        self._criterion = Criterion(
            model,
            config,
            strategy=self._strategy,
            await_copy=self._await_copy,
            max_staleness=self._max_staleness,
        )
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = adamw(
            self._parameters, weight_decay=config.weight_decay, offload="optimizer" in config.offload
        )
        self._optimizers = [self._optimizer]

    def accumulate(self, batch: Batch) -> dict[str, float]:
        """Add the gradient of this rank's part of a batch from `prepare`.

        A sample's advantage is one number, or an array with one number per token (see `Critic`). With a KL penalty, the
        batch also has the column `reference` (see `Reference`). Returns counts; their sums over the ranks are those of
        the whole batch.
        """
        if not self._config.objective.masks_batch:
            return self._accumulate(batch)
        batch, seconds = self._masked(batch), self.busy.seconds
        self._pending.counts["busy_s"] += seconds
        counted = self._accumulate(batch)
        return counted | {"busy_s": counted["busy_s"] + seconds / self._ranks.size}

    def _accumulate(self, batch: Batch) -> dict[str, float]:
        if not self._measure_noise or any(self._ranks.total([self._pending.counts["tokens"]], "see if a step begins")):
            return self._add(batch)
        counted = self._add(batch.select(batch["early"]))
        with self.busy:
            pending = self._pending.over(self._ranks)
            gradients = self._strategy.summed(self._parameters, in_place=False)
            self._small = gradient_norm(gradients, samples=pending.counts["samples"], divisor=self._divisor(pending))
        self._pending.counts["busy_s"] += self.busy.seconds
        rest = self._add(batch.select(~batch["early"]))
        return {name: count + rest[name] for name, count in counted.items()}

    def _masked(self, batch: Batch) -> Batch:
        """Return the batch with the column `kept`, from a pass without gradients. All ranks must call this."""
        behaviour = flatten(batch["logprobs"], np.float32)

        def log_ratios(micro: MicroBatch) -> Tensor:
            logprobs, _ = token_logprobs(self.model, micro)
            return logprobs - on_device(behaviour[micro.tokens], self._device)

        def total(own: list[float]) -> list[float]:
            once = float(self._strategy.is_counted)
            return self._ranks.total([once * value for value in own], "find the log-ratios that the batch keeps")

        in_loss = self._masks(batch, self.policy_version).in_loss
        log_rho = flatten(self._computed(batch, in_loss, log_ratios), np.float32)
        advantages = _of_tokens(batch["advantages"], batch["token_ids"])
        kept = batch_mask(torch.from_numpy(log_rho), torch.from_numpy(advantages), self._config.objective, total)
        return batch.union(Batch(values={KEPT: per_sample(kept.numpy(), batch["token_ids"])}))

    def _experts(self, batch: Batch) -> npt.NDArray[np.int16] | None:
        return None if self._replay is None else self._replay.records(batch)

    def _divisor(self, pending: StepStatistics) -> float:
        normalize, counts = self._config.objective.normalize, pending.counts
        samples = counts["trained_samples"]
        return denominator(normalize, tokens=counts["tokens"], samples=samples, max_tokens=self._max_tokens)

    def _add(self, batch: Batch) -> dict[str, float]:
        """Add gradients and sums of a batch without normalisation. Return this rank's counts."""
        masks = self._masks(batch, self.policy_version)
        compared = self._criterion.compared_version(self.policy_version)
        comparable = masks.sampled & _leading(batch["versions"], masks.sampled & (masks.versions != compared))
        table = self._table(batch, masks.in_loss)
        columns: dict[str, npt.NDArray[Any]] = {  # the criterion's inputs for every token, each [S]
            "behaviour": flatten(batch["logprobs"], np.float32),
            "advantages": _of_tokens(batch["advantages"], batch["token_ids"]),
            "staleness": masks.staleness,
            "comparable": comparable,
        }
        if "reference" in self._config.roles:
            columns["reference"] = flatten(batch["reference"], np.float32)
        if KEPT in batch.names:
            columns["kept"] = flatten(batch[KEPT], np.bool_)
        with self.busy, self._strategy.computing():
            compared_together = False
            if self._strategy.is_sharded and self._criterion.has_parity_copy:  # its passes need all ranks
                any_here = float((masks.in_loss & comparable).any())
                compared_together = any(self._ranks.largest([any_here], "see if tokens are compared"))
            for micro in self._passes.of(table):
                own = {name: column[micro.tokens] for name, column in columns.items()}
                own["samples"] = np.unique(micro.samples, return_inverse=True)[1]
                inputs = {name: on_device(column, self._device) for name, column in own.items()}
                compares = compared_together if self._strategy.is_sharded else bool(own["comparable"].any())
                rows = self._criterion.rows(micro, compares=compares, **inputs)
                rows["loss"].sum().backward()  # type: ignore[no-untyped-call]
                if self._strategy.is_counted:
                    self._pending.add_tokens(rows)
        ages = masks.staleness[masks.in_loss]
        stale = masks.sampled & (masks.staleness > self._max_staleness)
        once = float(self._strategy.is_counted)
        counted = {"samples": len(batch), "tokens": len(ages), "tokens_masked_stale": stale.sum()}
        counted = {name: once * float(count) for name, count in counted.items()}
        self._pending.add_counts(
            **counted,
            trained_samples=once * (table.widths > 0).sum(),
            tokens_masked_foreign=once * (masks.sampled & (masks.staleness < 0)).sum(),
            tokens_masked_segments=once * (masks.fresh & ~masks.in_loss).sum(),
            tokens_replayed=once * table.num_replayed,
            kl_tokens=once * (masks.in_loss & comparable).sum(),
            staleness=once * ages.sum(),
            staleness_max=ages.max(initial=0),
            **dict(zip(LAGS, once * np.bincount(np.minimum(ages, len(LAGS) - 1), minlength=len(LAGS)), strict=True)),
            busy_s=self.busy.seconds,
        )
        return counted | {"busy_s": self.busy.seconds / self._ranks.size}

    def work(self) -> Work:
        """Return what the work of the ranks depends on."""
        together = self._strategy.is_sharded and self._strategy.packs
        return Work(
            attention_per_token=attention_per_token(self.model),
            pass_tokens=self._config.pass_tokens if together else None,
            early_apart=self._measure_noise,
        )

    def step(self) -> LearnerState:
        """Take one optimizer step over all accumulated gradients, and end the current policy_version.

        Raises `NothingLearnt` after `max_bad_steps` steps in a row without an update.
        """
        self._await_copy()
        with self.busy:
            pending, self._pending = self._pending.over(self._ranks), StepStatistics()
            metrics = pending.means(self._divisor(pending))
            learning_rate = self._learning_rate(metrics)
            grad_norm, noise_metrics = self._update(pending, learning_rate) if metrics["tokens"] else (0.0, {})
            self._small = None
        is_finite = math.isfinite(grad_norm)
        self._num_bad = 0 if is_finite and metrics["tokens"] else self._num_bad + 1
        if self._num_bad >= self._config.max_bad_steps:
            reason = "had no token to train" if is_finite else "had a non-finite gradient"
            raise NothingLearnt(f"{self._num_bad} optimizer steps in a row changed no weights; the last one {reason}")
        self._num_steps += 1
        self.policy_version += 1
        num_compared = int(metrics["kl_tokens"])
        self._criterion.stepped(self._num_steps, policy_version=self.policy_version, num_compared=num_compared)
        metrics |= {
            "grad_norm": grad_norm if is_finite else 0.0,
            "learning_rate": learning_rate,
            "skipped": float(not is_finite),
            "busy_s": pending.counts["busy_s"] + self.busy.seconds,
            **noise_metrics,
        }
        alarms, entropy = self._canaries.look(self._num_steps, metrics), metrics["entropy"]
        return LearnerState(policy_version=self.policy_version, entropy=entropy, metrics=metrics, alarms=alarms)

    def _update(self, pending: StepStatistics, learning_rate: float) -> tuple[float, dict[str, float]]:
        """Sum the gradients over ranks, normalise, clip, and apply them.

        Returns the gradient's norm and, if they can be measured, its noise metrics. A non-finite norm leaves weights
        and optimizer unchanged.
        """
        divisor = self._divisor(pending)
        gradients = self._strategy.summed(self._parameters, in_place=True)
        noise_metrics: dict[str, float] = {}
        if self._small is not None:
            large = gradient_norm(gradients, samples=pending.counts["samples"], divisor=divisor)
            noise_metrics = noise(self._small, large) if large else {}
        torch._foreach_div_(gradients, float(divisor))
        grad_norm = take_step(self._optimizer, learning_rate=learning_rate, max_grad_norm=self._config.max_grad_norm)
        self._strategy.changed()
        return grad_norm, noise_metrics

    def _learning_rate(self, metrics: Mapping[str, float]) -> float:
        """Return the step's learning rate: linear warm-up, then constant, scaled by the step's data if configured."""
        config, factor = self._config, 1.0
        if "samples" in config.scale_learning_rate:
            factor *= math.sqrt(metrics["samples"] / self._whole_step)
        if "ess" in config.scale_learning_rate:
            factor *= math.sqrt(metrics["sample_ess"])
        return config.learning_rate * factor * min(1.0, (self._num_steps + 1) / max(config.warmup_steps, 1))

    def named_weights(self) -> dict[str, Tensor]:
        """Return the parameters by name, adapters merged, each tied parameter once; empty except on rank 0.

        All ranks must call this.
        """
        found = {}
        for name, tensor in self.gathered_weights("merged"):
            if self._ranks.is_first:
                found[name] = tensor
        return found

    def gathered_weights(self, part: Part) -> Iterator[tuple[str, Tensor]]:
        """Yield a part of the weights by name, each tied parameter once, gathered from all ranks one at a time. All
        ranks must take all of them."""
        for name, tensor in weights_of(self.model, part):
            yield name, whole(tensor)

    def read_rows(self, read: Callable[[list[WeightRows]], Rest | None]) -> None:
        """Begin `read` with this rank's rows of all weights and adapters, on a thread of its own, and then what it
        returns. Calls that change the weights wait until `read` returns."""
        named = [*weights_of(self.model, "base"), *weights_of(self.model, "adapters")]
        rows = [WeightRows(name, first_row(each), local(each)) for name, each in named]
        self._publishing = Reader(partial(read, rows), device=self._device, purpose="published weights")

    def await_published(self) -> None:
        """Wait until all work that `read_rows` has begun is done. Raises `Stalled`, or the error of that work."""
        if self._publishing is not None:
            self._publishing.await_end()

    @property
    def shard(self) -> Shard:
        """Which rows this rank holds."""
        return self._strategy.shard

    def _modules(self) -> Sequence[Module]:
        return [self.model, *self._criterion.copies]

    def state_dict(self) -> dict[str, Any]:
        """Return the complete training state at the last step boundary, without the gradients accumulated since."""
        return {"model": {name: p.detach() for name, p in self.model.named_parameters()}, **self._progress()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a complete saved state. Accumulated gradients are dropped."""
        self._await_copy()
        load_parameters(self.model, state["model"])
        self._strategy.changed()
        load_optimizer(self._optimizer, state["optimizer"])
        torch.set_rng_state(state["rng"])
        self.policy_version = state["policy_version"]
        self._num_steps = state["num_steps"]
        self._num_bad = state["num_bad"]
        self._criterion.load_state_dict(state["criterion"])
        self._pending, self._small = StepStatistics(), None

    def _progress(self) -> dict[str, Any]:
        return {
            "optimizer": self._optimizer.state_dict(),
            "rng": torch.get_rng_state(),
            "policy_version": self.policy_version,
            "num_steps": self._num_steps,
            "num_bad": self._num_bad,
            "criterion": self._criterion.state_dict(),
        }

    def write(self, directory: Path) -> None:
        def write(copied: dict[str, Any]) -> None:
            if not self._strategy.is_sharded:
                self._export(copied.pop(POLICY), directory)
                self._export_adapters(copied[ADAPTED], directory)
            self._write_state(copied, directory, NAME)

        parts = {POLICY: dict(merged_weights(self.model)), ADAPTED: adapted_parameters(self.model)}
        self._save(self._progress() | parts, write)

    def join_shards(self, directory: Path) -> None:
        """Begin to make a Hugging Face model of the shards in `directory`, where all ranks have written theirs. Rank 0
        does this; other ranks and replicas have nothing to do."""

        def write(_: dict[str, Any]) -> None:
            file = directory / f"{POLICY}.joined"
            state = read_state(directory, NAME)
            self._export(joined(state[POLICY], file), directory)
            file.unlink()
            adapters = {name: each for name, each in state[ADAPTED].items() if is_adapter(name)}
            self._export_adapters({name: each.whole() for name, each in adapters.items()}, directory)

        if self._strategy.is_sharded and self._ranks.is_first:
            self._save({}, write)

    def write_policy(self, directory: Path) -> None:
        """Write the policy as a Hugging Face model, adapters merged. All ranks must call this."""
        weights = self.named_weights()
        if self._ranks.is_first:
            self._export(weights, directory)

    def _export(self, weights: dict[str, Tensor], directory: Path) -> None:
        model: Any = self.model  # its annotations leave out the size
        model.save_pretrained(directory, state_dict=weights, max_shard_size=EXPORTED_SIZE)

    def _export_adapters(self, adapted: Mapping[str, Tensor], directory: Path) -> None:
        if self._config.lora is not None and self._base is not None:
            write_adapters(adapted, self._config.lora, directory / ADAPTERS, base=self._base)

    def read(self, directory: Path) -> None:
        progress = read_state(directory, NAME)
        policy = progress.pop(POLICY, None)
        if policy is None:  # of replicas, which save it only as a model
            saved = self._model_cls.from_pretrained(directory, dtype=self.model.dtype, local_files_only=True)
            policy = dict(saved.named_parameters())
        self.load_state_dict({"model": policy | progress.pop(ADAPTED), **progress})


def _leading(samples: Sequence[npt.ArrayLike], different: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """Return True for the tokens of each sample before its first `different` token, [S] -> [S]."""
    widths = np.asarray([np.size(tokens) for tokens in samples], dtype=np.int64)
    count = np.concatenate(([0], np.cumsum(different)))
    before = count[np.cumsum(widths) - widths]
    leading: npt.NDArray[np.bool_] = count[1:] == np.repeat(before, widths)
    return leading


def _of_tokens(values: Sequence[Any], token_ids: Sequence[npt.ArrayLike]) -> npt.NDArray[np.float32]:
    """Return one number per token, [S]. A sample's value is an array over its tokens, or one number for all of them."""
    spread = [np.broadcast_to(value, np.size(ids)) for value, ids in zip(values, token_ids, strict=True)]
    return flatten(spread, np.float32)
