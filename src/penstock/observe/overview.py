"""The overview of a run that trackers get: about thirty series in groups. Everything else stays in metrics.jsonl."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.observe.summary import busy_fraction

Record = Mapping[str, Any]

SERIES = {
    "reward/mean": "reward",
    "reward/std": "reward_std",
    "lengths/response_tokens": "response_length_mean",
    "lengths/turns": "turns_mean",
    "lengths/truncated_share": "truncated_share",
    "lengths/p90_trained": "length_p90_trained",
    "lengths/p90_admitted": "length_p90_admitted",
    "staleness/mean": "staleness_mean",
    "staleness/max": "staleness_max",
    "staleness/masked_tokens_share": "tokens_masked_share",
    "balance/groups_in_flight": "groups_in_flight",
    "balance/groups_pending": "groups_pending",
    "learner/loss": "loss",
    "learner/entropy": "entropy",
    "learner/grad_norm": "grad_norm",
    "learner/learning_rate": "learning_rate",
    "learner/clip_fraction": "clip_fraction",
    "learner/effective_sample_share": "ess",
    "learner/kl_reference": "kl_reference",
    "learner/kl_engine_trainer": "kl_engine_trainer",
    "progress/step": "step",
    "progress/episodes": "episodes_total",
}
"""Series of every point: its key in a line of metrics.jsonl."""
RATES = {
    "throughput/generated_tokens_per_s": "tokens_generated_total",
    "throughput/trained_tokens_per_s": "tokens_trained_total",
    "throughput/episodes_per_s": "episodes_total",
    "throughput/steps_per_s": "step",
}
"""Series of growth per second since the line before: the key of the total."""
BUSY = {
    "balance/trainer_busy_share": ("trainer_busy_s", "num_trainers"),
    "balance/servers_busy_share": ("generator_busy_s", "num_servers"),
}
"""Series of the share of time that processes of a role computed: the keys of their seconds and of their number."""
EVALUATION = {
    "evaluation/reward": "reward",
    "evaluation/response_tokens": "response_tokens",
    "evaluation/step": "step",
}
"""Series of an evaluation: its key in the event."""
MAX_TAGS = 8
"""Number of tags of a mixture with a series of their own."""


def point(line: Record, before: Record | None) -> dict[str, float]:
    """Return the numbers of a line of metrics.jsonl, without unknown ones. `before`: the line before, which rates
    need."""
    found = {name: line.get(key) for name, key in SERIES.items()}
    tags = sorted(key.removeprefix("reward/") for key in line if key.startswith("reward/"))
    if len(tags) > 1:
        found |= {f"reward/{_plain(tag)}": line[f"reward/{tag}"] for tag in tags[:MAX_TAGS]}
    if before is not None:
        found |= dict(_rates(line, before))
    return _known(found)


def _rates(line: Record, before: Record) -> Iterator[tuple[str, float | None]]:
    seconds = line["time"] - before["time"]
    for name, key in RATES.items():
        growth = line.get(key, 0.0) - before.get(key, 0.0)
        if key in line and seconds > 0 and growth >= 0:  # steps go back after a rewind
            yield name, growth / seconds
    for name, (busy, number) in BUSY.items():
        if busy in line:
            yield name, busy_fraction([dict(before), dict(line)], busy, number)


def evaluation(event: Record) -> dict[str, float]:
    """Return the numbers of an evaluation, without unknown ones."""
    found = {name: event.get(key) for name, key in EVALUATION.items()}
    found |= {f"evaluation/pass_at_{k}": value for k, value in event.get("pass_at", {}).items()}
    tags = event.get("tags", {})
    if len(tags) > 1:
        found |= {f"evaluation/reward_{_plain(tag)}": tags[tag].get("reward") for tag in sorted(tags)[:MAX_TAGS]}
    return _known(found)


def _plain(tag: str) -> str:
    """Return a tag with only those characters that every tracker accepts in the name of a series."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", tag)


def _known(found: Mapping[str, Any]) -> dict[str, float]:
    return {
        name: float(value) for name, value in found.items() if isinstance(value, int | float) and math.isfinite(value)
    }
