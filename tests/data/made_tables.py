"""Files with numbered questions, and configurations that read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from penstock.config import Config


def rows(count: int) -> list[dict[str, Any]]:
    return [{"question": f"q{number}", "answer": str(number)} for number in range(count)]


def json_lines(path: Path, count: int) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows(count)))
    return path


def parquet(path: Path, count: int, *, rows_per_group: int = 1000) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows(count)), path, row_group_size=rows_per_group)
    return path


def reading(path: Path, **data: Any) -> Config:
    """All rows of `path` are trained on, unless `data` says otherwise."""
    source = {".jsonl": "jsonl", ".parquet": "parquet"}.get(path.suffix, "huggingface")
    return Config.model_validate({"data": {"source": source, "path": str(path), "eval_tasks": 0} | data})
