"""A partition of a MaxCompute table as a target.

An upload is committed as a whole, yet a commit whose answer was lost may or may not have happened. So a shard that is
written again is looked for first, by the name of its first trajectory, which no other run and no other attempt has: the
table needs the column `trajectory`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from penstock.config import ConfigError, DumpConfig
from penstock.config.dump import Column
from penstock.store.dumps.columns import DumpError, Row
from penstock.store.dumps.targets import flat

NAME = "trajectory"
TYPES = {"bigint": "bigint", "double": "double", "boolean": "boolean", "string": "string", "json": "string"}
"""Column types as MaxCompute has them."""
SETTINGS = {"access_id": "ODPS_ACCESS_ID", "secret": "ODPS_ACCESS_KEY", "endpoint": "ODPS_ENDPOINT"}
"""What the client has to know -> the environment variable it comes from."""


class Table(Protocol):
    """The part of a table service that is needed; a fake of it is in the tests."""

    def types(self) -> Mapping[str, str]:
        """Column -> type, of the columns that are no partition's."""
        ...

    def partition_keys(self) -> Sequence[str]: ...

    def holds(self, column: str, value: str) -> bool:
        """Whether the partition has a row with this value."""
        ...

    def append(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        """All rows to the partition, which is made if it is not there, or none."""
        ...


class TablePartition:
    """A `Target`."""

    def __init__(self, table: Table, config: DumpConfig, *, partition: Sequence[str]) -> None:
        """`partition`: the keys of the URL, in their order."""
        assert config.url is not None
        self._table, self._columns, self._partition = table, config.columns, partition
        self.where = config.url

    def check(self) -> None:
        if NAME not in {column.name for column in self._columns}:
            raise ConfigError(f"dump.columns: a table needs the column {NAME}, by which a shard is found again")
        try:
            types, keys = self._table.types(), self._table.partition_keys()
        except Exception as error:  # the service's own, of many kinds
            raise ConfigError(f"dump.url: cannot open {self.where}: {error}") from None
        if list(keys) != list(self._partition):
            there, given = ", ".join(keys) or "nothing", ", ".join(self._partition) or "none"
            raise ConfigError(f"dump.url {self.where}: the table is partitioned by {there}, and the URL gives {given}")
        if wrong := [line for column in self._columns if (line := _difference(column, types))]:
            raise ConfigError(f"dump.columns do not fit {self.where}: {'; '.join(wrong)}")

    def write(self, shard: str, rows: Sequence[Row], *, again: bool) -> None:
        try:
            if again and self._table.holds(NAME, rows[0][NAME]):
                return
            names = [column.name for column in self._columns]
            values = [list(flat(row, self._columns).values()) for row in rows]
            self._table.append(names, values)
        except Exception as error:
            raise DumpError(f"cannot write shard {shard} to {self.where}: {error}") from error


def open_table(config: DumpConfig) -> TablePartition:
    """Of `odps://project/tables/name/key=value[/key=value]`. Raises `ConfigError`."""
    project, name, partition = parse(config.url or "")
    keys = [key for key, _ in partition]
    return TablePartition(_connect(project, name, partition), config, partition=keys)


def parse(url: str) -> tuple[str, str, list[tuple[str, str]]]:
    """(project, table, [(partition key, value)]). Raises `ConfigError`."""
    project, tables, name, *rest = [*url.removeprefix("odps://").strip("/").split("/"), "", "", ""]
    pairs = [part.partition("=") for part in rest if part]
    if not project or tables != "tables" or not name or not all(key and value for key, _, value in pairs):
        raise ConfigError(f"dump.url {url} is not of the form odps://project/tables/name/key=value")
    return project, name, [(key, value) for key, _, value in pairs]


def _difference(column: Column, types: Mapping[str, str]) -> str:
    """Between a declared column and the table's, in words; empty if there is none."""
    wanted, found = TYPES[column.type], types.get(column.name)
    if found is None:
        return f"the table has no column {column.name}"
    return "" if found == wanted else f"column {column.name} is {found} there, and {wanted} here"


def _connect(project: str, name: str, partition: Sequence[tuple[str, str]]) -> Table:
    try:
        from odps import ODPS
    except ImportError:
        raise ConfigError("dump.url odps:// needs the package pyodps: pip install 'penstock[odps]'") from None
    known = {setting: os.environ.get(variable) for setting, variable in SETTINGS.items()}
    if missing := [SETTINGS[setting] for setting, value in known.items() if not value]:
        raise ConfigError(f"dump.url odps:// needs the environment variables {', '.join(missing)}")
    client = ODPS(known["access_id"], known["secret"], project=project, endpoint=known["endpoint"])
    return MaxComputeTable(client.get_table(name), ",".join(f"{key}={value}" for key, value in partition))


class MaxComputeTable:
    """`Table` behind pyodps."""

    def __init__(self, table: Any, partition: str) -> None:
        self._table, self._partition = table, partition or None

    def types(self) -> Mapping[str, str]:
        return {column.name: str(column.type).lower() for column in self._table.table_schema.simple_columns}

    def partition_keys(self) -> Sequence[str]:
        return [key.name for key in self._table.table_schema.partitions or []]

    def holds(self, column: str, value: str) -> bool:
        if self._partition is not None and not self._table.exist_partition(self._partition):
            return False
        with self._table.open_reader(partition=self._partition, columns=[column]) as reader:
            return any(record[column] == value for record in reader)

    def append(self, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        names = list(columns)
        with self._table.open_writer(partition=self._partition, create_partition=True) as writer:
            records = [self._table.new_record() for _ in rows]
            for record, row in zip(records, rows, strict=True):
                for name, value in zip(names, row, strict=True):
                    record[name] = value
            writer.write(records)
