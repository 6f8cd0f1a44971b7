"""How long training stands still for a checkpoint, for `learner_scale.py`."""

from __future__ import annotations

import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from learner_counts import MEASURED, await_files, samples
from transformers import AutoModelForCausalLM
from transformers.models.qwen3 import Qwen3Config

from penstock.config import TrainerConfig
from penstock.trainer.checkpoint import Unfinished
from penstock.trainer.learner import Learner
from penstock.trainer.prepare import prepare

SAVED, QUICK_SAVED = "90 M, 2k tokens", "10 M, 4k tokens"
"""The first model has 0.9 GB of states: weights and both moments in float32."""
NUM_SAMPLES, QUICK_NUM_SAMPLES, LENGTH, VOCAB = 8, 2, 512, 8192


class Times(NamedTuple):
    """Seconds of one optimizer step and the passes before it, without and with a checkpoint beside them."""

    passes_s: float
    step_s: float
    taken_s: float
    """Time until `write` returned."""
    passes_beside_s: float
    step_beside_s: float
    complete_s: float
    """Time from the begin of the checkpoint to its end."""
    num_bytes: int

    @property
    def stall_share(self) -> float:
        """Return the time in which training stood still, as a share of a step and its passes."""
        return (self.taken_s + max(self.step_beside_s - self.step_s, 0.0)) / (self.passes_s + self.step_s)


def saving_times(*, quick: bool, rounds: int) -> list[Times]:
    """Return the times of each round."""
    sizes, tokens = MEASURED[QUICK_SAVED if quick else SAVED]
    config = Qwen3Config(**sizes, vocab_size=VOCAB, head_dim=64, num_attention_heads=8, num_key_value_heads=4)
    trainer = TrainerConfig.model_validate({"tokens_per_microbatch": tokens, "canaries": {"parity_every": None}})
    model = AutoModelForCausalLM.from_config(config).eval()
    learner = Learner(model, trainer, max_staleness=9)
    batch, _ = prepare(samples(QUICK_NUM_SAMPLES if quick else NUM_SAMPLES, LENGTH, VOCAB))

    def passes() -> float:
        began = time.perf_counter()
        learner.accumulate(batch)
        return time.perf_counter() - began

    def step() -> float:
        began = time.perf_counter()
        learner.step()
        return time.perf_counter() - began

    threads = torch.get_num_threads()
    torch.set_num_threads(os.cpu_count() or 1)
    passes(), step()  # the moments exist only after a step
    found = []
    with TemporaryDirectory() as directory:
        model.config.save_pretrained(directory)
        for number in range(rounds):
            passes_s, step_s, began = passes(), step(), time.perf_counter()
            unfinished = Unfinished(Path(directory), number, policy_version=number, extra={})
            learner.write(unfinished.path)
            taken_s = time.perf_counter() - began
            passes_beside_s, step_beside_s = passes(), step()
            await_files(learner)
            target = unfinished.complete(model_dir=Path(directory), keep=1)
            complete_s = time.perf_counter() - began
            num_bytes = sum(path.stat().st_size for path in target.iterdir())
            found.append(Times(passes_s, step_s, taken_s, passes_beside_s, step_beside_s, complete_s, num_bytes))
    torch.set_num_threads(threads)
    return found
