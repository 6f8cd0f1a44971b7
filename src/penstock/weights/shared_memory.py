"""Weights in files that servers map: written once per version, verified by every receiver, never copied in between.

A file exists under its name only when complete (temporary name, then rename) and belongs to its owner alone (0600).
The fingerprint covers names, shapes, dtypes and bytes; a receiver computes it over what it
mapped.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from penstock.types import WeightsHandle

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and dtype by parameter name."""

KEPT_VERSIONS = 3
"""The newest, the one waiting for the servers, and the one they are mapping."""


class WeightsMismatch(ValueError):
    """Weights are not what the handle or the model says; the message names the first difference."""


def publish(named: Mapping[str, Tensor], *, directory: Path, policy_version: int) -> WeightsHandle:
    """Write `named` to a folder of its own in `directory`, where engines that read model directories find it too, and
    return what others need to map it."""
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
    """Where `publish` writes."""
    return directory / str(policy_version) / "model.safetensors"


def receive(handle: WeightsHandle, expected: Layout) -> dict[str, Tensor]:
    """Map the file of `handle`, or those of a model directory: tensors that share their pages, but for those that a
    directory holds in another dtype. Raises `WeightsMismatch` if anything differs.

    The mapping stays valid after the file is unlinked. Writing to the tensors does not change the file.
    """
    path = Path(handle.path)
    files = _files(path)
    if (num_bytes := sum(file.stat().st_size for file in files)) != handle.num_bytes:
        raise WeightsMismatch(f"{path} has {num_bytes} bytes, expected {handle.num_bytes}")
    named = _map(files, expected if path.is_dir() else {})
    _compare(named, expected)
    if (found := fingerprint(named)) != handle.fingerprint:
        raise WeightsMismatch(f"{path} has fingerprint {found}, expected {handle.fingerprint}: its bytes changed")
    return named


def describe(directory: Path, expected: Layout, *, policy_version: int) -> WeightsHandle:
    """The handle of a model directory that somebody else wrote. Raises `WeightsMismatch` if it is not this model's."""
    files = _files(directory)
    named = _map(files, expected)
    _compare(named, expected)
    return WeightsHandle(
        policy_version=policy_version,
        path=str(directory),
        num_bytes=sum(file.stat().st_size for file in files),
        fingerprint=fingerprint(named),
    )


def layout(named: Mapping[str, Tensor]) -> Layout:
    """What `receive` compares with, from a model's own parameters."""
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in named.items()}


def fingerprint(named: Mapping[str, Tensor]) -> str:
    """Checksum over names, shapes, dtypes and bytes, independent of order and file format."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(named):
        tensor = named[name].detach().cpu().contiguous()
        checksum = zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy().data)
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {checksum}\n".encode())
    return digest.hexdigest()


def _files(path: Path) -> list[Path]:
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path] if path.is_file() else []
    if not files:
        raise WeightsMismatch(f"weights file {path} does not exist" if not path.is_dir() else f"{path} has no weights")
    return files


def _map(files: Sequence[Path], wanted: Layout) -> dict[str, Tensor]:
    """By name; if it is known what is `wanted`, only that, and in its dtype."""
    named: dict[str, Tensor] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                named |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        except SafetensorError as error:
            raise WeightsMismatch(f"{path} is not a safetensors file: {error}") from None
    if not wanted:
        return named
    # A directory may hold tied weights under each of their names.
    return {name: tensor.to(wanted[name][1]) for name, tensor in named.items() if name in wanted}


def _compare(named: Mapping[str, Tensor], expected: Layout) -> None:
    for name in sorted(named.keys() | expected.keys()):
        if name not in named:
            raise WeightsMismatch(f"parameter {name} is missing from the weights")
        if name not in expected:
            raise WeightsMismatch(f"parameter {name} is unknown to the model")
        shape, dtype = expected[name]
        if tuple(named[name].shape) != shape:
            raise WeightsMismatch(f"parameter {name} has shape {tuple(named[name].shape)}, expected {shape}")
        if named[name].dtype != dtype:
            raise WeightsMismatch(f"parameter {name} has dtype {named[name].dtype}, expected {dtype}")


class WeightsPublisher:
    """Publishes version after version; older ones than the last three are removed, and all of them on `close`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        left = (path for path in directory.glob("*/") if path.name.isdecimal())
        self._folders = sorted(left, key=lambda path: int(path.name))
        """Those of a publisher that died are among them."""

    def publish(self, named: Mapping[str, Tensor], policy_version: int) -> WeightsHandle:
        """Write one version."""
        handle = publish(named, directory=self._directory, policy_version=policy_version)
        written = Path(handle.path).parent
        self._folders = [folder for folder in self._folders if folder != written] + [written]
        while len(self._folders) > KEPT_VERSIONS:
            shutil.rmtree(self._folders.pop(0), ignore_errors=True)
        return handle

    def close(self) -> None:
        """Remove what is left."""
        while self._folders:
            shutil.rmtree(self._folders.pop(), ignore_errors=True)
