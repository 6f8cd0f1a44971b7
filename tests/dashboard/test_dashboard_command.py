"""`penstock dashboard` and `penstock train --dashboard` as processes of their own."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from shown_run import RUN, make_run
from typer.testing import CliRunner

from penstock.cli import dashboard
from penstock.cli.main import app

pytestmark = pytest.mark.integration

LIMIT_S = 300.0
POLL_S = 0.05
PENSTOCK = [sys.executable, "-P", "-m", "penstock.cli.main"]
TRAINING = """
model: {max_context: 64, tiny: {num_layers: 1, hidden_size: 32, intermediate_size: 32, num_heads: 2, num_kv_heads: 1}}
data: {source: seeds, eval_tasks: 0}
env: {name: guess_number, options: {limit: 3, max_guesses: 1}, group_size: 2, max_turns: 1, max_new_tokens: 2}
trainer: {steps: 100000, groups_per_step: 1, checkpoint_every: 100000}
scheduler: {group_filter: []}
observe: {plots: false, progress: false}
"""


@contextmanager
def started(*words: str, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Start a command, and yield it with the address that it prints."""
    process = subprocess.Popen(
        [*PENSTOCK, *words],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"dashboard: (http://\S+)\n", line)
        assert found is not None, line
        yield process, found[1]
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()


def get(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=LIMIT_S) as answer:
        return json.load(answer)


def base_of(url: str) -> str:
    return url.partition("/?")[0]


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGTERM, None])
def test_the_command_serves_until_a_signal_or_the_end_of_its_parent(tmp_path: Path, end: signal.Signals | None) -> None:
    make_run(tmp_path)
    words = ["dashboard", "--port", "0", "--runs-dir", str(tmp_path)] + (["--with-stdin"] if end is None else [])
    with started(*words) as (process, url):
        assert "?key=" in url
        assert [run["id"] for run in get(f"{base_of(url)}/api/runs")["runs"]] == [RUN]
        if end is None:
            assert process.stdin is not None
            process.stdin.close()
        else:
            process.send_signal(end)
        assert process.wait(LIMIT_S) == 0
    with pytest.raises(urllib.error.URLError):
        get(f"{base_of(url)}/api/runs")


def test_a_run_and_a_key_can_be_given(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "elsewhere")
    key = "a-key-of-the-user-1234"
    words = ["dashboard", str(run_dir), "--port", "0", "--runs-dir", str(tmp_path)]
    with started(*words, PENSTOCK_DASHBOARD_KEY=key) as (_, url):
        assert url.endswith(f"/?key={key}#/{RUN}/overview")
        assert get(f"{base_of(url)}/api/runs/{RUN}/status")["status"] == "completed"


@pytest.mark.parametrize(
    ("words", "variables", "told"),
    [
        (["nobody"], {}, "no run named nobody"),
        (["--port", "0"], {"PENSTOCK_DASHBOARD_KEY": "short"}, "give it 16 at least"),
        (["--host", "192.0.2.1"], {}, "cannot listen on 192.0.2.1"),
    ],
)
def test_what_cannot_be_shown_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], variables: dict[str, str], told: str
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    done = CliRunner().invoke(app, ["dashboard", *words, "--runs-dir", str(tmp_path)])
    assert done.exit_code == 1 and told in done.stderr and done.stderr.startswith("error: ")


def test_a_run_in_the_background_has_no_dashboard_of_its_own(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["train", str(tmp_path / "run.yaml"), "--dashboard", "--detach"])
    assert done.exit_code == 2 and "--dashboard shows" in done.stderr


def told_on_stderr(capfd: pytest.CaptureFixture[str], part: str) -> str:
    """Wait until a line with `part` stands on stderr, and return the line."""
    text, limit = "", time.monotonic() + LIMIT_S
    while time.monotonic() < limit:
        text += capfd.readouterr().err
        for line in text.splitlines():
            if part in line:
                return line
        time.sleep(POLL_S)
    raise AssertionError(f"no line has {part!r}: {text}")


def test_a_run_goes_on_without_a_dashboard_that_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_DASHBOARD_KEY", "short")
    with dashboard.beside_run(tmp_path / "mine"):
        line = told_on_stderr(capfd, "warning: ")
    assert line.startswith("warning: the run goes on without its dashboard: PENSTOCK_DASHBOARD_KEY has 5 characters")


def test_a_run_does_not_wait_for_its_dashboard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    silent = tmp_path / "silent"
    silent.write_text("#!/bin/sh\nexec sleep 1000\n")
    silent.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(silent))
    monkeypatch.setattr(dashboard, "START_S", 0.2)
    goes_on, tell = threading.Event(), dashboard.tell

    def tell_when_the_run_goes_on(*given: Any) -> None:
        goes_on.wait(LIMIT_S)
        tell(*given)

    monkeypatch.setattr(dashboard, "tell", tell_when_the_run_goes_on)
    with dashboard.beside_run(tmp_path / "mine"):
        assert capfd.readouterr() == ("", ""), "it has not been waited for"
        goes_on.set()
        assert "it has not started within 0.2 s" in told_on_stderr(capfd, "warning: ")


@pytest.mark.long
@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL])
def test_a_training_is_shown_while_it_lasts(tmp_path: Path, end: signal.Signals) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(TRAINING)
    with started("train", str(config), "--dashboard", f"runs_dir={tmp_path}", "run_id=shown") as (process, url):
        base = base_of(url)
        assert url.endswith("#/shown/overview")
        request = urllib.request.urlopen(f"{base}/api/runs", timeout=LIMIT_S)
        request.close()
        step = follow_until_a_step(base, "shown")
        assert step >= 1
        stop = urllib.request.Request(
            f"{base}/api/runs/shown/stop?{url.partition('/?')[2]}",
            data=b'{"confirm": "shown"}',
            headers={"Origin": base},
            method="POST",
        )
        if end is signal.SIGINT:
            with urllib.request.urlopen(stop, timeout=LIMIT_S) as answer:
                assert answer.status == 202
            assert process.wait(LIMIT_S) == 130
            assert json.loads((tmp_path / "shown" / "state.json").read_text())["status"] == "stopped"
        else:
            process.send_signal(end)
            process.wait(LIMIT_S)
        assert_gone(base)


def follow_until_a_step(base: str, run_id: str) -> float:
    """Follow the live stream of a run, which may not exist yet, up to its first step."""
    limit = time.monotonic() + LIMIT_S
    while time.monotonic() < limit:
        try:
            stream = urllib.request.urlopen(f"{base}/api/runs/{run_id}/live", timeout=LIMIT_S)
        except urllib.error.HTTPError as error:
            assert error.code == 404
            error.close()
            time.sleep(POLL_S)
            continue
        with stream:
            kind = ""
            for line in stream:
                if line.startswith(b"event: "):
                    kind = line.decode().split()[1]
                elif line.startswith(b"data: ") and kind == "step":
                    return float(json.loads(line[6:])["steps"][-1]["step"])
    raise AssertionError("the run does not step")


def assert_gone(base: str) -> None:
    """Wait until the server has ended."""
    limit = time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < limit:
            urllib.request.urlopen(f"{base}/api/runs", timeout=LIMIT_S).close()
            time.sleep(POLL_S)
    except (urllib.error.URLError, ConnectionError):
        return
    raise AssertionError("the dashboard outlives its training")
