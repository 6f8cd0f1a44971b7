"""The slot engine against Transformers' `generate` (static batches) and its continuous batching.

Same policy, same prompts and lengths, one torch thread each, sampling at temperature 1. The engines take turns, a round
at a time, and a ratio is the median over the rounds. Useful tokens are those a request asked for. On the CPU the policy
is the tiny one, and time is the CPU time of the process, which other load on the machine disturbs least. There, the
engine is also compared with the same engine without a prefix cache, under two loads. One has episodes of eight turns,
and each turn begins with the turn before. The other has samples of one prompt that arrive one after the other.
`kv_bytes_per_running_token` is the memory that running samples take for keys and values, over the size of the keys and
values of their tokens, as a mean over the steps of a long-tailed load with a context of 32k tokens, while further
requests wait. Each sample has a prompt of its own there. With `--device cuda` it is wall time, for the tiny policy and
for one of real size, in bfloat16, with requests of one length; and a step that only decodes is set against the least it
could take: reading all weights, and all keys and values there are, at the speed of a copy.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import numpy as np
import torch
from hardware import accelerator_name, bytes_per_s, real_policy, seconds, tiny_policy
from report import Benchmark, arguments, publish
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from penstock.rollout.request import GenerateRequest, SamplingParams
from penstock.rollout.room import bytes_of_token
from penstock.rollout.slot_engine import SlotEngine

PROMPT_TOKENS = 24
MAX_CONTEXT = 512
UNIFORM_REQUESTS, UNIFORM_TOKENS = 256, 64
LONGTAIL_REQUESTS, LONGTAIL_SLOTS = 1024, 128
LONGTAIL_MEDIAN, LONGTAIL_SIGMA = 24, 0.9  # P99/P50 = exp(2.33 * 0.9) = 8
EPISODES, TURNS, ANSWER_TOKENS, OBSERVATION_TOKENS = 32, 8, 16, 112
SHARED_PROMPT_TOKENS, SHARING_SAMPLES, STEPS_BETWEEN, SHARING_ANSWER_TOKENS = 512, 16, 4, 32
REUSE_CONTEXT = 1024
RESERVE_CONTEXT, RESERVE_REQUESTS, RESERVE_SLOTS = 32768, 256, 128
RESERVE_MEDIAN, RESERVE_SIGMA = 640, 0.9  # a mean of about 950
DECODED_ROWS, DECODED_CONTEXT, DECODED_STEPS = (1, 64, 256), 384, 32

TINY, REAL = "tiny_", "qwen3_0_6b_"
"""What figures of the policies on an accelerator begin with."""
UNIFORM = (
    "uniform_vs_generate",
    "uniform_vs_continuous_batching",
    "uniform_tokens_per_s",
    "uniform_generate_tokens_per_s",
    "uniform_continuous_batching_tokens_per_s",
    "continuous_batching_best_batch_size",
)
LONGTAIL = ("longtail_vs_generate", "longtail_tokens_per_s", "longtail_generate_tokens_per_s", "longtail_p99_over_p50")
REUSE = ("turns_vs_recompute", "turns_tokens_per_s", "shared_prompt_gain", "shared_prompt_tokens_per_s")
RESERVED = "kv_bytes_per_running_token"
DECODING = [f"decode_{rows}_rows_{figure}" for rows in DECODED_ROWS for figure in ("ms", "share_of_bandwidth")]
BENCHMARK = Benchmark(
    name="engine",
    measures=["rollout", "model"],
    figures=[*UNIFORM, *LONGTAIL, *REUSE, RESERVED],
    on_accelerator=[
        f"{policy}{name}" for policy in (TINY, REAL) for name in (*UNIFORM, RESERVED, "copy_gb_per_s", *DECODING)
    ],
)

Prompts = list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Which policy is compared, and at how much work."""

    make_policy: Callable[[], PreTrainedModel]
    device: torch.device
    rounds: int
    batch_sizes: tuple[int, ...]
    """Of continuous batching; the best one is taken."""
    shrink: int = 1
    """There are this many times fewer requests and slots."""


def settings(device: torch.device, *, quick: bool) -> dict[str, Setting]:
    """By what their figures begin with."""
    if device.type == "cpu":
        return {
            "": Setting(
                make_policy=partial(tiny_policy, REUSE_CONTEXT),
                device=device,
                rounds=1 if quick else 7,
                batch_sizes=(32,) if quick else (16, 32, 64, 128, 256),
                shrink=8 if quick else 1,
            )
        }
    policies = {
        TINY: partial(tiny_policy, MAX_CONTEXT, device=device, dtype=torch.bfloat16),
        REAL: partial(real_policy, device=device, dtype=torch.bfloat16),
    }
    return {
        name: Setting(
            make_policy=make_policy,
            device=device,
            rounds=1 if quick else 3,
            batch_sizes=(256,),
        )
        for name, make_policy in policies.items()
    }


def make_prompts(count: int, vocab_size: int) -> Prompts:
    prompts: Prompts = np.random.default_rng(0).integers(0, vocab_size, (count, PROMPT_TOKENS)).tolist()
    return prompts


def sampling(max_new_tokens: int) -> GenerationConfig:
    """Plain sampling that no token ends."""
    return GenerationConfig(
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=max_new_tokens,
        eos_token_id=-1,
        pad_token_id=0,
    )


def submit_all(engine: SlotEngine, prompts: Prompts, lengths: Sequence[int]) -> None:
    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        params = SamplingParams(ignore_eos=True)
        engine.submit(
            GenerateRequest(rid=str(index), prompt_ids=prompt, params=params, max_new_tokens=(length,), seeds=(index,))
        )


def run_slots(engine: SlotEngine, prompts: Prompts, lengths: Sequence[int]) -> None:
    submit_all(engine, prompts, lengths)
    before = engine.num_generated_tokens
    while engine.has_work:
        engine.step()
    assert engine.num_generated_tokens - before == sum(lengths)


def run_generate(model: PreTrainedModel, prompts: Prompts, lengths: Sequence[int], batch_size: int) -> None:
    """Batches in order of arrival, each until its longest is done."""
    for start in range(0, len(prompts), batch_size):
        ids = torch.tensor(prompts[start : start + batch_size], device=model.device)
        longest = max(lengths[start : start + batch_size])
        output = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=sampling(longest))
        assert output.shape[1] == PROMPT_TOKENS + longest


def run_continuous_batching(model: PreTrainedModel, prompts: Prompts, length: int, batch_size: int) -> None:
    pages = -(-(PROMPT_TOKENS + length) // 32)
    config = ContinuousBatchingConfig(
        page_size=32,
        num_blocks=batch_size * pages,
        max_requests_per_batch=batch_size,
        max_batch_tokens=max(batch_size, 512),
        allow_block_sharing=False,
    )
    results = model.generate_batch(prompts, sampling(length), continuous_batching_config=config, warmup=False)
    assert sum(len(result.generated_tokens) for result in results.values()) == len(prompts) * length


def compare(
    contestants: dict[str, Callable[[], None]], num_tokens: int, rounds: int, device: torch.device
) -> dict[str, list[float]]:
    """Tokens per second of each contestant, who take turns; on an accelerator the slot engine has recorded its forwards
    before."""
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    if device.type != "cpu":
        contestants["slots"]()
    for number in range(rounds):
        for name, work in contestants.items():
            speeds[name].append(num_tokens / seconds(work, device))
            print(f"round {number}, {name}: {speeds[name][-1]:.0f} tokens/s", file=sys.stderr, flush=True)
    return speeds


def ratio(speeds: dict[str, list[float]], name: str) -> float:
    """How many times faster the slot engine is, round by round."""
    return median(ours / theirs for ours, theirs in zip(speeds["slots"], speeds[name], strict=True))


def best_batch_size(model: PreTrainedModel, prompts: Prompts, candidates: Sequence[int]) -> int:
    """The number of requests per batch at which continuous batching is fastest here: its attention covers all pairs
    of requests in a batch, so more is not always better."""
    short = UNIFORM_TOKENS // 4
    times = {
        size: seconds(partial(run_continuous_batching, model, prompts, short, size), model.device)
        for size in candidates
    }
    return min(times, key=times.__getitem__)


def uniform(setting: Setting) -> dict[str, float]:
    """All requests of one length."""
    requests = UNIFORM_REQUESTS // setting.shrink
    engine = SlotEngine(setting.make_policy(), num_slots=requests, max_context=MAX_CONTEXT, policy_version=0)
    static, continuous = setting.make_policy(), setting.make_policy()
    prompts = make_prompts(requests, static.config.vocab_size)
    lengths = [UNIFORM_TOKENS] * requests
    batch_size = best_batch_size(continuous, prompts, setting.batch_sizes)
    contestants = {
        "slots": lambda: run_slots(engine, prompts, lengths),
        "generate": lambda: run_generate(static, prompts, lengths, requests),
        "continuous_batching": lambda: run_continuous_batching(continuous, prompts, UNIFORM_TOKENS, batch_size),
    }
    speeds = compare(contestants, sum(lengths), setting.rounds, setting.device)
    return {
        "uniform_vs_generate": ratio(speeds, "generate"),
        "uniform_vs_continuous_batching": ratio(speeds, "continuous_batching"),
        "uniform_tokens_per_s": median(speeds["slots"]),
        "uniform_generate_tokens_per_s": median(speeds["generate"]),
        "uniform_continuous_batching_tokens_per_s": median(speeds["continuous_batching"]),
        "continuous_batching_best_batch_size": batch_size,
    }


def longtail(setting: Setting, rounds: int) -> dict[str, float]:
    """Log-normal lengths: static batches wait for their longest, slots are refilled."""
    requests, slots = LONGTAIL_REQUESTS // setting.shrink, LONGTAIL_SLOTS // setting.shrink
    engine = SlotEngine(setting.make_policy(), num_slots=slots, max_context=MAX_CONTEXT, policy_version=0)
    static = setting.make_policy()
    prompts = make_prompts(requests, static.config.vocab_size)
    drawn = np.random.default_rng(1).lognormal(np.log(LONGTAIL_MEDIAN), LONGTAIL_SIGMA, requests)
    lengths = np.clip(np.ceil(drawn), 1, MAX_CONTEXT - PROMPT_TOKENS).astype(int).tolist()
    contestants = {
        "slots": lambda: run_slots(engine, prompts, lengths),
        "generate": lambda: run_generate(static, prompts, lengths, slots),
    }
    speeds = compare(contestants, sum(lengths), rounds, setting.device)
    return {
        "longtail_vs_generate": ratio(speeds, "generate"),
        "longtail_tokens_per_s": median(speeds["slots"]),
        "longtail_generate_tokens_per_s": median(speeds["generate"]),
        "longtail_p99_over_p50": float(np.percentile(lengths, 99) / np.percentile(lengths, 50)),
    }


def run_turns(engine: SlotEngine, draw: np.random.Generator, episodes: int) -> None:
    """Episodes of several turns: the prompt of a turn is the one before, its answer, and an observation."""
    vocab_size, turns = engine.model.config.vocab_size, dict.fromkeys(map(str, range(episodes)), 0)

    def submit(rid: str, history: list[int]) -> None:
        prompt = history + draw.integers(0, vocab_size, OBSERVATION_TOKENS).tolist()
        params, seed = SamplingParams(ignore_eos=True), int(draw.integers(2**31))
        engine.submit(
            GenerateRequest(rid=rid, prompt_ids=prompt, params=params, max_new_tokens=(ANSWER_TOKENS,), seeds=(seed,))
        )

    for rid in turns:
        submit(rid, [])
    while engine.has_work:
        for finished in engine.step():
            turns[finished.request.rid] += 1
            if turns[finished.request.rid] < TURNS:
                submit(finished.request.rid, finished.request.prompt_ids + finished.segments[0].token_ids)
    assert set(turns.values()) == {TURNS}


def run_shared_prompt(engine: SlotEngine, draw: np.random.Generator) -> None:
    """Samples of one prompt, a new one every few steps."""
    prompt = draw.integers(0, engine.model.config.vocab_size, SHARED_PROMPT_TOKENS).tolist()
    for seed in range(SHARING_SAMPLES):
        params, limits = SamplingParams(ignore_eos=True), (SHARING_ANSWER_TOKENS,)
        engine.submit(
            GenerateRequest(rid=str(seed), prompt_ids=prompt, params=params, max_new_tokens=limits, seeds=(seed,))
        )
        for _ in range(STEPS_BETWEEN):
            engine.step()
    while engine.has_work:
        engine.step()


def reuse(setting: Setting) -> dict[str, float]:
    """The engine with a prefix cache against the engine without one. Every round has new prompts, the same for both."""
    episodes = EPISODES // setting.shrink

    def engines(num_slots: int) -> list[tuple[str, SlotEngine, np.random.Generator]]:
        return [
            (
                name,
                SlotEngine(
                    setting.make_policy(),
                    num_slots=num_slots,
                    max_context=REUSE_CONTEXT,
                    policy_version=0,
                    num_cached=num_cached,
                ),
                np.random.default_rng(2),
            )
            for name, num_cached in (("slots", None), ("recompute", 0))
        ]

    turns = compare(
        {name: partial(run_turns, engine, draw, episodes) for name, engine, draw in engines(episodes)},
        episodes * TURNS * ANSWER_TOKENS,
        setting.rounds,
        setting.device,
    )
    shared = compare(
        {name: partial(run_shared_prompt, engine, draw) for name, engine, draw in engines(SHARING_SAMPLES)},
        SHARING_SAMPLES * SHARING_ANSWER_TOKENS,
        setting.rounds,
        setting.device,
    )
    return {
        "turns_vs_recompute": ratio(turns, "recompute"),
        "turns_tokens_per_s": median(turns["slots"]),
        "shared_prompt_gain": ratio(shared, "recompute"),
        "shared_prompt_tokens_per_s": median(shared["slots"]),
    }


def reserve(setting: Setting) -> dict[str, float]:
    """Memory of running samples in a long context, of which they need little."""
    requests, slots = RESERVE_REQUESTS // setting.shrink, RESERVE_SLOTS // setting.shrink
    model = setting.make_policy()
    model.config.max_position_embeddings = RESERVE_CONTEXT
    engine = SlotEngine(model, num_slots=slots, max_context=RESERVE_CONTEXT, policy_version=0)
    drawn = np.random.default_rng(3).lognormal(np.log(RESERVE_MEDIAN), RESERVE_SIGMA, requests)
    lengths = np.clip(np.ceil(drawn), 1, RESERVE_CONTEXT - PROMPT_TOKENS).astype(int).tolist()
    of_token = bytes_of_token(model.config.to_dict(), model.dtype.itemsize)
    reserved, needed = 0, 0
    submit_all(engine, make_prompts(requests, model.config.vocab_size), lengths)
    while engine.num_waiting:
        engine.step()
        reserved += engine.num_reserved_bytes
        needed += engine.num_running_tokens * of_token
    return {RESERVED: reserved / needed}


def decoding(setting: Setting) -> dict[str, float]:
    """Steps of few and of many rows, and which share of their time reading weights, keys and values must take."""
    model = setting.make_policy()
    engine = SlotEngine(model, num_slots=max(DECODED_ROWS), max_context=MAX_CONTEXT, policy_version=0)
    config, speed = model.config, bytes_per_s(setting.device)
    weights = sum(parameter.nbytes for parameter in engine.parameters().values())
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * model.dtype.itemsize
    prompt = [index % 100 for index in range(DECODED_CONTEXT)]
    figures = {"copy_gb_per_s": speed / 1e9}
    for rows in DECODED_ROWS:
        for name in ("warm", "timed"):
            params = SamplingParams(ignore_eos=True)
            limits, seeds = (MAX_CONTEXT - DECODED_CONTEXT,) * rows, tuple(range(rows))
            engine.submit(
                GenerateRequest(rid=name, prompt_ids=prompt, params=params, max_new_tokens=limits, seeds=seeds)
            )
            while engine.num_active < rows:
                engine.step()
            engine.step()
            spent = seconds(lambda: [engine.step() for _ in range(DECODED_STEPS)], setting.device)
            engine.abort(name)
        context = DECODED_CONTEXT + DECODED_STEPS / 2
        figures[f"decode_{rows}_rows_ms"] = 1e3 * spent / DECODED_STEPS
        figures[f"decode_{rows}_rows_share_of_bandwidth"] = (
            (weights + rows * context * per_token) / speed / (spent / DECODED_STEPS)
        )
    return figures


def main() -> None:
    options = arguments(__doc__.partition("\n")[0], device="DEVICE")
    device = torch.device(options.device or "cpu")
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    figures: dict[str, float] = {}
    for prefix, setting in settings(device, quick=options.quick).items():
        if device.type == "cpu":
            further = longtail(setting, 1 if options.quick else 3) | reuse(setting)
        else:
            further = decoding(setting)
        further |= reserve(setting)
        found = uniform(setting) | further
        figures |= {prefix + name: value for name, value in found.items()}
    publish(BENCHMARK, figures, options.json, accelerator=accelerator_name(device))


if __name__ == "__main__":
    main()
