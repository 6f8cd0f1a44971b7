"""What every backend does alike: another one is added to `BACKENDS`.

What a call becomes is decided by the driver, the same over every transport: every size and mesh is tried on the local
backend. Workers in processes of their own are given each kind of call once, by one group of three.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from group_workers import Later, Probe, doubled, numbers

from penstock.groups import future
from penstock.groups.backend import Backend
from penstock.groups.batch import Batch
from penstock.groups.errors import CallRefused, CallTimedOut, RemoteError, ResultRefused, WorkerLost
from penstock.groups.group import Group, OneWorker
from penstock.groups.intent import Broadcast, PerRank, Shard
from penstock.groups.local import LocalBackend, LocalGroup
from penstock.groups.role import Role
from penstock.groups.spawned import SpawnedBackend

Start = Callable[[Mapping[str, Role], int], Backend]


def on_ray(roles: Mapping[str, Role], size: int) -> Backend:
    pytest.importorskip("ray")
    from on_ray import Placed

    return Placed(roles, size)


APART: dict[str, Start] = {"spawned": SpawnedBackend, "ray": on_ray}
"""Backends with one process per worker."""
BACKENDS: dict[str, Start] = {"local": LocalBackend, **APART}
DEAD = r"its actor \(pid \d+, ip \S+\) is dead: Worker unexpectedly exits"
"""All that Ray knows."""

SIZES = [1, 2, 3, 4]
NUM_APART = 3
"""Workers in processes of their own."""
MESHES: dict[str, list[tuple[int, int, int]]] = {
    # by rank: (dp, tp, pp)
    "one": [(0, 0, 0)],
    "dp2": [(0, 0, 0), (1, 0, 0)],
    "tp2": [(0, 0, 0), (0, 1, 0)],
    "pp2": [(0, 0, 0), (0, 0, 1)],
    "dp3-backwards": [(2, 0, 0), (1, 0, 0), (0, 0, 0)],
    "dp2-tp2": [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)],
    "dp2-pp2": [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 0, 1)],
    "tp2-pp2": [(0, 0, 0), (0, 1, 0), (0, 0, 1), (0, 1, 1)],
}
TIMEOUT_S = 30.0


def apart(*values: Any) -> list[Any]:
    """Return (backend, *values) for each backend with one process per worker."""
    ray = [pytest.mark.integration, pytest.mark.xdist_group("ray")]
    marks = {"spawned": [pytest.mark.integration], "ray": ray}
    return [pytest.param((kind, *values), marks=marks[kind]) for kind in APART]


def named(case: tuple[Any, ...]) -> str:
    return "-".join(str(part).strip("-") for part in case).removesuffix("-")


@pytest.fixture(scope="module")
def started() -> Iterator[Callable[[str, int], Backend]]:
    """The workers of one size: a plain role and one of every mesh, each with methods that wait and without."""
    backends: dict[tuple[str, int], Backend] = {}

    def start(kind: str, size: int) -> Backend:
        if (kind, size) not in backends:
            meshes = {name: mesh for name, mesh in MESHES.items() if len(mesh) == size}
            roles = {
                f"{name}{later}": Role(LATER[later], {"mesh": mesh}) for name, mesh in meshes.items() for later in LATER
            }
            plain = {"probe": Role(Probe), "probe-later": Role(Later)}
            backends[kind, size] = BACKENDS[kind]({**plain, **roles}, size)
        return backends[kind, size]

    yield start
    for backend in backends.values():
        backend.close()


@pytest.fixture(params=[*(("local", size) for size in SIZES), *apart(NUM_APART)], ids=named)
def group(started: Callable[[str, int], Backend], request: pytest.FixtureRequest) -> Group:
    return Group(started(*request.param), "probe")


class Waited:
    """A group whose calls are waited for, by itself or by us."""

    def __init__(self, group: Group | OneWorker, mesh: list[tuple[int, int, int]]) -> None:
        self.group, self.mesh = group, mesh

    @property
    def size(self) -> int:
        return self.group.size

    def on(self, rank: int) -> Waited:
        return Waited(self.group.on(rank), [])

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments, **keywords: value_of(getattr(self.group, name)(*arguments, **keywords))


LATER = {"": Probe, "-later": Later}


@pytest.fixture(
    params=[*(("local", size, later) for size in SIZES for later in LATER), *apart(NUM_APART, "-later")], ids=named
)
def calls(started: Callable[[str, int], Backend], request: pytest.FixtureRequest) -> Waited:
    kind, size, later = request.param
    return Waited(Group(started(kind, size), f"probe{later}"), [])


@pytest.fixture(
    params=[*(("local", name, later) for name in MESHES for later in LATER), *apart("dp3-backwards", "")], ids=named
)
def meshed(started: Callable[[str, int], Backend], request: pytest.FixtureRequest) -> Waited:
    kind, name, later = request.param
    return Waited(Group(started(kind, len(MESHES[name])), f"{name}{later}"), MESHES[name])


@pytest.fixture
def later(group: Group) -> Group:
    """The same workers; calls return futures."""
    return Group(group.backend, "probe-later")


@pytest.fixture
def gate(tmp_path: Path) -> Path:
    """A named pipe: opening it for writing waits until a worker reads it, and closing it lets that worker go on."""
    os.mkfifo(tmp_path / "gate")
    return tmp_path / "gate"


def value_of(result: Any) -> Any:
    return result.result(TIMEOUT_S) if hasattr(result, "result") else result


def same(left: Any, right: Any) -> bool:
    if isinstance(left, Batch):
        return bool(left["number"].tolist() == right["number"].tolist() and left["text"] == right["text"])
    return bool(left == right)


def sizes_around(size: int) -> list[int]:
    return sorted({0, 1, size - 1, size, size + 1, 3 * size + 1})


# --- arguments go where they are declared to go


@pytest.mark.parametrize("method", ["one_to_all", "all_to_all"])
def test_a_plain_argument_is_broadcast_whatever_its_length(calls: Waited, method: str) -> None:
    n = calls.size
    values = [list(range(n)), tuple(range(n)), list(range(n + 1)), [], 7, None, "x" * n, {"a": 1}, numbers(n)]
    for value in values:
        for results in (getattr(calls, method)(value, 3), getattr(calls, method)(scale=3, value=value)):
            assert [(rank, scale) for rank, _, scale in results] == [(rank, 3) for rank in range(n)]
            assert all(same(got, value) and type(got) is type(value) for _, got, _ in results)


def test_an_open_argument_goes_as_the_call_says(calls: Waited) -> None:
    n = calls.size
    values = [i * i for i in range(n)]
    assert calls.all_to_all(PerRank(values), scale=Broadcast(values)) == [(i, i * i, values) for i in range(n)]
    parts = [batch["number"].tolist() for _, batch, _ in calls.all_to_all(Shard(numbers(2 * n)))]
    assert parts == [[2 * i, 2 * i + 1] for i in range(n)]
    parts = [len(batch) for _, batch, _ in calls.all_to_all(Shard(numbers(n + 1), uneven="allow"))]
    assert sum(parts) == n + 1 and max(parts) - min(parts) <= 1


@pytest.mark.parametrize("kind_of_list", [list, tuple])
def test_per_rank_values_go_one_to_each(calls: Waited, kind_of_list: Any) -> None:
    n = calls.size
    values = kind_of_list(f"value {i}" for i in range(n))
    assert calls.dp_compute(values, kind_of_list(range(n))) == [(i, f"value {i}", i) for i in range(n)]
    assert calls.dp_compute(value=values) == [(i, f"value {i}", 1) for i in range(n)]
    assert calls.declared([0], own=values) == [([0], value) for value in values]


def test_values_that_are_not_one_per_rank_are_refused(calls: Waited) -> None:
    n = calls.size
    for wrong in ([0] * (n - 1), (0,) * (n + 1)):
        with pytest.raises(
            CallRefused, match=f"dp_compute: value is per rank, expected {n} values, given {len(wrong)}"
        ):
            calls.dp_compute(wrong)
    for scalar in (7, "x" * n, numbers(n), {i: i for i in range(n)}):
        with pytest.raises(CallRefused, match=f"value is per rank, expected list or tuple of {n}, given"):
            calls.dp_compute(value=scalar)


def test_a_batch_of_any_size_is_cut_and_joined(calls: Waited) -> None:
    for num_samples in sizes_around(calls.size):
        given, untouched = numbers(num_samples), numbers(num_samples)
        for result in (calls.dp_compute_proto(given), calls.dp_compute_proto(batch=given)):
            assert same(result, doubled(untouched)) and result.names == ["number", "text"]
        assert same(given, untouched) and given.names == ["number", "text"] and given.meta == untouched.meta


def test_results_by_rank_are_never_trimmed(calls: Waited) -> None:
    for num_samples in sizes_around(calls.size):
        counted = calls.dp_compute_metric(numbers(num_samples))
        assert len(counted) == calls.size and len({count["rows"] for count in counted}) == 1
        assert sum(count["samples"] for count in counted) == num_samples


def test_a_function_goes_to_every_rank(calls: Waited) -> None:
    for num_samples in sizes_around(calls.size):
        assert same(calls.dp_compute_proto_with_func(doubled, numbers(num_samples)), doubled(numbers(num_samples)))
    with pytest.raises(CallRefused, match="function is a function to be run, expected a callable, given Batch"):
        calls.dp_compute_proto_with_func(numbers(1), numbers(1))


def test_only_a_batch_is_sharded(calls: Waited) -> None:
    for wrong in ([0] * calls.size, (0,), 7, np.zeros(calls.size), None):
        with pytest.raises(CallRefused, match=r"batch is sharded, expected a Batch, given (list|tuple|int|nda|None)"):
            calls.dp_compute_proto(wrong)


def test_arguments_that_are_sharded_together_are_cut_alike(calls: Waited) -> None:
    for num_samples in sizes_around(calls.size):
        other = Batch(columns={"more": np.arange(num_samples) * 10})
        assert calls.two(numbers(num_samples), other)["sum"].tolist() == [11 * i for i in range(num_samples)]
        assert calls.two(numbers(num_samples), scale=2)["sum"].tolist() == list(range(num_samples))
    with pytest.raises(CallRefused, match=r"two: .* as many samples in each, given {'batch': 2, 'other': 3}"):
        calls.two(numbers(2), numbers(3))
    with pytest.raises(CallRefused, match=r"one `uneven`, given {'batch': 'pad', 'other': 'allow'}"):
        calls.two_kinds(numbers(2), numbers(2))


def test_rows_made_of_padding_are_dropped_however_they_come_back(calls: Waited) -> None:
    for num_samples in sizes_around(calls.size):
        batch, whole = numbers(num_samples), list(range(num_samples))
        assert calls.marked(batch)["number"].tolist() == [i for i in whole for _ in range(2)]
        assert calls.listed(batch) == [str(i) for i in whole]
        assert calls.as_array(batch).tolist() == whole
        parts = calls.batches(batch)
        assert [i for part in parts for i in part["number"].tolist()] == whole
        assert all(part.names == ["number", "text"] for part in parts) and len(parts) == calls.size
        own = [len(words) for words in calls.lists(batch)]
        assert own == [-(-num_samples // calls.size)] * calls.size, "a list of the rank's own stays"


def test_rows_that_look_like_padding_are_an_error(calls: Waited) -> None:
    assert calls.unmarked(numbers(calls.size))["number"].tolist() == [i for i in range(calls.size) for _ in range(2)]
    if calls.size > 1:
        with pytest.raises(ResultRefused, match=r"unmarked: a part of 2 samples, .* became 4: return a Batch that"):
            calls.unmarked(numbers(calls.size + 1))


def test_an_uneven_batch_is_refused_where_it_is_declared_so(calls: Waited) -> None:
    n = calls.size
    assert same(calls.even(numbers(2 * n)), numbers(2 * n))
    if n > 1:
        with pytest.raises(CallRefused, match=rf"even: batch .* expected a multiple of {n} samples, given {n + 1}$"):
            calls.even(numbers(n + 1))
        with pytest.raises(CallRefused, match="that are padded already: unpad them"):
            calls.dp_compute_proto(numbers(n).pad(n + 1))
    padded = numbers(n + 1).pad(2 * n)
    assert len(calls.batches(padded)[-1]) == 2, "what the caller padded is the caller's to unpad"


def test_results_are_the_same_on_any_number_of_ranks(calls: Waited) -> None:
    for num_samples in (0, 1, 5, 12):
        total = float(num_samples * (num_samples - 1) / 2)
        assert calls.total(numbers(num_samples), weight=2.0) == {"sum": 2 * total, "n": num_samples}
        assert calls.weighted_total(numbers(num_samples)) == {"sum": total}


def test_tensors_and_meta_travel(group: Group) -> None:
    n = group.size
    column = torch.arange(6 * n, dtype=torch.bfloat16).reshape(n, 6)
    batch = Batch(columns={"tensor": column, "number": np.arange(n)}, values={"text": [{} for _ in range(n)]})
    for i, (_, part, _) in enumerate(group.all_to_all(Shard(Batch(batch.columns, batch.values, {"a": {1: "x"}})))):
        assert torch.equal(part["tensor"], column[i : i + 1]) and part.meta == {"a": {1: "x"}}


def test_a_large_batch_travels(group: Group) -> None:
    batch = Batch(columns={"number": np.arange(240_000), "tensor": torch.arange(240_000)})
    assert [part.columns["tensor"].sum().item() for part in group.batches(batch)] == [
        part.columns["number"].sum() for part in batch.chunk(group.size)
    ]


# --- where it runs, and what comes back


def test_rank_zero_runs_alone(calls: Waited) -> None:
    assert calls.lead() == (0, None)
    assert calls.lead([1, 2]) == (0, [1, 2]) and calls.lead(Broadcast(3)) == (0, 3)
    for intent in (Shard(numbers(1)), PerRank([1])):
        with pytest.raises(CallRefused, match="lead runs on rank zero alone, expected a plain value for value, given"):
            calls.lead(intent)


def test_a_split_of_ones_own(calls: Waited) -> None:
    n = calls.size
    assert calls.dealt(list(range(2 * n))) == [*range(0, 2 * n, n), *(i for k in range(1, n) for i in (k, k + n))]
    with pytest.raises(CallRefused, match="dealt: values are dealt, expected a list"):
        calls.dealt(7)
    with pytest.raises(CallRefused, match=f"its split made {n - 1} parts, expected {n}"):
        calls.dealt_wrongly([1, 2, 3])


def test_a_direct_method_is_called_on_one_worker(calls: Waited) -> None:
    with pytest.raises(CallRefused, match=r"direct is a direct rollout method.*call it as group.on\(rank\)\.direct"):
        calls.direct(1)
    for rank in range(calls.size):
        assert calls.on(rank).direct([1]) == (rank, [1])
    with pytest.raises(CallRefused, match=f"has ranks 0 to {calls.size - 1}, not {calls.size}"):
        calls.on(calls.size)
    with pytest.raises(AttributeError, match="'lead' is not a direct rollout method"):
        calls.on(0).lead()


def test_results_that_do_not_join_are_named(calls: Waited) -> None:
    with pytest.raises(ResultRefused, match="not_rows: ranks returned int, expected batches, arrays or lists"):
        calls.not_rows()
    if calls.size > 1:
        with pytest.raises(ResultRefused, match=r"unlike: ranks returned \['list', 'tuple'\], which do not join"):
            calls.unlike()


def test_wrong_calls_are_refused(group: Group) -> None:
    with pytest.raises(CallRefused, match="one_to_all: got an unexpected keyword argument 'size'"):
        group.one_to_all(1, size=2)
    with pytest.raises(CallRefused, match="one_to_all: missing a required argument: 'value'"):
        group.one_to_all()
    with pytest.raises(CallRefused, match="value is declared as Broadcast, expected a plain value, given Shard"):
        group.one_to_all(Shard(numbers(2)))
    with pytest.raises(CallRefused, match=r"value is a Shard without a value, expected Shard\(value\)"):
        group.all_to_all(Shard())
    with pytest.raises(AttributeError, match="'_doubled' is not a remote method of probe"):
        group._doubled(1)


# --- meshes


def test_lists_over_data_parallel_ranks(meshed: Waited) -> None:
    mesh = meshed.mesh
    num_dp, last = 1 + max(dp for dp, _, _ in mesh), max(pp for _, _, pp in mesh)
    by_dp = [f"for {dp}" for dp in range(num_dp)]
    expected = [(mesh.index((dp, 0, last)), f"for {dp}", dp) for dp in range(num_dp)]
    assert meshed.megatron_compute(by_dp, scale=tuple(range(num_dp))) == expected
    with pytest.raises(CallRefused, match=f"value is per rank, expected {num_dp} values, given {num_dp + 1}"):
        meshed.megatron_compute([*by_dp, "one more"])


def test_lists_over_stages_as_if_they_were_data_parallel(meshed: Waited) -> None:
    mesh = meshed.mesh
    places = sorted((dp, pp) for dp, tp, pp in mesh if tp == 0)
    values = [f"for {dp}, {pp}" for dp, pp in places]
    expected = [(mesh.index((dp, 0, pp)), f"for {dp}, {pp}", 1) for dp, pp in places]
    assert meshed.megatron_pp_as_dp(values) == expected


def test_results_of_the_stages(meshed: Waited) -> None:
    mesh = meshed.mesh
    value = [0] * meshed.size
    stages = range(1 + max(pp for _, _, pp in mesh))
    assert meshed.megatron_pp_only(value) == [(mesh.index((0, 0, pp)), value, 1) for pp in stages]


@pytest.mark.parametrize("method", ["megatron_compute_proto", "megatron_pp_as_dp_proto"])
def test_batches_over_a_mesh(meshed: Waited, method: str) -> None:
    for num_samples in sizes_around(meshed.size):
        result = getattr(meshed, method)(batch=numbers(num_samples))
        assert same(result, doubled(numbers(num_samples)))


def test_a_mesh_is_asked_for_once() -> None:
    group = Group(LocalBackend({"probe": Role(Probe, {"mesh": MESHES["dp2"]})}, 2), "probe")
    with group:
        assert group.num_asked() == [0, 0]
        for _ in range(3):
            group.megatron_compute([1, 2])
        assert group.num_asked() == [1, 1]


@pytest.mark.parametrize(
    ("mesh", "why"),
    [
        ([(0, 0, 0), (2, 0, 0)], r"has no worker of dp rank 1: worker 0 is dp 0, tp 0, pp 0; 1 is dp 2, tp 0, pp 0"),
        ([(0, 0, 0), (0, 0, 0)], r"collects dp rank 0 from workers \[0, 1\], expected exactly one"),
        ([(0, 1, 0), (0, 2, 0)], r"collects dp rank 0 from workers \[\], expected exactly one"),
        ([(0, 0, 0), (1, 0, 1)], r"collects dp rank 0 from workers \[\], expected exactly one"),
    ],
)
def test_what_is_no_mesh_is_refused(mesh: list[tuple[int, int, int]], why: str) -> None:
    with pytest.raises(CallRefused, match=why):
        Group(LocalBackend({"probe": Role(Probe, {"mesh": mesh})}, 2), "probe").megatron_compute([1, 2])


# --- futures


def test_a_future_is_an_argument(group: Group, later: Group) -> None:
    for num_samples in sizes_around(group.size):
        once = later.dp_compute_proto(numbers(num_samples))
        assert same(group.dp_compute_proto(once), doubled(doubled(numbers(num_samples))))
        assert once.done() and same(once.result(), doubled(numbers(num_samples)))
    value = group.note([1, 2])
    assert group.all_to_all(Broadcast(value))[0] == (0, [[1, 2]] * group.size, 1)
    group.noted()


def test_what_a_future_turns_out_to_be_is_checked_too(group: Group, later: Group) -> None:
    wrong = group.note(7)
    with pytest.raises(CallRefused, match="expected a Batch, given list"):
        value_of(later.dp_compute_proto(wrong))
    group.noted()


@pytest.fixture(scope="module", params=apart(), ids=named)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param[0])


@pytest.fixture
def lasting(started: Callable[[str, int], Backend], kind: str) -> Group:
    """Three workers that no test ends."""
    return Group(started(kind, NUM_APART), "probe")


@pytest.fixture
def mortal(kind: str) -> Iterator[Group]:
    """Three workers of the test's own."""
    with Group(APART[kind]({"probe": Role(Probe)}, NUM_APART), "probe") as group:
        yield group


class TestApart:
    """What only workers in processes of their own can do."""

    def test_calls_wait_for_what_they_are_given_and_are_not_overtaken(self, lasting: Group, gate: Path) -> None:
        first = lasting.held(gate, 1, "first")
        with gate.open("w"):
            second, third = lasting.note(first), lasting.note("third")
            assert not first.done() and not second.done() and not third.done()
        assert second.result(TIMEOUT_S) == [["first"] * 3] * 3
        assert third.result(TIMEOUT_S) == ["third"] * 3
        assert lasting.noted() == [["first", ["first"] * 3, "third"]] * 3

    def test_a_future_is_an_argument_of_other_groups(self, lasting: Group, kind: str, gate: Path) -> None:
        with Group(APART[kind]({"probe": Role(Probe)}, 2), "probe") as other, LocalGroup(Probe) as local:
            first = lasting.held(gate, 1, [7])
            with gate.open("w"):
                second = other.note(first)
                third = local.note(second)
                assert not third.done()
            assert third.result(TIMEOUT_S) == [[[[7]] * 3] * 2]
        lasting.noted()

    def test_what_waits_for_its_turn_is_refused_at_once(self, lasting: Group, gate: Path) -> None:
        first = lasting.held(gate, 1, [7])
        with gate.open("w"):
            lasting.note(first)
            with pytest.raises(CallRefused, match="expected a Batch, given int"):
                lasting.even(7)
        assert lasting.noted() == [[[7], [[7]] * 3]] * 3

    def test_a_call_that_was_not_sent_can_be_cancelled(self, lasting: Group, gate: Path) -> None:
        first = lasting.held(gate, 0, "first")
        with gate.open("w"):
            second = lasting.note(first)
            assert second.cancel() and second.done()
        with pytest.raises(CancelledError):
            second.result(TIMEOUT_S)
        assert first.result(TIMEOUT_S) == ["first"] * 3 and not first.cancel()
        assert lasting.noted() == [["first"]] * 3

    def test_a_cancelled_call_is_carried_out_on_every_rank(self, lasting: Group, gate: Path) -> None:
        first = lasting.held(gate, 2, "first")
        with gate.open("w"):
            assert first.cancel() and first.done()
            with pytest.raises(CancelledError, match=r"probe\.held was cancelled"):
                first.result()
            with pytest.raises(CancelledError):
                lasting.note(first).result(TIMEOUT_S)
        assert lasting.noted() == [["first"]] * 3

    def test_every_wait_has_a_deadline(self, lasting: Group, gate: Path) -> None:
        call = lasting.held(gate, 1, "late")
        with gate.open("w"):
            late = _timed_out(call, missing=(1,))
            assert re.fullmatch(r"the driver waited \d\.\d+ s for probe.held, held by rank 1", str(late))
            assert (late.role, late.method) == ("probe", "held")
            waiting = lasting.note(call)
            with pytest.raises(CallTimedOut, match="held by earlier calls on the same workers"):
                waiting.result(timeout=0.01)
        assert call.result(TIMEOUT_S) == ["late"] * 3

    def test_a_method_has_a_deadline(self, lasting: Group, gate: Path) -> None:
        call = lasting.held_too_long(gate, 2)
        with gate.open("w"):
            with pytest.raises(CallTimedOut, match=r"waited .* for probe\.held_too_long, held by rank.* 2") as caught:
                call.result()
            assert 2 in caught.value.missing
            with pytest.raises(CallTimedOut):
                call.result(TIMEOUT_S)

    def test_a_worker_that_is_killed_in_mid_call(self, mortal: Group, gate: Path) -> None:
        end = "SIGKILL" if isinstance(mortal.backend, SpawnedBackend) else DEAD
        pids = mortal.pid()
        call, after = mortal.held(gate, 1), mortal.note(1)
        with gate.open("w"):
            os.kill(pids[1], signal.SIGKILL)
            with pytest.raises(WorkerLost, match=rf"probe\.held lost its worker of rank 1: {end}") as caught:
                call.result(TIMEOUT_S)
        assert (caught.value.rank, caught.value.role, caught.value.method) == (1, "probe", "held")
        with pytest.raises(WorkerLost, match=r"probe\.note lost"):
            after.result(TIMEOUT_S)
        with pytest.raises(WorkerLost, match=r"probe\.pid lost its worker of rank 1"):
            mortal.pid()
        assert mortal.lead() == (0, None), "where it is not needed it is not missed"

    def test_the_end_of_a_worker_explains_the_errors_of_others(
        self, mortal: Group, gate: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(future, "PEER_S", TIMEOUT_S)
        end = "SIGKILL" if isinstance(mortal.backend, SpawnedBackend) else DEAD
        pids = mortal.pid()
        call = mortal.miss(gate, 1)
        with gate.open("w"):
            while not call.done():
                os.sched_yield()
            os.kill(pids[1], signal.SIGKILL)
            with pytest.raises(WorkerLost, match=rf"probe\.miss lost its worker of rank 1: {end}"):
                call.result(TIMEOUT_S)

    def test_a_worker_that_others_miss_may_live(self, lasting: Group, gate: Path) -> None:
        call = lasting.miss(gate, 1)
        with gate.open("w"):
            while not call.done():
                os.sched_yield()
        with pytest.raises(RemoteError, match="PeerMissed: rank 0 misses rank 1"):
            call.result(TIMEOUT_S)

    def test_nothing_is_sent_when_a_worker_has_ended(self, mortal: Group) -> None:
        end = "exit 3" if isinstance(mortal.backend, SpawnedBackend) else DEAD
        with pytest.raises(WorkerLost, match=rf"probe\.leave lost its worker of rank 2: {end}"):
            mortal.leave(2, 3)
        with pytest.raises(WorkerLost):
            mortal.note(1)
        assert mortal.on(0).direct(1) == (0, 1)
        assert mortal.lead() == (0, None)

    def test_closing_ends_what_is_running(self, mortal: Group, gate: Path) -> None:
        call, pids = mortal.held(gate, 1), mortal.pid
        with gate.open("w"):
            mortal.close()
            with pytest.raises(WorkerLost, match="the group was closed"):
                call.result(TIMEOUT_S)
        with pytest.raises(WorkerLost):
            pids()

    def test_a_constructor_that_fails(self, kind: str) -> None:
        with pytest.raises(
            RemoteError, match=r"probe\.__init__ failed on rank \d: ValueError: no such model"
        ) as caught:
            APART[kind]({"probe": Role(Probe, {"fails": "no such model"})}, 2)
        assert isinstance(caught.value.__cause__, ValueError)

    def test_what_cannot_be_sent_is_refused(self, lasting: Group) -> None:
        with pytest.raises(CallRefused, match=r"probe\.all_to_all: value cannot be sent"):
            lasting.all_to_all(threading.Lock())
        with pytest.raises(CallRefused, match=r"value cannot be sent .*pass it as an argument of its own"):
            lasting.all_to_all([lasting.note(1)])
        lasting.noted()
        with pytest.raises(RemoteError, match=r"unsendable failed on rank \d: .*lock"):
            lasting.unsendable()


# --- errors


def _timed_out(call: Any, *, missing: tuple[int, ...]) -> CallTimedOut:
    """What a short wait for it says, once the other ranks have answered."""
    give_up = time.monotonic() + TIMEOUT_S
    while True:
        with pytest.raises(CallTimedOut) as caught:
            call.result(timeout=0.01)
        if caught.value.missing == missing:
            return caught.value
        assert time.monotonic() < give_up, caught.value


def test_an_error_says_where_it_comes_from(group: Group) -> None:
    rank = group.size - 1
    with pytest.raises(RemoteError, match=rf"probe\.fail failed on rank {rank}: ValueError: rank {rank} of") as caught:
        group.fail(rank, "value")
    error = caught.value
    assert (error.rank, error.role, error.method, error.kind) == (rank, "probe", "fail", "ValueError")
    assert "group_workers.py" in error.remote_traceback and "does not like it" in error.remote_traceback
    assert isinstance(error.__cause__, ValueError)
    assert "".join(traceback.format_exception(error)).count("in fail") == 1, "shown, and once"
    assert not error.hopeless and group.lead() == (0, None), "the group goes on"


def test_an_error_keeps_what_it_says_of_itself(group: Group) -> None:
    with pytest.raises(RemoteError, match="Hopeless: nothing helps") as caught:
        group.fail(0, "hopeless")
    assert caught.value.hopeless


def test_an_error_that_cannot_be_pickled_is_raised(group: Group) -> None:
    with pytest.raises(RemoteError, match="Unpicklable: 1 and 2"):
        group.fail(0, "unpicklable")


def test_an_error_is_the_result_of_a_future_and_of_what_follows_from_it(group: Group) -> None:
    with pytest.raises(RemoteError, match="AttributeError"):
        value_of(group.held(gate="no path", rank=0))
    with pytest.raises(RemoteError, match=r"probe\.held failed on rank 0"):
        value_of(group.note(group.held(gate="no path", rank=0)))
    group.noted()


def test_an_error_without_a_reader_is_logged(group: Group, later: Group, caplog: pytest.LogCaptureFixture) -> None:
    later.fail(0, "value")
    later.one_to_all(1)
    seen = later.fail(0, "hopeless")
    with pytest.raises(RemoteError):
        seen.result(TIMEOUT_S)
    del seen
    assert group.lead() == (0, None)
    gc.collect()  # in one process, an error holds the frames that it came through
    logged = [record.getMessage() for record in caplog.records]
    assert len(logged) == 1 and "probe-later.fail failed on rank 0, no caller took its result:" in logged[0]
    assert "ValueError: rank 0 of" in logged[0]
