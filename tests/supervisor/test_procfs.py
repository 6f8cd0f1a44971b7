from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock.supervisor import procfs


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-S", "-c", "import signal; signal.pause()"], env={"MARK": "x y"})
    while not procfs.environment(process.pid)[0]:
        """Between `exec` and the first instruction there is no environment."""
    yield process
    process.kill()
    process.wait()


def test_a_process_is_known_by_pid_start_boot_and_namespace(sleeper: subprocess.Popen[bytes]) -> None:
    identity = procfs.identify(sleeper.pid)
    assert identity and procfs.is_alive(identity)
    assert procfs.environment(sleeper.pid)[0] == b"MARK=x y"
    assert sleeper.pid in {stat.pid for stat in procfs.children()}


def test_no_signal_reaches_a_process_that_only_has_the_pid(sleeper: subprocess.Popen[bytes]) -> None:
    identity = procfs.identify(sleeper.pid)
    assert identity
    reused = dataclasses.replace(identity, start_ticks=identity.start_ticks - 1)
    rebooted = dataclasses.replace(identity, boot_id="another boot")
    contained = dataclasses.replace(identity, pid_namespace="pid:[1]")
    assert not any(procfs.send(other, signal.SIGKILL) for other in (reused, rebooted, contained))
    assert identity.is_here and reused.is_here and not rebooted.is_here and not contained.is_here
    assert sleeper.poll() is None
    assert procfs.send(identity, signal.SIGKILL)
    assert sleeper.wait() == -signal.SIGKILL


def test_signals_need_no_pidfd(sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    identity = procfs.identify(sleeper.pid)
    assert identity
    monkeypatch.delattr(os, "pidfd_open")
    assert not procfs.send(dataclasses.replace(identity, start_ticks=identity.start_ticks - 1), signal.SIGKILL)
    assert procfs.kill_family(lambda stat: stat.pid == sleeper.pid, spare=(), rounds=3) == []
    assert sleeper.wait() == -signal.SIGKILL
    assert not procfs.send(identity, signal.SIGKILL)


def test_a_family_includes_descendants_and_spares_strangers(sleeper: subprocess.Popen[bytes]) -> None:
    found = procfs.family(lambda stat: stat.pid == os.getpid(), spare=())
    assert {os.getpid(), sleeper.pid} <= {stat.pid for stat in found}
    assert procfs.kill_family(lambda stat: stat.pid == sleeper.pid, spare=(), rounds=3) == []
    assert sleeper.wait() == -signal.SIGKILL


def test_nobody_has_pid_0() -> None:
    assert procfs.identify(0) is None
