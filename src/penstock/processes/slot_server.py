"""A rollout server of our own: slot engine and HTTP server, with a seat on the bus for address and heartbeats."""

from __future__ import annotations

import socket

import torch

from penstock.config import Config
from penstock.processes.cores import num_threads
from penstock.processes.devices import take_one
from penstock.processes.layout import model_dir, num_servers_beside
from penstock.processes.listening import bind, host_of, listening, number_of, port_of, url_of
from penstock.processes.member import Telemetry, ask_nothing, first, membership
from penstock.processes.serving import Weights, application, make_engine
from penstock.rollout.claim import Claim
from penstock.rollout.runner import EngineRunner
from penstock.rollout.server import Identity
from penstock.supervisor.child import Child
from penstock.supervisor.runtime import runtime_dirs

RECEIVED = "received"
"""Of the runtime directory: weights of other machines, in a folder of each server."""


async def serve(child: Child, config: Config) -> None:
    stop = child.stop_event()
    take_one(config, number_of(child))
    num_sharing = num_servers_beside(config, child.name)
    torch.set_num_threads(num_threads(config, config.rollout.torch_threads, num_sharing=num_sharing))
    listener = listen(child, config)
    directory = model_dir(config, child.run_dir)
    runner = EngineRunner(make_engine(config, directory, weights=weights_of(config)), process=child.name)
    runner.start()
    identity = Identity(run_id=child.run_id, nonce=child.nonce)
    url = url_of(host_of(child, config), listener)
    try:
        with application(
            runner,
            config,
            directory,
            identity=identity,
            model_name=config.model.path,
            scratch=child.runtime_dir / RECEIVED / child.name,
            neighbours=lambda: (path for each in runtime_dirs(child.run_id) for path in each.glob(f"{RECEIVED}/*")),
            claim=Claim(child.run_id, child.nonce),
        ) as app:
            async with (
                listening(app, listener),
                membership(
                    child, config, role="rollout", handler=ask_nothing, telemetry=lambda: telemetry(runner), url=url
                ),
            ):
                child.report_ready(url)
                await first(stop.wait(), runner.failed.wait())
                failure = runner.error
                await runner.stop()  # while the server listens, so that whoever waits is told
        if failure is not None:
            child.fail(f"the engine failed: {failure!r}")
    finally:
        await runner.stop()


def weights_of(config: Config) -> Weights:
    """Without a trainer a server has them from the start, and so has one that was started anew."""
    if config.has_trainer:
        return "published"
    return "random" if config.model.path == "tiny" else "stored"


def telemetry(runner: EngineRunner) -> Telemetry:
    return Telemetry(
        progress=runner.num_generated_tokens + runner.num_prompt_tokens,
        doing="generation" if runner.engine.has_work else "",
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
    port = port_of(child, config)
    try:
        return bind(host_of(child, config), port)
    except OSError as error:
        child.fail(f"{child.name} cannot listen on {host_of(child, config)}:{port}: {error.strerror}")
