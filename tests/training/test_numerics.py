"""The seeded losses of a fixed recipe: a refactoring leaves them as they are.

Within one machine they are the same bits each time, because one slot generates one answer at a time and whole groups
end one after the other. `python test_numerics.py DIRECTORY` prints them exactly, for a comparison before and after a
change. CPUs of another kind round otherwise, and from the second step on sample other tokens: there only the first loss
can be compared.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.integration, pytest.mark.long]

HERE = Path(__file__).parent
RECIPE = HERE / "recipes" / "spell_backward.yaml"
EXPECTED = HERE / "losses.json"
NUM_STEPS = 10
SETTINGS = [
    "scheduler.mode=synchronous",
    "scheduler.max_staleness=0",
    "scheduler.max_running=8",
    "rollout.slots=1",
    "data.eval_tasks=1",
    "observe.progress=false",
    "observe.plots=false",
]
LIMIT_S = 900


def torch_version() -> str:
    return torch.__version__.partition("+")[0]


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def measured(runs: Path, num_steps: int = NUM_STEPS) -> dict[str, Any]:
    """Train the recipe in `runs`; return the losses of its first steps, and the version of torch."""
    words = ["train", str(RECIPE), f"runs_dir={runs}", "run_id=numerics", *SETTINGS, f"trainer.steps={num_steps}"]
    result = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    steps = [json.loads(line) for line in (runs / "numerics" / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == list(range(1, num_steps + 1))
    return {"torch": torch_version(), "cpu": cpu_model(), "losses": [step["loss"] for step in steps]}


def test_the_losses_of_the_first_steps_are_those_recorded(tmp_path: Path) -> None:
    expected = json.loads(EXPECTED.read_text())
    if expected["torch"] != torch_version():
        pytest.skip(f"the losses were recorded with torch {expected['torch']}")
    num_comparable = NUM_STEPS if expected["cpu"] == cpu_model() else 1
    found = measured(tmp_path, num_comparable)["losses"]
    assert found == pytest.approx(expected["losses"][:num_comparable], rel=2e-6)


if __name__ == "__main__":
    found = measured(Path(sys.argv[1]).absolute())
    json.dump(found | {"hex": [loss.hex() for loss in found["losses"]]}, sys.stdout, indent=1)
