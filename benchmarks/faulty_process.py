"""A process of a run that fails on request in ways signals alone cannot bring about, and tells what it is at.

SIGUSR2 ends it with exit code 0, as a library that calls `exit` would; SIGRTMIN makes it lose all it sends on the bus
for a while. It says when it begins and when it has ended to publish, save or update weights, and the trainer also what
it trained: in datagrams, which need no disk and arrive even if their sender dies at once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.control import bus
from penstock.control.messages import Accumulate, AnyMessage, HoldsNothing, LearnerStateUpdate, Restore
from penstock.processes import start

WITNESS = "PENSTOCK_WITNESS"
"""Environment variable: path of the socket that hears what processes are at."""
LOSE_S = 3.0
"""How long messages are lost."""

Tell = Callable[..., None]


def main() -> None:
    signal.signal(signal.SIGUSR2, lambda *_: os._exit(0))
    lose_messages_on_request()
    role = sys.argv[sys.argv.index("--name") + 1].partition("-")[0]
    {"trainer": watch_trainer, "controller": watch_updates}.get(role, watch_nothing)(teller(role))
    start.main()


def lose_messages_on_request() -> None:
    """Every endpoint that is made without a fault of its own gets this one."""
    lost_until = 0.0

    def lose(*_: object) -> None:
        nonlocal lost_until
        lost_until = time.monotonic() + LOSE_S

    def fault(frame: bytes) -> list[bytes]:
        return [] if time.monotonic() < lost_until else [frame]

    signal.signal(signal.SIGRTMIN, lose)
    for endpoint in (bus.Bus, bus.Peer):
        defaults: dict[str, Any] = getattr(endpoint.__init__, "__kwdefaults__")  # noqa: B009
        defaults["fault"] = fault


def teller(role: str) -> Tell:
    """tell(what, begins, **facts): returns once the witness is sure to hear it."""
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    channel.connect(os.environ[WITNESS])

    def tell(what: str, begins: bool, **facts: Any) -> None:
        word = {"time": time.time(), "role": role, "pid": os.getpid(), "what": what, "begins": begins, **facts}
        channel.send(json.dumps(word).encode())

    return tell


def watch_trainer(tell: Tell) -> None:
    from penstock.processes.trainer import TrainerProcess

    handle = TrainerProcess.handle

    async def told(process: TrainerProcess, sender: str, message: AnyMessage) -> AnyMessage | None:
        what = type(message).__name__
        tell(what, True)
        reply = await handle(process, sender, message)
        if not isinstance(reply, HoldsNothing):
            tell(what, False, **facts_of(message, reply))
        return reply

    setattr(TrainerProcess, "handle", told)  # noqa: B010


def watch_nothing(tell: Tell) -> None:
    """Environment workers and servers are seen from the controller."""


def facts_of(message: AnyMessage, reply: AnyMessage | None) -> dict[str, Any]:
    """What the lineage of the weights follows from."""
    match message, reply:
        case Accumulate(groups=groups), _:
            return {"groups": [group.group for group in groups]}
        case _, LearnerStateUpdate(state=state):
            return {"policy_version": state.policy_version}
        case Restore(step=step), _:
            return {"step": step}
    return {}


def watch_updates(tell: Tell) -> None:
    """From the first server that is told of new weights until the last one serves them."""
    from penstock.rollout.servers import Servers

    update: Callable[..., Awaitable[object]] = Servers.update_weights

    async def told(servers: Servers, handle: Any) -> object:
        tell("UpdateWeights", True)
        updated = await update(servers, handle)
        tell("UpdateWeights", False)
        return updated

    setattr(Servers, "update_weights", told)  # noqa: B010


if __name__ == "__main__":
    main()
