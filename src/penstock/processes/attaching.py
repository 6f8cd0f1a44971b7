"""The other side of `attached`: a process of the user's own plays for a run that is going on, until either ends."""

from __future__ import annotations

import asyncio

from penstock.config import Config, ConfigError, load_config
from penstock.envs.registry import means, playable, resolve
from penstock.ports import Environment
from penstock.processes import env
from penstock.processes.member import first
from penstock.supervisor.child import Child
from penstock.supervisor.record import is_supervised, owner_of, read_state
from penstock.supervisor.states import RunState

LOOK_EVERY_S = 0.25
GOES_ON = (RunState.PENDING, RunState.STARTING, RunState.RUNNING)


async def attend(child: Child, kind: type[Environment]) -> None:
    """Play `kind`, beside whatever other environments the run has, until SIGINT or SIGTERM, or until the run stops."""
    config, stop, joined = load_config(child.run_dir / "config.yaml"), child.stop_event(), asyncio.Event()
    if config.cluster.address is not None and not config.rollout.api_key:
        raise ConfigError(
            f"run {child.run_id} is on several machines, and its servers ask for a key: set PENSTOCK_API_KEY when the "
            "run is started, and the same here"
        )
    kinds = kinds_with(kind, config)

    def welcome() -> None:
        joined.set()
        print(f"attached to run {child.run_id} as {child.name}; Ctrl-C leaves it", flush=True)

    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(_watch(child, stop))
        playing = tasks.create_task(env.play(child, config, kinds, stop=stop, joined=welcome, attached=True))
        await first(stop.wait(), asyncio.wait([playing]))
        if not joined.is_set():
            playing.cancel()
        await asyncio.wait([playing])
        watching.cancel()


def kinds_with(kind: type[Environment], config: Config) -> dict[str, type[Environment]]:
    """The environments of a run by name, `kind` in the place of those that mean it. Raises `ConfigError` if none do."""
    names = config.environments.names
    if not any(means(name, kind) for name in names):
        raise ConfigError(f"run {config.run_id} plays {', '.join(names)}, and this file holds {kind.__name__}")
    return {name: playable(name, kind) if means(name, kind) else resolve(name) for name in names}


def goes_on(child: Child) -> bool:
    """Whether the run needs workers, and has somebody who keeps it going."""
    state = read_state(child.run_dir) or {}
    owner = owner_of(state)
    return state.get("status") in GOES_ON and owner is not None and is_supervised(child.run_dir, owner)


async def _watch(child: Child, stop: asyncio.Event) -> None:
    while goes_on(child):  # noqa: ASYNC110 - it is the state of another process
        await asyncio.sleep(LOOK_EVERY_S)
    stop.set()
