"""The connection to a Ray cluster of which this machine is a node, and calls of actors with a time limit.

The connection is checked before anything else begins.
"""

from __future__ import annotations

import logging
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray._private.services import canonicalize_bootstrap_address
from ray.exceptions import RayError, RayTaskError

from penstock.deadline import deadline

REACHED_S = 5.0
"""Limit for opening a TCP connection."""
ANSWERED_S = 30.0
"""Limit for the server at the address to answer as a Ray cluster does."""
ASK = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
REMEDY = "start one with `ray start --head`, join it with `ray start --address`, or correct cluster.address"
TOKEN = "set RAY_AUTH_MODE=token, and have the cluster's token in ~/.ray/auth_token"
WHY = [re.compile(rf"{words} (.*?)\.(?: |$)", re.M) for words in ("Worker exit detail:", "The actor is dead because")]
"""Patterns for the reason of an actor's death in Ray's messages, the more informative one first."""


class NotConnected(ConnectionError):
    """No Ray cluster can be joined at this address."""


@contextmanager
def connected(address: str) -> Iterator[str]:
    """Connect to the cluster at `address` during the body. Yields the address of this machine as a node. Raises
    `NotConnected` within a minute."""
    found = _resolve(address)
    _check(found)
    try:
        ray.init(address=found, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise NotConnected(f"cluster.address: {address} cannot be joined: {reason}; {REMEDY}") from None
    try:
        yield ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    finally:
        ray.shutdown()


def _resolve(address: str) -> str:
    """Return the address as `host:port`. Raises `NotConnected`."""
    if address.startswith("ray://"):
        raise NotConnected(f"cluster.address: {address} is for clients outside a cluster; give host:port of its head")
    try:
        found = canonicalize_bootstrap_address(address)
    except (ConnectionError, ValueError) as error:
        raise NotConnected(f"cluster.address: {address} is no address of a Ray cluster ({error}); {REMEDY}") from None
    if found is None:
        raise NotConnected(f"cluster.address: {address} finds no Ray cluster on this machine; {REMEDY}")
    return found


def _check(address: str) -> None:
    """Check that a Ray cluster answers. Ray itself tries for minutes and ignores signals, so a separate process asks,
    which can be killed. Raises `NotConnected`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACHED_S).close()
    except (OSError, ValueError) as error:
        raise NotConnected(f"cluster.address: no server answers at {address} ({error}); {REMEDY}") from None
    command = [sys.executable, "-c", ASK, address]
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWERED_S, check=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        if b"AuthenticationError" in (error.stderr or b""):
            raise NotConnected(f"cluster.address: {address} requires a token: {TOKEN}") from None
        raise NotConnected(f"cluster.address: the server at {address} is not a Ray cluster; {REMEDY}") from None


async def call(method: Any, *arguments: Any, seconds: float, what: str, holder: str) -> Any:
    """Call a method of an actor. Raises what the actor raised, `RayActorError` if it is gone or out of reach, and
    `Stalled` after `seconds`."""
    async with deadline(seconds, waiter="the run", resource=what, holder=holder):
        try:
            return await method.remote(*arguments)
        except RayTaskError as error:
            raise error.cause from None


def end_of(error: RayError) -> str:
    """Return how an actor ended, as far as Ray knows: its process, its machine, and the reason's first sentence."""
    text = str(error)
    why = next((found for pattern in WHY if (found := pattern.search(text))), None)
    where = ", ".join(f"{name} {found[1]}" for name in ("pid", "ip") if (found := re.search(rf"{name}: (\S+)", text)))
    return f"its actor ({where}) is dead: {why[1] if why else text.splitlines()[0]}"
