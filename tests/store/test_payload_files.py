"""Payload records survive the trip bit by bit, and damage is noticed."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.samples import Sample
from penstock.store.payload_files import PayloadError, PayloadReader, PayloadWriter, decode, encode
from penstock.types import PayloadRef


def sample(num_tokens: int, *, group: int = 0, episode: int = 0, seed: int = 0) -> Sample:
    rng = np.random.default_rng(seed)
    mask = rng.integers(0, 2, num_tokens).astype(np.uint8)
    return Sample(
        group=group,
        episode=episode,
        reward=float(rng.normal()),
        truncated=bool(rng.integers(0, 2)),
        temperature=float(rng.uniform(0.1, 2.0)),
        token_ids=rng.integers(0, 1000, num_tokens).astype(np.int32),
        loss_mask=mask,
        logprobs=(rng.normal(size=num_tokens) * mask).astype(np.float32),
        versions=rng.integers(-1, 9, num_tokens).astype(np.int32),
    )


def assert_same(left: Sample, right: Sample) -> None:
    assert (left.group, left.episode, left.reward, left.truncated, left.temperature) == (
        right.group,
        right.episode,
        right.reward,
        right.truncated,
        right.temperature,
    )
    for name in ("token_ids", "loss_mask", "logprobs", "versions"):
        ours, theirs = getattr(left, name), getattr(right, name)
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=8), st.integers(0, 100))
def test_records_round_trip(lengths: list[int], seed: int) -> None:
    group = [sample(n, group=3, episode=i, seed=seed + i) for i, n in enumerate(lengths)]
    stale = bytearray(b"x" * seed * 20)
    record = encode(group, stale)
    assert bytes(record) == bytes(encode(group, bytearray())), "the rest of another record shows"
    for before, after in zip(group, decode(record), strict=True):
        assert_same(before, after)


def test_many_groups_over_several_files(tmp_path: Path) -> None:
    writer = PayloadWriter(tmp_path, "env-0", max_file_bytes=2000)
    groups = [[sample(20, group=g, episode=e, seed=10 * g + e) for e in range(3)] for g in range(20)]
    refs = [writer.append(group) for group in groups]
    assert len({ref.file for ref in refs}) > 1
    reader = PayloadReader(tmp_path)
    for group, ref in zip(groups, refs, strict=True):
        for before, after in zip(group, reader.read(ref), strict=True):
            assert_same(before, after)
    writer.close()


def test_a_reader_sees_what_is_appended_after_it_mapped(tmp_path: Path) -> None:
    writer, reader = PayloadWriter(tmp_path, "env-0"), PayloadReader(tmp_path)
    first = reader.read(writer.append([sample(5, seed=1)]))
    second = reader.read(writer.append([sample(7, seed=2)]))
    assert (len(first[0].token_ids), len(second[0].token_ids)) == (5, 7)
    writer.close()


def test_a_restarted_worker_never_overwrites(tmp_path: Path) -> None:
    first = PayloadWriter(tmp_path, "env-0")
    old = first.append([sample(5, seed=1)])
    first.close()
    second = PayloadWriter(tmp_path, "env-0")
    new = second.append([sample(9, seed=2)])
    second.close()
    reader = PayloadReader(tmp_path)
    assert len(reader.read(old)[0].token_ids) == 5 and len(reader.read(new)[0].token_ids) == 9


def test_damage_is_named(tmp_path: Path) -> None:
    writer = PayloadWriter(tmp_path, "env-0")
    ref = writer.append([sample(5)])
    writer.close()
    path = tmp_path / ref.file
    data = bytearray(path.read_bytes())
    data[ref.offset + ref.length - 3] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(PayloadError, match=rf"{ref.file} is damaged at offset {ref.offset}"):
        PayloadReader(tmp_path).read(ref)
    with pytest.raises(PayloadError, match=r"missing\.seg"):
        PayloadReader(tmp_path).read(PayloadRef(file="missing.seg", offset=0, length=1, checksum=0))


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Writes stop there, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_group_that_does_not_fit_on_the_disk_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    writer = PayloadWriter(tmp_path, "env-0")
    with file_size_limit(100), pytest.raises(OSError, match=r"100 of \d+ bytes .*disk full\?.*env-0-00000\.seg"):
        writer.append([sample(50, seed=1)])
    ref = writer.append([sample(7, seed=2)])  # once there is room again, what follows is whole
    writer.close()
    assert_same(PayloadReader(tmp_path).read(ref)[0], sample(7, seed=2))
