"""The directories of a run: the run directory, which stays, and the runtime directory, which is removed at the end.

A run has one supervisor at a time. It may have several in sequence; each begins another life of the run.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from penstock.config import Config, load_config
from penstock.config.lineage import changes, check_lineage, lineage
from penstock.data.identity import check_identities, identities
from penstock.observe import jsonl
from penstock.observe.view import Plan, RunView
from penstock.own_files import own_directory
from penstock.redaction import redacted
from penstock.supervisor.ownership import owning
from penstock.supervisor.run_journal import FORMAT, RunJournal, holds_run, living_owner, read_state, unreadable
from penstock.supervisor.runtime import remove_orphans_of, runtime_path
from penstock.supervisor.states import RunState

CONFIG = "config.yaml"
MODES = {"private": 0o700, "group": 0o750, "everyone": 0o755}
"""Mode of the run directory by the setting `share`. What it holds is as readable as the umask says."""
LINEAGE = "lineage.json"
"""File with the settings that must not change during the run, and the identities of its data."""
DATASETS = "datasets"
"""Key of the data's identities in that file."""
JANITOR_S = 15.0
"""Wait for ownership: the janitor of a killed supervisor owns the run for a moment."""


class RunRefused(RuntimeError):
    """The run cannot begin or continue."""

    self_explanatory = True


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A run that this process owns, before its processes are started."""

    run_dir: Path
    runtime_dir: Path
    config: Config
    journal: RunJournal


def new_run_id() -> str:
    """Return a run id of date and time, with random digits that separate two runs of the same second."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def tracker_identity(config: Config, run_id: str) -> dict[str, str]:
    """Return project, name and id of a new run in the trackers. The id is unique, so that a run that is begun again
    under the name of a removed one does not continue it."""
    name = config.observe.tracker_name or run_id
    return {"project": config.observe.tracker_project, "name": name, "id": f"{name}-{secrets.token_hex(4)}"}


def existing_parent(directory: Path) -> Path:
    """Return `directory` if it exists, else its nearest existing parent."""
    directory = directory.absolute()
    return next(path for path in (directory, *directory.parents) if path.is_dir())


def publishable(config: Config) -> dict[str, Any]:
    """Return the configuration as plain values, without its secrets."""
    return dict(redacted(config.model_dump(mode="json", exclude={"rollout": {"api_key", "admin_api_key"}})))


def make_run_dir(run_dir: Path, config: Config) -> None:
    """Make the directory of a run, unless it is there. Raises `Foreign` if the directory that is there is not ours."""
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with suppress(FileExistsError):
        run_dir.mkdir(mode=MODES[config.share])
    with own_directory(run_dir) as directory:
        (directory / "logs").mkdir(exist_ok=True)


@contextmanager
def written_by_us_only() -> Iterator[None]:
    """Let no other user write to the files that this process and its children make during the body."""
    umask = os.umask(0o022)
    os.umask(umask | 0o022)
    try:
        yield
    finally:
        os.umask(umask)


@contextmanager
def open_run(config: Config) -> Iterator[OpenRun]:
    """Create the directory of a new run and own the run during the body. Raises `RunRefused`, `Owned`,
    `Foreign`."""
    run_id = config.run_id or new_run_id()
    config = config.model_copy(update={"run_id": run_id})
    run_dir = Path(config.runs_dir).absolute() / run_id
    with written_by_us_only():
        make_run_dir(run_dir, config)
    with owning(run_dir), written_by_us_only():
        if (run_dir / "state.json").exists():
            raise RunRefused(f"run {run_id} exists already in {run_dir}: `penstock resume {run_id}` continues it")
        if holds_run(run_dir):
            raise RunRefused(f"{run_dir} holds a run without its state.json: choose another run_id, or move it away")
        begun_with = lineage(config) | {DATASETS: identities(config)}
        _write_config(config, run_dir)
        jsonl.write_json(run_dir / LINEAGE, begun_with)
        runtime_dir = runtime_path(run_id)
        journal = RunJournal.create(run_dir, run_id=run_id, runtime_dir=runtime_dir)
        journal.keep(tracking=tracker_identity(config, run_id))
        yield OpenRun(run_dir=run_dir, runtime_dir=runtime_dir, config=config, journal=journal)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """How a run continues."""

    config: Config
    changed: str
    """Text about the settings that differ from the previous life."""
    is_complete: bool
    """The run has nothing left to do."""


def plan_resumption(run_dir: Path, overrides: Sequence[str]) -> Resumption:
    """Check whether and how the run in `run_dir` can continue. Change nothing. Raises `RunRefused`, `ConfigError`."""
    state = read_state(run_dir)
    if state is None:
        raise RunRefused(unreadable(run_dir))
    if state.get("simulated"):
        raise RunRefused(f"run {run_dir.name} was simulated and cannot be resumed: run `penstock simulate` again")
    if state.get("format") != FORMAT:
        raise RunRefused(
            f"run {run_dir.name} has format {state.get('format', 0)}, and this version of penstock reads only format "
            f"{FORMAT}: resume the run with the version that began it"
        )
    before = load_config(run_dir / CONFIG)
    config = load_config(run_dir / CONFIG, overrides)
    begun_with = _read_lineage(run_dir)
    begun_with.pop(DATASETS, None)
    check_lineage(begun_with, config, before=before)
    saved = _last_step_saved(run_dir)
    if config.trainer.steps < saved:
        raise RunRefused(
            f"trainer.steps is {config.trainer.steps}, and run {run_dir.name} has a checkpoint of step {saved}: "
            f"give it {saved} at least, or begin a new run"
        )
    if config.pipeline == "rollout" and _num_tasks(config) < _num_tasks(before):
        raise RunRefused(
            f"synthesis.tasks is {config.synthesis.tasks}, and run {run_dir.name} began with {before.synthesis.tasks} "
            "(-1: all): set at least as many, or begin a new run"
        )
    return Resumption(
        config=config,
        changed=", ".join(f"{name} from {old} to {new}" for name, (old, new) in changes(before, config).items()),
        is_complete=state["status"] == RunState.COMPLETED and not _goes_further(before, config),
    )


def check_data(run_dir: Path, config: Config) -> None:
    """Check that the data are those with which the run began; read all of them. Raises `ConfigError` if not."""
    check_identities(_read_lineage(run_dir).get(DATASETS, {}), config)


def check_unsupervised(run_dir: Path) -> None:
    """Check that no process supervises the run. Raises `RunRefused`, which names the process."""
    if supervisor := _supervisor_of(run_dir):
        name = run_dir.name
        raise RunRefused(f"run {name} is running, supervised by {supervisor}: `penstock stop {name}` ends it")


@contextmanager
def reopen_run(run_dir: Path, overrides: Sequence[str]) -> Iterator[OpenRun]:
    """Begin another life of a run and own the run during the body. The run, or at least its supervisor, must have
    ended. Raises `RunRefused`, `ConfigError`, `Owned`, `Foreign`."""
    patience_s = JANITOR_S if _supervisor_of(run_dir) is None else 0.0
    with owning(run_dir, within_s=patience_s) as directory, written_by_us_only():
        resumption = plan_resumption(run_dir, overrides)
        journal = RunJournal.load(run_dir)
        if left := remove_orphans_of(run_dir):
            raise RunRefused(
                f"run {journal.run_id} has leftovers of an earlier life that cannot be removed: {', '.join(left)}: "
                "remove them, and resume again"
            )
        if resumption.config.share != load_config(run_dir / CONFIG).share:
            directory.chmod(MODES[resumption.config.share])
        _write_config(resumption.config, run_dir)
        runtime_dir = runtime_path(journal.run_id)
        reason = f"resumed with {resumption.changed}" if resumption.changed else "resumed"
        journal.begin_again(runtime_dir=runtime_dir, reason=reason)
        journal.keep(tracking=tracker_identity(resumption.config, journal.run_id))
        yield OpenRun(run_dir=run_dir, runtime_dir=runtime_dir, config=resumption.config, journal=journal)


def _supervisor_of(run_dir: Path) -> str | None:
    """Return text about the process that wrote the state, if it is still alive; else None."""
    state = read_state(run_dir) or {}
    owner = living_owner(run_dir, state)
    if owner is None:
        return None
    return f"process {owner.pid}" + ("" if owner.is_here else f" on {state['supervisor'].get('host')}")


def _goes_further(before: Config, after: Config) -> bool:
    """Return whether `after` asks for more training or more tasks than `before`."""
    if after.pipeline == "eval":
        return False
    if after.pipeline == "rollout":
        return _num_tasks(after) > _num_tasks(before)
    old, new = before.trainer, after.trainer
    return new.steps > old.steps or (new.total_samples or math.inf) > (old.total_samples or math.inf)


def _num_tasks(config: Config) -> float:
    """Return how many tasks the `rollout` pipeline runs; infinite for the setting -1 (all tasks)."""
    return math.inf if config.synthesis.tasks < 0 else config.synthesis.tasks


def _last_step_saved(run_dir: Path) -> int:
    """Return the step of the checkpoint from which the run continues; 0 if there is none."""
    view = RunView(plan=Plan(num_steps=0))
    for event in jsonl.read(run_dir / "events.jsonl"):
        view.see_event(event)
    return max(view.checkpoints, default=0)


def _read_lineage(run_dir: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((run_dir / LINEAGE).read_text()))
    except (OSError, ValueError) as error:
        raise RunRefused(
            f"{run_dir / LINEAGE} cannot be read ({error}), so the settings that must not change are unknown: "
            "restore it from a copy, or begin a new run"
        ) from None


def _write_config(config: Config, run_dir: Path) -> None:
    temporary = run_dir / f".{CONFIG}"
    temporary.write_text(yaml.safe_dump(publishable(config), sort_keys=False))
    temporary.replace(run_dir / CONFIG)
