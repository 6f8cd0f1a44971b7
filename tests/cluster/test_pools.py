"""Which node holds which part of a pool: nothing over-committed or overlooked, and numbers for what does not fit."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.cluster.pools import DoesNotFit, Node, Part, Placed, fits, parts_of, plan, why_not_held
from penstock.config.cluster import GIB, ClusterConfig


def node(
    number: int,
    *,
    cpus: float = 8,
    gpus: float = 0,
    free: Mapping[str, float] | None = None,
    memory_gib: float = 64,
    labels: Mapping[str, str] | None = None,
) -> Node:
    total = {"CPU": cpus, "GPU": gpus, "memory": memory_gib * GIB}
    return Node(
        node_id=f"{number:08x}",
        address=f"10.0.0.{number}",
        total=total,
        free={**total, **(free or {})},
        labels=labels or {},
    )


def parts(**pools: Any) -> list[Part]:
    return parts_of(ClusterConfig.model_validate({"pools": pools}))


def where(placed: Sequence[Placed]) -> list[tuple[str, str]]:
    """(pool, address) in the order of the ranks."""
    return [(each.part.pool, each.node.address) for each in placed]


def test_ranks_follow_pools_as_configured_and_nodes_by_address() -> None:
    nodes = [node(number, gpus=8) for number in (10, 9, 2)]
    wanted = parts(
        train={"nodes": 2, "slots_per_node": 8, "accelerators": 1.0}, play={"slots_per_node": 4, "cpus": 2.0}
    )
    assert where(plan(wanted, nodes)) == [("train", "10.0.0.2"), ("train", "10.0.0.9"), ("play", "10.0.0.10")]


def test_nodes_that_differ_hold_what_each_can() -> None:
    nodes = [node(1, gpus=2), node(2, gpus=8), node(3, gpus=4, labels={"kind": "fast"})]
    wanted = parts(
        train={"nodes": [{"slots": 8}, {"slots": 2}], "accelerators": 1.0},
        serve={"slots_per_node": 4, "accelerators": 1.0, "labels": {"kind": "fast"}},
    )
    assert where(plan(wanted, nodes)) == [("train", "10.0.0.1"), ("train", "10.0.0.2"), ("serve", "10.0.0.3")]


def test_a_device_may_be_shared() -> None:
    wanted = parts(actor={"accelerators": 0.5, "slots_per_node": 2}, serve={"accelerators": 0.5, "slots_per_node": 2})
    assert where(plan(wanted, [node(1, gpus=2)])) == [("actor", "10.0.0.1"), ("serve", "10.0.0.1")]


@pytest.mark.parametrize(
    ("pool", "message"),
    [
        (
            {"slots_per_node": 8, "accelerators": 1.0, "cpus": 1.0},
            "pool train, node 1: 8 slots, 8 CPU, 8 GPU on one node: fits on no node. "
            "10.0.0.1 (00000001) has 3 of 11 CPU, 7 of 8 GPU; 10.0.0.2 (00000002) has 11 of 11 CPU, 0 of 0 GPU",
        ),
        (
            {"cpus": 0.0, "memory_gib": 100.0},
            "1 slot, 100 GiB memory on one node: fits on no node. 10.0.0.1 (00000001) has 64 GiB of 64 GiB memory;",
        ),
        ({"labels": {"kind": "fast"}}, "on one node with kind=fast: fits on no node. 10.0.0.1 (00000001) has 3 of 11"),
        ({"nodes": 3}, "node 3: 1 slot, 1 CPU on one node: do not all fit at once, each pool on different nodes"),
    ],
)
def test_what_does_not_fit_is_said_with_the_numbers(pool: dict[str, Any], message: str) -> None:
    nodes = [node(1, cpus=11, gpus=8, free={"CPU": 3, "GPU": 7}), node(2, cpus=11)]
    with pytest.raises(DoesNotFit) as refused:
        plan(parts(train=pool), nodes)
    assert message in str(refused.value)


def test_what_is_taken_or_gone_since_it_was_planned_for_is_said_with_the_numbers() -> None:
    chosen = plan(parts(train={"slots_per_node": 8}, play={}), [node(1), node(2, cpus=1)])
    said = why_not_held(chosen, [node(1, free={"CPU": 3})], seconds=60.4)
    assert said == (
        "cluster.pools: pool train, node 1: 8 slots, 8 CPU on one node: 10.0.0.1 (00000001) has 3 of 8 CPU; "
        "pool play, node 1: 1 slot, 1 CPU on one node: 10.0.0.2 is gone. The nodes had room at first, "
        "and then no room for 60 s: wait until other jobs end, or raise cluster.place_timeout_s"
    )


def test_what_is_busy_counts_only_if_it_is_asked_for() -> None:
    nodes = [node(1, gpus=8, free={"GPU": 0})]
    wanted = parts(train={"accelerators": 1.0})
    assert where(plan(wanted, nodes, busy=False)) == [("train", "10.0.0.1")]
    with pytest.raises(DoesNotFit, match="0 of 8 GPU"):
        plan(wanted, nodes)


def test_a_cluster_without_nodes_is_named() -> None:
    with pytest.raises(DoesNotFit, match="no nodes"):
        plan(parts(train={}), [])


def test_a_role_lives_in_one_pool() -> None:
    with pytest.raises(ValidationError, match="role rollout is in a and in b, and a role lives in one pool only"):
        ClusterConfig.model_validate({"pools": {"a": {"roles": ["actor", "rollout"]}, "b": {"roles": ["rollout"]}}})
    config = ClusterConfig.model_validate({"pools": {"a": {"roles": ["actor", "critic"]}, "b": {}}})
    assert (config.pool_of("critic"), config.pool_of("reward")) == ("a", None)


NODES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.booleans()), min_size=1, max_size=4)
POOLS = st.lists(
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), st.integers(0, 1), st.booleans()),
    min_size=1,
    max_size=3,
)


@settings(max_examples=300, deadline=None)
@given(NODES, POOLS)
def test_a_plan_is_found_if_there_is_one_and_takes_no_more_than_there_is(
    machines: list[tuple[int, int, bool]], pools: list[tuple[int, int, int, int, bool]]
) -> None:
    nodes = [
        node(number, cpus=cpus, gpus=gpus, labels={"kind": "fast"} if is_fast else {})
        for number, (cpus, gpus, is_fast) in enumerate(machines, start=1)
    ]
    wanted = parts(
        **{
            f"pool{number}": {
                "nodes": num_nodes,
                "slots_per_node": num_slots,
                "cpus": float(cpus),
                "accelerators": float(gpus),
                "labels": {"kind": "fast"} if needs_fast else {},
            }
            for number, (num_nodes, num_slots, cpus, gpus, needs_fast) in enumerate(pools)
        }
    )
    try:
        found = plan(wanted, nodes)
    except DoesNotFit:
        assert len(nodes) ** len(wanted) > 5000 or not any(
            holds(wanted, chosen) for chosen in itertools.product(nodes, repeat=len(wanted))
        )
        return
    assert sorted((each.part.pool, each.part.index) for each in found) == [(p.pool, p.index) for p in wanted]
    assert holds([each.part for each in found], [each.node for each in found])


def holds(wanted: Sequence[Part], chosen: Sequence[Node]) -> bool:
    """Whether these nodes hold these parts, one each, the parts of a pool on different ones."""
    left = {each.node_id: dict(each.free) for each in chosen}
    used: dict[str, set[str]] = defaultdict(set)
    for part, where in zip(wanted, chosen, strict=True):
        if where.node_id in used[part.pool] or not fits(part, left[where.node_id], where.labels):
            return False
        used[part.pool].add(where.node_id)
        for name, amount in part.wanted.items():
            left[where.node_id][name] -= amount
    return True


def test_many_nodes_are_planned_at_once() -> None:
    nodes = [node(number % 250 + 1, cpus=8, gpus=8) for number in range(250)]
    assert len(plan(parts(train={"nodes": 125, "slots_per_node": 8, "accelerators": 1.0}), nodes)) == 125
