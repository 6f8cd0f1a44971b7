"""Values as a column's type has them. Nothing is bent in silence: what does not fit is refused by name, null stays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from penstock.config.dump import Column, ColumnType

Row = Mapping[str, Any]
"""Column -> value, every declared column, in their order."""


class DumpError(RuntimeError):
    """Trajectories cannot be written; the message names the target or the column."""

    self_explanatory = True
    hopeless = True


def cell(column: Column, value: object) -> Any:
    """Raises `DumpError` naming the column."""
    return converter(column)(value)


def converter(column: Column) -> Callable[[object], Any]:
    """From a value to what the column holds; it raises `DumpError` naming the column."""
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
    """JSON."""
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
