"""The environment worker of a run whose environments are Atropos': they come by themselves, play, and push groups.

On one loopback port it shows them the trajectory API, and the policy behind OpenAI's surface and SGLang's `/generate`,
which remembers what it says. To the controller it is a worker like any other. The port is open before the run has
begun, and the same after a restart.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from penstock.compat.atropos import Atropos, RunFacts, Versions
from penstock.compat.openai import OpenAI
from penstock.compat.scored_data import Limits, Tracing
from penstock.config import Config, ConfigError
from penstock.config.atropos import AtroposOptions
from penstock.envs.manager import run_rollout_loop
from penstock.envs.scored import Exchange
from penstock.model.chat import ChatTokenizer
from penstock.ports import PolicyClient
from penstock.processes.env import Worker, servers_of, work
from penstock.processes.layout import model_dir
from penstock.processes.listening import bind, listening, url_of
from penstock.processes.pool import pool_of_worker
from penstock.rollout.app import App
from penstock.rollout.generation import Generation
from penstock.rollout.keys import Keys
from penstock.rollout.relay import Relay
from penstock.rollout.remembered import Remembered
from penstock.supervisor.child import Child
from penstock.types import Sampling

LOOPBACK = "127.0.0.1"
ADDRESS = "atropos.json"
"""In the run's directory."""
FAREWELL_S = 1.0
"""For environments, which ask ten times a second, to hear that the run is over."""


async def trade(child: Child, config: Config) -> None:
    """Pass on what environments play, until told to stop."""
    servers = servers_of(config)
    async with asyncio.TaskGroup() as tasks, open_exchange(child, config, servers) as exchange:
        worker = Worker(config, child.name, pool_of_worker(child), tasks, servers)
        tasks.create_task(run_rollout_loop(exchange, worker.jobs()))
        worker.counts = lambda: {f"groups_{name}": count for name, count in exchange.counts.items()}
        await work(child, config, worker, stop=child.stop_event(), joined=child.report_ready)
    await servers.close()


@asynccontextmanager
async def open_exchange(child: Child, config: Config, policy: PolicyClient) -> AsyncIterator[Exchange]:
    """Where environments hand in what they played, for the length of the body."""
    chat = ChatTokenizer.load(model_dir(config, child.run_dir))
    sampling = Sampling(temperature=config.env.temperature, top_p=config.env.top_p, top_k=config.env.top_k)
    limits = Limits(
        group_size=config.env.group_size,
        max_context=config.model.max_context,
        vocab_size=chat.vocab_size,
        sampling=sampling,
    )
    remembered, now = Remembered(), asyncio.get_running_loop().time
    exchange = Exchange(
        max_staleness=config.scheduler.max_staleness,
        newest=lambda: relay.served.newest,
        holder=lambda: atropos.holder(),
    )
    relay = Relay(
        policy,
        remembered,
        name=config.env.name,
        max_context=config.model.max_context,
        is_open=lambda: exchange.has_begun,
    )
    atropos = Atropos(
        exchange,
        Tracing(remembered, limits, decode=chat.decode),
        Versions(
            newest=lambda: relay.served.newest,
            oldest_possible=lambda: relay.served.oldest_since(now() - config.env.episode_timeout_s),
        ),
        facts=RunFacts(
            run_id=child.run_id,
            directory=child.run_dir,
            num_steps=config.trainer.steps,
            groups_per_step=config.trainer.groups_per_step,
            checkpoint_every=config.trainer.checkpoint_every,
        ),
        limits=limits,
    )
    surfaces = atropos, OpenAI(relay, chat, model_name=config.model.path), Generation(relay, chat)
    app = App([route for surface in surfaces for route in surface.routes()], Keys())
    listener = _bind(AtroposOptions.model_validate(config.env.options), child.run_dir)
    url = url_of(LOOPBACK, listener)
    print(f"Atropos environments push to {url} (env.rollout_server_url) and ask {url}/v1 (openai.base_url)", flush=True)
    async with listening(app, listener):
        yield exchange
        atropos.over = True
        if atropos.is_visited:
            await asyncio.sleep(FAREWELL_S)


def _bind(options: AtroposOptions, run_dir: Path) -> socket.socket:
    """On the port that is asked for, or the one that an earlier worker of this run had chosen."""
    file = run_dir / ADDRESS
    port = options.port
    if not port and file.is_file():
        port = msgspec.json.decode(file.read_bytes())["port"]
    try:
        listener = bind(LOOPBACK, port)
    except OSError as error:
        raise ConfigError(
            f"env.options.port: cannot listen on {LOOPBACK}:{port} ({error.strerror}); choose another, or 0 to let the "
            "system choose"
        ) from None
    port = listener.getsockname()[1]
    file.write_bytes(msgspec.json.encode({"url": url_of(LOOPBACK, port), "port": port}))
    return listener
