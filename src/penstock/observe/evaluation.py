"""What a validation came to, for all tasks and for those of each tag. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from typing import Any

from penstock.types import NO_VERSION, EpisodeSummary, Task

Played = Sequence[EpisodeSummary]
"""All episodes of one task."""


def results(tasks: Sequence[Task], played: Sequence[Played], *, solved_at: float) -> dict[str, Any]:
    """Over all tasks, and under `tags` for each tag."""
    tags = {tag: [each for task, each in zip(tasks, played, strict=True) if task.tag == tag] for tag in _tags(tasks)}
    by_tag = {tag: _figures(each, solved_at=solved_at) for tag, each in tags.items()}
    return _figures(played, solved_at=solved_at) | {"tags": by_tag}


def _tags(tasks: Sequence[Task]) -> list[str]:
    """In the order of their first tasks."""
    return list(dict.fromkeys(task.tag for task in tasks))


def _figures(played: Sequence[Played], *, solved_at: float) -> dict[str, Any]:
    """Means over all episodes; one that failed earned nothing."""
    episodes = [episode for each in played for episode in each]
    finished = [episode for episode in episodes if episode.status != "failed"]
    versions = [version for e in finished for version in (e.version_min, e.version_max) if version != NO_VERSION]
    return {
        "tasks": len(played),
        "episodes": len(episodes),
        "reward": _mean([episode.reward for episode in episodes]),
        "pass_at": pass_at(played, solved_at=solved_at),
        "response_tokens": _mean([episode.response_tokens for episode in finished]),
        "turns": _mean([episode.num_turns for episode in finished]),
        "truncated": sum(episode.status == "truncated" for episode in episodes),
        "failed": len(episodes) - len(finished),
        "policy_versions": [min(versions), max(versions)] if versions else None,
    }


def pass_at(played: Sequence[Played], *, solved_at: float) -> dict[str, float]:
    """pass@k for k = 1, 2, 4, ... and as many as there are samples: the chance that one of k samples of a task is
    solved, without bias (Chen et al. 2021, arXiv 2107.03374), mean over the tasks."""
    num_samples = min((len(each) for each in played), default=0)
    powers = {1 << power for power in range(num_samples.bit_length())} | {num_samples}
    solved = [(len(each), sum(e.status != "failed" and e.reward >= solved_at for e in each)) for each in played]
    return {
        str(k): sum(_chance(samples, right, k) for samples, right in solved) / len(solved)
        for k in sorted(powers)
        if 0 < k <= num_samples
    }


def _chance(num_samples: int, num_solved: int, k: int) -> float:
    """That a draw of `k` of the samples has a solved one: 1 - C(n - c, k) / C(n, k)."""
    return 1.0 - comb(num_samples - num_solved, k) / comb(num_samples, k)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
