"""Settings of every test session: reproducible examples, the session guard, and which worker runs which test."""

from __future__ import annotations

import atexit
import os
import signal
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings
from session_guard import SessionGuard
from worker_groups import GroupScheduling, group_of, rank_of, write_groups

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch
    from xdist.remote import Producer

# The same examples each time: a change is judged by what it changes. `--hypothesis-profile=search` looks for others.
settings.register_profile("unhurried", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("unhurried")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has what it runs in the background ignore it, and so would the runs that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)

# More processes compute at once than there are cores. Threads that wait for each other in a loop would take the cores
# from those that they wait for. Torch reads this when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

NUM_WORKERS_MAX = 8


def is_xdist_worker(config: pytest.Config) -> bool:
    """Return whether this process runs tests for another pytest process."""
    return hasattr(config, "workerinput")


def pytest_configure(config: pytest.Config) -> None:
    if is_xdist_worker(config):
        return
    config.option.loadscopereorder = False  # the scheduler keeps the order of the collection
    atexit.register(SessionGuard().close)  # after whatever tests register later, such as the end of Ray


def pytest_xdist_auto_num_workers() -> int:
    """Start one worker more than there are cores, because real runs wait a lot."""
    return min(len(os.sched_getaffinity(0)) + 1, NUM_WORKERS_MAX)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling:
    return GroupScheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=rank_of)
    for item in items:
        if group_of(item) == "ray":  # starting a cluster takes too long for `make test`
            item.add_marker(pytest.mark.long)


@pytest.hookimpl(tryfirst=True)  # before xdist tells the scheduler, which reads what is written here
def pytest_collection_finish(session: pytest.Session) -> None:
    if is_xdist_worker(session.config):
        write_groups(session.items, os.environ["PYTEST_XDIST_WORKER"])


@pytest.fixture(autouse=True)
def _own_interface() -> Iterator[None]:
    """Let no test leave the network interface of its process group to the runs of later tests."""
    variables = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    before = {name: os.environ.get(name) for name in variables}
    yield
    for name, value in before.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where a test computes: here and, if there is one, on a CUDA device."""
    import torch  # most tests need none

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(request.param)


@pytest.fixture
def sandboxed() -> None:
    """Skip the test where nothing can confine programs, as in a default container."""
    from penstock.sandbox import SandboxUnavailable, confinement

    try:
        confinement()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
