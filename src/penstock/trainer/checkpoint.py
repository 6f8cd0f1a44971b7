"""Checkpoints: complete or recognisably torn, never half believed. Does not import torch itself.

A checkpoint is a directory `step_<n>` that is also a Hugging Face model directory. It is written under another name,
synced, and renamed; its manifest, with a checksum of every file, is written last. A reader believes only what the
manifest confirms.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from penstock.model.files import copy_companions
from penstock.ports import SavedState, SavedStates

MANIFEST = "manifest.json"
STATE = "state.json"
REPLACED = ".replaced_"
TORN = "torn_"


class Stateful(Protocol):
    """What is saved; `penstock.trainer.learner.Learner` is one."""

    @property
    def policy_version(self) -> int: ...

    def write(self, directory: Path) -> None:
        """Write weights and optimizer as files into `directory`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose files all match its manifest."""

    path: Path
    step: int
    policy_version: int
    extra: Mapping[str, Any]
    """The caller's own state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Torn:
    """A checkpoint that cannot be trusted."""

    path: Path
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Latest:
    """The newest whole checkpoint, if any, and the newer ones that were passed over."""

    checkpoint: Checkpoint | None
    skipped: tuple[Torn, ...]


def save(
    directory: Path, step: int, learner: Stateful, extra: Mapping[str, Any], *, model_dir: Path, keep: int
) -> Path:
    """Write `directory/step_<step>`, and keep the newest `keep` up to it. Tokenizer files come from `model_dir`."""
    target, unfinished = directory / f"step_{step}", directory / f".step_{step}.{os.getpid()}"
    _clear_leftovers(directory)
    unfinished.mkdir(parents=True)
    try:
        learner.write(unfinished)
        copy_companions(model_dir, unfinished)
        state = {"step": step, "policy_version": learner.policy_version, "extra": dict(extra)}
        (unfinished / STATE).write_text(json.dumps(state), encoding="utf-8")
        _seal(unfinished)
        if target.exists():  # the same step of a lineage that was rewound
            target.rename(directory / f"{REPLACED}{step}")
        unfinished.rename(target)
    finally:
        _clear_leftovers(directory)
    _sync(directory)
    _prune(directory, step, keep)
    return target


def latest(directory: Path) -> Latest:
    """The newest checkpoint that is whole, and why newer ones were not; these are set aside, unless there is nothing
    else."""
    _put_back(directory)
    skipped: list[Torn] = []
    for _, path in _by_step(directory):
        found = verify(path)
        if isinstance(found, Checkpoint):
            return Latest(checkpoint=found, skipped=tuple(_set_aside(torn) for torn in skipped))
        skipped.append(found)
    return Latest(checkpoint=None, skipped=tuple(skipped))


def newest(directory: Path) -> Checkpoint | None:
    """The newest checkpoint that is whole, for somebody else's use: nothing is moved."""
    found = (verify(path) for _, path in _by_step(directory))
    return next((each for each in found if isinstance(each, Checkpoint)), None)


def saved_in(directory: Path) -> SavedStates:
    """The checkpoints that a trainer may go back to."""
    found = latest(directory)
    newest = found.checkpoint
    return SavedStates(
        newest=SavedState(
            directory=str(newest.path),
            step=newest.step,
            policy_version=newest.policy_version,
            state=dict(newest.extra),
        )
        if newest is not None
        else None,
        torn={str(torn.path): torn.reason for torn in found.skipped},
    )


def verify(path: Path) -> Checkpoint | Torn:
    """Check every file against the manifest."""
    if not (path / MANIFEST).is_file():
        return Torn(path=path, reason=f"no {MANIFEST}: it was never finished")
    try:
        files = json.loads((path / MANIFEST).read_text(encoding="utf-8"))["files"]
        for name, checksum in files.items():
            if not (path / name).is_file():
                return Torn(path=path, reason=f"{name} is missing")
            if _checksum(path / name) != checksum:
                return Torn(path=path, reason=f"{name} does not match its checksum")
        state = json.loads((path / STATE).read_text(encoding="utf-8"))
        return Checkpoint(path=path, step=state["step"], policy_version=state["policy_version"], extra=state["extra"])
    except (ValueError, KeyError, TypeError, AttributeError, OSError) as error:
        return Torn(path=path, reason=f"unreadable: {type(error).__name__}: {error}")


def _seal(directory: Path) -> None:
    """Sync every file, then write and sync the manifest."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    for path in files:
        _sync(path)
    checksums = {str(path.relative_to(directory)): _checksum(path) for path in files}
    (directory / MANIFEST).write_text(json.dumps({"files": checksums}, indent=1), encoding="utf-8")
    _sync(directory / MANIFEST)
    _sync(directory)


def _prune(directory: Path, step: int, keep: int) -> None:
    """Remove old checkpoints, and those beyond `step`: they belong to a future that was given up."""
    checkpoints = _by_step(directory)
    kept = [path for number, path in checkpoints if number <= step][:keep]
    for _, path in checkpoints:
        if path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _set_aside(torn: Torn) -> Torn:
    """For people to look at; nobody else does."""
    aside = torn.path.with_name(f"{TORN}{torn.path.name}")
    shutil.rmtree(aside, ignore_errors=True)
    torn.path.rename(aside)
    return Torn(path=aside, reason=torn.reason)


def _put_back(directory: Path) -> None:
    """A checkpoint that was moved aside, and not replaced because the save was cut short, returns."""
    for replaced in directory.glob(f"{REPLACED}*"):
        target = directory / f"step_{replaced.name.removeprefix(REPLACED)}"
        if not target.exists():
            replaced.rename(target)


def _clear_leftovers(directory: Path) -> None:
    """Remove what a save that was cut short left behind."""
    _put_back(directory)
    for pattern in (f"{REPLACED}*", ".step_*"):
        for leftover in directory.glob(pattern):
            shutil.rmtree(leftover, ignore_errors=True)


def _by_step(directory: Path) -> list[tuple[int, Path]]:
    """Finished or torn checkpoints, newest first."""
    found = [(path.name.removeprefix("step_"), path) for path in directory.glob("step_*")]
    return sorted(((int(step), path) for step, path in found if step.isdecimal()), reverse=True)


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
