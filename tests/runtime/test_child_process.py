"""A child behind its pipe: what it answers, and how it ends."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from penstock.runtime import frames
from penstock.runtime.child_process import ChildProcess
from penstock.runtime.frames import JOIN_BYTES, Frames

pytestmark = pytest.mark.integration
WAIT_S = 30.0


class Echo:
    """Answers with what it is asked. `leave` starts a program, and ends this process."""

    def answer(self, request: Frames) -> Frames:
        print("this is no answer")
        if bytes(request[0]) == b"leave":
            subprocess.Popen(["sleep", "600"])
            os._exit(3)
        return request


@pytest.fixture
def child() -> Iterator[ChildProcess]:
    child = ChildProcess(f"{Echo.__module__}:Echo")
    yield child
    child.kill()
    child.wait()
    child.pipe.close()


def session_of(process: psutil.Process) -> int:
    try:
        return os.getsid(process.pid)
    except ProcessLookupError:
        return 0


def test_requests_are_answered_in_order_however_long_they_are(child: ChildProcess) -> None:
    messages = [[b"first"], [b"", b"x" * (JOIN_BYTES + 1), b"y"], [b"z" * 10]]
    for message in messages:
        frames.send(child.pipe, message)
    assert [[bytes(frame) for frame in frames.receive(child.pipe)] for _ in messages] == messages


def test_a_child_ends_with_its_pipe(child: ChildProcess) -> None:
    child.pipe.close()
    assert child.wait() == "exit 0" and child.is_gone


def test_the_end_of_a_child_is_seen_though_its_programs_live_and_these_end_with_its_session(
    child: ChildProcess,
) -> None:
    frames.send(child.pipe, [b"leave"])
    with pytest.raises(EOFError):
        frames.receive(child.pipe)
    assert child.wait() == "exit 3"
    (program,) = [process for process in psutil.process_iter() if session_of(process) == child.pid]
    child.kill()
    _, alive = psutil.wait_procs([program], timeout=WAIT_S)
    assert not alive
