"""One rollout server without a run: a model directory behind HTTP until a signal comes."""

from __future__ import annotations

import asyncio
import secrets
import signal
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import uvloop

from penstock.config import Config
from penstock.processes.cores import num_threads
from penstock.processes.listening import bind, listening, url_of
from penstock.processes.member import first
from penstock.processes.serving import application, make_engine
from penstock.rollout.failures import EngineDead
from penstock.rollout.runner import EngineRunner
from penstock.rollout.server import Identity


class CannotListen(Exception):
    """The address is taken, or not this machine's."""


def serve(config: Config, model: Path, *, model_name: str) -> None:
    """Serves the model in `model` until SIGINT or SIGTERM. `CannotListen` if the port is taken; `ModelError`, OSError
    or ValueError for a directory without a model that can be read; `EngineDead` if it fails later."""
    uvloop.run(_serve(config, model, model_name))


async def _serve(config: Config, model: Path, model_name: str) -> None:
    torch.set_num_threads(num_threads(config, config.rollout.torch_threads, num_sharing=1))
    host, port = config.rollout.host, config.rollout.port
    try:
        listener = bind(host, port)
    except OSError as error:
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    runner = EngineRunner(make_engine(config, model, weights="stored"), process="rollout-0")
    runner.start()
    identity = Identity(run_id="alone", nonce=secrets.token_hex(8))
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    try:
        with (
            TemporaryDirectory(prefix="penstock-serve-") as scratch,
            application(runner, config, model, identity=identity, model_name=model_name, scratch=Path(scratch)) as app,
        ):
            url = url_of(host, listener)
            context = f"context {config.model.max_context} tokens (model.max_context=N for another)"
            async with listening(app, listener):
                print(f"serving {model_name} at {url} (OpenAI: {url}/v1), {context}; Ctrl-C ends it", flush=True)
                await first(stop.wait(), runner.failed.wait())
                failure = runner.error
                await runner.stop()  # while the server listens, so that whoever waits is told
        if failure is not None:
            raise EngineDead(f"the engine failed: {failure!r}; its traceback is above")
    finally:
        await runner.stop()
