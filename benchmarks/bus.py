"""The two planes: messages per second and their latency on the control bus, and bytes per second through the pool.

The bus is that of a run: a controller process and 1, 8 or 64 worker processes with their sockets, on one machine. The
workers send what environment workers send for a group of eight: a request for each turn of each member, the members
that have generated, the rewards, and the completed group. The controller answers with grants and new work. No process
plays or schedules, so only the bus works. Acknowledgements are not counted as messages.

`messages_per_s`: every process works as fast as it can, and each worker plays four groups at once. `latency_p50_ms` and
`latency_p99_ms`: the time from a worker's request for a turn to its grant. This takes two messages and two
acknowledgements. Meanwhile each worker asks for ten turns per second, a usual rate for some tens of episodes.
`controller_us_per_message`: processor time of the controller per message, at the highest speed.

`pool_vs_copy`: the pool writes, indexes, maps, checks and reads groups. A plain copy moves the very records into a
mapped file in the same directory, and out of it. The figure is the pool's bytes per second over those of the copy.
"""

from __future__ import annotations

import asyncio
import gc
import mmap
import multiprocessing
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import uvloop
from report import Benchmark, Figures, arguments, publish

from penstock.control.bus import CONTROLLER, Bus, Peer
from penstock.control.messages import (
    AnyMessage,
    DataGenerated,
    EpisodesGenerated,
    Grant,
    GrantRequest,
    Hello,
    NewTask,
    RewardComputed,
    TaskRequest,
    Welcome,
)
from penstock.control.remote_workers import RemoteWorkers
from penstock.ports.work import Work
from penstock.samples import Sample
from penstock.store.experience_pool import ExperiencePool
from penstock.store.payload_files import PayloadReader, PayloadWriter, encode
from penstock.types import EpisodeId, EpisodeSummary, PayloadRef, Sampling, SegmentGrant, Task

WORKERS = (1, 8, 64)
COLUMNS = ("messages_per_s", "latency_p50_ms", "latency_p99_ms", "controller_us_per_message")
POOL = ("pool_vs_copy", "pool_gb_per_s", "copy_gb_per_s")
BENCHMARK = Benchmark(
    name="bus",
    measures=["control", "store"],
    figures=[*COLUMNS, *(f"{workers}_{column}" for workers in WORKERS for column in COLUMNS), *POOL],
)
TABLE = "Control bus, by number of worker processes"
GROUP_SIZE, TURNS = 8, 4
GROUPS_AT_ONCE = 4
TURNS_PER_S = 10.0
"""Of each worker, at which latency is measured."""
SETTLE_S, WATCH_S, QUICK_WATCH_S = 1.0, 8.0, 1.0
TIMEOUT_S = 60.0
TOKENS = 2048
"""Of one sample."""
GROUPS, STEP, ROUNDS = 256, 32, 7
"""Groups of a round, and of a step, which the trainer reads at once."""
QUESTION = "A farmer has 12 sheep and sells 5 of them every week; how many are left after three weeks? " * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What a worker saw in the time that was watched."""

    num_messages: int
    """Sent, and received from the controller."""
    latencies_s: list[float]
    """From a request for a turn to its grant."""


@dataclass(slots=True)
class Player:
    """A worker that plays without thinking. `turns_per_s` None is as fast as it can."""

    name: str
    turns_per_s: float | None
    num_messages: int = 0
    latencies_s: list[float] = field(default_factory=list)
    work: asyncio.Queue[Work] = field(default_factory=asyncio.Queue)
    waiting: dict[EpisodeId, asyncio.Future[None]] = field(default_factory=dict)

    async def hear(self, _: str, message: AnyMessage) -> None:
        self.num_messages += 1
        match message:
            case NewTask(work=work):
                self.work.put_nowait(work)
            case Grant(grant=grant):
                granted = self.waiting.pop(grant.episode)
                if not granted.done():  # cancelled at the end
                    granted.set_result(None)

    async def play(self, directory: str, nonce: str, began: Connection, watch_s: float) -> None:
        peer = Peer(directory, self.name, self.hear)
        async with asyncio.TaskGroup() as tasks:
            hearing = tasks.create_task(peer.run())
            hello = Hello(role="env", name=self.name, nonce=nonce, pid=1)
            await peer.join(hello, timeout_s=TIMEOUT_S)
            await self._send(peer, TaskRequest(capacity=GROUP_SIZE * GROUPS_AT_ONCE))
            players = [tasks.create_task(self._play_groups(peer)) for _ in range(GROUPS_AT_ONCE)]
            await asyncio.to_thread(began.recv)
            self.num_messages, self.latencies_s = 0, []
            await asyncio.sleep(watch_s)
            began.send(Played(num_messages=self.num_messages, latencies_s=self.latencies_s))
            await asyncio.to_thread(began.recv)  # everybody has counted
            for task in (*players, hearing):
                task.cancel()
        peer.close()

    async def _play_groups(self, peer: Peer) -> None:
        while True:
            work = await self.work.get()
            episodes = work.episodes
            await asyncio.gather(*(self._play(peer, episode) for episode in episodes))
            await self._send(peer, EpisodesGenerated(episodes=episodes, num_tokens=[64] * GROUP_SIZE))
            summaries = [summary(episode) for episode in episodes]
            for each in summaries[:-1]:
                await self._send(peer, RewardComputed(episodes=[each], saved=[None]))
            await self._send(peer, DataGenerated(group=work.group, ref=REF, episodes=summaries))

    async def _play(self, peer: Peer, episode: EpisodeId) -> None:
        for turn in range(TURNS):
            if self.turns_per_s is not None:
                await asyncio.sleep(np.random.exponential(GROUP_SIZE * GROUPS_AT_ONCE / self.turns_per_s))
            granted = self.waiting[episode] = asyncio.get_running_loop().create_future()
            asked = time.perf_counter()
            await self._send(peer, GrantRequest(episode=episode, unfinished=False, num_tokens=16 * turn))
            await granted
            self.latencies_s.append(time.perf_counter() - asked)

    async def _send(self, peer: Peer, message: AnyMessage) -> None:
        self.num_messages += 1
        await peer.request(CONTROLLER, message, timeout_s=TIMEOUT_S)


REF = PayloadRef(file="env-0-00000.seg", offset=0, length=200_000, checksum=1)


def summary(episode: EpisodeId) -> EpisodeSummary:
    return EpisodeSummary(
        episode=episode,
        status="completed",
        reward=1.0,
        num_turns=TURNS,
        prompt_tokens=64,
        response_tokens=64,
        version_min=3,
        version_max=4,
        seconds=1.5,
        stop_reason="terminated",
        info={"metrics": {"steps": 4.0}},
    )


def play(name: str, turns_per_s: float | None, directory: str, nonce: str, began: Connection, watch_s: float) -> None:
    """In a process of its own."""
    with suppress(KeyboardInterrupt):
        uvloop.run(Player(name, turns_per_s).play(directory, nonce, began, watch_s))


class Controller:
    """Grants everything; another group for each that has been played."""

    def __init__(self, directory: str, nonce: str, num_workers: int, tasks: asyncio.TaskGroup) -> None:
        self.bus = Bus(directory, self.hear, nonce=nonce)
        self._workers = RemoteWorkers(self.bus, tasks, timeout_s=TIMEOUT_S)
        self._num_groups = 0
        self._missing = num_workers
        self.all_play = asyncio.Event()

    async def hear(self, peer: str, message: AnyMessage) -> AnyMessage | None:
        match message:
            case Hello():
                return Welcome(server_urls=[])
            case TaskRequest(capacity=capacity):
                self._missing -= 1
                if not self._missing:
                    self.all_play.set()
                for _ in range(capacity // GROUP_SIZE):
                    self._start(peer)
            case GrantRequest(episode=episode):
                self._workers.grant(peer, SegmentGrant(episode=episode, max_tokens=64))
            case DataGenerated():
                self._start(peer)
        return None

    def _start(self, peer: str) -> None:
        self._num_groups += 1
        task = Task(task_id=str(self._num_groups), tag="main", index=self._num_groups, payload={"question": QUESTION})
        work = Work(
            task=task,
            group=self._num_groups,
            attempt=0,
            group_size=GROUP_SIZE,
            members=tuple(range(GROUP_SIZE)),
            max_tokens=(64,) * GROUP_SIZE,
            env_seed=1,
            sampling_seed=1,
            deadline_s=60.0,
            sampling=Sampling(),
        )
        self._workers.start(peer, work)

    def close(self) -> None:
        self._workers.close()
        self.bus.close()


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What all workers did together."""

    messages_per_s: float
    turns_per_s: float
    latencies_ms: Sequence[float]
    cpu_us_per_message: float


def load(num_workers: int, turns_per_s: float | None, watch_s: float) -> Load:
    """Let `num_workers` processes play, with these turns a second in all."""
    nonce = secrets.token_hex(16)
    share = None if turns_per_s is None else turns_per_s / num_workers
    forking = multiprocessing.get_context("fork")
    pipes, processes = [], []
    with TemporaryDirectory() as directory:
        for number in range(num_workers):  # before this process has threads or an event loop
            ours, theirs = forking.Pipe()
            words = (f"env-{number}", share, directory, nonce, theirs, watch_s)
            processes.append(forking.Process(target=play, args=words, daemon=True))
            processes[-1].start()
            pipes.append(ours)
        try:
            found, cpu_s = uvloop.run(watch(directory, nonce, pipes, watch_s))
        finally:
            for process in processes:
                process.join(timeout=10.0)
                process.kill()
    num_messages = sum(each.num_messages for each in found)
    return Load(
        messages_per_s=num_messages / watch_s,
        turns_per_s=sum(len(each.latencies_s) for each in found) / watch_s,
        latencies_ms=[1e3 * seconds for each in found for seconds in each.latencies_s],
        cpu_us_per_message=1e6 * cpu_s / num_messages,
    )


async def watch(directory: str, nonce: str, pipes: Sequence[Connection], watch_s: float) -> tuple[list[Played], float]:
    """Return what each worker saw, and the processor time of this process meanwhile."""
    async with asyncio.TaskGroup() as tasks:
        controller = Controller(directory, nonce, len(pipes), tasks)
        running = tasks.create_task(controller.bus.run())
        await asyncio.wait_for(controller.all_play.wait(), TIMEOUT_S)
        await asyncio.sleep(SETTLE_S)
        began = time.process_time()
        for pipe in pipes:
            pipe.send("watch")
        await asyncio.sleep(watch_s)
        cpu_s = time.process_time() - began
        found = [await asyncio.to_thread(pipe.recv) for pipe in pipes]
        for pipe in pipes:
            pipe.send("end")
        running.cancel()
        await asyncio.wait([running])
        controller.close()
    return found, cpu_s


def bus_figures(figures: Figures, *, quick: bool) -> None:
    watch_s = QUICK_WATCH_S if quick else WATCH_S
    for num_workers in WORKERS:
        full = load(num_workers, None, watch_s)
        paced = load(num_workers, TURNS_PER_S * num_workers, watch_s)
        p50, p99 = np.percentile(paced.latencies_ms, (50, 99))
        values = (full.messages_per_s, float(p50), float(p99), full.cpu_us_per_message)
        for column, value in zip(COLUMNS, values, strict=True):
            figures.cell(TABLE, str(num_workers), column, [value])
            if num_workers == max(WORKERS):
                figures.add(column, [value])


def group_of(number: int) -> list[Sample]:
    """Made-up samples of a group."""
    draw = np.random.default_rng(number)
    mask = np.ones(TOKENS, dtype=np.uint8)
    mask[:256] = 0
    return [
        Sample(
            group=number,
            episode=episode,
            reward=1.0,
            truncated=False,
            token_ids=draw.integers(0, 150_000, TOKENS, dtype=np.int32),
            loss_mask=mask,
            logprobs=-draw.random(TOKENS, dtype=np.float32),
            versions=np.full(TOKENS, 3, dtype=np.int32),
        )
        for episode in range(GROUP_SIZE)
    ]


def through_pool(directory: Path, groups: Sequence[list[Sample]]) -> tuple[float, int]:
    """Return the seconds from samples to the same samples, and the bytes of their records. A worker's writer writes
    them, the controller's index takes them, and the trainer's reader maps, checks and copies every token."""
    pool, writer, reader = ExperiencePool(directory), PayloadWriter(directory, "env-0"), PayloadReader(directory)
    numbered = [(number, Task(task_id=str(number), tag="main", index=number)) for number in range(len(groups))]
    pool.admit_groups(numbered)
    num_bytes, began = 0, time.perf_counter()
    for start in range(0, len(groups), STEP):
        refs = []
        for (number, task), samples in zip(numbered[start : start + STEP], groups[start : start + STEP], strict=True):
            refs.append(writer.append(samples))
            episodes = [EpisodeId("main", number, sample.episode, 0) for sample in samples]
            pool.add_group(number, task, refs[-1], [summary(episode) for episode in episodes])
        for sample in (sample for ref in refs for sample in reader.read(ref)):
            touch(sample)
        num_bytes += sum(ref.length for ref in refs)
    seconds = time.perf_counter() - began
    writer.close()
    pool.close()
    return seconds, num_bytes


def touch(sample: Sample) -> None:
    """Read every token, as a learner does."""
    for column in (sample.token_ids, sample.loss_mask, sample.logprobs, sample.versions):
        column.copy()


def through_mapping(directory: Path, records: Sequence[bytes]) -> float:
    """Return the seconds for a copy of the records into a mapped file, and out of it."""
    sources = [np.frombuffer(record, dtype=np.uint8) for record in records]
    ends = np.cumsum([len(record) for record in records]).tolist()
    with (directory / "copy").open("w+b") as file:
        file.truncate(ends[-1])
        began = time.perf_counter()
        with mmap.mmap(file.fileno(), ends[-1]) as mapped:
            whole = np.frombuffer(mapped, dtype=np.uint8)
            targets = [whole[end - len(source) : end] for source, end in zip(sources, ends, strict=True)]
            for start in range(0, len(records), STEP):
                for target, source in zip(targets[start : start + STEP], sources[start : start + STEP], strict=True):
                    target[:] = source
                for target in targets[start : start + STEP]:
                    target.copy()
            del whole, targets, target
        return time.perf_counter() - began


def pool_figures(figures: Figures, *, quick: bool) -> None:
    groups = [group_of(number) for number in range(GROUPS // 8 if quick else GROUPS)]
    records = [bytes(encode(samples, bytearray())) for samples in groups]
    pools, copies, shares = [], [], []
    for _ in range(2 if quick else ROUNDS):
        with TemporaryDirectory() as directory:
            seconds, num_bytes = through_pool(Path(directory), groups)
            plain = through_mapping(Path(directory), records)
        pools.append(num_bytes / seconds / 1e9)
        copies.append(num_bytes / plain / 1e9)
        shares.append(plain / seconds)
    for name, values in zip(POOL, (shares, pools, copies), strict=True):
        figures.add(name, [median(values)])


def main() -> None:
    options = arguments(__doc__ or "")
    gc.freeze()  # as in every process of a run (`runtime/lasting_imports.py`)
    figures = Figures()
    bus_figures(figures, quick=options.quick)
    pool_figures(figures, quick=options.quick)
    publish(BENCHMARK, figures.flat, options.json, tables=figures.tables)


if __name__ == "__main__":
    main()
