"""`penstock simulate`: check, simulate with progress, show a table, leave JSON and a picture behind.

Exit codes: 0 done, 1 a simulated run could not go on, 2 wrong configuration or trace.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from penstock.cli.console import open_console
from penstock.cli.refusal import refuse
from penstock.config import Config, ConfigError, load_config
from penstock.observe import simulation_plot
from penstock.observe.jsonl import write_json
from penstock.simulator import table
from penstock.simulator.report import Report, Watch, predict
from penstock.supervisor.child import CONFIG_ERROR
from penstock.supervisor.run_directory import new_run_id, publishable


def simulate(path: Path, overrides: Sequence[str], *, json: Path | None, plot: Path | None) -> int:
    """Returns the exit code."""
    try:
        config = load_config(path, overrides)
        report = run(config)
    except ConfigError as error:
        return refuse(str(error), CONFIG_ERROR)
    except BaseExceptionGroup as group:
        reasons = "; ".join(str(error) for error in _leaves(group) if getattr(error, "self_explanatory", False))
        if not reasons:
            raise
        return refuse(reasons, 1)
    show(report)
    leave_behind(report, config, json=json, plot=plot)
    return 0


def calibrate(run_dir: Path, *, json: Path | None) -> int:
    """Fit the simulator to a run, say how well, print what to paste. Returns the exit code."""
    from penstock.simulator.calibration import compare

    try:
        found = compare(run_dir)
    except ConfigError as error:
        return refuse(str(error), CONFIG_ERROR)
    open_console().print(table.comparison(found))
    if found.caveat is not None:
        print(f"note: {found.caveat}", file=sys.stderr)
    settings = {"simulator": found.config.simulator.model_dump(mode="json", exclude_defaults=True)}
    sys.stdout.write(yaml.safe_dump(settings, sort_keys=False))
    if json is not None:
        write_json(json, found.plain())
    return 0


def run(config: Config) -> Report:
    """Simulate everything, showing how far it is."""
    with _progress(config) as watch:
        return predict(config, watch=watch)


def show(report: Report) -> None:
    """Print the tables."""
    console = open_console()
    console.print(table.table(report))
    if (makespans := table.makespans(report)) is not None:
        console.print(makespans)


def leave_behind(report: Report, config: Config, *, json: Path | None, plot: Path | None) -> None:
    """Write results and picture; what was not given a place goes into a folder of its own."""
    if json is None or plot is None:
        directory = Path(config.runs_dir) / f"{config.run_id or new_run_id()}-simulation"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.yaml").write_text(yaml.safe_dump(publishable(config), sort_keys=False))
        json, plot = json or directory / "results.json", plot or directory / "simulation.png"
    plain = report.plain()
    write_json(json, plain)
    simulation_plot.draw(plot, [result.plain() for result in report.results])
    print(f"results {json}\npicture {plot}")


@contextmanager
def _progress(config: Config) -> Iterator[Watch]:
    """A bar per simulated run in a terminal, elsewhere a line for each that is done."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = open_console(stderr=True)
    is_shown = config.observe.progress
    with Progress(*columns, console=console, disable=not (is_shown and console.is_terminal)) as bars:
        known: dict[str, TaskID] = {}

        def watch(name: str, step: int, steps: int) -> None:
            if name not in known:
                known[name] = bars.add_task(name, total=steps)
            bars.update(known[name], completed=step)
            if step == steps and is_shown and not console.is_terminal:
                console.print(f"simulated {name}: {steps} steps")

        yield watch


def _leaves(group: BaseExceptionGroup[BaseException]) -> Iterator[BaseException]:
    for error in group.exceptions:
        if isinstance(error, BaseExceptionGroup):
            yield from _leaves(error)
        else:
            yield error
