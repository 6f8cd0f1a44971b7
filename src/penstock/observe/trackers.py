"""The same numbers where people already look: TensorBoard, Weights & Biases. Both write into the run's directory; what
is sent anywhere is for the user to send (`wandb sync`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from penstock.config import ConfigError

TrackerName = Literal["tensorboard", "wandb"]


class Tracker(Protocol):
    """Takes the numbers of every optimizer step."""

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Of one step."""
        ...

    def close(self) -> None:
        """Nothing more will come."""
        ...


class TensorBoard:
    """Event files under `tensorboard/`."""

    def __init__(self, run_dir: Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise ConfigError(_missing("tensorboard", "tensorboardX")) from None
        self._writer: Any = SummaryWriter(str(run_dir / "tensorboard"))

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """An offline run under `wandb/`."""

    def __init__(self, run_dir: Path, settings: Mapping[str, Any]) -> None:
        try:
            import wandb
        except ImportError:
            raise ConfigError(_missing("wandb", "wandb")) from None
        self._teardown = wandb.teardown
        self._run: Any = wandb.init(
            project="penstock",
            name=run_dir.name,
            dir=str(run_dir),
            config=dict(settings),
            mode="offline",
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=step)

    def close(self) -> None:
        """Returns once everything is on disk: the package's own process ends, too."""
        self._run.finish()
        self._teardown()


def open_trackers(names: Sequence[TrackerName], run_dir: Path, settings: Mapping[str, Any]) -> list[Tracker]:
    """Those that `observe.trackers` names. Raises `ConfigError` naming the package that is missing."""
    return [
        TensorBoard(run_dir) if name == "tensorboard" else Wandb(run_dir, settings) for name in dict.fromkeys(names)
    ]


def _missing(name: str, package: str) -> str:
    return f"observe.trackers {name} needs the package {package}: pip install 'penstock[{name}]'"
