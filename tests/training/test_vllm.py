"""The recipe `spell_backward` with a real vLLM as the engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_training_run import EXAMPLES, leftovers, lines, only_run, train

ENVIRONMENT = EXAMPLES.parent / ".venv-vllm"
PYTHON = ENVIRONMENT / "bin" / "python"

pytestmark = [
    pytest.mark.integration,
    pytest.mark.vllm,
    pytest.mark.skipif(not (ENVIRONMENT / ".installed").exists(), reason="there is no .venv-vllm: make vllm-env"),
]

SETTINGS = ["trainer.steps=60", "observe.progress=false", "observe.plots=false"]


def summary(example: str, runs: Path, *overrides: str) -> dict[str, Any]:
    result = train(example, runs, *SETTINGS, *overrides, timeout_s=600)
    assert result.returncode == 0, result.stdout + result.stderr
    found: dict[str, Any] = json.loads((only_run(runs) / "summary.json").read_text())
    return found


def test_it_reaches_what_our_own_engine_reaches(tmp_path: Path) -> None:
    """Answers outlive updates, and say which weights made each token."""
    ours = summary("quickstart", tmp_path / "ours")
    theirs = summary("vllm", tmp_path / "theirs", f"rollout.python={PYTHON}", "rollout.update_mode=in_place")
    for found in (ours, theirs):
        assert found["eval_after"] > found["eval_before"] + 0.03
        assert found["kl_engine_trainer"] < 1e-4
    # 256 answers each: the standard error of a mean is about 0.02.
    assert theirs["eval_after"] == pytest.approx(ours["eval_after"], abs=0.08)
    run_dir = only_run(tmp_path / "theirs")
    assert max(line["staleness_max"] for line in lines(run_dir / "metrics.jsonl")) >= 1
    assert leftovers(run_dir) == []
