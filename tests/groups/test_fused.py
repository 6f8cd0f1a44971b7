"""Roles that share processes, and the same roles apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from group_workers import Actor, Critic

from penstock.groups.backend import Backend
from penstock.groups.batch import Batch
from penstock.groups.errors import RemoteError
from penstock.groups.fused import Layout, Roles, place
from penstock.groups.local import LocalBackend
from penstock.groups.role import Role
from penstock.groups.spawned import SpawnedBackend

ROLES = {
    "actor": Role(Actor, {"number": 2.0}),
    "actor_rollout": Role(Actor, {"number": 3.0}),
    "reference": Role(Actor, {"number": 5.0}),
    "critic": Role(Critic, {"number": 7.0}),
}
LAYOUTS: dict[str, Layout] = {
    "fused": {"trainer": ["actor", "actor_rollout", "reference", "critic"]},
    "reference apart": {"trainer": ["actor", "actor_rollout", "critic"], "other": ["reference"]},
    "all apart": {name: [name] for name in ROLES},
}
BACKENDS = {"local": LocalBackend, "spawned": SpawnedBackend}


@pytest.fixture(
    scope="module", params=["local", pytest.param("spawned", marks=[pytest.mark.integration, pytest.mark.long])]
)
def start(request: pytest.FixtureRequest) -> Any:
    return lambda _, roles: BACKENDS[request.param](roles, 2)


@pytest.fixture(scope="module", params=LAYOUTS)
def placed(start: Any, request: pytest.FixtureRequest) -> Iterator[tuple[Roles, Layout]]:
    with place(ROLES, LAYOUTS[request.param], start) as roles:
        yield roles, LAYOUTS[request.param]


def drive(roles: Roles) -> list[float]:
    """A step of a driver that knows nothing of layouts."""
    batch = Batch(columns={"number": np.arange(5.0)})
    answers = roles.actor_rollout.update(batch)
    values = roles.critic.update(roles.reference.update(answers))
    numbers: list[float] = roles.actor.update(values)["number"].tolist()
    return numbers


def test_a_driver_does_not_see_who_shares_a_process(placed: tuple[Roles, Layout]) -> None:
    assert drive(placed[0]) == [((i * 3 * 5) + 7) * 2 for i in range(5)]


def test_names_that_begin_alike_stay_apart(placed: tuple[Roles, Layout]) -> None:
    one = Batch(columns={"number": np.ones(1)})
    assert placed[0].actor.update(one)["number"].tolist() == [2.0]
    assert placed[0].actor_rollout.update(one)["number"].tolist() == [3.0]
    with pytest.raises(AttributeError, match="'rollout_update' is not a remote method of actor"):
        placed[0].actor.rollout_update(one)


def test_roles_see_those_of_their_process(placed: tuple[Roles, Layout]) -> None:
    roles, layout = placed
    for together in layout.values():
        for role in together:
            assert getattr(roles, role).beside() == [sorted(together)] * 2
    if "critic" in next(iter(layout.values())) and len(next(iter(layout.values()))) > 1:
        assert roles.actor.of("critic") == [7.0, 7.0], "built after it"
    else:
        with pytest.raises(RemoteError, match=r"actor\.of failed on rank \d: KeyError: 'critic'"):
            roles.actor.of("critic")


@pytest.mark.parametrize(
    ("layout", "why"),
    [
        ({"a": ["actor", "actor_rollout", "critic"]}, "leaves out role 'reference': put it into one of"),
        ({"a": list(ROLES), "b": ["critic"]}, r"role 'critic' is placed in \['a', 'b'\], expected one place"),
        ({"a": [*ROLES, "critic"]}, r"role 'critic' is placed in \['a'\], expected one place"),
        ({"a": [*ROLES, "judge"]}, "places 'judge', which is not a role"),
        ({"a": list(ROLES), "b": []}, "place 'b' has no roles"),
    ],
)
def test_impossible_layouts_are_refused_before_anything_starts(layout: Layout, why: str) -> None:
    def never(place: str, roles: Mapping[str, Role]) -> Backend:
        raise AssertionError

    with pytest.raises(ValueError, match=why):
        place(ROLES, layout, never)


def test_what_has_started_is_closed_when_the_rest_does_not() -> None:
    class Closing(LocalBackend):
        def close(self) -> None:
            closed.extend(self.roles)

    def start(place: str, roles: Mapping[str, Role]) -> Backend:
        if place == "critic":
            raise RuntimeError("no room")
        return Closing(roles)

    closed: Sequence[str] = []
    with pytest.raises(RuntimeError, match="no room"):
        place(ROLES, LAYOUTS["all apart"], start)
    assert closed == ["actor", "actor_rollout", "reference"]


def test_roles_have_names_of_their_own() -> None:
    with pytest.raises(ValueError, match="the role name 'close' is reserved"):
        place({"close": ROLES["actor"]}, {"a": ["close"]}, lambda _, roles: LocalBackend(roles))
    with pytest.raises(AttributeError, match=r"no role 'judge': there are \['actor'\]"):
        _ = place({"actor": ROLES["actor"]}, {"a": ["actor"]}, lambda _, roles: LocalBackend(roles)).judge
