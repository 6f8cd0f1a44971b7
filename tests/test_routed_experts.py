"""The record of routers: through segments, turns, samples and the pool, every token has that of its first pass."""

from __future__ import annotations

import base64
import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.routed_experts import Record, compact, dtype_of, from_npy, from_wire, to_wire, unknown
from penstock.samples import Sample, Segment, Trajectory, Turn, VersionSpan, num_routed, path_to
from penstock.store.payload_files import PayloadReader, PayloadWriter, decode, encode
from penstock.trainer.prepare import prepare
from penstock.types import EpisodeId

WIDTH = 6
EPISODE = EpisodeId("train", 0, 0, 0)


def experts_of_pass(number: int, start: int, end: int) -> Record:
    """What a pass records of the positions [start, end): every pass and every position has another row."""
    rows = [[(7 * number + place + column) % 250 for column in range(WIDTH)] for place in range(start, end)]
    return np.asarray(rows, dtype=np.uint8).reshape(-1, WIDTH)


class Played:
    """An episode in which a server answers: each request is a pass, and its record begins where it was asked to."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.num_passes = 0

    def answer(self, turn: Turn, context: int, num_tokens: int, known: list[Turn], *, records: bool = True) -> None:
        start, end = num_routed([*known, turn]), context + num_tokens - 1
        turn.segments.append(
            Segment(
                token_ids=list(range(num_tokens)),
                logprobs=[-1.0] * num_tokens,
                spans=[VersionSpan(self.num_passes, 0, num_tokens)],
                finish_reason="length",
                experts=experts_of_pass(self.num_passes, start, end) if records else None,
            )
        )
        self.num_passes += 1


def trajectory(turns: list[Turn]) -> Trajectory:
    return Trajectory(episode=EPISODE, task_id="t", turns=turns, reward=1.0, status="completed")


lengths = st.integers(1, 5)


@given(st.lists(st.tuples(lengths, st.lists(lengths, min_size=1, max_size=3)), min_size=1, max_size=4))
def test_each_position_has_the_record_of_the_first_pass_that_computed_it(shape: list[tuple[int, list[int]]]) -> None:
    played, context, expected = Played(), 0, list[Record]()
    for num_observed, segments in shape:
        turn = Turn(observation_ids=[9] * num_observed, segments=[])
        known = list(played.turns)
        context += num_observed
        for num_tokens in segments:
            before = len(expected)
            played.answer(turn, context, num_tokens, known)
            context += num_tokens
            expected += list(experts_of_pass(played.num_passes - 1, before, context - 1))
        played.turns.append(turn)
    sample = trajectory(played.turns).flatten()
    assert sample.experts is not None and sample.experts.shape == (context, WIDTH)
    np.testing.assert_array_equal(sample.experts[:-1], np.asarray(expected).reshape(-1, WIDTH))
    assert (sample.experts[-1] == 255).all(), "nothing computed the last token"
    assert num_routed(played.turns) == context - 1

    again = Trajectory.unflatten([sample], episode=EPISODE, task_id="t", ended=True)
    np.testing.assert_array_equal(again.flatten().experts, sample.experts)
    assert num_routed(again.turns) == context - 1
    assert trajectory(played.turns).formulate("step")[-1].experts is not None


@given(st.lists(lengths, min_size=1, max_size=4), st.data())
def test_a_joined_and_cut_answer_keeps_the_record_of_its_tokens(segments: list[int], data: st.DataObject) -> None:
    played, turn, context = Played(), Turn(observation_ids=[9] * 3, segments=[]), 3
    for num_tokens in segments:
        played.answer(turn, context, num_tokens, [])
        context += num_tokens
    whole = trajectory([turn]).flatten().experts
    joined = Segment.joined(turn.segments, "stop")
    np.testing.assert_array_equal(joined.experts, whole[:-1])
    length = data.draw(st.integers(0, sum(segments)))
    cut = joined.cut(length, "stop")
    np.testing.assert_array_equal(cut.experts, whole[: 3 + length - 1])


def test_branches_share_the_record_of_what_they_have_in_common() -> None:
    played = Played()
    first = Turn(observation_ids=[9, 9], segments=[], parent=-1)
    played.answer(first, 2, 3, [])
    left, right = (Turn(observation_ids=[8], segments=[], parent=0) for _ in range(2))
    played.answer(left, 6, 2, [first])
    played.answer(right, 6, 4, [first])
    assert path_to([first, left, right], 2) == [0, 2]
    one, other = trajectory([first, left, right]).formulate("branches")
    np.testing.assert_array_equal(one.experts[:4], other.experts[:4])
    np.testing.assert_array_equal(one.experts[4:-1], experts_of_pass(1, 4, 7))
    np.testing.assert_array_equal(other.experts[4:-1], experts_of_pass(2, 4, 9))


def test_what_one_server_does_not_record_the_next_one_is_asked_for() -> None:
    played, turn = Played(), Turn(observation_ids=[9, 9], segments=[])
    played.answer(turn, 2, 3, [], records=False)
    assert num_routed([turn]) == 0
    assert trajectory([turn]).flatten().experts is None
    played.answer(turn, 5, 2, [])
    np.testing.assert_array_equal(trajectory([turn]).flatten().experts[:-1], experts_of_pass(1, 0, 6))


def samples_with_and_without(dtype: str = "uint8") -> list[Sample]:
    played, turn = Played(), Turn(observation_ids=[9, 9], segments=[])
    played.answer(turn, 2, 3, [])
    sample = trajectory([turn]).flatten()
    assert sample.experts is not None
    return [
        dataclasses.replace(sample, experts=None),
        dataclasses.replace(sample, experts=sample.experts.astype(dtype)),
    ]


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_the_pool_keeps_the_record(dtype: str, tmp_path: Path) -> None:
    samples = samples_with_and_without(dtype) * 2
    writer = PayloadWriter(tmp_path, "w")
    found = PayloadReader(tmp_path).read(writer.append(samples))
    writer.close()
    for sample, wanted in zip(found, samples, strict=True):
        np.testing.assert_array_equal(sample.token_ids, wanted.token_ids)
        if wanted.experts is None:
            assert sample.experts is None
        else:
            assert sample.experts is not None and sample.experts.dtype == dtype
            np.testing.assert_array_equal(sample.experts, wanted.experts)


def test_records_without_experts_have_no_place_for_them() -> None:
    without, with_experts = samples_with_and_without()
    plain, routed = bytes(encode([without], bytearray())), bytes(encode([with_experts], bytearray()))
    assert len(routed) > len(plain)
    assert b"uint8" in routed and b"uint8" not in plain
    (found,) = decode(memoryview(plain))
    assert found.experts is None


def test_the_batch_has_the_rows_of_each_sample_in_one_dimension() -> None:
    without, with_experts = samples_with_and_without()
    assert "experts" not in prepare([without])[0].names
    batch, _ = prepare([without, with_experts])
    none, some = batch["experts"]
    assert none.size == 0 and none.dtype == some.dtype
    np.testing.assert_array_equal(some, with_experts.experts.reshape(-1))  # type: ignore[union-attr]


def test_a_record_of_another_length_makes_a_sample_unusable() -> None:
    _, sample = samples_with_and_without()
    assert sample.experts is not None
    _, dropped = prepare([dataclasses.replace(sample, experts=sample.experts[:-1])])
    assert dropped == {"mismatched_lengths": 1}


@pytest.mark.parametrize("num_experts", [8, 255, 256, 384])
@pytest.mark.parametrize("compacted", [True, False])
def test_the_wire_keeps_numbers(num_experts: int, compacted: bool) -> None:
    values = np.random.default_rng(0).integers(0, num_experts, (5, WIDTH))
    record = compact(values, num_experts)
    assert record.dtype == dtype_of(num_experts)
    dtype = record.dtype.name if compacted else "int32"
    found = from_wire(to_wire(record, compacted=compacted), 5, dtype=dtype)
    np.testing.assert_array_equal(found, values)


def test_numbers_that_no_expert_has_become_unknown() -> None:
    record = compact(np.asarray([[-1, 0, 7, 8, 10**6]]), 8)
    hidden = unknown(record.dtype)
    assert record.tolist() == [[hidden, 0, 7, hidden, hidden]]


@pytest.mark.parametrize(
    ("text", "dtype"), [("!", "int32"), ("AAAA", "int32"), ("", "uint8"), ("AAAA", "uint8"), ("AAAA", "object")]
)
def test_what_is_no_record_is_refused(text: str, dtype: str) -> None:
    with pytest.raises(ValueError):
        from_wire(text, 2, dtype=dtype)


@pytest.mark.parametrize("text", ["!", "AAAA", ""])
def test_what_is_no_numpy_file_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        from_npy(text, 1)


def npy_header(shape: tuple[int, ...]) -> bytes:
    """The beginning of a numpy file."""
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<i8", "fortran_order": False, "shape": shape})
    return file.getvalue()


@pytest.mark.parametrize(
    "raw",
    [
        b"PK\x03\x04" + bytes(40),
        b"\x93NUMPY\x01\x00",
        b"\x93NUMPY\x09\x00" + bytes(40),
        npy_header((1 << 45, 1, 1)) + bytes(8),
        npy_header((2, 3, 2)) + bytes(8),
        npy_header((2, 3)) + bytes(48),
    ],
)
def test_a_numpy_file_that_promises_what_it_has_not_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"experts|EOF|[Hh]eader|magic"):
        from_npy(base64.b64encode(raw).decode(), 1)
