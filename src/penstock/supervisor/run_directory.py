"""Where a run keeps its things: the run directory that stays, the runtime directory that goes.

A run has one supervisor at a time, and may have several after each other: each begins another life of the run.
"""

from __future__ import annotations

import json
import math
import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from penstock.config import Config, load_config
from penstock.config.lineage import changes, check_lineage, lineage
from penstock.data.identity import check_identities, identities
from penstock.observe import jsonl
from penstock.observe.view import Plan, RunView
from penstock.supervisor import orphans
from penstock.supervisor.ownership import owning
from penstock.supervisor.record import FORMAT, Record, holds_run, is_supervised, owner_of, read_state, unreadable
from penstock.supervisor.runtime import runtime_path
from penstock.supervisor.states import RunState

CONFIG = "config.yaml"
LINEAGE = "lineage.json"
"""What the run was begun with, of the settings that must not change, and on which data."""
DATASETS = "datasets"
"""Key in there of the data's identities."""
JANITOR_S = 15.0
"""The janitor of a supervisor that was killed owns the run for a moment."""


class RunExists(RuntimeError):
    """The run id is taken."""


class NotResumable(RuntimeError):
    """The run cannot go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenRun:
    """A run owned by this process, before its processes are started."""

    run_id: str
    run_dir: Path
    runtime_dir: Path
    config: Config
    record: Record


def new_run_id() -> str:
    """The date and time, and enough chance to tell two runs of one second apart."""
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def existing_parent(directory: Path) -> Path:
    """Where `directory` is or would be made."""
    directory = directory.absolute()
    return next(path for path in (directory, *directory.parents) if path.is_dir())


def publishable(config: Config) -> dict[str, Any]:
    """The configuration as plain values, without its secrets."""
    return config.model_dump(mode="json", exclude={"rollout": {"api_key", "admin_api_key"}})


@contextmanager
def open_run(config: Config) -> Iterator[OpenRun]:
    """Create the directory of a new run and own it for the length of the body. Raises `RunExists`, `Owned`."""
    run_id = config.run_id or new_run_id()
    config = config.model_copy(update={"run_id": run_id})
    run_dir = Path(config.runs_dir).absolute() / run_id
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    with owning(run_dir):
        if (run_dir / "state.json").exists():
            raise RunExists(f"run {run_id} exists already in {run_dir}: `penstock resume {run_id}` continues it")
        if holds_run(run_dir):
            raise RunExists(
                f"directory {run_dir} holds a run without its state.json: choose another run_id, or move it away"
            )
        begun_with = lineage(config) | {DATASETS: identities(config)}
        _write_config(config, run_dir)
        jsonl.write_json(run_dir / LINEAGE, begun_with)
        runtime_dir = runtime_path(run_id)
        record = Record.create(run_dir, run_id=run_id, runtime_dir=runtime_dir)
        yield OpenRun(run_id=run_id, run_dir=run_dir, runtime_dir=runtime_dir, config=config, record=record)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumption:
    """How a run is to go on."""

    config: Config
    changed: str
    """Settings that differ from those it had last, for people."""
    is_complete: bool
    """There is nothing left to do."""


def plan_resumption(run_dir: Path, overrides: Sequence[str]) -> Resumption:
    """Look whether and how the run in `run_dir` can go on; changes nothing. Raises `NotResumable`, `ConfigError`."""
    state = read_state(run_dir)
    if state is None:
        raise NotResumable(unreadable(run_dir))
    if state.get("format") != FORMAT:
        raise NotResumable(
            f"run {run_dir.name} is of format {state.get('format', 0)}, and this version of penstock reads format "
            f"{FORMAT}: resume it with the version that began it"
        )
    before = load_config(run_dir / CONFIG)
    config = load_config(run_dir / CONFIG, overrides)
    begun_with = _read_lineage(run_dir)
    begun_with.pop(DATASETS, None)
    check_lineage(begun_with, config)
    saved = _last_step_saved(run_dir)
    if config.trainer.steps < saved:
        raise NotResumable(
            f"trainer.steps is {config.trainer.steps}, and run {run_dir.name} has a checkpoint of step {saved}: "
            f"give it {saved} at least, or begin a new run"
        )
    if config.pipeline == "rollout" and _num_tasks(config) < _num_tasks(before):
        raise NotResumable(
            f"synthesis.tasks is {config.synthesis.tasks}, and run {run_dir.name} had {before.synthesis.tasks} to play "
            "(-1: all): give it as many at least, or begin a new run"
        )
    return Resumption(
        config=config,
        changed=", ".join(f"{name} from {old} to {new}" for name, (old, new) in changes(before, config).items()),
        is_complete=state["status"] == RunState.COMPLETED and not _goes_further(before, config),
    )


def check_data(run_dir: Path, config: Config) -> None:
    """Raises `ConfigError` if the data are not those that the run was begun with. Reads them all."""
    check_identities(_read_lineage(run_dir).get(DATASETS, {}), config)


def check_unsupervised(run_dir: Path) -> None:
    """Raises `NotResumable` naming the process that supervises the run."""
    if supervisor := _supervisor_of(run_dir):
        name = run_dir.name
        raise NotResumable(f"run {name} is running, supervised by {supervisor}: `penstock stop {name}` ends it")


@contextmanager
def reopen_run(run_dir: Path, overrides: Sequence[str]) -> Iterator[OpenRun]:
    """Own a run that has ended, or whose supervisor has, for the length of the body, which is another life of it.
    Raises `NotResumable`, `ConfigError`, `Owned`."""
    with owning(run_dir, within_s=JANITOR_S if _supervisor_of(run_dir) is None else 0.0):
        resumption = plan_resumption(run_dir, overrides)
        record = Record.load(run_dir)
        if left := orphans.remove_of_run(run_dir):
            raise NotResumable(f"what earlier lives of run {record.run_id} left behind resists: {', '.join(left)}")
        _write_config(resumption.config, run_dir)
        runtime_dir = runtime_path(record.run_id)
        reason = f"resumed with {resumption.changed}" if resumption.changed else "resumed"
        record.begin_again(runtime_dir=runtime_dir, reason=reason)
        yield OpenRun(
            run_id=record.run_id, run_dir=run_dir, runtime_dir=runtime_dir, config=resumption.config, record=record
        )


def _supervisor_of(run_dir: Path) -> str | None:
    """The process that wrote the state, if it still lives."""
    state = read_state(run_dir) or {}
    owner = owner_of(state)
    if owner is None or not is_supervised(run_dir, owner):
        return None
    return f"process {owner.pid}" + ("" if owner.is_here else f" on {state['supervisor'].get('host')}")


def _goes_further(before: Config, after: Config) -> bool:
    """Whether `after` asks for more training than `before`, or for more tasks to be played."""
    if after.pipeline == "eval":
        return False
    if after.pipeline == "rollout":
        return _num_tasks(after) > _num_tasks(before)
    old, new = before.trainer, after.trainer
    return new.steps > old.steps or (new.total_samples or math.inf) > (old.total_samples or math.inf)


def _num_tasks(config: Config) -> float:
    """That a rollout is to play; -1 is all there are."""
    return math.inf if config.synthesis.tasks < 0 else config.synthesis.tasks


def _last_step_saved(run_dir: Path) -> int:
    """Of the checkpoint that the run goes on from; 0 if there is none."""
    view = RunView(plan=Plan(num_steps=0))
    for event in jsonl.read(run_dir / "events.jsonl"):
        view.see_event(event)
    return max(view.checkpoints, default=0)


def _read_lineage(run_dir: Path) -> dict[str, Any]:
    try:
        return dict(json.loads((run_dir / LINEAGE).read_text()))
    except (OSError, ValueError) as error:
        raise NotResumable(f"{run_dir / LINEAGE} cannot be read ({error}): nobody knows what the run is") from None


def _write_config(config: Config, run_dir: Path) -> None:
    temporary = run_dir / f".{CONFIG}"
    temporary.write_text(yaml.safe_dump(publishable(config), sort_keys=False))
    temporary.replace(run_dir / CONFIG)
