"""Tables of a simulation's report for the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.box import SIMPLE
from rich.table import Column, Table

from penstock.simulator.calibration import FIGURES, Comparison
from penstock.simulator.planning import Option
from penstock.simulator.prediction import Report, Result

WASTE = ("wasted_discarded", "wasted_filtered", "wasted_restarted", "wasted_surplus", "wasted_masked")


COLUMNS = ("samples/s", "of X*", "bubble", "trainer idle", "staleness", "wait p99", "wasted", "KS", "first B")


def table(report: Report) -> Table:
    """Return a table with one line per combination."""
    lines = _table("Simulated", "strategy", *COLUMNS)
    lines.padding = (0, 1, 0, 0)
    for result in report.results:
        lines.add_row(result.name, *_cells(result))
    lines.caption = (
        "X*: what the machines allow; staleness: mean and largest; KS: distance of trained lengths from all; "
        "first B: until a step's groups were whole"
    )
    return lines


def makespans(report: Report) -> Table | None:
    """Return a table with one line per order of dispatch; None if no closed set was simulated."""
    if not report.makespans:
        return None
    lines = _table("Makespan of a closed set", "dispatch", "seconds")
    for made in report.makespans:
        lines.add_row(made.dispatch, ", ".join(f"{seconds:,.0f}" for seconds in made.seconds))
    return lines


def plans(options: Sequence[Option], *, accelerators: int, price: float | None) -> Table:
    """Return a table with one line per way to use the accelerators. `price`: of one of them, per hour."""
    costs = ["price of 1,000"] if price is not None else []
    lines = _table(
        f"Plans for {accelerators} accelerators",
        "strategy",
        *("servers + learner", "samples/s", "of X*", "staleness", *costs, "limited by"),
    )
    lines.add_column("settings")
    for option in options:
        run = option.runs[0]
        spread = f" ± {option.spread:.2g}" if len(option.runs) > 1 else ""
        lines.add_row(
            option.strategy,
            option.split,
            f"{option.samples_per_s:,.4g}{spread}",
            f"{run.efficiency:.0%}",
            f"{run.staleness_mean:.2f}/{run.staleness_max}",
            *([f"{option.cost(price):,.3g}"] if price is not None else []),
            option.limited_by,
            ", ".join(f"{name} {value}" for name, value in option.changes.items()) or "-",
        )
    lines.caption = (
        "X*: what the machines allow; staleness: mean and largest; settings: what a search has changed in the three "
        "fastest plans; ±: standard deviation over three seeds"
    )
    return lines


def comparison(found: Comparison) -> Table:
    """Return a table of a run's figures beside those of its simulation."""
    lines = _table("Calibrated", "", "measured", "simulated", "error")
    for figure in FIGURES:
        pair = (f"{side[figure]:,.4g}" for side in (found.measured, found.predicted))
        lines.add_row(figure.replace("_", " "), *pair, f"{found.error(figure):+.1%}")
    return lines


def _table(title: str, name: str, *numbers: str) -> Table:
    """Return an empty table with a column of names, then columns of numbers."""
    columns = [Column(name, no_wrap=True), *(Column(number, justify="right") for number in numbers)]
    return Table(*columns, title=title, title_justify="left", caption_justify="left", header_style="bold", box=SIMPLE)


def _cells(result: Result) -> list[str]:
    mean = {key: result.mean(key) or 0.0 for key in asdict(result.runs[0])}
    spread = f" ± {result.spread('samples_per_s'):.2g}" if len(result.runs) > 1 else ""
    ready_s = result.mean("first_groups_s")
    return [
        f"{mean['samples_per_s']:,.4g}{spread}",
        f"{mean['efficiency']:.1%}",
        f"{mean['generator_bubble']:.0%}",
        f"{mean['trainer_idle']:.0%}",
        f"{mean['staleness_mean']:.2f}/{mean['staleness_max']:.0f}",
        f"{mean['wait_p99_s']:,.0f}s",
        f"{sum(mean[kind] for kind in WASTE):.1%}",
        f"{mean['length_ks_trained_population']:.3f}",
        "–" if ready_s is None else f"{ready_s:,.0f}s",
    ]
