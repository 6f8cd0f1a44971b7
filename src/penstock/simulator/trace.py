"""Workloads from what was really played: a trace file (.jsonl, .csv, .parquet), or the pool of a run of Penstock.

A file has a row per answer: `task_id` and `response_tokens`, and if it knows them `prompt_tokens`, `turn` (rising
within an episode, whose rows follow each other), `tool_s` (after the turn) and `reward`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.config import ConfigError, WorkloadConfig
from penstock.simulator.workload import LogNormalWorkload, Plan, Repeats, Turn, Workload

NEEDED = ("task_id", "response_tokens")
NUMBERS = ("response_tokens", "prompt_tokens", "turn", "tool_s", "reward")


@dataclass(slots=True, kw_only=True)
class Played:
    """An episode of the past."""

    turns: list[Turn] = field(default_factory=list)
    reward: float | None = None

    @property
    def tokens(self) -> int:
        return sum(turn.tokens for turn in self.turns)


@dataclass(slots=True, kw_only=True)
class PlayedTask:
    """A task of the past and its episodes."""

    task_id: str
    prompt_tokens: int
    episodes: list[Played] = field(default_factory=list)


class PastWorkload:
    """Tasks of the past again and again, in an order of its own each time; where a task has not as many episodes as a
    group has members, some come twice."""

    def __init__(
        self, tasks: Sequence[PlayedTask], *, group_size: int, seed: int, reward: float, in_order_first: bool
    ) -> None:
        self._tasks = list(tasks)
        self._group_size, self._seed, self._reward = group_size, seed, reward
        self._repeats = Repeats(len(tasks), seed=seed, in_order_first=in_order_first)
        episodes = [episode for task in self._tasks for episode in task.episodes]
        self.max_tokens = max(episode.tokens for episode in episodes)
        self.max_turns = max(len(episode.turns) for episode in episodes)

    def task_id(self, index: int) -> str:
        return self._tasks[self._repeats.task(index)].task_id

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
        )


def open_workload(config: WorkloadConfig, *, group_size: int, seed: int) -> Workload:
    """The workload of `simulator.workload`. Raises `ConfigError` for a trace or run that cannot be used."""
    if config.source == "lognormal":
        return LogNormalWorkload(config, group_size=group_size, seed=seed)
    assert config.path is not None
    tasks = _read_trace(Path(config.path), config) if config.source == "trace" else _read_run(Path(config.path))
    return PastWorkload(
        tasks,
        group_size=group_size,
        seed=seed,
        reward=config.reward_probability,
        in_order_first=config.source == "run",
    )


def _read_trace(path: Path, config: WorkloadConfig) -> list[PlayedTask]:
    columns = _columns(path)
    present = ", ".join(columns) or "nothing"
    for name in NEEDED:
        if name not in columns:
            raise ConfigError(f"simulator.workload.path: {path} has no column {name}; it has {present}")
    numbers = {name: _numbers(path, name, columns[name]) for name in NUMBERS if name in columns}
    if not columns["task_id"]:
        raise ConfigError(f"simulator.workload.path: {path} has no rows, only columns {present}")
    tasks: dict[str, PlayedTask] = {}
    for row, task_id in enumerate(columns["task_id"]):
        if task_id is None:
            raise ConfigError(f"simulator.workload.path: {path}, row {row + 1}: column task_id is empty")
        of_row = {name: values[row] for name, values in numbers.items()}
        _add(
            tasks,
            str(task_id),
            of_row,
            new_episode=_begins(columns["task_id"], numbers.get("turn"), row),
            config=config,
        )
    return list(tasks.values())


def _begins(task_ids: Sequence[object], turns: Sequence[float] | None, row: int) -> bool:
    """Whether a new episode begins with this row."""
    return turns is None or row == 0 or task_ids[row] != task_ids[row - 1] or turns[row] <= turns[row - 1]


def _add(
    tasks: dict[str, PlayedTask], task_id: str, row: Mapping[str, float], *, new_episode: bool, config: WorkloadConfig
) -> None:
    prompt_tokens = int(row.get("prompt_tokens", config.prompt_tokens))
    task = tasks.setdefault(task_id, PlayedTask(task_id=task_id, prompt_tokens=prompt_tokens))
    if new_episode:
        task.episodes.append(Played())
    episode = task.episodes[-1]
    episode.turns.append(Turn(max(int(row["response_tokens"]), 1), row.get("tool_s", 0.0)))
    episode.reward = row.get("reward", episode.reward)


def _numbers(path: Path, name: str, values: Sequence[object]) -> list[float]:
    for row, value in enumerate(values):
        if isinstance(value, bool) or not isinstance(value, int | float) or not np.isfinite(value):
            raise ConfigError(
                f"simulator.workload.path: {path}, row {row + 1}: column {name} is {value!r}, not a number"
            )
        if value < 0 and name != "reward":
            raise ConfigError(f"simulator.workload.path: {path}, row {row + 1}: column {name} is negative ({value})")
    return [float(value) for value in values]  # type: ignore[arg-type]


def _columns(path: Path) -> dict[str, list[Any]]:
    """The file's columns, as plain values."""
    import pyarrow as pa

    try:
        table = _reader(path)(path)
    except FileNotFoundError:
        raise ConfigError(f"simulator.workload.path: {path} does not exist") from None
    except (pa.ArrowInvalid, OSError) as error:
        raise ConfigError(f"simulator.workload.path: {path} cannot be read: {' '.join(str(error).split())}") from None
    return {name: table.column(name).to_pylist() for name in table.column_names}


def _reader(path: Path) -> Callable[[Path], Any]:
    match path.suffix:
        case ".jsonl":
            from pyarrow import json

            return lambda path: json.read_json(str(path))
        case ".csv":
            from pyarrow import csv

            return lambda path: csv.read_csv(str(path))
        case ".parquet":
            from pyarrow import parquet

            return lambda path: parquet.read_table(str(path))
    raise ConfigError(f"simulator.workload.path: {path} is none of .jsonl, .csv, .parquet")


def _read_run(run_dir: Path) -> list[PlayedTask]:
    """The training groups of a run, in the order they were started."""
    tasks = list(_groups(run_dir))
    if not tasks:
        raise ConfigError(f"simulator.workload.path: no group was played in run {run_dir}")
    return tasks


def _groups(run_dir: Path) -> Iterator[PlayedTask]:
    from penstock.store.index import PoolIndex

    if not (run_dir / "pool" / "index").is_dir():
        raise ConfigError(f"simulator.workload.path: {run_dir} is no run of Penstock: it has no pool/index")
    index = PoolIndex(run_dir / "pool")
    try:
        for record in index:
            summaries = [s for s in record.episodes if s.status != "failed" and s.response_tokens > 0]
            if summaries:
                prompts = [summary.prompt_tokens for summary in summaries]
                played = [Played(turns=_even_turns(s.response_tokens, s.num_turns), reward=s.reward) for s in summaries]
                yield PlayedTask(task_id=record.task_id, prompt_tokens=sum(prompts) // len(prompts), episodes=played)
    finally:
        index.close()


def _even_turns(tokens: int, num_turns: int) -> list[Turn]:
    """The index knows only how many turns there were: equal ones, and tools that take no time."""
    if num_turns <= 1:
        return [Turn(tokens, 0.0)]
    bounds = np.linspace(0, tokens, max(min(num_turns, tokens), 1) + 1).astype(int)
    return [Turn(int(count), 0.0) for count in np.diff(bounds)]
