"""The learner against a plain hand-written PyTorch step over the same samples, packed the same way.

The plain step does what must be done and nothing else: forward, log-probabilities of the trained tokens, PPO's clipped
loss, backward, clip, AdamW. Both take turns on copies of one policy, one torch thread; a ratio is the median over the
rounds, time is the CPU time of the process. Two batches: answers of much the same length, and long-tailed ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch
from report import arguments, publish
from transformers import PreTrainedModel

from penstock.config import TinyModelConfig, TrainerConfig
from penstock.groups.batch import Batch
from penstock.model.load import load_policy
from penstock.model.tiny import write_tiny_model
from penstock.trainer.learner import Learner
from penstock.trainer.packing import TokenTable, flatten, micro_batches
from penstock.trainer.prepare import prepare
from penstock.types import NO_VERSION, Sample

GROUPS, GROUP_SIZE, PROMPT_TOKENS, MAX_CONTEXT = 32, 8, 24, 512
ROUNDS = 9


def make_policy() -> PreTrainedModel:
    """The built-in tiny policy; the same weights every time."""
    with TemporaryDirectory() as directory:
        write_tiny_model(Path(directory), TinyModelConfig(), MAX_CONTEXT)
        return load_policy(Path(directory), weights=False, seed=0)


def make_batch(median_tokens: float, sigma: float) -> Batch:
    """Groups that share a prompt, answers of log-normal length."""
    draw = np.random.default_rng(0)
    samples = []
    for group in range(GROUPS):
        prompt = draw.integers(5, 100, PROMPT_TOKENS)
        for episode in range(GROUP_SIZE):
            length = int(np.clip(median_tokens * np.exp(draw.normal(0, sigma)), 1, MAX_CONTEXT - PROMPT_TOKENS))
            mask = np.r_[np.zeros(PROMPT_TOKENS), np.ones(length)].astype(np.uint8)
            samples.append(
                Sample(
                    group=group,
                    episode=episode,
                    reward=float(draw.random()),
                    truncated=False,
                    token_ids=np.r_[prompt, draw.integers(5, 100, length)].astype(np.int32),
                    loss_mask=mask,
                    logprobs=(-4.6 * mask).astype(np.float32),
                    versions=np.where(mask, 0, NO_VERSION).astype(np.int32),
                )
            )
    return prepare(samples, normalize=True)[0]


def plain_step(model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Batch, config: TrainerConfig) -> None:
    """By hand."""
    table = TokenTable.build(batch["token_ids"], flatten(batch["loss_mask"], np.bool_))
    old, advantages = torch.from_numpy(flatten(batch["logprobs"], np.float32)), torch.from_numpy(batch["advantages"])
    device = torch.device("cpu")
    for micro in micro_batches(table, config.tokens_per_microbatch, device, share_prefixes=False):
        logits = model(input_ids=micro.inputs, use_cache=False).logits[micro.rows, micro.columns]
        logprobs = torch.log_softmax(logits, dim=-1).gather(1, micro.chosen[:, None])[:, 0]
        ratio, advantage = (logprobs - old[micro.tokens]).exp(), advantages[micro.samples]
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        loss.sum().backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= int(table.trained.sum())
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def cpu_s(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def compare(batch: Batch, rounds: int) -> tuple[float, float]:
    """(our trained tokens per second over the plain step's, and ours), medians over the rounds."""
    config = TrainerConfig(learning_rate=1e-6)
    learner = Learner(make_policy(), config, max_staleness=1_000_000)
    model = make_policy()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, foreach=True)

    def ours() -> None:
        learner.accumulate(batch)
        learner.step()

    tokens = int(sum(mask.sum() for mask in batch["loss_mask"]))
    times = []
    for number in range(rounds + 1):
        pair = cpu_s(ours), cpu_s(lambda: plain_step(model, optimizer, batch, config))
        if number:  # the first round warms up
            times.append(pair)
    return median(theirs / mine for mine, theirs in times), tokens / median(mine for mine, _ in times)


def main() -> None:
    options = arguments(__doc__ or "")
    torch.set_num_threads(1)
    rounds = 3 if options.quick else ROUNDS
    figures = {}
    for name, (median_tokens, sigma) in {"uniform": (48.0, 0.1), "longtail": (24.0, 0.9)}.items():
        ratio, tokens_per_s = compare(make_batch(median_tokens, sigma), rounds)
        figures[f"{name}_learner_vs_plain_step"] = ratio
        figures[f"{name}_trained_tokens_per_s"] = tokens_per_s
    publish(
        "learner",
        {
            "learner_vs_plain_step": min(
                figures["uniform_learner_vs_plain_step"], figures["longtail_learner_vs_plain_step"]
            )
        }
        | figures,
        options.json,
    )


if __name__ == "__main__":
    main()
