"""A run on a Ray cluster of two machines; the one that is not its supervisor's is cut off in mid-run."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import psutil
import pytest

pytest.importorskip("ray")

from cable import Cable
from free_port import free_port
from test_deaths import trained_tasks
from test_training_run import RECIPE, command, leftovers, lines, only_run

from penstock.supervisor.run_journal import read_state

pytestmark = [pytest.mark.integration, pytest.mark.long]

STEPS = 16
POOLS = """cluster.pools={
    learn: {roles: [actor, critic, reference], nodes: 2, cpus: 0.5},
    play: {roles: [rollout, environment], nodes: 2, slots_per_node: 2, cpus: 0.5},
}"""
OVERRIDES = [
    "cluster.private=true",
    *("data.eval_tasks=16", "model.warm_start.steps=20", "trainer.groups_per_step=8", "observe.progress=false"),
    *(f"trainer.steps={STEPS}", "trainer.ranks=2", "trainer.checkpoint_every=2", "rollout.servers=2", "env.workers=2"),
    POOLS,
]
AWAY = ("rank-1", "rollout-1", "env-1")
"""Who lives on the far machine."""
SOON = {
    "RAY_health_check_period_ms": "500",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
"""Ray finds out sooner than in a minute that a node is out of reach."""
ENDED_S = 60.0
"""For who is cut off to end by itself; Ray alone takes minutes."""
LIMIT_S = 240


class Nodes:
    """Of a Ray cluster, whose head is at the near end of a cable."""

    def __init__(self, cable: Cable, directory: str) -> None:
        self._cable, self._directory, self._mark = cable, directory, secrets.token_hex(8)
        self.address = f"{cable.near}:{free_port(cable.near)}"
        self.environment = os.environ | SOON | {"RAY_AUTH_MODE": "disabled", "PENSTOCK_TEST_NODES": self._mark}

    def begin(self) -> None:
        port = self.address.rpartition(":")[2]
        here = [f"--port={port}", f"--temp-dir={self._directory}", "--include-dashboard=false"]
        self._start("--head", f"--node-ip-address={self._cable.near}", *here)

    def add_near(self) -> None:
        self._start(f"--address={self.address}", f"--node-ip-address={self._cable.near}")

    def add_far(self) -> None:
        there = ["ip", "netns", "exec", self._cable.network]
        self._start(f"--address={self.address}", f"--node-ip-address={self._cable.far}", before=there)

    def _start(self, *options: str, before: Sequence[str] = ()) -> None:
        words = [*before, sys.executable, "-m", "ray.scripts.scripts", "start", "--num-cpus=2", *options]
        try:
            started = subprocess.run(words, env=self.environment, capture_output=True, text=True, timeout=60)
        except subprocess.TimeoutExpired as error:
            logs = Path(self._directory).glob("session_latest/logs/gcs_server*")
            said = "\n".join(f"{log.name}: {log.read_text()[-3000:]}" for log in logs)
            raise AssertionError(f"{error}\n{said}") from error
        assert started.returncode == 0, started.stdout + started.stderr

    def kill(self) -> None:
        """All that they have started too."""
        for process in psutil.process_iter():
            try:
                if process.environ().get("PENSTOCK_TEST_NODES") == self._mark:
                    process.kill()
            except psutil.Error:
                continue


@pytest.fixture
def nodes(cable: Cable) -> Iterator[Nodes]:
    with TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as directory:
        nodes = Nodes(cable, directory)
        try:
            nodes.begin()
            nodes.add_far()
            yield nodes
        finally:
            nodes.kill()


def spread(nodes: Nodes, runs: Path, *overrides: str) -> subprocess.Popen[str]:
    words = command(RECIPE, runs, *OVERRIDES, *overrides, "--cluster", nodes.address)
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=nodes.environment)


def until(happened: Callable[[], object], *, within_s: float, said: Callable[[], object]) -> None:
    give_up = time.monotonic() + within_s
    while not happened():
        assert time.monotonic() < give_up, said()
        time.sleep(0.05)


def has_begun(runs: Path, run: subprocess.Popen[str], cable: Cable) -> None:
    """Some steps are taken, and each machine has a share in them."""

    def has_steps() -> bool:
        assert run.poll() is None, run.communicate(timeout=10)[0]
        return any(len(lines(path)) >= 3 for path in runs.glob("*/metrics.jsonl"))

    def far() -> set[str]:
        processes = (read_state(only_run(runs)) or {})["processes"]
        return {name for name, process in processes.items() if process.get("node") == cable.far}

    until(has_steps, within_s=LIMIT_S, said=lambda: "no steps")
    until(lambda: far() == set(AWAY), within_s=LIMIT_S, said=far)


def test_who_is_cut_off_is_replaced_and_ends_by_itself(tmp_path: Path, cable: Cable, nodes: Nodes) -> None:
    """On a node that joins in mid-run. The cable stays cut."""
    with spread(nodes, tmp_path) as run:
        try:
            has_begun(tmp_path, run, cable)
            cable.cut()
            nodes.add_near()
            said, _ = run.communicate(timeout=LIMIT_S)
        finally:
            run.kill()
    assert run.returncode == 0, said
    run_dir = only_run(tmp_path)
    trained = trained_tasks(run_dir)
    assert [len(tasks) for tasks in trained] == [8] * STEPS
    assert len({task for tasks in trained for task in tasks}) == 8 * STEPS, "each of them once"
    state = read_state(run_dir) or {}
    for name in AWAY:
        events = [event for event in lines(run_dir / "events.jsonl") if event.get("name") == name]
        (lost,) = [event for event in events if event.get("kind") == "lost"]
        assert lost["reason"].startswith(f"node agent {name}") and f"on {cable.far}" in lost["reason"]
        assert (state["processes"][name]["node"], state["processes"][name]["restarts"]) == (cable.near, 1)
    assert not state["leftovers"]
    until(lambda: not leftovers(run_dir), within_s=ENDED_S, said=lambda: leftovers(run_dir))


@pytest.mark.longest
def test_a_run_that_has_lost_its_room_says_so(tmp_path: Path, cable: Cable, nodes: Nodes) -> None:
    with spread(nodes, tmp_path, "cluster.place_timeout_s=3") as run:
        try:
            has_begun(tmp_path, run, cable)
            cable.cut()
            said, _ = run.communicate(timeout=LIMIT_S)
        finally:
            run.kill()
    run_dir = only_run(tmp_path)
    error = (read_state(run_dir) or {})["error"]
    assert run.returncode == 1 and error in said
    assert error.startswith(tuple(f"{name} failed in mid-run" for name in AWAY)) and "fits on no node" in error
    assert f"It was on {cable.far}, which is gone: join a node to the cluster, and resume the run" in error
    until(lambda: not leftovers(run_dir), within_s=ENDED_S, said=lambda: leftovers(run_dir))
