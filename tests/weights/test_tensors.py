import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from trainer_end import announce, flatten

from penstock.weights.collective import GroupTensors, specs, unflatten

NAMED = {
    "a": torch.tensor([1, 2, 3], dtype=torch.float16),
    "b": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
    "c": torch.tensor(2.5, dtype=torch.bfloat16),
    "d": torch.zeros(0, 4),
}


def test_tensors_of_several_dtypes_go_end_to_end_and_come_back() -> None:
    announced = announce(NAMED, "g")
    assert announced.dtypes == ["float16", "float32", "bfloat16", "float32"]
    again = unflatten(flatten(list(NAMED.values())), specs(announced, max_bytes=32))
    assert list(again) == list(NAMED)
    assert all(torch.equal(again[name], tensor) and again[name].dtype == tensor.dtype for name, tensor in NAMED.items())


@pytest.mark.parametrize(
    ("names", "dtypes", "shapes", "message"),
    [
        (["a"], ["float16", "float16"], [[1]], "1 names, 2 dtypes and 1 shapes"),
        ([], [], [], "no tensors"),
        (["a", "a"], ["float16"] * 2, [[1]] * 2, "announced twice"),
        (["a"], ["float33"], [[1]], "dtype 'float33': send bfloat16, float16, float32, float64"),
        (["a"], ["nn"], [[1]], "dtype 'nn'"),
        (["a"], ["int8"], [[1]], "dtype 'int8'"),
        (["a"], ["torch.quint8"], [[1]], "dtype 'torch.quint8'"),
        (["a"], ["float8_e4m3fn"], [[1]], "dtype 'float8_e4m3fn'"),
        (["a"], ["float16"], [[2, -1]], r"shape \(2, -1\)"),
        (["a"], ["float16"], [[10**30, 0]], "has shape .*, but this model takes at most 31 bytes"),
        (["a"], ["float16"], [[31, 31, 0]], r"has shape \(31, 31, 0\)"),
        (["a"], ["float16"], [[1] * 65], "has shape"),
        (["a"], ["float32"], [[8]], "32 bytes are announced, but this model takes at most 31"),
    ],
)
def test_an_announcement_that_makes_no_sense_is_refused(
    names: list[str], dtypes: list[str], shapes: list[list[int]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        specs(GroupTensors(group_name="g", names=names, dtypes=dtypes, shapes=shapes), max_bytes=31)
