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
