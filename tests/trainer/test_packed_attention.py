"""Packed samples get the values and gradients of samples that are computed one at a time, or a model does not pack."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_forward import CONFIGS, SMALL, siblings, small_model
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import (
    BertConfig,
    CohereConfig,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MambaConfig,
    Phi3Config,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from penstock.trainer import packed_attention
from penstock.trainer.critic import ValueFunction
from penstock.trainer.forward import recompute_activations, token_logprobs
from penstock.trainer.packed_attention import pack
from penstock.trainer.packing import MicroBatch, TokenTable, flatten, micro_batches
from penstock.trainer.strategy import compile_layers

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
PACKING = {
    "llama": CONFIGS["llama"][0],
    "gpt2": CONFIGS["gpt2"][0],
    "qwen3": Qwen3Config(**SMALL),
    "qwen3 with experts": Qwen3MoeConfig(**SMALL, **EXPERTS),
    "cohere": CohereConfig(**SMALL),
    "granite": GraniteConfig(**SMALL),
}
OTHERS = {
    "a window": CONFIGS["mistral with a window"][0],
    "windows and a soft cap": CONFIGS["gemma2 with windows and a soft cap"][0],
    "sinks": GptOssConfig(**SMALL, layer_types=["full_attention"] * 2, num_local_experts=2, num_experts_per_tok=1),
    "a recurrent state": MambaConfig(vocab_size=60, hidden_size=16, num_hidden_layers=2, state_size=4),
    "positions of another kind for long samples": Phi3Config(
        **SMALL,
        pad_token_id=0,
        original_max_position_embeddings=16,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10_000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 16,
        },
    ),
    "attention to later tokens": BertConfig(
        vocab_size=60, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24
    ),
    "positions that depend on the longest sample": LlamaConfig(
        **SMALL, rope_scaling={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    ),
}


def tables() -> list[TokenTable]:
    """All samples together, and each by itself."""
    ids, masks = siblings()
    return [
        TokenTable.build(ids, flatten(masks, bool)),
        *(TokenTable.build([row], mask) for row, mask in zip(ids, masks, strict=True)),
    ]


def micros(table: TokenTable, *, packed: bool) -> list[MicroBatch]:
    return list(micro_batches(table, 300, torch.device("cpu"), share_prefixes=False, pack=packed))


def computed(model: PreTrainedModel, *, packed: bool) -> tuple[Tensor, list[Tensor]]:
    """Log-probabilities of all trained tokens in the order of the table, and gradients."""
    whole, *single = tables()
    weights = torch.linspace(-1, 1, len(whole.token_ids))
    found = torch.zeros(len(whole.token_ids))
    offset = 0
    for table in [whole] if packed else single:
        for micro in micros(table, packed=packed):
            assert not packed or (micro.boundaries is not None and len(micro.boundaries.lengths) > 1)
            logprobs, _ = token_logprobs(model, micro)
            places = torch.from_numpy(micro.tokens) + offset
            (logprobs * weights[places]).sum().backward()
            found[places] = logprobs.detach()
        offset += len(table.token_ids)
    return found, [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("architecture", PACKING.values(), ids=PACKING)
def test_packed_equals_separate(architecture: Any, checkpointed: bool) -> None:
    model, other = small_model(architecture), small_model(architecture)
    assert pack(model)
    if checkpointed:
        recompute_activations(model)
    found, expected = computed(model, packed=True), computed(other, packed=False)
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("architecture", OTHERS.values(), ids=OTHERS)
def test_a_model_whose_layers_need_more_does_not_pack(architecture: Any) -> None:
    model = small_model(architecture)
    assert not pack(model)
    with pytest.raises(RuntimeError, match="was given packed samples"):
        computed(model, packed=True)


def test_other_passes_of_a_model_that_packs_have_the_same_bits() -> None:
    model, other = small_model(PACKING["qwen3"]), small_model(PACKING["qwen3"])
    assert pack(model) and pack(model), "packing again changes nothing"
    ids, masks = siblings()
    table = TokenTable.build(ids, flatten(masks, bool))
    for share in (False, True):
        for micro in micro_batches(table, 300, model.device, share_prefixes=share):
            assert torch.equal(token_logprobs(model, micro)[0], token_logprobs(other, micro)[0])


def test_a_model_that_packs_is_saved_as_it_was(tmp_path: Any) -> None:
    model = small_model(PACKING["llama"])
    model.save_pretrained(tmp_path / "before")
    assert pack(model)
    model.save_pretrained(tmp_path / "after")
    before, after = ((tmp_path / name / "config.json").read_text() for name in ("before", "after"))
    assert before == after


def test_values_of_packed_samples_equal_those_of_padded_ones() -> None:
    model = small_model(PACKING["qwen3"])
    assert pack(model)
    function = ValueFunction(model)
    torch.nn.init.normal_(function.head.weight)
    whole, *_ = tables()
    found = []
    for packed in (True, False):
        values = torch.zeros(len(whole.token_ids))
        for micro in micros(whole, packed=packed):
            values[torch.from_numpy(micro.tokens)] = function(
                micro.inputs, micro.rows, micro.columns, micro.boundaries
            ).detach()[:, 0]
        found.append(values)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-5)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("checkpointed", [False, True])
def test_compiled_layers_compute_the_same(checkpointed: bool) -> None:
    """For several shapes, with few compilations."""
    compiled, eager = small_model(PACKING["qwen3"]), small_model(PACKING["qwen3"])
    assert pack(compiled)
    if checkpointed:
        recompute_activations(compiled)
    compile_layers(compiled)
    torch.compiler.reset()
    counters.clear()
    found, expected = computed(compiled, packed=True), computed(eager, packed=False)
    torch.testing.assert_close(found[0], expected[0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(found[1], expected[1], atol=1e-5, rtol=1e-4)
    compilations = counters["stats"]["unique_graphs"]
    assert compilations > 0
    ids, masks = siblings()
    for number in range(3, len(ids), 3):
        table = TokenTable.build(ids[:number], flatten(masks[:number], bool))
        for micro in micros(table, packed=True):
            token_logprobs(compiled, micro)[0].sum().backward()
    assert counters["stats"]["unique_graphs"] <= compilations + 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.skipif(not packed_attention.HAS_KERNEL, reason="this torch has no kernel for packed samples")
@settings(max_examples=20, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=8),
    key_heads=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 9),
)
def test_the_kernel_equals_one_sample_at_a_time(lengths: list[int], key_heads: int, seed: int) -> None:
    torch.manual_seed(seed)
    device, tokens = torch.device("cuda"), sum(lengths)
    query, key, value = (
        torch.randn(1, heads, tokens, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, key_heads, key_heads)
    )
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    boundaries = packed_attention.Boundaries(ends.long()[None], ends, tuple(lengths))
    results = []
    for compute in (packed_attention._in_one_kernel, packed_attention._one_by_one):
        output = compute(query, key, value, boundaries, None)
        gradients = torch.autograd.grad(output.float().square().sum(), (query, key, value))
        results.append([output, *gradients])
    for own, other in zip(*results, strict=True):
        torch.testing.assert_close(own.float(), other.float(), atol=3e-2, rtol=3e-2)
