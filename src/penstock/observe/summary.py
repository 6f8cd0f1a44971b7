"""`summary.json`: what a run came to, read from its own files, whatever its end (standard library only).

Busy fractions count the seconds of useful model compute between the first and the last recorded step, over the wall
time between them and the number of processes of that role.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from penstock.observe import jsonl, steps

Record = dict[str, Any]

EVALUATION = "evaluation.json"
"""What a run that only evaluates has found."""
PLAYED = "played.json"
"""What was played so far, before and between steps too; its totals are of all lives of a run."""


def write(run_dir: Path) -> Record:
    """Write `summary.json` of a run and return it."""
    summary = summarize(run_dir)
    jsonl.write_json(run_dir / "summary.json", summary)
    return summary


def write_evaluation(run_dir: Path, *, model: str, copy: Path | None = None) -> Record | None:
    """Write `evaluation.json` of a run that only evaluates, and the same to `copy`; returns the evaluation. None, and
    nothing is written, if the run did not come so far."""
    found = [event for event in jsonl.read(run_dir / "events.jsonl") if event.get("event") == "evaluation"]
    if not found:
        return None
    figures = {key: value for key, value in found[-1].items() if key not in ("event", "when", "step")}
    for file in (run_dir / EVALUATION, *([copy] if copy is not None else [])):
        jsonl.write_json(file, {"run_id": run_dir.name, "model": model, **figures})
    return found[-1]


def summarize(run_dir: Path) -> Record:
    """The summary of a run from its state, metrics and events, as far as they got."""
    state, played = jsonl.read_json(run_dir / "state.json"), jsonl.read_json(run_dir / PLAYED)
    num_failed = played.get("groups_failed", 0)
    lines, events = steps.read(run_dir), jsonl.read(run_dir / "events.jsonl")
    return {
        "run_id": state.get("run_id", run_dir.name),
        "status": state.get("status", "pending"),
        "error": state.get("error"),
        **of_metrics(lines),
        **of_events(events),
        **of_playing(lines, events, num_failed=num_failed),
        "groups_failed": num_failed,
        "latest_failure": played.get("latest_failure"),
        "wall_seconds": wall_seconds(state),
    }


def of_metrics(lines: Sequence[Record]) -> Record:
    """The part that the optimizer steps tell."""
    last: Record = lines[-1] if lines else {}
    rewards = numbers(lines, "reward")
    tenth = max(1, len(rewards) // 10)
    return {
        "steps": last.get("step", 0),
        "policy_version": last.get("policy_version", 0),
        "reward_first": _over(fmean, rewards[:tenth]),
        "reward_last": _over(fmean, rewards[-tenth:]),
        "trajectories": last.get("episodes_total", 0),
        "tokens_generated": last.get("tokens_generated_total", 0),
        "tokens_trained": last.get("tokens_trained_total", 0),
        "trainer_busy_fraction": busy_fraction(lines, "trainer_busy_s", "num_trainers"),
        "generator_busy_fraction": busy_fraction(lines, "generator_busy_s", "num_servers"),
        "staleness_mean": _over(fmean, numbers(lines, "staleness_mean")),
        "staleness_max": _over(max, numbers(lines, "staleness_max")),
        "kl_engine_trainer": _over(fmean, numbers(lines, "kl_engine_trainer")),
        "ledger": last.get("ledger", {}),
    }


def of_events(events: Iterable[Record]) -> Record:
    """The part that the evaluations and the end tell; the final ledger replaces that of the last step."""
    events = list(events)
    rewards = {event.get("when"): event.get("reward") for event in events if event.get("event") == "evaluation"}
    ledgers = [{"ledger": event["ledger"]} for event in events if "ledger" in event]
    return {
        "eval_before": rewards.get("before"),
        "eval_after": rewards.get("after"),
        "eval_given": rewards.get("given"),
        **(ledgers[-1] if ledgers else {}),
    }


def of_playing(lines: Sequence[Record], events: Sequence[Record], *, num_failed: int) -> Record:
    """Of a run that only plays, which tells beforehand how many tasks there are; of another one nothing. `num_failed`
    of them were given up.

    `dump_share`: what writing the dump took of the processor time that the run had while it played, and what the run
    waited for the end of it, of the time it played.
    """
    totals = [event["total"] for event in events if event.get("event") == "tasks"]
    if not totals:
        return {}
    first, last = (lines[0], lines[-1]) if lines else ({}, {})
    dumped = [event for event in events if event.get("event") == "dumped"]
    latest = dumped[-1] if dumped else {}  # its totals are those of all lives
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
    """Mean share of the time that the processes of one role were busy between the first and the last line; the time
    between two lives of a run does not count."""
    if len(lines) < 2:
        return None
    first, last = lines[0], lines[-1]
    wall_s = last.get("wall_s", 0.0) - first.get("wall_s", 0.0)
    busy_s = (last.get(busy_key) or 0.0) - (first.get(busy_key) or 0.0)
    return float(busy_s / wall_s / max(1, last.get(count_key) or 1)) if wall_s > 0 else None


def numbers(lines: Iterable[Record], key: str) -> list[float]:
    """The values of `key` where there is one."""
    return [value for line in lines if isinstance(value := line.get(key), int | float)]


def _over(function: Callable[[Sequence[float]], float], values: Sequence[float]) -> float | None:
    return function(values) if values else None


def wall_seconds(state: Mapping[str, Any], *, now: float | None = None) -> float | None:
    """Of all lives of a run together; if it has not ended, the present one lasts until `now`."""
    born, until = state.get("born", state.get("started")), state.get("ended") or now
    if born is None or until is None:
        return None
    return float(round(state.get("lived_s", 0.0) + until - born, 3))
