"""A partition of a MaxCompute table as a target.

An upload is committed as a whole. If the answer to a commit is lost, the commit may or may not have happened. So before
a shard is written again, we look for the name of its first trajectory in the table. No other run and no other attempt
has that name. For this the table needs the column `trajectory`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.config import ConfigError, DumpConfig
from penstock.config.trajectory_dump import Column
from penstock.store.dumps.columns import DumpError, Row, flat

NAME = "trajectory"
TYPES = {"bigint": "bigint", "double": "double", "boolean": "boolean", "string": "string", "json": "string"}
"""Column types as MaxCompute names them."""
SETTINGS = {"access_id": "ODPS_ACCESS_ID", "secret": "ODPS_ACCESS_KEY", "endpoint": "ODPS_ENDPOINT"}
"""Setting of the client -> the environment variable that holds it."""


class TablePartition:
    """A `Target` that writes to one partition."""

    def __init__(self, table: Any, config: DumpConfig, partition: Sequence[tuple[str, str]]) -> None:
        """`table`: a table of pyodps. `partition`: the keys and values in the URL, in their order."""
        assert config.url is not None
        self._table, self._columns = table, config.columns
        self._keys = [key for key, _ in partition]
        self._partition = ",".join(f"{key}={value}" for key, value in partition) or None
        self.where = config.url

    def check(self) -> None:
        if NAME not in {column.name for column in self._columns}:
            raise ConfigError(f"dump.columns: a table needs the column {NAME}, by which a shard is found again")
        try:
            schema = self._table.table_schema
            types = {column.name: str(column.type).lower() for column in schema.simple_columns}
            keys = [key.name for key in schema.partitions or []]
        except Exception as error:  # the service raises many types of its own
            raise ConfigError(f"dump.url: cannot open {self.where}: {error}") from None
        if keys != self._keys:
            there, given = ", ".join(keys) or "nothing", ", ".join(self._keys) or "none"
            raise ConfigError(f"dump.url {self.where}: the table is partitioned by {there}, and the URL gives {given}")
        if wrong := [line for column in self._columns if (line := _difference(column, types))]:
            raise ConfigError(f"dump.columns do not fit {self.where}: {'; '.join(wrong)}")

    def write(self, shard: str, rows: Sequence[Row], *, again: bool) -> None:
        try:
            if not (again and self._holds(rows[0][NAME])):
                with self._table.open_writer(partition=self._partition, create_partition=True) as writer:
                    writer.write([self._record(row) for row in rows])
        except Exception as error:
            raise DumpError(f"cannot write shard {shard} to {self.where}: {error}") from error

    def _holds(self, name: str) -> bool:
        """Return whether the partition has the trajectory `name`."""
        if self._partition is not None and not self._table.exist_partition(self._partition):
            return False
        with self._table.open_reader(partition=self._partition, columns=[NAME]) as reader:
            return any(record[NAME] == name for record in reader)

    def _record(self, row: Row) -> Any:
        record = self._table.new_record()
        for name, value in flat(row, self._columns).items():
            record[name] = value
        return record


def open_table(config: DumpConfig) -> TablePartition:
    """Return the target for `odps://project/tables/name/key=value[/key=value]`. Raises `ConfigError`."""
    project, name, partition = parse(config.url or "")
    return TablePartition(_connect(project).get_table(name), config, partition)


def parse(url: str) -> tuple[str, str, list[tuple[str, str]]]:
    """Return (project, table, [(partition key, value)]). Raises `ConfigError`."""
    project, tables, name, *rest = [*url.removeprefix("odps://").strip("/").split("/"), "", "", ""]
    pairs = [part.partition("=") for part in rest if part]
    if not project or tables != "tables" or not name or not all(key and value for key, _, value in pairs):
        raise ConfigError(f"dump.url {url} is not of the form odps://project/tables/name/key=value")
    return project, name, [(key, value) for key, _, value in pairs]


def _difference(column: Column, types: Mapping[str, str]) -> str:
    """Return the difference between a declared column and the table's column, in words; empty if there is none."""
    wanted, found = TYPES[column.type], types.get(column.name)
    if found is None:
        return f"the table has no column {column.name}"
    return "" if found == wanted else f"column {column.name} is {found} there, and {wanted} here"


def _connect(project: str) -> Any:
    try:
        from odps import ODPS
    except ImportError:
        raise ConfigError("dump.url odps:// needs the package pyodps: pip install 'penstock[odps]'") from None
    known = {setting: os.environ.get(variable) for setting, variable in SETTINGS.items()}
    if missing := [SETTINGS[setting] for setting, value in known.items() if not value]:
        raise ConfigError(f"dump.url odps:// needs the environment variables {', '.join(missing)}")
    return ODPS(known["access_id"], known["secret"], project=project, endpoint=known["endpoint"])
