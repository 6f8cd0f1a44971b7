"""What a program in a sandbox can get at: every escape with every backend, as root and as an ordinary user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import escapes
import ordinary_user
import pytest

pytestmark = [pytest.mark.integration, pytest.mark.xdist_group("sandbox_escapes")]

COMMAND = [sys.executable, str(Path(__file__).with_name("escapes.py"))]
LIMIT_S = 240.0
CANNOT = "no sandbox can confine programs here"


@cache
def results(backend: str, user: str) -> dict[str, list[str]] | str:
    """Return what every program gained, or why there is no result."""
    if user == "root" and os.getuid() != 0:
        return "the tests do not run as root"
    if user == "root":
        ran = subprocess.run([*COMMAND, backend], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    else:
        ran = ordinary_user.run([*COMMAND, backend], timeout=LIMIT_S)
    if ran.returncode:
        return ran.stderr.splitlines()[-1]
    found: dict[str, list[str]] = json.loads(ran.stdout)
    return found


@pytest.mark.parametrize(
    ("backend", "user"),
    [
        ("bubblewrap", "root"),
        pytest.param("bubblewrap", "ordinary", marks=pytest.mark.long),
        pytest.param("namespaces", "root", marks=pytest.mark.long),
        pytest.param("namespaces", "ordinary", marks=pytest.mark.long),
    ],
)
@pytest.mark.parametrize("name", escapes.ESCAPES)
def test_nothing_is_gained(name: str, backend: str, user: str) -> None:
    found = results(backend, user)
    if isinstance(found, str):
        assert CANNOT in found or "as root" in found or "unshare" in found, found
        pytest.skip(found)
    assert found[name] == []


@pytest.mark.long
@pytest.mark.parametrize("name", escapes.HARMLESS)
def test_without_a_sandbox_the_same_program_gains_something(name: str) -> None:
    found = results("none", "ordinary")
    if isinstance(found, str):
        assert "unshare" in found, found
        pytest.skip(found)
    assert found[name] != []


def test_there_are_enough_of_them() -> None:
    assert len(escapes.ESCAPES) >= 40
