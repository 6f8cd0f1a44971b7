"""`summary.json`: the results of a run, read from its own files, however it ended (standard library only).

A busy fraction is the time that processes of a role spent on useful model compute, between the first and the last
recorded step. It is divided by the wall time between these steps and by the number of processes of the role.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from penstock.observe import jsonl

Record = dict[str, Any]

EVALUATION = "evaluation.json"
"""File with the results of a run that only evaluates."""
PLAYED = "played.json"
"""File with the results so far, also updated before and between steps. Its totals cover all lives of a run."""
PREDICTION = "prediction.json"
"""File with what a simulation predicted of the run; missing if none was made before it."""


def predicted_config(config_file: Path) -> Record:
    """Return the entry of a prediction that says for which configuration it holds."""
    return {"config_sha256": sha256(config_file.read_bytes()).hexdigest()}


def write(run_dir: Path) -> Record:
    """Write `summary.json` of a run and return it."""
    summary = summarize(run_dir)
    jsonl.write_json(run_dir / "summary.json", summary)
    return summary


def write_evaluation(run_dir: Path, *, model: str, copy: Path | None = None) -> Record | None:
    """Write `evaluation.json` of a run that only evaluates, and the same to `copy`; return the evaluation. Return None
    and write nothing if the run has no evaluation yet. `model`: the model that was played, unless servers that ran
    already have said which one they serve."""
    events = jsonl.read(run_dir / "events.jsonl")
    found = [event for event in events if event.get("event") == "evaluation"]
    if not found:
        return None
    served = {str(event.get("model") or "unknown"): True for event in events if event.get("event") == "server_model"}
    model = ", ".join(served) or model
    figures = {key: value for key, value in found[-1].items() if key not in ("event", "when", "step")}
    for file in filter(None, (run_dir / EVALUATION, copy)):
        jsonl.write_json(file, {"run_id": run_dir.name, "model": model, **figures})
    return found[-1]


def read_steps(run_dir: Path) -> list[Record]:
    """Return the lines of metrics.jsonl that count, one per step, in order."""
    return surviving(jsonl.read(run_dir / "metrics.jsonl"))


def surviving(lines: Iterable[Record]) -> list[Record]:
    """Return `lines` without the steps that a trainer lost after its last checkpoint: a step that is taken again
    replaces its first line and all lines after that."""
    kept: list[Record] = []
    for line in lines:
        while kept and kept[-1].get("step", 0) >= line.get("step", 0):
            kept.pop()
        kept.append(line)
    return kept


def held_out_rewards(events: Iterable[Record]) -> dict[int, float]:
    """Return the held-out reward after each validated step, without the steps that a trainer lost."""
    found: dict[int, float] = {}
    for event in events:
        match event:
            case {"event": "evaluation", "step": int(step), "reward": float(reward)}:
                found[step] = reward
            case {"event": "rewound" | "resumed", "step": int(back_at)}:
                found = {step: reward for step, reward in found.items() if step <= back_at}
    return found


def best_step(rewards: Mapping[int, float], checkpoints: Path) -> int | None:
    """Return the step with the highest of these held-out rewards among those with a checkpoint in the folder
    `checkpoints`; None if none has one."""
    saved = [step for step in rewards if (checkpoints / f"step_{step}").is_dir()]
    return max(saved, key=lambda step: (rewards[step], step), default=None)


def summarize(run_dir: Path) -> Record:
    """Return the summary of a run from its state, metrics and events, as far as they exist."""
    state, played = jsonl.read_json(run_dir / "state.json"), jsonl.read_json(run_dir / PLAYED)
    num_failed = played.get("groups_failed", 0)
    lines, events = read_steps(run_dir), jsonl.read(run_dir / "events.jsonl")
    return {
        "run_id": state.get("run_id", run_dir.name),
        "status": state.get("status", "pending"),
        "sandbox": sandbox_of(run_dir),
        "error": state.get("error"),
        **of_metrics(lines),
        **of_events(events),
        **of_playing(lines, events, num_failed=num_failed),
        "groups_failed": num_failed,
        "latest_failure": played.get("latest_failure"),
        "wall_seconds": wall_seconds(state),
    }


def sandbox_of(run_dir: Path) -> str | None:
    """Return `env.sandbox` of a run; None if its settings cannot be read. The janitor calls this, and has no YAML."""
    try:
        text = (run_dir / "config.yaml").read_text()
    except (OSError, UnicodeDecodeError):
        return None
    found = re.search(r"^env:\n(?:  .*\n)*?  sandbox: (\w+)$", text, re.M)
    return found[1] if found else None


def of_metrics(lines: Sequence[Record]) -> Record:
    """Return the part of the summary that comes from the optimizer steps."""
    last: Record = lines[-1] if lines else {}
    rewarded = [line for line in lines if line.get("reward") is not None]
    tenth = max(1, len(rewarded) // 10)
    return {
        "steps": last.get("step", 0),
        "policy_version": last.get("policy_version", 0),
        "reward_first": mean_reward(rewarded[:tenth]),
        "reward_last": mean_reward(rewarded[-tenth:]),
        "trajectories": last.get("episodes_total", 0),
        "tokens_generated": last.get("tokens_generated_total", 0),
        "tokens_trained": last.get("tokens_trained_total", 0),
        "trainer_busy_fraction": busy_fraction(lines, "trainer_busy_s", "num_trainers"),
        "generator_busy_fraction": busy_fraction(lines, "generator_busy_s", "num_servers"),
        "staleness_mean": mean(numbers(lines, "staleness_mean")),
        "staleness_max": max(numbers(lines, "staleness_max"), default=None),
        "kl_engine_trainer": mean(numbers(lines, "kl_engine_trainer")),
        "ledger": last.get("ledger", {}),
    }


def of_events(events: Sequence[Record]) -> Record:
    """Return the part of the summary that comes from the evaluations and the end. The final ledger replaces that of the
    last step."""
    rewards = {event.get("when"): event.get("reward") for event in events if event.get("event") == "evaluation"}
    ledgers = [{"ledger": event["ledger"]} for event in events if "ledger" in event]
    evaluated = {f"eval_{when}": rewards.get(when) for when in ("before", "after", "given")}
    return {**evaluated, **(ledgers[-1] if ledgers else {})}


def of_playing(lines: Sequence[Record], events: Sequence[Record], *, num_failed: int) -> Record:
    """Return the part of the summary for a run that only generates; empty for other runs. Such a run records its number
    of tasks at the start; `num_failed` of them failed.

    `dump_share`: the sum of two shares. The first is the processor time of writing the dump, of all processor time
    during generation. The second is the time the run waited for the dump to end, of the generation time.
    """
    totals = [event["total"] for event in events if event.get("event") == "tasks"]
    if not totals:
        return {}
    first, last = (lines[0], lines[-1]) if lines else ({}, {})
    dumped = [event for event in events if event.get("event") == "dumped"]
    latest = dumped[-1] if dumped else {}  # its totals cover all lives of the run
    playing_s, cpu_s = (last.get(key, 0.0) - first.get(key, 0.0) for key in ("wall_s", "cpu_s"))
    played = last.get("episodes_total", 0)
    return {
        "steps": 0,
        "tasks": totals[-1],
        "tasks_played": max(0, last.get("step", 0) - num_failed),
        "reward_mean": last.get("reward_total", 0.0) / played if played else None,
        "dump": latest.get("url"),
        "dump_rows": latest.get("rows", 0),
        "dump_share": latest["cpu_s"] / cpu_s + sum(event["waited_s"] for event in dumped) / playing_s
        if dumped and min(playing_s, cpu_s) > 0
        else None,
        "trajectories_per_second": (played - first["episodes_total"]) / playing_s if playing_s > 0 else None,
    }


def busy_fraction(lines: Sequence[Record], busy_key: str, count_key: str) -> float | None:
    """Return the mean share of time that the processes of one role were busy, between the first and the last line. The
    time between two lives of a run does not count."""
    if len(lines) < 2:
        return None
    first, last = lines[0], lines[-1]
    wall_s = last.get("wall_s", 0.0) - first.get("wall_s", 0.0)
    busy_s = (last.get(busy_key) or 0.0) - (first.get(busy_key) or 0.0)
    return float(busy_s / wall_s / max(1, last.get(count_key) or 1)) if wall_s > 0 else None


def mean_reward(lines: Sequence[Record]) -> float | None:
    """Return the mean reward of all episodes that were completed during these steps, trained or filtered."""
    episodes = sum(line["episodes"] for line in lines)
    return sum(line["reward"] * line["episodes"] for line in lines) / episodes if episodes else None


def numbers(lines: Iterable[Record], key: str) -> list[float]:
    """Return the values of `key` in the lines that have one."""
    return [value for line in lines if isinstance(value := line.get(key), int | float)]


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def deviation(values: Sequence[float]) -> float | None:
    """Return the population standard deviation."""
    middle = mean(values)
    return None if middle is None else math.sqrt(sum((value - middle) ** 2 for value in values) / len(values))


def wall_seconds(state: Mapping[str, Any], *, now: float | None = None) -> float | None:
    """Return the wall time of all lives of a run in seconds. If the run has not ended, its present life lasts until
    `now`."""
    born, until = state.get("born", state.get("started")), state.get("ended") or now
    if born is None or until is None:
        return None
    return float(round(state.get("lived_s", 0.0) + until - born, 3))
