"""The learner: a policy objective over sampled tokens, gradients accumulated until the caller asks for a step.

Invariants. A token's gradient enters as a plain sum and is divided by the step's own count (`losses/normalise.py`) when
the step is taken, so any partition of the same samples into `accumulate` calls, and over ranks, gives the same update.
Every rank counts its own; what a step divides by, decides on and reports is of all ranks, and equal on all of them. So
all make the same calls, with whatever samples each was dealt, or none. Tokens older than
`max_staleness` versions are counted and left out, and so are tokens of versions that are yet to be made here: another
trainer's. The behaviour log-probabilities are the engine's own; advantages, and what a reference policy thinks of the
tokens, come with the batch. Every call of `step` ends the current policy_version,
also when a non-finite gradient leaves the weights as they were.

`LearnerState.metrics` (means over the step's trained tokens): loss, grad_norm (before clipping), clip_fraction (tokens
that a clip or a mask left without a gradient), ratio_mean, ess (effective sample size of the tokens'
ratios pi / mu, as a share), sample_ess (of the samples' truncated products of them), mastered_fraction,
kl_reference, entropy (of the full softmax, in nats), kl_engine_trainer (mean |logprob trainer - engine| over the
`kl_tokens` with which answers begin in the version that computes them here: see `parity.py`; what comes after a weight
update rests on older keys and values, whose difference is none), parity_gap_max (the largest), staleness_mean,
staleness_max; and tokens, tokens_masked_stale, tokens_masked_foreign, tokens_masked_segments, samples, learning_rate,
skipped (1 if the gradient was not finite), busy_s (model compute since the last step: the mean over ranks, and what the
step itself took on this one). With `measure_noise`, where it can be measured: noise_signal, noise_trace (see
`trainer/noise.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from penstock.config.schema import TrainerConfig
from penstock.groups.batch import Batch
from penstock.trainer.busy import BusyClock
from penstock.trainer.canaries import Canaries
from penstock.trainer.criterion import Criterion
from penstock.trainer.forward import recompute_activations
from penstock.trainer.lora import adapted_parameters, attach, merged_weights
from penstock.trainer.masks import Selection
from penstock.trainer.noise import GradientNorm, gradient_norm, noise
from penstock.trainer.offload import Offload
from penstock.trainer.optimizer import adamw
from penstock.trainer.packing import MicroBatch, TokenTable, flatten
from penstock.trainer.passes import Passes, autocast
from penstock.trainer.ranks import Ranks
from penstock.trainer.shards import assign, load_optimizer, whole
from penstock.trainer.states import read_state, write_state
from penstock.trainer.statistics import StepStatistics
from penstock.trainer.strategy import strategy_of
from penstock.types import LearnerState

NAME = "learner"
"""Of the files with optimizer, random state and counters in a checkpoint."""


class NothingLearnt(RuntimeError):
    """Too many steps in a row had an infinite or undefined gradient, or none at all."""

    self_explanatory = True
    hopeless = True


class Learner:
    """One rank's. It owns the model's gradients and the optimizer."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        *,
        max_staleness: int,
        temperature: float = 1.0,
        policy_version: int = 0,
        compute_dtype: torch.dtype = torch.float32,
        max_tokens: int = 1,
        whole_step: int = 1,
        measure_noise: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        """`model` has float32 weights, and is placed as `strategy_of` has it, over `ranks` (none: this one is alone).
        `compute_dtype` is that of forward and backward passes (autocast), best the servers' own. `temperature` is the
        sampling temperature: log-probabilities are those of the policy that was sampled. `max_tokens`: of the longest
        answer allowed. `whole_step`: samples of a full optimizer step. `measure_noise`: the gradient's norm is also
        taken within a step, for the gradient noise scale."""
        self.model, self._model_cls = model, type(model)
        self.policy_version = policy_version
        self._config = config
        self._selection = Selection(max_staleness, config.objective.segments)
        self._canaries = Canaries(config.canaries)
        if config.activation_checkpointing:
            recompute_activations(model)
        self._ranks = ranks or Ranks()
        self._strategy = strategy_of(model, config, self._ranks)
        self._criterion = Criterion(
            model,
            config,
            strategy=self._strategy,
            autocast=autocast(self._strategy.device, compute_dtype),
            temperature=temperature,
            max_tokens=max_tokens,
            max_staleness=max_staleness,
        )
        self._whole_step = whole_step
        if config.lora is not None:
            attach(model, config.lora)
        self._passes = Passes(model, self._strategy, max_tokens=config.tokens_per_microbatch)
        self._strategy.place(model)
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._optimizer = adamw(self._parameters, learning_rate=config.learning_rate, weight_decay=config.weight_decay)
        self._device = self._strategy.device
        self._busy = BusyClock(self._device)
        self._offload = Offload(self._device, self._optimizer)
        self._pending = StepStatistics()
        self._measure_noise = measure_noise
        self._small: GradientNorm | None = None
        """Norm over the first samples of the step."""
        self._num_steps = 0
        self._num_bad = 0

    def accumulate(self, batch: Batch) -> dict[str, float]:
        """Add the gradient of this rank's part of a batch from `prepare`. An advantage is a number, or an array of one
        for each of the sample's tokens (see `Critic`); where the objective keeps near a reference policy, the batch has
        its column too (see `Reference`). Returns what was counted: added up over the ranks, that of the whole."""
        if not self._measure_noise or any(self._ranks.total([self._pending.tokens], "see whether a step begins")):
            return self._add(batch)
        counted = self._add(batch.select(batch["early"]))
        with self._busy:
            self._small = self._norm_so_far()
        self._pending.busy_s += self._busy.seconds
        rest = self._add(batch.select(~batch["early"]))
        return {name: count + rest[name] for name, count in counted.items()}

    def _norm_so_far(self) -> GradientNorm | None:
        pending = self._pending.over(self._ranks)
        gradients = self._strategy.summed(self._parameters, in_place=False)
        return gradient_norm(gradients, samples=pending.samples, divisor=self._divisor(pending))

    def _divisor(self, pending: StepStatistics) -> int:
        return self._criterion.divisor(tokens=pending.tokens, samples=pending.trained_samples)

    def _add(self, batch: Batch) -> dict[str, float]:
        masks = self._selection.of(batch, self.policy_version)
        compared = self._criterion.compared_version(self.policy_version)
        current = masks.sampled & _leading(batch["versions"], masks.sampled & (masks.versions != compared))
        table = TokenTable.build(batch["token_ids"], masks.in_loss)
        columns = {
            "behaviour": flatten(batch["logprobs"], np.float32),
            "advantages": _of_tokens(batch["advantages"], batch["token_ids"]),
            "staleness": masks.staleness,
            "comparable": current,
        }
        if self._config.objective.kl_coef:
            columns["reference"] = flatten(batch["reference"], np.float32)
        with self._busy:
            for micro in self._passes.of(table):
                self._backward(micro, columns)
        self._pending.trained_samples += int(np.count_nonzero(table.widths))
        pending, ages = self._pending, masks.staleness[masks.in_loss]
        stale = int((masks.sampled & (masks.staleness > self._selection.max_staleness)).sum())
        pending.samples += len(batch)
        pending.tokens += len(ages)
        pending.tokens_masked_stale += stale
        pending.tokens_masked_foreign += int((masks.sampled & (masks.staleness < 0)).sum())
        pending.tokens_masked_segments += int((masks.fresh & ~masks.in_loss).sum())
        pending.staleness += int(ages.sum())
        pending.staleness_max = max(pending.staleness_max, int(ages.max(initial=0)))
        pending.kl_tokens += int((masks.in_loss & current).sum())
        pending.busy_s += self._busy.seconds
        return {
            "samples": float(len(batch)),
            "tokens": float(len(ages)),
            "tokens_masked_stale": float(stale),
            "busy_s": self._busy.seconds / self._ranks.size,
        }

    def _backward(self, micro: MicroBatch, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Forward and backward of one micro-batch; gradients and sums are added, nothing is normalised. `columns`: what
        the criterion is to know of every token, each [S]."""
        known = {name: self._tensor(column[micro.tokens]) for name, column in columns.items()}
        rows = self._criterion.rows(micro, samples=self._tensor(micro.samples), **known)
        rows["loss"].sum().backward()  # type: ignore[no-untyped-call]
        self._pending.add_tokens(**rows)

    def _tensor(self, array: np.ndarray[Any, Any]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(array)).to(self._device)

    def step(self) -> LearnerState:
        """One optimizer step over everything accumulated; ends the current policy_version."""
        with self._busy:
            pending, self._pending = self._pending.over(self._ranks), StepStatistics()
            divisor = self._divisor(pending)
            metrics = pending.means(divisor)
            learning_rate = self._learning_rate(metrics)
            grad_norm, noise_metrics = self._update(pending, learning_rate) if pending.tokens else (0.0, {})
            self._small = None
        pending.busy_s += self._busy.seconds
        finite = math.isfinite(grad_norm)
        self._num_bad = 0 if finite and pending.tokens else self._num_bad + 1
        if self._num_bad >= self._config.max_bad_steps:
            why = "had no token to train" if finite else "had a non-finite gradient"
            raise NothingLearnt(f"{self._num_bad} optimizer steps in a row taught nothing; the last one {why}")
        self._num_steps += 1
        self.policy_version += 1
        self._criterion.stepped(self._num_steps, policy_version=self.policy_version, num_compared=pending.kl_tokens)
        metrics |= {
            "grad_norm": grad_norm if finite else 0.0,
            "learning_rate": learning_rate,
            "skipped": float(not finite),
            "busy_s": pending.busy_s,
            **noise_metrics,
        }
        return LearnerState(
            policy_version=self.policy_version,
            entropy=metrics["entropy"],
            metrics=metrics,
            alarms=self._canaries.look(metrics),
        )

    def _update(self, pending: StepStatistics, learning_rate: float) -> tuple[float, dict[str, float]]:
        """Sum over ranks, normalise, clip, apply. Returns the gradient's norm and, where it can be measured, its noise.
        A norm that is not finite leaves everything untouched."""
        divisor = self._divisor(pending)
        gradients = self._strategy.summed(self._parameters, in_place=True)
        noise_metrics: dict[str, float] = {}
        if self._small is not None:
            large = gradient_norm(gradients, samples=pending.samples, divisor=divisor)
            noise_metrics = noise(self._small, large) if large else {}
        torch._foreach_div_(gradients, float(divisor))
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self._config.max_grad_norm, foreach=True)
        grad_norm = float(whole(norm))
        if math.isfinite(grad_norm):
            for group in self._optimizer.param_groups:
                group["lr"] = learning_rate
            self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return grad_norm, noise_metrics

    def _learning_rate(self, metrics: Mapping[str, float]) -> float:
        """Linear warm-up, then constant, times what the step's own data are worth."""
        config, factor = self._config, 1.0
        if "samples" in config.scale_learning_rate:
            factor *= math.sqrt(metrics["samples"] / self._whole_step)
        if "ess" in config.scale_learning_rate:
            factor *= math.sqrt(metrics["sample_ess"])
        return config.learning_rate * factor * min(1.0, (self._num_steps + 1) / max(config.warmup_steps, 1))

    def named_weights(self) -> dict[str, Tensor]:
        """The parameters by name, tied ones once, adapters merged; on rank 0 alone. All ranks must ask."""
        return self._gathered(merged_weights(self.model))

    def _gathered(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One after another, so that the others never hold them all."""
        found = {}
        for name, tensor in named.items():
            gathered = whole(tensor)
            if self._ranks.is_first:
                found[name] = gathered
        return found

    def release(self) -> None:
        """Give up the device until `resume`. Meanwhile nothing is trained or restored; everything else goes on."""
        self._offload.release([self.model, *self._criterion.copies])

    def resume(self) -> None:
        """Take the device again."""
        self._offload.resume()

    def state_dict(self) -> dict[str, Any]:
        """Everything that decides the future, at the last step boundary; gradients accumulated since are not in it."""
        return {"model": {name: p.detach() for name, p in self.model.named_parameters()}, **self._progress()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state, whole; gradients accumulated so far are dropped."""
        for name, parameter in self.model.named_parameters():
            assign(parameter, state["model"][name])
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
        """Write the state as files: the policy, and the rest beside it. All ranks must, to a directory that they
        share."""
        self.write_policy(directory)
        write_state(self._progress() | {"adapted": adapted_parameters(self.model)}, directory, NAME, self._strategy)

    def write_policy(self, directory: Path) -> None:
        """As a Hugging Face model, adapters merged. All ranks must."""
        weights = self.named_weights()
        if self._ranks.is_first:
            self.model.save_pretrained(directory, state_dict=weights)

    def read(self, directory: Path) -> None:
        """Restore what `write` wrote, with however many ranks that was."""
        saved = self._model_cls.from_pretrained(directory, dtype=self.model.dtype, local_files_only=True)
        progress = read_state(directory, NAME)
        self.load_state_dict({"model": dict(saved.named_parameters()) | progress.pop("adapted"), **progress})


def _leading(samples: Sequence[npt.ArrayLike], different: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """[S] -> [S]: True from each sample's beginning up to its first `different` token."""
    widths = np.asarray([np.size(tokens) for tokens in samples], dtype=np.int64)
    count = np.concatenate(([0], np.cumsum(different)))
    before = count[np.cumsum(widths) - widths]
    leading: npt.NDArray[np.bool_] = count[1:] == np.repeat(before, widths)
    return leading


def _of_tokens(values: Sequence[Any], token_ids: Sequence[npt.ArrayLike]) -> npt.NDArray[np.float32]:
    """[S]: the numbers of each sample's tokens, or its one number for all of them."""
    spread = [np.broadcast_to(value, np.size(ids)) for value, ids in zip(values, token_ids, strict=True)]
    return flatten(spread, np.float32)
