"""Weights files that servers map: written once per version, verified by every receiver, never copied in between.

A file gets its final name only when it is complete (temporary name, then rename). Only its owner can read it (0600).
The fingerprint covers names, shapes, dtypes and bytes. A receiver computes it over the mapped tensors.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from xxhash import xxh3_64_intdigest

from penstock.types import WeightsHandle

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype by parameter name."""

KEPT_VERSIONS = 3
"""The newest version, the version that waits for the servers, and the version that the servers are mapping."""


class WeightsMismatch(ValueError):
    """Weights differ from the handle or the model. The message names the first difference."""


def publish(named: Mapping[str, Tensor], *, directory: Path, policy_version: int) -> WeightsHandle:
    """Write `named` to a new folder in `directory`, and return the handle with which other processes map it.

    Engines that read model directories can read the folder too.
    """
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = published_file(directory, policy_version)
    path.parent.mkdir(exist_ok=True, mode=0o700)
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in named.items()}
    unfinished = path.with_suffix(".unfinished")
    os.close(os.open(unfinished, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600))
    try:
        save_file(host, unfinished)
        unfinished.rename(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return WeightsHandle(
        policy_version=policy_version, path=str(path), num_bytes=path.stat().st_size, fingerprint=fingerprint(host)
    )


def published_file(directory: Path, policy_version: int) -> Path:
    """Return the path that `publish` writes."""
    return directory / str(policy_version) / "model.safetensors"


def receive(handle: WeightsHandle, expected: Layout) -> dict[str, Tensor]:
    """Map the file or model directory of `handle`. Raises `WeightsMismatch` if anything differs.

    The tensors share the files' memory pages, except tensors that a directory holds in another dtype. The mapping stays
    valid after the file is unlinked. Writing to the tensors does not change the file.
    """
    path = Path(handle.path)
    if (num_bytes := _num_bytes(path)) != handle.num_bytes:
        raise WeightsMismatch(f"{path} has {num_bytes} bytes, expected {handle.num_bytes}")
    named = _map(path, expected)
    if (found := fingerprint(named)) != handle.fingerprint:
        raise WeightsMismatch(f"{path} has fingerprint {found}, expected {handle.fingerprint}: its bytes changed")
    return named


def describe(directory: Path, expected: Layout, *, policy_version: int) -> WeightsHandle:
    """Return a handle for a model directory that another program wrote.

    Raises `WeightsMismatch` if it does not fit this model.
    """
    num_bytes, named = _num_bytes(directory), _map(directory, expected)
    return WeightsHandle(
        policy_version=policy_version, path=str(directory), num_bytes=num_bytes, fingerprint=fingerprint(named)
    )


def layout(named: Mapping[str, Tensor]) -> Layout:
    """Return the layout of a model's parameters, for the comparison in `receive`."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in named.items()}


def fingerprint(named: Mapping[str, Tensor]) -> str:
    """Return a checksum over names, shapes, dtypes and bytes, independent of order and file format."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(named):
        tensor = named[name].detach().cpu().contiguous()
        checksum = xxh3_64_intdigest(tensor.reshape(-1).view(torch.uint8).numpy().data)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {checksum}\n".encode())
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        raise WeightsMismatch(f"weights file {path} does not exist" if not path.is_dir() else f"{path} has no weights")
    return files


def _num_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in _files(path))


def _map(path: Path, expected: Layout) -> dict[str, Tensor]:
    """Map the tensors by name. A directory may hold them in other dtypes, and more tensors than the model has."""
    named: dict[str, Tensor] = {}
    for file in _files(path):
        try:
            with safe_open(file, framework="pt") as tensors:
                named |= {name: tensors.get_tensor(name) for name in tensors.keys()}  # noqa: SIM118 - not a mapping
        except SafetensorError as error:
            raise WeightsMismatch(f"{file} is not a safetensors file: {error}") from None
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


class WeightsPublisher:
    """A publisher of successive versions. It keeps the newest three versions."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        left = (path for path in directory.glob("*/") if path.name.isdecimal())
        self._folders = sorted(left, key=lambda path: int(path.name))
        """Published folders, oldest first, including the folders of an earlier publisher that died."""

    def publish(self, named: Mapping[str, Tensor], policy_version: int) -> WeightsHandle:
        """Write one version, remove the oldest ones, and return the handle."""
        handle = publish(named, directory=self._directory, policy_version=policy_version)
        written = Path(handle.path).parent
        self._folders = [folder for folder in self._folders if folder != written] + [written]
        while len(self._folders) > KEPT_VERSIONS:
            shutil.rmtree(self._folders.pop(0), ignore_errors=True)
        return handle
