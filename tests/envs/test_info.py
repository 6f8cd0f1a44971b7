"""What is told beside, as JSON has it."""

import numpy as np
import pytest

from penstock.envs.worker_calls import Returned, encode, plain


class Odd:
    def __str__(self) -> str:
        return "odd"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"a": np.int64(3)}, {"a": 3}),
        ([np.float32(0.5), np.bool_(True)], [0.5, True]),
        (np.asarray([[1, 2]]), [[1, 2]]),
        ({"a": [Odd(), 1]}, {"a": ["odd", 1]}),
        (np.asarray([Odd()]), ["odd"]),
    ],
)
def test_only_what_has_no_such_form_becomes_text(value: object, expected: object) -> None:
    assert plain(value) == expected


def test_what_is_numpys_leaves_a_process_and_other_objects_do_not() -> None:
    assert encode(Returned(value=[np.int64(3), np.asarray([1])])) == encode(Returned(value=[3, [1]]))
    with pytest.raises(TypeError, match="a Odd cannot leave its process"):
        encode(Returned(value=Odd()))
