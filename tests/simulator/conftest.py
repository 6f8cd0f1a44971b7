"""What several files of tests start from."""

from __future__ import annotations

from pathlib import Path

import pytest
from recording import config, record


@pytest.fixture(scope="session")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A simulated run with the files of a real one."""
    directory = tmp_path_factory.mktemp("runs") / "recorded"
    record(directory, config())
    return directory
