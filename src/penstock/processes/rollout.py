"""A rollout server: slot engine and HTTP server, with a seat on the bus for its address and its heartbeats."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
import uvicorn

from penstock.config import Config, load_config
from penstock.control.messages import AnyMessage
from penstock.model.chat import ChatTokenizer
from penstock.model.load import load_policy, resolve_device, resolve_dtype
from penstock.processes.cores import num_threads
from penstock.processes.layout import model_dir
from penstock.processes.member import Telemetry, membership
from penstock.rollout.engine import SlotEngine
from penstock.rollout.runner import EngineRunner
from penstock.rollout.server import Identity, create_app
from penstock.supervisor.child import Child
from penstock.types import WeightsHandle
from penstock.weights.shared_memory import fingerprint, layout, receive


async def serve(child: Child) -> None:
    config = load_config(child.run_dir / "config.yaml")
    stop = child.stop_event()
    torch.set_num_threads(num_threads(config, config.rollout.torch_threads, num_sharing=config.rollout.servers))
    listener = listen(child, config)
    directory = model_dir(config, child.run_dir)
    device = resolve_device(config.model.device)
    dtype = resolve_dtype(config.model.dtype, device)
    model = load_policy(directory, dtype=dtype, device=device, weights=False)
    engine = SlotEngine(model, num_slots=config.rollout.slots, max_context=config.model.max_context)
    expected = layout(engine.parameters())

    def load(handle: WeightsHandle) -> Mapping[str, torch.Tensor]:
        return receive(handle, expected)

    runner = EngineRunner(engine, process=child.name)
    runner.start()
    app = create_app(
        runner,
        identity=Identity(run_id=child.run_id, nonce=child.nonce),
        receive=load,
        fingerprint=fingerprint,
        tokenizer=ChatTokenizer.load(directory),
        api_key=config.rollout.api_key,
    )
    settings = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
    server = HttpServer(settings)
    host = f"[{config.rollout.host}]" if ":" in config.rollout.host else config.rollout.host
    url = f"http://{host}:{listener.getsockname()[1]}"
    try:
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve(sockets=[listener]))
            async with membership(
                child, config, role="rollout", handler=refuse, telemetry=lambda: telemetry(runner), url=url
            ):
                child.report_ready(url)
                await stop.wait()
            server.should_exit = True
            await serving
    finally:
        await runner.stop()


class HttpServer(uvicorn.Server):
    """Leaves signals to the process: SIGTERM means what `child.stop_event()` says."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def telemetry(runner: EngineRunner) -> Telemetry:
    return Telemetry(
        progress=runner.num_generated_tokens,
        busy_s=runner.busy_s,
        counters={
            "tokens": runner.num_generated_tokens,
            "active": runner.engine.num_active,
            **runner.costs.counters(),
        },
        spans=runner.drain_spans(),
    )


def listen(child: Child, config: Config) -> socket.socket:
    """Bind before the model is loaded, so that a busy port is known at once."""
    number = int(child.name.rpartition("-")[2])
    port = config.rollout.port + number if config.rollout.port else 0
    listener = socket.socket(socket.AF_INET6 if ":" in config.rollout.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((config.rollout.host, port))
        listener.listen()
    except OSError as error:
        child.fail(f"{child.name} cannot listen on {config.rollout.host}:{port}: {error.strerror}")
    return listener


async def refuse(_: str, message: AnyMessage) -> AnyMessage | None:
    """Broadcasts are for others; nobody asks a rollout server anything over the bus."""
    return None
