"""One environment worker on one core: turns a second under more demand than it can serve, and what a turn costs it.

The worker is the very process of a run (`penstock.processes.env`), alone on its core, with its own HTTP client, control
bus and pool files. What it talks to is on another core and as cheap as can be, because its cost is not the worker's: an
engine that answers every `/generate` at once with the same tokens, behind a real socket, and a controller that grants
whatever is asked for over the real bus. 1,000 episodes are open at any time; their environments think for half a second
a turn on average, asynchronously, which asks for twice the turns that are wanted.

A turn is an answer generated and an observation made of it. `overhead_ms_per_turn` is the worker's processor time over
its turns, so it does not depend on how busy the machine is; `turns_per_s` is over wall time. `dataset_items_per_s` is
that of the slowest source of files (`task_rate`), as the controller takes tasks, over wall time.
`dump_share` is what a real run that only plays the quickstart's tasks says of itself: processor time spent on writing
its trajectories, over the time in which it played.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import psutil
import uvloop
import yaml
from lab import EXAMPLE
from report import Benchmark, arguments, publish
from task_rate import NUM_ROWS, dataset_items_per_s

from penstock.config import Config
from penstock.control.bus import Bus
from penstock.control.messages import (
    AnyMessage,
    DataGenerated,
    GrantRequest,
    Hello,
    TaskRequest,
    Welcome,
)
from penstock.control.remote_workers import RemoteWorkers
from penstock.ports.work import Work
from penstock.processes.layout import prepare
from penstock.rollout import bodies
from penstock.runtime.http_server import bind, url_of
from penstock.supervisor.child import Child
from penstock.types import Sampling, SegmentGrant, Task

BENCHMARK = Benchmark(
    name="environments",
    measures=["envs", "processes", "control", "data", "store"],
    figures=["turns_per_s", "overhead_ms_per_turn", "worker_busy", "dataset_items_per_s", "dump_share"],
)
EPISODES, GROUP_SIZE, TURNS = 1000, 8, 8
THINK_S = 0.5
ACTION = [*range(40, 55), 4]
"""Of the tiny policy's alphabet, and its end of turn."""
OBSERVATION = "you see a door, a key and a lamp; what do you do? "
START_S, SETTLE_S, WATCH_S = 300.0, 4.0, 20.0
TIMEOUT_S = 600.0
"""Of a message to the worker, which is as busy as it can be, and may share its core."""
CORE = 0
"""Of the worker; everything else is elsewhere."""


class Thinker:
    """Thinks before every observation."""

    def __init__(self, task: Task) -> None:
        self._num_turns = 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        self._draw = random.Random(seed)
        return f"{OBSERVATION}{seed}", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        await asyncio.sleep(self._draw.expovariate(1 / THINK_S))
        self._num_turns += 1
        return OBSERVATION, 0.0, self._num_turns >= TURNS, False, {}


class Engine(asyncio.Protocol):
    """Answers requests on one connection: a version to a readiness check, and the same tokens to all other requests."""

    num_samples = 0
    """Answered by all connections."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._received = cast(asyncio.Transport, transport), b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or 0)
        if not found or len(body) < length:
            return
        self._received = body[length:]
        reply = READY if head.startswith(b"GET") else self._answer(body[:length])
        self._transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(reply), reply))

    def _answer(self, body: bytes) -> bytes:
        num_samples = int(body.partition(b'"n":')[2].partition(b",")[0] or 1)
        Engine.num_samples += num_samples
        return ANSWER if num_samples == 1 else b"[%s]" % b",".join([ANSWER] * num_samples)


READY = bodies.encode(bodies.Ready(run_id="", nonce="", policy_version=0, state="serving"))


def reply_of(token_ids: list[int]) -> bytes:
    """An engine's answer with these tokens, which ended by itself."""
    reply = bodies.GenerateReply(
        text="",
        output_ids=token_ids,
        meta_info=bodies.MetaInfo(
            id="0",
            finish_reason=bodies.Stop(matched=token_ids[-1]),
            prompt_tokens=0,
            completion_tokens=len(token_ids),
            weight_version="0",
            weight_versions=[bodies.WeightSpan("0", 0, len(token_ids))],
            e2e_latency=0.0,
            output_token_logprobs=[(-1.0, token, None) for token in token_ids],
        ),
    )
    return bodies.encode(reply)


ANSWER = reply_of(ACTION)


@dataclass(slots=True, kw_only=True)
class Controller:
    """Grants everything; another group for each that has been played, until it is told to stop."""

    url: str
    num_episodes: int
    max_tokens: int
    groups: Iterator[int] = field(default_factory=itertools.count)
    workers: RemoteWorkers | None = None
    num_open: int = 0
    """Groups that are being played."""
    is_over: bool = False

    async def handle(self, peer: str, message: AnyMessage) -> AnyMessage | None:
        match message:
            case Hello():
                return Welcome(server_urls=[self.url])
            case TaskRequest():
                for _ in range(self.num_episodes // GROUP_SIZE):
                    self._start(peer)
            case GrantRequest(episode=episode):
                assert self.workers is not None
                self.workers.grant(peer, SegmentGrant(episode=episode, max_tokens=self.max_tokens))
            case DataGenerated(episodes=episodes):
                failed = [episode.error for episode in episodes if episode.error]
                assert not failed, failed[0]
                self.num_open -= 1
                if not self.is_over:
                    self._start(peer)
        return None

    def _start(self, worker: str) -> None:
        assert self.workers is not None
        group = next(self.groups)
        self.num_open += 1
        work = Work(
            task=Task(task_id="t", tag="train", index=0),
            group=group,
            attempt=0,
            group_size=GROUP_SIZE,
            members=tuple(range(GROUP_SIZE)),
            max_tokens=(self.max_tokens,) * GROUP_SIZE,
            env_seed=group,
            sampling_seed=0,
            sampling=Sampling(max_new_tokens=self.max_tokens),
            deadline_s=300.0,
        )
        self.workers.start(worker, work)


@contextmanager
def worker_process(run_dir: Path, runtime_dir: Path, nonce: str) -> Iterator[psutil.Process]:
    """As a supervisor would start it, on its own core."""
    command = [sys.executable, "-m", "penstock.processes.start", "--run-dir", str(run_dir), "--name", "env-0"]
    environment = {
        "PENSTOCK_RUN_ID": "benchmark",
        "PENSTOCK_NONCE": nonce,
        "PENSTOCK_RUNTIME_DIR": str(runtime_dir),
    }
    with subprocess.Popen(command, env=os.environ | environment) as process:
        try:
            known = psutil.Process(process.pid)
            known.cpu_affinity([CORE])
            yield known
        finally:
            process.send_signal(signal.SIGKILL)


async def serve_and_watch(run_dir: Path, runtime_dir: Path, watch_s: float) -> dict[str, float]:
    """Turns a second, and what each costs."""
    loop = asyncio.get_running_loop()
    listener = bind("127.0.0.1", 0)
    server = await loop.create_server(Engine, sock=listener)
    controller = Controller(url=url_of("127.0.0.1", listener), num_episodes=EPISODES, max_tokens=len(ACTION))
    nonce = secrets.token_hex(8)
    child = Child(name="controller", run_dir=run_dir, runtime_dir=runtime_dir, run_id="benchmark", nonce=nonce)
    bus = Bus(str(runtime_dir), controller.handle, nonce=child.secret("greeting"))
    async with asyncio.TaskGroup() as tasks:
        controller.workers = RemoteWorkers(bus, tasks, timeout_s=TIMEOUT_S)
        receiving = tasks.create_task(bus.run())
        with worker_process(run_dir, runtime_dir, nonce) as worker:
            async with asyncio.timeout(START_S):
                while Engine.num_samples < EPISODES:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            await asyncio.sleep(SETTLE_S)
            began, turns, cpu_s = time.monotonic(), Engine.num_samples, cpu_of(worker)
            await asyncio.sleep(watch_s)
            seconds, turns, cpu_s = time.monotonic() - began, Engine.num_samples - turns, cpu_of(worker) - cpu_s
        receiving.cancel()
        controller.workers.close()
    server.close()
    bus.close()
    return {
        "turns_per_s": turns / seconds,
        "overhead_ms_per_turn": 1000 * cpu_s / turns,
        "worker_busy": cpu_s / seconds,
    }


def cpu_of(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def play(watch_s: float) -> dict[str, float]:
    """A worker's turns, in a run directory of its own."""
    settings: dict[str, Any] = {
        "env": {
            "name": f"{__file__}:Thinker",
            "group_size": GROUP_SIZE,
            "max_turns": TURNS,
            "max_new_tokens": len(ACTION),
        },
        "data": {"source": "seeds"},
        "model": {"max_context": 4096},
        "scheduler": {"max_running": EPISODES},
    }
    config = Config.model_validate(settings)
    with TemporaryDirectory() as run_dir, TemporaryDirectory(dir="/dev/shm") as runtime_dir:
        prepare(config, Path(run_dir))
        Path(run_dir, "config.yaml").write_text(yaml.safe_dump(settings))
        figures: dict[str, float] = uvloop.run(serve_and_watch(Path(run_dir), Path(runtime_dir), watch_s))
        return figures


def dump_share(num_tasks: int) -> float:
    """Of a whole run, with all its processes."""
    with TemporaryDirectory() as runs_dir:
        words = [f"runs_dir={runs_dir}", "run_id=dumped", f"synthesis.tasks={num_tasks}", "observe.progress=false"]
        command = [sys.executable, "-m", "penstock.cli.main", "rollout", str(EXAMPLE), *words]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        summary = json.loads(Path(runs_dir, "dumped", "summary.json").read_text())
        return float(summary["dump_share"])


def main() -> None:
    options = arguments(__doc__ or "")
    others = os.sched_getaffinity(0) - {CORE}
    os.sched_setaffinity(0, others or {CORE})
    figures = play(WATCH_S / 4 if options.quick else WATCH_S)
    rates = dataset_items_per_s(NUM_ROWS // 10 if options.quick else NUM_ROWS)
    figures["dataset_items_per_s"] = min(rates.values())
    tables = {"Tasks from files": {source: {"items_per_s": [rate]} for source, rate in rates.items()}}
    figures["dump_share"] = dump_share(num_tasks=512 if options.quick else 4096)
    publish(BENCHMARK, figures, options.json, tables=tables)


if __name__ == "__main__":
    main()
