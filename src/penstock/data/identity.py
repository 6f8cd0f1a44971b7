"""What a dataset is, as one hash: of its name, split and options, and of what is in it.

A run writes it down, so that nobody resumes it on other data under the same name.
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
from penstock.types import Purpose

WHOLE_BYTES = 1 << 30
"""Larger files are known by their size and parts of them: a terabyte is not to be read before a run can begin."""
PART_BYTES, NUM_PARTS = 1 << 20, 1024
DIGEST_BYTES = 16

Identities = Mapping[str, Mapping[str, str]]
"""By purpose and tag: where the data come from, and their hash."""


def identities(config: Config) -> dict[str, dict[str, str]]:
    """Of everything that the run plays. Raises `ConfigError` if something cannot be read."""
    environments, known = config.environments, functools.cache(fingerprint)
    purposes: tuple[Purpose, ...] = ("train", "eval")
    return {
        f"{purpose} {tag}": {
            "source": _source(settings.data, purpose),
            "identity": identity(settings.data, purpose, known),
        }
        for purpose in purposes
        for tag, settings in environments.tagged(purpose).items()
    }


def check_identities(before: Identities, config: Config) -> None:
    """Raises `ConfigError` naming the first data that are not what they were."""
    for name, found in identities(config).items():
        known = before.get(name, found)
        if known["identity"] != found["identity"]:
            raise ConfigError(
                f"data ({name}): {found['source']} has changed since the run was begun ({known['identity'][:12]} then, "
                f"{found['identity'][:12]} now): put the old data back, or begin another run"
            )


def identity(data: DataConfig, purpose: Purpose, content: Callable[[Path], str]) -> str:
    """The hash of what `data` gives out for one purpose, `content` being that of a path."""
    facts: dict[str, Any] = {"source": data.source}
    if data.source == "reasoning_gym":
        facts |= {"dataset": data.dataset, "options": data.options, "version": _version("reasoning-gym")}
    elif data.has_rows:
        split = (data.eval_split if purpose == "eval" else None) or data.split
        facts |= {"split": split, "content": content(_path(data, purpose))}
    return hashlib.blake2b(json.dumps(facts, sort_keys=True).encode(), digest_size=DIGEST_BYTES).hexdigest()


def fingerprint(path: Path) -> str:
    """Of a file's bytes, or of all files in a directory with their names. Large files are sampled at even distances."""
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


def _path(data: DataConfig, purpose: Purpose) -> Path:
    return Path((data.eval_path if purpose == "eval" else None) or data.path or "")


def _source(data: DataConfig, purpose: Purpose) -> str:
    """For people."""
    if data.source == "reasoning_gym":
        return f"reasoning_gym {data.dataset}"
    return str(_path(data, purpose)) if data.has_rows else data.source


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
