"""Which backend confines programs in this process, and boxes made by it."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Literal

from penstock.config.invalid_settings import ConfigError
from penstock.sandbox import bubblewrap, namespaces, unconfined
from penstock.sandbox.control_groups import ControlGroups
from penstock.sandbox.init_client import InitBox
from penstock.sandbox.launch import INIT, WORK, Launch, Plan, interpreter
from penstock.sandbox.limits import DEFAULT_LIMITS, Limits, Outcome
from penstock.sandbox.user_slots import UserSlot

Backend = Literal["bubblewrap", "namespaces", "none"]
Choice = Literal["auto", "bubblewrap", "namespaces", "none"]
BACKENDS: tuple[Backend, ...] = ("bubblewrap", "namespaces")
"""Those that confine, the better one first."""
ALL: tuple[Backend, ...] = (*BACKENDS, "none")
CAP_SYS_ADMIN = 21
SELECTED = "PENSTOCK_SANDBOX"
"""Environment variable with the choice, for this process and its children."""


class SandboxUnavailable(ConfigError):
    """No backend can confine programs here."""


def select(name: Choice) -> None:
    """Choose the backend of this process and of its children."""
    os.environ[SELECTED] = name
    confinement.cache_clear()


@functools.cache
def confinement() -> Backend:
    """Return the backend in force. Raises `SandboxUnavailable` if the chosen one cannot confine programs here."""
    choice = os.environ.get(SELECTED, "auto")
    tried: dict[Backend, str] = {}
    for backend in BACKENDS if choice == "auto" else [each for each in ALL if each == choice]:
        reason = why_not(backend)
        if reason is None:
            return backend
        tried[backend] = reason
    raise SandboxUnavailable(
        f"no sandbox can confine programs here: {'; '.join(f'{name}: {why}' for name, why in tried.items())}. Install "
        "bubblewrap 0.8 or newer (apt-get install bubblewrap) and permit it to make namespaces (in a container: "
        "--security-opt seccomp=unconfined --security-opt apparmor=unconfined), or set env.sandbox: none and programs "
        "of the policy run unconfined as this user"
    )


def why_not(backend: Backend) -> str | None:
    """Return why a backend does not work here; None if it does. It is tried with a program."""
    try:
        with _open(backend, Plan(limits=DEFAULT_LIMITS)) as box:
            outcome = box.run(python("-S", "-c", "pass"))
    except OSError as error:
        return str(error)
    return None if outcome.returncode == 0 else f"a program in it ends with {outcome.returncode}: {outcome.stderr}"


def _open(backend: Backend, plan: Plan) -> InitBox:
    """Open a box. Raises OSError if the backend cannot make it."""
    with ExitStack() as undone:
        held = undone.enter_context(ExitStack())
        launch = Launch()
        undone.callback(launch.ours.close)
        plan, user = _with_user(plan, held) if backend != "none" and os.geteuid() == 0 else (plan, None)
        work = WORK if backend != "none" else held.enter_context(closing(unconfined.WorkDirectory())).path
        groups = held.enter_context(closing(ControlGroups(plan.limits)))
        try:
            process = launch.start(_command(backend, plan, launch, work), begun=groups.add, user=user)
            undone.callback(process.wait)
            undone.callback(process.kill)
            groups.add(process.pid)
        finally:
            launch.close()
        undone.pop_all()
        return InitBox(process, launch.ours, work, plan.limits, held)


def _with_user(plan: Plan, held: ExitStack) -> tuple[Plan, int | None]:
    """Return the plan of a box with a user of its own, and the user to start the launcher as; None if root starts it,
    because root may mount."""
    uid = held.enter_context(closing(UserSlot())).uid
    return (dataclasses.replace(plan, slot_uid=uid), None) if may_mount() else (plan, uid)


def _command(backend: Backend, plan: Plan, launch: Launch, work: str) -> list[str]:
    if backend == "bubblewrap":
        return bubblewrap.command(plan, launch)
    if backend == "namespaces":
        return namespaces.command(plan, launch)
    return [*launch.python(INIT), *launch.arguments(plan, work)]


def may_mount() -> bool:
    """Return whether this process has CAP_SYS_ADMIN. Root lacks it in most containers."""
    status = dict(line.split(":\t") for line in Path("/proc/self/status").read_text().splitlines())
    return bool(int(status["CapEff"], 16) >> CAP_SYS_ADMIN & 1)


def open_box(
    *,
    limits: Limits = DEFAULT_LIMITS,
    network: bool = False,
    readable: Sequence[Path] = (),
    copied: Mapping[Path, bytes] = {},
) -> InitBox:
    """Open a sandbox. This blocks for some 30 ms. `network`: programs may use the network of this machine, its loopback
    included. `readable`: host paths that are mounted read-only at the same place. `copied`: files that only the box
    has, read-only, by their place there."""
    return _open(confinement(), Plan(limits=limits, network=network, readable=tuple(readable), copied=copied))


def run(
    argv: Sequence[str],
    *,
    files: Mapping[str, str] = {},
    stdin: str = "",
    limits: Limits = DEFAULT_LIMITS,
    env: Mapping[str, str] | None = None,
    network: bool = False,
) -> Outcome:
    """Run one program in a box of its own, beside `files`. This blocks: call it from a thread."""
    with open_box(limits=limits, network=network) as box:
        for name, text in files.items():
            box.write(name, text)
        return box.run(argv, stdin=stdin, env=env)


def python(*arguments: str) -> list[str]:
    """Return a command line for this Python interpreter, isolated from the user's environment and packages. The
    argument `-S` also hides the packages installed beside the interpreter and halves the start time."""
    return [interpreter(), "-I", *arguments]
