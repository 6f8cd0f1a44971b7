"""Settings of the trajectories that a run writes for other programs, and of runs that only generate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from penstock.config.section import Section

ColumnType = Literal["bigint", "double", "string", "boolean", "json"]

DEFAULT_COLUMNS: dict[str, ColumnType] = {
    "trajectory": "string",
    "task_index": "bigint",
    "task_id": "string",
    "tag": "string",
    "group": "bigint",
    "episode": "bigint",
    "attempt": "bigint",
    "seed": "bigint",
    "mode": "string",
    "step": "bigint",
    "model": "string",
    "policy_version_min": "bigint",
    "policy_version_max": "bigint",
    "status": "string",
    "stop_reason": "string",
    "reward": "double",
    "num_turns": "bigint",
    "prompt_tokens": "bigint",
    "response_tokens": "bigint",
    "seconds": "double",
    "messages": "string",
    "branches": "string",
}
KEPT_TOKENS = "training_samples"
"""Column with the training samples of an episode: tokens, log-probabilities, versions and turns; of type json. Large
groups have it for their first members only."""
TOKEN_COLUMNS = ("token_ids", "loss_mask", "logprobs", "versions", KEPT_TOKENS)
"""Columns with tokens. The first four have one number per token of the whole trajectory; of type json."""
OTHER_NAMES = {
    "task_idx": "task_index",
    "model_name": "model",
    "episode_score": "reward",
    "save_content": "messages",
    "global_step": "step",
}
"""Names in ROLL's documents, with the names used here."""
OWN_COLUMNS = frozenset((*DEFAULT_COLUMNS, *TOKEN_COLUMNS, *OTHER_NAMES, "error"))
"""Columns that every trajectory has."""
SPELLINGS = ("COLUMNS_CONFIG", "COLUMMNS_CONFIG")
"""Other names of `columns`, from ROLL's documents and ROLL's code."""


class Column(Section):
    """One column of the table."""

    name: str = Field(min_length=1)
    type: ColumnType


class DumpConfig(Section):
    """A table of trajectories, one row for each."""

    url: str | None = None
    """Destination of the table: a folder (a path or `file://`), a prefix of an object store (`s3://`, `oss://`,
    `gs://`, `memory://`), or a partition of a table, `odps://project/tables/name/key=value`. In a folder or object
    store, the files are in a subfolder named after the run. Unset: `penstock rollout` writes to `trajectories/` of the
    run, and training writes only `observe.trajectories`."""
    format: Literal["jsonl", "parquet"] = "jsonl"
    """Format of the files."""
    columns: list[Column] = Field([Column(name=key, type=kind) for key, kind in DEFAULT_COLUMNS.items()], min_length=1)
    """Columns of the table: `[[name, type], ...]` with types bigint, double, string, boolean and json. A name that is
    not a field of a trajectory is looked up in the task, then in the `info` that the environment returned."""
    rows_per_shard: int = Field(512, ge=1)
    """Minimum number of trajectories per file; a group is never split over files."""

    @property
    def foreign_columns(self) -> frozenset[str]:
        """Return the columns that only the task or the environment can fill."""
        return frozenset(column.name for column in self.columns) - OWN_COLUMNS

    @model_validator(mode="before")
    @classmethod
    def _takes_other_spellings(cls, section: Any) -> Any:
        if not isinstance(section, Mapping):
            return section
        return {"columns" if name in SPELLINGS else name: value for name, value in section.items()}

    @field_validator("columns", mode="before")
    @classmethod
    def _takes_pairs(cls, columns: Any) -> Any:
        if isinstance(columns, Mapping):
            columns = list(map(list, columns.items()))
        return list(map(_column, columns)) if isinstance(columns, list) else columns

    def contradictions(self) -> Iterator[str]:
        names = [column.name for column in self.columns]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            yield f"columns names a column twice: {', '.join(twice)}"


class SynthesisConfig(Section):
    """`penstock rollout`: a fixed policy runs a whole dataset."""

    tasks: int = Field(-1, ge=-1)
    """Number of tasks to run, from the first task on, with `env.group_size` episodes each; -1 runs all tasks."""


def _column(column: Any) -> Any:
    """Return `[name, type]` as a section; other values as they are. Raises ValueError for a wrong form."""
    if isinstance(column, Column | Mapping):
        return column
    if not (isinstance(column, list | tuple) and len(column) == 2):
        raise ValueError(f"{column!r} is not of the form [name, type]")
    return dict(zip(("name", "type"), column, strict=True))
