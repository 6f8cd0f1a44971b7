"""Conversion of values to column types. A value that does not fit is an error that names the column; null stays
null."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from penstock.alarms import HopelessError
from penstock.config.trajectory_dump import Column, ColumnType

Row = Mapping[str, Any]
"""Column -> value, for every declared column, in the order of declaration."""


class DumpError(HopelessError):
    """Trajectories cannot be written; the message names the target or the column."""


def converter(column: Column) -> Callable[[object], Any]:
    """Return the function that converts a value for the column. It raises `DumpError` that names the column."""
    convert = _CONVERT[column.type]

    def converted(value: object) -> Any:
        if value is None:
            return None
        try:
            return convert(value)
        except (TypeError, ValueError, OverflowError):
            raise DumpError(f"column {column.name} is of type {column.type}, and {value!r:.80} is none") from None

    return converted


def as_text(value: object) -> str:
    """Return `value` as JSON."""
    return msgspec.json.encode(value).decode()


def _bigint(value: object) -> int:
    if not isinstance(value, int | float) or not -(2**63) <= value < 2**63:
        raise ValueError
    whole = int(value)
    if whole != value:
        raise ValueError
    return whole


def _double(value: object) -> float:
    if not isinstance(value, int | float):
        raise TypeError
    return float(value)


def _boolean(value: object) -> bool:
    if value not in (True, False):
        raise ValueError
    return bool(value)


def _string(value: object) -> str:
    return value if isinstance(value, str) else as_text(value)


def _json(value: object) -> object:
    as_text(value)
    return value


_CONVERT: dict[ColumnType, Callable[[object], Any]] = {
    "bigint": _bigint,
    "double": _double,
    "boolean": _boolean,
    "string": _string,
    "json": _json,
}


def flat(row: Row, columns: Sequence[Column]) -> dict[str, Any]:
    """Return the row with JSON values as text, for tables."""
    texts = {column.name for column in columns if column.type == "json"}
    return {name: as_text(value) if name in texts and value is not None else value for name, value in row.items()}
