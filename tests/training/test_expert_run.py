"""A run whose policy has experts: the learner computes tokens with the experts that the server recorded."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from expert_policy import expert_config
from transformers import AutoModelForCausalLM

from penstock.config.run_settings import TinyModelConfig
from penstock.model.load_policy import load_policy
from penstock.model.tiny import write_tiny_model
from penstock.observe import jsonl

pytestmark = pytest.mark.integration

RECIPE = str(Path(__file__).parent / "recipes" / "spell_backward.yaml")
STEPS = 3
SHORT = [
    "model.warm_start.steps=0",
    "data.eval_tasks=8",
    "trainer.groups_per_step=4",
    "scheduler.segment_length=3",
    "scheduler.group_filter=[]",
    f"trainer.steps={STEPS}",
    "observe.progress=false",
    "observe.plots=false",
]
ON_POLICY = ("scheduler.mode=synchronous", "scheduler.max_staleness=0")


@pytest.fixture(scope="module")
def expert_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy with the tiny policy's tokenizer, and with experts."""
    directory = tmp_path_factory.mktemp("experts")
    write_tiny_model(directory, TinyModelConfig(), 64)
    dense = json.loads((directory / "config.json").read_text())
    tokens = {name: dense[name] for name in ("vocab_size", "pad_token_id", "eos_token_id")}
    (directory / "config.json").write_text(expert_config(**tokens).to_json_string())
    load_policy(directory, weights=False, seed=0).save_pretrained(directory)
    assert AutoModelForCausalLM.from_pretrained(directory).config.model_type == "qwen3_moe"
    return directory


def steps_of(runs: Path, *overrides: str) -> list[dict[str, Any]]:
    words = ["train", RECIPE, f"runs_dir={runs}", "run_id=experts", *SHORT, *overrides]
    command = [sys.executable, "-m", "penstock.cli.main", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=450)
    assert done.returncode == 0, done.stdout + done.stderr
    return jsonl.read(runs / "experts" / "metrics.jsonl")


def test_a_policy_with_experts_trains_with_the_recorded_ones(expert_dir: Path, tmp_path: Path) -> None:
    """The server computes in half precision, so near-ties of its routers fall differently than in the trainer."""
    steps = steps_of(tmp_path, f"model.path={expert_dir}", "model.dtype=bfloat16", *ON_POLICY)
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert all(step["kl_tokens"] > 0 and step["skipped"] == 0 for step in steps)
    assert all(step["tokens_replayed"] == step["kl_tokens"] for step in steps), (
        "all tokens, since all are of one version"
    )
    assert all(0 < step["kl_engine_trainer"] < 0.05 for step in steps)
    logs = "".join(path.read_text() for path in (tmp_path / "experts").glob("logs/*"))
    assert logs and "returns no experts" not in logs and "does nothing" not in logs
