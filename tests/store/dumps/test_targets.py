"""A target is chosen by its URL, and refused at the start if it cannot be written."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fake_table import FakeTable

from penstock.config import ConfigError, DumpConfig
from penstock.store.dumps.columns import DumpError, Row
from penstock.store.dumps.maxcompute import TablePartition, parse
from penstock.store.dumps.targets import Folder, open_target

COLUMNS = [["trajectory", "string"], ["n", "bigint"], ["x", "double"], ["ok", "boolean"], ["more", "json"]]
ROWS: list[Row] = [
    {"trajectory": "a", "n": 2**62, "x": 0.5, "ok": True, "more": {"a": [1, None]}},
    {"trajectory": "b", "n": None, "x": None, "ok": None, "more": None},
]


def dump(url: str, **settings: Any) -> DumpConfig:
    return DumpConfig.model_validate({"url": url, "columns": COLUMNS, **settings})


@pytest.mark.parametrize("form", ["{}", "file://{}"])
def test_a_folder_takes_json_lines(tmp_path: Path, form: str) -> None:
    target = open_target(dump(form.format(tmp_path / "out put")))
    target.check()
    target.write("rollout/000000", ROWS, again=False)
    (path,) = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert path == tmp_path / "out put" / "rollout" / "000000.jsonl"
    assert [json.loads(line) for line in path.read_text().splitlines()] == ROWS


def test_no_link_is_followed_to_a_file_of_ours(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "out").mkdir()
    for name in ("s.jsonl", ".s.jsonl.unfinished"):
        (tmp_path / "out" / name).symlink_to(victim)
    open_target(dump(str(tmp_path / "out"))).write("s", ROWS, again=False)
    assert victim.read_text() == "mine" and not (tmp_path / "out" / "s.jsonl").is_symlink()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    with pytest.raises(DumpError, match="is a link or no directory"):
        open_target(dump(str(tmp_path / "link"))).write("t", ROWS, again=False)


def test_parquet_has_the_declared_types_and_keeps_nulls(tmp_path: Path) -> None:
    target = open_target(dump(str(tmp_path), format="parquet"))
    target.write("s", ROWS, again=False)
    table = pq.read_table(tmp_path / "s.parquet")
    types = [pa.string(), pa.int64(), pa.float64(), pa.bool_(), pa.string()]
    assert [(field.name, field.type) for field in table.schema] == [
        (name, kind) for (name, _), kind in zip(COLUMNS, types, strict=True)
    ]
    first, second = table.to_pylist()
    assert first == {**ROWS[0], "more": '{"a":[1,null]}'} and second == ROWS[1]


def test_columns_that_are_null_everywhere_keep_their_type(tmp_path: Path) -> None:
    open_target(dump(str(tmp_path), format="parquet")).write("s", ROWS[1:], again=False)
    assert pq.read_table(tmp_path / "s.parquet").schema.field("n").type == pa.int64()


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_an_object_store(form: str) -> None:
    target = open_target(dump(f"memory://bucket/{form}/1/", format=form), run_id="mine")
    target.check()
    target.write("rollout/000000", ROWS, again=False)
    target.write("rollout/000000", ROWS, again=True)
    files = fsspec.filesystem("memory")
    assert files.find(f"/bucket/{form}/1") == [f"/bucket/{form}/1/mine/rollout/000000.{form}"]
    data = files.cat_file(f"/bucket/{form}/1/mine/rollout/000000.{form}")
    found = pq.read_table(io.BytesIO(data)).num_rows if form == "parquet" else len(data.splitlines())
    assert found == len(ROWS)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "ftp://host/x",
            "dump.url ftp://host/x: unknown scheme ftp; there are file, s3, oss, gs, memory, odps, and paths",
        ),
        ("odps://project/table", "is not of the form odps://project/tables/name/key=value"),
        ("odps://project/tables/name/20240101", "is not of the form odps://project/tables/name/key=value"),
    ],
)
def test_a_url_that_is_none_of_ours(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_target(dump(url))


@pytest.mark.parametrize(("scheme", "package"), [("s3", "s3fs"), ("oss", "ossfs"), ("gs", "gcsfs")])
def test_a_store_whose_package_is_missing(monkeypatch: pytest.MonkeyPatch, scheme: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=rf"needs {package}: pip install 'penstock\[{scheme}\]'"):
        open_target(dump(f"{scheme}://bucket/x"))


def test_a_file_in_the_way_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=f"dump.url: cannot write to {tmp_path}/file/x: Not a directory"):
        open_target(dump(str(tmp_path / "file" / "x"))).check()


def test_a_full_disk_leaves_no_half_of_a_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DumpError, match=f"cannot write {tmp_path}/s.jsonl: No space left on device"):
        Folder(tmp_path, dump(str(tmp_path))).write("s", ROWS, again=False)
    assert not (tmp_path / "s.jsonl").exists()


TABLE_TYPES = {"trajectory": "string", "n": "bigint", "x": "double", "ok": "boolean", "more": "string", "other": "int"}
TABLE = "odps://project/tables/name/ds=20240101/mode=train"
PARTITION = [("ds", "20240101"), ("mode", "train")]


def test_a_table_takes_rows_in_the_order_of_its_columns() -> None:
    table = FakeTable(TABLE_TYPES, ["ds", "mode"])
    target = TablePartition(table, dump(TABLE), PARTITION)
    target.check()
    target.write("s", ROWS, again=False)
    target.write("s", ROWS, again=True)
    assert [list(row) for row in table.rows] == [[name for name, _ in COLUMNS]] * 2
    assert [list(row.values()) for row in table.rows] == [
        ["a", 2**62, 0.5, True, '{"a":[1,null]}'],
        ["b", None, None, None, None],
    ]


@pytest.mark.parametrize(
    ("types", "keys", "message"),
    [
        ({**TABLE_TYPES, "n": "string"}, ["ds", "mode"], "column n is string there, and bigint here"),
        ({"trajectory": "string"}, ["ds", "mode"], "no column n; the table has no column x"),
        (TABLE_TYPES, ["ds"], "the table is partitioned by ds, and the URL gives ds, mode"),
    ],
)
def test_a_table_that_does_not_fit(types: dict[str, str], keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        TablePartition(FakeTable(types, keys), dump(TABLE), PARTITION).check()


def test_a_table_needs_the_column_that_finds_a_shard_again() -> None:
    settings = dump(TABLE, columns=[["reward", "double"]])
    with pytest.raises(ConfigError, match="a table needs the column trajectory"):
        TablePartition(FakeTable({}, []), settings, []).check()


def test_the_parts_of_a_url() -> None:
    assert parse(TABLE) == ("project", "name", PARTITION)
    assert parse("odps://project/tables/name") == ("project", "name", [])


def test_the_service_wants_keys_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("odps")
    for name in ("ODPS_ACCESS_ID", "ODPS_ACCESS_KEY", "ODPS_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match="needs the environment variables ODPS_ACCESS_ID, ODPS_ACCESS_KEY"):
        open_target(dump(TABLE))


class ClientsTable:
    """pyodps's own table, with an upload that stays here."""

    def __init__(self) -> None:
        from odps.models import Record, TableSchema

        names = [name for name, _ in COLUMNS]
        self.table_schema = TableSchema.from_lists(names, [TABLE_TYPES[name] for name in names], ["ds"], ["string"])
        self._record, self.records, self.partition = Record, list[Any](), ""

    def new_record(self) -> Any:
        return self._record(schema=self.table_schema)

    def exist_partition(self, partition: str) -> bool:
        return partition == self.partition

    def open_writer(self, *, partition: str, create_partition: bool) -> ClientsTable:
        self.partition = partition
        return self

    def open_reader(self, *, partition: str, columns: list[str]) -> ClientsTable:
        return self

    def write(self, records: list[Any]) -> None:
        self.records += records

    def __iter__(self) -> Any:
        return iter(self.records)

    def __enter__(self) -> ClientsTable:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_rows_become_records_of_the_client() -> None:
    pytest.importorskip("odps")
    client = ClientsTable()
    target = TablePartition(client, dump("odps://p/tables/t/ds=1"), [("ds", "1")])
    target.check()
    target.write("s", ROWS, again=False)
    target.write("s", ROWS, again=True)
    assert [[record[name] for name, _ in COLUMNS] for record in client.records] == [
        ["a", 2**62, 0.5, True, '{"a":[1,null]}'],
        ["b", None, None, None, None],
    ]
