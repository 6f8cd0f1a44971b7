"""Weights are written by several ranks, while servers still have the version before."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from published import publish, publish_next
from safetensors.torch import load_file
from torch import Tensor

from penstock.deadline import Stalled
from penstock.weights import publication, shared_memory
from penstock.weights.publication import (
    KEPT_VERSIONS,
    NotPublished,
    Publication,
    WeightsPublisher,
    await_handle,
    handle_in,
)
from penstock.weights.shared_memory import WeightsMismatch, fingerprint, layout, receive, take_over

DTYPES = st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16])
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@st.composite
def weights(draw: st.DrawFn) -> dict[str, Tensor]:
    shapes = draw(st.dictionaries(st.text("abc.é", min_size=1, max_size=5), st.tuples(SHAPES, DTYPES), min_size=1))
    return {name: torch.randn(shape).to(dtype) for name, (shape, dtype) in shapes.items()}


@settings(max_examples=50, deadline=None)
@given(named=weights(), num_shards=st.integers(1, 4), piece=st.sampled_from([8, 24, 2**20]), seed=st.integers(0, 9))
def test_what_any_ranks_write_is_received(named: dict[str, Tensor], num_shards: int, piece: int, seed: int) -> None:
    """Ranks hold runs of rows, as shards do, and write them in any order."""
    order = torch.randperm(num_shards, generator=torch.Generator().manual_seed(seed)).tolist()
    with TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patched:
        patched.setattr(publication, "PIECE_BYTES", piece)
        folder = WeightsPublisher(Path(directory)).open(layout(named), 3).folder
        for shard in order:
            with Publication(folder, layout(named)) as opened:
                for name, tensor in named.items():
                    opened.write(name, *rows_of(tensor, shard, num_shards))
                opened.written(shard)
        with Publication(folder, layout(named)) as opened:
            handle = opened.finish(3, num_shards)
        assert handle is not None and handle == handle_in(folder)
        found = receive(handle, layout(named))
        assert all(torch.equal(found[name], tensor) for name, tensor in named.items())
        assert handle.fingerprint == fingerprint(named)


def rows_of(tensor: Tensor, shard: int, num_shards: int) -> tuple[Tensor, int]:
    if not tensor.dim():
        return (tensor, 0) if shard == 0 else (tensor[None][:0], 0)
    size = -(-len(tensor) // num_shards)
    return tensor[shard * size : (shard + 1) * size], shard * size


def test_weights_are_converted_to_the_dtype_of_the_servers(tmp_path: Path) -> None:
    weight = torch.randn(7, 5)
    form = {"w": ((5, 7), torch.bfloat16)}
    with WeightsPublisher(tmp_path).open(form, 1) as opened:
        handle = opened.write_whole([("w", weight.T)], 1)
    assert torch.equal(receive(handle, form)["w"], weight.T.bfloat16())


def test_a_file_that_nobody_maps_is_written_over(tmp_path: Path) -> None:
    """The system gives no new memory for it. Only the newest versions can be received."""
    publisher, numbers = WeightsPublisher(tmp_path, recycles=True), set[int]()
    for version in range(3 * KEPT_VERSIONS):
        handle = publish_next(publisher, {"w": torch.full((1000,), float(version))}, version)
        numbers.add(Path(handle.path).stat().st_ino)
        received = receive(handle, layout({"w": torch.empty(1000)}))["w"]
        assert received.eq(version).all()
        del received
    assert len(numbers) == KEPT_VERSIONS and len(list(tmp_path.iterdir())) == KEPT_VERSIONS


def test_a_file_that_is_mapped_is_never_written_over(tmp_path: Path) -> None:
    publisher, form = (
        WeightsPublisher(tmp_path, recycles=True),
        layout({"w": torch.empty(1000), "v": torch.empty(3, 0)}),
    )
    held: list[Tensor] = []
    for version in range(3 * KEPT_VERSIONS):
        named = {"w": torch.full((1000,), float(version)), "v": torch.empty(3, 0)}
        held.append(receive(publish_next(publisher, named, version), form)["w"][version:])
    assert all(tensor.eq(version).all() for version, tensor in enumerate(held))


def test_what_others_map_without_a_lock_stays_as_it_was(tmp_path: Path) -> None:
    """Other engines map files, and keep adapters mapped while they serve."""
    publisher, held = WeightsPublisher(tmp_path), list[Tensor]()
    for version in range(3 * KEPT_VERSIONS):
        handle = publish_next(publisher, {"w": torch.full((1000,), float(version))}, version)
        held.append(load_file(handle.path)["w"])
    assert all(tensor.eq(version).all() for version, tensor in enumerate(held))


def test_a_file_of_another_size_is_not_written_over(tmp_path: Path) -> None:
    publisher = WeightsPublisher(tmp_path, recycles=True)
    for version in range(2 * KEPT_VERSIONS):
        named = {"w": torch.full((100 + version,), float(version))}
        handle = publish_next(publisher, named, version)
        assert torch.equal(receive(handle, layout(named))["w"], named["w"])


def test_a_receiver_that_comes_as_a_file_is_taken_finds_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has opened the file, and has not locked it yet, or finds it locked."""
    named = {"w": torch.ones(10)}
    handle = publish(named, directory=tmp_path, policy_version=1)
    path, lock = Path(handle.path), fcntl.flock

    def late(fd: int, how: int) -> None:
        monkeypatch.setattr(shared_memory.fcntl, "flock", lock)
        assert take_over(path, tmp_path / "taken", num_bytes=handle.num_bytes)
        lock(fd, how)

    with path.open("rb") as locked:
        lock(locked, fcntl.LOCK_EX)
        with pytest.raises(WeightsMismatch, match="does not exist"):
            receive(handle, layout(named))
    monkeypatch.setattr(shared_memory.fcntl, "flock", late)
    with pytest.raises(WeightsMismatch, match="does not exist"):
        receive(handle, layout(named))


def test_servers_find_nothing_before_all_ranks_have_written(tmp_path: Path) -> None:
    named = {"w": torch.arange(4.0)}
    opened = WeightsPublisher(tmp_path).open(layout(named), 1)
    assert stat.S_IMODE((opened.folder / publication.UNFINISHED).stat().st_mode) == 0o600
    done: list[object] = []
    first = threading.Thread(target=lambda: done.append(written(opened.folder, named, 0, finish=True)))
    first.start()
    first.join(0.2)
    assert first.is_alive() and handle_in(opened.folder) is None
    assert not list(opened.folder.glob("*.safetensors"))
    written(opened.folder, named, 1)
    handle = await_handle(opened.folder, waiter="the test")
    first.join(60)
    assert done == [handle] and torch.equal(receive(handle, layout(named))["w"], named["w"])


def written(folder: Path, named: Mapping[str, Tensor], shard: int, *, finish: bool = False) -> object:
    with Publication(folder, layout(named)) as opened:
        for name, tensor in named.items():
            opened.write(name, *rows_of(tensor, shard, 2))
        opened.written(shard)
        return opened.finish(1, 2) if finish else None


def test_a_version_that_is_published_again_can_be_mapped_meanwhile(tmp_path: Path) -> None:
    named = {"w": torch.ones(3)}
    handle = publish(named, directory=tmp_path, policy_version=1)
    again = WeightsPublisher(tmp_path).open(layout(named), 1)
    assert handle_in(again.folder) is None
    assert torch.equal(receive(handle, layout(named))["w"], named["w"])
    with again:
        assert again.write_whole([("w", 2 * named["w"])], 1).fingerprint != handle.fingerprint


def test_a_rank_that_cannot_write_ends_the_publication_for_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named = {"w": torch.ones(4)}
    folder = WeightsPublisher(tmp_path).open(layout(named), 1).folder
    written(folder, named, 0)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched, pytest.raises(OSError, match="No space left"):
        patched.setattr(publication.os, "pwrite", full)
        written(folder, named, 1)
    with Publication(folder, layout(named)) as first:
        assert first.finish(1, 2) is None
    with pytest.raises(NotPublished, match=r"could not be written: OSError: .*No space left"):
        await_handle(folder, waiter="the test")


def test_a_rank_that_writes_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publication, "SILENCE_S", 0.01)
    named = {"w": torch.ones(4)}
    folder = WeightsPublisher(tmp_path).open(layout(named), 1).folder
    with pytest.raises(Stalled, match=r"rank 0 waited .*the trainer's ranks"):
        written(folder, named, 0, finish=True)
    with pytest.raises(NotPublished, match="Stalled"):
        await_handle(folder, waiter="the test")
