"""Declarations of remote methods, and groups in this process."""

import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from group_workers import NoMesh, Probe, deal, numbers
from hypothesis import given
from hypothesis import strategies as st

from penstock.groups.backend import Call, Handle
from penstock.groups.batch import Batch
from penstock.groups.collect import concat, each, first
from penstock.groups.errors import CallRefused, ResultRefused
from penstock.groups.group import Group
from penstock.groups.intent import Broadcast, PerRank, Shard
from penstock.groups.local import LocalBackend, LocalGroup
from penstock.groups.method import remote_method, remote_methods
from penstock.groups.modes import Custom, Execute, Mode
from penstock.groups.role import Rank, Role
from penstock.groups.spawned import SpawnedGroup


def update(self: Any, batch: Batch, scale: float = 1.0) -> Batch: ...


def alone(self: Any) -> None: ...


SHARDED_MODES = [mode for mode in Mode if isinstance(mode.value.intent, Shard | PerRank)]


@pytest.mark.parametrize(
    "mode", [*SHARDED_MODES, Mode.MEGATRON_PP_ONLY, Mode.DIRECT_ROLLOUT_METHOD, Custom(deal, each)]
)
def test_a_mode_for_all_ranks_does_not_run_on_rank_zero(mode: Any) -> None:
    with pytest.raises(TypeError, match="update runs on rank zero alone"):
        remote_method(mode, execute=Execute.RANK_ZERO)(update)


@pytest.mark.parametrize("mode", [Mode.ONE_TO_ALL, Mode.ALL_TO_ALL])
def test_a_mode_for_whole_arguments_does(mode: Mode) -> None:
    class Marked:
        update = remote_method(mode, execute=Execute.RANK_ZERO)(update)

    assert remote_methods(Marked)["update"].execute is Execute.RANK_ZERO


@pytest.mark.parametrize(
    ("declared", "why"),
    [
        ({"dispatch": {"batch": Shard()}, "execute": Execute.RANK_ZERO}, "batch cannot be sharded or per rank"),
        ({"dispatch": {"batch": PerRank()}, "execute": Execute.RANK_ZERO}, "batch cannot be sharded or per rank"),
        ({"over": "dp", "execute": Execute.RANK_ZERO}, "its mode needs all ranks"),
        ({"collect": concat, "execute": Execute.RANK_ZERO}, "there is one result, and nothing to collect"),
        ({"dispatch": {"batches": Shard()}}, "update has no argument 'batches'"),
        ({"dispatch": {"self": Broadcast()}}, "update has no argument 'self'"),
        ({"dispatch": {"batch": Shard(numbers(2))}}, "batch is declared with a value"),
    ],
)
def test_impossible_declarations_fail_when_declared(declared: Any, why: str) -> None:
    with pytest.raises(TypeError, match=why):
        remote_method(**declared)(update)


@pytest.mark.parametrize("more", [{"collect": first}, {"dispatch": {"batch": Shard()}}, {"over": "dp"}])
def test_a_mode_says_it_all(more: Any) -> None:
    with pytest.raises(TypeError, match=r"DP_COMPUTE says how to dispatch and collect"):
        remote_method(Mode.DP_COMPUTE, **more)


def test_a_remote_method_is_no_coroutine() -> None:
    async def late(self: Any) -> None: ...

    with pytest.raises(TypeError, match="late is `async def`, and a worker has no event loop"):
        remote_method()(late)


def test_a_remote_method_names_its_arguments() -> None:
    def open_ended(self: Any, *values: int) -> None: ...

    with pytest.raises(TypeError, match="open_ended: no \\*args"):
        remote_method()(open_ended)
    with pytest.raises(TypeError, match=r"has no first argument, which .*WITH_FUNC needs"):
        remote_method(Mode.DP_COMPUTE_PROTO_WITH_FUNC)(alone)


def test_there_are_twelve_modes() -> None:
    assert len(Mode) == 12


def test_a_mesh_needs_workers_that_know_their_place() -> None:
    with pytest.raises(TypeError, match=r"NoMesh.update is called over dp: NoMesh needs a method mesh_rank\(\)"):
        LocalGroup(NoMesh)


@pytest.mark.parametrize("name", ["close", "role", "backend", "workers"])
def test_a_method_does_not_hide_what_the_group_has(name: str) -> None:
    class Hiding:
        def __init__(self, rank: Rank) -> None: ...

    def method(self: Hiding) -> None: ...

    setattr(Hiding, name, remote_method()(method))
    with pytest.raises(
        TypeError, match=rf"Hiding\.{name} cannot be a remote method, because a group has this attribute: rename it"
    ):
        LocalGroup(Hiding)


def test_a_group_has_at_least_one_worker() -> None:
    with pytest.raises(ValueError, match="at least one worker, not 0"):
        LocalGroup(Probe, 0)
    with pytest.raises(TypeError, match="is not a class"):
        LocalGroup(numbers)  # type: ignore[arg-type]


def test_what_a_constructor_raises_in_this_process_comes_as_it_is() -> None:
    with pytest.raises(ValueError, match=r"^no such model$"):
        LocalGroup(Probe, 2, fails="no such model")


def test_a_class_of_the_script_that_runs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Probe, "__module__", "__main__")
    with pytest.raises(TypeError, match=r"Probe is defined in the script that runs.*move it into a module"):
        SpawnedGroup(Probe)


def test_nothing_runs_when_a_call_is_refused() -> None:
    group = LocalGroup(Probe, 3)
    with pytest.raises(CallRefused, match=r"even: batch is sharded over 3 parts, expected a multiple of 3.*given 4"):
        group.even(numbers(4))
    with pytest.raises(CallRefused):
        group.note()
    assert [worker.log for worker in group.workers] == [[], [], []]


@given(size=st.integers(1, 6), num_samples=st.integers(0, 20), factor=st.integers(-3, 3))
def test_any_number_of_ranks_computes_what_one_does(size: int, num_samples: int, factor: int) -> None:
    def scaled(batch: Batch) -> Batch:
        return Batch(columns={"number": batch["number"] * factor})

    result = LocalGroup(Probe, size).dp_compute_proto_with_func(scaled, numbers(num_samples))
    assert np.array_equal(result["number"], np.arange(num_samples) * factor)
    assert LocalGroup(Probe, size).weighted_total(numbers(num_samples)) == {"sum": num_samples * (num_samples - 1) / 2}


def test_only_results_that_count_are_asked_for() -> None:
    class Recording(LocalBackend):
        def start(self, calls: Mapping[int, Call]) -> dict[int, Handle]:
            handles = super().start(calls)
            returned.append([handle.result() is not None for handle in handles.values()])
            return handles

    returned: list[list[bool]] = []
    mesh = [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    group = Group(Recording({"probe": Role(Probe, {"mesh": mesh})}, 4), "probe")
    group.megatron_compute([1, 2])
    assert returned == [[True] * 4, [True, False, True, False]], "where they are, and what they made of it"


def test_a_split_of_ones_own_goes_over_a_mesh_too() -> None:
    class Dealing(Probe):
        @remote_method(Custom(deal, each, over="dp"))
        def dealt_over_dp(self, values: list[int]) -> Any:
            return self.rank.index, values

    group = LocalGroup(Dealing, 4, mesh=[(1, 0, 0), (0, 0, 0), (1, 1, 0), (0, 1, 0)])
    assert group.dealt_over_dp([1, 2, 3]) == [(1, [1, 3]), (0, [2])]


def test_ranks_may_return_nothing_to_concatenate_but_not_what_does_not_fit() -> None:
    class Uneven:
        def __init__(self, rank: Rank) -> None:
            self.rank = rank

        @remote_method(collect=concat)
        def found(self, other: str) -> Batch:
            return Batch() if self.rank.index == 0 else Batch(columns={other: np.ones(2)}, meta={"a": 1})

        @remote_method(collect=concat)
        def shaped(self) -> Any:
            return np.ones((1, 2 + self.rank.index))

    group = LocalGroup(Uneven, 3)
    assert len(group.found("same")) == 4 and group.found("same").meta == {"a": 1}
    with pytest.raises(ResultRefused, match="shaped: the results of the ranks do not join: all the input array"):
        group.shaped()


def test_marked_methods_alone_are_remote() -> None:
    assert "dealt" in remote_methods(Probe) and "mesh_rank" not in remote_methods(Probe)


@pytest.mark.parametrize("module", ["spawned", "rank_worker", "fused", "batch"])
def test_groups_do_not_import_torch(module: str) -> None:
    code = f"import sys, penstock.groups.{module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0
