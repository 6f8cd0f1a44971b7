"""Writes the files of a small run, as the controller and the supervisor would have."""

from __future__ import annotations

from pathlib import Path

from penstock.observe import jsonl

STARTED = 1_000.0


def make_run(run_dir: Path, num_steps: int, *, status: str = "completed") -> Path:
    """One step a second; reward 0.01 per step; the trainer busy half of the time, two servers 3/4 of it."""
    run_dir.mkdir(parents=True, exist_ok=True)
    ended = STARTED + num_steps + 10.0
    state = {"run_id": run_dir.name, "status": status, "error": None, "started": STARTED, "ended": ended}
    jsonl.write_json(run_dir / "state.json", state)
    for step in range(1, num_steps + 1):
        time = STARTED + 5.0 + step
        jsonl.append(
            run_dir / "metrics.jsonl",
            {
                "step": step,
                "time": time,
                "wall_s": time - STARTED,
                "policy_version": step,
                "reward": 0.01 * step if step != 2 else None,
                "episodes": 8,
                "episodes_total": 8 * step,
                "tokens_generated_total": 100 * step,
                "tokens_trained_total": 90 * step,
                "staleness_mean": 0.5,
                "staleness_max": step % 3,
                "entropy": 0.4,
                "kl_engine_trainer": 1e-6,
                "trainer_busy_s": 3.0 + 0.5 * step,
                "generator_busy_s": 1.5 * step,
                "num_servers": 2,
                "num_trainers": 1,
                "ledger": {"admitted": 8 * step, "trained": 8 * step},
            },
        )
        for process, kind, start, end in (
            ("trainer-0", "train", time - 1.0, time - 0.6),
            ("trainer-0", "step", time - 0.6, time - 0.5),
            ("rollout-0", "generate", time - 0.95, time - 0.2),
            ("rollout-0", "update_weights", time - 1.0, time - 0.95),
        ):
            span = {"process": process, "kind": kind, "start": start, "end": end, "policy_version": step}
            jsonl.append(run_dir / "timeline.jsonl", span)
    jsonl.append(run_dir / "timeline.jsonl", {"kind": "decision", "decider": "trigger", "time": STARTED, "reason": "x"})
    return run_dir


def evaluate(run_dir: Path, when: str, reward: float, *, step: int = 0, tags: tuple[str, ...] = ("spell",)) -> None:
    """Every tag earns the same."""
    samples = [{"prompt": "spell\n[bold]ab", "expected": "ba", "answer": "ba", "reward": reward}]
    figures = {
        "tasks": 1,
        "reward": reward,
        "pass_at": {"1": reward},
        "response_tokens": 2.0,
        "turns": 1.0,
        "truncated": 0,
        "failed": 0,
    }
    record = {"event": "evaluation", "when": when, "step": step, **figures, "tags": dict.fromkeys(tags, figures)}
    jsonl.append(run_dir / "events.jsonl", {"time": STARTED, **record, "samples": samples})


def mix(run_dir: Path) -> None:
    """As if two environments had been trained."""
    lines = jsonl.read(run_dir / "metrics.jsonl")
    (run_dir / "metrics.jsonl").unlink()
    for line in lines:
        of_tags = {"reward/game": 0.5, "reward/words": 0.1, "reward/never": None, "response_length_mean/game": 7.0}
        jsonl.append(run_dir / "metrics.jsonl", line | of_tags)
