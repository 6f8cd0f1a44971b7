"""Load a policy: any Hugging Face causal language model directory, with its weights or only its architecture."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import Parameter
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from penstock.model.files import AGAIN, ModelError, check_no_code, has_weights

CPU = torch.device("cpu")
FULL = "full_attention"
OWN_CODE = {"local_files_only": True, "trust_remote_code": False}
"""Arguments for Transformers: nothing is downloaded, and no code of the model directory runs or is asked about."""


def load_policy(
    model_dir: Path,
    *,
    weights: bool,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    seed: int | None = None,
) -> PreTrainedModel:
    """Return the model in eval mode on `device`. Raises `ModelError` if it cannot be loaded.

    If `weights` is False, the weights are random; equal seeds give equal weights. The model stays in eval mode during
    training, since dropout would make the trainer's log-probabilities differ from the engine's.
    """
    check_no_code(model_dir)
    if weights and not has_weights(model_dir):
        raise ModelError(f"model directory {model_dir} has no weights (*.safetensors)")
    try:
        if weights:
            model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=dtype, **OWN_CODE)
        else:
            model = _random(model_dir, dtype, seed)
    except Exception as error:  # Transformers raises all kinds of errors for malformed files
        raise ModelError(_fault(model_dir, error)) from error
    if weights and device.type == "cpu":
        for parameter in model.parameters():  # a mapped parameter would be lost with its file
            parameter.data = parameter.data.clone()
    return model.to(device).eval()


def _fault(model_dir: Path, error: Exception) -> str:
    """Return which file keeps a model from being loaded, as far as that can be told, and what to do."""
    for path in sorted(model_dir.glob("*.safetensors")):
        try:
            with safe_open(path, "pt"):
                continue
        except Exception as damage:  # an error of safetensors, which is no subclass of OSError
            return f"{path} is damaged ({damage}): {AGAIN}"
    reason = f"cannot be loaded: {type(error).__name__}: {error}"
    return f"model directory {model_dir} {reason}; if its config.json or generation_config.json is damaged, {AGAIN}"


def hollow_policy(model_dir: Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return the model without weights and buffers: on the `meta` device, in eval mode."""
    with torch.device("meta"):
        return load_policy(model_dir, weights=False, dtype=dtype, device=torch.device("meta"))


def without_weights(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy of `model` without weights (on `meta`), but with everything else."""
    parameters = dict.fromkeys(model.parameters())
    without = {id(p): Parameter(torch.empty_like(p, device="meta"), requires_grad=False) for p in parameters}
    return deepcopy(model, without)


def resolve_device(name: str) -> torch.device:
    """Return the named device; `auto` is the accelerator if there is one, else the CPU. Raises `ModelError`."""
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or CPU
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ModelError(f"unknown device {name!r}: {error}") from None


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the named dtype; `auto` is bfloat16 on an accelerator, float32 on the CPU. Raises `ModelError`."""
    if name == "auto":
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ModelError(f"unknown dtype {name!r}")
    return dtype


def attention_kinds(config: Any) -> set[str]:
    """Return the attention kinds of a Transformers text configuration.

    A configuration with a sliding window but without `layer_types` has the window in all layers.
    """
    if layers := getattr(config, "layer_types", None):
        return set(layers)
    return {FULL if getattr(config, "sliding_window", None) is None else "sliding_attention"}


def with_tied_names(model: PreTrainedModel, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `named` plus each tied weight under each of its other names, as the same tensor.

    A receiver that does not tie weights expects all names.
    """
    every = dict(model.named_parameters(remove_duplicate=False))
    known = {id(weight): name for name, weight in every.items() if name in named}
    tied = {name: known[id(weight)] for name, weight in every.items() if name not in named and id(weight) in known}
    return {**named, **{name: named[other] for name, other in tied.items()}}


def with_original_names(model: Any, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `named` with the names and shapes that `save_pretrained` writes, which other engines read.

    Transformers may hold weights in other ways than published models do: the experts of a layer as one tensor, for
    example. The tensors may be parts of those of `named`, with the same memory.
    """
    original: dict[str, Tensor] = revert_weight_conversion(model, dict(named))
    return original


def _random(model_dir: Path, dtype: torch.dtype, seed: int | None) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(model_dir, **OWN_CODE)
    with torch.random.fork_rng(devices=[]):  # keep the caller's random state unchanged
        if seed is not None:
            torch.manual_seed(seed)
        return AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
