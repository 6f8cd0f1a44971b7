"""The prefix cache with four times as many episodes as slots, set against the engine without one.

Each episode has eight turns and asks for the next one as soon as a turn has ended. So most episodes wait in the queue,
and the cache has room for a part of their histories only. Tiny policy, one torch thread, sampling at temperature 1.
Time is the CPU time of the process. The engines take turns, a round at a time, and `reuse_with_queue` is the median of
how many times faster the engine with a cache is.

`reused_share` is the share of prompt tokens with reused keys and values, and `reusable_share` is that of an engine with
a slot for each episode. `longest_wait_share` is the longest wait of a turn in the queue, as a share of all steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median

import numpy as np
import torch
from engine import ANSWER_TOKENS, REUSE_CONTEXT, TURNS, run_turns
from hardware import seconds, tiny_policy
from report import Benchmark, arguments, publish

from penstock.rollout.request import GenerateRequest
from penstock.rollout.slot_engine import Finished, SlotEngine

SLOTS, TIMES = 8, 4
"""Slots, and the number of episodes for each of them."""
BENCHMARK = Benchmark(
    name="reuse_with_queue",
    measures=["rollout", "model"],
    figures=[
        "reuse_with_queue",
        "tokens_per_s",
        "recompute_tokens_per_s",
        "reused_share",
        "reusable_share",
        "longest_wait_share",
    ],
)


@dataclass(slots=True)
class Counts:
    """Counts of the steps of an engine."""

    num_steps: int = 0
    num_computed: int = 0
    num_reused: int = 0
    waits: list[int] = field(default_factory=list)
    """Steps from a request to its first token."""

    @property
    def reused_share(self) -> float:
        return self.num_reused / (self.num_computed + self.num_reused)


class Counting(SlotEngine):
    """An engine that counts."""

    counts: Counts
    asked: dict[str, int]

    def submit(self, request: GenerateRequest) -> list[Finished]:
        self.asked[request.rid] = self.counts.num_steps
        return super().submit(request)

    def step(self) -> list[Finished]:
        finished, counts = super().step(), self.counts
        counts.num_steps += 1
        counts.num_computed += self.num_prefilled
        counts.num_reused += self.num_reused
        counts.waits += (counts.num_steps - self.asked[rid] for rid in self.begun)
        return finished


def played(num_slots: int, episodes: int, *, num_cached: int | None) -> Callable[[], Counts]:
    """Return a function that plays new episodes with one engine."""
    engine = Counting(
        tiny_policy(REUSE_CONTEXT),
        num_slots=num_slots,
        max_context=REUSE_CONTEXT,
        policy_version=0,
        num_cached=num_cached,
    )
    draw = np.random.default_rng(2)

    def play() -> Counts:
        engine.counts, engine.asked = Counts(), {}
        run_turns(engine, draw, episodes)
        return engine.counts

    return play


def main() -> None:
    options = arguments(__doc__.partition("\n")[0])
    torch.set_num_threads(1)
    logging.getLogger("transformers").setLevel(logging.ERROR)
    slots, rounds = (2, 1) if options.quick else (SLOTS, 3)
    episodes, cpu = TIMES * slots, torch.device("cpu")
    num_tokens = episodes * TURNS * ANSWER_TOKENS
    reusing, recomputing = played(slots, episodes, num_cached=None), played(slots, episodes, num_cached=0)
    speeds, plain, counts = list[float](), list[float](), list[Counts]()
    for _ in range(rounds):
        speeds.append(num_tokens / seconds(lambda: counts.append(reusing()), cpu))
        plain.append(num_tokens / seconds(recomputing, cpu))
    figures = {
        "reuse_with_queue": median(ours / theirs for ours, theirs in zip(speeds, plain, strict=True)),
        "tokens_per_s": median(speeds),
        "recompute_tokens_per_s": median(plain),
        "reused_share": median(each.reused_share for each in counts),
        "reusable_share": played(episodes, episodes, num_cached=None)().reused_share,
        "longest_wait_share": median(max(each.waits) / each.num_steps for each in counts),
    }
    publish(BENCHMARK, figures, options.json)


if __name__ == "__main__":
    main()
