"""Load a policy: any Hugging Face causal language model directory, with its weights or only its architecture."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from penstock.model.files import ModelError, has_weights, read_json

CPU = torch.device("cpu")


def load_policy(
    model_dir: Path,
    *,
    weights: bool,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    seed: int | None = None,
) -> PreTrainedModel:
    """The model in eval mode on `device`. Without `weights`: random ones, the same for the same `seed`.

    Eval mode also while training: dropout would make the trainer disagree with the engine that sampled.
    """
    read_json(model_dir, "config.json")
    if weights and not has_weights(model_dir):
        raise ModelError(f"model directory {model_dir} has no weights (*.safetensors)")
    try:
        model = _from_disk(model_dir, dtype) if weights else _random(model_dir, dtype, seed)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"model directory {model_dir} cannot be loaded: {error}") from error
    if weights and device.type == "cpu":
        for parameter in model.parameters():  # what is mapped from the files would be gone with them
            parameter.data = parameter.data.clone()
    return model.to(device).eval()


def hollow_policy(model_dir: Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model without weights, nor buffers: on no device (`meta`), and in eval mode."""
    with torch.device("meta"):
        return load_policy(model_dir, weights=False, dtype=dtype, device=torch.device("meta"))


def resolve_device(name: str) -> torch.device:
    """`auto` takes an accelerator where there is one, else the CPU."""
    if name == "auto":
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator or torch.device("cpu")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"unknown device {name!r}: {error}") from None


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """`auto` takes bfloat16 on an accelerator, float32 on the CPU."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ModelError(f"unknown dtype {name!r}")
    return dtype


def with_tied_names(model: PreTrainedModel, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`named` weights of the model, and every tied one also under its further names, as a copy of its own: what a
    receiver that ties nothing expects."""
    every = dict(model.named_parameters(remove_duplicate=False))
    known = {id(weight): name for name, weight in every.items() if name in named}
    tied = {name: known[id(weight)] for name, weight in every.items() if name not in named and id(weight) in known}
    return {**named, **{name: named[other].clone() for name, other in tied.items()}}


def _from_disk(model_dir: Path, dtype: torch.dtype) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, local_files_only=True)


def _random(model_dir: Path, dtype: torch.dtype, seed: int | None) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
    with torch.random.fork_rng(devices=[]):  # the caller's random state is its own
        if seed is not None:
            torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
