"""Every server has devices of its own, as far as there are any."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock.config import Config, ConfigError
from penstock.deadline import Stalled
from penstock.ports.process_launcher import Device
from penstock.processes import foreign_server
from penstock.processes.devices import devices_in_use, take_one
from penstock.processes.foreign_server import environment
from penstock.processes.visible import VARIABLES, num_devices, share_in, shares_device

CUDA, NPU = VARIABLES["cuda"], VARIABLES["npu"]
IN_TURNS = {"scheduler": {"mode": "colocated", "max_staleness": 0}}
SPLIT = {"trainer": {"critic": {}, "split": ["critic"]}, "scheduler": {"group_filter": []}}
JUDGED = {**SPLIT, "cluster": {"address": "auto", "pools": {"judge": {"roles": ["critic"]}}}}


def taken(number: int, variable: str = CUDA, **sections: Any) -> str | None:
    take_one(Config.model_validate(sections), number)
    return os.environ.get(variable)


@pytest.fixture(autouse=True)
def several(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(device_count=lambda: 4))
    for variable in VARIABLES.values():
        monkeypatch.setenv(variable, "what is set here ends with the test")
        monkeypatch.delenv(variable)


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({}, ["1", "2", "3", "0"]),
        ({"trainer": {"ranks": 2}}, ["2", "3", "0", "1"]),
        (SPLIT, ["2", "3", "0", "1"]),
        (JUDGED, ["1", "2", "3", "0"]),
        (IN_TURNS, ["0", "1", "2", "3"]),
        ({"model": {"device": "cuda"}}, ["1", "2", "3", "0"]),
        ({"model": {"device": "cuda:3"}}, [None, None, None, None]),
        ({"model": {"device": "cpu"}}, [None, None, None, None]),
    ],
)
def test_servers_take_turns_after_the_trainer(
    monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], expected: list[str | None]
) -> None:
    found = []
    for number in range(4):
        monkeypatch.delenv(CUDA, raising=False)
        found.append(taken(number, **sections))
    assert found == expected


def test_only_what_is_seen_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUDA, "GPU-5,GPU-7")
    assert taken(0) == "GPU-7"
    assert taken(1) == "GPU-7", "there is no other any more"


def test_a_single_device_is_everybodys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda _: SimpleNamespace(device_count=lambda: 1))
    assert taken(3) is None


@pytest.mark.parametrize(
    ("accelerator", "variable", "expected"),
    [
        (SimpleNamespace(type="npu"), NPU, "1"),
        (SimpleNamespace(type="npu"), CUDA, None),
        (torch.device("mps"), CUDA, None),
        (None, CUDA, None),
    ],
)
def test_each_kind_of_device_has_its_variable(
    monkeypatch: pytest.MonkeyPatch, accelerator: Any, variable: str, expected: str | None
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: accelerator)
    assert taken(0, variable) == expected


def given(number: int, variable: str = CUDA, **sections: Any) -> str | None:
    """To an engine of others."""
    rollout = {"engine": "vllm", **sections.pop("rollout", {})}
    return environment(Config.model_validate({"rollout": rollout, **sections}), number).get(variable)


@pytest.mark.parametrize(
    ("seen", "sections", "expected"),
    [
        ("0,1,2,3", {}, ["1", "2", "3"]),
        ("0,1,2,3,4,5,6", {"rollout": {"args": ["--tensor-parallel-size", "2"]}}, ["1,2", "3,4", "5,6"]),
        ("0,1", {"rollout": {"args": ["--tensor-parallel-size=2"]}}, ["0,1"] * 3),
        ("0,1,2,3", {"model": {"device": "cuda:1"}}, ["0,1,2,3"] * 3),
    ],
)
def test_engines_of_others_have_theirs(
    monkeypatch: pytest.MonkeyPatch, seen: str, sections: dict[str, Any], expected: list[str]
) -> None:
    monkeypatch.setenv(CUDA, seen)
    assert [given(number, **sections) for number in range(3)] == expected


def test_what_the_trainer_or_another_engine_has_is_not_given_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUDA, "0,1,2,3")
    two = {"args": ["--tp", "2"], "servers": 2}
    assert given(0, rollout=two) == "1,2"
    with pytest.raises(
        ConfigError, match=r"there are 4 devices, the trainer has 1 .* rollout.servers \(2\) needs 2: lower"
    ):
        given(1, rollout=two)


def test_devices_of_another_make_are_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert given(0, NPU, model={"device": "npu"}) is None
    monkeypatch.setenv(NPU, "0,1,2")
    assert given(1, NPU, model={"device": "npu"}) == "2"


LISTED = """GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)
  MIG 3g.40gb     Device  0: (UUID: MIG-1)
GPU 1: NVIDIA H100 80GB HBM3 (UUID: GPU-2)
"""


def test_who_imports_no_torch_asks_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    said = subprocess.CompletedProcess(["nvidia-smi", "-L"], 0, stdout=LISTED)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: said)
    assert given(0) == "1"


def test_without_a_driver_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert given(0) is None


@pytest.mark.parametrize(
    ("words", "number"),
    [
        ([], 1),
        (["--tensor-parallel-size", "4"], 4),
        (["--tensor_parallel_size=2", "-pp", "2", "--dp-size", "3"], 12),
        (["-tp", "2", "--tp-size=8"], 8),
        (["--tp"], 1),
        (["--tp", "many", "-dp", "0"], 1),
        (["--seed", "3", "--tp", "2"], 2),
    ],
)
def test_how_many_devices_an_engine_needs_is_read_from_its_command_line(words: list[str], number: int) -> None:
    assert num_devices(words) == number


SMI = """#!/bin/sh
case "$1" in
-L) echo "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)" ;;
*) echo "$@" > {told}; head -1 {free}; tail -n +2 {free} > {rest}; mv {rest} {free} ;;
esac
"""


async def test_an_engine_that_starts_again_waits_until_the_trainer_has_given_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: tmp_path / name for name in ("told", "free", "rest")}
    (tmp_path / "nvidia-smi").write_text(SMI.format(**files))
    (tmp_path / "nvidia-smi").chmod(0o700)
    files["free"].write_text("3000, 81559\n40000, 81559\n70000, 81559\n0, 81559\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(foreign_server, "ROOM_EVERY_S", 0.0)
    child: Any = SimpleNamespace(name="rollout-0")
    config = Config.model_validate(
        {**IN_TURNS, "rollout": {"engine": "vllm", "args": ["--gpu_memory_utilization=0.8", "--tp", "2"]}}
    )
    await foreign_server.await_room(child, config, {CUDA: "4,5,6"})
    assert files["free"].read_text() == "0, 81559\n", "it has seen enough"
    assert files["told"].read_text().endswith("-i 4,5\n")
    monkeypatch.setattr(foreign_server, "WAIT_SHARE", 1e-9)
    with pytest.raises(Stalled, match="80% of the memory of its device"):
        await foreign_server.await_room(child, config, {})


async def test_the_devices_of_an_engine_are_named_by_their_driver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: tmp_path / name for name in ("told", "free", "rest")}
    (tmp_path / "nvidia-smi").write_text(SMI.format(**files).replace("head -1 {free}", "cat"))
    (tmp_path / "nvidia-smi").chmod(0o700)
    files["free"].write_text("NVIDIA H100, 3000, 81559\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    child: Any = SimpleNamespace(name="rollout-0")
    config = Config.model_validate({"rollout": {"engine": "vllm"}})
    monkeypatch.setenv(CUDA, "4,5")
    found = await foreign_server.engine_devices(child, config)
    assert found == [Device(name="NVIDIA H100", number="5", used_bytes=3000 << 20, total_bytes=81559 << 20)]
    assert files["told"].read_text().endswith("-i 5\n")
    files["free"].write_text("NVIDIA H100, [N/A], 81559\n")
    assert await foreign_server.engine_devices(child, config) is None
    assert await foreign_server.engine_devices(child, Config.model_validate({"model": {"device": "cpu"}})) == []
    running = {"rollout": {"engine": "vllm", "urls": ["http://127.0.0.1:1"]}}
    assert await foreign_server.engine_devices(child, Config.model_validate(running)) is None


class Driver(SimpleNamespace):
    """Two devices; this process has memory on the second one."""

    def is_initialized(self) -> bool:
        return bool(self.is_used)

    def device_count(self) -> int:
        return 2

    def memory_reserved(self, index: int) -> int:
        return index

    def mem_get_info(self, index: int) -> tuple[int, int]:
        return 30, 80

    def get_device_name(self, index: int) -> str:
        return f"H{index}00"


@pytest.mark.parametrize(
    ("kind", "is_used", "seen", "expected"),
    [
        ("cuda", True, None, [Device(name="H100", number="1", used_bytes=50, total_bytes=80)]),
        ("cuda", True, "5,GPU-7", [Device(name="H100", number="GPU-7", used_bytes=50, total_bytes=80)]),
        ("cuda", False, None, []),
        ("mps", True, None, None),
        (None, False, None, []),
    ],
)
def test_a_process_names_the_devices_that_hold_its_memory(
    monkeypatch: pytest.MonkeyPatch, kind: str | None, is_used: bool, seen: str | None, expected: list[Device] | None
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: kind and torch.device(kind))
    monkeypatch.setattr(torch, "get_device_module", lambda _: Driver(is_used=is_used))
    if seen is not None:
        monkeypatch.setenv(CUDA, seen)
    assert devices_in_use() == expected


@pytest.mark.parametrize(
    ("engine", "words", "expected"),
    [
        ("vllm", [], None),
        ("vllm", ["--gpu-memory-utilization", "0.5"], 0.5),
        ("vllm", ["--gpu-memory-utilization=0.5", "--gpu_memory_utilization", "0.6"], 0.6),
        ("vllm", ["--mem-fraction-static", "0.5"], None),
        ("sglang", ["--mem-fraction-static", "0.5"], 0.5),
        ("sglang", ["--mem-fraction-static", "much"], None),
    ],
)
def test_what_a_command_line_gives_an_engine(engine: str, words: list[str], expected: float | None) -> None:
    assert share_in(engine, words) == expected


@pytest.mark.parametrize(
    ("seen", "sections", "expected"),
    [
        ("0", {}, True),
        ("0,1", {}, False),
        ("0,1", {"rollout": {"args": ["--tp", "2"]}}, True),
        ("0,1", {"rollout": {"engine": "penstock"}}, False),
        ("0", {"rollout": {"engine": "penstock"}}, True),
        ("0", IN_TURNS, False),
        ("0", {"pipeline": "rollout", "model": {"path": "/model"}}, False),
        ("0", {"rollout": {"urls": ["http://127.0.0.1:1"]}}, False),
        ("0", {"model": {"device": "cpu"}}, False),
        ("0", JUDGED | {"cluster": {"address": "auto", "pools": {"serve": {"roles": ["rollout"]}}}}, False),
    ],
)
def test_a_server_shares_the_device_of_the_trainer_if_there_is_no_other(
    monkeypatch: pytest.MonkeyPatch, seen: str, sections: dict[str, Any], expected: bool
) -> None:
    monkeypatch.setenv(CUDA, seen)
    rollout = {"engine": "vllm", **sections.get("rollout", {})}
    assert shares_device(Config.model_validate(sections | {"rollout": rollout}), 0) is expected


async def test_an_engine_that_shares_a_device_starts_with_what_the_plan_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CUDA, "0")
    plan: dict[str, Any] = {"fits": True, "engine_words": ["--gpu-memory-utilization", "0.43"]}
    monkeypatch.setattr(foreign_server, "memory_plan", lambda config: plan)
    child: Any = SimpleNamespace(name="rollout-0")
    config = Config.model_validate({"rollout": {"engine": "vllm"}})
    assert await foreign_server.memory_words(child, config) == plan["engine_words"]
    given = Config.model_validate({"rollout": {"engine": "vllm", "args": ["--gpu-memory-utilization", "0.5"]}})
    assert await foreign_server.memory_words(child, given) == []
    needs = [{"who": "actor", "total": 60 * 2**30}, {"who": "rollout server (vllm)", "total": 30 * 2**30}]
    plan |= {"fits": False, "engine_words": [], "largest": 90 * 2**30, "capacity": 80 * 2**30, "needs": needs}
    told = r"need at least 90.0 GiB of its 80.0 GiB \(actor 60.0, rollout server \(vllm\) 30.0\): use scheduler.mode"
    with pytest.raises(ConfigError, match=told):
        await foreign_server.memory_words(child, config)
