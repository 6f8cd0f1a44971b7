"""Entry point of every child process: watch for the supervisor's death first, then import the role."""

from __future__ import annotations

import importlib

from penstock.runtime.lasting_imports import lasting_imports
from penstock.runtime.open_files import allow_files
from penstock.supervisor.child import Child

OPEN_FILES = 1 << 16
"""A library like gloo ends its process when it cannot accept a connection, because too many files are open. Strangers
need to open that many connections."""


def main() -> None:
    child = Child.from_environment()
    allow_files(OPEN_FILES)
    child.run(lambda: serve(child))


def serve(child: Child) -> object:
    """Serve as the role that the child's name begins with."""
    with lasting_imports():
        role = importlib.import_module(f"penstock.processes.{child.name.partition('-')[0]}")
    return role.serve(child)


if __name__ == "__main__":
    main()
