"""A run on a cluster: it trains on several nodes, survives the loss of one that holds ranks of its trainer, and the end
of its supervisor leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray")

from ray.cluster_utils import Cluster
from ray_machines import machines
from test_deaths import trained_tasks
from test_training_run import RECIPE, command, leftovers, lines, only_run

from penstock.observe.summary import read_steps
from penstock.supervisor.run_journal import read_state

pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
STEPS = 10
SPARE = "{kind: spare}"
OVERRIDES = [
    *("data.eval_tasks=16", "model.warm_start.steps=20", "trainer.groups_per_step=8", "observe.progress=false"),
    "cluster.private=true",
    *(f"trainer.steps={STEPS}", "trainer.ranks=2", "trainer.checkpoint_every=2", "rollout.servers=2", "env.workers=2"),
]


def pools(learn: str, judge: str = "") -> str:
    """`learn`: settings of the actor's pool. `judge`: who lives in one that takes a node to itself."""
    return f"""cluster.pools={{
        learn: {{{learn}, cpus: 0.5, labels: {SPARE}}},
        judge: {{roles: [{judge}], slots_per_node: 2, cpus: 1.0, labels: {SPARE}}},
        play: {{roles: [rollout, environment], nodes: 2, slots_per_node: 2, cpus: 0.5, labels: {SPARE}}},
    }}"""


ONE_NODE = [pools("roles: [actor], slots_per_node: 2")]
TWO_NODES = [pools("roles: [actor], nodes: 2")]
TWO_POOLS = [
    pools("roles: [actor], slots_per_node: 2", judge="critic"),
    *("trainer.critic={}", "trainer.objective.kl_coef=0.01", "trainer.split=[critic]", "scheduler.group_filter=[]"),
]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """With four nodes for this test."""
    cluster = machines()
    spare = [cluster.add_node(num_cpus=2, labels={"kind": "spare"}) for _ in range(4)]
    yield cluster
    for node in spare:
        if node in cluster.worker_nodes:
            cluster.remove_node(node)


def node_of(cluster: Cluster, pid: int) -> object:
    """On which that process was started: its parent is a worker of the node's raylet."""
    raylet = psutil.Process(pid).parent().parent().cmdline()
    return next(node for node in cluster.worker_nodes if f"--node_id={node.node_id}" in raylet)


def own_words(said: str) -> str:
    """What the run said, without what Ray's processes said beside it."""
    return "\n".join(line for line in said.splitlines() if "(raylet)" not in line and "[state-dump]" not in line)


def test_servers_take_turns_with_the_trainer_in_its_slots(cluster: Cluster, tmp_path: Path) -> None:
    turns = f"""{{
        all: {{roles: [actor, rollout], slots_per_node: 2, cpus: 0.5, labels: {SPARE}}},
        play: {{roles: [environment], slots_per_node: 2, cpus: 0.5, labels: {SPARE}}},
    }}"""
    mode = "scheduler={mode: colocated, max_staleness: 0}"
    words = command(RECIPE, tmp_path, *OVERRIDES, mode, f"cluster.pools={turns}", "--cluster", cluster.address)
    run = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    run_dir = only_run(tmp_path)
    assert [len(tasks) for tasks in trained_tasks(run_dir)] == [8] * STEPS and not leftovers(run_dir)


def test_engines_of_others_train_behind_gates(cluster: Cluster, tmp_path: Path) -> None:
    python, stand_in = tmp_path / "python", Path(__file__).parent / "sglang_stand_in.py"
    python.write_text(f'#!/bin/sh\n[ "$1" != -m ] || {{ shift 2; set {stand_in} "$@"; }}\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    engine = ["rollout.engine=sglang", f"rollout.python={python}"]
    words = command(RECIPE, tmp_path, *OVERRIDES, *ONE_NODE, *engine, "--cluster", cluster.address)
    run = subprocess.run(words, capture_output=True, text=True, timeout=600)
    assert run.returncode == 0, run.stdout + run.stderr
    run_dir = only_run(tmp_path)
    assert [len(tasks) for tasks in trained_tasks(run_dir)] == [8] * STEPS and not leftovers(run_dir)
    gaps = [line["kl_engine_trainer"] for line in lines(run_dir / "metrics.jsonl")]
    assert max(gap for gap in gaps if gap is not None) < 1e-4


@pytest.mark.parametrize(
    ("settings", "nodes", "lost"),
    [
        pytest.param(ONE_NODE, 1, "trainer-0", id="ranks on one node", marks=pytest.mark.longest),
        pytest.param(TWO_NODES, 2, "rank-1", id="ranks on two nodes"),
        pytest.param(TWO_POOLS, 2, "rank-2", id="a role in a pool of its own", marks=pytest.mark.longest),
    ],
)
def test_a_run_goes_on_after_the_loss_of_a_node_of_its_trainer(
    cluster: Cluster, tmp_path: Path, settings: list[str], nodes: int, lost: str
) -> None:
    words = command(RECIPE, tmp_path, *OVERRIDES, *settings, "--cluster", cluster.address)
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        try:
            give_up = time.monotonic() + 400
            while not any(len(lines(path)) >= 4 for path in tmp_path.glob("*/metrics.jsonl")):
                assert run.poll() is None and time.monotonic() < give_up, run.communicate(timeout=10)[0]
                time.sleep(0.1)
            run_dir = only_run(tmp_path)
            before = (read_state(run_dir) or {})["processes"]
            learners = {name: node_of(cluster, before[name]["pid"]) for name in ("trainer-0", lost)}
            assert len(set(learners.values())) == nodes, "ranks are on as few nodes as have their slots"
            players = {node_of(cluster, before[name]["pid"]) for name in ("rollout-0", "rollout-1")}
            assert len(players) == 2, "a pool's parts are on different nodes"
            cluster.remove_node(learners[lost], allow_graceful=False)
            said, _ = run.communicate(timeout=600)
        finally:
            run.kill()
    assert run.returncode == 0, own_words(said)
    survived = [line["step"] for line in read_steps(run_dir)]
    assert survived == list(range(1, STEPS + 1)), "one taken after the last checkpoint is taken again"
    assert [len(tasks) for tasks in trained_tasks(run_dir)] == [8] * STEPS
    events = lines(run_dir / "events.jsonl")
    ends = [event for event in events if event.get("name") == lost and event.get("kind") == "lost"]
    assert len(ends) == 1 and ends[0]["reason"].startswith(f"node agent {lost}")
    assert (read_state(run_dir) or {})["processes"]["trainer-0"]["restarts"] == 1
    assert not (read_state(run_dir) or {})["leftovers"] and not leftovers(run_dir)


@pytest.mark.longest
def test_a_run_in_the_background_is_killed_stopped_and_resumed(cluster: Cluster, tmp_path: Path) -> None:
    """Its supervisor is killed in its first life, it is stopped in its second, and complete after the third."""
    unending = [*OVERRIDES, *ONE_NODE, "trainer.steps=1000"]
    begin = command(RECIPE, tmp_path, *unending, "--detach", "--cluster", cluster.address)
    subprocess.run(begin, check=True, capture_output=True, timeout=180)
    run_dir = only_run(tmp_path)
    wait_for(lambda: num_steps(run_dir) >= 3 and (read_state(run_dir) or {})["status"] != "starting")
    status = json.loads(penstock("status", str(run_dir), "--json", "--force"))
    nodes = {row["name"]: row["node"] for row in status["processes"]}
    assert status["status"] == "running" and nodes["trainer-0"] and nodes["rollout-1"] and not nodes["controller"]
    os.kill((read_state(run_dir) or {})["supervisor"]["pid"], signal.SIGKILL)
    wait_for(lambda: (read_state(run_dir) or {})["status"] == "failed" and not leftovers(run_dir))
    before = num_steps(run_dir)
    penstock("resume", str(run_dir), "--detach", "--cluster", cluster.address)
    wait_for(lambda: num_steps(run_dir) > before)
    penstock("stop", str(run_dir))
    assert (read_state(run_dir) or {})["status"] == "stopped"
    wait_for(lambda: not leftovers(run_dir))  # its supervisor draws the plots, and leaves the cluster
    steps = num_steps(run_dir) + 3
    penstock("resume", str(run_dir), f"trainer.steps={steps}", "--cluster", cluster.address)
    trained = trained_tasks(run_dir)
    assert [len(tasks) for tasks in trained] == [8] * steps and not leftovers(run_dir)
    assert len({task for tasks in trained for task in tasks}) == 8 * steps, "each of them once"


def penstock(*words: str) -> str:
    """What it says."""
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *words], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def num_steps(run_dir: Path) -> int:
    return max((line["step"] for line in lines(run_dir / "metrics.jsonl")), default=0)


def wait_for(happened: Callable[[], bool]) -> None:
    give_up = time.monotonic() + 400
    while not happened():
        assert time.monotonic() < give_up
        time.sleep(0.1)
