"""Results of a validation, for all tasks and for each tag. The module only computes; it reads and writes no file."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import Any

from penstock.observe.summary import mean
from penstock.types import MOST_METRICS, NO_VERSION, EpisodeSummary, Task

Played = Sequence[EpisodeSummary]
"""All episodes of one task."""


def results(tasks: Sequence[Task], played: Sequence[Played], *, solved_at: float) -> dict[str, Any]:
    """Return the figures over all tasks, and those of each tag under `tags`."""
    tags = dict.fromkeys(task.tag for task in tasks)
    of_tag = {tag: [each for task, each in zip(tasks, played, strict=True) if task.tag == tag] for tag in tags}
    by_tag = {tag: _figures(each, solved_at=solved_at) for tag, each in of_tag.items()}
    return _figures(played, solved_at=solved_at) | {"tags": by_tag}


def _figures(played: Sequence[Played], *, solved_at: float) -> dict[str, Any]:
    """Return means over all episodes. A failed episode has reward 0."""
    episodes = [episode for each in played for episode in each]
    finished = [episode for episode in episodes if episode.status != "failed"]
    versions = [version for e in finished for version in (e.version_min, e.version_max) if version != NO_VERSION]
    return {
        "tasks": len(played),
        "episodes": len(episodes),
        "reward": mean([episode.reward for episode in episodes]),
        "pass_at": pass_at(played, solved_at=solved_at),
        "response_tokens": mean([episode.response_tokens for episode in finished]),
        "turns": mean([episode.num_turns for episode in finished]),
        "truncated": sum(episode.status == "truncated" for episode in episodes),
        "failed": len(episodes) - len(finished),
        "policy_versions": [min(versions), max(versions)] if versions else None,
        "metrics": means_of_metrics(finished),
    }


def pass_at(played: Sequence[Played], *, solved_at: float) -> dict[str, float]:
    """Return pass@k for k = 1, 2, 4, ... and for k = number of samples: the probability that at least one of k samples
    of a task is solved. A task with n samples, c of them solved, has 1 - C(n - c, k) / C(n, k); this is unbiased (Chen
    et al. 2021, arXiv 2107.03374). The result is the mean over the tasks."""
    num_samples = min((len(each) for each in played), default=0)
    ks = sorted({1 << power for power in range(num_samples.bit_length())} | {num_samples}) if num_samples else []
    solved = [(len(each), sum(e.status != "failed" and e.reward >= solved_at for e in each)) for each in played]
    return {str(k): sum(1.0 - comb(num - right, k) / comb(num, k) for num, right in solved) / len(solved) for k in ks}


def means_of_metrics(episodes: Sequence[EpisodeSummary]) -> dict[str, float]:
    """Return the mean of each of the environments' own metrics, over the episodes that have it."""
    values: dict[str, list[float]] = {}
    for episode in episodes:
        for name, value in episode.metrics.items():
            values.setdefault(name, []).append(value)
    return {name: sum(found) / len(found) for name, found in list(values.items())[:MOST_METRICS]}
