"""Several roles, placed in groups of workers. Roles that are placed together share processes and devices.

A driver calls `roles.actor.update(...)` for any placement. Names of roles and methods are never concatenated, so they
cannot be confused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from penstock.groups.backend import Backend
from penstock.groups.group import Group
from penstock.groups.role import Role

Layout = Mapping[str, Sequence[str]]
"""Role names by place. A place is a resource pool or any other name; its workers share all its roles."""
Start = Callable[[str, Mapping[str, Role]], Backend]
"""Function that starts the workers of a place with these roles."""


class Roles(AbstractContextManager["Roles"]):
    """A group for every role, as an attribute with the role's name."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._backends = backends
        self._groups = {name: Group(backend, name) for backend in backends for name in backend.roles}
        if hidden := self._groups.keys() & set(dir(self)):
            raise ValueError(f"the role name {min(hidden)!r} is reserved, as `Roles` has this attribute: rename it")

    def __getattr__(self, name: str) -> Group:
        groups: dict[str, Group] = self.__dict__.get("_groups", {})
        if name not in groups:
            raise AttributeError(f"no role {name!r}: there are {sorted(groups)}")
        return groups[name]

    @property
    def num_places(self) -> int:
        """Return the number of places; workers of different places share no process."""
        return len(self._backends)

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers."""
        for backend in self._backends:
            backend.close()


def place(roles: Mapping[str, Role], layout: Layout, start: Start) -> Roles:
    """Start all `roles` in the places of `layout`. Raises ValueError for a wrong layout before anything is started."""
    _check(roles, layout)
    backends: list[Backend] = []
    try:
        for name, together in layout.items():
            backends.append(start(name, {role: roles[role] for role in together}))
        return Roles(backends)
    except BaseException:
        for backend in backends:
            backend.close()
        raise


def _check(roles: Mapping[str, Role], layout: Layout) -> None:
    placed = Counter(role for together in layout.values() for role in together)
    if unknown := placed.keys() - roles.keys():
        raise ValueError(f"the layout places {min(unknown)!r}, which is not a role: the roles are {sorted(roles)}")
    if missing := roles.keys() - placed.keys():
        raise ValueError(f"the layout leaves out role {min(missing)!r}: put it into one of {sorted(layout)}")
    if twice := [role for role, count in placed.items() if count > 1]:
        places = [name for name, together in layout.items() if twice[0] in together]
        raise ValueError(f"role {twice[0]!r} is placed in {places}, expected one place")
    if empty := [name for name, together in layout.items() if not together]:
        raise ValueError(f"place {empty[0]!r} has no roles: name some, or leave it out")
