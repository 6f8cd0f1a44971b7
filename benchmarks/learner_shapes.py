"""Optimizer steps of real shapes with random weights: how near they come to what the device can multiply, and whether
the planned memory is the measured one.

`flops_share` is the share of a large matrix product's rate that the arithmetic of the batch makes; nothing is padded,
and activations that are computed again do not count twice. `compiled_flops_share`: the same with `trainer.compile`,
after its compilation, which took `compile_s`. `planned_vs_measured_peak`: the planned memory over the measured peak.
`long_*`: two samples, each of which fills a pass of 32k tokens, activations computed again. States are in float32,
passes in bfloat16. `layers` is how many of the shape's layers the device had room for; each is as fast as all
of them. `pass_tokens`: the tokens of a pass, as the memory plan decides them.

It is meant for an accelerator: `--device cuda --shape Qwen3-4B`. On a CPU a small shape shows that everything runs.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from hardware import accelerator_name, flops_per_s, seconds
from learner import Setting, flops, make_batch
from learner_counts import SHAPES, shape
from report import Benchmark, arguments, publish
from transformers import AutoModelForCausalLM
from transformers.models.qwen3 import Qwen3Config

from penstock.config import TrainerConfig
from penstock.groups.batch import Batch
from penstock.trainer.learner import Learner
from penstock.trainer.memory import decided, learner_bytes

FIGURES = ("flops_share", "compiled_flops_share", "compile_s", "planned_vs_measured_peak")
LONG_FIGURES = ("long_peak_gb", "long_planned_vs_measured_peak", "long_tokens_per_s")
BENCHMARK = Benchmark(
    name="learner_shapes",
    measures=["trainer", "processes/memory_plan.py"],
    figures=["layers", "pass_tokens", *FIGURES, *LONG_FIGURES],
)
SMALL = Qwen3Config(
    hidden_size=64,
    intermediate_size=192,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=512,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)
LENGTH, NUM_SAMPLES = 2048, 32
SMALL_PASS_TOKENS, SMALL_LENGTH, SMALL_NUM_SAMPLES = 512, 128, 8
LONG = 32_768
ROUNDS = 3
ROOM = 0.85
"""Share of a device's memory that a plan may take here."""


def trainer_of(**settings: Any) -> TrainerConfig:
    return TrainerConfig.model_validate({"learning_rate": 1e-6, "canaries": {"parity_every": None}} | settings)


def decided_for(architecture: Any, trainer: TrainerConfig, length: int, device: torch.device) -> TrainerConfig:
    """Return the settings of a run on this device."""
    if device.type == "cpu":
        return trainer
    capacity = torch.get_device_module(device).mem_get_info(device)[1]
    return decided(architecture, trainer, longest=length, dtype=torch.bfloat16, roles=["actor"], capacity=capacity)


def planned(architecture: Any, trainer: TrainerConfig, length: int, device: torch.device) -> int:
    """Return the planned bytes of a learner."""
    on_accelerator = device.type != "cpu"
    dtype = torch.bfloat16 if on_accelerator else torch.float32
    roles = ["actor"]
    return learner_bytes(
        architecture, trainer, longest=length, dtype=dtype, on_accelerator=on_accelerator, roles=roles
    ).total


def with_room(name: str, trainer: TrainerConfig, length: int, device: torch.device) -> Any:
    """Return the shape with as many layers as the device has room for."""
    if device.type == "cpu":
        return SMALL
    _, capacity = torch.get_device_module(device).mem_get_info(device)
    architecture = shape(name)
    while planned(architecture, trainer, length, device) > ROOM * capacity and architecture.num_hidden_layers > 1:
        architecture.num_hidden_layers -= max(architecture.num_hidden_layers // 8, 1)
        architecture.layer_types = architecture.layer_types[: architecture.num_hidden_layers]
    return architecture


def learner_of(architecture: Any, trainer: TrainerConfig, device: torch.device) -> Learner:
    """Return a learner with random weights."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(architecture, dtype=torch.float32).eval()
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    return Learner(model, trainer, max_staleness=1_000_000, compute_dtype=dtype)


def batch_of(num_samples: int, length: int, device: torch.device) -> Batch:
    """Samples of one length, each of a prompt of its own."""
    setting = Setting(device=device, groups=num_samples, prompt_tokens=16, max_context=length, answers={}, group_size=1)
    return make_batch(setting, median_tokens=float(length), sigma=0.0)


def step_seconds(learner: Learner, batch: Batch, device: torch.device, rounds: int) -> Iterator[float]:
    def step() -> None:
        learner.accumulate(batch)
        learner.step()

    for _ in range(rounds):
        yield seconds(step, device)


def peak_of(device: torch.device) -> float:
    """Return the most bytes that tensors took since the last call; nan on a CPU."""
    if device.type == "cpu":
        return math.nan
    found = float(torch.accelerator.max_memory_allocated(device))
    torch.accelerator.reset_peak_memory_stats(device)
    return found


def measured_steps(name: str, device: torch.device, rounds: int) -> dict[str, float]:
    small = device.type == "cpu"
    length = SMALL_LENGTH if small else LENGTH
    batch = batch_of(SMALL_NUM_SAMPLES if small else NUM_SAMPLES, length, device)
    rate = flops_per_s(device, torch.float32 if small else torch.bfloat16)
    found: dict[str, float] = {}
    for compiled in (False, True):
        trainer = trainer_of(tokens_per_microbatch=SMALL_PASS_TOKENS if small else None, compile=compiled)
        architecture = with_room(name, trainer, length, device)
        trainer = decided_for(architecture, trainer, length, device)
        learner = learner_of(architecture, trainer, device)
        peak_of(device)
        first, *times = step_seconds(learner, batch, device, rounds + 1)
        share = flops(learner.model, batch) / float(np.median(times)) / rate
        if compiled:
            found |= {"compiled_flops_share": share, "compile_s": first - float(np.median(times))}
            continue
        found |= {
            "layers": float(architecture.num_hidden_layers),
            "flops_share": share,
            "pass_tokens": float(trainer.pass_tokens),
            "planned_vs_measured_peak": planned(architecture, trainer, length, device) / peak_of(device),
        }
        del learner
    return found


def measured_long_sample(name: str, device: torch.device) -> dict[str, float]:
    length = SMALL.max_position_embeddings if device.type == "cpu" else LONG
    trainer = trainer_of(tokens_per_microbatch=length, activation_checkpointing=True)
    architecture = with_room(name, trainer, length, device)
    learner = learner_of(architecture, trainer, device)
    peak_of(device)
    batch = batch_of(2, length, device)  # the second pass finds the gradients of the first one
    *_, taken_s = step_seconds(learner, batch, device, 2)
    peak = peak_of(device)
    return {
        "long_peak_gb": peak / 1e9,
        "long_planned_vs_measured_peak": planned(architecture, trainer, length, device) / peak,
        "long_tokens_per_s": 2 * length / taken_s,
    }


def main() -> None:
    options = arguments(__doc__ or "", device="DEVICE", shape="|".join(SHAPES))
    device, name = torch.device(options.device or "cpu"), options.shape or "Qwen3-0.6B"
    if name not in SHAPES:
        raise SystemExit(f"--shape {name}: choose one of {', '.join(SHAPES)}")
    figures = measured_steps(name, device, 1 if options.quick else ROUNDS)
    gc.collect()
    figures |= measured_long_sample(name, device)
    where = accelerator_name(device)
    publish(BENCHMARK, figures, options.json, accelerator=f"{where}, {name}" if where else None)


if __name__ == "__main__":
    main()
