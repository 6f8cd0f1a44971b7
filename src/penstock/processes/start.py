"""Entry point of every child: arm the death pipe first, only then import the role and what it needs."""

from __future__ import annotations

import importlib

from penstock.supervisor.child import Child


def main() -> None:
    child = Child.from_environment()
    role = child.name.partition("-")[0]
    child.run(lambda: importlib.import_module(f"penstock.processes.{role}").serve(child))


if __name__ == "__main__":
    main()
