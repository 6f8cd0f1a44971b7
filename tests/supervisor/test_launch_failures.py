"""What a supervisor does when processes cannot even be started: a launcher that refuses."""

from __future__ import annotations

import asyncio
import errno
from pathlib import Path

import pytest
from stand_in_run import spec

from penstock.config import SupervisorConfig
from penstock.ports.process_launcher import End, Look, ProcessSpec
from penstock.supervisor.run_journal import RunJournal, read_state
from penstock.supervisor.states import RunState
from penstock.supervisor.supervisor import Outcome, Supervisor


class Started:
    """A process that runs until it is signalled, or told to die."""

    def __init__(self, spec: ProcessSpec) -> None:
        self.spec, self.pid = spec, 2**22 + 1
        self.facts = {"pid": self.pid}
        self.end: End | None = None
        self.ended = asyncio.Event()

    def exit(self, returncode: int) -> None:
        self.end = End(returncode=returncode)
        self.ended.set()

    async def probe(self) -> str | None:
        return None

    async def look(self) -> Look:
        return Look()

    async def signal(self, signum: int) -> None:
        self.exit(-signum)

    async def wait(self) -> End:
        await self.ended.wait()
        assert self.end is not None
        return self.end


class Refusing:
    """`ports.Launcher` that fails as often as it is told to, from the `first` attempt on."""

    def __init__(self, *, first: int, num_refusals: int) -> None:
        self._refused = range(first, first + num_refusals)
        self.num_attempts = 0
        self.latest: Started | None = None

    async def spawn(self, spec: ProcessSpec) -> Started:
        self.num_attempts += 1
        if self.num_attempts in self._refused:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        self.latest = Started(spec)
        return self.latest

    async def sweep(self) -> list[str]:
        return []


def supervise(run_dir: Path, launcher: Refusing) -> Supervisor:
    return Supervisor(
        run_dir=run_dir,
        stages=[[spec("env-0", "steady")]],
        launcher=launcher,
        journal=RunJournal.create(run_dir, run_id="r", runtime_dir=run_dir / "runtime"),
        settings=SupervisorConfig(backoff_s=0.0, max_restarts=3),
    )


async def until_running(launcher: Refusing, *, attempts: int) -> Started:
    async with asyncio.timeout(60.0):
        while launcher.num_attempts < attempts or launcher.latest is None:  # noqa: ASYNC110
            await asyncio.sleep(0)
    return launcher.latest


async def test_a_first_start_that_fails_fails_the_run(tmp_path: Path) -> None:
    outcome = await supervise(tmp_path, Refusing(first=1, num_refusals=1)).run()
    assert outcome.status is RunState.FAILED
    assert outcome.message.startswith(
        "env-0 failed while starting (cannot start: [Errno 11] Resource temporarily unavailable); env-0 was never ready"
    )


@pytest.mark.parametrize(("num_refusals", "status"), [(2, RunState.STOPPED), (3, RunState.FAILED)])
async def test_a_restart_that_fails_is_one_of_the_budget(tmp_path: Path, num_refusals: int, status: RunState) -> None:
    launcher = Refusing(first=2, num_refusals=num_refusals)
    supervisor = supervise(tmp_path, launcher)
    running: asyncio.Task[Outcome] = asyncio.create_task(supervisor.run())
    process = await until_running(launcher, attempts=1)
    while (read_state(tmp_path) or {})["status"] != "running":  # noqa: ASYNC110
        await asyncio.sleep(0)
    process.exit(1)
    if status is RunState.STOPPED:
        await until_running(launcher, attempts=2 + num_refusals)
        supervisor.request_stop("asked to")
    outcome = await running
    assert outcome.status is status
    assert launcher.num_attempts == min(2 + num_refusals, 4)
    if status is RunState.FAILED:
        assert "cannot start" in outcome.message and "3 of 3 restarts" in outcome.message
