"""Which policy `--checkpoint` names: a model directory, or a run."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.preflight import Refused
from penstock.cli.runs import find_directory
from penstock.model.files import has_weights
from penstock.system import CHECKPOINTS
from penstock.trainer.checkpoint import newest


def policy_word(checkpoint: str | None, runs_dir: Path) -> list[str]:
    """The setting that says so; none where the configuration does. Raises `Refused`."""
    return [] if checkpoint is None else [f"model.path={model_in(checkpoint, runs_dir)}"]


def model_in(checkpoint: str, runs_dir: Path) -> Path:
    """A directory with weights: itself, or the newest whole checkpoint of a run, by its id or directory. Raises
    `Refused`."""
    directory = Path(checkpoint).absolute()
    if has_weights(directory):
        return directory
    run_dir = find_directory(runs_dir, checkpoint)
    found = newest(run_dir / CHECKPOINTS)
    if found is None:
        raise Refused(
            f"--checkpoint {checkpoint}: run {run_dir.name} has no checkpoint that is whole: see `penstock runs`"
        )
    return found.path.absolute()
