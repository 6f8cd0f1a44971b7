"""Two machines with real addresses: this one, and a network namespace at the other end of a cable."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator

import pytest
from cable import Cable


@pytest.fixture
def cable() -> Iterator[Cable]:
    """A cable from this machine to a separate network. Skips if the system allows no such network."""
    if shutil.which("ip") is None or os.geteuid():
        pytest.skip("network namespaces need `ip` and root")
    cable = Cable()
    try:
        cable.make_network()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"network namespaces cannot be made: {error.stderr.decode()}")
    try:
        cable.lay()
        yield cable
    finally:
        cable.remove()
