"""Where the ranks of a trainer meet on one machine, no other user can."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from penstock.config import Config
from penstock.groups.role import Rank
from penstock.processes.trainer_rank import TrainerRank

CONFIG = Config.model_validate(
    {"scheduler": {"group_filter": []}, "trainer": {"ranks": 2, "critic": {}, "split": ["critic"]}}
)


def listeners() -> set[tuple[str, int]]:
    """The addresses at which this process listens."""
    return {tuple(each.laddr) for each in psutil.Process().net_connections("tcp") if each.status == "LISTEN"}


def test_ranks_meet_in_a_private_directory_and_at_no_port(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each life of a role has its own, and the next one removes it."""
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path))
    before, umask = listeners(), os.umask(0)
    roles = [TrainerRank(Rank(0, 2), {}, config=CONFIG, place=place) for place in (0, 1, 0)]
    try:
        first, other, second = [role.open_rendezvous() for role in roles]
    finally:
        os.umask(umask)
    assert listeners() == before
    assert isinstance(second, Path) and second.parent == tmp_path and second.stat().st_mode & 0o777 == 0o700
    assert sorted(tmp_path.iterdir()) == sorted([other, second]) and first != second
