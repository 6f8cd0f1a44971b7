"""What is told beside, as JSON has it."""

import numpy as np
import pytest

from penstock.envs.exception_location import Origin
from penstock.envs.worker_calls import MAX_INFO_BYTES, Raised, Returned, encode, plain
from penstock.sendable import MAX_CHARS, MAX_DEPTH, sendable


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
        ({"n": 2**64 - 1}, {"n": 2**64 - 1}),
        ({"n": 10**30}, "{'n': " + str(10**30) + "}"),
        ({"n": 10**5000}, "a dict without text (ValueError)"),
        ({"tool": "\ud800"}, "{'tool': '\\ud800'}"),
        ("\ud800", "?"),
    ],
)
def test_only_what_has_no_such_form_becomes_text(value: object, expected: object) -> None:
    assert plain(value) == expected


def test_a_value_that_is_too_large_is_cut() -> None:
    assert plain(["x" * MAX_INFO_BYTES]) == f"['{'x' * (MAX_CHARS - 2)}... ({MAX_INFO_BYTES + 4} characters)"
    flat = {"a": [[1] * 5000, {"b": "x" * 1000}]}
    assert plain(flat) == flat
    many = [[] for _ in range(MAX_INFO_BYTES - 100)]
    assert plain(many) == f"{'[' + '[], ' * MAX_CHARS}"[:MAX_CHARS] + f"... ({4 * len(many)} characters)"
    for depth, kept in ((MAX_DEPTH, True), (MAX_DEPTH + 1, False)):
        deep: list[object] = []
        for _ in range(depth - 1):
            deep = [deep]
        assert (plain(deep) == deep) == kept
    nested: list[object] = []
    for _ in range(100_000):
        nested = [nested]
    assert plain(nested) == "a list without text (RecursionError)"


def test_an_exception_that_quotes_half_a_character_can_be_sent() -> None:
    told = Raised(kind="X", message=sendable("\ud800" + "y" * 3000), is_config=False, origin=Origin("", ""))
    assert b"?yyy" in b"".join(encode(told))


def test_what_is_numpys_leaves_a_process_and_other_objects_do_not() -> None:
    assert encode(Returned(value=[np.int64(3), np.asarray([1])])) == encode(Returned(value=[3, [1]]))
    with pytest.raises(TypeError, match="a Odd cannot leave its process"):
        encode(Returned(value=Odd()))
