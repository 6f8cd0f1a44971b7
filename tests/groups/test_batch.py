import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.groups.batch import PADDING, Batch

SIZES = st.integers(0, 20)


def make(num_samples: int, **meta: Any) -> Batch:
    return Batch(
        columns={"number": np.arange(num_samples), "tensor": torch.arange(num_samples * 2).reshape(num_samples, 2)},
        values={"text": [str(i) for i in range(num_samples)]},
        meta=meta,
    )


def same(left: Batch, right: Batch) -> bool:
    return (
        left.names == right.names
        and np.array_equal(left["number"], right["number"])
        and torch.equal(left["tensor"], right["tensor"])
        and left["text"] == right["text"]
        and left.meta == right.meta
    )


def rows(batch: Batch) -> list[int]:
    """Which samples of `make` these are; all columns must agree."""
    numbers: list[int] = batch["number"].tolist()
    assert batch["tensor"].tolist() == [[2 * i, 2 * i + 1] for i in numbers]
    assert batch["text"] == [str(i) for i in numbers]
    return numbers


@given(num_samples=SIZES, num_chunks=st.integers(1, 6))
def test_chunks_are_even_and_concatenate_to_the_whole(num_samples: int, num_chunks: int) -> None:
    batch = make(num_samples, a=1)
    chunks = batch.chunk(num_chunks)
    sizes = [len(chunk) for chunk in chunks]
    assert len(chunks) == num_chunks and max(sizes) - min(sizes) <= 1
    assert same(Batch.concat(chunks), batch)


@given(num_samples=SIZES, multiple=st.integers(1, 6))
def test_padding_fills_up_and_comes_off(num_samples: int, multiple: int) -> None:
    batch = make(num_samples)
    padded = batch.pad(multiple)
    assert len(padded) % multiple == 0 and 0 <= len(padded) - num_samples < multiple
    assert rows(padded) == [min(i, num_samples - 1) for i in range(len(padded))]
    assert padded.is_padding.tolist() == [i >= num_samples for i in range(len(padded))]
    assert same(padded.unpad(), batch) and same(batch, make(num_samples)) and same(batch.unpad(), batch)


@given(num_samples=SIZES, num_chunks=st.integers(1, 6))
def test_padded_chunks_are_those_of_the_padded_batch(num_samples: int, num_chunks: int) -> None:
    batch = make(num_samples)
    chunks = batch.chunk(num_chunks, pad=True)
    expected = batch.pad(num_chunks) if num_samples % num_chunks else batch
    assert same(Batch.concat(chunks), expected) and len({len(chunk) for chunk in chunks}) == 1
    assert same(Batch.concat(chunk.unpad() for chunk in chunks), batch)


@given(data=st.data(), num_samples=SIZES)
def test_padding_comes_off_wherever_it_has_gone(data: st.DataObject, num_samples: int) -> None:
    padded = make(num_samples).pad(4)
    moved = padded.select(data.draw(st.permutations(range(len(padded)))))
    assert sorted(rows(moved.unpad())) == list(range(num_samples))
    assert sorted(rows(moved.repeat(2).unpad())) == sorted([*range(num_samples)] * 2)
    assert len(moved.keep(["number"]).unpad()) == num_samples


def test_a_batch_is_padded_once() -> None:
    with pytest.raises(ValueError, match="of 4 samples is padded already: unpad it first"):
        make(3).pad(2).pad(3)


def test_select_keeps_the_order_asked_for() -> None:
    batch = make(4, a=1)
    assert rows(batch.select([2, 0, 2])) == [2, 0, 2]
    assert rows(batch.select(np.array([False, True, False, True]))) == [1, 3]
    assert len(batch.select([])) == 0 and batch.select([]).meta == {"a": 1}
    with pytest.raises(ValueError, match="a mask of 2 rows does not select from 4"):
        batch.select(np.array([True, False]))


@given(num_samples=SIZES, start=st.integers(-3, 25), end=st.integers(-3, 25), step=st.sampled_from([None, 1, 2, -1]))
def test_slices_are_those_of_a_list(num_samples: int, start: int, end: int, step: int | None) -> None:
    assert rows(make(num_samples)[start:end:step]) == list(range(num_samples))[start:end:step]


def test_a_slice_shares_its_arrays() -> None:
    batch = make(4)
    assert np.shares_memory(batch[1:3]["number"], batch["number"])
    assert batch[1:3]["tensor"].data_ptr() == batch["tensor"][1].data_ptr()


def test_repeat() -> None:
    assert rows(make(3).repeat(2)) == [0, 0, 1, 1, 2, 2]
    assert rows(make(3).repeat(2, interleave=False)) == [0, 1, 2, 0, 1, 2]
    assert len(make(3).repeat(0)) == 0


def test_keep_takes_columns() -> None:
    assert make(3, a=1).keep(["text", "number"]).names == ["number", "text"]
    assert make(3, a=1).keep([]).meta == {"a": 1}
    with pytest.raises(ValueError, match="no column 'other'"):
        make(3).keep(["other"])


def test_union_takes_what_agrees() -> None:
    more = Batch(columns={"number": np.arange(3), "more": np.ones(3)}, values={"text": ["0", "1", "2"]}, meta={"b": 2})
    union = make(3, a=1).union(more)
    assert union.names == ["number", "tensor", "more", "text"] and union.meta == {"a": 1, "b": 2}
    assert same(make(3).union(Batch(meta={"a": 1})), make(3, a=1))
    nothing = Batch(columns={"score": np.array([np.nan, 1.0])}, values={"tree": [{"x": [np.zeros(1)]}, (1,)]})
    assert nothing.union(nothing.select([0, 1])).names == nothing.names


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (Batch(columns={"number": np.array([0, 1, 3])}), "'number', with different content"),
        (Batch(columns={"number": np.arange(3).astype(np.int32)}), "'number', with different content"),
        (Batch(columns={"number": torch.arange(3)}), "'number', with different content"),
        (Batch(columns={"tensor": torch.zeros(3, 2, dtype=torch.int64)}), "'tensor', with different content"),
        (Batch(values={"text": ["0", "1", "x"]}), "'text', with different content"),
        (Batch(columns={"more": np.arange(4)}), "of 3 and 4 samples have no union"),
        (Batch(meta={"a": 2}), "differ in meta 'a': 1 and 2"),
    ],
)
def test_union_refuses_what_does_not(other: Batch, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        make(3, a=1).union(other)


def test_meta_is_joined() -> None:
    parts = [make(1, a=1, metrics={"loss": float(i)}) for i in range(3)]
    parts[2].meta |= {"b": 2, "metrics": {"loss": 2.0, "late": 5}}
    whole = Batch.concat(parts)
    assert whole.meta == {"a": 1, "b": 2, "metrics": {"loss": [0.0, 1.0, 2.0], "late": [5]}}
    assert Batch.concat([Batch.concat(parts[:2]), parts[2]]).meta == whole.meta, "it does not matter how"
    assert Batch.concat(parts[:1]).meta["metrics"] == {"loss": [0.0]}, "nor of how many"
    with pytest.raises(ValueError, match="differ in meta 'a': 1 and 2"):
        Batch.concat([make(1, a=1), make(1, a=2)])
    assert parts[0].meta == {"a": 1, "metrics": {"loss": 0.0}}


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        Batch(columns={"a": np.zeros(2)}, values={"b": [1]})


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="'a' is given twice"):
        Batch(columns={"a": np.zeros(1)}, values={"a": [1]})


@pytest.mark.parametrize("column", [[1, 2], 1.0, np.float64(1), torch.tensor(1)])
def test_a_column_is_an_array_of_samples(column: Any) -> None:
    with pytest.raises(TypeError, match=r"'a' is .*, expected an array of samples"):
        Batch(columns={"a": column})


def test_batches_with_different_columns_do_not_concatenate() -> None:
    with pytest.raises(ValueError, match="different columns"):
        Batch.concat([make(1), Batch(columns={"number": np.zeros(1)})])


# --- on the wire


def through(batch: Batch, *, shared: bool = False) -> tuple[Batch, int, list[int]]:
    """What arrives, the bytes of the pickle, and those of the buffers beside it; `shared`: in read-only memory."""
    buffers: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(batch, protocol=5, buffer_callback=buffers.append)
    copies = [bytes(b.raw()) if shared else bytearray(b.raw()) for b in buffers]
    return pickle.loads(pickled, buffers=copies), len(pickled), [len(copy) for copy in copies]


DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool]


@given(num_samples=SIZES, dtype=st.sampled_from(DTYPES), shared=st.booleans(), lengths=st.lists(SIZES, max_size=5))
def test_a_batch_arrives_as_it_was(num_samples: int, dtype: torch.dtype, shared: bool, lengths: list[int]) -> None:
    batch = make(num_samples, a={"b": 1})
    batch.columns["typed"] = (torch.arange(3 * num_samples).reshape(num_samples, 3) % 2).to(dtype)
    arrived, _, _ = through(batch, shared=shared)
    assert same(arrived, batch) and torch.equal(arrived["typed"], batch["typed"])
    ragged = Batch(values={"ids": [np.arange(length) for length in lengths]})
    assert [ids.tolist() for ids in through(ragged)[0]["ids"]] == [list(range(length)) for length in lengths]


def test_arrays_travel_beside_the_pickle() -> None:
    columns = {"array": np.zeros((1000, 100)), "tensor": torch.zeros(1000, 100, dtype=torch.bfloat16)}
    ragged = [np.arange(100 + i) for i in range(1000)]
    _, pickled, buffers = through(Batch(columns, {"ids": ragged}))
    assert pickled < 1000
    assert sorted(buffers) == sorted([1000 * 100 * 8, 1000 * 100 * 2, sum(ids.nbytes for ids in ragged), 1000 * 8])


def test_a_slice_travels_without_the_rest() -> None:
    batch = Batch(
        columns={"array": np.zeros((1000, 10)), "tensor": torch.zeros(1000, 10), "part": np.zeros((1000, 99))}
    )
    batch.columns["part"] = batch["part"][:, 3:5]
    _, pickled, buffers = through(batch[10:12])
    assert pickled < 1000 and sum(buffers) == 2 * (10 * 8 + 10 * 4 + 2 * 8)


def test_what_arrives_in_shared_memory_is_not_copied_unless_torch_would_write_to_it() -> None:
    batch = Batch(columns={"array": np.zeros(2), "tensor": torch.zeros(2)}, values={"ids": [np.zeros(2), np.zeros(2)]})
    arrived, _, _ = through(batch, shared=True)
    assert not arrived["array"].flags.writeable and not arrived["ids"][0].flags.writeable
    arrived["tensor"].add_(1)
    own, _, _ = through(batch)
    assert own["array"].flags.writeable and not own["tensor"].any()


@pytest.mark.parametrize(
    "values",
    [
        [],
        [np.zeros(2), np.zeros(2, dtype=np.int64)],
        [np.zeros(2), [1]],
        [np.zeros((1, 2)), np.zeros((2, 2))],
        [np.array([{}, None]), np.array([{}])],
        [np.zeros(0), np.zeros(0)],
        ["a", None, {"b": 1}],
    ],
)
def test_ragged_values_of_any_kind_arrive(values: list[Any]) -> None:
    arrived = through(Batch(values={"values": values}))[0]["values"]
    assert len(arrived) == len(values)
    for got, sent in zip(arrived, values, strict=True):
        assert type(got) is type(sent)
        assert (got.dtype == sent.dtype and np.array_equal(got, sent)) if isinstance(sent, np.ndarray) else got == sent


def test_tensors_arrive_without_gradients() -> None:
    arrived, _, _ = through(Batch(columns={"tensor": torch.zeros(2, requires_grad=True)}))
    assert not arrived["tensor"].requires_grad


def test_padding_is_a_column_of_its_own() -> None:
    padded = make(3).pad(2)
    assert through(padded)[0].is_padding.tolist() == [False, False, False, True]
    assert padded.columns[PADDING].dtype == np.bool_ and not make(2).is_padding.any()
