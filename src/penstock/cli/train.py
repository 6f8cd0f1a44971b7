"""`penstock train`: check, create the run, supervise it to its end, sum it up.

Exit codes: 0 completed, 1 failed or refused, 2 wrong configuration, 130 stopped.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import yaml
from rich.console import Console

from penstock.cli.launching import Room, launching, room
from penstock.cli.preflight import Refused, check, check_settings
from penstock.cli.refusal import REFUSAL, refuse
from penstock.config import Config, ConfigError, load_config
from penstock.observe import plots, progress, report, summary
from penstock.observe.view import Plan
from penstock.processes.layout import prepare, stages
from penstock.supervisor import log_files
from penstock.supervisor.child import CONFIG_ERROR
from penstock.supervisor.ownership import Owned
from penstock.supervisor.record import read_state
from penstock.supervisor.run_directory import OpenRun, RunExists, new_run_id, open_run, publishable
from penstock.supervisor.states import RunState
from penstock.supervisor.supervisor import Outcome, Supervisor, failed

EXIT_CODES = {RunState.COMPLETED: 0, RunState.FAILED: 1, RunState.STOPPED: 130}
RANDOM = (
    "note: model.path is tiny and nobody trains it here, so a random policy plays: --checkpoint RUN names a trained one"
)
DETACH_S = 60.0
"""A resumed run may first have to wait for the janitor of the life before."""
JOIN_S = 60.0
"""To join a cluster."""


def train(path: Path, overrides: Sequence[str], *, detach: bool, dry_run: bool) -> int:
    """Returns the exit code."""
    return begin("train", path, overrides, detach=detach, dry_run=dry_run)


def begin(
    pipeline: str,
    path: Path,
    overrides: Sequence[str],
    *,
    detach: bool = False,
    dry_run: bool = False,
    results: Path | None = None,
) -> int:
    """A new run; `pipeline` is also the name of the command, and `results` where those of an evaluation go too. Returns
    the exit code."""
    try:
        config = load_config(path, overrides)
        if config.pipeline != pipeline:
            raise ConfigError(f"pipeline is {config.pipeline}: `penstock {config.pipeline} {path}` runs it")
        if dry_run:
            check_settings(config)
    except (ConfigError, Refused) as error:
        return refuse(error, CONFIG_ERROR)
    if dry_run:
        sys.stdout.write(yaml.safe_dump(publishable(config), sort_keys=False))
        return 0
    try:
        check(config)
        if pipeline != "train" and config.model.path == "tiny":
            print(RANDOM, file=sys.stderr)
        if detach:
            run_id = config.run_id or new_run_id()
            run_dir = Path(config.runs_dir).absolute() / run_id
            words = [pipeline, str(path), *overrides, f"run_id={run_id}"]
            return start_detached(run_dir, words, within_s=owned_within_s(config))
        with room(config) as held, open_run(config) as run:
            return conclude(run, carry_out(run, held), results)
    except ConfigError as error:
        return refuse(error, CONFIG_ERROR)
    except (Refused, RunExists, Owned) as error:
        return refuse(error, 1)


def carry_out(run: OpenRun, held: Room | None) -> Outcome:
    """One life of a run, to the end of all its processes."""
    try:
        prepare(run.config, run.run_dir)
        return asyncio.run(supervise(run, held))
    except (ConfigError, OSError) as error:
        outcome = failed(str(error))
    except KeyboardInterrupt:
        outcome = Outcome(status=RunState.STOPPED, message="interrupted")
    if not run.record.status.is_final:
        run.record.move(outcome.status, actor="command line", reason=outcome.message)
    return outcome


async def supervise(run: OpenRun, held: Room | None) -> Outcome:
    """Supervise, and show the progress meanwhile."""
    async with launching(run, held) as launcher, asyncio.TaskGroup() as tasks:
        supervisor = Supervisor(
            run_dir=run.run_dir,
            stages=stages(run.config),
            launcher=launcher,
            record=run.record,
            settings=run.config.supervisor,
        )
        display = tasks.create_task(show_progress(run))
        outcome = await supervisor.run()
        display.cancel()
    return outcome


async def show_progress(run: OpenRun) -> None:
    """Whatever goes wrong with the display is noted; it never ends a run."""
    if not run.config.observe.progress:
        return
    try:
        await progress.follow(run.run_dir, Plan.of(run.config))
    except Exception as error:
        run.record.note("display", error=repr(error))


def conclude(run: OpenRun, outcome: Outcome, results: Path | None = None) -> int:
    """Write and show what the run came to, of an evaluation also into the file `results`; say how it ended, and return
    the exit code."""
    try:
        sum_up(run, results)
    except OSError as error:
        print(f"warning: the run cannot be summed up: {error}", file=sys.stderr)
    if outcome.message:
        label = "error" if outcome.status is RunState.FAILED else outcome.status.value
        print(f"{label}: {outcome.message}", file=sys.stderr)
    return EXIT_CODES[outcome.status]


def sum_up(run: OpenRun, results: Path | None) -> None:
    """The summary, and what belongs to the pipeline: the results of an evaluation, else plots and report."""
    summary.write(run.run_dir)
    console = Console(highlight=False)
    if run.config.pipeline == "eval":
        if (found := summary.write_evaluation(run.run_dir, model=run.config.model.path, copy=results)) is not None:
            console.print(report.evaluation_table(found))
            console.print(f"results in {results or run.run_dir / summary.EVALUATION}", soft_wrap=True)
        return
    if run.config.observe.plots:
        plots.draw(run.run_dir)
    report.show(run.run_dir, console)


def why_not_started(run: str, log: Path, begun: log_files.Place) -> str:
    """Why the command says no, if it does; somebody else may write to that log too. Or else all that was written."""
    refusals = [line for line in log_files.tail(log, since=begun) if line.startswith(REFUSAL)]
    if refusals:
        return refusals[-1].removeprefix(REFUSAL)
    return f"run {run} did not start{log_files.quote(log, begun)}"


def owned_within_s(config: Config) -> float:
    """How long a run that is begun may take to be owned by its supervisor."""
    joined_s = JOIN_S + config.cluster.place_timeout_s if config.cluster.address else 0.0
    return DETACH_S + joined_s


def start_detached(run_dir: Path, words: Sequence[str], *, within_s: float) -> int:
    """Start a command in a session of its own, which outlives the one it was given in; return once it owns the run."""
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    log = run_dir / "logs" / "supervisor.log"
    begun = log_files.end_of(log)
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "penstock.cli.main", *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    limit = time.monotonic() + within_s
    while (read_state(run_dir) or {}).get("supervisor", {}).get("pid") != process.pid:
        if process.poll() is not None or time.monotonic() > limit:
            raise Refused(why_not_started(run_dir.name, log, begun))
        time.sleep(0.02)
    print(f"run {run_dir.name} started in {run_dir}\nfollow it with: penstock status {run_dir.name}")
    return 0
