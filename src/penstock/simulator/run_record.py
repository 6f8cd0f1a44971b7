"""A simulated run as a run directory, which `penstock status` and the dashboard open: settings, metrics, events,
timeline and state. It has no texts, no logs and no checkpoints. Its times begin when the simulation began, and go on as
the virtual clock does."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from shutil import rmtree
from typing import Any

import yaml

from penstock.config import Config, ConfigError
from penstock.observe import jsonl
from penstock.observe.recorder import Recorder
from penstock.observe.summary import PLAYED, PREDICTION
from penstock.own_files import check_own_directory
from penstock.ports.observer import BusySpan, Observer, Scheduling
from penstock.simulator.activity import Activity
from penstock.simulator.fleet import Fleet
from penstock.simulator.trainer_model import TRAINER, TrainerModel
from penstock.supervisor.procfs import identify
from penstock.supervisor.run_directory import CONFIG, make_run_dir, publishable
from penstock.supervisor.run_journal import FORMAT, holds_run, read_state
from penstock.supervisor.states import RunState
from penstock.types import LearnerState

WRITTEN = ("metrics.jsonl", "events.jsonl", "timeline.jsonl", PLAYED, PREDICTION, "state.json")
INDEX = ".dashboard"
"""Folder with the dashboard's indexes of these files."""


class RunRecord(Recorder):
    """The recorder of a simulated run. It logs no events, so that alarms stay out of the command's output. It also
    gives each step to `observer`."""

    def __init__(
        self, run_dir: Path, *, begun: float, fleet: Fleet, trainer: TrainerModel, num_servers: int, observer: Observer
    ) -> None:
        """`begun`: the time of the virtual clock's start, in seconds since the epoch."""
        self._clock = asyncio.get_running_loop().time
        super().__init__(run_dir, now=lambda: begun + self._clock(), steady=self._clock)
        self._begun, self._trainer, self._observer = begun, trainer, observer
        self._servers = [f"rollout-{number}" for number in range(num_servers)]
        self._spans: list[BusySpan] = []
        self._activity = fleet.activity = Activity(self._servers, self._add_span)
        trainer.add_span = self._add_span
        self._told_busy_s = [0.0] * (num_servers + 1)
        self._told_tokens = [0] * num_servers
        for name in self._servers:
            self.joined(name, "rollout")
        self.joined(TRAINER, "trainer")

    def event(self, event: str, **details: Any) -> None:
        if event != "checkpoint":  # nothing is saved
            self._events.write({"time": self._now(), "event": event, **details})

    def stepped(self, step: int, learner: LearnerState, ledger: Mapping[str, int], scheduling: Scheduling) -> None:
        self._beat()
        super().stepped(step, learner, ledger, scheduling)
        self._observer.stepped(step, learner, ledger, scheduling)

    def close(self) -> None:
        """Write the rest, and close the files. Call it on the virtual clock."""
        self._activity.end(self._clock())
        self._beat()
        super().close()

    def _beat(self) -> None:
        """Record what servers and learner have done since the last call."""
        now, spans = self._clock(), self._spans
        self._spans = []
        for number, name in enumerate(self._servers):
            busy_s, num_tokens = self._activity.busy_s(number, now), self._activity.num_tokens[number]
            tokens = num_tokens - self._told_tokens[number]
            self._told_tokens[number] = num_tokens
            self._tell(name, number, busy_s, {"tokens": tokens}, spans if number == 0 else ())
        self._tell(TRAINER, len(self._servers), self._trainer.busy_s, {}, ())

    def _tell(
        self, name: str, place: int, busy_s: float, counters: Mapping[str, float], spans: list[BusySpan] | tuple[()]
    ) -> None:
        since, self._told_busy_s[place] = self._told_busy_s[place], busy_s
        self.heartbeat(name, cpu_s=0.0, busy_s=busy_s - since, counters=counters, spans=spans)

    def _add_span(self, process: str, kind: Any, start: float, end: float, version: int) -> None:
        span = {"start": self._begun + start, "end": self._begun + end}
        self._spans.append(BusySpan(process=process, kind=kind, policy_version=version, **span))


def begin(run_dir: Path, config: Config, *, strategy: str, fitted_to: str | None) -> float:
    """Make the directory of a simulated run, and return when it began, in seconds since the epoch. An earlier simulated
    run there is replaced. `fitted_to`: the id of the run that the models were fitted to. Raises `ConfigError` if the
    directory holds a run that was not simulated, and `Foreign` if it is not ours."""
    if holds_run(run_dir) and not (read_state(run_dir) or {}).get("simulated"):
        raise ConfigError(f"{run_dir} holds a run that was not simulated: give another run_id, or move it away")
    make_run_dir(run_dir, config)
    check_own_directory(run_dir)
    for name in WRITTEN:
        (run_dir / name).unlink(missing_ok=True)
    with suppress(FileNotFoundError):
        rmtree(run_dir / INDEX)
    text = yaml.safe_dump(publishable(config.model_copy(update={"run_id": None})), sort_keys=False)
    (run_dir / CONFIG).write_text(text)
    owner, begun = identify(os.getpid()), time.time()
    state = {
        "format": FORMAT,
        "run_id": run_dir.name,
        "simulated": {"strategy": strategy, "fitted_to": fitted_to},
        "lives": 1,
        "lived_s": 0.0,
        "status": RunState.RUNNING.value,
        "error": None,
        "supervisor": {"host": os.uname().nodename} | (asdict(owner) if owner else {"pid": os.getpid()}),
        "started": begun,
        "born": begun,
        "ended": None,
        "processes": {},
        "leftovers": [],
    }
    jsonl.write_json(run_dir / "state.json", state)
    return begun


def end(run_dir: Path, *, simulated_s: float, error: str | None = None) -> None:
    """Record that a simulated run has ended after `simulated_s` on its clock; `error`: why it could not go on."""
    state = read_state(run_dir) or {}
    status = RunState.COMPLETED if error is None else RunState.FAILED
    ended = state["started"] + simulated_s
    jsonl.write_json(run_dir / "state.json", {**state, "status": status.value, "ended": ended, "error": error})
