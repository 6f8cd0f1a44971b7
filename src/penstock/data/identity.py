"""The identity of a dataset: one hash over its name, split, options and content.

A run records the identity. A resume then detects that other data now have the same name.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from penstock.config import Config, ConfigError, DataConfig
from penstock.data.table_files import location
from penstock.types import Purpose

WHOLE_BYTES = 1 << 30
"""Files up to this size are hashed whole. Larger files are hashed by their size and by sampled parts, so that a run
need not read a terabyte before it starts."""
PART_BYTES, NUM_PARTS = 1 << 20, 1024
DIGEST_BYTES = 16

Identities = Mapping[str, Mapping[str, str]]
"""Key: purpose and tag. Value: the data's `source`, and their hash as `identity`."""


def identities(config: Config) -> dict[str, dict[str, str]]:
    """Return the identities of all datasets of the run. Raises `ConfigError` if a file cannot be read."""
    environments, known = config.environments, functools.cache(fingerprint)
    purposes: tuple[Purpose, ...] = ("train", "eval")
    return {
        f"{purpose} {tag}": _described(settings.data, purpose, known)
        for purpose in purposes
        for tag, settings in environments.tagged(purpose).items()
    }


def check_identities(before: Identities, config: Config) -> None:
    """Compare the data with the recorded identities. Raises `ConfigError` that names the first data that changed."""
    for name, found in identities(config).items():
        known = before.get(name, found)
        if known["identity"] != found["identity"]:
            raise ConfigError(
                f"data ({name}): {found['source']} has changed since the run was begun ({known['identity'][:12]} then, "
                f"{found['identity'][:12]} now): put the old data back, or begin another run"
            )


def _described(data: DataConfig, purpose: Purpose, content: Callable[[Path], str]) -> dict[str, str]:
    """Return a readable name of the items that `data` yields for one purpose, and their hash. `content` returns the
    hash of a path."""
    source: str = data.source
    facts: dict[str, Any] = {"source": source}
    if data.source == "reasoning_gym":
        source = f"reasoning_gym {data.dataset}"
        facts |= {"dataset": data.dataset, "options": data.options, "version": _version("reasoning-gym")}
    elif data.has_rows:
        path, split = location(data, held_out=purpose == "eval")
        source = str(path)
        facts |= {"split": split, "content": content(path)}
    digest = hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=DIGEST_BYTES)
    return {"source": source, "identity": digest.hexdigest()}


def fingerprint(path: Path) -> str:
    """Return the hash of a file's bytes, or of all names and files in a directory.

    Large files are sampled at even distances. Raises `ConfigError` if a file cannot be read.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    files = sorted(each for each in path.rglob("*") if each.is_file()) if path.is_dir() else [path]
    try:
        for file in files:
            name = "" if file == path else str(file.relative_to(path))
            digest.update(f"{name}\0{file.stat().st_size}\0".encode())
            for part in _parts(file):
                digest.update(part)
    except OSError as error:
        raise ConfigError(f"data: {path} cannot be read: {error.strerror}") from None
    return digest.hexdigest()


def _parts(path: Path) -> Iterator[bytes]:
    size = path.stat().st_size
    with path.open("rb") as file:
        if size <= WHOLE_BYTES:
            while part := file.read(PART_BYTES):
                yield part
            return
        for number in range(NUM_PARTS):
            file.seek(number * (size - PART_BYTES) // (NUM_PARTS - 1))
            yield file.read(PART_BYTES)


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
