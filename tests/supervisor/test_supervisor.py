"""Whole lives of runs, on real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stand_in_run import Run, spec

from penstock.config import SupervisorConfig
from penstock.deadline import deadline
from penstock.observe import jsonl
from penstock.supervisor import procfs
from penstock.supervisor.states import RunState

pytestmark = pytest.mark.integration

LIMIT_S = 120.0
"""Of every wait: a busy machine is slow, and no test measures it."""


def state_of(run: Run) -> dict[str, object]:
    return json.loads((run.run_dir / "state.json").read_text())


def path_of(run: Run) -> list[str]:
    return [event["to"] for event in jsonl.read(run.run_dir / "events.jsonl") if event["event"] == "state"]


def last_reason(run: Run) -> str:
    return [event["reason"] for event in jsonl.read(run.run_dir / "events.jsonl") if event["event"] == "state"][-1]


async def until(run: Run, status: str) -> None:
    async with deadline(LIMIT_S, waiter="the test", resource=f"run to be {status}", holder="the supervisor"):
        while not (run.run_dir / "state.json").exists() or state_of(run)["status"] != status:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def until_process(run: Run, name: str, state: str, *, other_than: int = 0) -> None:
    async with deadline(LIMIT_S, waiter="the test", resource=f"{name} to be {state}", holder="the supervisor"):
        while True:
            known = state_of(run)["processes"].get(name, {}) if (run.run_dir / "state.json").exists() else {}
            if known.get("state") == state and known["pid"] != other_than:
                return
            await asyncio.sleep(0.01)


def assert_nothing_left(run: Run) -> None:
    assert run.living() == []
    assert not run.runtime_dir.exists()
    assert state_of(run)["leftovers"] == []


async def test_a_run_starts_stage_by_stage_and_completes(tmp_path: Path) -> None:
    run = Run(
        tmp_path,
        [spec("controller", "completes")],
        [spec("rollout-0", "steady"), spec("trainer-0", "steady")],
        [spec("env-0", "steady")],
    )
    outcome = await run.supervise()
    assert outcome.status is RunState.COMPLETED
    assert path_of(run) == ["starting", "running", "stopping", "completed"]
    steps = [(e["name"], e["state"]) for e in jsonl.read(run.run_dir / "events.jsonl") if e["event"] == "process"]
    assert steps.index(("controller", "ready")) < steps.index(("rollout-0", "starting"))
    assert steps.index(("trainer-0", "starting")) < steps.index(("rollout-0", "ready"))
    assert max(steps.index(("rollout-0", "ready")), steps.index(("trainer-0", "ready"))) < steps.index(
        ("env-0", "starting")
    )
    assert steps.index(("env-0", "exited")) < steps.index(("rollout-0", "stopping"))
    assert_nothing_left(run)


async def test_a_death_while_starting_fails_the_run_with_its_own_message(tmp_path: Path) -> None:
    run = Run(tmp_path, [spec("controller", "steady")], [spec("rollout-0", "steady"), spec("trainer-0", "dies")])
    outcome = await run.supervise()
    assert outcome.status is RunState.FAILED
    assert "trainer-0 failed while starting: there is no model at /nowhere (exit code 1)" in outcome.message
    assert "looking for the model" in outcome.message
    assert state_of(run)["error"] == outcome.message
    assert_nothing_left(run)


async def test_a_spent_budget_fails_the_run_names_the_root_cause_and_quotes_its_log(tmp_path: Path) -> None:
    settings = SupervisorConfig(max_restarts=2, backoff_s=0.01)
    stages = [spec("controller", "steady")], [spec("trainer-0", "crashes")], [spec("env-0", "steady")]
    run = Run(tmp_path, *stages, settings=settings)
    outcome = await run.supervise()
    assert outcome.status is RunState.FAILED
    assert outcome.message.startswith(
        "trainer-0 failed in mid-run: RuntimeError: the tensor has the wrong shape (exit code 1); "
        "trainer-0 has used 2 of 2 restarts within 600 s"
    )
    assert outcome.message.count("Traceback") == 1, "of its three lives, the last one is quoted"
    assert state_of(run)["processes"]["trainer-0"]["state"] == "fatal"
    assert state_of(run)["processes"]["trainer-0"]["restarts"] == 2
    ends = [e["name"] for e in jsonl.read(run.run_dir / "events.jsonl") if e.get("kind") == "ok"]
    assert ends == ["controller", "env-0"], "those who were well could end in order"
    assert_nothing_left(run)


@pytest.mark.parametrize("victim", ["trainer-0", "rank-1"])
async def test_a_restart_set_is_started_again_as_a_whole(tmp_path: Path, victim: str) -> None:
    together = [replace(spec(name, "steady"), restart_set="trainer-0") for name in ("trainer-0", "rank-0", "rank-1")]
    run = Run(
        tmp_path,
        [spec("controller", "obedient")],
        [spec("rollout-0", "serves"), *together],
        settings=SupervisorConfig(backoff_s=0.01, max_restarts=1),
    )
    task = asyncio.create_task(run.supervise())
    await until(run, "running")
    before: Any = state_of(run)["processes"]
    os.kill(before[victim]["pid"], signal.SIGKILL)
    for each in together:
        await until_process(run, each.name, "ready", other_than=before[each.name]["pid"])
    (run.run_dir / "finish").touch()
    assert (await task).status is RunState.COMPLETED
    after: Any = state_of(run)["processes"]
    restarts = {name: process["restarts"] for name, process in after.items()}
    assert restarts == {"controller": 0, "rollout-0": 0, "trainer-0": 1, "rank-0": 1, "rank-1": 1}
    assert_nothing_left(run)


async def test_the_devices_of_ready_processes_are_recorded(tmp_path: Path) -> None:
    settings = SupervisorConfig(heartbeat_s=0.05)
    run = Run(tmp_path, [spec("controller", "obedient"), spec("trainer-0", "on_device")], settings=settings)
    task = asyncio.create_task(run.supervise())
    await until(run, "running")

    def known() -> list[Any]:
        return [facts["devices"] for facts in state_of(run)["processes"].values()]  # type: ignore[attr-defined]

    async with deadline(LIMIT_S, waiter="the test", resource="the devices", holder="the supervisor"):
        while None in known():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert known() == [[], [{"name": "H100", "number": "3", "used_bytes": 2 << 30, "total_bytes": 80 << 30}]]
    (run.run_dir / "finish").touch()
    assert (await task).status is RunState.COMPLETED


@pytest.mark.parametrize("victim", ["controller", "env-0"])
async def test_whoever_is_killed_is_started_again_and_the_run_completes(tmp_path: Path, victim: str) -> None:
    run = Run(
        tmp_path,
        [spec("controller", "obedient")],
        [spec("rollout-0", "serves"), spec("trainer-0", "steady")],
        [spec("env-0", "breeds")],
        settings=SupervisorConfig(backoff_s=0.01),
    )
    task = asyncio.create_task(run.supervise())
    await until(run, "running")
    first = state_of(run)["processes"][victim]["pid"]
    os.kill(first, signal.SIGKILL)
    await until_process(run, victim, "ready", other_than=first)
    (run.run_dir / "finish").touch()
    assert (await task).status is RunState.COMPLETED
    assert path_of(run) == ["starting", "running", "stopping", "completed"]
    states = [e["state"] for e in jsonl.read(run.run_dir / "events.jsonl") if e.get("name") == victim]
    assert states[:7] == ["pending", "starting", "ready", "exited", "backoff", "starting", "ready"]
    log = (run.run_dir / "logs" / f"{victim}.log").read_text()
    assert f"restart 1 of {victim} (killed by SIGKILL)" in log
    assert_nothing_left(run)


async def test_a_stopped_process_is_taken_for_hung_and_started_again(tmp_path: Path) -> None:
    settings = SupervisorConfig(backoff_s=0.5, heartbeat_s=0.05, silent_s=2.0)
    run = Run(tmp_path, [spec("controller", "obedient")], [spec("trainer-0", "steady")], settings=settings)
    task = asyncio.create_task(run.supervise())
    await until(run, "running")
    first = state_of(run)["processes"]["trainer-0"]["pid"]
    os.kill(first, signal.SIGSTOP)
    await until_process(run, "trainer-0", "degraded")
    await until_process(run, "trainer-0", "ready", other_than=first)
    (run.run_dir / "finish").touch()
    assert (await task).status is RunState.COMPLETED
    exits = [e for e in jsonl.read(run.run_dir / "events.jsonl") if e.get("name") == "trainer-0" and e.get("kind")]
    assert [(e["kind"], e["returncode"]) for e in exits] == [("hung", -signal.SIGKILL), ("ok", 0)]
    assert exits[0]["reason"].startswith("hung: no heartbeat for 2.")
    assert_nothing_left(run)


async def test_who_hangs_shows_its_stacks_and_is_started_again(tmp_path: Path) -> None:
    settings = SupervisorConfig(backoff_s=1.0, heartbeat_s=0.05, silent_s=2.0)
    run = Run(tmp_path, [spec("controller", "obedient")], [spec("env-0", "blocks")], settings=settings)
    task = asyncio.create_task(run.supervise())
    await until_process(run, "env-0", "backoff")
    assert state_of(run)["processes"]["env-0"]["reason"].startswith("hung: no heartbeat for")
    await until_process(run, "env-0", "ready")
    log = (run.run_dir / "logs" / "env-0.log").read_text()
    assert "Current thread" in log and "restart 1 of env-0 (hung" in log
    (run.run_dir / "finish").touch()
    assert (await task).status is RunState.COMPLETED


async def test_what_a_dead_process_left_behind_is_gone_before_it_starts_again(tmp_path: Path) -> None:
    settings = SupervisorConfig(backoff_s=0.01)
    run = Run(tmp_path, [spec("controller", "obedient")], [spec("env-0", "breeds")], settings=settings)
    task = asyncio.create_task(run.supervise())
    await until(run, "running")
    first = state_of(run)["processes"]["env-0"]["pid"]
    before = set(run.living())
    os.kill(first, signal.SIGKILL)
    await until_process(run, "env-0", "ready", other_than=first)
    (nameless,) = (before & set(run.living())) - {state_of(run)["processes"]["controller"]["pid"]}
    assert not any(entry.startswith(b"PENSTOCK") for entry in procfs.environment(nameless))
    (run.run_dir / "finish").touch()
    assert (await task).status is RunState.COMPLETED
    assert_nothing_left(run)


async def test_exit_code_0_alone_completes_nothing(tmp_path: Path) -> None:
    settings = SupervisorConfig(max_restarts=0)
    run = Run(tmp_path, [spec("controller", "leaves_early")], [spec("env-0", "steady")], settings=settings)
    outcome = await run.supervise()
    assert outcome.status is RunState.FAILED
    assert "controller ended in mid-run (exit code 0)" in outcome.message


async def test_what_an_earlier_life_of_the_run_completed_does_not_count(tmp_path: Path) -> None:
    settings = SupervisorConfig(max_restarts=0)
    run = Run(tmp_path, [spec("controller", "leaves_early")], settings=settings)
    assert (await run.supervise()).status is RunState.FAILED
    jsonl.append(run.run_dir / "events.jsonl", {"event": "completed", "step": 3})
    assert (await run.supervise()).status is RunState.FAILED


async def test_a_configuration_error_in_mid_run_is_not_retried(tmp_path: Path) -> None:
    run = Run(tmp_path, [spec("controller", "steady")], [spec("env-0", "refuses")])
    outcome = await run.supervise()
    assert outcome.message.startswith("env-0 failed in mid-run: data.path has gone (exit code 2); a restart cannot")
    assert state_of(run)["processes"]["env-0"]["restarts"] == 0


async def test_readiness_in_another_name_is_not_believed(tmp_path: Path) -> None:
    run = Run(tmp_path, [spec("controller", "never_ready", ready_s=3.0)])
    outcome = await run.supervise()
    assert outcome.status is RunState.FAILED
    assert "controller failed while starting (was not ready after 3 s: it is still starting)" in outcome.message
    assert_nothing_left(run)


async def test_a_server_is_ready_once_its_health_check_says_so(tmp_path: Path) -> None:
    run = Run(tmp_path, [spec("controller", "completes")], [spec("rollout-0", "serves")])
    assert (await run.supervise()).status is RunState.COMPLETED
    log = (run.run_dir / "logs" / "rollout-0.log").read_text()
    assert [line.split()[-2] for line in log.splitlines() if "GET /health" in line] == ["503", "503", "200"]


async def test_a_clean_stop_lets_the_controller_end_first(tmp_path: Path) -> None:
    run = Run(tmp_path, [spec("controller", "steady")], [spec("trainer-0", "steady")], [spec("env-0", "steady")])
    task = asyncio.create_task(run.supervise())
    await until(run, "running")
    run.supervisor.request_stop("asked to")
    outcome = await task
    assert outcome.status is RunState.STOPPED
    assert path_of(run)[-2:] == ["stopping", "stopped"]
    ends = [e["name"] for e in jsonl.read(run.run_dir / "events.jsonl") if e.get("state") == "exited"]
    assert ends == ["controller", "env-0", "trainer-0"]
    assert {p["returncode"] for p in state_of(run)["processes"].values()} == {0}
    assert_nothing_left(run)


async def test_a_stop_while_starting_cancels_the_start(tmp_path: Path) -> None:
    run = Run(tmp_path, [spec("controller", "never_ready")], [spec("env-0", "steady")])
    task = asyncio.create_task(run.supervise())
    await until(run, "starting")
    run.supervisor.request_stop("asked to")
    assert (await task).status is RunState.STOPPED
    assert "env-0" not in state_of(run)["processes"]
    assert_nothing_left(run)


async def test_the_second_request_kills_at_once(tmp_path: Path) -> None:
    run = Run(tmp_path, [spec("controller", "stubborn", grace_s=60.0)], [spec("env-0", "stubborn", grace_s=60.0)])
    task = asyncio.create_task(run.supervise())
    await until(run, "running")
    run.supervisor.request_stop("asked to")
    run.supervisor.request_stop("asked to")
    async with deadline(30.0, waiter="the test", resource="the end", holder="the supervisor"):
        assert (await task).status is RunState.STOPPED
    assert_nothing_left(run)


async def test_a_process_that_ignores_the_request_is_killed_after_its_grace(tmp_path: Path) -> None:
    run = Run(tmp_path, [spec("controller", "stubborn", grace_s=0.2)])
    task = asyncio.create_task(run.supervise())
    await until(run, "running")
    run.supervisor.request_stop("asked to")
    assert (await task).status is RunState.STOPPED
    assert state_of(run)["processes"]["controller"]["reason"] == "killed by supervisor"
    assert "the final checkpoint may be missing" in last_reason(run)
    assert_nothing_left(run)


async def test_grandchildren_that_left_their_session_are_swept_away(tmp_path: Path) -> None:
    run = Run(tmp_path, [spec("controller", "completes")], [spec("env-0", "breeds")])
    assert (await run.supervise()).status is RunState.COMPLETED
    assert len(list(run.run_dir.glob("escapee-*"))) == 2
    assert_nothing_left(run)


async def test_what_was_there_before_the_supervisor_is_not_its_own(tmp_path: Path) -> None:
    """A shell that starts something in a session of its own, and becomes `penstock train` with `exec`."""
    stranger = await asyncio.create_subprocess_exec("sleep", "60", start_new_session=True)
    try:
        await Run(tmp_path, [spec("controller", "completes")]).supervise()
        assert stranger.returncode is None and procfs.identify(stranger.pid) is not None
    finally:
        stranger.kill()
        await stranger.wait()
