"""The output layer in chunks equals the model's own logits: values, gradients, and what a model does to its logits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_forward import CONFIGS, SMALL, siblings, small_model
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import (
    CohereConfig,
    Gemma2Config,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    PreTrainedModel,
    Qwen3Config,
    Qwen3MoeConfig,
)

from penstock.trainer import forward, output_layer
from penstock.trainer.forward import token_logprobs
from penstock.trainer.output_layer import OutputLayer, Scaling
from penstock.trainer.packing import TokenTable, flatten, micro_batches

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
KNOWN = {
    **{name: architecture for name, (architecture, _) in CONFIGS.items()},
    "qwen3, tied": Qwen3Config(**SMALL, tie_word_embeddings=True),
    "qwen3 with experts": Qwen3MoeConfig(**SMALL, **EXPERTS),
    "cohere with a scale": CohereConfig(**SMALL, logit_scale=0.25),
    "granite with a divisor": GraniteConfig(**SMALL, logits_scaling=4.0),
    "gemma2 without a cap": Gemma2Config(**SMALL, final_logit_softcapping=None),
    "llama4": Llama4TextConfig(**SMALL, intermediate_size_mlp=24, num_local_experts=2, attention_chunk_size=64),
}


@pytest.fixture
def tiny_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chunks of three tokens."""
    monkeypatch.setattr(output_layer, "CHUNK_ELEMENTS", 60 * 3)


def computed(model: PreTrainedModel, *, share: bool, whole: bool) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Log-probabilities, entropies and gradients of some samples with several temperatures."""
    ids, masks = siblings()
    temperatures = np.linspace(0.5, 1.5, len(ids), dtype=np.float32)
    table = TokenTable.build(ids, flatten(masks, np.bool_), temperatures)
    found = []
    with pytest.MonkeyPatch.context() as patched:
        if whole:
            patched.setattr(output_layer, "CHUNK_ELEMENTS", 2**40)
        for micro in micro_batches(table, 400, model.device, share_prefixes=share):
            logprobs, entropy = token_logprobs(model, micro)
            (logprobs * torch.linspace(-1, 1, len(logprobs))).sum().backward()
            assert not entropy.requires_grad
            found.append((logprobs.detach(), entropy))
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    logprobs, entropy = (torch.cat(each) for each in zip(*found, strict=True))
    return logprobs, entropy, gradients


@pytest.mark.parametrize("architecture", KNOWN.values(), ids=KNOWN)
@pytest.mark.usefixtures("tiny_chunks")
def test_chunks_equal_the_models_own_logits(architecture: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[int] = []
    statistics = OutputLayer.statistics
    monkeypatch.setattr(
        OutputLayer,
        "statistics",
        lambda self, hidden, *a, **k: used.append(len(hidden)) or statistics(self, hidden, *a, **k),
    )
    share = forward.shares_prefixes(small_model(architecture))
    expected = computed(small_model(architecture), share=share, whole=True)
    assert not used
    found = computed(small_model(architecture), share=share, whole=False)
    assert used and max(used) > 3
    for own, other in zip(found[:2], expected[:2], strict=True):
        torch.testing.assert_close(own, other, atol=1e-6, rtol=1e-6)
    for own, other in zip(found[2], expected[2], strict=True):
        assert (own - other).norm() <= 1e-6 * other.norm()


def test_a_model_that_does_more_to_its_logits_is_left_to_itself() -> None:
    model = small_model(LlamaConfig(**SMALL))
    assert OutputLayer.of(model) == OutputLayer(model.lm_head, Scaling())

    class Squared(type(model)):  # type: ignore[misc]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            output = super().forward(*args, **kwargs)
            output.logits = output.logits**2
            return output

    other = small_model(LlamaConfig(**SMALL))
    other.__class__ = Squared
    assert OutputLayer.of(other) is None


def test_a_probe_is_not_confused_by_the_models_precision() -> None:
    model = small_model(LlamaConfig(**SMALL)).to(torch.bfloat16)
    assert OutputLayer.of(model) == OutputLayer(model.lm_head, Scaling())


def test_every_model_is_probed_by_itself() -> None:
    """The same class with other settings does something else to its logits."""
    capped, plain = (small_model(Gemma2Config(**SMALL, final_logit_softcapping=cap)) for cap in (3.0, None))
    found = [OutputLayer.of(model) for model in (plain, capped, plain)]
    assert [each is not None and each.scaling.cap for each in found] == [None, 3.0, None]


def test_caps_and_factors_are_those_of_the_settings() -> None:
    model = small_model(Gemma2Config(**SMALL, final_logit_softcapping=3.0))
    assert OutputLayer.of(model) == OutputLayer(model.lm_head, Scaling(1.0, 3.0))
    model = small_model(CohereConfig(**SMALL, logit_scale=0.25))
    assert OutputLayer.of(model) == OutputLayer(model.lm_head, Scaling(0.25))


@pytest.mark.usefixtures("tiny_chunks")
@settings(max_examples=30, deadline=None)
@given(
    num_tokens=st.integers(0, 20),
    factor=st.sampled_from([1.0, 0.5, 3.0]),
    cap=st.sampled_from([None, 2.0]),
    has_bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_any_chunk_of_any_layer(
    num_tokens: int, factor: float, cap: float | None, has_bias: bool, dtype: torch.dtype, seed: int
) -> None:
    torch.manual_seed(seed)
    head = torch.nn.Linear(8, 60, bias=has_bias, dtype=dtype)
    hidden, chosen = torch.randn(num_tokens, 8, dtype=dtype), torch.randint(0, 60, (num_tokens,))
    temperature, weights = torch.rand(num_tokens) + 0.5, torch.randn(num_tokens)
    layer, results = OutputLayer(head, Scaling(factor, cap)), []
    for in_chunks in (True, False):
        given_hidden = hidden.clone().requires_grad_()
        head.zero_grad()
        if in_chunks:
            found = layer.statistics(given_hidden, chosen, temperature=temperature)
        else:
            logits = layer.scaling(head(given_hidden).float())
            found = forward.token_statistics(logits, chosen, temperature=temperature)
        (found[0] * weights).sum().backward()
        results.append([*found, given_hidden.grad, *(p.grad for p in head.parameters())])
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 3e-2, "rtol": 3e-2}
    for own, other in zip(*results, strict=True):
        torch.testing.assert_close(own, other, **tolerance)


@pytest.mark.long
@pytest.mark.usefixtures("tiny_chunks")
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize(
    ("dtype", "scaling", "is_each"),
    [(torch.float32, Scaling(0.5, 2.0), True), (torch.bfloat16, Scaling(), False)],
    ids=["float32, capped, temperatures of tokens", "bfloat16, plain, one temperature"],
)
def test_a_compiled_layer_computes_the_same(dtype: torch.dtype, scaling: Scaling, is_each: bool) -> None:
    """For several numbers of tokens, with few compilations."""
    torch.manual_seed(0)
    head = torch.nn.Linear(8, 60, dtype=dtype)
    torch.compiler.reset()
    counters.clear()
    tolerance = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 1e-3, "rtol": 1e-2}
    for num_tokens in (0, 1, 7, 12, 19):
        hidden, chosen = torch.randn(num_tokens, 8, dtype=dtype), torch.randint(0, 60, (num_tokens,))
        temperature, results = torch.rand(num_tokens) + 0.5 if is_each else 0.7, []
        for is_compiled in (True, False):
            own = hidden.clone().requires_grad_()
            head.zero_grad()
            found = OutputLayer(head, scaling, is_compiled).statistics(own, chosen, temperature=temperature)
            found[0].sum().backward()
            results.append([*found, own.grad, *(p.grad for p in head.parameters())])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, **tolerance)
    assert 0 < counters["stats"]["unique_graphs"] <= 6, "two functions for chunks of no, one and many tokens"


@pytest.mark.usefixtures("tiny_chunks")
def test_frozen_weights_get_no_gradient() -> None:
    head = torch.nn.Linear(8, 60).requires_grad_(False)
    hidden = torch.randn(10, 8, requires_grad=True)
    logprobs, _ = OutputLayer(head, Scaling()).statistics(hidden, torch.arange(10))
    logprobs.sum().backward()
    assert head.weight.grad is None and hidden.grad is not None


def test_memory_does_not_grow_with_the_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest tensor has the elements of a chunk, or of the weights."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        elements = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            for each in found if isinstance(found, tuple | list) else [found]:
                if isinstance(each, Tensor):
                    self.elements = max(self.elements, each.untyped_storage().nbytes() // each.element_size())
            return found

    monkeypatch.setattr(output_layer, "CHUNK_ELEMENTS", 1000 * 4)
    head = torch.nn.Linear(8, 1000)
    for num_tokens in (100, 400):
        hidden = torch.randn(num_tokens, 8, requires_grad=True)
        with Largest() as largest:
            OutputLayer(head, Scaling()).statistics(hidden, torch.zeros(num_tokens, dtype=torch.long))[
                0
            ].sum().backward()
        assert largest.elements == 1000 * 8
