"""The buckets in which a published file is sent: each byte once, in the order of the file."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from published import publish

from penstock.ports.training import WeightsNotSent
from penstock.weights.sender import Sender, in_buckets
from penstock.weights.shared_memory import Placed, tensors_in

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
ENTRIES = st.lists(st.tuples(st.sampled_from(DTYPES), st.integers(0, 40)), max_size=30)


def placed(entries: list[tuple[torch.dtype, int]], first_byte: int) -> list[Placed]:
    found, end = [], first_byte
    for number, (dtype, size) in enumerate(entries):
        start, end = end, end + size * dtype.itemsize
        found.append(Placed(f"weight-{number}", dtype, (size,), start, end))
    return found


@given(ENTRIES, st.integers(0, 100), st.integers(1, 400))
def test_buckets_are_runs_of_the_file(entries: list[tuple[torch.dtype, int]], first_byte: int, most_bytes: int) -> None:
    tensors = placed(entries, first_byte)
    buckets = in_buckets(tensors, most_bytes)
    assert [tensor for bucket in buckets for tensor in bucket] == tensors, "each tensor once, in order"
    assert in_buckets(tensors, most_bytes) == buckets
    for bucket in buckets:
        assert len({tensor.dtype for tensor in bucket}) == 1
        assert len(bucket) == 1 or bucket[-1].end - bucket[0].start <= most_bytes
        assert sum(tensor.shape[0] * tensor.dtype.itemsize for tensor in bucket) == bucket[-1].end - bucket[0].start
    for one, other in pairwise(buckets):
        is_full = other[0].end - one[0].start > most_bytes
        assert is_full or one[0].dtype != other[0].dtype, "no bucket is smaller than it must be"


def test_the_tensors_of_a_file_are_where_their_bytes_are(tmp_path: Path) -> None:
    named = {f"weight-{number}": torch.randn(3, 5).to(dtype) for number, dtype in enumerate(DTYPES)}
    path = Path(publish(named, directory=tmp_path, policy_version=1).path)
    data, found = path.read_bytes(), tensors_in(path)
    assert {tensor.name for tensor in found} == named.keys()
    for name, dtype, shape, start, end in found:
        read = torch.frombuffer(bytearray(data[start:end]), dtype=dtype).reshape(shape)
        assert torch.equal(read, named[name])
    assert found[-1].end == len(data)


def test_a_file_that_is_gone_and_a_group_that_is_closed_are_named(tmp_path: Path) -> None:
    sender = Sender("127.0.0.1", device=torch.device("cpu"))
    with pytest.raises(WeightsNotSent, match=r"model\.safetensors cannot be sent"):
        sender.open("http://server", tmp_path / "model.safetensors", 1, world_size=2)
    path = Path(publish({"weight": torch.ones(2)}, directory=tmp_path, policy_version=1).path)
    first, second = (sender.open("http://server", path, 1, world_size=2) for _ in range(2))
    with pytest.raises(WeightsNotSent, match=f"no group {first.name}: it was closed, or another one"):
        sender.send(first.name)
    sender.close_group(second.name)
    sender.close_group(second.name)
    sender.close()
