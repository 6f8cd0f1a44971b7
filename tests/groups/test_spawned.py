"""Processes, and what goes through the sockets to them."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from group_workers import Probe
from hypothesis import given
from hypothesis import strategies as st

from penstock.groups.batch import Batch
from penstock.groups.spawned import SpawnedGroup
from penstock.groups.wire import OWN_FRAME_BYTES, Packed, pack, unpack
from penstock.runtime.frames import receive, send

WAIT_S = 30.0

DRIVER = """
import sys
from pathlib import Path
from group_workers import Probe
from penstock.groups.spawned import SpawnedGroup

group = SpawnedGroup(Probe, 2)
held = group.held(Path(sys.argv[1]), 1)
print(*group.backend.pids, flush=True)
held.result()
"""


class Counted:
    """Knows how often it was pickled."""

    times: ClassVar[int] = 0

    def __reduce__(self) -> Any:
        Counted.times += 1
        return str, ("counted",)


def has_ended(watched: int) -> bool:
    """Whether the process does within the time; `watched` is its pidfd."""
    return bool(select.select([watched], [], [], WAIT_S)[0])


@pytest.mark.integration
def test_workers_end_with_a_driver_that_is_killed_in_mid_call(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(gate)], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
    )
    assert driver.stdout is not None
    with driver.stdout:
        watched = [os.pidfd_open(int(pid)) for pid in driver.stdout.readline().split()]
    with gate.open("w"):
        driver.kill()
        assert driver.wait(WAIT_S) == -signal.SIGKILL
        assert len(watched) == 2 and all(map(has_ended, watched))
    for fd in watched:
        os.close(fd)


@pytest.mark.integration
def test_workers_end_when_the_group_is_closed() -> None:
    with SpawnedGroup(Probe, 2) as group:
        watched = [os.pidfd_open(pid) for pid in group.backend.pids]
    assert all(map(has_ended, watched))
    for fd in watched:
        os.close(fd)


@pytest.mark.integration
def test_what_all_workers_get_is_pickled_once() -> None:
    with SpawnedGroup(Probe, 3) as group:
        Counted.times = 0
        assert group.one_to_all(Counted(), 2) == [(rank, "counted", 2) for rank in range(3)]
    assert Counted.times == 1


@pytest.mark.integration
def test_threads_may_call_at_once_and_all_workers_see_one_order() -> None:
    with SpawnedGroup(Probe, 3) as group:

        def note(name: str) -> None:
            for i in range(20):
                group.note(f"{name}{i}")

        threads = [threading.Thread(target=note, args=(name,)) for name in "abc"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        logs = group.noted()
    assert logs[0] == logs[1] == logs[2] and len(logs[0]) == 60


@given(lengths=st.lists(st.sampled_from([0, 1, 1000, OWN_FRAME_BYTES, OWN_FRAME_BYTES + 1]), max_size=5))
def test_messages_arrive_as_they_were(lengths: Sequence[int]) -> None:
    arrays = [np.arange(length, dtype=np.uint8) for length in lengths]
    frames = pack({"packed": Packed(pack([arrays, "text"])), "plain": arrays})
    assert len(frames) == 1 + 2 * sum(length >= OWN_FRAME_BYTES for length in lengths)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        sender = threading.Thread(target=send, args=(ours, frames))
        sender.start()
        arrived = receive(theirs)
        sender.join()
        ours.close()
        with pytest.raises(EOFError):
            receive(theirs)
    message = unpack(arrived)
    assert message["packed"][1] == "text"
    for got in (message["plain"], message["packed"][0]):
        assert all(np.array_equal(a, b) for a, b in zip(got, arrays, strict=True))


def test_a_large_batch_is_not_copied_into_its_pickle() -> None:
    batch = Batch(columns={"number": np.zeros(1_000_000)})
    frames = pack({"batch": Packed(pack(batch))})
    assert [len(memoryview(frame)) for frame in frames[1:]] == [8_000_000]
    assert np.shares_memory(np.frombuffer(frames[1], dtype=np.float64), batch["number"])
