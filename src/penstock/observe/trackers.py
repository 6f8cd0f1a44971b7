"""Copies of the metrics for TensorBoard and Weights & Biases. Both write into the run's directory; the user decides
whether to upload them (`wandb sync`). `penstock train` has checked that their packages are installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.config.imports import away_from_foreign

WANDB = ("wandb/settings", ".wandb/settings")
"""Settings that wandb reads below the working directory."""


class TensorBoard:
    """Writes event files under `tensorboard/`."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboardX import SummaryWriter

        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Writes an offline run under `wandb/`."""

    def __init__(self, run_dir: Path, config: Mapping[str, Any]) -> None:
        with away_from_foreign(*WANDB):
            run, self._teardown = _begin_wandb(run_dir, config)
        self._run: Any = run

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Return once everything is on disk and the package's own process has ended."""
        self._run.finish()
        self._teardown()


def _begin_wandb(run_dir: Path, config: Mapping[str, Any]) -> tuple[Any, Callable[[], None]]:
    """Return a new offline run, and the function that ends the package's own process."""
    import wandb

    quiet = wandb.Settings(silent=True, console="off", save_code=False, disable_git=True)
    place: dict[str, Any] = {"project": "penstock", "name": run_dir.name, "dir": str(run_dir)}
    return wandb.init(**place, config=dict(config), mode="offline", settings=quiet), wandb.teardown


Tracker = TensorBoard | Wandb


def open_trackers(names: Sequence[str], run_dir: Path, config: Mapping[str, Any]) -> list[Tracker]:
    """Return the trackers that `observe.trackers` names."""
    return [TensorBoard(run_dir) if name == "tensorboard" else Wandb(run_dir, config) for name in dict.fromkeys(names)]
