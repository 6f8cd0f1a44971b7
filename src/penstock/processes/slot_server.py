"""Rollout servers with our own engine: a process of a run, or a server without a run that a user starts."""

from __future__ import annotations

import asyncio
import gc
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import torch
import uvloop

from penstock.compat.dialects import dialects
from penstock.compat.openai import OpenAI
from penstock.compat.sglang import SGLang
from penstock.config import Config
from penstock.deadline import first
from penstock.model.chat import ChatTokenizer
from penstock.model.compute import CopyStream
from penstock.model.load_policy import load_policy, resolve_device, resolve_dtype
from penstock.processes.bus_client import Member, Telemetry, membership
from penstock.processes.devices import devices_in_use, num_threads, take_one
from penstock.processes.layout import RECEIVED, host_of, model_dir, num_servers_beside, server_number
from penstock.processes.visible import shares_device
from penstock.rollout.app import ApiKeys
from penstock.rollout.claim import Claim
from penstock.rollout.generator import EngineDead
from penstock.rollout.runner import EngineRunner
from penstock.rollout.server import Identity, create_app
from penstock.rollout.slot_engine import SlotEngine
from penstock.rollout.update import Receive, Tensors, WeightsUpdate
from penstock.runtime.file_service import WEIGHTS
from penstock.runtime.http_server import bind, listening, url_of
from penstock.runtime.interfaces import use_interface_of
from penstock.supervisor.child import Child
from penstock.supervisor.procfs import boot_id
from penstock.supervisor.runtime import runtime_dirs
from penstock.trainer.checkpoint import stored_version
from penstock.types import NO_VERSION, WeightsHandle
from penstock.weights.adapters import MergingReceiver
from penstock.weights.collective import Groups, max_bucket_bytes
from penstock.weights.receiver import Receiver
from penstock.weights.shared_memory import describe, fingerprint, layout
from penstock.weights.tensor_payload import read_tensors

Weights = Literal["published", "stored", "random"]
"""Source of an engine's weights: sent by a trainer, stored in the model's directory, or random from a seed."""


def make_engine(config: Config, directory: Path, *, weights: Weights, fills_device: bool = True) -> SlotEngine:
    """Return the engine with the model in `directory`. `fills_device`: whether its prefix cache may take memory that is
    free now.

    Stored weights are served under the policy_version of their checkpoint, or 0. Random weights are the same for the
    same `seed`.
    """
    device = resolve_device(config.model.device)
    dtype = resolve_dtype(config.model.dtype, device)
    version = stored_version(directory) if weights == "stored" else 0
    return SlotEngine(
        load_policy(directory, dtype=dtype, device=device, weights=weights == "stored", seed=config.seed),
        num_slots=config.rollout.slots,
        max_context=config.model.max_context,
        policy_version=NO_VERSION if weights == "published" else version,
        num_cached=None if fills_device else 0,
    )


def make_update(runner: EngineRunner, receive: Receive) -> WeightsUpdate:
    """Return a weights update that copies new weights to the engine's device while the engine generates.

    So the pause of a commit lasts only as long as a copy within the device.
    """
    device = runner.engine.model.device
    copy_stream, receive_whole = CopyStream(device), MergingReceiver(receive, device)

    def receive_there(handle: WeightsHandle) -> Tensors:
        with copy_stream():
            return receive_whole(handle)

    def fingerprint_of(tensors: Tensors) -> str:
        with copy_stream():
            return fingerprint(tensors)

    return WeightsUpdate(runner, receive_there, fingerprint_of)


async def serve(child: Child, config: Config) -> None:
    """Serve as a process of a run."""
    stop = child.stop_event()
    fills_device = not shares_device(config, server_number(child))  # else the trainer may need later what is free now
    take_one(config, server_number(child))
    child.log_start(
        model=config.model.path,
        device=config.model.device,
        dtype=config.model.dtype,
        slots=config.rollout.slots,
        max_context=config.model.max_context,
        weights=weights_of(config),
    )
    num_sharing = num_servers_beside(config, child.name)
    torch.set_num_threads(num_threads(config, config.rollout.torch_threads, num_sharing=num_sharing))
    listener = bind(host_of(child, config), child.port, held=True)
    url = url_of(host_of(child, config), listener)
    if child.address is not None:
        use_interface_of(child.address)
    async with (
        serving(
            config,
            model_dir(config, child.run_dir),
            listener,
            process=child.name,
            weights=weights_of(config),
            identity=Identity(run_id=child.run_id, nonce=child.secret("identity")),
            model_name=config.model.path,
            scratch=child.runtime_dir / RECEIVED / child.name,
            neighbours=lambda: (path for each in runtime_dirs(child.run_id) for path in each.glob(f"{RECEIVED}/*")),
            published=lambda: (path / WEIGHTS for path in (child.run_dir, *runtime_dirs(child.run_id))),
            claim=Claim(child.run_id, child.secret("claim")),
            fills_device=fills_device,
        ) as runner,
        membership(child, config, role="rollout", member=EngineMember(runner), url=url),
    ):
        child.report_ready(url, devices=devices_in_use())
        await first(stop.wait(), runner.failed.wait())


def serve_alone(config: Config, model: Path, *, model_name: str) -> None:
    """Serve the model in directory `model` without a run, until SIGINT or SIGTERM.

    Raises `CannotListen` if the port is taken. Raises `ModelError`, OSError or ValueError if the directory has no
    readable model. Raises `EngineDead` if the engine fails later.
    """
    uvloop.run(_serve_alone(config, model, model_name))


async def _serve_alone(config: Config, model: Path, model_name: str) -> None:
    torch.set_num_threads(num_threads(config, config.rollout.torch_threads, num_sharing=1))
    listener, stop = bind(config.rollout.host, config.rollout.port), asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with TemporaryDirectory(prefix="penstock-serve-") as scratch:
        async with serving(
            config,
            model,
            listener,
            process="rollout-0",
            weights="stored",
            identity=Identity(run_id="alone", nonce=secrets.token_hex(8)),
            model_name=model_name,
            scratch=Path(scratch),
        ) as runner:
            url = url_of(config.rollout.host, listener)
            context = f"context {config.model.max_context} tokens (model.max_context=N for another)"
            print(f"serving {model_name} at {url} (OpenAI: {url}/v1), {context}; Ctrl-C ends it", flush=True)
            await first(stop.wait(), runner.failed.wait())


@asynccontextmanager
async def serving(
    config: Config,
    directory: Path,
    listener: socket.socket,
    *,
    process: str,
    weights: Weights,
    identity: Identity,
    model_name: str,
    scratch: Path,
    neighbours: Callable[[], Iterable[Path]] = tuple,
    published: Callable[[], Iterable[Path]] | None = None,
    claim: Claim | None = None,
    fills_device: bool = True,
) -> AsyncIterator[EngineRunner]:
    """Serve the model in `directory` for the length of the body: our own routes, SGLang's and OpenAI's in front of one
    engine. Yield the engine's runner. Raises `EngineDead` after the body if the engine has failed.

    `scratch`: directory for weights that come from another machine. `neighbours`: the `scratch` directories of all
    servers of this run on this machine. `published`: the directories in which published weights lie; None for any.
    `fills_device`: see `make_engine`.
    """
    engine = make_engine(config, directory, weights=weights, fills_device=fills_device)
    runner = EngineRunner(engine, process=process)
    runner.start()
    sglang: SGLang | None = None
    try:
        tokenizer = ChatTokenizer.load(directory, tool_format=config.model.tool_format)
        expected = layout(runner.engine.parameters())
        tokenizer.max_characters = runner.max_context * tokenizer.longest_token
        receiver = Receiver(expected, machine=boot_id(), directory=scratch, neighbours=neighbours, published=published)

        def describe_directory(path: Path, version: int) -> WeightsHandle:
            receiver.check_place(path)
            return describe(path, expected, policy_version=version)

        update, device = make_update(runner, receiver), runner.engine.model.device
        max_bytes = max_bucket_bytes(expected)
        sglang = SGLang(
            runner,
            update,
            Groups(device=device, max_bytes=max_bytes),
            describe=describe_directory,
            read_payload=partial(read_tensors, max_bytes=max_bytes, device=device),
            model_path=str(directory),
            model_name=model_name,
        )
        keys, chats = ApiKeys.of(config.rollout), OpenAI(runner, tokenizer, model_name=model_name)
        foreign = chats, *dialects(chats, model_name=model_name), sglang
        app = create_app(
            runner,
            identity=identity,
            update=update,
            tokenizer=tokenizer,
            keys=keys,
            claim=claim,
            transport=lambda: receiver.transport,
            foreign=foreign,
        )
        gc.collect()
        gc.freeze()  # later collections need not scan the model's objects while answers are made
        async with listening(app, listener):
            yield runner
            failure = runner.error
            await runner.stop()  # stop it while the server listens, so that waiting clients get an answer
        if failure is not None:
            raise EngineDead(f"the engine failed: {failure!r}; its traceback is above")
    finally:
        if sglang is not None:
            sglang.close()  # leaves its weight groups
        await runner.stop()


def weights_of(config: Config) -> Weights:
    """Return the source of the server's weights. Without a trainer, the server has its weights from the start, also
    after a restart."""
    if config.has_trainer:
        return "published"
    return "random" if config.model.path == "tiny" else "stored"


class EngineMember(Member):
    """The server on the bus: it reports the work of its engine."""

    def __init__(self, runner: EngineRunner) -> None:
        self._runner = runner

    def telemetry(self) -> Telemetry:
        runner, engine = self._runner, self._runner.engine
        return Telemetry(
            progress=engine.num_generated_tokens + runner.num_prompt_tokens,
            doing="generation" if engine.has_work else "",
            busy_s=runner.meter.busy_s,
            counters={
                "tokens": engine.num_generated_tokens,
                "active": engine.num_active,
                "prompt_tokens": runner.num_prompt_tokens,
                "prompt_tokens_reused": runner.num_reused_tokens,
                "cached_tokens_evicted": engine.num_evicted,
                **runner.costs.counters(),
            },
            spans=runner.meter.drain(),
        )
