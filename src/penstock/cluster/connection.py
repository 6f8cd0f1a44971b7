"""A cluster that this machine is a node of, asked for before anything is begun."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import ray
from ray._private.services import canonicalize_bootstrap_address

REACHED_S = 5.0
"""For a connection to be made."""
ANSWERED_S = 30.0
"""For what listens there to answer as a Ray cluster does."""
ASK = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
REMEDY = "start one with `ray start --head`, join it with `ray start --address`, or correct cluster.address"
TOKEN = "set RAY_AUTH_MODE=token, and have the cluster's token in ~/.ray/auth_token"


class NotConnected(ConnectionError):
    """There is no cluster to be had at that address."""


@contextmanager
def connected(address: str) -> Iterator[str]:
    """For the length of the body; yields the address of this machine as a node. Raises `NotConnected` within a
    minute."""
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
    """`host:port`."""
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
    """Ray itself tries for minutes, deaf to signals: so it is asked in a process that can be ended."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACHED_S).close()
    except (OSError, ValueError) as error:
        raise NotConnected(f"cluster.address: nobody answers at {address} ({error}); {REMEDY}") from None
    asked = [sys.executable, "-c", ASK, address]
    try:
        subprocess.run(asked, stdin=subprocess.DEVNULL, capture_output=True, timeout=ANSWERED_S, check=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        if b"AuthenticationError" in (error.stderr or b""):
            raise NotConnected(f"cluster.address: {address} asks for a token: {TOKEN}") from None
        raise NotConnected(f"cluster.address: what listens at {address} is no Ray cluster; {REMEDY}") from None
