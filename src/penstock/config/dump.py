"""Settings of what a run keeps of its trajectories for others, and of runs that only play."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

from pydantic import Field, field_validator, model_validator

from penstock.config.section import Section

ColumnType = Literal["bigint", "double", "string", "boolean", "json"]

DEFAULT_COLUMNS = {
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
}
TOKEN_COLUMNS = ("token_ids", "loss_mask", "logprobs", "versions")
"""One number per token of the whole trajectory; of type json."""
OTHER_NAMES = {
    "task_idx": "task_index",
    "model_name": "model",
    "episode_score": "reward",
    "save_content": "messages",
    "global_step": "step",
}
"""As ROLL's documents call them."""
OWN_COLUMNS = frozenset((*DEFAULT_COLUMNS, *TOKEN_COLUMNS, *OTHER_NAMES, "error"))
"""What every trajectory has."""
SPELLINGS = ("COLUMNS_CONFIG", "COLUMMNS_CONFIG")
"""Other names of `columns`, as ROLL's documents and ROLL's code have it."""


class Column(Section):
    """One column of the table."""

    name: str = Field(min_length=1)
    type: ColumnType


class DumpConfig(Section):
    """Trajectories as a table, one row each."""

    url: str | None = None
    """Where it is written: a folder (a path or `file://`) or a prefix of an object store (`s3://`, `oss://`, `gs://`,
    `memory://`), in a folder named after the run, or a partition of a table, `odps://project/tables/name/key=value`.
    Unset: `penstock rollout` writes to `trajectories/` of the run, and training writes nothing but
    `observe.trajectories`."""
    format: Literal["jsonl", "parquet"] = "jsonl"
    """Of files."""
    columns: list[Column] = Field(default_factory=lambda: _columns(DEFAULT_COLUMNS), min_length=1)
    """`[[name, type], ...]` with types bigint, double, string, boolean and json. Names that are none of a trajectory's
    own are looked up in the task, then in what the environment told as `info`."""
    rows_per_shard: int = Field(512, ge=1)
    """Trajectories per file, at least; a group is never divided."""

    @property
    def foreign_columns(self) -> frozenset[str]:
        """Names that only the task or the environment can fill."""
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
            return [{"name": name, "type": kind} for name, kind in columns.items()]
        if not isinstance(columns, list):
            return columns
        return [_column(column) for column in columns]

    @field_validator("columns")
    @classmethod
    def _are_told_apart(cls, columns: list[Column]) -> list[Column]:
        names = [column.name for column in columns]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"given twice: {', '.join(twice)}")
        return columns


class SynthesisConfig(Section):
    """`penstock rollout`: a policy that does not change plays a whole dataset."""

    tasks: int = Field(-1, ge=-1)
    """How many tasks are played, from the first one on, `env.group_size` times each; -1 plays them all."""


def _columns(types: Mapping[str, str]) -> list[Column]:
    return [Column.model_validate({"name": name, "type": kind}) for name, kind in types.items()]


def _column(column: Any) -> Any:
    """`[name, type]` as a section."""
    if isinstance(column, Column | Mapping):
        return column
    if not (isinstance(column, list | tuple) and len(column) == 2):
        raise ValueError(f"{column!r} is not of the form [name, type]")
    name, kind = column
    if kind not in get_args(ColumnType):
        raise ValueError(f"column {name} has type {kind!r}, which is none of {', '.join(get_args(ColumnType))}")
    return {"name": name, "type": kind}
