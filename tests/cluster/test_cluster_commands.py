"""What the commands say of a cluster that is not to be had, before a run has begun."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray")

from made_runs import penstock
from ray_machines import machines

from penstock.cluster import connection

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
def test_what_no_node_could_hold_is_refused_with_the_numbers(config: Path) -> None:
    pools = POOLS.replace("slots_per_node: 3", "slots_per_node: 64")
    words = [sys.executable, "-m", "penstock.cli.main", "train", config, pools, "--cluster", machines().address]
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
