"""A state that lies on the ranks, to files and back.

Tensors and plain values only, so that it loads with `weights_only`. Rank 0 writes `<name>.pt`; of what is sharded that
has rank 0's rows, and those of rank i are in `<name>_<i>.pt`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from penstock.config import ConfigError
from penstock.trainer.shards import from_files, to_file
from penstock.trainer.strategy import Strategy

PROBE_BYTES = 1 << 20
"""Written to learn from the system why torch could not write."""


def write_state(state: Mapping[str, Any], directory: Path, name: str, strategy: Strategy) -> None:
    """All ranks must, to a directory that they share. Raises OSError where there is no room."""
    ranks = strategy.ranks
    if ranks.is_first or strategy.is_sharded:
        num_files = ranks.size if strategy.is_sharded else 1
        _save(to_file({**state, "num_files": num_files}), directory / _file_of(name, ranks.index))


def read_state(directory: Path, name: str) -> dict[str, Any]:
    """What `write_state` wrote, whole, with however many ranks that was. Raises `ConfigError` if nobody did."""
    if not (directory / _file_of(name, 0)).exists():
        raise ConfigError(f"{directory} has no state of a {name}: it is no checkpoint, or of a trainer without one")
    files = [_load(directory / _file_of(name, 0))]
    files += [_load(directory / _file_of(name, rank)) for rank in range(1, files[0]["num_files"])]
    state: dict[str, Any] = from_files(files)
    return state


def _file_of(name: str, rank: int) -> str:
    return f"{name}_{rank}.pt" if rank else f"{name}.pt"


def _save(state: Mapping[str, Any], file: Path) -> None:
    try:
        torch.save(state, file)
    except RuntimeError:
        file.write_bytes(bytes(PROBE_BYTES))  # torch does not say that the disk is full; the system does
        raise


def _load(file: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    return loaded
