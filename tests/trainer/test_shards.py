"""States in files of several ranks."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.trainer.shards import ROWS, Saved, joined, own_part, read_state, write_state


@given(data=st.data(), num_rows=st.integers(0, 9), num_shards=st.integers(1, 4))
def test_rows_are_those_of_the_whole(data: st.DataObject, num_rows: int, num_shards: int) -> None:
    whole = torch.arange(num_rows * 2.0).view(num_rows, 2)
    chunks = whole.chunk(num_shards)
    saved = Saved([*chunks, *[whole[:0]] * (num_shards - len(chunks))])
    start = data.draw(st.integers(0, num_rows + 2))
    stop = data.draw(st.integers(start, num_rows + 4))
    assert saved.shape == (num_rows, 2)
    assert torch.equal(saved.whole(), whole)
    assert torch.equal(saved.rows(start, stop), whole[start:stop])


def test_only_own_rows_are_copied() -> None:
    saved = Saved([torch.zeros(50, 3), torch.ones(50, 3)])
    mine = saved.rows(25, 50)
    assert mine.untyped_storage().nbytes() == 25 * 3 * 4


def test_shards_are_joined_in_a_file(tmp_path: Path) -> None:
    """Whatever the dtypes and shapes: empty parts, numbers alone, sizes that fit no boundary."""
    wide, tall = torch.randn(3, 5), torch.randn(4, 1).to(torch.bfloat16)
    plain = {"scale": torch.tensor(2.5), "short": torch.randn(7)}
    for shard, (rows, more) in enumerate([(wide[:2], tall), (wide[2:], tall[:0])]):
        state = {"weights": {"wide": {ROWS: rows}, "tall": {ROWS: more}, **plain}}
        write_state(state, tmp_path, "state", shard=shard, num_shards=2)
    file = tmp_path / "joined"
    found = joined(read_state(tmp_path, "state")["weights"], file)
    assert file.stat().st_size >= sum(tensor.nbytes for tensor in found.values())
    for name, expected in {"wide": wide, "tall": tall, **plain}.items():
        assert torch.equal(found[name], expected) and found[name].dtype == expected.dtype


@contextmanager
def files_of_at_most(num_bytes: int) -> Iterator[None]:
    """Let no file become larger, as on a disk that is full then."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_a_disk_without_room_is_named_by_every_writer(tmp_path: Path) -> None:
    """Torch itself would name a position in its file, or end the process by a signal."""
    weights = {"large": torch.ones(1 << 20)}
    with files_of_at_most(1 << 21):
        with pytest.raises(OSError, match="File too large"):
            write_state({"weights": weights}, tmp_path, "state", shard=0, num_shards=1)
        with pytest.raises(OSError, match="File too large"):
            joined(weights, tmp_path / "joined")


def test_what_is_to_be_saved_stays_where_it_was_when_its_module_moves() -> None:
    module = torch.nn.Linear(2, 2)
    before = module.weight.detach().clone()
    own = own_part({"weights": dict(module.named_parameters())})
    module._apply(lambda tensor: tensor + 1)
    assert torch.equal(own["weights"]["weight"], before)
