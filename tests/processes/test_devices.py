"""Every server has a device of its own, as far as there are any."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

from penstock.config import Config
from penstock.processes.devices import VISIBLE, take_one


def taken(number: int, **sections: Any) -> str | None:
    take_one(Config.model_validate(sections), number)
    return os.environ.get(VISIBLE)


SPLIT = {"trainer": {"critic": {}, "split": ["critic"]}, "scheduler": {"group_filter": []}}
JUDGED = {**SPLIT, "cluster": {"address": "auto", "pools": {"judge": {"roles": ["critic"]}}}}


@pytest.fixture(autouse=True)
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.delenv(VISIBLE, raising=False)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, ["1", "2", "3", "0"]),
        ({"trainer": {"ranks": 2}}, ["2", "3", "0", "1"]),
        (SPLIT, ["2", "3", "0", "1"]),
        (JUDGED, ["1", "2", "3", "0"]),
        ({"scheduler": {"mode": "colocated", "max_staleness": 0}}, ["0", "1", "2", "3"]),
        ({"model": {"device": "cuda:3"}}, [None, None, None, None]),
        ({"model": {"device": "cpu"}}, [None, None, None, None]),
    ],
)
def test_servers_take_turns_after_the_trainer(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], expected: list[str | None]
) -> None:
    found = []
    for number in range(4):
        monkeypatch.delenv(VISIBLE, raising=False)
        found.append(taken(number, **sections))
    assert found == expected


def test_only_what_is_seen_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "GPU-5,GPU-7")
    assert taken(0) == "GPU-7"
    assert taken(1) == "GPU-7", "there is no other any more"


def test_a_single_device_is_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert taken(3) is None
