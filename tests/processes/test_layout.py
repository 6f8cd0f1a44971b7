"""Which process is told what."""

from __future__ import annotations

import pytest

from penstock.config import default_config
from penstock.processes.layout import stages


def test_only_who_controls_the_servers_is_told_the_key_for_that(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_ADMIN_API_KEY", "rule")
    specs = [spec for stage in stages(default_config([])) for spec in stage]
    told = {spec.role: spec.env["PENSTOCK_ADMIN_API_KEY"] for spec in specs}
    assert told == {"controller": "rule", "rollout": "rule", "trainer": "", "env": ""}
