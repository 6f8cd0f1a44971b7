"""The connection to a Ray cluster of which this machine is a node, and calls of actors with a time limit.

The connection is checked before anything else begins.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private.services import canonicalize_bootstrap_address
from ray.exceptions import RayError, RayTaskError

from penstock.config.imports import check_closed
from penstock.deadline import deadline
from penstock.own_files import is_open_to_others
from penstock.supervisor.procfs import pid_namespace

REACHED_S = 5.0
"""Limit for opening a TCP connection."""
ANSWERED_S = 30.0
"""Limit for the server at the address to answer as a Ray cluster does."""
ASK = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1])"
FLAG = "--gcs-address="
SESSION_FLAG = "--session-dir="
"""Arguments of a node's process."""
UNSHARED = "/"
"""Working directory during `ray.init`. Ray puts it at the front of the import path of its processes on every node, and
only root can write to this one, on any machine."""
REMEDY = "start one with `ray start --head`, join it with `ray start --address`, or correct cluster.address"
START = "start it with RAY_AUTH_MODE=token, with the token of `ray get-auth-token --generate` on all machines"
TOKEN = "set RAY_AUTH_MODE=token, and have the cluster's token in ~/.ray/auth_token"
WHY = [re.compile(rf"{words} (.*?)\.(?: |$)", re.M) for words in ("Worker exit detail:", "The actor is dead because")]
"""Patterns for the reason of an actor's death in Ray's messages, the more informative one first."""


class NotConnected(ConnectionError):
    """No Ray cluster can be joined at this address."""


@contextmanager
def connected(address: str, *, private: bool) -> Iterator[str]:
    """Connect to the cluster at `address` during the body. Yields the address of this machine as a node. Raises
    `NotConnected` within a minute and a half, also for a cluster without token authentication, unless its network is
    `private`, and `ConfigError` if other users can write to the working directory: Ray's processes import from it."""
    check_closed(Path.cwd())
    found = _resolve(address)
    _check_token_file()
    _check(found, private=private)
    if not private:
        _check_sessions(found)
    try:
        with chdir(UNSHARED):
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
        found = canonicalize_bootstrap_address(_own_address() if address == "auto" else address)
    except (ConnectionError, ValueError) as error:
        raise NotConnected(f"cluster.address: {address} is no address of a Ray cluster ({error}); {REMEDY}") from None
    if found is None:
        raise NotConnected(f"cluster.address: {address} finds no Ray cluster on this machine; {REMEDY}")
    return found


def _own_address() -> str:
    """Return the address in RAY_ADDRESS, or that of the only cluster with a node of ours here. Ray's own search
    believes command lines and files of every user. Raises `NotConnected`."""
    if (named := os.environ.get("RAY_ADDRESS", "auto")) != "auto":
        return named
    found = {address for words in _own_nodes() for address in _flags(words, FLAG)}
    if len(found) != 1:
        number = (
            f"{len(found)} Ray clusters of ours ({', '.join(sorted(found))})" if found else "no Ray cluster of ours"
        )
        raise NotConnected(f"cluster.address: auto finds {number} on this machine: give host:port, or {REMEDY}")
    return found.pop()


def _own_nodes() -> Iterator[list[str]]:
    """Yield the command line of each of our nodes on this machine."""
    here = pid_namespace()
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            is_ours = process.uids().real == os.getuid() and pid_namespace(str(process.pid)) == here  # not of a sandbox
            if is_ours and Path(process.exe()).name == "raylet":
                yield process.cmdline()


def _flags(words: Sequence[str], flag: str) -> list[str]:
    return [word[len(flag) :] for word in words if word.startswith(flag)]


def _check_token_file() -> None:
    """Check that no other user can read the token. Raises `NotConnected`."""
    if os.environ.get("RAY_AUTH_MODE") != "token" or "RAY_AUTH_TOKEN" in os.environ:
        return
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if _is_open(file):
        raise NotConnected(
            f"cluster.address: other users of this machine can read the token in {file}, and with it run programs as "
            f"you: make a new one, and `chmod 600 {file}`, on all machines"
        )


def _check_sessions(address: str) -> None:
    """Check that no other user can exchange the files of our nodes of this cluster. Ray lets everybody write to the
    sockets and packages of its session. Raises `NotConnected`."""
    for words in (each for each in _own_nodes() if address in _flags(each, FLAG)):
        for session in map(Path, _flags(words, SESSION_FLAG)):
            check_session(session)


def check_session(session: Path) -> None:
    """Check that no other user can reach a session directory of Ray. Raises `NotConnected`."""
    if _is_open(session):
        raise NotConnected(
            f"cluster.address: Ray's directory {session} is open to all users of this machine. They can exchange the "
            "code in it, and so run programs as you. Start Ray on every machine with `--temp-dir` in a private "
            "directory (`mkdir -m 700 ~/ray`). Or set cluster.private=true, if you trust all users of these machines"
        )


def _is_open(path: Path) -> bool:
    try:
        return is_open_to_others(path)
    except OSError:  # it is not there, or not on this machine
        return False


def _check(address: str, *, private: bool) -> None:
    """Check that a Ray cluster answers, and that it answers only to clients with a token. Raises `NotConnected`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACHED_S).close()
    except (OSError, ValueError) as error:
        raise NotConnected(f"cluster.address: no server answers at {address} ({error}); {REMEDY}") from None
    if _answers(address, os.environ | {"RAY_AUTH_MODE": "disabled"}):
        if not private:
            raise NotConnected(
                f"cluster.address: the Ray cluster at {address} asks for no token, so every user and machine that "
                f"reaches its ports can run programs as you: {START}; or set cluster.private=true if only people whom "
                "you trust reach them"
            )
    elif not _answers(address, os.environ):
        raise NotConnected(f"cluster.address: {address} requires a token: {TOKEN}")


def _answers(address: str, environment: Mapping[str, str]) -> bool:
    """Return whether a Ray cluster answers; False if it requires a token and has got none, or a wrong one. Ray itself
    tries for minutes and ignores signals, so a separate process asks, which can be killed. Raises `NotConnected`."""
    command = [sys.executable, "-P", "-c", ASK, address]
    limits: dict[str, Any] = {"timeout": ANSWERED_S, "check": True, "env": environment}
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, **limits)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        if b"AuthenticationError" in (error.stderr or b""):
            return False
        raise NotConnected(f"cluster.address: the server at {address} is not a Ray cluster; {REMEDY}") from None
    return True


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
