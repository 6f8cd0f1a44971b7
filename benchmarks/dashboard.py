"""What the dashboard costs: the time to open a run of 100,000 steps and 5 million timeline lines, the memory of the
server, the processor time of a live viewer, and how much slower a training is while five browsers watch it.

The large run is made here. It is opened as after a move from another machine, without any index. The training runs
once; windows with a dashboard and five viewers alternate with windows without, and neighbours are compared.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import psutil
from report import Benchmark, Figures, arguments, environment, publish

from penstock.observe import jsonl

BENCHMARK = Benchmark(
    name="dashboard",
    measures=["dashboard", "supervisor/run_status.py", "observe/jsonl.py"],
    figures=[
        *("open_s", "indexed_s", "server_rss_mb", "reopen_s", "series_ms", "window_ms", "whole_timeline_ms"),
        *("decisions_ms", "live_update_core_share", "train_slowdown"),
    ],
)
STEPS, QUICK_STEPS = 100_000, 5_000
LINES, QUICK_LINES = 5_000_000, 200_000
BEGUN = 1_790_000_000.0
STEP_S = 2.0
RUN = "20260921-120000-long"
WHOLE = f"from={BEGUN}&to={BEGUN + 1e6}"
NUM_VIEWERS = 5
LIVE_S, QUICK_LIVE_S = 30.0, 5.0
PAIRS, WINDOW_STEPS = 24, 40
STEPS_S = 300.0
"""Time limit for the steps of a window."""
LINES_PER_S = 500
"""Timeline lines that the live run adds per second; the quickstart adds about as many."""
ALL_INDEXED_S = 600.0
NAMES = (
    "reward,reward/letters,entropy,staleness_mean,staleness_max,loss,grad_norm,kl_engine_trainer,rate:trainer_busy_s"
)
TRAINING = """
seed: 0
model: {max_context: 64, warm_start: {steps: 1}}
data: {source: seeds, eval_tasks: 0}
env: {name: guess_number, options: {limit: 15, max_guesses: 4}, group_size: 8, max_turns: 4, max_new_tokens: 4}
trainer: {steps: 100000, groups_per_step: 4, learning_rate: 1.0e-6, checkpoint_every: 100000}
scheduler: {group_filter: []}
observe: {plots: false, progress: false}
"""


def metrics_line(step: int, chance: random.Random) -> str:
    """Return a line as long as that of a run with two environments."""
    line: dict[str, Any] = {"step": step, "time": BEGUN + step * STEP_S, "policy_version": step}
    for tag in ("", "/letters", "/numbers"):
        for name in ("reward", "reward_std", "response_length_mean", "turns_mean", "truncated_share"):
            line[name + tag] = chance.random()
        for number in range(14):
            line[f"env/metric_{number}{tag}"] = chance.random()
    for number in range(40):
        line[f"counter_{number}_total"] = step * 100.0 + number
    for name in ("entropy", "staleness_mean", "staleness_max", "loss", "grad_norm", "kl_engine_trainer", "ess"):
        line[name] = chance.random()
    line |= {"wall_s": step * STEP_S, "trainer_busy_s": step * 1.0, "num_trainers": 1, "episodes": 256}
    line |= {"generator_busy_s": step * 1.5, "num_servers": 8, "tokens_generated_total": step * 90_000.0}
    line |= {"episodes_total": step * 256, "tokens_trained_total": step * 70_000.0}
    states = ("admitted", "pending", "leased", "rewarding", "ready", "training", "trained", "filtered", "failed")
    return json.dumps(line | {"ledger": dict.fromkeys(states, step * 8), "groups_dropped": {"all equal": step}})


def write_metrics(path: Path, num_steps: int) -> None:
    """Write the metrics. The numbers of a line are those of one of a few hundred lines, but for step and time."""
    chance = random.Random(0)
    models = [metrics_line(step, chance).partition('"policy_version"')[2] for step in range(200)]
    with path.open("w") as file:
        for step in range(1, num_steps + 1):
            file.write(f'{{"step": {step}, "time": {BEGUN + step * STEP_S}, "policy_version"{models[step % 200]}\n')


def timeline_lines(number: int, at: float) -> Iterator[str]:
    """Yield the ten lines of a tenth part of a step: three decisions about each of two groups, and four spans."""
    for group in (2 * number, 2 * number + 1):
        about = f'"time": {at:.6f}, "reason"'
        yield (
            f'{{"kind": "decision", "decider": "admission", {about}: "{group % 32} of 32 wait", "group": {group}, '
            f'"task": "letters/train/{group}", "predicted_tokens": null}}\n'
        )
        yield (
            f'{{"kind": "decision", "decider": "dispatch", {about}: "fifo: waited 0.136 s, 0 tokens predicted; 44 of '
            f'64 groups in flight", "group": {group}, "worker": "env-0", "episodes": 8, "free_grants": 24, '
            '"in_flight": 45}\n'
        )
        yield f'{{"kind": "decision", "decider": "filter", {about}: "kept", "group": {group}}}\n'
    for server in range(3):
        yield (
            f'{{"process": "rollout-{(number + server) % 8}", "kind": "generate", "start": {at - 0.15:.6f}, '
            f'"end": {at:.6f}, "policy_version": {number // 10}}}\n'
        )
    yield (
        f'{{"process": "trainer-0", "kind": "train", "start": {at - 0.1:.6f}, "end": {at:.6f}, '
        f'"policy_version": {number // 10}}}\n'
    )


def write_timeline(path: Path, num_lines: int, seconds: float) -> None:
    """Write the timeline; a rare decision stands in every thousandth part."""
    with path.open("w") as file:
        num_parts = num_lines // 10
        for number in range(num_parts):
            at = BEGUN + seconds * number / num_parts
            file.writelines(timeline_lines(number, at))
            if number % (num_parts // 1000) == 0:
                file.write(f'{{"kind": "decision", "decider": "tuning", "time": {at}, "reason": "nothing better"}}\n')


def make_run(run_dir: Path, num_steps: int, num_lines: int) -> None:
    """Write the files of a run that has completed."""
    run_dir.mkdir(parents=True)
    seconds = num_steps * STEP_S
    state = {"format": 3, "run_id": run_dir.name, "lives": 1, "lived_s": 0.0, "status": "completed", "error": None}
    state |= {"born": BEGUN, "started": BEGUN, "ended": BEGUN + seconds, "processes": {}, "leftovers": []}
    (run_dir / "state.json").write_text(json.dumps(state))
    (run_dir / "config.yaml").write_text(f"pipeline: train\ntrainer: {{steps: {num_steps}}}\nenv: {{name: letters}}\n")
    with (run_dir / "events.jsonl").open("w") as file:
        for step in range(100, num_steps + 1, 100):
            at = BEGUN + step * STEP_S
            event = {"time": at, "event": "checkpoint", "step": step, "path": f"checkpoints/step_{step}"}
            found = {"reward": 0.5, "tasks": 256, "pass_at": {"1": 0.5}, "tags": {}}
            file.write(json.dumps(event) + "\n")
            file.write(json.dumps({"time": at, "event": "evaluation", "when": f"step {step}", "step": step} | found))
            file.write("\n")
    write_metrics(run_dir / "metrics.jsonl", num_steps)
    write_timeline(run_dir / "timeline.jsonl", num_lines, seconds)


class Server:
    """A dashboard in a process of its own."""

    def __init__(self, runs_dir: Path) -> None:
        words = [sys.executable, "-P", "-m", "penstock.cli.main", "dashboard", "--port", "0"]
        self._process = subprocess.Popen(
            [*words, "--runs-dir", str(runs_dir)], stdout=subprocess.PIPE, text=True, env=environment()
        )
        assert self._process.stdout is not None
        url = re.search(r"http://[^/]+", self._process.stdout.readline())
        assert url is not None, "the dashboard has not started"
        self.url = url[0]
        self._seen = psutil.Process(self._process.pid)

    def get(self, path: str) -> dict[str, Any]:
        """Return the answer of a route."""
        with urllib.request.urlopen(f"{self.url}/api/{path}", timeout=60) as answer:
            return dict(json.load(answer))

    @property
    def cpu_s(self) -> float:
        """Return the processor time so far."""
        times = self._seen.cpu_times()
        return times.user + times.system

    @property
    def peak_mb(self) -> float:
        """Return the largest resident memory so far."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        found = re.search(r"VmHWM:\s+(\d+) kB", status)
        assert found is not None
        return int(found[1]) * 1024 / 1e6

    def close(self) -> None:
        """End the server."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=30)


@contextmanager
def serving(runs_dir: Path) -> Iterator[Server]:
    server = Server(runs_dir)
    try:
        yield server
    finally:
        server.close()


@contextmanager
def watching(server: Server, run: str, number: int) -> Iterator[None]:
    """Follow a run with this number of viewers during the body."""
    streams = [urllib.request.urlopen(f"{server.url}/api/runs/{run}/live", timeout=60) for _ in range(number)]

    def read(stream: Any) -> None:
        with suppress(OSError, ValueError, AttributeError):
            while stream.readline():
                pass

    readers = [threading.Thread(target=read, args=[stream], daemon=True) for stream in streams]
    for reader in readers:
        reader.start()
    try:
        yield
    finally:
        for stream in streams:
            stream.fp.raw._sock.shutdown(2)
        for reader in readers:
            reader.join(timeout=10)


def open_run(server: Server, run: str) -> float:
    """Ask for all that the first page shows, all at once as a browser does; return the seconds until it is there."""
    paths = ["status", "names", f"series?names={NAMES}&points=800", "evaluations", "timeline?width=1200"]
    asked = [f"runs/{run}/{path}" for path in [*paths, "decisions?limit=100", "settings"]]
    threads = [threading.Thread(target=server.get, args=[path]) for path in asked]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began


def wait_until_indexed(server: Server) -> None:
    """Wait until answers about the large run are complete."""
    limit = time.monotonic() + ALL_INDEXED_S
    while any("indexed" in server.get(f"runs/{RUN}/{path}") for path in ("series?names=reward", f"timeline?{WHOLE}")):
        if time.monotonic() > limit:
            sys.exit(f"dashboard: the run is not indexed within {ALL_INDEXED_S:g} s")
        time.sleep(0.2)


def milliseconds(server: Server, path: str, *, times: int = 5) -> float:
    """Return the median time of an answer."""
    found = []
    for _ in range(times):
        began = time.perf_counter()
        server.get(path)
        found.append((time.perf_counter() - began) * 1000)
    return median(found)


def opening(figures: Figures, runs_dir: Path) -> None:
    """Open the large run, wait until it is read, ask for parts of it, and open it again."""
    with serving(runs_dir) as server:
        server.get("runs")
        began = time.perf_counter()
        figures.add("open_s", [open_run(server, RUN)])
        wait_until_indexed(server)
        figures.add("indexed_s", [time.perf_counter() - began])
        middle = BEGUN + 1000
        for name, path in {
            "series_ms": f"series?names={NAMES}&points=800",
            "window_ms": f"timeline?from={middle}&to={middle + 60}&width=1200",
            "whole_timeline_ms": f"timeline?{WHOLE}&width=1200",
            "decisions_ms": "decisions?decider=tuning&limit=100",
        }.items():
            figures.add(name, [milliseconds(server, f"runs/{RUN}/{path}")])
        figures.add("server_rss_mb", [server.peak_mb])
    with serving(runs_dir) as server:
        server.get("runs")
        figures.add("reopen_s", [open_run(server, RUN)])


def live(figures: Figures, runs_dir: Path, *, seconds: float) -> None:
    """Add to the files of a run as a training does, and measure the processor time of one viewer."""
    run_dir = runs_dir / RUN
    state = json.loads((run_dir / "state.json").read_text())
    (run_dir / "state.json").write_text(json.dumps(state | {"status": "running", "ended": None}))
    step = sum(chunk.count(b"\n") for chunk in iter_chunks(run_dir / "metrics.jsonl"))
    chance = random.Random(1)
    with serving(runs_dir) as server:
        open_run(server, RUN)
        wait_until_indexed(server)
        with (
            watching(server, RUN, 1),
            (run_dir / "metrics.jsonl").open("a") as metrics,
            (run_dir / "timeline.jsonl").open("a") as timeline,
        ):
            time.sleep(2.0)  # the first messages
            began, before = time.perf_counter(), server.cpu_s
            while (now := time.perf_counter() - began) < seconds:
                step += 1
                print(metrics_line(step, chance), file=metrics, flush=True)
                for number in range(LINES_PER_S // 10):
                    timeline.writelines(timeline_lines(number, BEGUN + step * STEP_S))
                timeline.flush()
                time.sleep(max(0.0, began + now + 1.0 - time.perf_counter()))
            figures.add("live_update_core_share", [(server.cpu_s - before) / (time.perf_counter() - began)])
    (run_dir / "state.json").write_text(json.dumps(state))


def iter_chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            yield chunk


@contextmanager
def training(runs_dir: Path) -> Iterator[Path]:
    """Train a tiny policy during the body; yield the run directory once it steps."""
    config = runs_dir / "run.yaml"
    config.write_text(TRAINING)
    words = [sys.executable, "-P", "-m", "penstock.cli.main", "train", str(config)]
    log = (runs_dir / "log").open("w")
    process = subprocess.Popen(
        [*words, f"runs_dir={runs_dir}", "run_id=watched"], stdout=log, stderr=log, env=environment()
    )
    metrics = runs_dir / "watched" / "metrics.jsonl"
    try:
        limit = time.monotonic() + 300
        while not metrics.exists() or metrics.stat().st_size < 100_000:
            if process.poll() is not None or time.monotonic() > limit:
                sys.exit(f"dashboard: the training does not step:\n{(runs_dir / 'log').read_text()[-2000:]}")
            time.sleep(0.1)
        yield metrics.parent
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=90)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=30)
        log.close()


def seconds_of(run_dir: Path, num_steps: int) -> float:
    """Wait until the training has taken a number of steps, and return their time."""
    path = run_dir / "metrics.jsonl"
    followed, times = jsonl.Follower(path), list[float]()
    followed.read_new()
    limit = time.monotonic() + STEPS_S
    while len(times) <= num_steps:
        if time.monotonic() > limit:
            sys.exit(f"dashboard: the training takes no {num_steps} steps within {STEPS_S:g} s")
        time.sleep(0.02)
        times += [float(line["time"]) for line in followed.read_new()]
    return times[num_steps] - times[0]


def slowdown(figures: Figures, runs_dir: Path, *, pairs: int, num_steps: int) -> None:
    """Compare the speed of a training with five viewers and without, in neighbouring windows."""
    ratios = []
    with training(runs_dir) as run_dir:
        before = seconds_of(run_dir, num_steps)
        for _ in range(pairs):
            with serving(runs_dir) as server, watching(server, run_dir.name, NUM_VIEWERS):
                open_run(server, run_dir.name)
                time.sleep(1.0)
                watched = seconds_of(run_dir, num_steps)
            time.sleep(1.0)
            after = seconds_of(run_dir, num_steps)
            ratios.append(2 * watched / (before + after))
            before = after
    figures.add("train_slowdown", [median(ratios)])
    print("slowdown of each pair of windows:", *(f"{ratio:.3f}" for ratio in ratios))


def main(words: Sequence[str] | None = None) -> None:
    options = arguments(__doc__ or "", only="opening, live or slowdown", directory="where the runs are made")
    quick, figures = options.quick, Figures()
    with TemporaryDirectory(prefix="penstock-benchmark-", dir=options.directory) as directory:
        runs_dir = Path(directory)
        if options.only != "slowdown":
            began = time.perf_counter()
            make_run(runs_dir / RUN, QUICK_STEPS if quick else STEPS, QUICK_LINES if quick else LINES)
            os.sync()
            print(f"made a run in {time.perf_counter() - began:.0f} s")
        if options.only in (None, "opening"):
            opening(figures, runs_dir)
        if options.only in (None, "live"):
            live(figures, runs_dir, seconds=QUICK_LIVE_S if quick else LIVE_S)
        if options.only in (None, "slowdown"):
            num_pairs, num_steps = (1, 5) if quick else (PAIRS, WINDOW_STEPS)
            (runs_dir / "trained").mkdir()
            slowdown(figures, runs_dir / "trained", pairs=num_pairs, num_steps=num_steps)
    publish(BENCHMARK, figures.flat, options.json, tables=figures.tables, partial=options.only is not None)


if __name__ == "__main__":
    main()
