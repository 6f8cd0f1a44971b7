"""The recipe `spell_backward` with a real vLLM as the engine."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from spread_run import Machines, SpreadRun
from test_several_machines import LOOPBACK, STEPS, lived
from test_training_run import EXAMPLES, SHORT, leftovers, lines, only_run, train

from penstock.config import load_config
from penstock.supervisor.supervisor import Outcome

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


def begun(runs: Path, *overrides: str) -> Path:
    """Return the last checkpoint of a short run of the quickstart."""
    result = train("quickstart", runs, *SETTINGS, "trainer.steps=2", *overrides, timeout_s=600)
    assert result.returncode == 0, result.stdout + result.stderr
    return only_run(runs) / "checkpoints" / "step_2"


def test_it_reaches_what_our_own_engine_reaches(tmp_path: Path) -> None:
    """Answers outlive updates, and say which weights made each token."""
    start = begun(tmp_path / "begun", "model.warm_start.steps=400")
    same = (f"model.path={start}", "model.warm_start.steps=0")
    ours = summary("quickstart", tmp_path / "ours", *same)
    theirs = summary("vllm", tmp_path / "theirs", f"rollout.python={PYTHON}", "rollout.update_mode=in_place", *same)
    for found in (ours, theirs):
        assert found["eval_after"] > found["eval_before"] + 0.03
        assert found["kl_engine_trainer"] < 1e-4
    # 256 answers each: the standard error of a mean is about 0.02.
    assert theirs["eval_after"] == pytest.approx(ours["eval_after"], abs=0.08)
    run_dir = only_run(tmp_path / "theirs")
    assert max(line["staleness_max"] for line in lines(run_dir / "metrics.jsonl")) >= 1
    assert leftovers(run_dir) == []


async def test_on_another_machine_it_reads_the_file_that_came_there(tmp_path: Path) -> None:
    """The weights come while it generates, and no folder is shared for them."""
    example = load_config(EXAMPLES / "vllm" / "run.yaml")
    rollout = example.rollout.model_dump(exclude_unset=True) | {"python": str(PYTHON), "servers": 1}
    model = {"dtype": "float32", "tiny": example.model.tiny.model_dump(exclude_unset=True)}
    run = SpreadRun(tmp_path, Machines(LOOPBACK), steps=STEPS, model=model, rollout=rollout, ready_timeout_s=300.0)

    async def nothing(_: asyncio.Task[Outcome]) -> None:
        """Nothing is lost."""

    await lived(run, nothing, limit_s=560)
    steps = lines(run.run_dir / "metrics.jsonl")
    assert all(step["servers_by_transport"] == {"collective": 1} for step in steps)
    gaps = [step["kl_engine_trainer"] for step in steps if step["kl_engine_trainer"] is not None]
    assert max(gaps) < 1e-4, "labels name the weights that sampled"
    assert not list((run.run_dir / "weights").glob("*"))


def with_adapters(runs: Path, *overrides: str) -> dict[str, Any]:
    """Return the summary of a run that begins with a checkpoint, which vLLM loads by itself, and trains adapters."""
    start = begun(runs.with_name("begun"), *SHORT)
    return summary(
        "vllm",
        runs,
        *(f"rollout.python={PYTHON}", f"model.path={start}", "model.warm_start.steps=0"),
        *("trainer.lora={rank: 4, alpha: 8}", "trainer.learning_rate=5e-3", "trainer.warmup_steps=0"),
        *("trainer.groups_per_step=8", "trainer.canaries.parity_every=1", "data.eval_tasks=32"),
        *overrides,
    )


def test_it_serves_the_adapters_that_the_trainer_publishes(tmp_path: Path) -> None:
    """At the seventh update it unloads old adapters."""
    found = with_adapters(tmp_path / "adapters", "trainer.steps=14")
    run_dir = only_run(tmp_path / "adapters")
    steps = lines(run_dir / "metrics.jsonl")
    assert found["kl_engine_trainer"] < 1e-4 and max(step["parity_gap_max"] for step in steps) < 1e-2
    assert sum(step["grad_norm"] > 0 for step in steps) > 10 and sum(step["kl_tokens"] > 0 for step in steps) > 1
    log = (run_dir / "logs" / "rollout-0.log").read_text()
    assert "Loaded new LoRA adapter: name 'policy-14'" in log and "Removed LoRA adapter: name 'policy-5'" in log
    assert leftovers(run_dir) == []


def test_it_takes_turns_with_the_trainer_and_gets_adapters_alone(tmp_path: Path) -> None:
    """On a CPU its sleep frees nothing."""
    turns = "scheduler={mode: colocated, max_staleness: 0}"
    found = with_adapters(tmp_path / "turns", "trainer.steps=5", turns)
    run_dir = only_run(tmp_path / "turns")
    assert found["kl_engine_trainer"] < 1e-4 and found["staleness_max"] == 0
    log = (run_dir / "logs" / "rollout-0.log").read_text()
    assert all(f"Loaded new LoRA adapter: name 'policy-{version}'" in log for version in range(6))
    assert all(f"Removed LoRA adapter: name 'policy-{version}'" in log for version in range(4))
    assert leftovers(run_dir) == []
