"""The trackers behind one port. Only the process of a tracker uses this module.

Every tracker continues the one run that `Tracking` names. The x of a point is the policy version, which only grows and
is never used again: no tracker has to take a point back. A run without a trainer counts ended groups instead.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.config.imports import away_from_foreign
from penstock.config.trajectory_dump import KEPT_TOKENS

SETTINGS_FILES = ("wandb/settings", ".wandb/settings", ".env")
"""Settings that libraries read below the working directory."""
MLFLOW_TAG = "penstock.id"
"""Tag of the run in MLflow, which chooses the ids of runs itself."""
MLFLOW_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ALLOW_FILE_STORE": "true",  # a store that needs no database driver
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # the controller tries again later
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
}
MLFLOW_PARAMS, MLFLOW_METRICS = 100, 1000
"""Most settings and most numbers that MLflow takes in one request."""
MLFLOW_VALUE = 500
"""Most characters of a setting in MLflow."""


class Tracking(msgspec.Struct, frozen=True, kw_only=True):
    """The tracker run that belongs to a run of Penstock."""

    tracker: str
    run_dir: str
    project: str
    name: str
    id: str
    """Unique over all runs, and the same in every life of the run."""
    uploads: bool
    config: Mapping[str, Any]
    """The settings of the run without secrets."""


class Tracker:
    """A tracker with the run open. Any method may raise what the library raises. A method that a subclass leaves out
    does nothing."""

    settle_s: float = 0.0
    """Seconds after which logged points survive the death of the process. Infinite: only `close` makes them last."""

    def log(self, x: int, at: float, numbers: Mapping[str, float]) -> None:
        """Add a point. `at`: its time in seconds since the epoch. `x` never falls; it may be that of the last point."""

    def show(self, x: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Add trajectories, as rows of a dump with decoded messages."""

    def flush(self) -> None:
        """Write the points that were added."""

    def close(self) -> None:
        """Return once everything is written and the library's own processes have ended."""


class TensorBoard(Tracker):
    """Writes event files under `tensorboard/`. A later life of the run adds a file."""

    def __init__(self, tracking: Tracking) -> None:
        from tensorboardX import SummaryWriter

        self._writer: Any = SummaryWriter(str(Path(tracking.run_dir) / "tensorboard"))

    def log(self, x: int, at: float, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, x, walltime=at)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class Wandb(Tracker):
    """Writes an offline run under `wandb/`, or uploads it. A later life of an offline run adds a directory with the
    same id, and `wandb sync` joins them. Its file is written in blocks, so a death may lose the newest points."""

    settle_s = math.inf

    def __init__(self, tracking: Tracking) -> None:
        import wandb

        quiet = wandb.Settings(silent=True, console="off", save_code=False, disable_git=True)
        self._teardown = wandb.teardown
        self._run: Any = wandb.init(
            project=tracking.project,
            name=tracking.name,
            id=tracking.id,
            resume="allow",
            dir=tracking.run_dir,
            config=dict(tracking.config),
            mode="online" if tracking.uploads else "offline",
            settings=quiet,
        )

    def log(self, x: int, at: float, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=x)

    def close(self) -> None:
        self._run.finish()
        self._teardown()


class Trackio(Tracker):
    """Writes a database under `trackio/`, or sends to the Space or server that trackio's own variables name. Shows
    trajectories as traces."""

    settle_s = 5.0

    def __init__(self, tracking: Tracking) -> None:
        if not tracking.uploads:
            os.environ["TRACKIO_DIR"] = str(Path(tracking.run_dir) / "trackio")
            for name in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"):
                os.environ.pop(name, None)
        import trackio

        self._trace = trackio.Trace
        # Trackio finds a run by its name, so the name must be unique.
        self._run: Any = trackio.init(
            project=tracking.project,
            name=tracking.id,
            resume="allow",
            config=dict(tracking.config),
            embed=False,
            auto_log_cpu=False,
            auto_log_gpu=False,
        )

    def log(self, x: int, at: float, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=x)

    def show(self, x: int, rows: Sequence[Mapping[str, Any]]) -> None:
        for row in rows:
            facts = {name: value for name, value in row.items() if name not in ("messages", "branches", KEPT_TOKENS)}
            self._run.log({"trajectory": self._trace(messages=row["messages"], metadata=facts)}, step=x)

    def close(self) -> None:
        self._run.finish()


class MLflow(Tracker):
    """Writes a file store under `mlflow/`, or sends to the server that MLFLOW_TRACKING_URI names."""

    def __init__(self, tracking: Tracking) -> None:
        for name, value in MLFLOW_ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        if not tracking.uploads:
            os.environ["MLFLOW_TRACKING_URI"] = (Path(tracking.run_dir) / "mlflow").as_uri()
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._client = Metric, MlflowClient()
        self._waiting: list[Any] = []
        found = self._client.get_experiment_by_name(tracking.project)
        experiment = found.experiment_id if found else self._client.create_experiment(tracking.project)
        runs = self._client.search_runs([experiment], filter_string=f"tags.`{MLFLOW_TAG}` = '{tracking.id}'")
        if runs:
            self._id = runs[0].info.run_id
            self._client.set_terminated(self._id, "RUNNING")
            return
        run = self._client.create_run(experiment, run_name=tracking.name, tags={MLFLOW_TAG: tracking.id})
        self._id = run.info.run_id
        params = [Param(name, str(value)[:MLFLOW_VALUE]) for name, value in _flat(tracking.config)]
        for first in range(0, len(params), MLFLOW_PARAMS):
            self._client.log_batch(self._id, params=params[first : first + MLFLOW_PARAMS])

    def log(self, x: int, at: float, numbers: Mapping[str, float]) -> None:
        self._waiting += [self._metric(name, value, int(at * 1000), x) for name, value in numbers.items()]

    def flush(self) -> None:
        while self._waiting:
            self._client.log_batch(self._id, metrics=self._waiting[:MLFLOW_METRICS])
            del self._waiting[:MLFLOW_METRICS]

    def close(self) -> None:
        self._client.set_terminated(self._id, "FINISHED")


class SwanLab(Tracker):
    """Writes an offline run under `swanlab/`, or uploads it. A later life of an offline run adds a directory, and
    `swanlab sync --id` joins them. Its file is written in blocks, so a death may lose the newest points."""

    settle_s = math.inf

    def __init__(self, tracking: Tracking) -> None:
        os.environ.setdefault("SWANLAB_INTERACTIVE", "false")
        import swanlab

        directory = Path(tracking.run_dir) / "swanlab"
        directory.mkdir(exist_ok=True)
        self._finish = swanlab.finish
        self._run: Any = swanlab.init(
            project=tracking.project,
            name=tracking.name,
            id=tracking.id,
            resume="allow",
            log_dir=str(directory),
            config=dict(tracking.config),
            mode="online" if tracking.uploads else "offline",
        )

    def log(self, x: int, at: float, numbers: Mapping[str, float]) -> None:
        self._run.log(dict(numbers), step=x)

    def close(self) -> None:
        self._finish()


TRACKERS: Mapping[str, Callable[[Tracking], Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": Wandb,
    "trackio": Trackio,
    "mlflow": MLflow,
    "swanlab": SwanLab,
}


def open_tracker(tracking: Tracking) -> Tracker:
    """Return the tracker, with a new run, or the one of an earlier life."""
    with away_from_foreign(*SETTINGS_FILES):
        return TRACKERS[tracking.tracker](tracking)


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found += _flat(value, f"{name}.") if isinstance(value, Mapping) and value else [(name, value)]
    return found
