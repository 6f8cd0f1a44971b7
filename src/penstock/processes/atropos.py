"""The environment worker of a run that uses Atropos environments.

Atropos environments are separate programs. They connect to this worker, run episodes and push complete groups.

On one loopback port the worker serves the Atropos trajectory API, the OpenAI API and SGLang's `/generate`. The last two
serve the policy, and the worker remembers every generated token. The controller sees an ordinary worker. The port opens
before the run begins, and stays the same after a restart.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from penstock.compat.atropos_api import Atropos
from penstock.compat.openai import OpenAI
from penstock.compat.pushed_groups import Provenance
from penstock.config import Config, ConfigError
from penstock.config.environments import AtroposOptions
from penstock.envs.pushed_group_exchange import Exchange
from penstock.observe.jsonl import write_json
from penstock.ports.environment import PolicyClient
from penstock.processes.env_worker import Worker
from penstock.processes.layout import chat_of
from penstock.processes.pool_access import pool_of_worker
from penstock.processes.tracing import tracing
from penstock.rollout.app import ApiKeys, App
from penstock.rollout.generation import Generation
from penstock.rollout.generation_cache import GenerationCache
from penstock.rollout.recording_proxy import RecordingProxy
from penstock.runtime.http_server import CannotListen, bind, listening, url_of
from penstock.supervisor.child import Child

LOOPBACK = "127.0.0.1"
ADDRESS = "atropos.json"
"""File in the run's directory that holds the address of this worker."""
FAREWELL_S = 1.0
"""Wait at the end of a run, so that environments learn that the run is over. They ask ten times a second."""


async def trade(child: Child, config: Config) -> None:
    """Pass groups from the environments to the run, until told to stop."""
    async with tracing(config, child) as trace, asyncio.TaskGroup() as tasks:
        worker = Worker(config, child.name, pool_of_worker(child), tasks, trace=trace)
        async with open_exchange(child, config, worker.servers) as exchange:

            def counts() -> dict[str, float]:
                return {f"groups_{name}": count for name, count in exchange.counts.items()}

            await worker.run(child, exchange, counts, stop=child.stop_event(), joined=child.report_ready)
        await worker.servers.close()


@asynccontextmanager
async def open_exchange(child: Child, config: Config, policy: PolicyClient) -> AsyncIterator[Exchange]:
    """Serve the environments for the length of the body, and yield the exchange that receives their groups."""
    chat = chat_of(config, child.run_dir)
    cache = GenerationCache()
    limit = config.scheduler.max_staleness
    exchange = Exchange(max_staleness=limit, newest=lambda: relay.served.newest, holder=lambda: atropos.holder())
    relay = RecordingProxy(
        policy,
        cache,
        name=config.env.name,
        max_context=config.model.max_context,
        is_open=lambda: exchange.has_begun,
        published=lambda: exchange.published,
    )
    provenance = Provenance(cache, config, chat)
    atropos = Atropos(exchange, provenance, relay.served, config, child.run_id, child.run_dir)
    surfaces = atropos, OpenAI(relay, chat, model_name=config.model.path), Generation(relay, chat)
    app = App([route for surface in surfaces for route in surface.routes()], ApiKeys())
    listener = _bind(AtroposOptions.model_validate(config.env.options), child.run_dir)
    url = url_of(LOOPBACK, listener)
    print(f"Atropos environments push to {url} (env.rollout_server_url) and ask {url}/v1 (openai.base_url)", flush=True)
    async with listening(app, listener):
        yield exchange
        atropos.is_over = True
        if atropos.is_visited:
            await asyncio.sleep(FAREWELL_S)


def _bind(options: AtroposOptions, run_dir: Path) -> socket.socket:
    """Bind the configured port, else the port that an earlier worker of this run chose, else a free port.

    Raises `ConfigError` if the port is not available.
    """
    file = run_dir / ADDRESS
    port = options.port
    if not port and file.is_file():
        port = msgspec.json.decode(file.read_bytes())["port"]
    try:
        listener = bind(LOOPBACK, port)
    except CannotListen as error:
        raise ConfigError(f"env.options.port: {error}; choose another, or 0 to let the system choose") from None
    port = listener.getsockname()[1]
    write_json(file, {"url": url_of(LOOPBACK, port), "port": port})
    return listener
