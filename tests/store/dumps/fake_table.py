"""A table of pyodps whose uploads stay in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any


def nothing() -> None: ...


class FakeTable:
    """The part of a pyodps table that a dump uses. `hazard` is called before and after each upload is committed."""

    def __init__(self, types: Mapping[str, str], keys: Sequence[str], hazard: Callable[[], None] = nothing) -> None:
        columns = [SimpleNamespace(name=name, type=kind) for name, kind in types.items()]
        self.table_schema = SimpleNamespace(
            simple_columns=columns, partitions=[SimpleNamespace(name=key) for key in keys]
        )
        self.hazard = hazard
        self.rows: list[dict[str, Any]] = []
        self._partitions = set[str | None]()

    def new_record(self) -> dict[str, Any]:
        return {}

    def exist_partition(self, partition: str) -> bool:
        return partition in self._partitions

    def open_writer(self, *, partition: str | None, create_partition: bool) -> FakeTable:
        self._partitions.add(partition)
        return self

    def open_reader(self, *, partition: str | None, columns: Sequence[str]) -> FakeTable:
        return self

    def write(self, records: Sequence[dict[str, Any]]) -> None:
        self.hazard()
        self.rows += records
        self.hazard()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(self.rows)

    def __enter__(self) -> FakeTable:
        return self

    def __exit__(self, *_: object) -> None: ...
