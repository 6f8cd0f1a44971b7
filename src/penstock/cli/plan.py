"""`penstock plan`: show what memory a run needs; or, for a number of accelerators, check, simulate with progress, show
a table, and write a configuration to start from.

Exit codes: 0 done, 1 the run does not fit or a simulated run could not continue, 2 wrong configuration, trace or run.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from penstock.cli.memory_check import conclusion, memory_plan
from penstock.cli.memory_check import table as memory_table
from penstock.cli.refusal import refusing
from penstock.cli.simulate import results_directory, show_progress
from penstock.config import Config, ConfigError, load_config
from penstock.model.files import read_json
from penstock.observe.jsonl import write_json
from penstock.observe.summary import PREDICTION, predicted_config
from penstock.observe.tables import open_console
from penstock.redaction import redacted
from penstock.simulator import table
from penstock.simulator.planning import Option, plan

ROWS = 12


@refusing
def show_memory_plan(path: Path, overrides: Sequence[str], *, memory: float | None) -> int:
    """Print the memory plan of a configuration and return the exit code. `memory`: of a device, in GiB."""
    config = load_config(path, overrides)
    if memory is not None and not memory > 0:
        raise ConfigError(f"--memory is the memory of one accelerator in GiB, above zero (got {memory:g})")
    if config.model.path != "tiny":
        read_json(Path(config.model.path), "config.json")  # raises ModelError
    plan = memory_plan(config, memory)
    open_console().print(memory_table(plan))
    print(conclusion(plan))
    return 0 if plan["fits"] else 1


@refusing
def show(
    path: Path, overrides: Sequence[str], *, accelerators: int, price: float | None, calibrated_by: Path | None
) -> int:
    """Plan for a configuration and return the exit code. `calibrated_by`: the run that gives the times of machines and
    the lengths of answers."""
    from penstock.observe.plots import draw_simulation

    config = load_config(path, overrides)
    if price is not None and not price > 0:
        raise ConfigError(f"--price is what one accelerator costs per hour, above zero (got {price:g})")
    if calibrated_by is not None:
        from penstock.simulator.calibration import calibrate

        devices = load_config(calibrated_by / "config.yaml").num_ranks
        fitted = calibrate(calibrated_by).model_copy(update={"trainer_devices": devices})
        config = config.model_copy(update={"simulator": fitted})
    with show_progress(is_wanted=config.observe.progress) as watch:
        options = plan(config, accelerators, watch=watch)
    open_console().print(table.plans(options[:ROWS], accelerators=accelerators, price=price))
    directory = results_directory(config, "plan")
    found = [option.plain() | ({"price_of_1000": option.cost(price)} if price else {}) for option in options]
    write_json(directory / "plan.json", {"accelerators": accelerators, "options": found})
    draw_simulation(directory / "plan.png", found[:ROWS])
    start = directory / "config.yaml"
    start.write_text(yaml.safe_dump(_written(to_start_from(config, options[0])), sort_keys=False))
    write_json(directory / PREDICTION, options[0].forecast() | predicted_config(start))
    print(f"start from {start}\nresults    {directory / 'plan.json'}\npicture    {directory / 'plan.png'}")
    return 0


def to_start_from(config: Config, option: Option) -> Config:
    """Return the user's configuration with the split and the settings of a plan."""
    planned = option.config
    simulator = {"trainer_devices": option.trainer_devices, "trainer": planned.simulator.trainer}
    return config.model_copy(
        update={
            "scheduler": planned.scheduler,
            "rollout": config.rollout.model_copy(update={"servers": option.servers}),
            "env": config.env.model_copy(update={"redundancy": planned.env.redundancy}),
            "simulator": config.simulator.model_copy(update={**simulator, "strategies": ["configured"]}),
        }
    )


def _written(config: Config) -> dict[str, Any]:
    """Return what differs from the defaults, without secrets."""
    tree: dict[str, Any] = redacted(config.model_dump(mode="json", exclude_defaults=True))
    return tree
