"""Imports go downwards only, and the light processes stay light."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "penstock"

LAYERS = [
    {"types", "ports", "deadline", "stacks", "alarms", "config"},
    {"scheduler", "control", "groups", "observe", "model"},
    {"data", "envs", "rollout", "store", "weights", "trainer"},
    {"compat", "supervisor"},
    {"cluster"},
    {"system"},
    {"recovery"},
    {"validation"},
    {"loop"},
    {"processes", "simulator"},
    {"cli"},
]
LEVEL = {box: level for level, boxes in enumerate(LAYERS) for box in boxes}

MODULES = sorted(SOURCE.rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Penstock's boxes that a module imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        found |= {name.split(".")[1] for name in names if name.startswith("penstock.")}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_go_downwards(path: Path) -> None:
    box = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if box == "__init__":
        return
    assert box in LEVEL, f"{box} is on no layer: add it to LAYERS and to ARCHITECTURE.md"
    for other in imports(path) - {box, "__version__"}:
        below = LEVEL[other] < LEVEL[box] or LEVEL[box] == LEVEL[other] == 0
        assert below, f"{path.relative_to(SOURCE)} imports {other}, which is beside or above {box}"


def test_ray_is_imported_in_cluster_only() -> None:
    users = {
        path.relative_to(SOURCE).parts[0]
        for path in MODULES
        if re.search(r"(?m)^\s*(import|from) ray\b", path.read_text())
    }
    assert users == {"cluster"}


@pytest.mark.parametrize(
    "module",
    [
        "penstock.cli.main",
        "penstock.cli.status",
        "penstock.cli.doctor",
        "penstock.cli.attach",
        "penstock.processes.attaching",
        "penstock.supervisor.supervisor",
        "penstock.processes.controller",
        "penstock.processes.env",
        "penstock.processes.ranks",
        "penstock.loop",
        "penstock.simulator.parts",
        "penstock.rollout.client",
        "penstock.compat.gateway",
        "penstock.processes.atropos",
    ],
)
def test_light_processes_never_import_torch(module: str) -> None:
    heavy = ("torch", "transformers", "ray")
    code = f"import sys, {module}; print([m for m in {heavy!r} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout.strip() == "[]"
