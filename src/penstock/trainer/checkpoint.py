"""Checkpoints that are either complete or recognisably torn. This module does not import torch itself.

A checkpoint is a directory `step_<n>` that is also a Hugging Face model directory. It is written under a temporary
name, synced, and then renamed. Its manifest, with a checksum of every file, is written last. A reader accepts only
files that match the manifest. Large files are progress in parts (`ticks`).
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import xxhash

from penstock.model.files import ModelError, copy_companions, read_json_if_present
from penstock.ports.training import SavedState, SavedStates
from penstock.ticks import tick
from penstock.types import MAX_VERSION, NO_VERSION

MANIFEST = "manifest.json"
STATE = "state.json"
REPLACED = ".replaced_"
TORN = "torn_"
HASHES: Mapping[str, Callable[[], Any]] = {
    "xxh3_128": xxhash.xxh3_128,
    "blake2b": partial(hashlib.blake2b, digest_size=16),
}
"""Checksums by the manifest's `hash`. New ones are the first, which takes a twelfth of the time of the second."""
PART_BYTES = 1 << 24
"""Bytes that are read at once."""


def stored_version(model_dir: Path) -> int:
    """Return the policy_version of the weights in a directory: that of a checkpoint, else 0. Raises `ModelError`."""
    version = read_json_if_present(model_dir, STATE).get("policy_version", 0)
    if type(version) is not int or not NO_VERSION <= version <= MAX_VERSION:
        raise ModelError(f"{model_dir / STATE}: policy_version is {str(version)[:99]!r}, expected a whole number")
    return version


class Unfinished:
    """A checkpoint that is being written. The owner writes weights and optimizer as files into its `path`. One process
    writes one checkpoint of a run at a time."""

    def __init__(self, directory: Path, step: int, *, policy_version: int, extra: Mapping[str, Any]) -> None:
        """`directory/step_<step>` is its place when it is complete. `extra`: the caller's own state."""
        self._directory, self._step = directory, step
        self._state = {"step": step, "policy_version": policy_version, "extra": dict(extra)}
        self.path = directory / f".step_{step}.{os.getpid()}"
        _clear_leftovers(directory)
        self.path.mkdir(parents=True)

    def discard(self) -> None:
        """Remove what was written."""
        shutil.rmtree(self.path, ignore_errors=True)

    def complete(self, *, model_dir: Path, keep: int, best: int | None = None) -> Path:
        """Move the checkpoint to its place, and return this.

        Tokenizer files come from `model_dir`. Of the checkpoints up to this step the newest `keep` stay, and that of
        the step `best`; all others are removed.
        """
        target = self._directory / f"step_{self._step}"
        try:
            copy_companions(model_dir, self.path)
            (self.path / STATE).write_text(json.dumps(self._state), encoding="utf-8")
            _seal(self.path)
            if target.exists():  # the same step from before a rewind
                target.rename(self._directory / f"{REPLACED}{self._step}")
            self.path.rename(target)
        finally:
            _clear_leftovers(self._directory)
        _sync(self._directory)
        _prune(self._directory, self._step, keep, best)
        return target


def latest(directory: Path) -> SavedStates:
    """Find the newest complete checkpoint, and the reasons why newer ones are torn.

    Torn checkpoints are renamed if there is a complete one, so that a person can inspect them and no code reads them.
    """
    _put_back(directory)
    torn: dict[Path, str] = {}
    for _, path in _by_step(directory):
        found = verify(path)
        if isinstance(found, SavedState):
            return SavedStates(newest=found, torn={str(_set_aside(path)): reason for path, reason in torn.items()})
        torn[path] = found
    return SavedStates(newest=None, torn={str(path): reason for path, reason in torn.items()})


def newest(directory: Path) -> SavedState | None:
    """Return the newest complete checkpoint, or None. For readers other than the trainer: no file is moved."""
    verified = (verify(path) for _, path in _by_step(directory))
    return next((found for found in verified if isinstance(found, SavedState)), None)


def verify(path: Path) -> SavedState | str:
    """Check every file of a checkpoint against the manifest. Return the checkpoint, or the reason why it is torn."""
    if not (path / MANIFEST).is_file():
        return f"no {MANIFEST}: it was never finished"
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        make = HASHES[manifest.get("hash", "blake2b")]
        for name, checksum in manifest["files"].items():
            if not (path / name).is_file():
                return f"{name} is missing"
            if _checksum(path / name, make) != checksum:
                return f"{name} does not match its checksum"
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        return SavedState(
            directory=str(path), step=state["step"], policy_version=state["policy_version"], state=dict(state["extra"])
        )
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        return f"unreadable: {type(error).__name__}: {error}"


def _seal(directory: Path) -> None:
    """Sync every file, then write and sync the manifest."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    for path in files:
        _sync(path)
    name, make = next(iter(HASHES.items()))
    checksums = {str(path.relative_to(directory)): _checksum(path, make) for path in files}
    (directory / MANIFEST).write_text(json.dumps({"hash": name, "files": checksums}, indent=1), encoding="utf-8")
    _sync(directory / MANIFEST)
    for folder in (*(path for path in directory.rglob("*") if path.is_dir()), directory):
        _sync(folder)


def _prune(directory: Path, step: int, keep: int, best: int | None) -> None:
    """Remove old checkpoints but that of the step `best`, and checkpoints after `step`, which a rewind has made
    invalid."""
    checkpoints = _by_step(directory)
    kept = [path for number, path in checkpoints if number <= step][:keep]
    kept += [path for number, path in checkpoints if number == best]
    for _, path in checkpoints:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _set_aside(path: Path) -> Path:
    aside = path.with_name(f"{TORN}{path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


def _put_back(directory: Path) -> None:
    """Restore a checkpoint that an interrupted save had moved aside and not replaced."""
    for replaced in directory.glob(f"{REPLACED}*"):
        target = directory / f"step_{replaced.name.removeprefix(REPLACED)}"
        if not target.exists():
            replaced.rename(target)


def _clear_leftovers(directory: Path) -> None:
    """Remove the leftovers of an interrupted save."""
    _put_back(directory)
    for pattern in (f"{REPLACED}*", ".step_*"):
        for leftover in directory.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


def _by_step(directory: Path) -> list[tuple[int, Path]]:
    """Return (step, path) of all checkpoints, complete or torn, newest first."""
    found = [(path.name.removeprefix("step_"), path) for path in directory.glob("step_*")]
    return sorted(((int(step), path) for step, path in found if step.isdecimal()), reverse=True)


def _checksum(path: Path, make: Callable[[], Any]) -> str:
    digest, part = make(), memoryview(bytearray(PART_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(part):
            digest.update(part[:size])
            tick()
    return str(digest.hexdigest())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
