"""What a learner is said to need is what its passes make: the same tensors are counted while a real learner trains."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from made_samples import make_sample
from test_forward import SMALL, small_model
from transformers import Gemma2Config, GPT2Config, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from penstock.config import ConfigError, LoraConfig, TrainerConfig
from penstock.samples import Sample
from penstock.trainer.learner import Learner
from penstock.trainer.memory import LearnerBytes, LiveBytes, Pass, decided, learner_bytes, pass_bytes, sizes
from penstock.trainer.prepare import prepare

WIDE = SMALL | {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 5, "max_position_embeddings": 512}
ARCHITECTURES = {
    "qwen3": Qwen3Config(**WIDE),
    "llama, tied": LlamaConfig(**WIDE, tie_word_embeddings=True),
    "gpt2": GPT2Config(vocab_size=60, n_embd=64, n_layer=5, n_head=2, n_positions=512),
}


def samples(number: int, length: int) -> list[Sample]:
    response = np.random.default_rng(0).integers(3, 60, length - 1).tolist()
    return [make_sample(each // 2, prompt=[1], response=response, reward=each % 2) for each in range(number)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=2)], ids=["whole", "lora"])
@pytest.mark.parametrize("architecture", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_what_is_planned_is_what_a_learner_makes(
    architecture: Any, lora: LoraConfig | None, checkpointed: bool, dtype: torch.dtype
) -> None:
    trainer = TrainerConfig(tokens_per_microbatch=1024, activation_checkpointing=checkpointed, lora=lora)
    planned = learner_bytes(architecture, trainer, longest=256, dtype=dtype, on_accelerator=False, roles=["actor"])
    learner = Learner(small_model(architecture), trainer, max_staleness=9, compute_dtype=dtype)
    batch, _ = prepare(samples(4, 257))
    for _ in range(2):  # the first step makes the optimizer's state
        learner.accumulate(batch)
        learner.step()
    gc.collect()
    learner.accumulate(batch)  # its gradients stay
    own = [*learner.model.parameters(), *(p.grad for p in learner.model.parameters() if p.grad is not None)]
    with learner._strategy.computing():
        own += learner.model.parameters()
    with LiveBytes(known=own) as live:
        learner.accumulate(batch)
    assert live.peak == pytest.approx(planned.one_pass, rel=0.1)
    trained = sum(p.numel() for p in learner.model.parameters() if p.requires_grad)
    base = sum(p.numel() for p in learner.model.parameters() if not p.requires_grad)
    rounded = 0 if dtype == torch.float32 else 2
    assert planned.states == (16 + rounded) * trained + dtype.itemsize * base


def test_shards_need_less_and_recomputed_activations_too() -> None:
    architecture = ARCHITECTURES["qwen3"]

    def needed(**settings: Any) -> Any:
        trainer = TrainerConfig(tokens_per_microbatch=1024, **settings)
        return learner_bytes(
            architecture, trainer, longest=256, dtype=torch.bfloat16, on_accelerator=True, roles=["actor"]
        )

    replica, shard = needed(ranks=4), needed(ranks=4, distributed={"strategy": "fsdp"})
    num_weights = sizes(architecture, TrainerConfig()).all
    assert replica.states == 18 * num_weights, "with rounded weights for passes"
    assert shard.states == 16 * num_weights // 4 and shard.copies == replica.copies // 4
    assert shard.gathered > 0 == replica.gathered
    assert needed(activation_checkpointing=True).one_pass < 0.5 * needed().one_pass
    assert needed(lora={"rank": 2}).states < 0.5 * needed().states


def test_what_waits_in_main_memory_needs_no_device() -> None:
    architecture = ARCHITECTURES["qwen3"]

    def needed(*offload: str, on_accelerator: bool = True) -> LearnerBytes:
        trainer = TrainerConfig.model_validate(
            {"tokens_per_microbatch": 1024, "activation_checkpointing": True, "offload": list(offload)}
        )
        return learner_bytes(
            architecture, trainer, longest=256, dtype=torch.bfloat16, on_accelerator=on_accelerator, roles=["actor"]
        )

    size, inputs = sizes(architecture, TrainerConfig()), 1024 * 64 * 2
    assert needed().one_pass - needed("activations").one_pass == pytest.approx(4 * inputs, rel=0.1)
    assert needed().states - needed("optimizer").states == 8 * size.all
    assert needed("optimizer").optimizer_step == 8 * size.all, "all of so small a model at a time"
    assert needed("activations", "optimizer", on_accelerator=False) == needed(on_accelerator=False)


@pytest.mark.parametrize(
    ("wanted", "capacity", "expected"),
    [(None, None, False), (None, 2**30, True), (None, 2**40, False), (True, None, True), (False, 2**30, False)],
)
def test_activations_are_recomputed_if_they_must_be(wanted: bool | None, capacity: int | None, expected: bool) -> None:
    found = decided(
        ARCHITECTURES["qwen3"],
        TrainerConfig(activation_checkpointing=wanted),
        longest=256,
        dtype=torch.bfloat16,
        roles=["actor"],
        capacity=capacity,
    )
    assert found.activation_checkpointing is expected


def test_a_model_that_cannot_be_counted_keeps_its_activations(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise NotImplementedError("aten::new_operation")

    monkeypatch.setattr("penstock.trainer.memory.pass_bytes", fail)
    found = decided(
        ARCHITECTURES["qwen3"], TrainerConfig(), longest=256, dtype=torch.bfloat16, roles=["actor"], capacity=2**40
    )
    assert found.activation_checkpointing is False
    assert "a qwen3 model cannot be counted (aten::new_operation)" in caplog.text


def test_a_pass_is_counted_without_its_memory() -> None:
    """The count of a model of real size takes seconds, and tensors without values."""
    config = {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "vocab_size": 151_936}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    architecture = Qwen3Config(**config, **heads, max_position_embeddings=40_960, tie_word_embeddings=False)
    assert 8.1e9 < sizes(architecture, TrainerConfig()).all < 8.3e9
    shape = Pass(tokens=32_768, longest=32_768, dtype=torch.bfloat16, sharded=True, packs=True, recomputed=True)
    found = pass_bytes(architecture, shape)
    layers = 36 * 32_768 * 4096 * 2
    assert layers < found < 4 * layers, "the inputs of all layers, and one layer's activations"


def test_roles_in_processes_of_their_own_have_their_own_states_alone() -> None:
    trainer = TrainerConfig.model_validate({"critic": {}, "objective": {"kl_coef": 0.1}})
    needed = {
        role: learner_bytes(
            ARCHITECTURES["qwen3"], trainer, longest=64, dtype=torch.float32, on_accelerator=False, roles=[role]
        )
        for role in ("actor", "critic", "reference")
    }
    weights = 4 * sizes(ARCHITECTURES["qwen3"], trainer).all
    assert (needed["critic"].states, needed["critic"].copies) == (0, 4 * weights)
    assert (needed["reference"].states, needed["reference"].copies) == (0, weights)
    assert (needed["actor"].states, needed["actor"].copies) == (4 * weights, weights), "the copy for the parity check"


def test_adapters_need_a_base_in_the_dtype_of_the_passes_and_no_copy_of_it() -> None:
    objective = {"name": "decoupled", "proximal": "snapshot", "kl_coef": 0.1}
    trainer = TrainerConfig.model_validate({"objective": objective, "lora": {"rank": 2}})
    assert trainer.roles == ["actor"]
    needed = learner_bytes(
        ARCHITECTURES["qwen3"], trainer, longest=64, dtype=torch.bfloat16, on_accelerator=True, roles=trainer.roles
    )
    size = sizes(ARCHITECTURES["qwen3"], trainer)
    assert needed.states == 2 * size.all + 18 * size.trained
    assert needed.copies == 4 * size.trained, "adapters of the snapshot; those of the parity check are in main memory"


def test_layers_without_experts_do_not_stand_for_those_with_experts() -> None:
    experts = {"num_experts": 4, "num_experts_per_tok": 4, "moe_intermediate_size": 256}
    shape = Pass(tokens=512, longest=256, dtype=torch.bfloat16, sharded=True, packs=True)
    all_sparse, few_dense = (
        pass_bytes(Qwen3MoeConfig(**WIDE, **experts, mlp_only_layers=dense), shape) for dense in ([], [0, 1])
    )
    assert few_dense == all_sparse


def test_experts_are_counted() -> None:
    architecture = Qwen3MoeConfig(**WIDE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)
    found = pass_bytes(architecture, Pass(tokens=512, longest=256, dtype=torch.float32))
    assert found > 5 * 512 * 64 * 4


def test_shared_passes_need_less_and_not_every_model_has_them() -> None:
    def needed(architecture: Any, ranks: int) -> int:
        trainer = TrainerConfig.model_validate({"ranks": 4, "distributed": {"context_ranks": ranks}})
        found = learner_bytes(
            architecture, trainer, longest=256, dtype=torch.bfloat16, on_accelerator=True, roles=["actor"]
        )
        return found.one_pass

    assert needed(ARCHITECTURES["qwen3"], 2) < 0.6 * needed(ARCHITECTURES["qwen3"], 1)
    with pytest.raises(ConfigError, match="plain causal attention in every layer, and a gemma2 model has other layers"):
        needed(Gemma2Config(**WIDE), 2)
    with pytest.raises(ConfigError, match="4 ranks cannot share the 2 attention heads"):
        needed(ARCHITECTURES["qwen3"], 4)


def test_a_critic_beside_adapters_is_counted_with_all_its_gradients() -> None:
    def needed(roles: list[str], lora: LoraConfig | None) -> int:
        trainer = TrainerConfig(lora=lora, tokens_per_microbatch=1024)
        return learner_bytes(
            ARCHITECTURES["qwen3"], trainer, longest=256, dtype=torch.bfloat16, on_accelerator=False, roles=roles
        ).one_pass

    adapters = LoraConfig(rank=2)
    assert needed(["critic"], adapters) == needed(["critic"], None)
    assert needed(["actor", "critic"], adapters) >= max(needed(["actor"], adapters), needed(["critic"], None))
