"""What publishing costs the ranks of a trainer: how long they stand still, and how much memory they need for it.

The ranks are processes of their own (gloo), as in a run. `stall_share`: the time of the call itself, and the time
by which the weights are complete after the passes of the next step, over the time until the weights are complete.
`peak_extra_bytes_ratio`: the most private memory that any rank has more while weights are written, over the bytes of
the model. Pages of the published file are not private, nor are those of the copy from which a rank on another machine
sends its rows: both are in shared memory.

Each rank may take itself to be on a machine of its own, with the address of this one.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
from learner import Setting, make_batch

from penstock.config import Config, TinyModelConfig
from penstock.groups.spawned import SpawnedBackend
from penstock.processes.layout import model_dir, prepare
from penstock.processes.trainer import trainer_roles
from penstock.runtime.file_service import WEIGHTS
from penstock.supervisor.child import ADDRESS
from penstock.supervisor.janitor import RUNTIME_DIR
from penstock.trainer.actor_critic import ActorCritic
from penstock.weights.publication import await_handle

SHARED_MEMORY = Path("/dev/shm")
LOOK_S = 0.002
MAX_CONTEXT = 512


@contextmanager
def ranks_of(
    model: TinyModelConfig, num_ranks: int, *, on_machines: bool = False
) -> Iterator[tuple[ActorCritic, list[int]]]:
    """Yield the ranks with random weights, sharded if there are several, and their process ids. `on_machines`: whether
    each is on a machine of its own."""
    strategy = {"ranks": num_ranks, "distributed": {"strategy": "fsdp" if num_ranks > 1 else "ddp"}}
    config = Config.model_validate(
        {
            "model": {"tiny": model.model_dump(), "max_context": MAX_CONTEXT},
            "scheduler": {"max_staleness": 1000},
            "trainer": {"warmup_steps": 0, **strategy},
            "cluster": {"address": "auto", "pools": {"learn": {"roles": ["actor"], "nodes": num_ranks}}}
            if on_machines
            else {},
        }
    )
    started: list[SpawnedBackend] = []

    def start(together: Any, numbers: Sequence[int]) -> SpawnedBackend:
        started.append(SpawnedBackend(together, len(numbers)))
        return started[-1]

    with (
        TemporaryDirectory(dir=SHARED_MEMORY) as runtime,
        TemporaryDirectory() as run,
        patch.dict(os.environ, {RUNTIME_DIR: runtime, ADDRESS: "127.0.0.1"}),
    ):
        prepare(config, Path(run))
        weights = Path(runtime) / WEIGHTS
        roles = trainer_roles(config, start, model_dir=model_dir(config, Path(run)), weights_dir=weights)
        ranks = ActorCritic(roles, config.trainer)
        try:
            ranks.begin(0, Path(run) / "beginning")
            yield ranks, [pid for backend in started for pid in backend.pids]
        finally:
            ranks.close()


class Completion:
    """Notes when a publication is complete."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        self.num_bytes = await_handle(self._folder, waiter="the benchmark").num_bytes
        self._at = time.perf_counter()

    @property
    def is_awaited(self) -> bool:
        """Return whether it is not complete yet."""
        return self._thread.is_alive()

    def wait(self) -> float:
        """Return when it was complete, on the clock of `perf_counter`."""
        self._thread.join()
        return self._at


def stall_share(model: TinyModelConfig, rounds: int, *, num_ranks: int = 1) -> float:
    """Return the median over rounds. Several ranks are on machines of their own."""
    setting = Setting(device=torch.device("cpu"), groups=2, prompt_tokens=8, max_context=64, answers={}, group_size=4)
    batch = make_batch(setting, median_tokens=24.0, sigma=0.1)
    shares = []
    with ranks_of(model, num_ranks, on_machines=num_ranks > 1) as (ranks, _):
        for number in range(rounds + 1):
            begun = time.perf_counter()
            complete = Completion(ranks.publish())
            call_s = time.perf_counter() - begun
            ranks.accumulate(batch)
            stepping = time.perf_counter()
            ended = complete.wait()
            ranks.step()
            if number:  # the first round warms up
                shares.append((call_s + max(ended - stepping, 0.0)) / (ended - begun))
    return median(shares)


def peak_extra_bytes_ratio(model: TinyModelConfig, num_ranks: int, *, on_machines: bool = False) -> float:
    with ranks_of(model, num_ranks, on_machines=on_machines) as (ranks, pids):
        Completion(ranks.publish()).wait()  # what is allocated once
        before = [_private_bytes(pid) for pid in pids]
        complete, most = Completion(ranks.publish()), [0] * len(pids)
        while complete.is_awaited:
            most = [max(old, _private_bytes(pid)) for old, pid in zip(most, pids, strict=True)]
            time.sleep(LOOK_S)
        return max(0, *(peak - had for peak, had in zip(most, before, strict=True))) / complete.num_bytes


def _private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
