"""Who lives where, and the numbers of what does not fit; known before any cluster is asked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.cluster.pools import Part, parts_of
from penstock.cluster.slot_assignments import SlotAssignment, SlotAssignments
from penstock.config import Config, ConfigError, default_config
from penstock.config.cluster import PoolConfig
from penstock.processes.layout import slots_of

HERE = ["actor", "rollout", "environment"]
TURNS = "scheduler={mode: colocated, max_staleness: 0}"
CRITIC = ["trainer.critic={}", "scheduler.group_filter=[]"]
REFERENCE = ["trainer.objective.kl_coef=0.1"]


def config(*overrides: str, **pools: Any) -> Config:
    return default_config([f"cluster.pools={pools}", "cluster.address=auto", *overrides])


def assigned(*overrides: str, **pools: Any) -> SlotAssignments:
    return slots_of(config(*overrides, **pools))


def parts(*overrides: str, **pools: Any) -> list[Part]:
    found = config(*overrides, **pools)
    return parts_of(found.cluster, slots_of(found).bundles)


def test_processes_spread_over_the_nodes_of_their_pool() -> None:
    found = assigned(
        *("trainer.ranks=3", "rollout.servers=2", "env.workers=2"),
        learn={"roles": ["actor", "critic"], "nodes": 2, "slots_per_node": 4},
        play={"roles": ["rollout", "environment"], "nodes": [{"slots": 1}, {"slots": 4}]},
    )
    assert found.by_process == {
        "trainer-0": SlotAssignment("learn", 0, 0),
        **{f"rank-{number}": SlotAssignment("learn", 0, 0) for number in range(3)},
        "rollout-0": SlotAssignment("play", 1, 0),
        "rollout-1": SlotAssignment("play", 1, 1),
        "env-0": SlotAssignment("play", 1, 2),
        "env-1": SlotAssignment("play", 0, 0),
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


def test_ranks_live_in_the_slots_of_the_trainer_or_of_the_first_of_them_on_their_node() -> None:
    found = assigned("trainer.ranks=3", all={"roles": HERE, "nodes": 3, "slots_per_node": 2})
    assert found.by_process == {
        "trainer-0": SlotAssignment("all", 0, 0),
        "rank-0": SlotAssignment("all", 0, 0),
        "rank-1": SlotAssignment("all", 0, 0),
        "rank-2": SlotAssignment("all", 1, 0),
        "rollout-0": SlotAssignment("all", 2, 0),
        "env-0": SlotAssignment("all", 1, 1),
    }
    assert found.bundles == {"all": [[2], [1, 1], [1, 1]]}


@pytest.mark.parametrize(
    ("pools", "trainer", "ranks"),
    [
        (
            {"learn": {"roles": ["actor"], "slots_per_node": 4}, "judge": {"roles": ["critic"], "slots_per_node": 2}},
            SlotAssignment("learn", 0, 0),
            [SlotAssignment("learn", 0, 0)] * 4 + [SlotAssignment("judge", 0, 0)] * 2,
        ),
        (
            {
                "judge": {"roles": ["critic"], "nodes": 2},
                "learn": {"roles": ["actor"], "nodes": 2, "slots_per_node": 3},
            },
            SlotAssignment("learn", 0, 0),
            [SlotAssignment("learn", 0, 0)] * 3
            + [SlotAssignment("learn", 1, 0), SlotAssignment("judge", 0, 0), SlotAssignment("judge", 1, 0)],
        ),
        ({"judge": {"roles": ["critic"], "slots_per_node": 3}}, None, [None] * 4 + [SlotAssignment("judge", 0, 0)] * 2),
    ],
)
def test_a_split_role_lives_in_its_own_pool_and_another_beside_the_actor(
    pools: dict[str, Any], trainer: SlotAssignment | None, ranks: list[SlotAssignment | None]
) -> None:
    found = assigned(*CRITIC, *REFERENCE, "trainer.split=[critic, reference]", "trainer.ranks=2", **pools)
    assert found.by_process.get("trainer-0") == trainer
    assert [found.by_process.get(f"rank-{number}") for number in range(7)] == [*ranks, None]


def test_servers_that_take_turns_with_the_trainer_live_in_its_slots() -> None:
    given = [TURNS, "trainer.ranks=4", "rollout.servers=5"]
    found = assigned(*given, all={"roles": HERE, "nodes": 2, "slots_per_node": 3})
    first, second = SlotAssignment("all", 0, 0), SlotAssignment("all", 1, 0)
    assert found.by_process == {
        "trainer-0": first,
        **{f"rank-{number}": first for number in range(3)},
        "rank-3": second,
        "rollout-0": first,
        "rollout-1": first,
        "rollout-2": first,
        "rollout-3": second,
        "rollout-4": first,
        "env-0": SlotAssignment("all", 1, 1),
    }
    assert found.bundles == {"all": [[3], [1, 1, 1]]}


def test_servers_without_a_trainer_have_slots_of_their_own() -> None:
    given = [TURNS, "pipeline=rollout", "rollout.servers=2"]
    found = assigned(*given, all={"roles": HERE, "slots_per_node": 3})
    assert {name: slot.bundle for name, slot in found.by_process.items()} == {
        "rollout-0": 0,
        "rollout-1": 1,
        "env-0": 2,
    }


def test_servers_of_another_pool_have_slots_of_their_own() -> None:
    found = assigned(TURNS, learn={"roles": ["actor"]}, play={"roles": ["rollout"]})
    assert found.by_process == {"trainer-0": SlotAssignment("learn", 0, 0), "rollout-0": SlotAssignment("play", 0, 0)}


def test_servers_that_take_turns_with_a_split_role_live_in_its_slots() -> None:
    pools = {"learn": {"roles": ["actor"]}, "judge": {"roles": ["critic", "rollout"]}}
    found = assigned(TURNS, *CRITIC, "trainer.split=[critic]", **pools)
    judge = SlotAssignment("judge", 0, 0)
    assert found.by_process == {"trainer-0": SlotAssignment("learn", 0, 0), "rank-1": judge, "rollout-0": judge}


def test_a_pool_where_nobody_lives_is_not_asked_for() -> None:
    pools = {"learn": {"roles": ["actor"]}, "play": {"roles": ["environment", "reward"], "slots_per_node": 2}}
    assert assigned("pipeline=rollout", **pools).by_process.keys() == {"env-0"}
    assert [(part.pool, part.bundles) for part in parts("pipeline=rollout", **pools)] == [("play", (1, 1))]


@pytest.mark.parametrize(
    "overrides",
    [
        ["trainer.ranks=4"],
        ["trainer.ranks=2", "trainer.split=[reference]", *REFERENCE],
    ],
)
def test_a_trainer_of_several_processes_has_the_devices_of_all_its_slots(overrides: Sequence[str]) -> None:
    learn = {"roles": ["actor", "reference"], "slots_per_node": 4, "accelerators": 1.0, "cpus": 2.0}
    (part,) = parts(*overrides, learn=learn)
    assert [part.wanted_by(num_slots) for num_slots in part.bundles] == [{"CPU": 8.0, "GPU": 4.0}]


@pytest.mark.parametrize(
    ("pools", "overrides", "message"),
    [
        ({}, [], "cluster.pools is empty: add pools"),
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
            {"judge": {"roles": ["critic", "reference"], "slots_per_node": 3}},
            [*CRITIC, *REFERENCE, "trainer.split=[critic, reference]", "trainer.ranks=2"],
            "cluster.pools.judge: trainer.ranks and trainer.split 4 need 4 slots, and 1 nodes have 3",
        ),
        (
            {"learn": {"roles": ["actor"]}, "other": {"roles": ["critic", "reference"]}},
            [*CRITIC, "trainer.split=[critic]"],
            "cluster.pools.other: role reference runs in the processes of role actor, which is in pool learn: "
            "put both into one pool, or reference into trainer.split",
        ),
        (
            {"score": {"roles": ["reward"]}},
            [],
            "cluster.pools.score: role reward runs in the processes of role environment, which is in no pool",
        ),
    ],
)
def test_what_does_not_fit_is_said_with_the_numbers(
    pools: dict[str, Any], overrides: Sequence[str], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        assigned(*overrides, **pools)
    assert message in str(refused.value)
