"""Writes the runs that the browser tests look at: their journals as a supervisor writes them, the rest as processes do.

Texts that a run holds have markup in them, which must never act.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from run_with_groups import ShownRun

from penstock.config import load_config
from penstock.observe import jsonl
from penstock.simulator.prediction import Records, predict
from penstock.supervisor.ownership import owning
from penstock.supervisor.run_journal import RunJournal
from penstock.supervisor.states import ProcessState, RunState
from penstock.types import EpisodeState

ROOT = Path(__file__).parents[2]
MARKUP = "<img src=x onerror=window.acted=1>"
NUM_STEPS = 40
GROUP_SIZE = 4
PROCESSES = {"controller": "controller", "rollout-0": "rollout", "trainer-0": "trainer", "env-0": "env"}


class WrittenRun:
    """A run that is written step by step. `latest`: time of its latest step (seconds since the epoch)."""

    def __init__(self, runs_dir: Path, name: str, *, environment: str = "single_turn", age_s: float = 100.0) -> None:
        self.run_dir = runs_dir / name
        (self.run_dir / "logs").mkdir(parents=True, exist_ok=True)
        config = load_config(ROOT / "examples/quickstart/run.yaml", [f"run_id={name}", f"trainer.steps={NUM_STEPS}"])
        written = config.model_dump(mode="json")
        written["env"]["name"] = environment
        (self.run_dir / "config.yaml").write_text(json.dumps(written))  # JSON is YAML
        self.journal = RunJournal.create(self.run_dir, run_id=name, runtime_dir=self.run_dir / "runtime")
        self.step = 0
        self.started = self.latest = time.time() - age_s

    def start(self) -> None:
        """All processes come up."""
        self.journal.move(RunState.STARTING, actor="supervisor")
        for name, role in PROCESSES.items():
            self.journal.move_process(name, ProcessState.STARTING, role=role, pid=1, restarts=0)
            self.journal.move_process(name, ProcessState.READY)
            lines = [f"2026-11-28T12:00:{second:02d}Z INFO {name}: line {second} {MARKUP}" for second in range(40)]
            (self.run_dir / "logs" / f"{name}.log").write_text("\n".join(lines) + "\n")
        self.journal.move(RunState.RUNNING, actor="supervisor")

    def take_steps(self, num_steps: int) -> None:
        """Write the metrics, spans and decisions of the next steps, one a second."""
        for _ in range(num_steps):
            self.take_step(self.latest + 1.0)

    def take_step(self, now: float) -> None:
        """Write the metrics, spans and decisions of the next step. `now`: its end (seconds since the epoch)."""
        self.step += 1
        self.latest = now
        self._write_step(self.step, now)

    def _write_step(self, step: int, now: float) -> None:
        learnt = 1 - math.exp(-step / 12)
        trained, filtered = 8 * GROUP_SIZE * step, 4 * GROUP_SIZE * step
        ledger = {
            "admitted": trained + filtered + 8,
            "pending": 4,
            "leased": 4,
            "trained": trained,
            "filtered": filtered,
        }
        metrics = {
            "step": step,
            "time": now,
            "wall_s": now - self.started,
            "policy_version": step,
            "reward": 0.3 + 0.6 * learnt + 0.03 * math.sin(step),
            "reward/words": 0.3 + 0.6 * learnt,
            "reward/numbers": 0.2 + 0.5 * learnt,
            "episodes": 48,
            "episodes_total": 48 * step,
            "response_length_mean": 5.0 + 0.1 * math.sin(step),
            "turns_mean": 1.5,
            "truncated_share": 0.01,
            "tokens_generated_total": 900.0 * step,
            "tokens_trained_total": 600.0 * step,
            "tokens_masked_share": 0.02,
            "tokens_masked_stale": 12.0,
            "staleness_tokens": {"0": 320.0, "1": 260.0, "2": 8.0},
            "trainer_busy_s": 0.4 * step,
            "generator_busy_s": 0.8 * step,
            "num_trainers": 1,
            "num_servers": 1,
            "servers_by_transport": {"shared_memory": 1},
            "groups_dropped": {f"zero_variance: all rewards are 1 {MARKUP}": 4 * step},
            "staleness_mean": 0.5,
            "staleness_max": 1.0,
            "entropy": 1.8 * math.exp(-step / 15) + 0.1,
            "loss": 0.01 * math.cos(step),
            "grad_norm": 1.0,
            "clip_fraction": 0.01,
            "ess": 0.99,
            "sample_ess": 0.98,
            "kl_engine_trainer": 1e-7 if step % 8 == 1 else None,
            "learning_rate": 0.0005,
            "groups_pending": 30,
            "groups_in_flight": 60,
            "oldest_wait_s": 0.2,
            "trigger_min_samples": 32.0 if step > 10 else 16.0,
            "trigger_max_wait_s": 0.25,
            "length_p50_trained": 5.0,
            "length_p90_trained": 6.0,
            "length_p50_admitted": 5.0,
            "length_ks": 0.01,
            "ledger": ledger,
        }
        jsonl.append(self.run_dir / "metrics.jsonl", metrics)
        for process, kind, start, end in (
            ("rollout-0", "update_weights", -1.0, -0.95),
            ("rollout-0", "generate", -0.95, -0.2),
            ("trainer-0", "train", -0.9, -0.5),
            ("trainer-0", "step", -0.5, -0.4),
            ("trainer-0", "publish", -0.4, -0.35),
        ):
            span = {"process": process, "kind": kind, "start": now + start, "end": now + end, "policy_version": step}
            self._append_timeline(span)
        self.decide("admission", now, f"{step % 32} of 32 wait", group=step, task=f"words/{step}{MARKUP}")
        self.decide("filter", now, "kept" if step % 3 else f"all rewards are 1 {MARKUP}", group=step)
        self.decide("trigger", now, "count: 4 groups ready, 2 wanted", groups=4, step=True)
        levels = {"normal_below": 0.7, "low_below": 0.35}
        self.decide("feedback", now, "entropy is high", entropy=metrics["entropy"], reference=1.7, **levels)

    def decide(self, decider: str, now: float, reason: str, **inputs: Any) -> None:
        """Write a decision."""
        self._append_timeline({"kind": "decision", "decider": decider, "time": now, "reason": reason, **inputs})

    def _append_timeline(self, line: dict[str, Any]) -> None:
        jsonl.append(self.run_dir / "timeline.jsonl", line)

    def note(self, event: str, **facts: Any) -> None:
        """Write an event."""
        self.journal.note(event, **facts)

    def evaluate(self, when: str, reward: float) -> None:
        """Write an evaluation of 64 held-out tasks."""
        figures = {"tasks": 64, "reward": reward, "pass_at": {"1": reward, "4": min(1.0, 1.3 * reward)}}
        self.note("evaluation", when=when, step=self.step, **figures, tags={"words": figures})
        self.decide("dispatch", self.latest, "evaluation", group=10_000 + self.step, worker="env-0")
        self.decide("evaluation", self.latest, "64 of 64 held-out tasks have ended", group=10_000 + self.step)

    def adapt(self) -> None:
        """Write that the scheduler changed two settings."""
        changes = {"scheduler.max_staleness": [1, 2], "N_min": [16, 32]}
        self.note(
            "adapted", policy_version=self.step, reason=f"1.2 times the speed is predicted {MARKUP}", changes=changes
        )

    def predict(self) -> None:
        """Write what a plan predicted of the run."""
        figures = {"step_s": 0.8, "samples_per_s": 40.0, "trainer_busy": 0.41, "servers_busy": 0.9}
        memory = [{"who": f"trainer {MARKUP}", "count": 1, "total": 3 * 2**30}]
        about = f"asynchronous, 1 + 1 {MARKUP}"
        document = {"time": self.started, "by": "penstock plan", "about": about, "figures": figures, "memory": memory}
        jsonl.write_json(self.run_dir / "prediction.json", document)

    def play_tools(self) -> None:
        """Write the samples of groups that call a tool in two turns."""
        directory = self.run_dir / "trajectories"
        directory.mkdir()
        call = {"name": "look", "arguments": {"key": "dea"}}
        messages = [
            {"role": "user", "content": f"tools: look(key)\nWhat is dea? {MARKUP}"},
            {
                "role": "assistant",
                "content": f"<think>I look it up.</think><tool_call>\n{json.dumps(call)}\n</tool_call>",
            },
            {"role": "user", "content": f"<tool_response>agd {MARKUP}</tool_response>"},
            {"role": "assistant", "content": "agd"},
        ]
        for step in range(self.step - 4, self.step + 1):
            for episode in range(GROUP_SIZE):
                row = {
                    "trajectory": f"{self.run_dir.name}/Shop/{step}/{episode}/0",
                    "task_index": step,
                    "task_id": f"seed/Shop/train/{step}",
                    "tag": "Shop",
                    "group": step,
                    "episode": episode,
                    "attempt": 0,
                    "seed": 7,
                    "mode": "train",
                    "step": step,
                    "model": "tiny",
                    "policy_version_min": step - 1,
                    "policy_version_max": step,
                    "status": "completed",
                    "stop_reason": "terminated",
                    "reward": episode / GROUP_SIZE,
                    "num_turns": 2,
                    "prompt_tokens": 87,
                    "response_tokens": 75,
                    "seconds": 2.5,
                    "messages": json.dumps(messages),
                    "branches": None,
                }
                jsonl.append(directory / f"step_{step:06d}.jsonl", row)

    def complete(self) -> None:
        """All processes end well."""
        self.journal.move(RunState.STOPPING, actor="controller")
        for name in PROCESSES:
            self.journal.move_process(name, ProcessState.EXITED, returncode=0, kind="ok", reason="exit code 0")
        self.journal.move(RunState.COMPLETED, actor="supervisor")

    def crash(self) -> None:
        """The trainer dies, and the run with it."""
        reason = "killed by SIGKILL"
        self.journal.move_process("trainer-0", ProcessState.EXITED, returncode=-9, kind="crashed", reason=reason)
        self.journal.close_processes(kind="killed_by_supervisor", reason="the run failed")
        text = f"trainer-0 died: {reason} {MARKUP}\n  last lines of its log:\n    <b>none</b>"
        self.journal.move(RunState.FAILED, actor="trainer-0", reason=text)


@contextmanager
def shown_runs(runs_dir: Path) -> Iterator[WrittenRun]:
    """Write `finished`, `finished-simulated`, `crashed`, `empty`, `tools`, `tokens` (one group with its tokens, and
    nothing else) and `live`; yield the live one, which this process supervises."""
    finished = WrittenRun(runs_dir, "finished")
    finished.start()
    finished.predict()
    finished.evaluate("before", 0.3)
    finished.take_steps(NUM_STEPS // 2)
    finished.note("alarm", reason="answers are cut", time=finished.latest)
    finished.adapt()
    finished.note("checkpoint", step=finished.step, path=f"checkpoints/step_{finished.step}")
    finished.take_steps(NUM_STEPS // 2)
    finished.evaluate("after", 0.9)
    finished.complete()

    crashed = WrittenRun(runs_dir, "crashed")
    crashed.start()
    crashed.take_steps(5)
    crashed.note("alarm", reason=f"20 of the latest 100 groups failed {MARKUP}")
    crashed.crash()

    tools = WrittenRun(runs_dir, "tools", environment="shop.py:Shop")
    tools.start()
    tools.take_steps(NUM_STEPS)
    tools.play_tools()
    tools.complete()

    model = {"strategies": ["configured"], "steps": NUM_STEPS, "warmup_steps": 2}
    model |= {"workload": {"median_tokens": 6.0, "max_tokens": 8}, "engine": {"update_s": 0.05}}
    config = load_config(ROOT / "examples/quickstart/run.yaml", [f"simulator={json.dumps(model)}"])
    records = Records(runs_dir=runs_dir, run_id="finished", fitted_to="finished")
    with ThreadPoolExecutor(max_workers=1) as apart:  # a simulation has an event loop of its own
        apart.submit(predict, config, records=records).result()

    with ShownRun(runs_dir / "tokens") as tokens:
        tokens.play(7)
        tokens.end(7, EpisodeState.TRAINED, trained_in=3)

    with owning(_made(runs_dir / "empty")), owning(_made(runs_dir / "live")):
        WrittenRun(runs_dir, "empty").journal.move(RunState.STARTING, actor="supervisor")
        live = WrittenRun(runs_dir, "live", age_s=10.0)
        live.start()
        live.take_steps(10)
        yield live


def _made(run_dir: Path) -> Path:
    run_dir.mkdir(parents=True)
    return run_dir
