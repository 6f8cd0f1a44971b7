"""Another user pretends to have a cluster here. `auto` does not find it, so it receives no token."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from penstock.cluster import connection
from penstock.cluster.connection import NotConnected

ADDRESS = "10.9.8.7:6379"


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with programs that every user may run."""
    with tempfile.TemporaryDirectory(dir="/tmp") as made:
        Path(made).chmod(0o755)
        yield Path(made)


def test_the_word_auto_in_the_environment_is_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    monkeypatch.setattr(psutil, "process_iter", list)
    with pytest.raises(NotConnected, match="finds no Ray cluster of ours"):
        connection._resolve("auto")


@pytest.mark.integration
def test_a_process_of_a_sandbox_is_no_node(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is of our user, if we are not root, and it has the command line that it likes."""
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    shutil.copy(shutil.which("cat") or "", folder / "raylet")
    apart = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child"]
    command = [*apart, str(folder / "raylet"), "--", "-", f"--gcs-address={ADDRESS}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"x\n")
        process.stdin.flush()
        if process.stdout.readline() != b"x\n":
            pytest.skip("this user may make no pid namespaces")
        inside = psutil.Process(process.pid).children(recursive=True)
        assert any(f"--gcs-address={ADDRESS}" in each.cmdline() for each in inside)
        monkeypatch.setattr(psutil, "process_iter", lambda: inside)
        with pytest.raises(NotConnected, match="finds no Ray cluster of ours"):
            connection._resolve("auto")
        process.stdin.close()


def test_a_session_that_others_can_change_is_refused(folder: Path) -> None:
    """Ray itself opens everything in its directory to everybody."""
    (session := folder / "ray" / "session_1").mkdir(parents=True)
    for each in (session, session.parent):
        each.chmod(0o777)
    with pytest.raises(NotConnected, match=r"is open to all users of this machine.*--temp-dir.*cluster.private=true"):
        connection.check_session(session)
    folder.chmod(0o700)
    connection.check_session(session)


def test_a_token_that_others_can_read_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (token := folder / "token").write_text("secret")
    token.chmod(0o644)
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    connection._check_token_file()
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    with pytest.raises(NotConnected, match=f"can read the token in {token}.*chmod 600"):
        connection._check_token_file()
    token.chmod(0o600)
    connection._check_token_file()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be two users")
@pytest.mark.parametrize(
    ("user", "program", "found"), [(0, "raylet", ADDRESS), (54321, "raylet", None), (0, "tail", None)]
)
def test_only_a_node_of_ours_is_found(
    folder: Path, user: int, program: str, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    executable = shutil.copy(shutil.which("cat") or "", folder / program)
    read, write = os.pipe()
    with subprocess.Popen(
        ["raylet", "--", "-", f"--gcs-address={ADDRESS}"], executable=executable, stdin=read, user=user
    ) as process:
        monkeypatch.setattr(psutil, "process_iter", lambda: [psutil.Process(process.pid)])
        try:
            if found:
                assert connection._resolve("auto") == found
            else:
                with pytest.raises(NotConnected, match=r"finds no Ray cluster of ours.*give host:port"):
                    connection._resolve("auto")
        finally:
            os.close(write)
            os.close(read)
