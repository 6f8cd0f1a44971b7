"""`penstock simulate`: check, simulate with progress, show a table, write JSON and a picture.

Exit codes: 0 done, 1 a simulated run could not continue, 2 wrong configuration or trace.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from penstock.cli.refusal import refusing
from penstock.config import Config, ConfigError, load_config
from penstock.observe.jsonl import write_json
from penstock.observe.tables import open_console
from penstock.own_files import Foreign, check_own_directory
from penstock.simulator import table
from penstock.simulator.prediction import Records, Report, Watch, predict
from penstock.supervisor.run_directory import new_run_id, publishable


@refusing
def simulate(path: Path, overrides: Sequence[str], *, json: Path | None, plot: Path | None) -> int:
    """Simulate a configuration and return the exit code."""
    config = load_config(path, overrides)
    run_id = config.run_id or new_run_id()
    records = None if json and plot else Records(runs_dir=Path(config.runs_dir).absolute(), run_id=run_id)
    with show_progress(is_wanted=config.observe.progress) as watch:
        report = predict(config, watch=watch, records=records)
    console = open_console()
    console.print(table.table(report))
    if (makespans := table.makespans(report)) is not None:
        console.print(makespans)
    write_results(report, config.model_copy(update={"run_id": run_id}), json=json, plot=plot)
    if records is not None:
        print(f"runs    {records.runs_dir / records.run_id}-simulated*, which `penstock dashboard` shows")
    return 0


@refusing
def calibrate(run_dir: Path, *, json: Path | None) -> int:
    """Fit the simulator to a run, print the errors and the settings to paste. Return the exit code."""
    from penstock.simulator.calibration import compare

    found = compare(run_dir)
    open_console().print(table.comparison(found))
    if found.caveat is not None:
        print(f"note: {found.caveat}", file=sys.stderr)
    settings = {"simulator": found.config.simulator.model_dump(mode="json", exclude_defaults=True)}
    sys.stdout.write(yaml.safe_dump(settings, sort_keys=False))
    if json is not None:
        write_json(json, found.plain())
    try:
        predict(found.config, records=Records(runs_dir=run_dir.parent, run_id=run_dir.name, fitted_to=run_dir.name))
    except (OSError, Foreign, ConfigError) as error:
        print(f"note: the simulated run cannot be written beside {run_dir}: {error}", file=sys.stderr)
    else:
        print(
            f"simulated run {run_dir}-simulated: compare it with {run_dir.name} in `penstock dashboard`",
            file=sys.stderr,
        )
    return 0


def write_results(report: Report, config: Config, *, json: Path | None, plot: Path | None) -> None:
    """Write results and picture. A file without a given path goes into a new folder."""
    from penstock.observe.plots import draw_simulation

    if json is None or plot is None:
        directory = results_directory(config, "simulation")
        (directory / "config.yaml").write_text(yaml.safe_dump(publishable(config), sort_keys=False))
        json, plot = json or directory / "results.json", plot or directory / "simulation.png"
    write_json(json, report.plain())
    draw_simulation(plot, [result.plain() for result in report.results])
    print(f"results {json}\npicture {plot}")


def results_directory(config: Config, what: str) -> Path:
    """Make a new folder for the results of a simulation."""
    directory = Path(config.runs_dir) / f"{config.run_id or new_run_id()}-{what}"
    directory.mkdir(parents=True, exist_ok=True)
    check_own_directory(directory)  # another user could have put links there
    return directory


@contextmanager
def show_progress(*, is_wanted: bool) -> Iterator[Watch]:
    """Show a bar for each simulated run in a terminal; elsewhere print a line for each finished run."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = open_console(stderr=True)
    with Progress(*columns, console=console, disable=not (is_wanted and console.is_terminal)) as bars:
        known: dict[str, TaskID] = {}

        def watch(name: str, step: int, steps: int) -> None:
            if name not in known:
                known[name] = bars.add_task(name, total=steps)
            bars.update(known[name], completed=step)
            if step == steps and is_wanted and not console.is_terminal:
                console.print(f"simulated {name}: {steps} steps")

        yield watch
