"""The memory plan of a run, for processes without torch: another process plans."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from penstock.config import Config, ConfigError
from penstock.model.files import ModelError

PLAN_S = 600.0
"""Time limit in seconds for planning: torch may have to load from a slow disk."""


def memory_plan(config: Config, memory: int | None = None) -> dict[str, Any]:
    """Return the plan, see `processes/memory_plan.py`. `memory`: bytes of a device, if not those of this machine's.
    Raises `ConfigError` for a wrong configuration, and `ModelError` for a model that cannot be counted."""
    words = [] if memory is None else ["--memory", str(memory)]
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "penstock.processes.memory_plan", *words],
            input=config.model_dump_json(),
            capture_output=True,
            text=True,
            timeout=PLAN_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ModelError(f"no memory plan was made within {PLAN_S:g} s: is the disk with torch very slow?") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        if done.returncode == ConfigError.exit_code:
            raise ConfigError(reason)
        raise ModelError(f"model.path: the memory of {config.model.path} cannot be planned: {reason}")
    plan: dict[str, Any] = json.loads(done.stdout)
    return plan
