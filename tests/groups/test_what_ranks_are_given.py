"""The arguments that every rank gets in every mode, and the results that come back, on an unordered mesh of 8."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from group_workers import Probe, doubled, numbers

from penstock.groups.backend import Call, Handle
from penstock.groups.batch import Batch
from penstock.groups.group import Group
from penstock.groups.intent import Broadcast, PerRank, Shard
from penstock.groups.local import LocalBackend
from penstock.groups.role import Role

MESH = [(1, 0, 1), (0, 1, 0), (0, 0, 0), (1, 1, 0), (0, 1, 1), (1, 0, 0), (0, 0, 1), (1, 1, 1)]
"""By rank: (dp, tp, pp)."""
DP = [1, 0, 0, 1, 0, 1, 0, 1]
"""By rank: the part of its data-parallel rank; 6 and 0 are asked for what they made of parts 0 and 1."""
DP_PP = [3, 0, 0, 2, 1, 2, 1, 3]
"""With every stage a data-parallel rank of its own: part 2 * dp + pp; asked are 2, 6, 5 and 0."""
RANKS = [0, 1, 2, 3, 4, 5, 6, 7]

CUT = {
    # samples: parts -> the numbers in each, a copy that fills it up shown as negative
    (0, 2): [[], []],
    (1, 2): [[0], [-0.5]],
    (5, 2): [[0, 1, 2], [3, 4, -4]],
    (8, 2): [[0, 1, 2, 3], [4, 5, 6, 7]],
    (0, 4): [[], [], [], []],
    (1, 4): [[0], [-0.5], [-0.5], [-0.5]],
    (3, 4): [[0], [1], [2], [-2]],
    (5, 4): [[0, 1], [2, 3], [4, -4], [-4, -4]],
    (8, 4): [[0, 1], [2, 3], [4, 5], [6, 7]],
    (0, 8): [[]] * 8,
    (1, 8): [[0], *[[-0.5]] * 7],
    (7, 8): [[0], [1], [2], [3], [4], [5], [6], [-6]],
    (8, 8): [[0], [1], [2], [3], [4], [5], [6], [7]],
    (9, 8): [[0, 1], [2, 3], [4, 5], [6, 7], [8, -8], [-8, -8], [-8, -8], [-8, -8]],
}


class RecordingBackend(LocalBackend):
    """Keeps the arguments of the last call, by rank."""

    def start(self, calls: Mapping[int, Call]) -> dict[int, Handle]:
        self.arguments = [calls[rank].arguments for rank in sorted(calls)]
        return super().start(calls)


@pytest.fixture
def backend() -> RecordingBackend:
    return RecordingBackend({"probe": Role(Probe, {"mesh": MESH})}, len(MESH))


@pytest.fixture
def group(backend: RecordingBackend) -> Group:
    return Group(backend, "probe")


def shown(batch: Batch) -> list[float]:
    """A copy that fills it up is shown as negative; one of 0 as -0.5."""
    return [
        -(number or 0.5) if fills else number for number, fills in zip(batch["number"], batch.is_padding, strict=True)
    ]


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        ("megatron_compute_proto", DP),
        ("megatron_pp_as_dp_proto", DP_PP),
        ("dp_compute_proto", RANKS),
        ("dp_compute_metric", RANKS),
    ],
)
def test_batches(backend: RecordingBackend, group: Group, method: str, parts: list[int]) -> None:
    num_parts = max(parts) + 1
    for num_samples in [samples for samples, number in CUT if number == num_parts]:
        given = numbers(num_samples)
        result = getattr(group, method)(batch=given)
        cut = CUT[num_samples, num_parts]
        assert [shown(arguments["batch"]) for arguments in backend.arguments] == [cut[part] for part in parts]
        if method == "dp_compute_metric":
            assert result == [{"rows": len(part), "samples": sum(number >= 0 for number in part)} for part in cut]
        else:
            assert np.array_equal(result["number"], doubled(given)["number"])


@pytest.mark.parametrize(
    ("method", "parts", "collected"),
    [("megatron_compute", DP, [6, 0]), ("megatron_pp_as_dp", DP_PP, [2, 6, 5, 0]), ("dp_compute", RANKS, RANKS)],
)
def test_lists(backend: RecordingBackend, group: Group, method: str, parts: list[int], collected: list[int]) -> None:
    values = [f"part {part}" for part in range(max(parts) + 1)]
    result = getattr(group, method)(values)
    assert [arguments["value"] for arguments in backend.arguments] == [f"part {part}" for part in parts]
    assert [made[0] for made in result] == collected and [made[1] for made in result] == values


@pytest.mark.parametrize(("method", "collected"), [("megatron_pp_only", [2, 6]), ("one_to_all", RANKS)])
def test_whole_arguments(backend: RecordingBackend, group: Group, method: str, collected: list[int]) -> None:
    value = list(range(len(MESH)))
    result = getattr(group, method)(value)
    assert [arguments["value"] for arguments in backend.arguments] == [value] * len(MESH), "however long it is"
    assert [made[0] for made in result] == collected


def test_a_function_and_a_batch(backend: RecordingBackend, group: Group) -> None:
    group.dp_compute_proto_with_func(doubled, numbers(9))
    assert [arguments["function"] for arguments in backend.arguments] == [doubled] * len(MESH)
    assert [shown(arguments["batch"]) for arguments in backend.arguments] == CUT[9, 8]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("whole", ["whole"] * 8),
        (Broadcast([1, 2]), [[1, 2]] * 8),
        (PerRank(RANKS), RANKS),
    ],
)
def test_an_intent_of_the_call(backend: RecordingBackend, group: Group, value: Any, expected: list[Any]) -> None:
    group.all_to_all(value)
    assert [arguments["value"] for arguments in backend.arguments] == expected


def test_an_intent_of_the_call_for_a_batch(backend: RecordingBackend, group: Group) -> None:
    group.all_to_all(Shard(numbers(9)))
    assert [shown(arguments["value"]) for arguments in backend.arguments] == CUT[9, 8]


def test_one_worker_of_the_group(backend: RecordingBackend, group: Group) -> None:
    assert group.on(5).direct("to one") == (5, "to one")
    assert [arguments["value"] for arguments in backend.arguments] == ["to one"]
