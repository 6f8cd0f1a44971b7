import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.groups.batch import Batch


def make(num_samples: int) -> Batch:
    return Batch(
        columns={"number": np.arange(num_samples), "tensor": torch.arange(num_samples * 2).reshape(num_samples, 2)},
        values={"text": [str(i) for i in range(num_samples)]},
    )


def same(left: Batch, right: Batch) -> bool:
    return (
        np.array_equal(left["number"], right["number"])
        and torch.equal(left["tensor"], right["tensor"])
        and left["text"] == right["text"]
    )


@given(num_samples=st.integers(0, 20), num_chunks=st.integers(1, 6))
def test_chunks_are_even_and_concatenate_to_the_whole(num_samples: int, num_chunks: int) -> None:
    batch = make(num_samples)
    chunks = batch.chunk(num_chunks)
    sizes = [len(chunk) for chunk in chunks]
    assert len(chunks) == num_chunks and max(sizes) - min(sizes) <= 1
    assert same(Batch.concat(chunks), batch)


def test_select_keeps_the_order_asked_for() -> None:
    picked = make(4).select([2, 0, 2])
    assert picked["number"].tolist() == [2, 0, 2]
    assert picked["tensor"].tolist() == [[4, 5], [0, 1], [4, 5]]
    assert picked["text"] == ["2", "0", "2"]


def test_columns_of_different_length_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in length"):
        Batch(columns={"a": np.zeros(2)}, values={"b": [1]})


def test_a_name_is_given_once() -> None:
    with pytest.raises(ValueError, match="'a' is given twice"):
        Batch(columns={"a": np.zeros(1)}, values={"a": [1]})


def test_batches_with_different_columns_do_not_concatenate() -> None:
    with pytest.raises(ValueError, match="different columns"):
        Batch.concat([make(1), Batch(columns={"number": np.zeros(1)})])
