"""Imports go downwards only, and the light processes stay light."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "penstock"

LAYERS = [
    {
        "types",
        "samples",
        "routed_experts",
        "seeding",
        "version_history",
        "ports",
        "deadline",
        "ticks",
        "stacks",
        "alarms",
        "own_files",
        "redaction",
        "sendable",
        "row_settings",
        "config",
    },
    {"sandbox"},
    {"runtime"},
    {"scheduler", "control", "groups", "observe", "model"},
    {"data", "envs", "rollout", "store", "weights", "trainer"},
    {"compat", "supervisor"},
    {"cluster"},
    {"system"},
    {"recovery"},
    {"validation"},
    {"loop"},
    {"simulator"},
    {"processes"},
    {"dashboard"},
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


def upward_imports(path: Path) -> list[str]:
    """Return the imports of a module that do not go downwards, one sentence each."""
    box = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if box == "__init__":
        return []
    if box not in LEVEL:
        return [f"{box} is on no layer: add it to LAYERS and to ARCHITECTURE.md"]
    others = sorted(imports(path) - {box, "__version__"})
    above = [other for other in others if not (LEVEL[other] < LEVEL[box] or LEVEL[box] == LEVEL[other] == 0)]
    return [f"{path.relative_to(SOURCE)} imports {other}, which is beside or above {box}" for other in above]


def test_imports_go_downwards() -> None:
    offenders = [offender for path in MODULES for offender in upward_imports(path)]
    assert not offenders, "\n".join(offenders)


def imported_files(path: Path) -> set[str]:
    """Modules of penstock that a file imports, wherever in it and for whatever purpose; `__init__` files left out."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_no_files_import_each_other_in_a_circle() -> None:
    files = {module_name(path): path for path in MODULES if path.name != "__init__.py"}
    graph = {name: imported_files(path) & (files.keys() - {name}) for name, path in files.items()}
    order = list(TopologicalSorter(graph).static_order())  # CycleError names the files of a circle
    assert len(order) == len(files)


def module_name(path: Path) -> str:
    return ".".join(("penstock", *path.relative_to(SOURCE).with_suffix("").parts))


def test_ray_is_imported_in_cluster_only() -> None:
    users = {
        path.relative_to(SOURCE).parts[0]
        for path in MODULES
        if re.search(r"(?m)^\s*(import|from) ray\b", path.read_text())
    }
    assert users == {"cluster"}


LIGHT = [
    "penstock.cli.main",
    "penstock.cli.status",
    "penstock.cli.doctor",
    "penstock.cli.dashboard",
    "penstock.cli.attach",
    "penstock.supervisor.supervisor",
    "penstock.processes.controller",
    "penstock.processes.env",
    "penstock.processes.foreign_server",
    "penstock.loop",
    "penstock.simulator.prediction",
    "penstock.rollout.client",
    "penstock.compat.gateway",
    "penstock.processes.atropos",
    "penstock.dashboard.trajectory_pages",
]
"""What processes without a GPU import."""
HEAVY = ["torch", "transformers", "ray"]


def test_light_processes_never_import_torch() -> None:
    """Import the light modules one after the other: the first that brings in a heavy one is named."""
    code = (
        "import importlib, json, sys\n"
        "light, heavy = map(json.loads, sys.argv[1:])\n"
        "for module in light:\n"
        "    importlib.import_module(module)\n"
        "    found = [name for name in heavy if name in sys.modules]\n"
        "    if found: sys.exit(f'{module} imports {found}')\n"
    )
    words = [sys.executable, "-c", code, json.dumps(LIGHT), json.dumps(HEAVY)]
    result = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr


def test_the_janitor_needs_the_standard_library_only() -> None:
    code = f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r}); import penstock.supervisor.janitor"
    result = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_no_two_files_have_the_same_name() -> None:
    """A name says what the file is, so that a search finds it."""
    found = Counter(path.name for path in SOURCE.rglob("*.py") if path.name not in ("__init__.py", "main.py"))
    assert [name for name, count in found.items() if count > 1] == []
