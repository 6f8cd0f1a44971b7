"""Attention over packed samples: the samples of one pass lie one after the other in a single row, without padding.

A token sees the earlier tokens of its own sample alone. On an accelerator one kernel computes all samples: that of
FlashAttention, through `torch.nn.attention.varlen`. Elsewhere each sample is computed by itself, which is the
reference. Both get the boundaries of the samples as an argument of the model's forward pass, which Transformers hands
down to its layers. If several ranks share the row, each one attends with some of the heads (`context_parallel.py`).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from penstock.model.load_policy import FULL, attention_kinds, without_weights
from penstock.trainer.packing import Boundaries

try:
    from torch.nn.attention.varlen import varlen_attn
except ImportError:
    _takes = set[str]()
else:
    _takes = set(inspect.signature(varlen_attn).parameters)
HAS_KERNEL = "window_size" in _takes
"""Whether torch is new enough for the kernel."""
SHARES_KEYS = "enable_gqa" in _takes
"""Whether the kernel takes fewer heads of keys and values than of queries."""
PACKED, TRIAL = "penstock_packed", "penstock_trial"
"""Names of attention functions in Transformers."""
ARGUMENT = "boundaries"
"""Name of the argument with the boundaries."""
BEYOND = ("sliding_window", "softcap", "s_aux", "position_bias", "head_mask")
"""Arguments of attention functions that ask for more than plain causal attention."""
ROPES = {"dynamic", "longrope"}
"""Rotary positions that depend on the longest sample."""
TRIAL_EXPERTS = "batched_mm"
"""Name of a function of Transformers that computes experts without a look at the values of tensors."""
KERNEL_WIDTH = 256
"""Largest width of a head that the kernel takes."""


def pack(model: PreTrainedModel) -> bool:
    """Make `model` attend within packed samples, if it can. Return whether it can.

    `model` may be without weights, but is not sharded yet. Passes without boundaries are computed as before. A model
    can pack if every layer has plain causal attention, which asks Transformers for its attention function and hands it
    the boundaries. A trial without weights shows whether it does.
    """
    config = model.config.get_text_config()
    can = bool(
        model._supports_attention_backend
        and config._attn_implementation in ("sdpa", PACKED)
        and attention_kinds(config) == {FULL}
        and not getattr(model, "_is_stateful", False)
        and not ROPES & _rope_kinds(config.to_dict())
        and _attending_layers(model) == config.num_hidden_layers
    )
    if can:
        use(model)
    return can


def use(model: PreTrainedModel, name: str = PACKED) -> None:
    """Make `model` use an attention function of Transformers."""
    for part in model.modules():
        if isinstance(part, PreTrainedModel):
            part.config._attn_implementation = name
    model.config.get_text_config()._attn_implementation = name


def arguments(boundaries: Boundaries) -> dict[str, Any]:
    """Return what a model gets for a packed row, beside the row.

    The mask has no meaning: Transformers builds none where it is given one of four dimensions.
    """
    mask = torch.empty(1, 1, 1, 1, dtype=torch.bool, device=boundaries.positions.device)
    return {"position_ids": boundaries.positions, "attention_mask": mask, ARGUMENT: boundaries, "use_cache": False}


def check_packs(config: Any) -> None:
    """Raise RuntimeError if a model with this configuration would not see the boundaries: then samples would attend to
    each other."""
    if config.get_text_config()._attn_implementation != PACKED:
        raise RuntimeError(f"a model ({config.model_type}) was given packed samples, but `pack` was not called for it")


def attend(
    module: Module,
    query: Tensor,  # [batch, heads, num_tokens, width]
    key: Tensor,  # [batch, key_heads, num_tokens, width]
    value: Tensor,  # [batch, key_heads, num_tokens, value_width]
    attention_mask: Tensor | None,
    *,
    boundaries: Boundaries | None = None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Return the attention's output, [batch, num_tokens, heads, value_width]. With `boundaries` the batch is 1."""
    if boundaries is None:
        found, _ = sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **others)
        return found, None
    return _within_samples(query, key, value, boundaries, scaling), None


@torch.compiler.disable  # type: ignore[untyped-decorator] # lengths differ in every pass, and would be compiled in
def _within_samples(query: Tensor, key: Tensor, value: Tensor, boundaries: Boundaries, scaling: float | None) -> Tensor:
    if (context := boundaries.context) is not None:
        own = (context.by_heads(each[0])[None] for each in (query, key, value))
        found = _within_samples(*own, replace(boundaries, context=None), scaling)
        return context.by_tokens(found[0].transpose(0, 1)).transpose(0, 1)[None]
    fits = query.shape[-1] == value.shape[-1] <= KERNEL_WIDTH and query.dtype in (torch.bfloat16, torch.float16)
    if HAS_KERNEL and query.device.type == "cuda" and fits:
        return _in_one_kernel(query, key, value, boundaries, scaling)
    return _one_by_one(query, key, value, boundaries, scaling)


def _in_one_kernel(query: Tensor, key: Tensor, value: Tensor, boundaries: Boundaries, scaling: float | None) -> Tensor:
    longest, shared = max(boundaries.lengths), query.shape[1] // key.shape[1]
    if shared > 1 and not SHARES_KEYS:
        key, value = (each.repeat_interleave(shared, dim=1) for each in (key, value))
    query_rows, key_rows, value_rows = (each[0].transpose(0, 1) for each in (query, key, value))
    sharing: dict[str, Any] = {"enable_gqa": shared > 1} if SHARES_KEYS else {}
    found = varlen_attn(  # [num_tokens, heads, width]
        query_rows,
        key_rows,
        value_rows,
        boundaries.ends,
        boundaries.ends,
        longest,
        longest,
        scale=scaling,
        window_size=(-1, 0),
        **sharing,
    )
    assert isinstance(found, Tensor)
    return found[None]


def _one_by_one(query: Tensor, key: Tensor, value: Tensor, boundaries: Boundaries, scaling: float | None) -> Tensor:
    parts = [torch.split(each, list(boundaries.lengths), dim=2) for each in (query, key, value)]
    shared = query.shape[1] != key.shape[1]
    found = [
        scaled_dot_product_attention(own, keys, values, is_causal=True, scale=scaling, enable_gqa=shared)
        for own, keys, values in zip(*parts, strict=True)
    ]
    return torch.cat(found, dim=2).transpose(1, 2)


def _attending_layers(model: PreTrainedModel) -> int:
    """Return how many layers hand the boundaries to the attention function, and ask for nothing beyond it. 0 if the
    model cannot be tried without weights."""
    tried: Any = without_weights(model).to("meta")
    use(tried, TRIAL)
    if tried._can_set_experts_implementation():
        tried.set_experts_implementation(TRIAL_EXPERTS)
    row = torch.zeros(1, 4, dtype=torch.long, device="meta")
    trial = _Trial()
    try:
        with torch.no_grad():
            tried.base_model(input_ids=row, **{**arguments(Boundaries(row, row[0], (2, 2))), ARGUMENT: trial})
    except Exception:  # whatever a model does with shapes, numbers or arguments that it does not expect
        return 0
    return len(trial.layers)


def _rope_kinds(settings: Mapping[str, Any]) -> set[str]:
    """Return the kinds of rotary positions that a configuration names, also in its parts."""
    found = {str(value) for name, value in settings.items() if name in ("rope_type", "type")}
    return found.union(*(_rope_kinds(value) for value in settings.values() if isinstance(value, dict)))


class _Trial:
    """Stands for the boundaries, and notes the layers to which it is handed down."""

    def __init__(self) -> None:
        self.layers: set[int] = set()


def _try(
    module: Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    asks_for_more = any(given.get(name) is not None for name in BEYOND)
    has_own_mask = not isinstance(attention_mask, Tensor) or attention_mask.numel() > 1
    is_causal = given.get("is_causal") is not False and getattr(module, "is_causal", True)
    if ARGUMENT in given and is_causal and not asks_for_more and not has_own_mask:
        given[ARGUMENT].layers.add(id(module))
    batch, heads, num_tokens, _ = query.shape
    return query.new_empty(batch, num_tokens, heads, value.shape[-1]), None


AttentionInterface.register(PACKED, attend)
AttentionMaskInterface.register(PACKED, sdpa_mask)
AttentionInterface.register(TRIAL, _try)
