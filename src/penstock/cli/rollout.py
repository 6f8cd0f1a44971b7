"""`penstock rollout`: a policy that does not change plays a whole dataset; its trajectories are kept and dumped.

What it starts is supervised, watched, stopped and resumed like any run. Exit codes are those of `train`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from penstock.cli.policy import policy_word
from penstock.cli.preflight import Refused
from penstock.cli.refusal import refuse
from penstock.cli.train import begin
from penstock.config import ConfigError, load_config
from penstock.supervisor.child import CONFIG_ERROR

PLAYS_ONLY = ("pipeline=rollout", "run_id=null", "data.eval_tasks=0", "validation.tasks=0", "scheduler.group_filter=[]")
"""Over what the file says, and under what is said on the command line: every task is played, nothing is dropped."""


def rollout(
    path: Path, overrides: Sequence[str], *, checkpoint: str | None, runs_dir: Path, detach: bool, dry_run: bool
) -> int:
    """Returns the exit code."""
    try:
        words = [*PLAYS_ONLY, *of_mixture(path, overrides), *overrides, *policy_word(checkpoint, runs_dir)]
    except ConfigError as error:
        return refuse(error, CONFIG_ERROR)
    except Refused as error:
        return refuse(error, 1)
    return begin("rollout", path, words, detach=detach, dry_run=dry_run)


def of_mixture(path: Path, overrides: Sequence[str]) -> list[str]:
    """The same of the entries of a mixture, which have settings of their own. Raises `ConfigError`."""
    entries = {tag: {"data": {"eval_tasks": 0}} for tag in load_config(path, [*PLAYS_ONLY, *overrides]).env.mixture}
    return [f"env.mixture={json.dumps(entries)}"] if entries else []
