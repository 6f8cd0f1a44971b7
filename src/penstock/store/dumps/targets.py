"""Targets for rows, chosen by the scheme of a URL.

A target holds a whole shard or nothing of it. Writing a shard again changes nothing.
"""

from __future__ import annotations

import io
import os
import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol
from urllib.parse import unquote, urlsplit

import msgspec

from penstock.config import ConfigError, DumpConfig
from penstock.config.trajectory_dump import Column, ColumnType
from penstock.own_files import plain_directory
from penstock.store.dumps.columns import DumpError, Row, flat

EXTRAS = {"s3": ("s3fs", "s3"), "oss": ("ossfs", "oss"), "gs": ("gcsfs", "gs"), "memory": ("fsspec", "fsspec")}
"""Scheme of an object store -> (package with its client, our extra that installs the package)."""
SCHEMES = ("file", *EXTRAS, "odps")
PARQUET: dict[ColumnType, str] = {
    "bigint": "int64",
    "double": "float64",
    "boolean": "bool",
    "string": "string",
    "json": "string",
}
"""Column types as Arrow names them."""


class Target(Protocol):
    """Receives shards. Its methods block, so they are called from a thread."""

    where: str
    """Location, for messages."""

    def check(self) -> None:
        """Check that the target is writable. Raises `ConfigError`."""

    def write(self, shard: str, rows: Sequence[Row], *, again: bool) -> None:
        """Write all rows or none. `again`: an earlier attempt may or may not have succeeded. Raises `DumpError`."""


def open_target(config: DumpConfig, *, run_id: str = "") -> Target:
    """Return the target at `config.url`, which must be set. Files go to its subfolder `run_id`, so that runs stay
    separate.

    Raises `ConfigError` if the URL is unknown or its package is missing.
    """
    assert config.url is not None
    scheme, _, rest = config.url.partition("://")
    if not rest:
        return Folder(Path(config.url, run_id), config)
    if scheme == "file":
        return Folder(Path(unquote(urlsplit(config.url).path), run_id), config)
    if scheme == "odps":
        from penstock.store.dumps.maxcompute import open_table

        return open_table(config)
    if scheme in EXTRAS:
        return ObjectStore(f"{config.url.rstrip('/')}/{run_id}", config)
    raise ConfigError(f"dump.url {config.url}: unknown scheme {scheme}; there are {', '.join(SCHEMES)}, and paths")


class Folder:
    """A target that writes files to a local folder."""

    def __init__(self, directory: Path, config: DumpConfig) -> None:
        self._directory, self._format, self._columns = directory.absolute(), config.format, config.columns
        self.where = str(self._directory)

    def check(self) -> None:
        probe = self._directory / f".{secrets.token_hex(4)}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            probe.touch()
            probe.unlink()
        except OSError as error:
            raise ConfigError(f"dump.url: cannot write to {self.where}: {error.strerror or error}") from None

    def write(self, shard: str, rows: Sequence[Row], *, again: bool) -> None:
        name = Path(f"{shard}.{self._format}")
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with ExitStack() as opened:
                directory = opened.enter_context(plain_directory(self._directory))
                for part in name.parent.parts:
                    (directory / part).mkdir(exist_ok=True)
                    directory = opened.enter_context(plain_directory(directory / part))
                _replace(directory / name.name, encode(rows, self._columns, self._format))
        except OSError as error:
            raise DumpError(f"cannot write {self._directory / name}: {error.strerror or error}") from error


def _replace(path: Path, data: bytes) -> None:
    """Replace a file at once, on disk. A link at its place or at that of the new file is removed, not followed."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    unfinished.unlink(missing_ok=True)
    with unfinished.open("xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


class ObjectStore:
    """A target that writes objects under a prefix; an object store writes an object atomically.

    The store's own client finds the access keys, in its usual places.
    """

    def __init__(self, url: str, config: DumpConfig) -> None:
        scheme = url.partition("://")[0]
        package, extra = EXTRAS[scheme]
        try:
            import fsspec

            self._files, prefix = fsspec.core.url_to_fs(url)
        except ImportError:
            raise ConfigError(f"dump.url {scheme}:// needs {package}: pip install 'penstock[{extra}]'") from None
        except Exception as error:  # each store raises its own types
            raise ConfigError(f"dump.url: cannot open {url}: {_say(error)}") from None
        self._prefix, self._format, self._columns = prefix.rstrip("/"), config.format, config.columns
        self.where = url.rstrip("/")

    def check(self) -> None:
        probe = f"{self._prefix}/.{secrets.token_hex(4)}"
        try:
            self._files.pipe_file(probe, b"")
            self._files.rm_file(probe)
        except Exception as error:
            raise ConfigError(f"dump.url: cannot write to {self.where}: {_say(error)}") from None

    def write(self, shard: str, rows: Sequence[Row], *, again: bool) -> None:
        name = f"{shard}.{self._format}"
        try:
            self._files.pipe_file(f"{self._prefix}/{name}", encode(rows, self._columns, self._format))
        except Exception as error:
            raise DumpError(f"cannot write {self.where}/{name}: {_say(error)}") from error


def encode(rows: Sequence[Row], columns: Sequence[Column], form: str) -> bytes:
    """Return a file with these rows. JSON has no infinite numbers and no NaN, so there they become null."""
    if form == "jsonl":
        return b"".join(msgspec.json.encode(row) + b"\n" for row in rows)
    import pyarrow as pa
    import pyarrow.parquet as pq

    file = io.BytesIO()
    schema = pa.schema([(column.name, pa.type_for_alias(PARQUET[column.type])) for column in columns])
    pq.write_table(pa.Table.from_pylist([flat(row, columns) for row in rows], schema=schema), file)
    return file.getvalue()


def _say(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
