"""`penstock stop`, on made runs and on supervisors that are little programs."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_runs import make_run, owner, penstock

from penstock.cli import stop
from penstock.observe import jsonl
from penstock.observe.notices import notice
from penstock.supervisor.ownership import owning
from penstock.supervisor.procfs import Identity, identify, read_stat, send

SUPERVISOR = """
import json, pathlib, signal, sys, time
def end(status):
    path = pathlib.Path(sys.argv[1], "state.json")
    state = json.loads(path.read_text())
    time.sleep(1)
    path.with_name("new").write_text(json.dumps({**state, "status": status, "processes": {}}))
    path.with_name("new").replace(path)
    sys.exit()
signal.signal(signal.SIGTERM, lambda *_: end("stopped"))
signal.signal(signal.SIGQUIT, lambda *_: end("failed"))
print("ready", flush=True)
time.sleep(60)
"""


def state_of(run_dir: Path) -> dict[str, object]:
    return json.loads((run_dir / "state.json").read_text())


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Path]:
    """A running run whose supervisor ends it when it is asked to."""
    run_dir = make_run(tmp_path / "a", "running", processes={"trainer-0": {"state": "ready"}})
    words = [sys.executable, "-c", SUPERVISOR, str(run_dir)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout and supervisor.stdout.readline() == "ready\n"
        identity = identify(supervisor.pid)
        assert identity
        jsonl.write_json(run_dir / "state.json", {**state_of(run_dir), "supervisor": dataclasses.asdict(identity)})
        yield run_dir
        supervisor.kill()


@pytest.mark.integration
def test_a_stop_waits_for_the_end_and_says_how_to_go_on(supervised: Path) -> None:
    result = penstock("stop", supervised)
    assert result.exit_code == 0
    assert "waiting for trainer-0" in result.stderr
    assert result.stdout.splitlines() == ["run a is stopped", f"continue it with: penstock resume {supervised}"]


@pytest.mark.integration
def test_now_sends_another_signal(supervised: Path) -> None:
    assert "run a is failed" in penstock("stop", supervised, "--now").stdout


@pytest.mark.integration
def test_a_suspended_supervisor_is_named_and_killed_only_on_request(supervised: Path) -> None:
    pid = state_of(supervised)["supervisor"]["pid"]
    suspend(pid)
    document = json.loads(penstock("status", supervised, "--json").stdout)
    assert (document["status"], document["progress"]["phase"]) == ("suspended", "suspended")
    assert [line["command"] for line in document["next"]] == [
        f"kill -CONT {pid}",
        f"penstock stop {supervised} --now",
    ]
    result = penstock("stop", supervised)
    assert result.exit_code == 1
    assert f"its supervisor (process {pid}) is suspended: `kill -CONT {pid}`, or `penstock stop" in result.stderr
    assert "run a is failed" in penstock("stop", supervised, "--now").stdout


@pytest.mark.integration
def test_a_supervisor_that_does_not_end_is_killed(supervised: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pid = state_of(supervised)["supervisor"]["pid"]

    def send_only_sigkill(who: Identity, signum: int) -> bool:
        if signum != signal.SIGKILL:
            return True
        monkeypatch.setattr(stop, "NOW_S", 60.0)
        return send(who, signum)

    monkeypatch.setattr(stop, "NOW_S", 0.05)
    monkeypatch.setattr(stop, "send", send_only_sigkill)
    result = penstock("stop", supervised, "--now")
    assert result.exit_code == 0 and "marked failed" in result.stdout
    assert state_of(supervised)["status"] == "failed" and read_stat(pid).state == "Z"


def suspend(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    while (stat := read_stat(pid)) and stat.state != "T":
        time.sleep(0.001)


@pytest.mark.parametrize("status", ["completed", "stopped", "failed"])
def test_a_run_that_has_ended_says_so(tmp_path: Path, status: str) -> None:
    result = penstock("stop", make_run(tmp_path / "a", status, alive=False))
    assert result.exit_code == 0 and f"has ended already: {status}" in result.stdout


def test_a_run_whose_supervisor_died_is_marked_without_signalling_whoever_has_its_pid(tmp_path: Path) -> None:
    processes = {"trainer-0": {"state": "ready", "pid": 7}, "env-0": {"state": "pending"}}
    run_dir = make_run(tmp_path / "a", "running", alive=False, processes=processes)
    result = penstock("stop", run_dir, "--now")
    assert result.exit_code == 0 and "marked failed" in result.stdout and "penstock resume" in result.stdout
    state = state_of(run_dir)
    assert (state["status"], state["error"]) == ("failed", "the supervisor was killed")
    assert state["processes"]["trainer-0"]["state"] == "exited"
    incidents = json.loads(penstock("status", run_dir, "--json").stdout)["incidents"]
    assert [notice(each) for each in incidents] == ["the supervisor was killed"], "one line, not one of each process"
    assert json.loads((run_dir / "summary.json").read_text())["status"] == "failed"
    assert "has ended already" in penstock("stop", run_dir).stdout


def test_a_state_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "state.json").write_text("{torn")
    result = penstock("stop", tmp_path / "a")
    assert (
        result.exit_code == 1
        and f"{tmp_path / 'a' / 'state.json'} cannot be read: restore it from a copy" in result.stderr
    )


def test_a_run_that_is_supervised_elsewhere_is_stopped_there(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", "running")
    supervisor = {**dataclasses.asdict(owner(alive=True)), "pid_namespace": "pid:[1]", "host": "node-7"}
    jsonl.write_json(run_dir / "state.json", {**state_of(run_dir), "supervisor": supervisor})
    with owning(run_dir):
        result = penstock("stop", run_dir)
        status = json.loads(penstock("status", run_dir, "--json").stdout)
    assert result.exit_code == 1 and f"process {os.getpid()} on node-7: stop it on that machine" in result.stderr
    assert status["status"] == "running" and status["processes"][0]["alive"] is None
