"""`penstock plan` without accelerators, and the refusal of runs that cannot fit."""

from __future__ import annotations

from pathlib import Path

import pytest
from made_runs import penstock

from penstock.cli import memory_check
from penstock.cli.memory_check import check_memory
from penstock.cli.refusal import Refused
from penstock.config import Config, load_config

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "memory"


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(EXAMPLE.parent.parent)
    return EXAMPLE / "run.yaml"


def test_the_example_fits(run: Path) -> None:
    result = penstock("plan", run, "--memory", "80")
    assert result.exit_code == 0, result.stderr
    assert "actor, each of 4" in result.stdout and "rollout server, each of 4" in result.stdout
    assert "a pass of 32,768 tokens" in result.stdout and "It fits: at most" in result.stdout


def test_what_does_not_fit_names_what_would(run: Path) -> None:
    result = penstock("plan", run, "--memory", "40")
    assert result.exit_code == 1
    assert "It does not fit" in result.stdout and "This would fit: " in result.stdout
    words = result.stdout.partition("This would fit: ")[2].strip().rstrip(".").split()
    assert penstock("plan", run, "--memory", "40", *words).exit_code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory", "0"], "above zero"),
        (["--price", "2"], "with --accelerators"),
        (["--memory", "80", "--accelerators", "4"], "either --memory or --accelerators"),
        (["model.path=/nowhere"], "/nowhere does not exist"),
    ],
)
def test_nonsense_is_refused(run: Path, words: list[str], message: str) -> None:
    result = penstock("plan", run, *words)
    assert result.exit_code != 0
    assert message in " ".join((result.stdout + result.stderr).replace("│", " ").split())


def test_a_run_that_cannot_fit_is_refused_with_numbers(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(run, [])
    monkeypatch.setattr(memory_check, "num_parameters", lambda directory: 8 * 10**9)
    small = {"fits": False, "tensors": 9, "largest": 10, "capacity": 5, "device": "cpu, 5 B", "remedies": ["a.b=1"]}
    needs = [{"who": "actor", "count": 1, "total": 10, "parts": {"weights": 9}}]
    monkeypatch.setattr(memory_check, "memory_plan", lambda config: small | {"needs": needs})
    with pytest.raises(Refused, match=r"This would fit: a\.b=1"):
        check_memory(config)
    monkeypatch.setattr(memory_check, "memory_plan", lambda config: small | {"needs": needs, "tensors": 5})
    check_memory(config)  # it may fit


def test_small_models_are_not_planned() -> None:
    assert not memory_check.is_large(Config())
