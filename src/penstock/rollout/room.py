"""How many tokens of answers a server can hold at one time, and how long an answer can be: the memory for keys and
values."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import PreTrainedModel

from penstock.config import Config
from penstock.model.files import read_json
from penstock.model.load_policy import resolve_device, resolve_dtype
from penstock.rollout.prefix_cache import CACHED_SHARE
from penstock.rollout.shared_blocks import supports_flash

SHARE = 0.5
"""Share of the free memory that keys and values may take, with those of the prefix cache. The rest is for computing,
and for weights that are not loaded yet."""
FEW = 8
"""Number of slots that a server keeps if possible. To keep them, its context becomes shorter."""


def fitting(config: Config, model: Path, *, fixed: Collection[str]) -> tuple[Config, str]:
    """Return settings with which answers fit into the free memory. Also return a sentence that names these settings, or
    "" if they are the given ones.

    One answer of `model.max_context` tokens must fit. Samples wait for memory, so any number of slots fits, except on
    an accelerator without FlashAttention: there, each slot takes the memory of a whole context. The settings named in
    `fixed` stay as they are.
    """
    device = resolve_device(config.model.device)
    dtype = resolve_dtype(config.model.dtype, device)
    architecture = read_json(model, "config.json")
    of_token = bytes_of_token(architecture, dtype.itemsize)
    slots, context = config.rollout.slots, config.model.max_context
    num_tokens = int(SHARE * free_bytes(device) / (1 + CACHED_SHARE)) // of_token if of_token else slots * context
    takes_all = device.type != "cpu" and not supports_flash(device, dtype, heads(architecture)[1])
    if takes_all and "rollout.slots" not in fixed:
        slots = min(slots, max(num_tokens // context, FEW if "model.max_context" not in fixed else 1))
    if "model.max_context" not in fixed:
        context = min(context, max(num_tokens // (slots if takes_all else 1), 8))
    if (slots, context) == (config.rollout.slots, config.model.max_context):
        return config, ""
    found = config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update={"slots": slots}),
            "model": config.model.model_copy(update={"max_context": context}),
        }
    )
    at_once = f", {slots} at once," if takes_all else ""
    return found, (
        f"answers of {context} tokens{at_once} fit into a quarter of the free memory: set rollout.slots or "
        "model.max_context for another choice"
    )


def tokens_that_fit(model: PreTrainedModel, *, num_slots: int, max_context: int, num_cached: int | None) -> int:
    """Return how many tokens can have keys and values at one time: what a share of the free memory has room for, and
    at most one context per slot and what the prefix cache may hold, by default as much.

    Raises ValueError if that is less than one context."""
    in_slots = num_slots * max_context
    most = int(CACHED_SHARE * in_slots)
    useful = in_slots + (most if num_cached is None else min(num_cached, most))
    of_token = bytes_of_token(model.config.to_dict(), model.dtype.itemsize)
    if not of_token:
        return useful
    free = free_bytes(model.device)
    if (found := int(SHARE * free) // of_token) < max_context:
        raise ValueError(
            f"too little memory for one sequence: keys and values of model.max_context={max_context} tokens take "
            f"{max_context * of_token / 2**30:.3g} GiB, and {SHARE:.0%} of the free memory is "
            f"{SHARE * free / 2**30:.3g} GiB; shorten model.max_context, or free memory of {model.device}"
        )
    return min(found, useful)


def bytes_of_token(architecture: dict[str, Any], num_bytes: int) -> int:
    """Return the size of a token's keys and values in all layers; 0 if the architecture does not tell."""
    num_heads, size = heads(architecture)
    return 2 * num_bytes * _number(architecture, "num_hidden_layers") * num_heads * size


def heads(architecture: dict[str, Any]) -> tuple[int, int]:
    """Return the number of key/value heads and their size; 0 where the architecture does not tell."""
    heads = _number(architecture, "num_attention_heads")
    size = _number(architecture, "head_dim") or _number(architecture, "hidden_size") // max(heads, 1)
    return _number(architecture, "num_key_value_heads") or heads, size


def _number(architecture: dict[str, Any], name: str) -> int:
    nested = architecture.get("text_config")
    value = (nested if isinstance(nested, dict) else architecture).get(name)
    return value if isinstance(value, int) else 0


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
