"""What every launcher does, on this machine and on a cluster; and what only the one on a cluster can meet."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from stand_in_run import spec, until

from penstock.deadline import deadline
from penstock.own_files import remove_tree
from penstock.ports.process_launcher import Launcher, Look, ProcessHandle
from penstock.samples import Sample
from penstock.store.remote_payloads import FetchedPayloads, PayloadsLost, TemporaryPayloadWriter
from penstock.supervisor import procfs

pytest.importorskip("ray")

import launchers
import ray
from launchers import local_launcher, ray_launcher
from ray_machines import machines

from penstock.cluster.node_agent import TOKEN
from penstock.control.rank_channel import TrainerAddress
from penstock.control.runtime_files import Address
from penstock.processes.visible import VARIABLES
from penstock.supervisor.child import ADDRESS, HEARTBEAT_S, HOST

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

START_S = 120.0
"""For Ray to start processes of its own."""
SPECS = [spec("env-0", "steady"), spec("rollout-0", "serves"), spec("env-1", "dies")]
Opening = Callable[[Path], AbstractAsyncContextManager[Launcher]]


@pytest.fixture(scope="module", autouse=True)
def _cluster() -> None:
    machines()


@pytest.fixture(params=["local", "ray"])
async def launcher(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Launcher]:
    async with local_launcher(tmp_path) if request.param == "local" else ray_launcher(tmp_path, SPECS) as launcher:
        yield launcher


async def until_ready(launcher: Launcher, process: ProcessHandle) -> list[str]:
    """What was missing before."""
    missing = []
    async with deadline(START_S, waiter="the test", resource="readiness", holder=process.spec.name):
        while said := await process.probe():
            missing.append(said)
            await asyncio.sleep(0.02)
    return missing


async def until_told(launcher: Launcher, process: ProcessHandle, what: Callable[[Look], Any]) -> Look:
    async with deadline(START_S, waiter="the test", resource="words", holder=process.spec.name):
        while not what(look := await process.look()):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return look


async def test_a_process_is_started_probed_and_looked_at(launcher: Launcher) -> None:
    process = await launcher.spawn(spec("env-0", "steady", env={HEARTBEAT_S: "0.05"}))
    identity = procfs.Identity.of(process.facts)
    assert identity is not None and identity.pid == process.pid and procfs.is_alive(identity)
    assert process.end is None
    await until_ready(launcher, process)
    first = (await until_told(launcher, process, lambda look: look.beat)).beat
    later = (await until_told(launcher, process, lambda look: look.beat != first)).beat
    assert first is not None and later is not None and later.time > first.time
    assert (await process.look()).report is None


async def test_a_server_is_asked_for_its_health(launcher: Launcher, tmp_path: Path) -> None:
    assert await until_ready(launcher, await launcher.spawn(spec("rollout-0", "serves")))
    log = (tmp_path / "logs" / "rollout-0.log").read_text()
    answered = [line.split()[-2] for line in log.splitlines() if "GET /health" in line]
    assert answered[:3] == ["503", "503", "200"]


async def test_a_signal_reaches_it_and_its_end_is_told(launcher: Launcher) -> None:
    process = await launcher.spawn(spec("env-0", "steady"))
    await until_ready(launcher, process)
    await process.signal(signal.SIGTERM)
    end = await process.wait()
    assert (end.returncode, end.report, end.lost) == (0, None, "") and process.end == end
    again = await launcher.spawn(spec("env-0", "steady"))
    await until_ready(launcher, again)
    await again.signal(signal.SIGKILL)
    assert (await again.wait()).returncode == -signal.SIGKILL
    await again.signal(signal.SIGKILL)


async def test_it_has_the_priority_of_whoever_started_the_run(launcher: Launcher) -> None:
    """Ray lowers that of its actors, and so that of what they start."""
    process = await launcher.spawn(spec("env-0", "steady"))
    assert os.getpriority(os.PRIO_PROCESS, process.pid) == os.getpriority(os.PRIO_PROCESS, 0)


async def test_its_last_words_come_with_its_end(launcher: Launcher) -> None:
    process = await launcher.spawn(spec("env-1", "dies"))
    end = await process.wait()
    assert end.returncode == 1 and end.report is not None and end.report.message == "there is no model at /nowhere"
    assert not end.is_out_of_memory and (await process.look()).report == end.report


async def test_a_sweep_ends_whatever_was_started(launcher: Launcher, tmp_path: Path) -> None:
    process = await launcher.spawn(spec("env-0", "breeds"))
    await until_ready(launcher, process)
    escaped = escapees(tmp_path)
    assert len(escaped) == 2 and all(is_running(pid) for pid in escaped)
    assert await launcher.sweep() == []
    assert not any(is_running(pid) for pid in (process.pid, *escaped))


async def test_what_lives_in_no_pool_is_started_here_and_the_others_hear_where_the_controller_is(
    tmp_path: Path,
) -> None:
    specs = [spec("controller", "steady"), spec("env-0", "steady")]
    async with ray_launcher(tmp_path, specs) as launcher:
        controller, worker = [await launcher.spawn(each) for each in specs]
        here, there = runtime_dir_of(controller.pid), runtime_dir_of(worker.pid)
        assert "node" not in controller.facts and worker.facts["node"] == environment_of(worker.pid)[ADDRESS]
        assert environment_of(worker.pid)[HOST].startswith("http://") and here != there
        assert "controller_secret" in json.loads((here / "keys.json").read_text())
        secrets = json.loads((there / "keys.json").read_text())
        assert not secrets["controller_secret"] and secrets["member_secret"]
        for port in (1, 2):
            address = Address(endpoint=f"tcp://10.0.0.1:{port}", broadcast="tcp://10.0.0.1:9")
            address.write(here)
            await until_ready(launcher, controller)
            await worker.look()
            assert Address.read(there) == address
    assert not here.exists() and not there.exists() and not (tmp_path / TOKEN).exists()


async def test_ranks_on_other_nodes_hear_where_the_trainer_is_before_it_is_ready(tmp_path: Path) -> None:
    specs = [spec("trainer-0", "never_ready"), spec("rank-1", "steady")]
    async with ray_launcher(tmp_path, specs) as launcher:
        trainer, rank = [await launcher.spawn(each) for each in specs]
        here, there = runtime_dir_of(trainer.pid), runtime_dir_of(rank.pid)
        addresses = [TrainerAddress(endpoints={"rank-1": ("tcp://10.0.0.1:1", f"tcp://10.0.0.1:{n}")}) for n in (2, 3)]
        for address in addresses:
            address.write(here)
            assert await trainer.probe() is not None
            await trainer.look()
            await rank.look()
            assert TrainerAddress.read(there) == address
        addresses[0].write(here)
        await trainer.look()
        assert TrainerAddress.read(here) == addresses[0], "it knows best where it is"


async def test_a_host_that_dies_takes_its_process_with_it_and_has_a_successor(tmp_path: Path) -> None:
    specs = [spec("env-0", "breeds"), spec("env-1", "steady")]
    async with ray_launcher(tmp_path, specs) as launcher:
        process, other = [await launcher.spawn(each) for each in specs]
        await until_ready(launcher, process)
        await until_ready(launcher, other)
        family = [process.pid, *escapees(tmp_path)]
        host, runtime_dir = procfs.read_stat(process.pid), runtime_dir_of(process.pid)
        assert host is not None
        os.kill(host.parent, signal.SIGKILL)
        end = await process.wait()
        assert end.returncode is None and "node agent env-0" in end.lost and "is gone" in end.lost
        async with deadline(20.0, waiter="the test", resource="what the host left", holder="its janitor"):
            while runtime_dir.exists() or any(is_running(pid) for pid in family):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        assert is_running(other.pid), "the janitor of a host leaves others alone"
        successor = await launcher.spawn(specs[0])
        await until_ready(launcher, successor)
        idle = procfs.read_stat(other.pid)
        assert idle is not None
        await other.signal(signal.SIGTERM)
        assert (await other.wait()).returncode == 0
        ray.kill(launcher._agents[launcher.assignments["env-1"]].actor)
        async with deadline(20.0, waiter="the test", resource="the end of a host", holder="Ray"):
            while is_running(idle.parent):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        await until_ready(launcher, await launcher.spawn(specs[1]))
        assert await launcher.sweep() == []


@pytest.mark.long
async def test_who_takes_turns_shares_a_host_and_ends_with_it(tmp_path: Path) -> None:
    specs = [spec("trainer-0", "steady"), spec("rollout-0", "steady")]
    async with ray_launcher(tmp_path, specs, pool={"cpus": 0.5}, in_turns=True) as launcher:
        both = await asyncio.gather(*(launcher.spawn(each) for each in specs))
        for process in both:
            await until_ready(launcher, process)
        (parent,) = {process.pid: procfs.read_stat(process.pid) for process in both[:1]}.values()
        assert parent is not None
        assert {stat.parent for process in both if (stat := procfs.read_stat(process.pid))} == {parent.parent}
        await both[1].signal(signal.SIGKILL)
        assert (await both[1].wait()).returncode == -signal.SIGKILL
        again = await launcher.spawn(specs[1])
        await until_ready(launcher, again)
        runtime_dir = runtime_dir_of(again.pid)
        os.kill(parent.parent, signal.SIGKILL)
        ends = [await process.wait() for process in (both[0], again)]
        assert all(end.returncode is None and end.lost.startswith("node agent trainer-0+rollout-0") for end in ends)
    remove_tree(runtime_dir)  # Ray may have killed the janitor with its parent; then `doctor` finds the directory


def test_kill_9_of_the_supervisor_leaves_nothing(tmp_path: Path) -> None:
    words = [sys.executable, str(Path(launchers.__file__)), str(tmp_path), machines().address]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as supervisor:
        try:
            assert supervisor.stdout is not None
            process = int(supervisor.stdout.readline())
            family = [process, *escapees(tmp_path)]
            runtime_dir = runtime_dir_of(process)
            assert len(family) == 3 and runtime_dir.exists() and all(is_running(pid) for pid in family)
        finally:
            supervisor.kill()
    until(lambda: not runtime_dir.exists() and not any(is_running(pid) for pid in family))


@pytest.mark.long
async def test_a_run_directory_that_a_node_does_not_see_is_refused(tmp_path: Path) -> None:
    async with ray_launcher(tmp_path, SPECS) as launcher:
        (tmp_path / TOKEN).write_text("of another machine")
        with pytest.raises(
            OSError, match=f"node .* does not see {tmp_path} as the supervisor's machine does: runs_dir must"
        ):
            await launcher.spawn(SPECS[0])


@pytest.mark.long
async def test_what_a_dead_node_held_is_held_by_another(tmp_path: Path) -> None:
    cluster = machines()
    spares = [cluster.add_node(num_cpus=2, labels={"kind": "spare"}) for _ in range(2)]
    by_id = {node.node_id: node for node in spares}
    pool = {"slots_per_node": 2, "labels": {"kind": "spare"}}
    specs = [spec("env-0", "steady"), spec("env-1", "steady")]
    try:
        async with ray_launcher(tmp_path, specs, pool=pool, place_s=60.0) as launcher:
            processes = [await launcher.spawn(each) for each in specs]
            before = launcher._agents[launcher.assignments["env-0"]].slot.held.node.node_id
            cluster.remove_node(by_id.pop(before), allow_graceful=False)
            ends = await asyncio.gather(*(process.wait() for process in processes))
            assert all(end.returncode is None and end.lost.startswith("node agent env-") for end in ends)
            again = [await launcher.spawn(each) for each in specs]
            assert {agent.slot.held.node.node_id for agent in launcher._agents.values()} == by_id.keys()
            for process in again:
                await until_ready(launcher, process)
    finally:
        for node in by_id.values():
            cluster.remove_node(node)


@pytest.mark.long
async def test_processes_see_the_devices_of_their_slots_and_no_others(tmp_path: Path) -> None:
    """Resources that Ray only counts; it does not check that they exist."""
    cluster, label = machines(), {"kind": "devices"}
    node = cluster.add_node(num_cpus=2, num_gpus=2, labels=label)
    slots = {"slots_per_node": 2, "cpus": 0.5, "accelerators": 1, "labels": label}
    trainer = dataclasses.replace(spec("trainer-0", "steady"), num_slots=2)
    try:
        servers = [spec("rollout-0", "steady"), spec("rollout-1", "steady")]
        async with ray_launcher(tmp_path, servers, pool=slots) as launcher:
            seen = [environment_of((await launcher.spawn(each)).pid)[VARIABLES["cuda"]] for each in servers]
            assert sorted(seen) == ["0", "1"]
        async with ray_launcher(tmp_path, [trainer], pool=slots) as launcher:
            seen = environment_of((await launcher.spawn(trainer)).pid)[VARIABLES["cuda"]].split(",")
            assert sorted(seen) == ["0", "1"]
    finally:
        cluster.remove_node(node)


def environment_of(pid: int) -> dict[str, str]:
    """As soon as the process, which may have begun this very moment, has one."""
    until(lambda: any(procfs.environment(pid)))
    pairs = (entry.decode().partition("=") for entry in procfs.environment(pid))
    return {name: value for name, _, value in pairs}


def runtime_dir_of(pid: int) -> Path:
    return Path(environment_of(pid)["PENSTOCK_RUNTIME_DIR"])


def escapees(run_dir: Path) -> list[int]:
    """What a stand-in that breeds has left behind."""
    return [int(path.name.partition("-")[2]) for path in run_dir.glob("escapee-*")]


def is_running(pid: int) -> bool:
    stat = procfs.read_stat(pid)
    return stat is not None and stat.state not in "ZX"


@pytest.mark.long
async def test_records_travel_between_machines(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    specs = [spec("controller", "steady"), spec("env-0", "steady"), spec("env-1", "steady")]
    async with ray_launcher(tmp_path, specs) as launcher:
        controller, worker, other = [await launcher.spawn(each) for each in specs]
        writer = TemporaryPayloadWriter(runtime_dir_of(worker.pid) / "pool", "env-0")
        sample = made_sample()
        refs = [writer.append([sample]), writer.append([sample, sample])]
        host = environment_of(worker.pid)[HOST]
        gathered = payloads(controller, tmp_path / "pool")
        fetched = payloads(other, runtime_dir_of(other.pid) / "fetched-env-1")
        await gathered.fetch(refs, host=host)
        writer.release(refs[0])
        await fetched.fetch(refs[1:], host=environment_of(controller.pid)[HOST])
        for reader, ref, num_samples in ((gathered, refs[0], 1), (gathered, refs[1], 2), (fetched, refs[1], 2)):
            read = reader.read(ref)
            assert len(read) == num_samples and all(list(each.token_ids) == [1, 2, 3] for each in read)
        missing = msgspec.structs.replace(refs[0], file="env-0-99999.seg")
        for url, why in ((host, "HTTP 404"), ("http://127.0.0.1:9", "Connect")):
            with pytest.raises(
                PayloadsLost, match=f"env-0-99999.seg cannot be read from host {url} at offset 0: .*{why}"
            ):
                await fetched.fetch([missing], host=url)


def payloads(process: ProcessHandle, directory: Path) -> FetchedPayloads:
    return FetchedPayloads(directory, secret=environment_of(process.pid)["PENSTOCK_NONCE"], name=process.spec.name)


def made_sample() -> Sample:
    return Sample(
        group=1,
        episode=0,
        reward=1.0,
        truncated=False,
        token_ids=np.array([1, 2, 3], np.int32),
        loss_mask=np.array([0, 1, 1], np.uint8),
        logprobs=np.array([0, -1, -1], np.float32),
        versions=np.array([0, 1, 1], np.int32),
    )


@pytest.mark.long
async def test_a_host_that_is_out_of_reach_is_given_up(tmp_path: Path) -> None:
    async with ray_launcher(tmp_path, SPECS) as launcher:
        process = await launcher.spawn(SPECS[0])
        await until_ready(launcher, process)
        host = procfs.read_stat(process.pid)
        assert host is not None
        os.kill(host.parent, signal.SIGSTOP)
        try:
            assert await process.look() == Look()
            assert str(await process.probe()).endswith("does not answer")
            await process.signal(signal.SIGTERM)
            assert process.end is None
            await process.signal(signal.SIGKILL)
            end = await process.wait()
        finally:
            if is_running(host.parent):
                os.kill(host.parent, signal.SIGCONT)
        assert end.returncode is None and end.lost.endswith("did not answer")
        again = await launcher.spawn(SPECS[0])
        await until_ready(launcher, again)
