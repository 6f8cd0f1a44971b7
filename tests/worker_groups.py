"""Groups of tests: one xdist worker runs a group as a whole.

All tests that use Ray are one group, so a session has one Ray cluster. Tests with a shared fixture are one group: one
worker makes it once. Any other real run is a group of its own, and the unit tests of a file are one.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

SHARED_IN_A_FILE = {"module", "class", "package"}
FIRST = ("ray", "ranks")
"""Groups that take long: they start first."""


class GroupScheduling(LoadScopeScheduling):
    """Give each worker whole groups, in the order of the collection."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        super().__init__(config, log)
        self._groups: dict[str, str] = {}

    def _split_scope(self, nodeid: str) -> str:
        self._groups = self._groups or json.loads(groups_file().read_text())
        return self._groups[nodeid]


def groups_file() -> Path:
    """Return where the workers of a session tell the scheduler the group of each test: all say the same."""
    return Path(tempfile.gettempdir(), "groups.json")


def write_groups(items: Sequence[pytest.Item], worker: str) -> None:
    """Write the group of each test, as the worker that collected them."""
    written = groups_file().with_suffix(f".{worker}")
    written.write_text(json.dumps({item.nodeid: group_of(item) for item in items}))
    written.replace(groups_file())


def group_of(item: pytest.Item) -> str:
    """Return the group of a test."""
    assert isinstance(item, pytest.Function)
    file = item.nodeid.partition("::")[0]
    if (marker := item.get_closest_marker("xdist_group")) is not None:
        return str(marker.args[0])
    if "machines" in vars(item.module):
        return "ray"
    if item.get_closest_marker("integration") is None:
        return f"{file} units"
    fixtures = [made[-1] for made in item._fixtureinfo.name2fixturedefs.values() if made[-1].baseid.startswith("tests")]
    shared = sorted(fixture.argname for fixture in fixtures if fixture.scope == "session")
    if shared:
        return f"fixture {shared[0]}"
    return file if any(fixture.scope in SHARED_IN_A_FILE for fixture in fixtures) else item.nodeid


def rank_of(item: pytest.Item) -> int:
    """Return where a test stands in the session: long groups, then other real runs, then unit tests in the gaps."""
    if item.get_closest_marker("integration") is None:
        return 2
    return 0 if group_of(item) in FIRST else 1
