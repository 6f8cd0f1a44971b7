"""`penstock rollout`: a policy that does not change plays a whole dataset; its trajectories are kept and dumped.

What it starts is supervised, watched, stopped and resumed like any run. Exit codes are those of `train`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.cli.refusal import refuse
from penstock.cli.runs import find
from penstock.cli.train import begin
from penstock.model.files import has_weights
from penstock.system import CHECKPOINTS
from penstock.trainer.checkpoint import newest

PLAYS_ONLY = ("pipeline=rollout", "data.eval_tasks=0", "scheduler.filter_equal_rewards=false")
"""Over what the file says, and under what is said on the command line: every task is played, nothing is dropped."""


def rollout(
    path: Path, overrides: Sequence[str], *, checkpoint: str | None, runs_dir: Path, detach: bool, dry_run: bool
) -> int:
    """Returns the exit code."""
    words = [*PLAYS_ONLY, *overrides]
    if checkpoint is not None:
        model = model_of(checkpoint, runs_dir)
        if model is None:
            return refuse(f"--checkpoint {checkpoint}: the run has no checkpoint that is whole", 1)
        words.append(f"model.path={model}")
    return begin("rollout", path, words, detach=detach, dry_run=dry_run)


def model_of(checkpoint: str, runs_dir: Path) -> Path | None:
    """A directory with weights, or the newest whole checkpoint of a run, by its id or directory."""
    directory = Path(checkpoint).absolute()
    if has_weights(directory):
        return directory
    found = newest(find(runs_dir, checkpoint) / CHECKPOINTS)
    return found.path if found is not None else None
