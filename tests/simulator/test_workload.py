"""Where lengths come from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import csv, parquet

from penstock.config import ConfigError, WorkloadConfig
from penstock.simulator.trace import open_workload
from penstock.simulator.workload import Tasks, population

ROWS = [
    {"task_id": "a", "response_tokens": 30, "prompt_tokens": 7, "reward": 1.0},
    {"task_id": "a", "response_tokens": 20, "prompt_tokens": 7, "reward": 0.0},
    {"task_id": "b", "response_tokens": 5, "prompt_tokens": 9, "reward": 0.5},
]


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    table = pa.Table.from_pylist(rows)
    match path.suffix:
        case ".jsonl":
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        case ".csv":
            csv.write_csv(table, str(path))
        case ".parquet":
            parquet.write_table(table, str(path))
    return path


def trace(path: Path, *, group_size: int = 2, **changes: Any) -> Any:
    return open_workload(WorkloadConfig(source="trace", path=str(path), **changes), group_size=group_size, seed=0)


def test_lengths_follow_the_hierarchical_model() -> None:
    config = WorkloadConfig(median_tokens=1000.0, between_sigma=0.5, within_sigma=0.3, max_tokens=10**6)
    workload = open_workload(config, group_size=8, seed=3)
    logs = np.log([workload.plan(index, 0).lengths for index in range(4000)])
    assert np.median(logs) == pytest.approx(np.log(1000), abs=0.03)
    assert logs.mean(axis=1).std() == pytest.approx((0.5**2 + 0.3**2 / 8) ** 0.5, rel=0.05)
    assert (logs - logs.mean(axis=1, keepdims=True)).std() == pytest.approx(0.3 * (7 / 8) ** 0.5, rel=0.02)


def test_plans_depend_on_seed_task_and_attempt_alone() -> None:
    config = WorkloadConfig(turns=3, median_tokens=40.0)
    one, two = (open_workload(config, group_size=4, seed=1) for _ in range(2))
    for index in (5000, 0, 77):
        assert one.plan(index, 0) == two.plan(index, 0)
        assert one.plan(index, 1) == two.plan(index, 1) != one.plan(index, 0)
    assert open_workload(config, group_size=4, seed=2).plan(0, 0) != one.plan(0, 0)


def test_runaways_reach_the_cap_and_earn_nothing() -> None:
    config = WorkloadConfig(median_tokens=10.0, max_tokens=500, runaway_share=0.2, reward_probability=1.0)
    workload = open_workload(config, group_size=100, seed=0)
    plan = workload.plan(0, 0)
    capped = [reward for length, reward in zip(plan.lengths, plan.rewards, strict=True) if length == 500]
    assert 5 < len(capped) < 40 and not any(capped)
    assert all(reward == 1.0 for length, reward in zip(plan.lengths, plan.rewards, strict=True) if length < 500)


def test_turns_add_up_to_the_answer() -> None:
    workload = open_workload(WorkloadConfig(turns=4, median_tokens=20.0), group_size=16, seed=0)
    plan = workload.plan(0, 0)
    assert plan.turns is not None
    assert [sum(turn.tokens for turn in turns) for turns in plan.turns] == list(plan.lengths)
    assert {len(turns) for turns in plan.turns} == {1, 2, 3, 4}
    assert all(turn.tokens > 0 and turn.tool_s > 0 for turns in plan.turns for turn in turns)


def test_repeated_tasks_keep_name_text_and_typical_length() -> None:
    config = WorkloadConfig(tasks=10, between_sigma=2.0, within_sigma=0.01, median_tokens=300.0)
    workload = open_workload(config, group_size=2, seed=0)
    tasks = [Tasks(workload, seed=0).task(index) for index in range(20)]
    first, second = tasks[:10], tasks[10:]
    assert {task.task_id for task in first if task} == {task.task_id for task in second if task}
    assert [t.task_id for t in first if t] != [t.task_id for t in second if t], "in another order"
    lengths: dict[str, list[int]] = {}
    texts: dict[str, set[str]] = {}
    for index, task in enumerate(tasks):
        assert task is not None
        lengths.setdefault(task.task_id, []).extend(workload.plan(index, 0).lengths)
        texts.setdefault(task.task_id, set()).add(task.payload["question"])
    assert all(max(of_task) < 1.2 * min(of_task) + 2 for of_task in lengths.values())
    assert all(len(of_task) == 1 for of_task in texts.values()) and len(set.union(*texts.values())) == 10


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_traces_in_every_format(tmp_path: Path, suffix: str) -> None:
    workload = trace(write(tmp_path / f"trace{suffix}", ROWS))
    plans = {workload.task_id(index): workload.plan(index, 0) for index in range(2)}
    assert list(plans["a"].lengths) == [30, 20] and list(plans["a"].rewards) == [1.0, 0.0]
    assert list(plans["b"].lengths) == [5, 5], "a task with too few answers repeats them"
    assert plans["b"].prompt_tokens == 9 and workload.max_tokens == 30


def test_a_trace_of_turns(tmp_path: Path) -> None:
    turns = [("a", 0, 10, 0.5), ("a", 1, 20, 0.0), ("a", 0, 7, 0.0), ("b", 0, 3, 0.0)]
    rows = [
        {"task_id": task, "turn": turn, "response_tokens": tokens, "tool_s": tool_s}
        for task, turn, tokens, tool_s in turns
    ]
    workload = trace(write(tmp_path / "trace.jsonl", rows))
    plans = {workload.task_id(index): workload.plan(index, 0) for index in range(2)}
    assert plans["a"].turns == [[(10, 0.5), (20, 0.0)], [(7, 0.0)]]
    assert list(plans["a"].lengths) == [30, 7] and workload.max_turns == 2
    people = population(workload, 2)
    assert people.mean_tokens == pytest.approx((30 + 7 + 3 + 3) / 4)
    assert people.prefill_tokens == pytest.approx((512 + 512 + (512 + 10)) / 4), "two prompts, and a second turn"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([{"task_id": "a", "tokens": 3}], "no column response_tokens; it has task_id, tokens"),
        ([{"response_tokens": 3}], "no column task_id"),
        ([{"task_id": "a", "response_tokens": -3}], "row 1: column response_tokens is negative"),
        ([{"task_id": "a", "response_tokens": "many"}], "row 1: column response_tokens is 'many', not a number"),
        ([{"task_id": "a", "response_tokens": 1}, {"task_id": "a"}], "row 2: column response_tokens is None"),
        ([{"task_id": None, "response_tokens": 1}], "column task_id is empty"),
    ],
)
def test_a_bad_trace_is_refused_by_file_and_column(tmp_path: Path, rows: list[dict[str, Any]], said: str) -> None:
    path = write(tmp_path / "trace.jsonl", rows)
    with pytest.raises(ConfigError) as refusal:
        trace(path)
    assert said in str(refusal.value) and str(path) in str(refusal.value)


def test_files_that_are_no_traces(tmp_path: Path) -> None:
    parquet.write_table(
        pa.table({"task_id": pa.array([], pa.string()), "response_tokens": pa.array([], pa.int64())}),
        str(tmp_path / "empty.parquet"),
    )
    (tmp_path / "nothing.jsonl").write_text("")
    (tmp_path / "bad.parquet").write_text("no parquet")
    (tmp_path / "trace.txt").write_text("")
    for name, said in {
        "empty.parquet": "no rows",
        "nothing.jsonl": "cannot be read",
        "bad.parquet": "cannot be read",
        "missing.csv": "does not exist",
        "trace.txt": "none of .jsonl, .csv, .parquet",
    }.items():
        with pytest.raises(ConfigError, match=said):
            trace(tmp_path / name)
    with pytest.raises(ConfigError, match="is not the directory of a run"):
        open_workload(WorkloadConfig(source="run", path=str(tmp_path)), group_size=2, seed=0)
