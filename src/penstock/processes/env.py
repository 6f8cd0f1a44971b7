"""An environment worker: creates environments and runs leased groups in them.

The run starts it, or a user attaches it to the run. An attached worker ends when the run stops or when the user stops
it.
"""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import aclosing, asynccontextmanager

from penstock.config import Config, ConfigError, load_config
from penstock.config.environments import ATROPOS
from penstock.config.secret_settings import VARIABLES
from penstock.control.runtime_files import ServerKeys
from penstock.deadline import alongside, first
from penstock.envs.agents import Gateway
from penstock.envs.isolated import making
from penstock.envs.manager import EnvManager
from penstock.envs.registry import is_agent, managers_of, means, playable, resolve
from penstock.envs.rewards.scorer import Scorers
from penstock.model.chat import ChatTokenizer
from penstock.model.files import routing
from penstock.ports.environment import Environment
from penstock.processes.env_worker import Worker
from penstock.processes.layout import chat_of, model_dir
from penstock.processes.pool_access import pool_of_worker
from penstock.processes.tracing import tracing
from penstock.rollout.openai_client import policy_of
from penstock.sandbox import select
from penstock.supervisor.child import Child
from penstock.supervisor.run_journal import living_owner, read_state
from penstock.supervisor.states import RunState

LOOPBACK = "127.0.0.1"
UNBOUNDED = 1 << 40
"""`model.max_context` of a policy that counts its tokens itself."""
COLLECT_AFTER = 5_000, 10, 10
"""How often garbage is collected (`gc.set_threshold`). Each collection visits the objects of the open episodes, which
are all in use. By default, an agent's request spends an eighth of its processor time on that."""
LOOK_EVERY_S = 0.25
GOES_ON = (RunState.PENDING, RunState.STARTING, RunState.RUNNING)


async def serve(child: Child) -> None:
    config = load_config(child.run_dir / "config.yaml")
    for name in VARIABLES.values():  # programs that environments start do not inherit the key
        os.environ.pop(name, None)
    names, env = ", ".join(config.environments.names), config.env
    child.log_start(
        environments=names, group_size=env.group_size, max_open=config.max_open, episode_timeout_s=env.episode_timeout_s
    )
    if config.env.name == ATROPOS:
        from penstock.processes import atropos

        await atropos.trade(child, config)
        return
    kinds = {name: resolve(name) for name in config.environments.names}
    await play(child, config, kinds, stop=child.stop_event(), joined=child.report_ready)


async def play(
    child: Child,
    config: Config,
    kinds: Mapping[str, type[Environment]],
    *,
    stop: asyncio.Event,
    joined: Callable[[], None],
    attached: bool = False,
) -> None:
    """Run the groups that the controller leases, in environments of `kinds` (by name), until `stop` is set.

    `joined` is called once the controller has welcomed this worker.
    """
    gc.set_threshold(*COLLECT_AFTER)
    select(config.env.sandbox)
    managers = managers_of(config, kinds)
    chat = chat_of(config, child.run_dir)
    async with (
        making(config, kinds) as make,
        aclosing(Scorers(config)) as scorers,
        gateway_for_agents(config, kinds.values(), chat) as gateway,
        tracing(config, child) as trace,
        asyncio.TaskGroup() as tasks,
    ):
        recorded = routing(model_dir(config, child.run_dir)) if config.replays_routers else None
        worker = Worker(config, child.name, pool_of_worker(child), tasks, routing=recorded, trace=trace)
        other = None if config.policy.has_tokens else policy_of(config.policy)
        manager = EnvManager(
            config if other is None else without_token_limits(config),
            make=make,
            policy=other or worker.servers,
            grants=worker,
            chat=chat,
            gateway=gateway,
            scorers=scorers,
            managers=managers,
        )

        def counts() -> dict[str, float]:
            return manager.counts() | (dict(other.counts()) if other is not None else {})

        await worker.run(child, manager, counts, stop=stop, joined=joined, attached=attached)
        await worker.servers.close()
        if other is not None:
            await other.close()


def without_token_limits(config: Config) -> Config:
    """Return the configuration for a policy without tokens: one request is one answer, whatever bytes it has."""
    model = config.model.model_copy(update={"max_context": UNBOUNDED})
    scheduler = config.scheduler.model_copy(
        update={"max_segment_count": 0}
    )  # an answer at its limit is never continued
    return config.model_copy(update={"model": model, "scheduler": scheduler})


async def attend(child: Child, kind: type[Environment]) -> None:
    """Run episodes of `kind`, and of the run's other environments, until SIGINT or SIGTERM, or until the run stops."""
    config, stop, joined = with_servers_key(child), child.stop_event(), asyncio.Event()
    kinds = kinds_with(kind, config)

    def welcome() -> None:
        joined.set()
        print(f"attached to run {child.run_id} as {child.name}; Ctrl-C leaves it", flush=True)

    async with alongside(_watch(child, stop)), asyncio.TaskGroup() as tasks:
        working = tasks.create_task(play(child, config, kinds, stop=stop, joined=welcome, attached=True))
        await first(stop.wait(), asyncio.wait([working]))
        if not joined.is_set():
            working.cancel()


def with_servers_key(child: Child) -> Config:
    """Return the run's configuration with the key to its rollout servers, for a process that the run did not start."""
    config, keys = load_config(child.run_dir / "config.yaml"), ServerKeys.read(child.runtime_dir)
    if keys is None or not keys.api_key:
        return config
    return config.model_copy(update={"rollout": config.rollout.model_copy(update={"api_key": keys.api_key})})


def kinds_with(kind: type[Environment], config: Config) -> dict[str, type[Environment]]:
    """Return the environments of a run by name, with `kind` for each name that means it.

    Raises `ConfigError` if no name means `kind`.
    """
    names = config.environments.names
    if not any(means(name, kind) for name in names):
        raise ConfigError(f"run {config.run_id} uses {', '.join(names)}, but this file defines {kind.__name__}")
    return {name: playable(name, kind) if means(name, kind) else resolve(name) for name in names}


def goes_on(child: Child) -> bool:
    """Return whether the run is pending, starting or running, and has a live supervisor."""
    state = read_state(child.run_dir) or {}
    return state.get("status") in GOES_ON and living_owner(child.run_dir, state) is not None


async def _watch(child: Child, stop: asyncio.Event) -> None:
    while goes_on(child):  # noqa: ASYNC110 - another process changes this state
        await asyncio.sleep(LOOK_EVERY_S)
    stop.set()


@asynccontextmanager
async def gateway_for_agents(
    config: Config, kinds: Iterable[type[Environment]], chat: ChatTokenizer
) -> AsyncIterator[Gateway | None]:
    """Serve the agent gateway on loopback for the length of the body. Yield None if no environment is an agent."""
    if not any(map(is_agent, kinds)):
        yield None
        return
    from penstock.compat.gateway import AgentGateway
    from penstock.runtime.http_server import bind, listening, url_of

    gateway = AgentGateway(chat, model_name=config.model_name)
    listener = bind(LOOPBACK, 0)
    gateway.url = url_of(LOOPBACK, listener)
    async with listening(gateway, listener):
        yield gateway
