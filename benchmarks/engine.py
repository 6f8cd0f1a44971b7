"""The slot engine against Transformers' `generate` (static batches) and its continuous batching.

Same tiny policy, same prompts and lengths, one torch thread each, sampling at temperature 1. The engines take turns,
a round at a time, and a ratio is the median over the rounds. Useful tokens are those a request asked for; time is
the CPU time of the process, which other load on the machine disturbs least.
"""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import numpy as np
import torch
from report import arguments, publish
from transformers import ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from penstock.config.schema import TinyModelConfig
from penstock.model.load import load_policy
from penstock.model.tiny import write_tiny_model
from penstock.rollout.engine import SlotEngine
from penstock.rollout.request import GenerateRequest, SamplingParams

PROMPT_TOKENS = 24
MAX_CONTEXT = 512
UNIFORM_REQUESTS, UNIFORM_TOKENS = 256, 64
LONGTAIL_REQUESTS, LONGTAIL_SLOTS = 1024, 128
LONGTAIL_MEDIAN, LONGTAIL_SIGMA = 24, 0.9  # P99/P50 = exp(2.33 * 0.9) = 8

Prompts = list[list[int]]


def make_policy() -> PreTrainedModel:
    """The built-in tiny policy with random weights."""
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(Path(directory), TinyModelConfig(), MAX_CONTEXT)
        return load_policy(Path(directory), weights=False, seed=0)


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


def run_slots(engine: SlotEngine, prompts: Prompts, lengths: Sequence[int]) -> None:
    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
        params = SamplingParams(ignore_eos=True)
        engine.submit(
            GenerateRequest(rid=str(index), prompt_ids=prompt, params=params, max_new_tokens=(length,), seeds=(index,))
        )
    before = engine.num_generated_tokens
    while engine.has_work:
        engine.step()
    assert engine.num_generated_tokens - before == sum(lengths)


def run_generate(model: PreTrainedModel, prompts: Prompts, lengths: Sequence[int], batch_size: int) -> None:
    """Batches in order of arrival, each until its longest is done."""
    for start in range(0, len(prompts), batch_size):
        ids = torch.tensor(prompts[start : start + batch_size])
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


def tokens_per_s(work: Callable[[], None], num_tokens: int) -> float:
    start = time.process_time()
    work()
    return num_tokens / (time.process_time() - start)


def compare(contestants: dict[str, Callable[[], None]], num_tokens: int, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of each contestant, who take turns."""
    speeds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, work in contestants.items():
            speeds[name].append(tokens_per_s(work, num_tokens))
    return speeds


def ratio(speeds: dict[str, list[float]], name: str) -> float:
    """How many times faster the slot engine is, round by round."""
    return median(ours / theirs for ours, theirs in zip(speeds["slots"], speeds[name], strict=True))


def best_batch_size(model: PreTrainedModel, prompts: Prompts, candidates: Sequence[int]) -> int:
    """The number of requests per batch at which continuous batching is fastest here: its attention covers all pairs
    of requests in a batch, so more is not always better."""
    short = UNIFORM_TOKENS // 4
    speeds = {
        size: tokens_per_s(partial(run_continuous_batching, model, prompts, short, size), len(prompts) * short)
        for size in candidates
    }
    return max(speeds, key=speeds.__getitem__)


def uniform(quick: bool) -> dict[str, float]:
    """All requests of one length."""
    engine = SlotEngine(make_policy(), num_slots=UNIFORM_REQUESTS, max_context=MAX_CONTEXT, policy_version=0)
    static, continuous = make_policy(), make_policy()
    prompts = make_prompts(UNIFORM_REQUESTS, static.config.vocab_size)
    lengths = [UNIFORM_TOKENS] * UNIFORM_REQUESTS
    batch_size = best_batch_size(continuous, prompts, (32, 64) if quick else (16, 32, 64, 128, 256))
    contestants = {
        "slots": lambda: run_slots(engine, prompts, lengths),
        "generate": lambda: run_generate(static, prompts, lengths, UNIFORM_REQUESTS),
        "continuous_batching": lambda: run_continuous_batching(continuous, prompts, UNIFORM_TOKENS, batch_size),
    }
    speeds = compare(contestants, sum(lengths), 2 if quick else 7)
    return {
        "uniform_vs_generate": ratio(speeds, "generate"),
        "uniform_vs_continuous_batching": ratio(speeds, "continuous_batching"),
        "uniform_tokens_per_s": median(speeds["slots"]),
        "uniform_generate_tokens_per_s": median(speeds["generate"]),
        "uniform_continuous_batching_tokens_per_s": median(speeds["continuous_batching"]),
        "continuous_batching_best_batch_size": batch_size,
    }


def longtail(quick: bool) -> dict[str, float]:
    """Log-normal lengths: static batches wait for their longest, slots are refilled."""
    engine = SlotEngine(make_policy(), num_slots=LONGTAIL_SLOTS, max_context=MAX_CONTEXT, policy_version=0)
    static = make_policy()
    prompts = make_prompts(LONGTAIL_REQUESTS, static.config.vocab_size)
    drawn = np.random.default_rng(1).lognormal(np.log(LONGTAIL_MEDIAN), LONGTAIL_SIGMA, LONGTAIL_REQUESTS)
    lengths = np.clip(np.ceil(drawn), 1, MAX_CONTEXT - PROMPT_TOKENS).astype(int).tolist()
    contestants = {
        "slots": lambda: run_slots(engine, prompts, lengths),
        "generate": lambda: run_generate(static, prompts, lengths, LONGTAIL_SLOTS),
    }
    speeds = compare(contestants, sum(lengths), 1 if quick else 3)
    return {
        "longtail_vs_generate": ratio(speeds, "generate"),
        "longtail_tokens_per_s": median(speeds["slots"]),
        "longtail_generate_tokens_per_s": median(speeds["generate"]),
        "longtail_p99_over_p50": float(np.percentile(lengths, 99) / np.percentile(lengths, 50)),
    }


def main() -> None:
    options = arguments(__doc__.partition("\n")[0])
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    publish("engine", {**uniform(options.quick), **longtail(options.quick)}, options.json)


if __name__ == "__main__":
    main()
