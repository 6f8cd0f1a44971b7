"""The two examples that run programs of the policy can train on a machine without bubblewrap."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.sandbox import why_not

pytestmark = [pytest.mark.integration, pytest.mark.long]

EXAMPLES = Path(__file__).parents[2] / "examples"
SHORT = (
    "data.eval_tasks=8",
    "model.warm_start.steps=2",
    "trainer.steps=2",
    "trainer.groups_per_step=2",
    "scheduler.group_filter=[]",  # a policy that has learned little may do alike in all episodes of a group
    "supervisor.max_restarts=0",
)


@pytest.mark.parametrize("example", ["shell_sandbox", "python_tool"])
def test_an_example_trains_with_plain_namespaces(example: str, tmp_path: Path) -> None:
    if (reason := why_not("namespaces")) is not None:
        pytest.skip(reason)
    programs, runs = tmp_path / "programs", tmp_path / "runs"
    programs.mkdir()
    (programs / "bwrap").write_text("#!/bin/sh\nexit 1\n")
    (programs / "bwrap").chmod(0o755)
    words = ["train", str(EXAMPLES / example / "run.yaml"), f"runs_dir={runs}", "env.sandbox=namespaces", *SHORT]
    ran = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *words],
        env={**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=400, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    (run_dir,) = (path for path in runs.iterdir() if path.is_dir())
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["sandbox"], summary["steps"], summary["groups_failed"]) == ("namespaces", 2, 0)
