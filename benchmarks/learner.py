"""The learner against a plain hand-written PyTorch step over the same packed batch.

The plain step does what must be done and nothing else: the same forward pass over the same micro-batches, prompts
shared by a group processed once as the learner does, log-probabilities of the trained tokens, PPO's clipped loss,
backward, clip, AdamW. `sharing_gain` is what sharing prompts gives the plain step itself. All take turns on copies of
one policy, one torch thread; a ratio is the median over the rounds, time is the CPU time of the process. Two batches:
answers of much the same length, and long-tailed ones.
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
from penstock.trainer.forward import token_logits
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


def plain_step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Batch, config: TrainerConfig, *, share: bool
) -> None:
    """By hand; `share`: each group's prompt once."""
    table = TokenTable.build(batch["token_ids"], flatten(batch["loss_mask"], np.bool_))
    old, advantages = torch.from_numpy(flatten(batch["logprobs"], np.float32)), torch.from_numpy(batch["advantages"])
    device = torch.device("cpu")
    for micro in micro_batches(table, config.tokens_per_microbatch, device, share_prefixes=share):
        logprobs = torch.log_softmax(token_logits(model, micro), dim=-1).gather(1, micro.chosen[:, None])[:, 0]
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


def compare(batch: Batch, rounds: int) -> dict[str, float]:
    """Medians over the rounds."""
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
        found = (
            cpu_s(ours),
            cpu_s(lambda: plain_step(model, optimizer, batch, config, share=True)),
            cpu_s(lambda: plain_step(model, optimizer, batch, config, share=False)),
        )
        if number:  # the first round warms up
            times.append(found)
    return {
        "learner_vs_plain_step": median(plain / mine for mine, plain, _ in times),
        "sharing_gain": median(apart / plain for _, plain, apart in times),
        "trained_tokens_per_s": tokens / median(mine for mine, *_ in times),
    }


def main() -> None:
    options = arguments(__doc__ or "")
    torch.set_num_threads(1)
    rounds = 3 if options.quick else ROUNDS
    figures: dict[str, float] = {}
    for name, (median_tokens, sigma) in {"uniform": (48.0, 0.1), "longtail": (24.0, 0.9)}.items():
        found = compare(make_batch(median_tokens, sigma), rounds)
        figures |= {f"{name}_{figure}": value for figure, value in found.items()}
    worst = min(figures["uniform_learner_vs_plain_step"], figures["longtail_learner_vs_plain_step"])
    publish("learner", {"learner_vs_plain_step": worst} | figures, options.json)


if __name__ == "__main__":
    main()
