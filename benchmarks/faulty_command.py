"""The `penstock` command, with processes that fail on request."""

from __future__ import annotations

from dataclasses import replace

from penstock.cli import main as command
from penstock.cli import train
from penstock.config import Config
from penstock.ports.process_launcher import ProcessSpec
from penstock.processes.layout import stages


def faulty_stages(config: Config) -> list[list[ProcessSpec]]:
    return [[replace(spec, module="faulty_process") for spec in stage] for stage in stages(config)]


if __name__ == "__main__":
    setattr(train, "stages", faulty_stages)  # noqa: B010
    command.main()
