"""How fast tasks come out of files, through the very stream that the controller takes them from."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet

from penstock.config import Config
from penstock.data.sources import TaskStream, held_out_tasks, open_tasks

NUM_ROWS = 200_000
ROWS_PER_GROUP = 20_000
TAKEN_AT_ONCE = 32
"""As many as one optimizer step admits."""


def dataset_items_per_s(num_rows: int = NUM_ROWS) -> dict[str, float]:
    """Tasks per second by source and order, each read whole: opening the file is part of it."""
    rates: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as directory:
        for source, path in _write(Path(directory), num_rows).items():
            for mode in ("traversal", "sample"):
                rates[f"{source} {mode}"] = _rate(source, path, mode, num_rows)
    return rates


def _rate(source: str, path: Path, mode: str, num_rows: int) -> float:
    data = {"source": source, "path": str(path), "mode": mode, "eval_tasks": 256, "keys": ["question", "answer"]}
    config = Config.model_validate({"data": data})
    started = time.perf_counter()
    stream, taken = TaskStream(open_tasks(config), held_out=held_out_tasks(config)), 0
    while tasks := stream.take(TAKEN_AT_ONCE):
        taken += len(tasks)
    seconds = time.perf_counter() - started
    assert taken == num_rows - 256, f"{taken} tasks of {num_rows} rows"
    return taken / seconds


def _write(directory: Path, num_rows: int) -> dict[str, Path]:
    """The same rows in every format: a question of the length of a school problem, its answer, where it is from."""
    text = "A farmer has {0} sheep and sells {1} of them every week; how many are left after three weeks? " * 3
    rows = [
        {"question": text.format(n, n % 7), "answer": str(n - n % 7 * 3), "metadata": {"level": n % 5, "from": "farm"}}
        for n in range(num_rows)
    ]
    lines, table = directory / "rows.jsonl", directory / "rows.parquet"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), table, row_group_size=ROWS_PER_GROUP)
    return {"jsonl": lines, "parquet": table}
