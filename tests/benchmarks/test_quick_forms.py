"""Every benchmark runs in its quick form, and writes the figures that are published of its full one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from report import SPREAD

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
NAMES = sorted(path.stem for path in BENCHMARKS.glob("*.py") if "\nBENCHMARK = " in path.read_text())
NO_ENVIRONMENT = 69
"""Exit code of `vs_trl` where TRL cannot be installed."""
UNCONFIRMED = {"learner_shapes"}
"""Benchmarks that mean something only on an accelerator, and that none has run yet."""
LONGEST = {
    *("ablation", "adaptive", "cluster", "dashboard", "environments", "faults", "learner", "learner_scale"),
    *("learner_shapes", "mixed_versions", "quickstart", "rollout_http", "speculation", "staleness", "tuning"),
    *("vs_trl", "weights"),
}
"""The quick forms of these benchmarks are too long for CI: each takes between one and four minutes."""
LIMIT_S = 900.0
"""For one that takes two minutes on two quiet cores."""


def published(name: str) -> Iterator[dict[str, Any]]:
    """Yield the results that need no accelerator."""
    for file in (BENCHMARKS / "results").glob("*.json"):
        result = json.loads(file.read_text())
        if result["name"] == name and "accelerator" not in result["machine"]:
            yield result


def names(figures: dict[str, Any]) -> set[str]:
    return {name for name in figures if not name.endswith(SPREAD)}


def run_quick(name: str, directory: Path) -> subprocess.CompletedProcess[str]:
    """Run it in `directory`, which gets `figures.json`; end all that it started."""
    words = [sys.executable, str(BENCHMARKS / f"{name}.py"), "--quick", "--json", "figures.json"]
    log = directory / "log"
    with log.open("w") as written:
        process = subprocess.Popen(words, cwd=directory, stdout=written, stderr=written, start_new_session=True)
    try:
        code = process.wait(timeout=LIMIT_S)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return subprocess.CompletedProcess(words, code, stdout=log.read_text())


@pytest.mark.integration
@pytest.mark.long
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.longest] if name in LONGEST else []) for name in NAMES]
)
def test_the_quick_form_writes_all_figures_that_are_published(name: str, tmp_path: Path) -> None:
    done = run_quick(name, tmp_path)
    if name == "vs_trl" and done.returncode == NO_ENVIRONMENT:
        pytest.skip("TRL cannot be installed here")
    assert done.returncode == 0, done.stdout[-4000:]
    found = json.loads((tmp_path / "figures.json").read_text())
    assert found["name"] == name
    for result in published(name):
        assert names(result["figures"]) <= names(found["figures"]), "a published figure that no run writes any more"


def test_every_published_result_has_its_benchmark() -> None:
    results = (json.loads(file.read_text()) for file in (BENCHMARKS / "results").glob("*.json"))
    names_of_results = {result["name"] for result in results}
    assert names_of_results <= set(NAMES) <= names_of_results | UNCONFIRMED
