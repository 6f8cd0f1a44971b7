"""The learner against a plain hand-written PyTorch step over the same packed batch.

The plain step does what must be done and nothing else: the same forward pass over the same micro-batches, prompts
shared by a group processed once as the learner does, log-probabilities of the trained tokens, PPO's clipped loss,
backward, clip, AdamW. `sharing_gain` is what sharing prompts gives the plain step itself. All take turns on copies of
one policy, one torch thread; a ratio is the median over the rounds. Two batches: answers of much the same length, and
long-tailed ones. On the CPU the policy is the tiny one, and time is the CPU time of the process. With `--device cuda`
it is wall time, for a policy of real size that computes in bfloat16; `flops_share` is the share of a large matrix
product's rate that the arithmetic of the batch makes, every prompt counted once and nothing that is padded.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import numpy as np
import torch
from hardware import accelerator_name, flops_per_s, real_policy, seconds, tiny_policy
from report import Benchmark, arguments, publish
from transformers import PreTrainedModel

from penstock.config import TrainerConfig
from penstock.groups.batch import Batch
from penstock.samples import Sample
from penstock.trainer.forward import pass_cost, token_logits
from penstock.trainer.learner import Learner
from penstock.trainer.packing import TokenTable, flatten, micro_batches
from penstock.trainer.prepare import prepare
from penstock.types import NO_VERSION

ANSWERS = ("uniform", "longtail")
FIGURES = ("learner_vs_plain_step", "sharing_gain", "trained_tokens_per_s")
BENCHMARK = Benchmark(
    name="learner",
    measures=["trainer"],
    figures=[FIGURES[0], *(f"{answers}_{figure}" for answers in ANSWERS for figure in FIGURES)],
    on_accelerator=[
        FIGURES[0],
        *(f"{answers}_{figure}" for answers in ANSWERS for figure in (*FIGURES, "flops_share")),
    ],
)
ROUNDS = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Where a step is taken, and over what."""

    device: torch.device
    groups: int
    prompt_tokens: int
    max_context: int
    answers: dict[str, tuple[float, float]]
    """Median length and spread of its logarithm."""
    group_size: int = 8

    @property
    def dtype(self) -> torch.dtype:
        """Of the compute; weights are float32."""
        return torch.float32 if self.device.type == "cpu" else torch.bfloat16

    def make_policy(self) -> PreTrainedModel:
        """The same weights every time."""
        if self.device.type == "cpu":
            return tiny_policy(self.max_context)
        return real_policy(device=self.device, dtype=torch.float32)


def setting_on(device: torch.device) -> Setting:
    if device.type == "cpu":
        answers = {"uniform": (48.0, 0.1), "longtail": (24.0, 0.9)}
        return Setting(device=device, groups=32, prompt_tokens=24, max_context=512, answers=answers)
    answers = {"uniform": (512.0, 0.1), "longtail": (256.0, 0.9)}
    return Setting(device=device, groups=8, prompt_tokens=256, max_context=2048, answers=answers)


def make_batch(setting: Setting, median_tokens: float, sigma: float) -> Batch:
    """Groups that share a prompt, answers of log-normal length."""
    draw = np.random.default_rng(0)
    samples = []
    for group in range(setting.groups):
        prompt = draw.integers(5, 100, setting.prompt_tokens)
        for episode in range(setting.group_size):
            longest = setting.max_context - setting.prompt_tokens
            length = int(np.clip(median_tokens * np.exp(draw.normal(0, sigma)), 1, longest))
            mask = np.r_[np.zeros(setting.prompt_tokens), np.ones(length)].astype(np.uint8)
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
    return prepare(samples)[0]


def plain_step(
    model: PreTrainedModel, optimizer: torch.optim.Optimizer, batch: Batch, config: TrainerConfig, *, share: bool
) -> None:
    """By hand; `share`: each group's prompt once."""
    table = TokenTable.build(batch["token_ids"], flatten(batch["loss_mask"], np.bool_))
    device = model.device
    old = torch.from_numpy(flatten(batch["logprobs"], np.float32)).to(device)
    advantages = torch.from_numpy(batch["advantages"]).to(device)
    packed = micro_batches(table, config.pass_tokens, device, share_prefixes=share, pass_cost=pass_cost(model, device))
    for micro in packed:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type != "cpu"):
            logits = token_logits(model, micro)
        logprobs = torch.log_softmax(logits.float(), dim=-1).gather(1, micro.chosen[:, None])[:, 0]
        ratio, advantage = (logprobs - old[micro.tokens]).exp(), advantages[micro.samples]
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
        loss.sum().backward()  # type: ignore[no-untyped-call]
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad /= int(table.trained.sum())
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm, foreach=True)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def flops(model: PreTrainedModel, batch: Batch) -> float:
    """Of forward and backward pass: two operations per weight and token forward, twice as many backward; the head for
    trained tokens only. Attention: a query meets half of its sequence on average."""
    config = model.config
    head = config.vocab_size * config.hidden_size
    body = sum(p.numel() for name, p in model.named_parameters() if "embed" not in name and "lm_head" not in name)
    answers = np.asarray([int(mask.sum()) for mask in batch["loss_mask"]])
    lengths = np.asarray([len(ids) for ids in batch["token_ids"]])
    prompts = (lengths - answers)[np.unique(batch["groups"], return_index=True)[1]]
    pairs = (answers * (lengths - answers / 2)).sum() + (prompts**2 / 2).sum()
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    return float(3 * (2 * body * (answers.sum() + prompts.sum()) + 2 * head * answers.sum() + attention))


def compare(setting: Setting, batch: Batch, rounds: int) -> dict[str, float]:
    """Medians over the rounds."""
    config, device = TrainerConfig(learning_rate=1e-6), setting.device
    learner = Learner(setting.make_policy(), config, max_staleness=1_000_000, compute_dtype=setting.dtype)
    model = setting.make_policy()
    on_cpu = device.type == "cpu"
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, weight_decay=0.0, foreach=on_cpu, fused=not on_cpu)

    def ours() -> None:
        learner.accumulate(batch)
        learner.step()

    tokens = int(sum(mask.sum() for mask in batch["loss_mask"]))
    times = []
    for number in range(rounds + 1):
        taken = (
            seconds(ours, device),
            seconds(lambda: plain_step(model, optimizer, batch, config, share=True), device),
            seconds(lambda: plain_step(model, optimizer, batch, config, share=False), device),
        )
        if number:  # the first round warms up
            times.append(taken)
    mine = median(mine for mine, *_ in times)
    found = {
        "learner_vs_plain_step": median(plain / mine for mine, plain, _ in times),
        "sharing_gain": median(apart / plain for _, plain, apart in times),
        "trained_tokens_per_s": tokens / mine,
    }
    return found if on_cpu else found | {"flops_share": flops(model, batch) / mine / flops_per_s(device, setting.dtype)}


def main() -> None:
    options = arguments(__doc__ or "", device="DEVICE")
    device = torch.device(options.device or "cpu")
    torch.set_num_threads(1)
    rounds = 3 if options.quick else ROUNDS
    setting, figures = setting_on(device), dict[str, float]()
    for name, (median_tokens, sigma) in setting.answers.items():
        found = compare(setting, make_batch(setting, median_tokens, sigma), rounds)
        figures |= {f"{name}_{figure}": value for figure, value in found.items()}
    worst = min(figures["uniform_learner_vs_plain_step"], figures["longtail_learner_vs_plain_step"])
    publish(BENCHMARK, {"learner_vs_plain_step": worst} | figures, options.json, accelerator=accelerator_name(device))


if __name__ == "__main__":
    main()
