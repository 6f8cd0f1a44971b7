"""A run as a Ray job: what Ray's own job manager makes of the command. The HTTP server in front of it is left out."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import sys
from pathlib import Path

import psutil
import pytest

pytest.importorskip("ray")

from ray._private.runtime_env.working_dir import upload_working_dir_if_needed
from ray._raylet import GcsClient
from ray.dashboard.modules.job.job_manager import JobManager
from ray.job_submission import JobStatus
from ray_machines import machines
from test_deaths import LIMIT_S
from test_training_run import EXAMPLES, leftovers, lines, only_run

from penstock.deadline import deadline
from penstock.supervisor.run_journal import read_state

pytestmark = [
    pytest.mark.integration,
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]
POOLS = """cluster.pools={{
    learn: {{roles: [actor], cpus: 0, memory_gib: 0.1, labels: {job}}},
    play: {{roles: [rollout, environment], slots_per_node: 2, cpus: 0, memory_gib: 0.1, labels: {job}}},
}}"""
"""On the node of the job alone: nodes of one machine would unpack its directory into the same place."""
ENVIRONMENT = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}, "config": {"eager_install": False}}


async def test_a_job_trains_in_its_working_directory_and_ends_in_order_when_it_is_stopped(tmp_path: Path) -> None:
    """Configuration and environment are nowhere but in the directory that is submitted."""
    runs, submitted = tmp_path / "runs", tmp_path / "submitted"
    shutil.copytree(EXAMPLES / "env_file", submitted)
    cluster = machines()
    manager = JobManager(GcsClient(address=cluster.address), str(tmp_path))
    runtime_env = upload_working_dir_if_needed({"working_dir": str(submitted), **ENVIRONMENT}, True)
    shutil.rmtree(submitted)
    words = [sys.executable, "-m", "penstock.cli.main", "train", "run.yaml", "--cluster", "auto", f"runs_dir={runs}"]
    words += ["cluster.private=true"]
    words += [
        POOLS.format(job=f"{{ray.io/node-id: {cluster.head_node.node_id}}}"),
        "env.workers=1",
        "trainer.steps=1000",
        "observe.progress=false",
    ]
    job = await manager.submit_job(entrypoint=f"exec {shlex.join(words)}", runtime_env=runtime_env)
    try:
        async with deadline(LIMIT_S, waiter="the test", resource="two steps", holder="the job"):
            while not any(len(lines(path)) >= 2 for path in runs.glob("*/metrics.jsonl")):
                assert not (await manager.get_job_status(job)).is_terminal(), manager.get_job_logs(job)
                await asyncio.sleep(0.1)
        run_dir = only_run(runs)
        worker = (read_state(run_dir) or {})["processes"]["env-0"]
        assert "working_dir_files" in psutil.Process(worker["pid"]).cwd() and worker["node"]
    finally:
        manager.stop_job(job)
        status, said = await end_of(manager, job), manager.get_job_logs(job)
    assert status == JobStatus.STOPPED and "stopped: SIGTERM received" in said, said
    check(run_dir)


async def end_of(manager: JobManager, job: str) -> JobStatus:
    async with deadline(90.0, waiter="the test", resource="its end", holder="the job"):
        while not (status := await manager.get_job_status(job)).is_terminal():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    return status


def check(run_dir: Path) -> None:
    """What was learned is saved, and nothing is left."""
    state = read_state(run_dir) or {}
    assert (state["status"], state["leftovers"]) == ("stopped", []) and not leftovers(run_dir)
    assert not Path(state["runtime_dir"]).exists()
    last = lines(run_dir / "metrics.jsonl")[-1]["step"]
    saved = json.loads((run_dir / "checkpoints" / f"step_{last}" / "state.json").read_text())
    assert saved["step"] == last
