import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, GPT2Config, LlamaConfig, MistralConfig, PreTrainedModel

from penstock.trainer.forward import shares_prefixes, token_logprobs
from penstock.trainer.packing import TokenTable, flatten, micro_batches

SMALL = {
    "vocab_size": 60,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
CONFIGS = {
    "llama": (LlamaConfig(**SMALL), True),
    "gpt2": (GPT2Config(vocab_size=60, n_embd=16, n_layer=2, n_head=2, n_positions=64), True),
    "mistral with a window": (MistralConfig(**SMALL, sliding_window=4), False),
    "gemma2 with windows and a soft cap": (Gemma2Config(**SMALL, sliding_window=4, final_logit_softcapping=1.0), False),
}


def siblings() -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Three prompts with six answers each: token ids and loss masks."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(3, 60, size) for size in (31, 38, 45)]
    ids = [np.concatenate([prompt, draw.integers(3, 60, draw.integers(1, 8))]) for prompt in prompts for _ in range(6)]
    return ids, [np.arange(len(row)) >= len(prompts[i // 6]) for i, row in enumerate(ids)]


def logprobs_of(
    model: PreTrainedModel, table: TokenTable, *, share: bool, pack: bool = False
) -> tuple[torch.Tensor, int]:
    """Log-probabilities at their places in the table, and how many prefix tokens were fed."""
    found, shared = torch.zeros(len(table.token_ids)), 0
    for micro in micro_batches(table, 4096, model.device, share_prefixes=share, pack=pack):
        assert pack == (micro.boundaries is not None) or shared
        logprobs, _ = token_logprobs(model, micro)
        found = found.index_put((torch.from_numpy(micro.tokens),), logprobs.cpu())
        shared += micro.prefixes.numel()
    return found, shared


def small_model(architecture: object) -> PreTrainedModel:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(architecture, dtype=torch.float32).eval()


@pytest.mark.parametrize(("architecture", "shares"), CONFIGS.values(), ids=CONFIGS)
def test_packed_and_shared_passes_equal_one_sample_at_a_time(
    architecture: object, shares: bool, device: torch.device
) -> None:
    model = small_model(architecture)
    assert shares_prefixes(model) == shares
    ids, masks = siblings()
    table = TokenTable.build(ids, flatten(masks, np.bool_), np.full(len(ids), 0.8, dtype=np.float32))
    found, shared = logprobs_of(small_model(architecture).to(device), table, share=shares)
    assert (shared > 0) == shares
    for start, row, mask in zip(table.starts.tolist(), ids, masks, strict=True):
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(row)[None]).logits[0]
        expected = torch.log_softmax(logits[:-1] / 0.8, dim=-1).gather(1, torch.from_numpy(row[1:])[:, None])[:, 0]
        torch.testing.assert_close(
            found[start + 1 : start + len(row)][mask[1:]], expected[mask[1:]], atol=1e-5, rtol=1e-5
        )


def test_gradients_flow_back_through_shared_prompts() -> None:
    ids, masks = siblings()
    table = TokenTable.build(ids, flatten(masks, np.bool_), np.full(len(ids), 0.8, dtype=np.float32))
    weights = torch.linspace(-1, 1, len(table.token_ids))
    gradients = []
    for share in (False, True):
        model = small_model(CONFIGS["llama"][0])
        found, shared = logprobs_of(model, table, share=share)
        assert (shared > 0) == share
        (found * weights).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-5, rtol=1e-4)
