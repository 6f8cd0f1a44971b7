"""The learner computes tokens with recorded experts: as if its routers had chosen them, in every layout of a pass."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from expert_policy import NUM_CHOSEN, NUM_EXPERTS, NUM_LAYERS, VOCABULARY, WIDTH, chosen_by, expert_model
from made_samples import make_sample
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    PreTrainedModel,
)

from penstock.config import TrainerConfig
from penstock.model.experts import expert_layers
from penstock.routed_experts import Record
from penstock.samples import Sample
from penstock.trainer.forward import recompute_activations, token_logprobs
from penstock.trainer.learner import Learner
from penstock.trainer.packed_attention import pack
from penstock.trainer.packing import TokenTable, micro_batches
from penstock.trainer.prepare import prepare
from penstock.trainer.ranks import Ranks
from penstock.trainer.router_replay import RouterReplay, install, replay_of
from penstock.trainer.strategy import compile_layers

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
}
ARCHITECTURES = {
    "mixtral": MixtralConfig(**SMALL, num_local_experts=8, num_experts_per_tok=2),
    "olmoe": OlmoeConfig(**SMALL, num_experts=8, num_experts_per_tok=2),
    "gpt-oss": GptOssConfig(**SMALL, head_dim=8, num_local_experts=8, num_experts_per_tok=2),
    "deepseek": DeepseekV3Config(
        **SMALL | {"num_key_value_heads": 4},
        moe_intermediate_size=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        q_lora_rank=8,
        kv_lora_rank=8,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=8,
    ),
}


def prompts_and_answers(seed: int = 3) -> list[Sample]:
    """Three groups of three, each with a prompt of its own."""
    draw, made = np.random.default_rng(seed), []
    for group in range(3):
        prompt = draw.integers(2, VOCABULARY, draw.integers(6, 12)).tolist()
        for _ in range(3):
            response = draw.integers(2, VOCABULARY, draw.integers(1, 9)).tolist()
            made.append(make_sample(group, prompt=prompt, response=response, reward=float(draw.random())))
    return made


def drawn_experts(samples: Sequence[Sample], seed: int = 0) -> list[Record]:
    """Any experts, the same for tokens of a prompt that samples share, and none for the last token."""
    draw, by_prompt, made = np.random.default_rng(seed), dict[int, Record](), list[Record]()
    for sample in samples:
        count = len(sample.token_ids)
        layers = [draw.permuted(np.tile(np.arange(NUM_EXPERTS), (count, 1)), axis=1) for _ in range(NUM_LAYERS - 1)]
        rows = np.concatenate([each[:, :NUM_CHOSEN] for each in layers], axis=1).astype(np.uint8)
        width = int(np.flatnonzero(sample.loss_mask)[0])
        rows[:width] = by_prompt.setdefault(sample.group, rows[:width].copy())
        rows[-1] = 255
        made.append(rows)
    return made


def with_experts(samples: Sequence[Sample], experts: Sequence[Record]) -> list[Sample]:
    return [dataclasses.replace(sample, experts=rows) for sample, rows in zip(samples, experts, strict=True)]


def replaying(model: PreTrainedModel) -> PreTrainedModel:
    install(model)
    replay = replay_of(model)
    assert replay is not None
    replay.check(nullcontext, Ranks())
    return model


def table_of(samples: Sequence[Sample], model: PreTrainedModel) -> TokenTable:
    batch, _ = prepare(samples)
    replay, trained = replay_of(model), np.concatenate([sample.loss_mask != 0 for sample in samples])
    experts = None if replay is None else replay.records(batch)
    return TokenTable.build([sample.token_ids for sample in samples], trained, experts=experts)


def computed(
    model: PreTrainedModel, samples: Sequence[Sample], *, tokens: int = 8192, share: bool = False, packs: bool = False
) -> tuple[Tensor, Tensor]:
    """The log-probabilities of all trained tokens, in order, and the gradients of their sum."""
    table = table_of(samples, model)
    found = torch.zeros(len(table.token_ids))
    model.zero_grad()
    for micro in micro_batches(table, tokens, CPU, share_prefixes=share, pack=packs, pass_cost=8):
        assert bool(micro.prefixes.shape[1]) == share
        logprobs, _ = token_logprobs(model, micro)
        logprobs.sum().backward()  # type: ignore[no-untyped-call]
        found[torch.from_numpy(micro.tokens)] = logprobs.detach()
    return found, gradients(model)


def gradients(model: PreTrainedModel) -> Tensor:
    found = [p.grad.flatten() if p.grad is not None else p.new_zeros(p.numel()) for p in model.parameters()]
    return torch.cat(found)


@contextmanager
def routers_that_choose(model: PreTrainedModel, experts: Record) -> Iterator[None]:
    """Replace the routers of a plain model by ones that choose these, written down once more."""
    rows = torch.from_numpy(experts.astype(np.int64)).view(len(experts), NUM_LAYERS - 1, NUM_CHOSEN)

    def forward(gate: Any, chosen: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
        def choose(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            logits = torch.nn.functional.linear(hidden, gate.weight)
            probabilities = logits.softmax(-1, dtype=torch.float)
            own = probabilities.topk(NUM_CHOSEN).indices
            taken = torch.where(chosen == 255, own, chosen)
            weights = torch.stack([row[places] for row, places in zip(probabilities, taken, strict=True)])
            return logits, weights / weights.sum(-1, keepdim=True), taken

        return choose

    gates: list[Any] = [layer.block.gate for layer in expert_layers(model)]
    for number, gate in enumerate(gates):
        gate.forward = forward(gate, rows[:, number])
    yield
    for gate in gates:
        del gate.forward


def plainly(model: PreTrainedModel, samples: Sequence[Sample], experts: Sequence[Record]) -> tuple[Tensor, Tensor]:
    """What `computed` does, sample by sample."""
    found = []
    model.zero_grad()
    for sample, rows in zip(samples, experts, strict=True):
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        with routers_that_choose(model, rows):
            logprobs = model(input_ids=ids[None], use_cache=False).logits[0, :-1].log_softmax(-1)
            of_tokens = logprobs.gather(1, ids[1:, None])[:, 0] * torch.from_numpy(sample.loss_mask[1:] != 0)
            of_tokens.sum().backward()  # type: ignore[no-untyped-call]
        found += [torch.zeros(1), of_tokens.detach()]
    return torch.cat(found), gradients(model)


def test_own_choices_change_not_a_bit() -> None:
    samples, model = prompts_and_answers(), expert_model()
    recorded = with_experts(samples, [chosen_by(model, sample.token_ids) for sample in samples])
    free = computed(expert_model(), samples, tokens=1)
    forced = computed(replaying(model), recorded, tokens=1)
    assert torch.equal(forced[0], free[0])
    assert torch.equal(forced[1], free[1])


LAYOUTS: dict[str, dict[str, Any]] = {
    "one by one": {"tokens": 1},
    "padded": {},
    "packed": {"packs": True},
    "prompts shared": {"share": True},
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("recomputed", [False, True])
@pytest.mark.parametrize("gaps", [False, True])
def test_other_experts_count_as_chosen_in_every_layout(layout: str, recomputed: bool, gaps: bool) -> None:
    if recomputed and LAYOUTS[layout].get("share"):
        pytest.skip("prompts are then not shared")
    samples = prompts_and_answers()
    experts = drawn_experts(samples)
    if gaps:
        for rows in experts:
            rows[2:4], rows[5] = 255, 255
    wanted = plainly(expert_model(), samples, experts)
    model = expert_model()
    if recomputed:
        recompute_activations(model)
    replaying(model)
    assert pack(model) or not LAYOUTS[layout].get("packs")
    found = computed(model, with_experts(samples, experts), **LAYOUTS[layout])
    free = computed(expert_model(), samples, tokens=1)
    torch.testing.assert_close(found[0], wanted[0], atol=1e-5, rtol=0)
    torch.testing.assert_close(found[1], wanted[1], atol=1e-5 * float(wanted[1].abs().max()), rtol=1e-4)
    assert (free[0] - wanted[0]).abs().max() > 0.1, "other experts compute something else"


def test_prompts_with_different_records_are_not_shared() -> None:
    samples = prompts_and_answers()[:2]
    experts = drawn_experts(samples)
    experts[1][0] = experts[1][0][::-1]
    table = table_of(with_experts(samples, experts), replaying(expert_model()))
    assert table.prefix_ids[0] != table.prefix_ids[1]


def test_a_copy_of_the_model_has_routers_of_its_own() -> None:
    samples = prompts_and_answers()
    recorded = with_experts(samples, drawn_experts(samples))
    model = replaying(expert_model())
    copied = copy.deepcopy(model)
    copied_replay, replay = replay_of(copied), replay_of(model)
    assert copied_replay is not None and copied_replay is not replay
    for parameter in model.parameters():
        parameter.data.zero_()
    torch.testing.assert_close(computed(copied, recorded)[0], computed(replaying(expert_model()), recorded)[0])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures_whose_routers_obey(name: str, caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(ARCHITECTURES[name]).eval()
    with caplog.at_level(logging.WARNING):
        replay = replay_of(replaying(model))
    assert replay is not None and replay.num_chosen == 2
    assert not caplog.records


def test_a_router_that_does_not_obey_keeps_its_choice_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model = expert_model()
    for layer in expert_layers(model):
        gate: Any = layer.block.gate

        def by_sorting(hidden: Tensor, gate: Any = gate) -> tuple[Tensor, Tensor, Tensor]:
            scores = torch.nn.functional.linear(hidden, gate.weight).softmax(-1)
            chosen = scores.argsort(-1, descending=True)[:, :NUM_CHOSEN]
            return scores, scores.gather(-1, chosen), chosen

        gate.forward = by_sorting
    with caplog.at_level(logging.WARNING):
        replaying(model)
    assert "router_replay does nothing" in caplog.text
    samples = prompts_and_answers()
    batch, _ = prepare(with_experts(samples, drawn_experts(samples)))
    assert replay_of(model).records(batch) is None  # type: ignore[union-attr]


def test_a_dense_model_stays_as_it_is(make_model: Callable[[], PreTrainedModel]) -> None:
    model = make_model()
    install(model)
    assert replay_of(model) is None
    assert not any("forward" in vars(part) for part in model.modules())


def test_records_of_layers_without_experts_and_of_another_form() -> None:
    replay = replay_of(replaying(expert_model()))
    assert replay is not None
    (sample,) = prompts_and_answers()[:1]
    count = len(sample.token_ids)
    (own,) = drawn_experts([sample])
    of_all_layers = np.concatenate([np.zeros((count, NUM_CHOSEN), np.uint8), own], axis=1)
    odd = np.zeros((count, WIDTH + 1), np.uint8)
    no_expert = np.full((count, WIDTH), NUM_EXPERTS, np.uint8)
    found = [
        replay.records(prepare(with_experts([sample] * 2, [own, rows]))[0])[count:]  # type: ignore[index]
        for rows in (own, of_all_layers, odd, no_expert)
    ]
    np.testing.assert_array_equal(found[1], found[0])
    assert (found[2] == -1).all() and (found[3] == -1).all()
    assert found[0][:-1].reshape(count - 1, -1).tolist() == own[:-1].tolist()


def learner_for(model: PreTrainedModel, settings: dict[str, Any]) -> Learner:
    return Learner(model, TrainerConfig.model_validate({"max_grad_norm": 1e9} | settings), max_staleness=2)


WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "recomputed": {"activation_checkpointing": True},
    "small passes": {"tokens_per_microbatch": 1},
    "snapshot": {"objective": {"name": "decoupled", "proximal": "snapshot"}},
    "snapshot, recomputed": {
        "objective": {"name": "decoupled", "proximal": "snapshot"},
        "activation_checkpointing": True,
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_an_engine_with_the_same_experts_agrees_with_the_learner(way: str) -> None:
    """The gap is zero: of the policy itself, of its snapshot, and of the copy for the comparison."""
    samples = prompts_and_answers()
    experts = drawn_experts(samples)
    logprobs, _ = plainly(expert_model(), samples, experts)
    bounds = np.cumsum([len(sample.token_ids) for sample in samples])[:-1]
    told = [
        dataclasses.replace(sample, logprobs=own.astype(np.float32), experts=rows)
        for sample, own, rows in zip(samples, np.split(logprobs.numpy(), bounds), experts, strict=True)
    ]
    learner = learner_for(expert_model(), WAYS[way])
    learner.accumulate(prepare(told)[0])
    metrics = learner.step().metrics
    assert metrics["parity_gap_max"] < 1e-4 and metrics["kl_tokens"] > 0
    assert metrics["ess"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["tokens_replayed"] == metrics["tokens"]

    without = learner_for(expert_model(), WAYS[way] | {"router_replay": False})
    without.accumulate(prepare(told)[0])
    assert without.step().metrics["parity_gap_max"] > 0.1


@pytest.mark.parametrize("lora", [None, {"rank": 2, "targets": ["q_proj", "v_proj"]}])
def test_layers_that_are_computed_again_get_the_same_experts(lora: dict[str, Any] | None) -> None:
    """Also if a pass of the reference, which chooses for itself, comes between."""
    samples = prompts_and_answers()
    recorded = with_experts(samples, drawn_experts(samples))
    common = {"lora": lora, "objective": {"kl_coef": 0.5 if lora else 0.0}}
    found = []
    for recomputed in (False, True):
        torch.manual_seed(0)
        learner = learner_for(expert_model(), common | {"activation_checkpointing": recomputed})
        learner.accumulate(prepare(recorded)[0])
        found.append(gradients(learner.model))
    assert found[0].abs().max() > 0
    torch.testing.assert_close(found[1], found[0], atol=1e-6, rtol=1e-4)


def test_samples_without_a_record_beside_others() -> None:
    samples = prompts_and_answers()
    experts = drawn_experts(samples)
    some = list(samples)
    some[::2] = with_experts(samples[::2], experts[::2])
    nothing = [np.full_like(rows, 255) if number % 2 else rows for number, rows in enumerate(experts)]
    found = computed(replaying(expert_model()), some)
    wanted = plainly(expert_model(), samples, nothing)
    torch.testing.assert_close(found[0], wanted[0], atol=1e-5, rtol=0)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_compiled_model_still_gets_its_experts() -> None:
    """Experts are computed outside of what is compiled."""
    samples = prompts_and_answers()
    experts = drawn_experts(samples)
    wanted = plainly(expert_model(), samples, experts)
    model = expert_model()
    install(model)
    compile_layers(model)
    found = computed(replaying_installed(model), with_experts(samples, experts))
    torch.testing.assert_close(found[0], wanted[0], atol=1e-5, rtol=0)


def replaying_installed(model: PreTrainedModel) -> PreTrainedModel:
    replay = replay_of(model)
    assert isinstance(replay, RouterReplay)
    replay.check(nullcontext, Ranks())
    return model


@pytest.mark.parametrize("damage", ["one is missing", "one is there twice", "no such expert"])
def test_a_token_with_a_damaged_record_is_left_to_the_router(damage: str) -> None:
    model, samples = expert_model(), prompts_and_answers()
    own = [chosen_by(model, sample.token_ids) for sample in samples]
    free = computed(model, with_experts(samples, own))
    damaged = [rows.copy() for rows in own]
    for rows in damaged:
        rows[:, 0] = {"one is missing": 255, "one is there twice": rows[:, 1], "no such expert": 100}[damage]
    forced = computed(replaying(expert_model()), with_experts(samples, damaged))
    for found, expected in zip(forced, free, strict=True):
        assert torch.equal(found, expected)


def test_the_mask_over_a_batch_sees_the_log_probabilities_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    model, samples = expert_model(), prompts_and_answers()
    other = [(chosen_by(model, sample.token_ids) + 3) % 8 for sample in samples]
    config = TrainerConfig.model_validate({"objective": {"name": "m2po"}})
    learner, seen = Learner(model, config, max_staleness=9), list[Tensor]()

    def noted(*given: Any, **named: Any) -> tuple[Tensor, Tensor]:
        found = token_logprobs(*given, **named)
        seen.append(found[0].detach())
        return found

    for module in ("learner", "criterion"):
        monkeypatch.setattr(f"penstock.trainer.{module}.token_logprobs", noted)
    learner.accumulate(prepare(with_experts(samples, other))[0])
    before, in_loss = seen
    torch.testing.assert_close(before, in_loss)
