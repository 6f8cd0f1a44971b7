"""Models with experts train as others do, and what leaves the trainer has the names of published models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from made_experts import NUM_EXPERTS, experts_config
from made_roles import ENOUGH_S
from safetensors import safe_open
from safetensors.torch import load_file
from test_forward import SMALL, small_model
from test_learner import accumulate, gradients, reference_loss
from transformers import GptOssConfig, LlamaConfig, PreTrainedModel, Qwen3Config, Qwen3MoeConfig

from penstock.config import Config, ConfigError, TrainerConfig
from penstock.groups.role import Rank
from penstock.model.experts import num_active
from penstock.model.load_policy import hollow_policy, load_policy, with_original_names
from penstock.processes.trainer_rank import Actor
from penstock.samples import Sample
from penstock.trainer.learner import Learner
from penstock.trainer.memory import learner_bytes, sizes
from penstock.trainer.rank_balancing import attention_per_token
from penstock.trainer.ranks import Ranks
from penstock.trainer.strategy import strategy_of
from penstock.weights.publication import await_handle

MakeModel = Callable[[], PreTrainedModel]
ONE_EXPERT = "model.layers.0.mlp.experts.3.gate_proj.weight"


@pytest.fixture
def make_model(experts_dir: Path) -> MakeModel:
    return lambda: load_policy(experts_dir, weights=True)


def learner_for(model: PreTrainedModel, **settings: Any) -> Learner:
    return Learner(model, TrainerConfig.model_validate({"max_grad_norm": 1e9, **settings}), max_staleness=9)


def names_in(directory: Path) -> set[str]:
    found: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found |= set(tensors.keys())
    return found


@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("tokens_per_microbatch", [1, 64, 8192])
def test_loss_and_gradient_equal_the_plain_reference(
    make_model: MakeModel, samples: list[Sample], tokens_per_microbatch: int, recomputed: bool
) -> None:
    plain, model = make_model(), make_model()
    plain.set_experts_implementation("eager")
    expected = reference_loss(plain, samples)
    expected.backward()
    settings = {"tokens_per_microbatch": tokens_per_microbatch, "activation_checkpointing": recomputed}
    learner = learner_for(model, **settings)
    accumulate(learner, samples)
    torch.testing.assert_close(gradients(model), gradients(plain), atol=5e-5, rtol=1e-3)
    routed = [layer.mlp.gate.weight.grad for layer in model.model.layers]
    assert all(grad.abs().max() > 1e-3 for grad in routed), "routers learn"
    held = [layer.mlp.experts.down_proj.grad for layer in model.model.layers]
    assert all((grad.flatten(1).norm(dim=1) > 0).all() for grad in held), "each expert has tokens to learn from"
    metrics = learner.step().metrics
    assert metrics["loss"] == pytest.approx(expected.item() / metrics["tokens"], rel=1e-4)


def test_checkpoints_have_the_names_of_published_models(
    make_model: MakeModel, samples: list[Sample], experts_dir: Path, tmp_path: Path
) -> None:
    assert ONE_EXPERT in names_in(experts_dir)
    learner = learner_for(make_model())
    accumulate(learner, samples)
    learner.step()
    learner.write(tmp_path)
    assert learner.is_written(ENOUGH_S)
    assert names_in(tmp_path) == names_in(experts_dir)
    again = load_policy(tmp_path, weights=True)
    for name, parameter in learner.model.named_parameters():
        assert torch.equal(again.get_parameter(name), parameter), name
    resumed = learner_for(make_model())
    resumed.read(tmp_path)
    assert all(torch.equal(w, resumed.named_weights()[name]) for name, w in learner.named_weights().items())


@pytest.mark.parametrize("engine", ["penstock", "vllm", "sglang"])
def test_other_engines_get_the_names_of_published_models(experts_dir: Path, tmp_path: Path, engine: str) -> None:
    config = Config.model_validate(
        {
            "model": {"path": str(experts_dir), "max_context": 64, "dtype": "bfloat16", "device": "cpu"},
            "data": {"source": "seeds"},
            "env": {"name": "guess_number", "max_new_tokens": 8},
            "rollout": {"engine": engine},
        }
    )
    actor = Actor(Rank(0, 1), {}, config=config, place=0, model_dir=experts_dir, weights_dir=tmp_path)
    opened = actor.open_weights()
    assert opened is not None
    actor.publish(opened)
    handle = await_handle(opened.folder, waiter="the test")
    published, model = load_file(handle.path), load_policy(experts_dir, weights=True, dtype=torch.bfloat16)
    if engine == "penstock":
        expected = dict(model.named_parameters())
    else:
        expected = {}
        for file in experts_dir.glob("*.safetensors"):
            expected |= {name: tensor.bfloat16() for name, tensor in load_file(file).items()}
        if engine == "vllm":  # it takes tied weights under both names
            expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    assert published.keys() == expected.keys()
    assert all(torch.equal(published[name], tensor) for name, tensor in expected.items())


def test_adapters_are_of_linear_layers_and_never_of_experts(
    make_model: MakeModel, samples: list[Sample], experts_dir: Path, tmp_path: Path
) -> None:
    pytest.importorskip("peft")
    before = dict(make_model().named_parameters())
    learner = learner_for(make_model(), lora={"rank": 4}, learning_rate=1e-2)
    adapted = {name.split(".lora_")[0] for name, each in learner.model.named_parameters() if each.requires_grad}
    assert adapted and all(name.rpartition(".")[2] in ("q_proj", "k_proj", "v_proj", "o_proj") for name in adapted)
    for _ in range(2):
        accumulate(learner, samples)
        learner.step()
    served = learner.named_weights()
    assert served.keys() == before.keys()
    changed = {name for name, weight in served.items() if not torch.equal(weight, before[name])}
    assert changed and all(".self_attn." in name for name in changed)
    assert with_original_names(learner.model, served).keys() == names_in(experts_dir)
    learner.write(tmp_path)
    assert learner.is_written(ENOUGH_S)
    again = dict(load_policy(tmp_path, weights=True).named_parameters())
    assert all(torch.equal(again[name], weight) for name, weight in served.items())
    with pytest.raises(ConfigError, match=r"trainer\.lora\.targets \['gate_proj', 'up_proj'\]: .*not found"):
        learner_for(make_model(), lora={"targets": ["gate_proj", "up_proj"]})


def test_work_is_counted_by_the_experts_that_compute_a_token(make_model: MakeModel) -> None:
    model = make_model()
    held = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    everything = sum(p.numel() for p in model.parameters())
    assert num_active(model) == everything - held * (NUM_EXPERTS - 2) // NUM_EXPERTS
    assert attention_per_token(model) == pytest.approx(2 * 2 * 32 / num_active(model))
    dense = small_model(Qwen3Config(**SMALL))
    assert num_active(dense) == sum(p.numel() for p in dense.parameters())


SPREAD = {"strategy": "fsdp", "expert_parallel": True}
OTHERS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 8}


@pytest.mark.parametrize(
    ("architecture", "ranks", "distributed", "why"),
    [
        (LlamaConfig(**SMALL), 2, SPREAD, "the model has no experts that ranks could share"),
        (Qwen3MoeConfig(**SMALL, **OTHERS), 3, SPREAD, "3 ranks share one copy .* equal parts of the 8 experts"),
        (
            Qwen3MoeConfig(**SMALL, **OTHERS),
            4,
            SPREAD | {"strategy": "auto"},
            "strategy auto gives each of 4 ranks a replica .* set strategy to fsdp",
        ),
    ],
)
def test_experts_that_ranks_cannot_share_are_refused(
    architecture: Any, ranks: int, distributed: dict[str, Any], why: str
) -> None:
    """By the plan, and by a rank before it waits for others."""
    trainer = TrainerConfig.model_validate({"ranks": ranks, "distributed": distributed})
    expected = rf"trainer\.distributed\.expert_parallel: .*{why}"
    with pytest.raises(ConfigError, match=expected):
        learner_bytes(architecture, trainer, longest=64, dtype=torch.float32, on_accelerator=False, roles=["actor"])
    with pytest.raises(ConfigError, match=expected):
        strategy_of(small_model(architecture), trainer, Ranks(Rank(0, ranks)), torch.float32)


def test_experts_beyond_the_interface_of_transformers_are_refused(make_model: MakeModel) -> None:
    model = make_model()
    for layer in model.model.layers:
        del layer.mlp.experts.has_gate
    trainer = TrainerConfig.model_validate({"ranks": 2, "distributed": SPREAD})
    with pytest.raises(ConfigError, match=r"through its ExpertsInterface, and those of a qwen3_moe model are none"):
        strategy_of(model, trainer, Ranks(Rank(0, 2)), torch.float32)


@pytest.mark.parametrize(
    ("trainer", "why"),
    [
        ({"ranks": 2, "distributed": SPREAD | {"strategy": "ddp"}}, "with ddp each rank has all experts"),
        ({"ranks": 1, "distributed": SPREAD}, "set ranks to 2 or more"),
    ],
)
def test_settings_that_leave_nothing_to_spread_are_refused(trainer: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        TrainerConfig.model_validate(trainer)


def test_the_plan_leaves_spread_experts_on_their_ranks() -> None:
    architecture = Qwen3MoeConfig(**SMALL | {"num_hidden_layers": 4}, num_experts=8, moe_intermediate_size=128)
    size = sizes(architecture, TrainerConfig())
    assert size.experts == 4 * size.layer_experts == 4 * 8 * 3 * 128 * SMALL["hidden_size"]
    assert size.layer == size.layer_experts + size.layer_rest

    def needed(**distributed: Any) -> Any:
        trainer = TrainerConfig.model_validate(
            {"ranks": 4, "distributed": {"strategy": "fsdp", **distributed}, "tokens_per_microbatch": 64}
        )
        return learner_bytes(
            architecture, trainer, longest=64, dtype=torch.bfloat16, on_accelerator=True, roles=["actor"]
        )

    gathered, spread = needed(), needed(expert_parallel=True)
    assert spread.states == gathered.states and spread.one_pass == gathered.one_pass
    assert spread.gathered < 0.5 * gathered.gathered
    copies = 2 * size.experts // 4  # in bfloat16, for the backward pass
    assert spread.gathered > copies


def test_published_names_of_other_architectures_are_those_that_transformers_writes(tmp_path: Path) -> None:
    """Also where experts have biases, and a layout of their own."""
    for number, architecture in enumerate((experts_config(), GptOssConfig(**SMALL, num_local_experts=4))):
        model = small_model(architecture)
        model.save_pretrained(tmp_path / str(number))
        named = {name: each.detach() for name, each in model.named_parameters()}
        assert with_original_names(model, named).keys() == names_in(tmp_path / str(number))


def test_a_hollow_model_knows_its_experts(experts_dir: Path, make_model: MakeModel) -> None:
    assert num_active(hollow_policy(experts_dir)) == num_active(make_model())
