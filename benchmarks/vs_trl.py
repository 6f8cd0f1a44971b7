"""Penstock against TRL's GRPOTrainer on this machine: one tiny model, the same task, on the CPU or on one accelerator.

Both start from the same warm-started model and tokenizer and share prompts, scoring rule, group size, samples per step,
learning rate with its warm-up, clip and sampling; samples without an advantage count for both. TRL runs in an
environment of its own with all cores to itself, at the fastest of a few micro-batch sizes. Runs alternate, one seed of
each at a time. Rates leave out the first steps; held-out rewards are sampled by one and the same engine. TRL samples
and trains in turn, on data of its own weights; ours overlaps, on data up to `staleness_mean` versions old, of which
`masked_share` is too old to train. With `--device cuda` both compute in bfloat16, with float32 weights to train, and
ours shares the device between server and trainer; one seed.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers
import yaml
from hardware import accelerator_name
from lab import SKIPPED_STEPS, decisions, lines, masked_share, mean_length, samples_per_s, train_run
from report import Benchmark, Figures, publish, runs_dir
from strings import CAP, Say, score, write_tasks

from penstock.config import Config, DataConfig, TinyModelConfig
from penstock.data.sources import MixedTasks, TaskStream, open_tasks
from penstock.envs.demonstrations import demonstrations
from penstock.model.chat import ChatTokenizer
from penstock.model.load_policy import load_policy
from penstock.model.tiny import write_tiny_model
from penstock.rollout.request import GenerateRequest, SamplingParams
from penstock.rollout.slot_engine import SlotEngine
from penstock.trainer.warm_start import Imitation, warm_start

HERE = Path(__file__).parent
TRL = "trl==1.16.0"
TRL_ENVIRONMENT = HERE.parent / ".venv-trl"
NO_ENVIRONMENT = 69
"""Exit code (`EX_UNAVAILABLE`) where TRL cannot be installed."""
SEEDS = (0, 1, 2)
GROUP_SIZE = 8
WARM_START_BATCH = 128
MICRO_BATCHES, LARGE_MICRO_BATCHES = (32, 64, 128, 256), (128, 256)
TABLE = f"Penstock and {TRL.replace('==', ' ')}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What is learnt, and for how long."""

    name: str
    max_new_tokens: int
    max_context: int
    warm_start_steps: int
    learning_rate: float
    warmup_steps: int
    steps: int
    smooth: int
    """Steps a reward is averaged over before it counts as reached: more where prompts differ more."""
    groups: int = 32
    """Per step."""
    held_out: int = 256
    least_reward: float = 0.1
    """Of the policy both begin with: with less there is nothing to amplify, and answers end nowhere."""

    def quick(self) -> Workload:
        """Return it with so little to do that nothing is learnt."""
        small = replace(self, warm_start_steps=8, max_new_tokens=8, groups=4, held_out=32)
        return replace(small, steps=SKIPPED_STEPS + 2, smooth=2, least_reward=0.0)


WORKLOADS = (
    Workload(
        name="short",
        max_new_tokens=8,
        max_context=64,
        warm_start_steps=80,
        learning_rate=5e-4,
        warmup_steps=20,
        steps=200,
        smooth=5,
    ),
    Workload(
        name="longtail",
        max_new_tokens=CAP + 2,
        max_context=2 * CAP + 40,
        warm_start_steps=420,
        learning_rate=1e-4,
        warmup_steps=10,
        steps=60,
        smooth=10,
    ),
)

COLUMNS = ("samples_per_s", "response_tokens", "staleness_mean", "masked_share", "held_out")
RATIOS = ("speedup", "time_to_reward_ratio", "trl_micro_batch")
NAMES = [workload.name for workload in WORKLOADS]
BENCHMARK = Benchmark(
    name="vs_trl",
    measures=["."],
    figures=[
        *(f"{name}_{side}_{column}" for name in NAMES for side in ("ours", "TRL") for column in COLUMNS),
        *(f"{name}_{ratio}" for name in NAMES for ratio in RATIOS),
    ],
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What one run did."""

    rewards: Sequence[tuple[float, float]]
    """(seconds from the beginning to the end of a step, mean over the samples since the step before)."""
    samples_per_s: float
    """Trained, after the first steps."""
    response_tokens: float
    """Mean of an answer."""
    held_out: float
    smooth: int
    staleness_mean: float = 0.0
    masked_share: float = 0.0

    def smoothed(self) -> list[tuple[float, float]]:
        """(seconds, mean reward) over whole windows. The first steps of an asynchronous run are made of the shortest
        answers, which are the best: alone they would say that everything is learnt."""
        windows = (self.rewards[end - self.smooth : end] for end in range(self.smooth, len(self.rewards) + 1))
        return [(window[-1][0], fmean(reward for _, reward in window)) for window in windows]

    def time_to(self, reward: float) -> float | None:
        """Seconds until the smoothed reward is there."""
        return next((time for time, smoothed in self.smoothed() if smoothed >= reward), None)


class Bench:
    """One workload: its policy, its tasks, and where runs are kept."""

    def __init__(self, workload: Workload, runs: Path, trl_python: Path, *, device: torch.device) -> None:
        self._device = device
        self._workload, self._runs, self._trl_python = workload, runs / workload.name, trl_python
        self._runs.mkdir(parents=True, exist_ok=True)
        for name, count, seed in (("train", 40_000, 0), ("held_out", workload.held_out, 1)):
            write_tasks(self._tasks(name), workload=workload.name, count=count, seed=seed)
        self._policy = self._warm_policy()
        if (reward := self._held_out(self._policy)) < (least := workload.least_reward):
            sys.exit(f"{workload.name}: the policy to begin with has reward {reward:.3f}, less than {least}")
        print(f"{workload.name}: the policy to begin with has reward {reward:.3f}", file=sys.stderr, flush=True)

    def ours(self, seed: int) -> Found:
        config = self._runs / "ours.yaml"
        config.write_text(yaml.safe_dump(self._config()))
        run_dir = train_run(config, self._runs, "ours", seed, [])
        metrics = lines(run_dir / "metrics.jsonl")
        began = decisions(run_dir, "dispatch")[0]["time"]
        return Found(
            rewards=[(line["time"] - began, line["reward"]) for line in metrics if line["reward"] is not None],
            samples_per_s=samples_per_s(run_dir),
            response_tokens=mean_length(run_dir),
            held_out=self._held_out(run_dir / "checkpoints" / f"step_{self._workload.steps}"),
            smooth=self._workload.smooth,
            staleness_mean=fmean(line["staleness_mean"] for line in metrics),
            masked_share=masked_share(run_dir),
        )

    def theirs(self, seed: int, micro_batch: int) -> Found:
        out = self._runs / f"trl-{seed}"
        found = self._trl(out, seed=seed, micro_batch=micro_batch, steps=self._workload.steps)
        times = [ended - found["started_at"] for ended in found["ended_at"]]
        timed = times[SKIPPED_STEPS - 1 :]
        return Found(
            rewards=list(zip(times, found["rewards"], strict=False)),
            samples_per_s=self._workload.groups * GROUP_SIZE * (len(timed) - 1) / (timed[-1] - timed[0]),
            response_tokens=fmean(found["lengths"]),
            held_out=self._held_out(out),
            smooth=self._workload.smooth,
        )

    def best_micro_batch(self, candidates: Sequence[int]) -> int:
        """At which TRL takes the least time per step."""
        if len(candidates) == 1:
            return candidates[0]
        seconds = {}
        for size in candidates:
            found = self._trl(self._runs / f"trial-{size}", seed=0, micro_batch=size, steps=5)
            seconds[size] = found["ended_at"][-1] - found["ended_at"][0]
            print(f"TRL, micro-batch {size}: {seconds[size] / 4:.2f} s per step", file=sys.stderr, flush=True)
        return min(seconds, key=seconds.__getitem__)

    def _trl(self, out: Path, *, seed: int, micro_batch: int, steps: int) -> dict[str, Any]:
        spec, found = out.with_suffix(".json"), out.with_suffix(".found.json")
        asked = json.dumps(
            {
                "model": str(self._policy),
                "tasks": str(self._tasks("train")),
                "out": str(out),
                "threads": os.cpu_count(),
                "device": str(self._device),
                "seed": seed,
                "steps": steps,
                "micro_batch": micro_batch,
                "group_size": GROUP_SIZE,
                "groups_per_step": self._workload.groups,
                "max_new_tokens": self._workload.max_new_tokens,
                "learning_rate": self._workload.learning_rate,
                "warmup_steps": self._workload.warmup_steps,
            }
        )
        if not found.exists() or spec.read_text() != asked:
            found.unlink(missing_ok=True)
            spec.write_text(asked)
            environment = os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(HERE)}
            with out.with_suffix(".log").open("w") as log:
                command = [str(self._trl_python), str(HERE / "trl_side.py"), str(spec)]
                result = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
            if result.returncode:
                sys.exit(f"TRL failed: see {log.name}")
        found_tree: dict[str, Any] = json.loads(found.read_text())
        return found_tree

    def _config(self) -> dict[str, Any]:
        workload = self._workload
        return {
            "model": {"path": str(self._policy), "max_context": workload.max_context, "device": str(self._device)},
            "data": {"source": "jsonl", "path": str(self._tasks("train")), "eval_tasks": 0},
            "env": {
                "name": "strings:Say",
                "group_size": GROUP_SIZE,
                "max_new_tokens": workload.max_new_tokens,
                "penalize_truncation": False,
            },
            "scheduler": {"group_filter": []},
            "rollout": {"slots": 256},
            "trainer": {
                "steps": workload.steps,
                "groups_per_step": workload.groups,
                "learning_rate": workload.learning_rate,
                "warmup_steps": workload.warmup_steps,
                "checkpoint_every": 100_000,
            },
            "observe": {"progress": False, "plots": False, "samples": 0},
        }

    def _warm_policy(self) -> Path:
        directory = self._runs / "policy"
        if (directory / "model.safetensors").exists():
            return directory
        write_tiny_model(directory, TinyModelConfig(), self._workload.max_context)
        model = load_policy(directory, weights=False, seed=0)
        lessons = self._runs / "lessons.jsonl"
        count = self._workload.warm_start_steps * WARM_START_BATCH
        write_tasks(lessons, workload=self._workload.name, count=count, seed=2, growing=True)
        tasks, chat = tasks_in(lessons), ChatTokenizer.load(directory)

        def examples() -> Iterator[tuple[list[int], list[int]]]:
            return demonstrations(TaskStream(tasks).next, make=Say, max_turns=lambda task: 1, chat=chat, seed=0)

        steps = self._workload.warm_start_steps
        warm_start(Imitation(model).step, examples, steps=steps, batch_size=WARM_START_BATCH, learning_rate=2e-3)
        model.save_pretrained(directory)
        return directory

    def _held_out(self, model: Path) -> float:
        """Mean score of sampled answers to held-out questions."""
        chat = ChatTokenizer.load(self._policy)
        policy = load_policy(model, weights=True)
        engine = SlotEngine(policy, num_slots=256, max_context=self._workload.max_context, policy_version=0)
        source = tasks_in(self._tasks("held_out"))
        answers: dict[str, str] = {}
        index = 0
        while (task := source.task(index)) is not None:
            answers[str(index)] = str(task.payload["answer"])
            engine.submit(
                GenerateRequest(
                    rid=str(index),
                    prompt_ids=chat.prompt([{"role": "user", "content": str(task.payload["question"])}]),
                    params=SamplingParams(),
                    max_new_tokens=(self._workload.max_new_tokens,) * 4,
                    seeds=tuple(range(4 * index, 4 * index + 4)),
                )
            )
            index += 1
        scores = []
        while engine.has_work:
            for done in engine.step():
                expected = answers[done.request.rid]
                scores += [score(chat.decode(segment.token_ids), expected) for segment in done.segments]
        return fmean(scores)

    def _tasks(self, name: str) -> Path:
        return self._runs / f"{name}.jsonl"


def tasks_in(path: Path) -> MixedTasks:
    """All lines of a file."""
    return open_tasks(Config(data=DataConfig(source="jsonl", path=str(path), eval_tasks=0)))


def trl_environment(directory: Path) -> Path:
    """Return the Python of a virtual environment that adds TRL to the packages of this one; make it if it is not there.
    Exit with `NO_ENVIRONMENT` if that fails."""
    python, complete = directory / "bin" / "python", directory / "complete"
    wanted = [f"torch=={torch.__version__}", f"transformers=={transformers.__version__}", TRL]
    if complete.exists() and complete.read_text().split() == wanted:
        return python
    shutil.rmtree(directory, ignore_errors=True)
    venv.create(directory, with_pip=True)
    (packages,) = directory.glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text(sysconfig.get_path("purelib") + "\n")
    if subprocess.run([str(python), "-m", "pip", "install", "--quiet", *wanted]).returncode:
        print(f"cannot install {TRL} in {directory}", file=sys.stderr)
        sys.exit(NO_ENVIRONMENT)
    complete.write_text("\n".join(wanted))
    return python


def compare(bench: Bench, name: str, seeds: Sequence[int], candidates: Sequence[int], figures: Figures) -> None:
    micro_batch = bench.best_micro_batch(candidates)
    pairs = [(bench.ours(seed), bench.theirs(seed, micro_batch)) for seed in seeds]
    for row, runs in ((f"{name} ours", [ours for ours, _ in pairs]), (f"{name} TRL", [theirs for _, theirs in pairs])):
        for column in COLUMNS:
            figures.cell(TABLE, row, column, (getattr(run, column) for run in runs))
    figures.add(f"{name}_speedup", (ours.samples_per_s / theirs.samples_per_s for ours, theirs in pairs))
    figures.add(f"{name}_time_to_reward_ratio", (time_to_reward_ratio(ours, theirs) for ours, theirs in pairs))
    figures.add(f"{name}_trl_micro_batch", [micro_batch])


def time_to_reward_ratio(ours: Found, theirs: Found) -> float | None:
    """TRL's seconds over ours until nine tenths of the way to what both reach."""
    curves = [[reward for _, reward in run.smoothed()] for run in (ours, theirs)]
    first = min(curve[0] for curve in curves)
    target = first + 0.9 * (min(map(max, curves)) - first)
    mine, other = ours.time_to(target), theirs.time_to(target)
    return other / mine if mine and other else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="one seed, few steps, one micro-batch size")
    parser.add_argument("--runs", type=Path, default=Path("runs/vs_trl"), help="where runs are kept")
    parser.add_argument("--device", default="cpu", help="where both compute")
    parser.add_argument("--trl-python", type=Path, metavar="PYTHON", help="of an environment that has TRL already")
    parser.add_argument("--only", choices=[workload.name for workload in WORKLOADS], action="append")
    options = parser.parse_args()
    runs = runs_dir(options.runs, quick=options.quick)
    runs.mkdir(parents=True, exist_ok=True)
    device, figures = torch.device(options.device), Figures()
    trl_python = options.trl_python or trl_environment(TRL_ENVIRONMENT)
    few = options.quick or device.type != "cpu"
    seeds: Sequence[int] = SEEDS[:1] if few else SEEDS
    candidates: Sequence[int] = MICRO_BATCHES if device.type == "cpu" else LARGE_MICRO_BATCHES
    if options.quick:
        candidates = candidates[:1]
    for workload in WORKLOADS:
        if not options.only or workload.name in options.only:
            bench = Bench(workload.quick() if options.quick else workload, runs, trl_python, device=device)
            compare(bench, workload.name, seeds, candidates, figures)
    publish(
        BENCHMARK,
        figures.flat,
        options.json,
        tables=figures.tables,
        seeds=seeds,
        accelerator=accelerator_name(device),
        partial=bool(options.only),
    )


if __name__ == "__main__":
    main()
