"""Who lives where, and the numbers of what does not fit; known before any cluster is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.cluster.pools import parts_of
from penstock.cluster.seats import Seat, seating
from penstock.config import ConfigError, default_config
from penstock.config.cluster import ClusterConfig, PoolConfig
from penstock.ports import ProcessSpec
from penstock.processes.layout import stages

HERE = ["actor", "rollout", "environment"]


def specs(*overrides: str) -> list[ProcessSpec]:
    return [spec for stage in stages(default_config(overrides)) for spec in stage]


def config(**pools: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"pools": pools})


def test_processes_spread_over_the_nodes_of_their_pool() -> None:
    found = seating(
        config(
            learn={"roles": ["actor", "critic"], "nodes": 2, "slots_per_node": 4},
            play={"roles": ["rollout", "environment"], "nodes": [{"slots": 1}, {"slots": 4}]},
        ),
        specs("trainer.ranks=3", "rollout.servers=2", "env.workers=2"),
    )
    assert found.seats == {
        "trainer-0": Seat("learn", 0, 0),
        "rollout-0": Seat("play", 1, 0),
        "rollout-1": Seat("play", 1, 1),
        "env-0": Seat("play", 1, 2),
        "env-1": Seat("play", 0, 0),
    }
    assert found.bundles == {"learn": [[3, 1], [1, 1, 1, 1]], "play": [[1], [1, 1, 1, 1]]}


@pytest.mark.parametrize(
    ("nodes", "ranks", "shares"),
    [
        ([8], 8, [8]),
        ([2, 8], 8, [8]),
        ([4, 4], 8, [4, 4]),
        ([2, 4, 4], 9, [4, 4, 1]),
        ([1, 1, 1], 2, [1, 1]),
        ([2, 2], 5, [2, 3]),
    ],
)
def test_ranks_lie_on_as_few_nodes_as_have_the_slots(nodes: list[int], ranks: int, shares: list[int]) -> None:
    pool = PoolConfig.model_validate({"nodes": [{"slots": slots} for slots in nodes]})
    assert pool.spread(ranks) == shares


def test_ranks_on_several_nodes_have_a_keeper_on_each_but_the_first() -> None:
    pools = {"all": {"roles": HERE, "nodes": 3, "slots_per_node": 2}}
    spread = [f"cluster.pools={pools}", "cluster.address=auto", "trainer.ranks=3"]
    found = seating(config(**pools), specs(*spread))
    assert found.seats == {
        "trainer-0": Seat("all", 0, 0),
        "ranks-1": Seat("all", 1, 0),
        "rollout-0": Seat("all", 2, 0),
        "env-0": Seat("all", 1, 1),
    }
    assert found.bundles == {"all": [[2], [1, 1], [1, 1]]}


def test_servers_that_take_turns_with_the_trainer_live_in_its_slots() -> None:
    pools = {"all": {"roles": HERE, "nodes": 2, "slots_per_node": 3}}
    given = [f"cluster.pools={pools}", "cluster.address=auto", "trainer.ranks=4", "rollout.servers=5"]
    found = seating(config(**pools), specs(*given), in_turns=True)
    first, second = Seat("all", 0, 0), Seat("all", 1, 0)
    assert found.seats == {
        "trainer-0": first,
        "ranks-1": second,
        "rollout-0": first,
        "rollout-1": first,
        "rollout-2": first,
        "rollout-3": second,
        "rollout-4": first,
        "env-0": Seat("all", 1, 1),
    }
    assert found.bundles == {"all": [[3], [1, 1, 1]]}


def test_servers_without_a_trainer_have_slots_of_their_own() -> None:
    pools = config(all={"roles": HERE, "slots_per_node": 3})
    found = seating(pools, specs("pipeline=rollout", "rollout.servers=2"), in_turns=True)
    assert {name: seat.bundle for name, seat in found.seats.items()} == {"rollout-0": 0, "rollout-1": 1, "env-0": 2}


def test_servers_of_another_pool_have_slots_of_their_own() -> None:
    pools = config(learn={"roles": ["actor"]}, play={"roles": ["rollout"]})
    found = seating(pools, specs(), in_turns=True)
    assert found.seats == {"trainer-0": Seat("learn", 0, 0), "rollout-0": Seat("play", 0, 0)}


def test_a_pool_where_nobody_lives_is_not_asked_for() -> None:
    pools = config(learn={"roles": ["actor"]}, play={"roles": ["environment", "reward"], "slots_per_node": 2})
    found = seating(pools, specs("pipeline=rollout"))
    assert found.seats.keys() == {"env-0"}
    assert [(part.pool, part.bundles) for part in parts_of(pools, found.bundles)] == [("play", (1, 1))]


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.ranks=4"],
        ["trainer.ranks=2", "trainer.split=[reference]", "trainer.objective.kl_coef=0.1"],
    ],
)
def test_a_trainer_of_several_processes_has_the_devices_of_all_its_slots(overrides: Sequence[str]) -> None:
    pools = config(learn={"roles": ["actor", "reference"], "slots_per_node": 4, "accelerators": 1.0, "cpus": 2.0})
    (part,) = parts_of(pools, seating(pools, specs(*overrides)).bundles)
    assert [part.wanted_by(num_slots) for num_slots in part.bundles] == [{"CPU": 8.0, "GPU": 4.0}]


@pytest.mark.parametrize(
    ("pools", "overrides", "message"),
    [
        ({}, [], "cluster.address is given without cluster.pools"),
        (
            {"all": {"roles": HERE, "nodes": 2, "slots_per_node": 2}},
            ["rollout.servers=3", "env.workers=2", "trainer.ranks=2"],
            "trainer.ranks and trainer.split 2 + rollout.servers 3 + env.workers 2 need 7 slots, and 2 nodes have 4",
        ),
        (
            {"learn": {"roles": ["actor"], "nodes": 2, "slots_per_node": 2}},
            ["trainer.ranks=5"],
            "trainer.ranks and trainer.split 5 need 5 slots, and 2 nodes have 4: raise nodes or slots_per_node",
        ),
        (
            {"learn": {"roles": ["actor"]}, "other": {"roles": ["critic"]}},
            [],
            "cluster.pools.other: role critic lives in the processes of role actor, which is in pool learn",
        ),
        (
            {"score": {"roles": ["reward"]}},
            [],
            "cluster.pools.score: role reward lives in the processes of role environment, which is in no pool",
        ),
    ],
)
def test_what_does_not_fit_is_said_with_the_numbers(
    pools: dict[str, Any], overrides: Sequence[str], message: str
) -> None:
    given = [f"cluster.pools={pools}", "cluster.address=auto", *overrides]
    with pytest.raises(ConfigError) as refused:
        seating(config(**pools), specs(*given))
    assert message in str(refused.value)
