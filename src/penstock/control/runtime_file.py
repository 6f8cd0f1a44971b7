"""Documents in the runtime directory, which only the run's user reads."""

from __future__ import annotations

import os
from pathlib import Path
from typing import ClassVar, Self

import msgspec


class RuntimeFile(msgspec.Struct, frozen=True, kw_only=True):
    """One of them, of which there is one in a directory."""

    FILE: ClassVar[str]

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """None as long as there is none."""
        try:
            return msgspec.json.decode((directory / cls.FILE).read_bytes(), type=cls)
        except FileNotFoundError:
            return None

    def write(self, directory: Path) -> None:
        """Whoever reads meanwhile reads the one before."""
        unfinished = directory / f".{self.FILE}.{os.getpid()}"
        with os.fdopen(os.open(unfinished, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(msgspec.json.encode(self))
        unfinished.replace(directory / self.FILE)
