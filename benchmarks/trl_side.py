"""TRL's half of `vs_trl.py`, run by the Python of TRL's own environment: `trl_side.py SPEC.json`.

Reads what to do from a JSON file and writes what came of it beside it; shares nothing with the other half but the
model directory, the tasks and the scoring rule.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from strings import score
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Clock(TrainerCallback):
    """When every optimizer step ended, and of what it trained on the mean reward and length in tokens."""

    def __init__(self) -> None:
        self.ended_at: list[float] = []
        self.rewards: list[float] = []
        self.lengths: list[float] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.ended_at.append(time.time())


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    torch.set_num_threads(spec["threads"])
    clock = Clock()

    def reward(
        prompts: list[Any], completions: list[Any], completion_ids: list[list[int]], answer: list[str], **_: Any
    ) -> list[float]:
        texts = [completion[0]["content"] for completion in completions]
        scores = [score(text, expected) for text, expected in zip(texts, answer, strict=True)]
        clock.rewards.append(sum(scores) / len(scores))
        clock.lengths.append(sum(map(len, completion_ids)) / len(completion_ids))
        return scores

    tasks = [json.loads(line) for line in Path(spec["tasks"]).read_text().splitlines()]
    rows = [{"prompt": [{"role": "user", "content": task["question"]}], "answer": task["answer"]} for task in tasks]
    per_step, micro = spec["groups_per_step"] * spec["group_size"], spec["micro_batch"]
    config = GRPOConfig(
        output_dir=spec["out"],
        max_steps=spec["steps"],
        per_device_train_batch_size=micro,
        gradient_accumulation_steps=per_step // micro,
        num_generations=spec["group_size"],
        max_completion_length=spec["max_new_tokens"],
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        learning_rate=spec["learning_rate"],
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=spec["warmup_steps"],
        weight_decay=0.0,
        max_grad_norm=1.0,
        beta=0.0,
        epsilon=0.2,
        epsilon_high=0.28,
        loss_type="dapo",
        scale_rewards="group",
        mask_truncated_completions=False,
        num_iterations=1,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        use_cpu=spec["device"] == "cpu",
        bf16=spec["device"] != "cpu",
        disable_tqdm=True,
        seed=spec["seed"],
        shuffle_dataset=False,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(spec["model"], padding_side="left"),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_list(rows),
        callbacks=[clock],
    )
    started_at = time.time()
    trainer.train()
    trainer.model.save_pretrained(spec["out"])
    found = {
        "started_at": started_at,
        "ended_at": clock.ended_at,
        "rewards": clock.rewards,
        "lengths": clock.lengths,
    }
    Path(sys.argv[1]).with_suffix(".found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
