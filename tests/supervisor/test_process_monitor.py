from __future__ import annotations

import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stand_in_run import spec

from penstock.config import SupervisorConfig
from penstock.ports.process_launcher import ProcessSpec
from penstock.supervisor import process_monitor
from penstock.supervisor.failure import Exit
from penstock.supervisor.process_monitor import ProcessMonitor
from penstock.supervisor.restart import Action, Decision
from penstock.supervisor.run_journal import RunJournal


class Full:
    """A launcher that has no room."""

    async def spawn(self, spec: ProcessSpec) -> Any:
        raise OSError(f"no room for {spec.name}")


async def test_a_failure_dates_from_when_it_began_however_often_it_is_tried_to_mend_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_monitor, "time", SimpleNamespace(time=count(1.0).__next__, monotonic=time.monotonic))
    losses: list[Exit] = []

    async def judge(monitor: ProcessMonitor, loss: Exit) -> Decision:
        losses.append(loss)
        return Decision(action=Action.RESTART if len(losses) < 3 else Action.FAIL, reason="")

    monitor = ProcessMonitor(
        spec("env-0", "steady"),
        settings=SupervisorConfig(),
        launcher=Full(),  # type: ignore[arg-type]
        journal=RunJournal.create(tmp_path, run_id="r", runtime_dir=tmp_path / "runtime"),
        log=tmp_path / "env-0.log",
    )
    await monitor.keep(judge)
    assert [(loss.time, loss.reason) for loss in losses] == [(1.0, "cannot start: no room for env-0")] * 3
