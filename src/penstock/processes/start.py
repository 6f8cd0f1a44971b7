"""Entry point of every child process: watch for the supervisor's death first, then import the role."""

from __future__ import annotations

import importlib

from penstock.supervisor.child import Child


def main() -> None:
    child = Child.from_environment()
    role = child.name.partition("-")[0]
    child.run(lambda: importlib.import_module(f"penstock.processes.{role}").serve(child))


if __name__ == "__main__":
    main()
