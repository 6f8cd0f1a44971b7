"""The example of a driver with roles of its own: wherever they are, it finds the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration

DISTIL = Path(__file__).parent.parent.parent / "examples" / "worker_groups" / "distil.py"
LAST = "step 40: mean squared error 1.08e-09"


def distilled(*words: str) -> list[str]:
    """The lines that it prints."""
    run = subprocess.run([sys.executable, DISTIL, *words], capture_output=True, text=True, timeout=120, check=True)
    return run.stdout.splitlines()


@pytest.mark.long
@pytest.mark.parametrize("words", [[], ["--split"], ["--ranks", "4"]], ids=" ".join)
def test_wherever_roles_are_a_student_learns_what_its_teacher_knows(words: list[str]) -> None:
    assert distilled(*words)[-1] == LAST


@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("words", [["--ranks", "3"], ["--split"]], ids=" ".join)
def test_and_so_it_does_on_a_cluster(words: list[str]) -> None:
    pytest.importorskip("ray")
    from ray_machines import machines

    assert distilled(*words, "--cluster", machines().address, "--private")[-1] == LAST
