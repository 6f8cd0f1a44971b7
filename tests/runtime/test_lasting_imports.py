"""Where torch keeps compiled code: nowhere that another user could take first."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.runtime.lasting_imports import COMPILED

IMPORTS = """
import os
from penstock.runtime.lasting_imports import lasting_imports
with lasting_imports():
    import torch._dynamo
    from torch._inductor.runtime.runtime_utils import cache_dir
    print(os.path.realpath(cache_dir()))
"""


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return an empty home, and a directory for temporary files in which every name that torch could choose is taken by
    a file."""
    home, temporary = tmp_path / "home", tmp_path / "t"
    home.mkdir()
    temporary.mkdir()
    for name in (os.environ.get("LOGNAME"), os.environ.get("USER"), "root", os.getuid()):
        (temporary / f"torchinductor_{name}").touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setenv("TMPDIR", str(temporary))
    for name in (COMPILED, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    return home, temporary


def cache_of_torch() -> Path:
    found = subprocess.run([sys.executable, "-c", IMPORTS], capture_output=True, text=True, timeout=300)
    assert found.returncode == 0, found.stderr
    return Path(found.stdout.strip())


@pytest.mark.integration
def test_a_name_that_is_taken_keeps_nothing_from_starting(places: tuple[Path, Path]) -> None:
    home, _ = places
    cache = cache_of_torch()
    assert cache == home / ".cache" / "penstock" / "torchinductor"
    assert cache.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.integration
@pytest.mark.long
def test_without_a_home_it_is_a_directory_of_its_own_that_does_not_stay(places: tuple[Path, Path]) -> None:
    home, temporary = places
    home.chmod(0o777)
    (home / ".cache").mkdir()
    (home / ".cache" / "penstock").mkdir()
    (home / ".cache" / "penstock").chmod(0o777)
    before = set(temporary.iterdir())
    cache = cache_of_torch()
    assert cache.parent.parent == temporary and cache.parent.name.startswith("penstock-cache-")
    assert set(temporary.iterdir()) == before


@pytest.mark.integration
@pytest.mark.long
def test_a_place_that_the_environment_names_is_used(places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    _, temporary = places
    monkeypatch.setenv(COMPILED, str(temporary / "mine"))
    assert cache_of_torch() == temporary / "mine"
