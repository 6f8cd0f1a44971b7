"""The trainer process: the driver of one rank, or of several in processes of the run, of one role or of three."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

import msgspec
import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from penstock.config import Config, ConfigError
from penstock.control.messages import (
    Accumulate,
    AskSaved,
    Begin,
    BucketLent,
    CloseGroup,
    FinishCheckpoint,
    FinishPublish,
    FoundSaved,
    GroupOpened,
    LearnerStateUpdate,
    LendBucket,
    Metrics,
    NotSent,
    OpenGroup,
    Publish,
    Published,
    Publishing,
    Restore,
    SaveCheckpoint,
    Step,
)
from penstock.control.runtime_files import Keys
from penstock.deadline import Stalled
from penstock.groups.errors import WorkerLost
from penstock.groups.method import remote_method
from penstock.groups.role import Rank
from penstock.model.files import ModelError
from penstock.model.load_policy import load_policy
from penstock.processes import trainer as trainer_module
from penstock.processes.layout import prepare, rank_names
from penstock.processes.trainer import TrainerProcess, made
from penstock.processes.trainer_rank import Actor, CriticRank, ReferenceRank, TrainerRank
from penstock.runtime.file_service import POOL
from penstock.samples import Sample
from penstock.store.payload_files import PayloadReader, PayloadWriter
from penstock.supervisor.child import ADDRESS, Child
from penstock.trainer.learner import Learner
from penstock.types import GroupRef
from penstock.version_history import VersionHistory
from penstock.weights.adapters import MergingReceiver
from penstock.weights.lent_memory import LentMemory
from penstock.weights.live_weights import LiveWeights
from penstock.weights.receiver import Receiver
from penstock.weights.sender import Sender
from penstock.weights.shared_memory import layout

pytestmark = pytest.mark.integration
GROUPS, GROUP_SIZE = 6, 4
ROLES: dict[str, Any] = {"critic": {"learning_rate": 1e-3}, "objective": {"kl_coef": 0.1}}
SPLIT = {**ROLES, "split": ["critic", "reference"]}
MODEL = {
    "tiny": {"num_layers": 2, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 48},
    "max_context": 64,
}
AS_IT_IS: dict[str, Any] = {"sections": {"model": MODEL}}
"""Without a warm start."""
TWO = {"ranks": 2}
TWO_NODES = {"cluster": {"address": "auto", "pools": {"learn": {"roles": ["actor"], "nodes": 2}}}}
BETWEEN_MACHINES = {"ranks": 2, "address": "127.0.0.1", "sections": TWO_NODES}
FSDP = {"ranks": 2, "distributed": {"strategy": "fsdp"}}
SHARED_PASSES = {"ranks": 2, "distributed": {"strategy": "fsdp", "context_ranks": 2}}


def configured(*, sections: Mapping[str, Any] | None = None, **trainer: Any) -> Config:
    """`trainer`: settings of that section; `sections`: whole other ones."""
    return Config.model_validate(
        {
            "model": {**MODEL, "warm_start": {"steps": 3, "batch_size": 7}},
            "data": {"source": "seeds"},
            "env": {"name": "guess_number", "group_size": GROUP_SIZE, "max_new_tokens": 8},
            "scheduler": {"group_filter": []},
            "supervisor": {"ready_timeout_s": 400},  # six processes with torch start at once
            "trainer": {"groups_per_step": GROUPS, "learning_rate": 1e-3, "warmup_steps": 0, **trainer},
            **(sections or {}),
        }
    )


def samples(group: int) -> list[Sample]:
    draw = np.random.default_rng(group)
    prompt, made = draw.integers(5, 100, 12), []
    for episode in range(GROUP_SIZE):
        mask = np.r_[np.zeros(12), np.ones(length := int(draw.integers(1, 20)))].astype(np.uint8)
        made.append(
            Sample(
                group=group,
                episode=episode,
                reward=float(draw.random()),
                truncated=False,
                token_ids=np.r_[prompt, draw.integers(5, 100, length)].astype(np.int32),
                loss_mask=mask,
                logprobs=(-4.6 * mask).astype(np.float32),
                versions=np.where(mask, 0, -1).astype(np.int32),
            )
        )
    return made


@pytest.fixture
def pool(tmp_path: Path) -> list[GroupRef]:
    """Groups that are ready to be trained, in the run directory `tmp_path / "run"`."""
    run_dir = tmp_path / "run"
    prepare(configured(), run_dir)
    writer = PayloadWriter(run_dir / "pool", "env-0")
    refs = [writer.append(samples(group)) for group in range(GROUPS)]
    writer.close()
    return [
        GroupRef(group=group, task_id=f"task/{group}", ref=ref, episodes=tuple(range(GROUP_SIZE)))
        for group, ref in enumerate(refs)
    ]


@contextmanager
def ranks(
    directory: Path, runtime_dir: Path, names: Sequence[str], address: str | None
) -> Iterator[list[psutil.Process]]:
    """The processes of the trainer's ranks, as a run starts them."""
    environment = {
        **os.environ,
        **({} if address is None else {ADDRESS: address}),
        "PENSTOCK_RUNTIME_DIR": str(runtime_dir),
        "PENSTOCK_RUN_ID": "r",
        "PENSTOCK_NONCE": "n",
    }
    words = [sys.executable, "-m", "penstock.processes.start", "--run-dir", str(directory / "run"), "--name"]
    with ExitStack() as stack:
        started = [stack.enter_context(subprocess.Popen([*words, name], env=environment)) for name in names]
        for process in started:
            stack.callback(process.kill)
        yield [psutil.Process(process.pid) for process in started]


@contextmanager
def trainer_and_ranks(
    directory: Path, *, address: str | None = None, **settings: Any
) -> Iterator[tuple[TrainerProcess, list[psutil.Process]]]:
    """`address`: of this machine, as if there were others."""
    config, runtime_dir = configured(**settings), Path(tempfile.mkdtemp(prefix="r-"))  # short, for its sockets
    if address is not None:
        Keys.make().write(runtime_dir)
    names = {"name": "trainer-0", "run_id": "r", "nonce": "n", "address": address}
    records = PayloadReader(directory / "run" / POOL)
    with (
        ranks(directory, runtime_dir, rank_names(config), address) as started,
        patch("penstock.processes.trainer.payloads_of", lambda _: records),
    ):
        process = TrainerProcess(config, Child(**names, run_dir=directory / "run", runtime_dir=runtime_dir))  # type: ignore[arg-type]
        try:
            yield process, started
        finally:
            process.close()


@contextmanager
def trainer(directory: Path, **settings: Any) -> Iterator[TrainerProcess]:
    with trainer_and_ranks(directory, **settings) as (process, _):
        yield process


async def step(process: TrainerProcess, pool: list[GroupRef]) -> dict[str, float]:
    """Two calls and the step; its metrics."""
    busy_s = 0.0
    for part in (pool[:2], pool[2:]):
        counted = await process.handle("controller", Accumulate(groups=part))
        assert isinstance(counted, Metrics) and counted.metrics["samples"] == len(part) * GROUP_SIZE
        msgspec.msgpack.encode(counted)  # it is sent to the controller
        busy_s += counted.metrics["busy_s"]
    update = await process.handle("controller", Step())
    assert isinstance(update, LearnerStateUpdate)
    assert 0 < busy_s < update.state.metrics["busy_s"], "the step itself is in it too"
    return {name: value for name, value in update.state.metrics.items() if name != "busy_s"}


@pytest.mark.parametrize(("sampled_by", "is_trained"), [(4, True), (10, False)], ids=["restored", "lost"])
async def test_after_a_rewind_tokens_are_as_old_as_their_weights(
    tmp_path: Path, pool: list[GroupRef], sampled_by: int, is_trained: bool
) -> None:
    """Version 11 has the weights of version 5: one step from version 4, and five steps from version 10."""
    writer = PayloadWriter(tmp_path / "run" / "pool", "env-1")
    made = [replace(each, versions=np.where(each.loss_mask, sampled_by, -1)) for each in samples(0)]
    group = msgspec.structs.replace(pool[0], ref=writer.append(made))
    writer.close()
    with trainer(tmp_path, **AS_IT_IS) as process:
        begin = Begin(policy_version=11, history=VersionHistory({11: 5}))
        await process.handle("controller", begin)
        counted = await process.handle("controller", Accumulate(groups=[group]))
    assert isinstance(counted, Metrics)
    trained, masked = counted.metrics["tokens"], counted.metrics["tokens_masked_stale"]
    assert (trained > 0, masked > 0) == (is_trained, not is_trained)


async def published(process: TrainerProcess) -> dict[str, torch.Tensor]:
    begun = await process.handle("controller", Publish())
    assert isinstance(begun, Publishing)
    answer = await process.handle("controller", FinishPublish(policy_version=begun.policy_version))
    assert isinstance(answer, Published)
    return load_file(answer.handle.path)


@pytest.mark.long
@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({}, TWO, id="two ranks"),
        pytest.param({}, FSDP, id="two ranks that share weights", marks=pytest.mark.longest),
        pytest.param(
            AS_IT_IS, {**FSDP, **AS_IT_IS}, id="two ranks that share weights from the start", marks=pytest.mark.longest
        ),
        pytest.param(ROLES, SPLIT, id="roles split", marks=pytest.mark.longest),
        pytest.param(ROLES, {**SPLIT, **SHARED_PASSES}, id="two ranks that share passes", marks=pytest.mark.longest),
        pytest.param(ROLES, {**ROLES, **TWO}, id="roles of two ranks", marks=pytest.mark.longest),
        pytest.param({**ROLES, **TWO}, {**SPLIT, **TWO}, id="roles of two ranks, split"),
        pytest.param(
            ROLES,
            {**SPLIT, **FSDP, "split": ["reference"]},
            id="some of two ranks that share weights, split",
            marks=pytest.mark.longest,
        ),
    ],
)
async def test_wherever_ranks_and_roles_are_they_find_the_same_and_go_on_from_each_others_checkpoints(
    tmp_path: Path, pool: list[GroupRef], one: dict[str, Any], other: dict[str, Any]
) -> None:
    seen = []
    for number, settings in enumerate((one, other)):
        with trainer(tmp_path, **settings) as process:
            await process.handle("controller", Begin(policy_version=0))
            first = await step(process, pool)
            directory = tmp_path / "run" / f"checkpoints_{number}" / "step_1"
            await process.handle("controller", SaveCheckpoint(directory=str(directory), state={"step": 1}))
            seen.append((first, await step(process, pool), await published(process)))
            await process.handle("controller", FinishCheckpoint())
    for number, settings in enumerate((other, one)):
        with trainer(tmp_path, **settings) as process:
            asked = AskSaved(directory=str(tmp_path / "run" / f"checkpoints_{number}"))
            answer = await process.handle("controller", asked)
            assert isinstance(answer, FoundSaved) and answer.saved.newest is not None
            point = Restore(directory=answer.saved.newest.directory, step=1, policy_version=1)
            await process.handle("controller", point)
            seen.append((seen[0][0], await step(process, pool), await published(process)))
    expected, *others = seen
    is_exact = one.get("ranks") == other.get("ranks")
    for found in others:
        for ours, theirs in zip(found[:2], expected[:2], strict=True):
            assert ours == (theirs if is_exact else pytest.approx(theirs, rel=1e-3, abs=1e-5))
        for name, weight in expected[2].items():
            torch.testing.assert_close(found[2][name], weight, rtol=0, atol=0 if is_exact else 1e-4)
    if "critic" in one:
        first, second = expected[:2]
        assert first["kl_reference"] == pytest.approx(0, abs=1e-6), "the reference is the policy after its warm start"
        assert second["kl_reference"] > 0 and 0 < second["value_loss"] < first["value_loss"]


IN_TURNS = {"scheduler": {"mode": "colocated", "max_staleness": 0, "group_filter": []}}


@pytest.mark.parametrize("sections", [IN_TURNS, {}], ids=["in turns", "beside each other"])
async def test_devices_are_the_servers_from_what_is_published_to_what_is_trained(
    tmp_path: Path, pool: list[GroupRef], monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any]
) -> None:
    """Where they take turns on them."""
    seen: list[tuple[str, type]] = []

    def release(self: TrainerRank) -> None:
        seen.append(("release", type(self)))

    def resume(self: TrainerRank) -> None:
        seen.append(("resume", type(self)))

    for method in (release, resume):
        monkeypatch.setattr(TrainerRank, method.__name__, remote_method()(method))
    directory = tmp_path / "run" / "checkpoints" / "step_1"
    with trainer(tmp_path, sections=sections, **ROLES) as process:
        await process.handle("controller", Begin(policy_version=0))
        for _ in range(2):
            await process.handle("controller", Publish())
            await process.handle("controller", SaveCheckpoint(directory=str(directory), state={"step": 1}))
            await step(process, pool)
        await process.handle("controller", Publish())
        await process.handle("controller", Restore(directory=str(directory), step=1, policy_version=1))
    roles = (Actor, CriticRank, ReferenceRank)
    turn = [("release", role) for role in roles] + [("resume", role) for role in roles]
    assert seen == (turn * 3 if sections else [])


DIRECT: dict[str, Any] = {**AS_IT_IS["sections"], "rollout": {"engine": "vllm", "direct_weights": True}}


async def test_buckets_come_from_the_weights_until_a_step_changes_them(
    tmp_path: Path, pool: list[GroupRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU in the place of a device."""
    were_live: list[bool] = []
    copy = LiveWeights.copy

    def noted(live: LiveWeights, *arguments: Any) -> bool:
        were_live.append(copy(live, *arguments))
        return were_live[-1]

    def lend(memory: LentMemory, number: int) -> str:
        out = memory._new(sum(tensor.end - tensor.start for tensor in memory._buckets[number]))
        memory._fill(number, out)
        return out.numpy().tobytes().hex()

    def ways(process: TrainerProcess) -> tuple[None, Sender]:
        return None, Sender("127.0.0.1", device=torch.device("cpu"), live=process._live)

    monkeypatch.setattr(LiveWeights, "copy", noted)
    monkeypatch.setattr(LentMemory, "lend", lend)
    monkeypatch.setattr(TrainerProcess, "_ways_to_servers", ways)
    with trainer(tmp_path, sections=DIRECT) as process:
        await process.handle("controller", Begin(policy_version=0))
        await process.handle("controller", Publish())
        complete = await process.handle("controller", FinishPublish(policy_version=0))
        assert isinstance(complete, Published)
        file = await asyncio.to_thread(Path(complete.handle.path).read_bytes)
        opening = OpenGroup(server="http://server", policy_version=0, world_size=2, way="vllm_memory")
        opened = await process.handle("controller", opening)
        assert isinstance(opened, GroupOpened) and len(opened.group.buckets) == 1
        lending = LendBucket(group=opened.group.name, number=0)
        first = await process.handle("controller", lending)
        await step(process, pool)
        assert await process.handle("controller", lending) == first
        assert isinstance(first, BucketLent) and file.endswith(bytes.fromhex(first.payload))
        await process.handle("controller", CloseGroup(group=opened.group.name))
        assert isinstance(await process.handle("controller", lending), NotSent)
    assert were_live == [True, False]


@pytest.mark.usefixtures("pool")
def test_direct_weights_without_a_cuda_device_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainer_module, "resolve_device", lambda _: torch.device("cpu"))
    told = "rollout.direct_weights needs a CUDA device, but the trainer computes on cpu: set it to false"
    with pytest.raises(ConfigError, match=told), trainer(tmp_path, sections=DIRECT):
        pass


@pytest.mark.parametrize(("kind", "expected"), [("cpu", []), ("npu", ["release", "empty_cache", "resume"])])
def test_only_a_device_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, expected: list[str]
) -> None:
    """With the memory that torch keeps of it."""
    seen: list[str] = []
    module = SimpleNamespace(empty_cache=lambda: seen.append("empty_cache"), mem_get_info=lambda _: (0, 2**40))
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.setattr(Learner, "release", lambda _: seen.append("release"))
    monkeypatch.setattr(Learner, "resume", lambda _: seen.append("resume"))
    config = configured()
    prepare(config, tmp_path)
    rank = Actor(Rank(0, 1), {}, config=config, place=0, model_dir=tmp_path / "model", weights_dir=tmp_path)
    rank._device = SimpleNamespace(type=kind)
    rank.release()
    rank.resume()
    assert seen == expected


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
async def test_a_device_in_turns_is_empty_for_the_servers(tmp_path: Path, pool: list[GroupRef]) -> None:
    """The result of training equals that of a trainer that has the device to itself."""

    async def steps(sections: dict[str, Any]) -> tuple[list[dict[str, float]], float]:
        """The metrics of two, and the share of the memory that is left on the device between them."""
        gc.collect()
        before = torch.cuda.memory_allocated()
        with trainer(tmp_path, sections=sections, **ROLES) as process:
            await process.handle("controller", Begin(policy_version=0))
            await published(process)
            first = await step(process, pool)
            held = torch.cuda.memory_allocated() - before
            await published(process)
            left = torch.cuda.memory_allocated() - before
            return [first, await step(process, pool)], left / held

    expected, share = await steps({"scheduler": IN_TURNS["scheduler"] | {"mode": "asynchronous"}})
    assert share > 0.5
    found, share = await steps(IN_TURNS)
    assert share < 0.1
    assert found == [pytest.approx(metrics, rel=1e-3, abs=1e-5) for metrics in expected]


@pytest.mark.long
@pytest.mark.parametrize(
    ("settings", "lost"),
    [
        (TWO, r"actor\.\w+ lost its worker of rank 1"),
        (SPLIT, r"reference\.\w+ lost its worker of rank 0"),
        pytest.param(BETWEEN_MACHINES, r"actor\.\w+ lost its worker of rank 1", id="between machines"),
    ],
)
async def test_a_rank_that_is_killed_ends_the_call_that_needs_it(
    tmp_path: Path, pool: list[GroupRef], settings: dict[str, Any], lost: str
) -> None:
    with trainer_and_ranks(tmp_path, **settings) as (process, started):
        await process.handle("controller", Begin(policy_version=0))
        await step(process, pool)
        opened = [each for rank in started for each in rank.net_connections("tcp") if each.status == "LISTEN"]
        assert {each.laddr.ip for each in opened} <= {"127.0.0.1"}
        started[-1].kill()
        with pytest.raises(WorkerLost, match=f"{lost}: its process has ended, or its machine is out of reach"):
            await step(process, pool)


@pytest.mark.long
def test_ranks_end_with_their_trainer_which_they_report(tmp_path: Path) -> None:
    prepare(configured(), tmp_path / "run")
    with trainer_and_ranks(tmp_path, **SPLIT) as (process, started):
        runtime_dir = Path(started[-1].environ()["PENSTOCK_RUNTIME_DIR"])
        process.close()
        gone, alive = psutil.wait_procs(started, timeout=60)
        assert len(gone) == 2 and not alive
    said = json.loads((runtime_dir / "errors" / "rank-1.json").read_text())
    assert said["message"] == "rank-1 lost its connection to the trainer, and cannot work without it"


@pytest.mark.parametrize("role", [Actor, CriticRank, ReferenceRank])
def test_of_ranks_that_share_weights_the_first_alone_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, role: type[TrainerRank]
) -> None:
    """Where they are gone nobody else takes notice; and the first one does not take them to its device."""
    monkeypatch.setattr("penstock.processes.trainer_rank.device_of", lambda *_: torch.device("meta"))
    model = tmp_path / "model"
    prepare(configured(), tmp_path)
    config = configured(**FSDP, **ROLES, sections={"model": {**MODEL, "path": str(model)}})
    init: dict[str, Any] = {"config": config, "place": 0}

    def begin(index: int) -> PreTrainedModel:
        if role is Actor:
            return Actor(Rank(index, 2), {}, **init, model_dir=model, weights_dir=tmp_path)._model
        return role(Rank(index, 2), {}, **init)._policy(model)

    assert {parameter.device.type for parameter in begin(1).parameters()} == {"meta"}
    with pytest.raises(ModelError, match="has no weights"):
        begin(0)
    load_policy(model, weights=False, seed=1).save_pretrained(model)
    assert {parameter.device.type for parameter in begin(0).parameters()} == {"cpu"}


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(AS_IT_IS, id="one rank"),
        pytest.param({**AS_IT_IS, **FSDP}, id="two ranks that share weights", marks=pytest.mark.long),
        pytest.param(
            {**BETWEEN_MACHINES, **FSDP, "sections": {"model": MODEL, **TWO_NODES}},
            id="two machines that share weights",
            marks=pytest.mark.long,
        ),
    ],
)
async def test_adapters_travel_alone_and_make_the_weights_of_the_checkpoint(
    tmp_path: Path, pool: list[GroupRef], settings: dict[str, Any]
) -> None:
    pytest.importorskip("peft")
    directory, handles = tmp_path / "run" / "checkpoints" / "step_1", []
    with trainer(tmp_path, lora={"rank": 3, "alpha": 5}, **settings) as process:
        await process.handle("controller", Begin(policy_version=0))
        for _ in range(2):
            begun = await process.handle("controller", Publish())
            assert isinstance(begun, Publishing)
            answer = await process.handle("controller", FinishPublish(policy_version=begun.policy_version))
            assert isinstance(answer, Published)
            handles.append(answer.handle)
            await step(process, pool)
            if len(handles) == 1:
                await process.handle("controller", SaveCheckpoint(directory=str(directory), state={"step": 1}))
        await process.handle("controller", FinishCheckpoint())
        first, second = handles
        assert first.adapters is not None and first.adapters == second.adapters
        assert (first.adapters.rank, first.adapters.alpha) == (3, 5)
        base = load_file(first.adapters.base.path)
        model = load_policy(tmp_path / "run" / "model", weights=False, seed=0)
        assert layout(base) == layout(dict(model.named_parameters()))
        receive = MergingReceiver(Receiver(layout(base), machine="", directory=tmp_path), torch.device("cpu"))
        both = [receive(handle) for handle in handles]
    assert set(first.adapters.targets) == {name for name in base if "proj" in name}
    assert all(torch.equal(each, base[name]) for name, each in both[0].items()), "adapters begin without effect"
    saved = load_file(directory / "model.safetensors")
    for name, weight in both[1].items():
        torch.testing.assert_close(weight, saved[name], rtol=0, atol=1e-6 if settings.get("ranks") else 0)
        assert torch.equal(weight, base[name]) == (name not in first.adapters.targets)
    config = json.loads((Path(second.path).parent / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 5) and "q_proj" in config["target_modules"]


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.long)])
async def test_what_a_rank_refuses_is_refused_by_the_trainer(tmp_path: Path, pool: list[GroupRef], ranks: int) -> None:
    with trainer(tmp_path, ranks=ranks, lora={"targets": ["q_prj"]}) as process:
        await process.handle("controller", Begin(policy_version=0))
        with pytest.raises(ConfigError, match=r"trainer.lora.targets \['q_prj'\]"):
            await process.handle("controller", Publish())


def test_ranks_meet_on_their_machines_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ADDRESS, "127.0.0.2")
    rank = TrainerRank(Rank(0, 2), {}, config=configured(ranks=2, sections=TWO_NODES), place=0)
    meeting = rank.open_rendezvous()
    assert meeting.host == "127.0.0.2"
    socket.create_connection((meeting.host, meeting.port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", meeting.port), timeout=5)


@pytest.mark.long
async def test_ranks_of_other_machines_do_what_ranks_here_do(tmp_path: Path, pool: list[GroupRef]) -> None:
    """And a trainer that is started again finds its new ranks. A warm start would use more threads of each machine, and
    so round differently."""
    seen = []
    here = {**TWO, **AS_IT_IS}
    apart = {**BETWEEN_MACHINES, "sections": {"model": MODEL, **TWO_NODES}}
    for settings in (here, apart, apart):
        with trainer(tmp_path, **settings) as process:
            await process.handle("controller", Begin(policy_version=0))
            seen.append((await step(process, pool), await published(process)))
    (expected, expected_weights), *others = seen
    for metrics, weights in others:
        assert metrics == expected
        for name, weight in expected_weights.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=0)


@pytest.mark.usefixtures("pool")
def test_a_rank_that_does_not_come_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: nullcontext(SimpleNamespace(pid=os.getpid(), kill=int)))
    settings = {**SPLIT, "sections": {"supervisor": {"ready_timeout_s": 1.0}}}
    with pytest.raises(Stalled, match=r"trainer-0 waited 0\.75 s for its ranks, held by rank-1, rank-2"):
        trainer(tmp_path, **settings).__enter__()


async def test_a_trainer_that_is_stopped_does_not_wait_for_its_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks_there, stop = threading.Event(), asyncio.Event()
    monkeypatch.setattr("penstock.processes.trainer.TrainerProcess", lambda *_: ranks_there.wait(60))

    class Leaving(Child):
        def leave(self) -> NoReturn:
            ranks_there.set()
            raise SystemExit

    child = Leaving(name="trainer-0", run_dir=tmp_path, runtime_dir=tmp_path, run_id="r", nonce="n")
    stop.set()
    with pytest.raises(SystemExit):
        await made(configured(), child, stop)
