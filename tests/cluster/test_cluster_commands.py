"""What the commands say of a cluster that is not to be had, before a run has begun."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray")

from free_port import free_port
from made_runs import penstock
from ray_machines import machines

from penstock.cluster import connection

TOKEN = "0123456789abcdef" * 4
PRIVATE = "cluster.private=true"
POOLS = "cluster.pools={all: {roles: [actor, rollout, environment], slots_per_node: 3}}"


@pytest.fixture
def config(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "run.yaml"
    path.write_text(f"runs_dir: {tmp_path / 'runs'}\nobserve: {{progress: false}}\n")
    yield path
    assert not (tmp_path / "runs").exists(), "what was refused leaves no directory"


@pytest.mark.parametrize(
    "words", [["train"], ["rollout"], ["eval"], ["train", "--dry-run"], ["rollout", "--dry-run"], ["train", "--detach"]]
)
def test_too_few_slots_are_refused_before_any_cluster_is_asked(config: Path, words: list[str]) -> None:
    pools = [POOLS, "env.workers=2", "rollout.servers=3", "data.eval_tasks=1"]
    refused = penstock(words[0], config, *pools, "--cluster", "127.0.0.1:1", *words[1:])
    assert refused.exit_code == 2
    assert "rollout.servers 3 + env.workers 2 need" in refused.stderr and "1 nodes have 3" in refused.stderr


@pytest.mark.integration
@pytest.mark.long
def test_what_no_node_could_hold_is_refused_with_the_numbers(config: Path) -> None:
    pools = POOLS.replace("slots_per_node: 3", "slots_per_node: 64")
    words = [
        sys.executable,
        "-m",
        "penstock.cli.main",
        "train",
        config,
        pools,
        "--cluster",
        machines().address,
        PRIVATE,
    ]
    refused = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert refused.returncode == 2
    assert "64 slots, 64 CPU on one node: fits on no node" in refused.stderr and "has 8 of 8 CPU" in refused.stderr


@pytest.mark.integration
@pytest.mark.parametrize("listens", [False, True])
def test_a_dead_address_is_refused_in_time(config: Path, monkeypatch: pytest.MonkeyPatch, listens: bool) -> None:
    monkeypatch.setattr(connection, "ANSWERED_S", 4.0)
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        if not listens:
            server.close()
        started = time.monotonic()
        refused = penstock("train", config, POOLS, "--cluster", f"127.0.0.1:{port}")
    assert refused.exit_code == 1 and time.monotonic() - started < 30
    said = "is not a Ray cluster" if listens else "no server answers at"
    assert said in refused.stderr and "start one with `ray start --head`" in refused.stderr


@pytest.mark.integration
def test_a_cluster_that_asks_for_a_token_says_so(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ASK", "raise SystemExit('ray.exceptions.AuthenticationError: RPC error')")
    with socket.create_server(("", 0)) as server:
        refused = penstock("train", config, POOLS, "--cluster", f"127.0.0.1:{server.getsockname()[1]}")
    assert refused.exit_code == 1 and "requires a token: set RAY_AUTH_MODE=token" in refused.stderr


def test_a_cluster_that_cannot_be_joined_from_outside_says_so(config: Path) -> None:
    refused = penstock("train", config, POOLS, "--cluster", "ray://127.0.0.1:10001")
    assert refused.exit_code == 1 and "give host:port of its head" in refused.stderr


@pytest.mark.integration
def test_a_cluster_that_asks_for_no_token_is_refused(config: Path) -> None:
    refused = train(config, machines().address)
    assert refused.returncode == 1
    for words in ("asks for no token", "can run programs as you", "RAY_AUTH_MODE=token", "cluster.private=true"):
        assert words in refused.stderr


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The address of a cluster that asks for a token."""
    port = free_port()
    directory = Path(tempfile.mkdtemp(prefix="g"))
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--num-cpus=1"]
    words += [f"--port={port}", "--node-ip-address=127.0.0.1", f"--temp-dir={directory}", "--include-dashboard=false"]
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    head = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"127.0.0.1:{port}"
    finally:
        for process in [*psutil.Process(head.pid).children(recursive=True), head]:
            process.kill()
        head.wait()


@pytest.mark.integration
@pytest.mark.long
def test_a_cluster_with_a_token_is_joined_with_it_and_only_with_it(
    config: Path, guarded: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit = time.monotonic() + 120.0
    while "no server answers" in (refused := train(config, guarded)).stderr:
        assert time.monotonic() < limit, refused.stderr
    assert refused.returncode == 1 and "requires a token: set RAY_AUTH_MODE=token" in refused.stderr, refused.stderr
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN[::-1])
    assert "requires a token" in train(config, guarded).stderr
    monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN)
    joined = train(config, guarded)
    assert joined.returncode == 2 and "64 slots, 64 CPU on one node: fits on no node" in joined.stderr, joined.stderr


def train(config: Path, address: str) -> subprocess.CompletedProcess[str]:
    """With pools that no cluster has room for."""
    pools = POOLS.replace("slots_per_node: 3", "slots_per_node: 64")
    words = [sys.executable, "-m", "penstock.cli.main", "train", config, pools, "--cluster", address]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
