"""What the package carries beside its modules."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "penstock"


def test_every_file_of_the_pages_is_in_the_package() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["penstock"]
    packed = {path for pattern in patterns for path in PACKAGE.glob(pattern) if path.is_file()}
    static = {path for path in (PACKAGE / "dashboard" / "static").rglob("*") if path.is_file()}
    assert static and static <= packed and PACKAGE / "dashboard" / "demo.zip" in packed
