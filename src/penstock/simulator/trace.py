"""Workloads from recorded episodes: a trace file (.jsonl, .csv, .parquet), or the pool of a Penstock run.

A file has one row per answer: `task_id` and `response_tokens`, and optionally `prompt_tokens`, `turn`, `tool_s` (after
the turn), `reward` and `reward_s` (until the reward is known). `turn` rises within an episode, and the rows of an
episode follow each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config import ConfigError, WorkloadConfig
from penstock.simulator.workload import LogNormalWorkload, Plan, Repeats, Turn, Workload
from penstock.store.index import read_groups
from penstock.types import EpisodeSummary, Summaries

SETTING = "simulator.workload.path"
READERS = {".jsonl": ("json", "read_json"), ".csv": ("csv", "read_csv"), ".parquet": ("parquet", "read_table")}
"""Suffix of a trace file -> the module of pyarrow and the function that read it."""
NEEDED = ("task_id", "response_tokens")
MAX_TURNS = 64
"""Most turns of an episode that are told apart if only their number is known."""
MAX_NUMBER = 1e9
"""Largest number of a trace: tokens of an answer, or seconds."""
NUMBERS = ("response_tokens", "prompt_tokens", "turn", "tool_s", "reward", "reward_s")


@dataclass(slots=True, kw_only=True)
class RecordedEpisode:
    """A recorded episode."""

    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None
    reward_s: float = 0.0

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)


@dataclass(slots=True, kw_only=True)
class RecordedTask:
    """A recorded task and its episodes."""

    task_id: str
    prompt_tokens: int
    tag: str = "simulated"
    """Which environment of a mixture played it."""
    episodes: list[RecordedEpisode] = field(default_factory=list)


class RecordedWorkload:
    """A workload that repeats recorded tasks, in a new random order each time. If a task has fewer episodes than a
    group has members, some episodes occur twice."""

    def __init__(self, tasks: Sequence[RecordedTask], config: WorkloadConfig, *, group_size: int, seed: int) -> None:
        self._tasks = list(tasks)
        self._group_size, self._seed, self._reward = group_size, seed, config.reward_probability
        self._repeats = Repeats(len(tasks), seed=seed, in_order_first=config.source == "run")
        episodes = [episode for task in self._tasks for episode in task.episodes]
        self.max_tokens = max(episode.tokens for episode in episodes)
        self.max_turns = max(len(episode.turns) for episode in episodes)
        self._rewards_take_time = any(episode.reward_s for episode in episodes)

    def task_id(self, index: int) -> str:
        return self._tasks[self._repeats.task(index)].task_id

    def tag(self, index: int) -> str:
        return self._tasks[self._repeats.task(index)].tag

    def plan(self, index: int, attempt: int) -> Plan:
        task, size = self._tasks[self._repeats.task(index)], self._group_size
        rng = np.random.default_rng([self._seed, 2, index, attempt])
        episodes = task.episodes
        if len(episodes) != size or attempt:
            chosen = rng.choice(len(episodes), size, replace=len(episodes) < size or attempt > 0)
            episodes = [episodes[number] for number in chosen]
        drawn = (rng.random(size) < self._reward).tolist()
        return Plan(
            prompt_tokens=task.prompt_tokens,
            lengths=[episode.tokens for episode in episodes],
            rewards=[float(d if e.reward is None else e.reward) for d, e in zip(drawn, episodes, strict=True)],
            turns=[episode.turns for episode in episodes] if self.max_turns > 1 else None,
            reward_s=[episode.reward_s for episode in episodes] if self._rewards_take_time else None,
        )


def open_workload(config: WorkloadConfig, *, group_size: int, seed: int) -> Workload:
    """Return the workload of `simulator.workload`. Raises `ConfigError` for a trace or run that cannot be used."""
    if config.source == "lognormal":
        return LogNormalWorkload(config, group_size=group_size, seed=seed)
    assert config.path is not None
    tasks = _read_trace(Path(config.path), config) if config.source == "trace" else _read_run(Path(config.path))
    return RecordedWorkload(tasks, config, group_size=group_size, seed=seed)


def _read_trace(path: Path, config: WorkloadConfig) -> list[RecordedTask]:
    tasks: dict[str, RecordedTask] = {}
    before: Mapping[str, Any] = {}
    for number, row in enumerate(_rows(path), start=1):
        _check(row, f"{SETTING}: {path}, row {number}")
        name, prompt_tokens = str(row["task_id"]), int(row.get("prompt_tokens", config.prompt_tokens))
        task = tasks.setdefault(name, RecordedTask(task_id=name, prompt_tokens=prompt_tokens))
        if "turn" not in row or row["task_id"] != before.get("task_id") or row["turn"] <= before["turn"]:
            task.episodes.append(RecordedEpisode())
        episode = task.episodes[-1]
        episode.turns.append(Turn(max(int(row["response_tokens"]), 1), float(row.get("tool_s", 0.0))))
        episode.reward = row.get("reward", episode.reward)
        episode.reward_s = float(row.get("reward_s", episode.reward_s))
        before = row
    return list(tasks.values())


def _check(row: Mapping[str, Any], where: str) -> None:
    """Raise `ConfigError` for a value that cannot be used."""
    if row["task_id"] is None:
        raise ConfigError(f"{where}: column task_id is empty")
    for name in NUMBERS:
        value = row.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ConfigError(f"{where}: column {name} is {value!r}, not a number")
        if value < 0 and name != "reward":
            raise ConfigError(f"{where}: column {name} is negative ({value})")
        if value > MAX_NUMBER:
            raise ConfigError(f"{where}: column {name} is {value:g}, more than {MAX_NUMBER:g}")


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the rows of a trace file. Raises `ConfigError` if the file cannot be read or has no such rows."""
    import pyarrow

    if path.suffix not in READERS:
        raise ConfigError(f"{SETTING}: {path} is none of {', '.join(READERS)}")
    module, function = READERS[path.suffix]
    try:
        table = getattr(import_module(f"pyarrow.{module}"), function)(str(path))
    except FileNotFoundError:
        raise ConfigError(f"{SETTING}: {path} does not exist") from None
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise ConfigError(f"{SETTING}: {path} cannot be read: {' '.join(str(error).split())}") from None
    present = ", ".join(table.column_names) or "nothing"
    for name in NEEDED:
        if name not in table.column_names:
            raise ConfigError(f"{SETTING}: {path} has no column {name}; it has {present}")
    rows: list[dict[str, Any]] = table.to_pylist()
    if not rows:
        raise ConfigError(f"{SETTING}: {path} has no rows, only columns {present}")
    return rows


def _read_run(run_dir: Path) -> list[RecordedTask]:
    """Return the training groups of a run, in the order in which they were started."""
    found = (recorded_task(each.task_id, each.episodes) for each in read_groups(run_dir, setting=SETTING))
    tasks = [task for task in found if task is not None]
    if not tasks:
        raise ConfigError(f"{SETTING}: run {run_dir} has no completed group")
    return tasks


def recorded_task(task_id: str, played: Summaries) -> RecordedTask | None:
    """Return the episodes of a group as a workload repeats them; None if none of them has tokens."""
    episodes = [episode for episode in played if episode.status != "failed" and episode.response_tokens > 0]
    if not episodes:
        return None
    prompt_tokens = sum(episode.prompt_tokens for episode in episodes) // len(episodes)
    recorded = [RecordedEpisode(turns=_turns(each), reward=each.reward, reward_s=each.reward_s) for each in episodes]
    tag = episodes[0].episode.tag
    return RecordedTask(task_id=task_id, prompt_tokens=prompt_tokens, tag=tag, episodes=recorded)


def _turns(episode: EpisodeSummary) -> list[Turn]:
    """Return equal turns with equally slow tools; only their number and sums are recorded. Very many turns become
    fewer."""
    num_turns = max(min(episode.num_turns, episode.response_tokens, MAX_TURNS), 1)
    bounds = np.linspace(0, episode.response_tokens, num_turns + 1).astype(int)
    tool_s = episode.env_s / max(num_turns - 1, 1)
    return [Turn(int(count), tool_s) for count in np.diff(bounds)]
