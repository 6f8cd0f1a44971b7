"""How far engine and trainer are apart for a policy with experts, with router replay and without it.

A random policy answers in our engine in bfloat16. The learner then computes the log-probabilities of the same tokens
with the same weights, as in a run: in bfloat16, or in float32. `parity_gap_*`: mean |log-probability of the
learner - of the engine| per token, in nats, and `*_max` the largest one; the learner in bfloat16. `float32_*`: the
learner in float32. `parity_gap_ratio`: without replay over with it.

`different_choices`: share of the choices of the learner's routers (of a token, in a layer) that are other experts than
the engine's, without replay. For Qwen3-30B-A3B between two engines it is about a tenth (arXiv 2510.11370).
`record_bytes_per_token`: what the record adds to each token.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from statistics import fmean

import numpy as np
import torch
from report import Benchmark, Figures, arguments, publish
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen3_moe import Qwen3MoeConfig

from penstock.config import TrainerConfig
from penstock.model.experts import expert_layers, recording
from penstock.rollout.request import GenerateRequest, SamplingParams
from penstock.rollout.slot_engine import SlotEngine
from penstock.samples import Sample, Trajectory, Turn
from penstock.trainer.learner import Learner
from penstock.trainer.prepare import prepare
from penstock.trainer.rounded import round_frozen
from penstock.types import EpisodeId

BENCHMARK = Benchmark(
    name="router_replay",
    measures=["trainer", "rollout", "model"],
    figures=[
        f"{dtype}{name}"
        for dtype in ("", "float32_")
        for name in (
            *("parity_gap_with_replay", "parity_gap_without_replay", "parity_gap_ratio"),
            *("parity_gap_with_replay_max", "parity_gap_without_replay_max"),
        )
    ]
    + ["different_choices", "record_bytes_per_token"],
)
DTYPES = {"": torch.bfloat16, "float32_": torch.float32}
VOCABULARY, NUM_EXPERTS, NUM_CHOSEN = 512, 64, 8
NUM_LAYERS, QUICK_LAYERS = 12, 4
PROMPT, ANSWER, QUICK_ANSWER = 32, 96, 24
GROUPS, MEMBERS = 4, 4
SEEDS = (0, 1, 2)
ROUTER_SCALE = 2.0
"""Of the routers' weights: scores of experts with a deviation of about one and a half, as trained routers have."""


def policy(seed: int, num_layers: int) -> PreTrainedModel:
    """Return a random policy. It clearly prefers some tokens to others."""
    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        moe_intermediate_size=64,
        num_experts=NUM_EXPERTS,
        num_experts_per_tok=NUM_CHOSEN,
        norm_topk_prob=True,
        max_position_embeddings=PROMPT + ANSWER,
        initializer_range=0.08,
        tie_word_embeddings=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("mlp.gate.weight"):
                parameter.mul_(ROUTER_SCALE)
    return model


def answers(model: PreTrainedModel, seed: int, num_tokens: int) -> list[Sample]:
    """Return what an engine in bfloat16 answers, with the experts of each token."""
    engine = SlotEngine(
        copy.deepcopy(model).to(torch.bfloat16),
        num_slots=GROUPS * MEMBERS,
        max_context=PROMPT + ANSWER,
        policy_version=0,
    )
    draw = np.random.default_rng(seed)
    prompts = [draw.integers(1, VOCABULARY, PROMPT).tolist() for _ in range(GROUPS)]
    for group, prompt in enumerate(prompts):
        request = GenerateRequest(
            rid=str(group),
            prompt_ids=prompt,
            params=SamplingParams(ignore_eos=True),
            max_new_tokens=(num_tokens,) * MEMBERS,
            seeds=tuple(range(group * MEMBERS, (group + 1) * MEMBERS)),
            routed_from=0,
        )
        engine.submit(request)
    samples = []
    while engine.has_work:
        for finished in engine.step():
            group = int(finished.request.rid)
            for member, segment in enumerate(finished.segments):
                trajectory = Trajectory(
                    episode=EpisodeId("train", group, member, 0),
                    task_id=str(group),
                    turns=[Turn(observation_ids=prompts[group], segments=[segment])],
                    reward=float(member % 2),
                    status="completed",
                )
                samples.append(trajectory.flatten())
    return samples


def gaps(model: PreTrainedModel, samples: Sequence[Sample], dtype: torch.dtype, *, replay: bool) -> tuple[float, float]:
    """Return the mean and the largest difference between the learner and the engine, in nats."""
    config = TrainerConfig(router_replay=replay)
    learner = Learner(copy.deepcopy(model), config, max_staleness=0, compute_dtype=dtype)
    learner.accumulate(prepare(samples)[0])
    metrics = learner.step().metrics
    return metrics["kl_engine_trainer"], metrics["parity_gap_max"]


def different_choices(model: PreTrainedModel, samples: Sequence[Sample]) -> float:
    """Return the share of choices in which the learner's routers, in bfloat16, take other experts than the engine's."""
    rounded = copy.deepcopy(model).requires_grad_(False)
    round_frozen(rounded, torch.bfloat16)
    layers, shares = expert_layers(rounded), []
    for sample in samples:
        assert sample.experts is not None
        ids = torch.from_numpy(sample.token_ids[:-1].astype(np.int64))[None]
        with torch.no_grad(), recording(layers) as found:
            rounded(input_ids=ids, use_cache=False)
        own = torch.stack(found, dim=1).sort(dim=-1).values
        engines = torch.from_numpy(sample.experts[:-1].astype(np.int64)).view_as(own).sort(dim=-1).values
        shares.append(float((own != engines).any(dim=-1).float().mean()))
    return fmean(shares)


def main() -> None:
    options = arguments(__doc__ or "")
    torch.set_num_threads(1)
    figures, seeds = Figures(), SEEDS[: 1 if options.quick else None]
    num_layers, num_tokens = (QUICK_LAYERS, QUICK_ANSWER) if options.quick else (NUM_LAYERS, ANSWER)
    found: dict[str, list[float]] = {}
    for seed in seeds:
        model = policy(seed, num_layers)
        samples = answers(model, seed, num_tokens)
        for prefix, dtype in DTYPES.items():
            (mean, largest), (free, largest_free) = (gaps(model, samples, dtype, replay=on) for on in (True, False))
            measured = {
                "parity_gap_with_replay": mean,
                "parity_gap_without_replay": free,
                "parity_gap_ratio": free / mean,
                "parity_gap_with_replay_max": largest,
                "parity_gap_without_replay_max": largest_free,
            }
            for name, value in measured.items():
                found.setdefault(prefix + name, []).append(value)
        found.setdefault("different_choices", []).append(different_choices(model, samples))
        experts = samples[0].experts
        found.setdefault("record_bytes_per_token", []).append(float(experts[0].nbytes if experts is not None else 0))
    for name, values in found.items():
        figures.add(name, values)
    publish(BENCHMARK, figures.flat, options.json, seeds=seeds)


if __name__ == "__main__":
    main()
