"""The memory plan of a run: as a table, and as a refusal of runs that cannot fit. Torch-free: another process plans."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from penstock.cli.refusal import Refused
from penstock.config import Config, ConfigError
from penstock.model.files import ModelError, num_parameters
from penstock.observe.tables import listing, open_console
from penstock.processes import plan_request

GIB = 2**30
LARGE = 50_000_000
"""Parameters from which on a model may not fit."""


class NotPlanned(Refused):
    """The memory of a model cannot be counted."""


def memory_plan(config: Config, memory_gib: float | None = None) -> dict[str, Any]:
    """Return the plan, see `processes/memory_plan.py`. `memory_gib`: memory of a device, if not those of this machine.
    Raises `Refused` for a wrong configuration, and `NotPlanned` for a model that cannot be counted."""
    try:
        return plan_request.memory_plan(config, None if memory_gib is None else int(memory_gib * GIB))
    except ConfigError as error:
        raise Refused(str(error)) from None
    except ModelError as error:
        raise NotPlanned(str(error)) from None


def table(plan: Mapping[str, Any]) -> Table:
    """Return a table with what each process needs."""
    lines = listing(["process", "for"], ["GiB"])
    for need in plan["needs"]:
        who = need["who"] if need["count"] == 1 else f"{need['who']}, each of {need['count']}"
        for number, (name, size) in enumerate(need["parts"].items()):
            lines.add_row(who if number == 0 else "", name, _gib(size))
        reserve = need["total"] - sum(need["parts"].values())
        lines.add_row("", "libraries, fragments", _gib(reserve))
        lines.add_row("", "together", _gib(need["total"]), end_section=True)
    return lines


def conclusion(plan: Mapping[str, Any]) -> str:
    """Return a sentence that says whether the run fits, and what would fit."""
    sizes = f"{_gib(plan['largest'])} GiB of the {_gib(plan['capacity'])} GiB of a device ({plan['device']})"
    if plan["fits"]:
        words = " ".join(plan["engine_words"])
        beside = f" The engine shares the device of the trainer, and starts with {words}." if words else ""
        return f"It fits: at most {sizes}.{beside}"
    words = " ".join(plan["remedies"])
    remedy = f"This would fit: {words}" if words else "No setting was found that would fit"
    return f"It does not fit: it needs {sizes}. {remedy}."


def is_large(config: Config) -> bool:
    """Return whether the model is so large that its memory matters on some machine."""
    directory = Path(config.model.path)
    return config.model.path != "tiny" and directory.is_dir() and num_parameters(directory) >= LARGE


def show_memory(config: Config) -> None:
    """Print the plan of a large model to stderr."""
    if (plan := _plan_of_large(config)) is not None:
        open_console(stderr=True).print(table(plan))
        print(conclusion(plan), file=sys.stderr)


def check_memory(config: Config) -> dict[str, Any] | None:
    """Check that the run's tensors fit into the memory of this machine's devices. Return the plan of a large model, or
    None for a small one. Raises `Refused`."""
    if config.cluster.address is not None or (plan := _plan_of_large(config)) is None:
        return None
    if plan["tensors"] > plan["capacity"]:
        largest = max(plan["needs"], key=lambda need: need["total"])
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in largest["parts"].items())
        raise Refused(f"{largest['who']} ({parts} GiB): {conclusion(plan)} `penstock plan` shows all of it")
    return plan


def _plan_of_large(config: Config) -> dict[str, Any] | None:
    """Return the plan of a large model. None for a small one, and, with a warning, for one that cannot be counted."""
    if not config.policy.has_tokens or not is_large(config):
        return None
    try:
        return memory_plan(config)
    except NotPlanned as error:
        print(f"warning: {error}", file=sys.stderr)
        return None


def _gib(size: float) -> str:
    return f"{size / GIB:,.2f}" if size < 10 * GIB else f"{size / GIB:,.1f}"
