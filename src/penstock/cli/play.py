"""`penstock eval` and `penstock rollout`: a fixed policy runs the held-out tasks, or a whole dataset.

Both are runs like any other, with their own directory; they are supervised, watched, stopped and resumed in the same
way. Exit codes are those of `train`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from penstock.cli.refusal import Refused, refusing
from penstock.cli.runs import find_directory
from penstock.cli.train import begin
from penstock.config import Config, load_config
from penstock.model.files import has_weights
from penstock.system import CHECKPOINTS
from penstock.trainer.checkpoint import newest

AS_IT_IS = ("pipeline=eval", "run_id=null", "model.warm_start.steps=0")
"""Settings of an evaluation. They override the file, which is written for training; the command line overrides them."""
PLAYS_ONLY = ("pipeline=rollout", "run_id=null", "scheduler.group_filter=[]")
"""Settings of a rollout, with the same precedence: every task is run, and no group is dropped."""


@refusing
def evaluate(
    path: Path, overrides: Sequence[str], *, checkpoint: str | None, runs_dir: Path, results: Path | None
) -> int:
    """Run the validation tasks, also write the results to `results`; return the exit code. Raises `Refused`."""
    if results is not None and not results.absolute().parent.is_dir():
        raise Refused(f"--json: there is no directory {results.parent}")
    return begin("eval", path, [*AS_IT_IS, *overrides, *policy_word(checkpoint, runs_dir)], results=results)


@refusing
def rollout(
    path: Path, overrides: Sequence[str], *, checkpoint: str | None, runs_dir: Path, detach: bool, dry_run: bool
) -> int:
    """Run every task and dump the trajectories; return the exit code."""
    held_out = no_held_out_tasks(load_config(path, [*PLAYS_ONLY, *overrides]))
    words = [*PLAYS_ONLY, *held_out, *overrides, *policy_word(checkpoint, runs_dir)]
    return begin("rollout", path, words, detach=detach, dry_run=dry_run)


def no_held_out_tasks(config: Config) -> list[str]:
    """Return settings with which `config` holds out no task, in any environment of its mixture."""
    entries = {tag: {"data": {"eval_tasks": 0}} for tag in config.env.mixture}
    mixture = [f"env.mixture={json.dumps(entries)}"] if entries else []
    return ["data.eval_tasks=0", "validation.tasks=0", *mixture]


def policy_word(checkpoint: str | None, runs_dir: Path) -> list[str]:
    """Return the setting for the model directory or run that `--checkpoint` names; empty if `--checkpoint` is not
    given. Raises `Refused`."""
    if checkpoint is None:
        return []
    directory = Path(checkpoint).absolute()
    if has_weights(directory):
        return [f"model.path={directory}"]
    run_dir = find_directory(runs_dir, checkpoint)
    found = newest(run_dir / CHECKPOINTS)
    if found is None:
        raise Refused(f"--checkpoint {checkpoint}: run {run_dir.name} has no complete checkpoint: see `penstock runs`")
    return [f"model.path={Path(found.directory).absolute()}"]
