"""A tiny model with experts, as a published one lies in its directory."""

from __future__ import annotations

from pathlib import Path

import torch
from made_samples import VOCABULARY
from transformers import GptOssConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

NUM_EXPERTS = 8


def experts_config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        norm_topk_prob=True,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )


EXPERT_MODELS = (
    experts_config(),
    GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=16,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
)
"""The second has biases, and a layout of its own."""


def write_experts_model(directory: Path) -> Path:
    """Write a model whose routers prefer different experts for different tokens, clearly."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(5)
        model = Qwen3MoeForCausalLM(experts_config())
        for layer in model.model.layers:
            layer.mlp.gate.weight.normal_(std=0.5)
            layer.mlp.experts.gate_up_proj.normal_(std=0.2)
            layer.mlp.experts.down_proj.normal_(std=0.2)
    model.save_pretrained(directory)
    return directory
