"""Weights files that servers map: written once per version (`publication.py`), verified by every receiver, never copied
in between.

The fingerprint covers names, shapes, dtypes and bytes. A receiver computes it over the mapped tensors.

For our own servers the trainer writes a version over the file of a version that it does not keep, because new memory
takes the system several times as long as the writing. A mapping of ours holds a shared lock on its file, so a file that
is mapped is not written over. Other engines take no lock, and for them each version gets a new file.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import mmap
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from xxhash import xxh3_64_intdigest

from penstock.ticks import tick
from penstock.types import AdaptersForm, WeightsHandle

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype by parameter name."""

DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
"""Names of dtypes in the header of a safetensors file."""
TORCH_DTYPES = {name: dtype for dtype, name in DTYPES.items()}
HASHING_THREADS = min(os.cpu_count() or 1, 8)
"""Threads that compute a fingerprint, each of one tensor at a time."""


class WeightsMismatch(ValueError):
    """Weights differ from the handle or the model. The message names the first difference."""


class Placed(NamedTuple):
    """One tensor of a file, and where its bytes are."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def tensors_in(path: Path) -> list[Placed]:
    """Return the tensors of a safetensors file, in the order of their bytes. Raises `WeightsMismatch` for a dtype that
    no weights have."""
    with path.open("rb") as file:
        num_bytes = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(num_bytes))
    found = []
    header.pop("__metadata__", None)
    for name, entry in header.items():
        if (dtype := TORCH_DTYPES.get(entry["dtype"])) is None:
            raise WeightsMismatch(f"parameter {name} of {path} has dtype {entry['dtype']}")
        start, end = (8 + num_bytes + offset for offset in entry["data_offsets"])
        found.append(Placed(name, dtype, tuple(entry["shape"]), start, end))
    return sorted(found, key=lambda each: (each.start, each.end))


def map_file(path: Path) -> Tensor:
    """Map a file, [bytes], uint8. Changes of the tensor stay in this process.

    The file is not written over as long as the tensor or a part of it lives. Raises `WeightsMismatch` if it is being
    written over already, and OSError if it cannot be mapped.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            is_taken = not _names(path, fd)
        except BlockingIOError:
            is_taken = True
        except OSError:  # where files cannot be locked, none is written over
            is_taken = False
        if is_taken:
            raise WeightsMismatch(f"weights file {path} does not exist")
        memory = mmap.mmap(fd, 0, access=mmap.ACCESS_COPY)  # it duplicates `fd`, and so holds the lock
    finally:
        os.close(fd)
    return torch.frombuffer(memory, dtype=torch.uint8)


def take_over(path: Path, target: Path, *, num_bytes: int) -> bool:
    """Give a file of `num_bytes` that is mapped nowhere the name `target`, to be written over. Return whether that was
    possible.

    A receiver that opens it meanwhile looks at the name after it has locked it (`map_file`).
    """
    try:
        fd = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        stat = os.fstat(fd)
        if stat.st_size != num_bytes or stat.st_nlink != 1:
            return False
        path.rename(target)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _names(path: Path, fd: int) -> bool:
    """Return whether a path names an open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(fd))
    except FileNotFoundError:
        return False


def file_in(folder: Path, *, adapters: bool = False) -> Path:
    """Return the path of the published file in the folder of a version. `adapters`: it has adapters, under the name
    that peft gives their file."""
    return folder / ("adapter_model.safetensors" if adapters else "model.safetensors")


def receive(handle: WeightsHandle, expected: Layout | None) -> dict[str, Tensor]:
    """Map the file or model directory of `handle`. Raises `WeightsMismatch` if anything differs.

    `expected`: the layout of the model; None if this process does not know the model.
    The tensors share the files' memory pages, except tensors that a directory holds in another dtype. The mapping stays
    valid after the file is unlinked. Writing to the tensors does not change the file.
    """
    path = Path(handle.path)
    if (num_bytes := _num_bytes(path)) != handle.num_bytes:
        raise WeightsMismatch(f"{path} has {num_bytes} bytes, expected {handle.num_bytes}")
    named = mapped(path, expected)
    if (found := fingerprint(named, handle.adapters)) != handle.fingerprint:
        message = f"{path} has fingerprint {found}, expected {handle.fingerprint}: its bytes changed"
        if handle.adapters is not None:
            message += f", or its adapters do not belong to base {_base_of(handle.adapters)}"
        raise WeightsMismatch(message)
    return named


def describe(directory: Path, expected: Layout, *, policy_version: int) -> WeightsHandle:
    """Return a handle for a model directory that another program wrote.

    Raises `WeightsMismatch` if it does not fit this model.
    """
    num_bytes, named = _num_bytes(directory), mapped(directory, expected)
    return WeightsHandle(
        policy_version=policy_version, path=str(directory), num_bytes=num_bytes, fingerprint=fingerprint(named)
    )


def layout(named: Mapping[str, Tensor]) -> Layout:
    """Return the layout of a model's parameters, for the comparison in `receive`."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in named.items()}


def fingerprint(
    named: Mapping[str, Tensor], adapters: AdaptersForm | None = None, *, known: Mapping[str, int] | None = None
) -> str:
    """Return a checksum over names, shapes, dtypes and bytes, independent of order and file format. `adapters`: what
    the tensors are added to and how, if they are adapters. `known`: checksums (xxh3, 64 bits) of some of the tensors'
    bytes."""
    names, digest, checksums = sorted(named), hashlib.blake2b(digest_size=16), dict(known or {})
    if adapters is not None:
        digest.update(f"{_base_of(adapters)} {adapters.rank} {adapters.alpha}\n".encode())
    unknown = [name for name in names if name not in checksums]
    with ThreadPoolExecutor(HASHING_THREADS, "fingerprint") as threads:
        checksums |= zip(unknown, threads.map(_checksum, [named[name] for name in unknown]), strict=True)
    for name in names:
        digest.update(f"{name} {tuple(named[name].shape)} {named[name].dtype} {checksums[name]}\n".encode())
    return digest.hexdigest()


def _base_of(adapters: AdaptersForm) -> str:
    return "of the model's directory" if adapters.base is None else adapters.base.fingerprint


def _checksum(tensor: Tensor) -> int:
    tick()
    return xxh3_64_intdigest(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)


def _in_file(path: Path) -> dict[str, Tensor]:
    """Map the tensors of a file by name."""
    data, named = map_file(path), dict[str, Tensor]()
    for name, dtype, shape, start, end in tensors_in(path):
        part = data[start:end] if start % dtype.itemsize == 0 else data[start:end].clone()
        named[name] = part.view(dtype).reshape(shape)
    return named


def _files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        raise WeightsMismatch(f"weights file {path} does not exist" if not path.is_dir() else f"{path} has no weights")
    return files


def _num_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in _files(path))


def mapped(path: Path, expected: Layout | None) -> dict[str, Tensor]:
    """Map the tensors of a file or model directory by name. A directory may hold them in other dtypes, and more tensors
    than the model has. Raises `WeightsMismatch` if names, shapes or dtypes differ from those that are `expected`."""
    named: dict[str, Tensor] = {}
    for file in _files(path):
        try:
            with safe_open(file, framework="pt") as tensors:  # it checks the header
                if path.is_dir():
                    named |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - not a mapping
                else:
                    named = _in_file(file)
        except FileNotFoundError:
            raise WeightsMismatch(f"weights file {file} does not exist") from None
        except SafetensorError as error:
            raise WeightsMismatch(f"{file} is not a safetensors file: {error}") from None
    if expected is None:
        return named
    if path.is_dir():  # it may hold a tied weight under several names, of which `expected` has one
        named = {name: tensor.to(expected[name][1]) for name, tensor in named.items() if name in expected}
    if unknown := sorted(named.keys() - expected.keys()):
        raise WeightsMismatch(f"parameter {unknown[0]} is unknown to the model")
    for name, (shape, dtype) in sorted(expected.items()):
        if name not in named:
            raise WeightsMismatch(f"parameter {name} is missing from the weights")
        if tuple(named[name].shape) != shape:
            raise WeightsMismatch(f"parameter {name} has shape {tuple(named[name].shape)}, expected {shape}")
        if named[name].dtype != dtype:
            raise WeightsMismatch(f"parameter {name} has dtype {named[name].dtype}, expected {dtype}")
    return named
