"""A random tiny policy with experts, and what its routers choose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3MoeConfig, Qwen3MoeForCausalLM

from penstock.model.experts import expert_layers, record_of, recording
from penstock.routed_experts import Record

VOCABULARY, NUM_EXPERTS, NUM_CHOSEN, NUM_LAYERS = 64, 8, 2, 3
"""Of these layers, the first one has no experts."""
WIDTH = (NUM_LAYERS - 1) * NUM_CHOSEN
EOS = 1


def expert_config(**changed: Any) -> Qwen3MoeConfig:
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 48,
        "moe_intermediate_size": 16,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": NUM_CHOSEN,
        "mlp_only_layers": [0],
        "norm_topk_prob": True,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        "bos_token_id": None,
        "eos_token_id": EOS,
        "pad_token_id": 0,
    }
    return Qwen3MoeConfig(**settings | changed)


def expert_model(seed: int = 0, **changed: Any) -> PreTrainedModel:
    torch.manual_seed(seed)
    model: PreTrainedModel = Qwen3MoeForCausalLM(expert_config(**changed)).eval()
    return model


def chosen_by(model: PreTrainedModel, token_ids: Sequence[int]) -> Record:
    """The experts that the routers choose in one pass over all tokens, [num_tokens, WIDTH]."""
    with torch.no_grad(), recording(expert_layers(model)) as found:
        model(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
    return record_of(found, NUM_EXPERTS)
