"""Pools on a real Ray cluster."""

from __future__ import annotations

import time
from typing import Any

import pytest

pytest.importorskip("ray")

import ray
from ray_machines import machines

from penstock.cluster import placement
from penstock.cluster.placement import nodes, place
from penstock.cluster.pools import DoesNotFit
from penstock.config.cluster import ClusterConfig

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

START_S = 120.0
"""For Ray to start processes of its own."""


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> None:
    machines()


def config(*, place_timeout_s: float = 30.0, **pools: Any) -> ClusterConfig:
    return ClusterConfig.model_validate({"pools": pools, "place_timeout_s": place_timeout_s})


@ray.remote
class Resident:
    def where(self) -> str:
        return str(ray.get_runtime_context().get_node_id())


def free() -> dict[str, float]:
    """The free resources of all nodes."""
    found = nodes()
    return {name: sum(node.free.get(name, 0.0) for node in found) for name in ("CPU", "chip")}


def until_free(cpus: float) -> None:
    give_up = time.monotonic() + START_S
    while free()["CPU"] != cpus:
        assert time.monotonic() < give_up, free()
        time.sleep(0.05)


def test_every_slot_is_where_its_rank_says() -> None:
    wanted = config(
        train={"nodes": 2, "slots_per_node": 2, "accelerator": "chip", "accelerators": 1.0},
        serve={"slots_per_node": 3, "labels": {"kind": "fast"}},
    )
    with place(wanted) as pools:
        train, serve = pools["train"], pools["serve"]
        assert [slot.bundle for slot in train] == [0, 1, 0, 1]
        assert len({slot.held.node.node_id for slot in train}) == 2 and serve[0].held.node.labels["kind"] == "fast"
        inhabited = [train[0], train[3], serve[2]]
        residents = [Resident.options(**slot.options()).remote() for slot in inhabited]  # type: ignore[attr-defined]
        found = ray.get([resident.where.remote() for resident in residents], timeout=START_S)
        assert found == [slot.held.node.node_id for slot in inhabited]
        until_free(16 - 7)
    until_free(16)


def test_several_share_a_slot() -> None:
    with place(config(train={"cpus": 2.0, "accelerator": "chip", "accelerators": 1.0})) as pools:
        (slot,) = pools["train"]
        both = [Resident.options(**slot.options(share=0.5)).remote() for _ in range(2)]  # type: ignore[attr-defined]
        assert ray.get([each.where.remote() for each in both], timeout=START_S) == [slot.held.node.node_id] * 2
    until_free(16)


def test_what_no_node_can_ever_hold_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def counted() -> Any:
        looks.append(nodes())
        return looks[-1]

    monkeypatch.setattr(placement, "nodes", counted)
    with pytest.raises(DoesNotFit, match=r"16 CPU on one node: fits on no node.*has 8 of 8 CPU"):
        place(config(train={"slots_per_node": 16}))
    assert len(looks) == 1, "it waits for no room"
    until_free(16)


def test_what_others_take_meanwhile_is_said_with_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held by then is given back."""
    asked, fast = [nodes()], {"labels": {"kind": "fast"}}
    with place(config(others={"slots_per_node": 6, **fast})):
        until_free(16 - 6)
        monkeypatch.setattr(placement, "nodes", lambda: asked.pop() if asked else nodes())
        lacking = r"^cluster.pools: pool serve, node 1: 4 slots, 4 CPU on one node with kind=fast: \S+ \(\w+\) "
        with pytest.raises(DoesNotFit, match=lacking + r"has 2 of 8 CPU, kind=fast\. .* raise cluster.place_timeout_s"):
            place(config(learn={"slots_per_node": 8}, serve={"slots_per_node": 4, **fast}, place_timeout_s=1.0))
    until_free(16)


def test_what_others_hold_is_waited_for_within_bounds() -> None:
    with place(config(others={"nodes": 2, "slots_per_node": 6})) as others:
        until_free(4)
        with pytest.raises(DoesNotFit, match=r"4 CPU on one node: fits on no node.*has 2 of 8 CPU"):
            place(config(train={"slots_per_node": 4}, place_timeout_s=1.0))
        others.release()
        with place(config(train={"slots_per_node": 4})) as pools:
            assert len(pools["train"]) == 4
    until_free(16)
