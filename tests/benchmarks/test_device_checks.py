"""The script that runs all checks on a device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import device_checks
import pytest
from device_checks import MARKED, MOST, SLICES, TESTS, Slice, figures_of, run, run_all

SCRIPT = Path(device_checks.__file__)


def said(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *words], capture_output=True, text=True, check=False)


def test_without_a_device_it_says_so() -> None:
    done = said("--device", "cpu")
    assert done.returncode == 1 and "--dry-run plays all on the CPU" in done.stderr


@pytest.mark.integration
@pytest.mark.long
def test_it_runs_all_files_with_cases_for_a_device() -> None:
    words = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "cuda", "-p", "no:cacheprovider", str(TESTS)]
    found = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    files = {line.partition("::")[0].partition(": ")[0] for line in found.splitlines() if ".py" in line}
    assert {Path(file).name for file in files} == {Path(file).name for file in MARKED}


def test_figures_are_compared_with_what_is_wanted(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("some words before\nshare      0.2\npeak 55\n")
    wanted = {"share": (0.35, MOST), "peak": (0.0, 60.0), "absent": (1.0, 2.0)}
    assert figures_of(Slice(name="x", wanted=wanted), log) == [
        "share 0.2, wanted at least 0.35: MISSED",
        "peak 55, wanted between 0 and 60",
        "absent nan, wanted between 1 and 2: MISSED",
    ]


def test_a_slice_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_checks, "LIMIT_S", 0.2)
    assert run([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "log") is None


@pytest.mark.integration
@pytest.mark.long
def test_slices_leave_results_and_are_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = [each for each in SLICES if each.name == "shapes-0.6b"]
    for _ in range(2):
        assert run_all(chosen, "cpu", "card", results=tmp_path, logs=tmp_path / "logs", quick=True) == 0
    printed = capsys.readouterr().out
    assert "ended well after" in printed and "done already at this commit" in printed
    assert json.loads((tmp_path / "learner_shapes-0.6b-card.json").read_text())["name"] == "learner_shapes"


def test_a_failure_is_counted_and_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_checks, "words_of", lambda *_, **__: [sys.executable, "-c", "raise SystemExit('why')"])
    for _ in range(2):
        assert run_all([Slice(name="tests")], "cpu", "card", results=tmp_path, logs=tmp_path, quick=True) == 1
    assert capsys.readouterr().out.count("why") == 2
