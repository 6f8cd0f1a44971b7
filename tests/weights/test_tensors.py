import pytest
import torch

from penstock.types import TensorNames
from penstock.weights.tensors import announce, buckets, flatten, specs, unflatten

NAMED = {
    "a": torch.tensor([1, 2, 3], dtype=torch.int8),
    "b": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
    "c": torch.tensor(2.5, dtype=torch.bfloat16),
    "d": torch.zeros(0, 4),
}


def test_tensors_of_any_dtype_go_end_to_end_and_come_back() -> None:
    announced = announce(NAMED)
    assert announced.dtypes == ["int8", "float32", "bfloat16", "float32"]
    again = unflatten(flatten(list(NAMED.values())), specs(announced, max_bytes=29))
    assert list(again) == list(NAMED)
    assert all(torch.equal(again[name], tensor) and again[name].dtype == tensor.dtype for name, tensor in NAMED.items())


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes", "message"),
    [
        (["a"], ["int8", "int8"], [[1]], "1 names, 2 dtypes and 1 shapes"),
        ([], [], [], "no tensors"),
        (["a", "a"], ["int8"] * 2, [[1]] * 2, "announced twice"),
        (["a"], ["float33"], [[1]], "dtype 'float33'"),
        (["a"], ["nn"], [[1]], "dtype 'nn'"),
        (["a"], ["int8"], [[2, -1]], r"shape \(2, -1\)"),
        (["a"], ["float32"], [[8]], "32 bytes are announced, but this model takes at most 31"),
    ],
)
def test_an_announcement_that_makes_no_sense_is_refused(
    names: list[str], dtypes: list[str], shapes: list[list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        specs(TensorNames(names=names, dtypes=dtypes, shapes=shapes), max_bytes=31)


def test_buckets_keep_the_order_and_the_limit() -> None:
    named = {name: torch.zeros(size, dtype=torch.uint8) for name, size in zip("abcde", (4, 4, 9, 1, 7), strict=True)}
    assert [list(bucket) for bucket in buckets(named, 8)] == [["a", "b"], ["c"], ["d", "e"]]
    assert list(buckets({}, 8)) == []
