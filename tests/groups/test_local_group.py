import sys
from typing import Any

import numpy as np
import pytest

from penstock.groups.batch import Batch
from penstock.groups.local import LocalGroup
from penstock.groups.method import CallRefused, PerRank, Rank, Shard, add, concat, first, reduce, remote_method


class Worker:
    def __init__(self, rank: Rank, offset: int = 0) -> None:
        self.rank = rank
        self.offset = offset
        self.calls = 0

    @remote_method()
    def echo(self, value: Any, scale: int = 1) -> Any:
        self.calls += 1
        return (self.rank.index, value, scale)

    @remote_method(dispatch={"batch": Shard()}, collect=concat)
    def double(self, batch: Batch) -> Batch:
        self.calls += 1
        return Batch(columns={"number": batch["number"] * 2 + self.offset}, values={"text": batch["text"]})

    @remote_method(dispatch={"batch": Shard(uneven=True)}, collect=reduce(add))
    def total(self, batch: Batch, weight: float = 1.0) -> dict[str, float]:
        return {"sum": float(batch["number"].sum()) * weight, "n": float(len(batch))}

    @remote_method(dispatch={"value": PerRank()})
    def own(self, value: Any) -> Any:
        self.calls += 1
        return value

    @remote_method(execute="rank_zero", collect=first)
    def lead(self) -> int:
        self.calls += 1
        return self.rank.index

    def private(self) -> None: ...


def numbers(num_samples: int) -> Batch:
    return Batch(columns={"number": np.arange(num_samples)}, values={"text": [str(i) for i in range(num_samples)]})


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("per_worker", [0, 1, 2])
def test_shard_and_concat_give_what_one_worker_gives(world_size: int, per_worker: int) -> None:
    batch = numbers(per_worker * world_size)
    result = LocalGroup(Worker, world_size, offset=1).double(batch=batch)
    assert result["number"].tolist() == [2 * i + 1 for i in range(len(batch))]
    assert result["text"] == batch["text"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_samples", [0, 1, 4, 7])
def test_an_uneven_shard_reduces_to_the_same_sum(world_size: int, num_samples: int) -> None:
    result = LocalGroup(Worker, world_size).total(numbers(num_samples), weight=2.0)
    assert result == {"sum": float(num_samples * (num_samples - 1)), "n": float(num_samples)}


def test_an_uneven_batch_is_refused_before_anything_runs() -> None:
    group = LocalGroup(Worker, 3)
    with pytest.raises(
        CallRefused, match=r"double: batch is sharded over 3 workers, expected a multiple of 3.*given 4"
    ):
        group.double(numbers(4))
    assert [worker.calls for worker in group.workers] == [0, 0, 0]


@pytest.mark.parametrize("kind", [list, tuple])
def test_each_rank_gets_its_own(kind: type) -> None:
    assert LocalGroup(Worker, 3).own(kind([1, [2, 3], None])) == [1, [2, 3], None]


@pytest.mark.parametrize(
    ("value", "why"), [([1, 2, 3], "expected 2 entries, given 3"), ("ab", "expected a list, given str")]
)
def test_what_is_not_one_each_is_refused_before_anything_runs(value: Any, why: str) -> None:
    group = LocalGroup(Worker, 2)
    with pytest.raises(CallRefused, match=f"own: value is given per rank, {why}"):
        group.own(value)
    assert [worker.calls for worker in group.workers] == [0, 0]


def test_only_a_batch_is_sharded() -> None:
    with pytest.raises(CallRefused, match="expected a Batch, given list"):
        LocalGroup(Worker, 2).double([1, 2])


@pytest.mark.parametrize("value", [[10, 20], (10, 20), 10, {"a": 1}])
def test_lengths_never_decide(value: Any) -> None:
    assert LocalGroup(Worker, 2).echo(value, scale=3) == [(0, value, 3), (1, value, 3)]


def test_wrong_arguments_are_refused_by_name() -> None:
    with pytest.raises(CallRefused, match="echo: got an unexpected keyword argument 'size'"):
        LocalGroup(Worker, 2).echo(1, size=2)


def test_rank_zero_runs_alone() -> None:
    group = LocalGroup(Worker, 3)
    assert group.lead() == 0
    assert [worker.calls for worker in group.workers] == [1, 0, 0]


def test_unmarked_methods_are_not_exposed() -> None:
    with pytest.raises(AttributeError, match="'private' is not a remote method"):
        LocalGroup(Worker).private()


def test_a_group_has_at_least_one_worker() -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        LocalGroup(Worker, 0)


def test_impossible_declarations_fail_when_declared() -> None:
    with pytest.raises(TypeError, match="cannot be sharded"):
        remote_method(dispatch={"batch": Shard()}, execute="rank_zero")(Worker.double)
    with pytest.raises(TypeError, match="no argument 'batches'"):
        remote_method(dispatch={"batches": Shard()})(Worker.double)

    def open_ended(self: Any, *values: int) -> None: ...

    with pytest.raises(TypeError, match="names all its arguments"):
        remote_method()(open_ended)


def test_groups_do_not_import_torch() -> None:
    import subprocess

    code = "import sys, penstock.groups.local, penstock.groups.batch; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=30).returncode == 0
