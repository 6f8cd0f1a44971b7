"""`penstock train`, `eval`, `rollout` and `resume`: check, create or reopen the run, supervise it to its end, write its
summary.

`eval` and `rollout` are runs like any other, in which a fixed policy plays the held-out tasks, or a whole dataset.
Exit codes: 0 completed, 1 failed or refused, 2 wrong configuration, 130 stopped.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import yaml

from penstock.cli.launching import ClusterResources, launching, reserving
from penstock.cli.memory_check import check_memory, show_memory
from penstock.cli.preflight import check, check_settings
from penstock.cli.refusal import REFUSAL, Refused, refusing
from penstock.cli.runs import find_directory
from penstock.config import Config, ConfigError, load_config
from penstock.model.files import has_weights
from penstock.observe import closing_report, jsonl, log_lines, progress, summary
from penstock.observe.tables import open_console
from penstock.observe.view import Plan
from penstock.observe.visible_text import visible
from penstock.processes.layout import prepare, stages
from penstock.supervisor import log_files, run_directory
from penstock.supervisor.run_directory import OpenRun
from penstock.supervisor.run_journal import read_state
from penstock.supervisor.run_status import status
from penstock.supervisor.states import RunState
from penstock.supervisor.supervisor import Outcome, Supervisor, failed
from penstock.system import CHECKPOINTS
from penstock.trainer.checkpoint import newest

logger = logging.getLogger(__name__)

AS_IT_IS = ("pipeline=eval", "run_id=null", "model.warm_start.steps=0")
"""Settings of an evaluation. They override the file, which is written for training; the command line overrides them."""
PLAYS_ONLY = ("pipeline=rollout", "run_id=null", "scheduler.group_filter=[]")
"""Settings of a rollout, with the same precedence: every task is run, and no group is dropped."""
EXIT_CODES = {RunState.COMPLETED: 0, RunState.FAILED: 1, RunState.STOPPED: 130}
UNPREDICTED = ("run_id=", "runs_dir=", "trainer.steps=", "observe.")
"""Beginnings of overrides that change nothing of what a plan predicts."""
UNTRAINED = "note: model.path is tiny, an untrained policy that acts at random: --checkpoint RUN plays a trained one"
DETACH_S = 60.0
"""Seconds for a detached run to start. A resumed run may first have to wait for the janitor of its previous life."""
JOIN_S = 60.0
"""Seconds to join a cluster."""


@refusing
def begin(
    pipeline: str,
    path: Path,
    overrides: Sequence[str],
    *,
    detach: bool,
    dry_run: bool,
    results: Path | None = None,
    dashboard: bool = False,
) -> int:
    """Start a new run and return the exit code. `pipeline` is also the name of the command. The results of an
    evaluation are also written to `results`. With `dashboard`, show the run in the browser while it lasts."""
    config = load_config(path, overrides)
    if config.pipeline != pipeline:
        raise ConfigError(f"pipeline is {config.pipeline}: `penstock {config.pipeline} {path}` runs it")
    if dry_run:
        check_settings(config)
        sys.stdout.write(yaml.safe_dump(run_directory.publishable(config), sort_keys=False))
        show_memory(config)
        return 0
    check(config)
    memory = check_memory(config)
    if pipeline != "train" and config.model_name == "tiny" and not config.uses_given_weights:
        print(UNTRAINED, file=sys.stderr)
    run_id = config.run_id or run_directory.new_run_id()
    run_dir = Path(config.runs_dir).absolute() / run_id
    if detach:
        return start_detached(run_dir, [pipeline, str(path), *overrides, f"run_id={run_id}"], config)
    config = config.model_copy(update={"run_id": run_id})
    with (
        shown_if(dashboard, run_dir),
        reserving(config) as resources,
        run_directory.open_run(config) as run,
    ):
        if pipeline == "train":
            keep_prediction(run.run_dir, config_file=path, overrides=overrides, memory=memory)
        return conclude(run, carry_out(run, resources), results)


def keep_prediction(
    run_dir: Path, *, config_file: Path, overrides: Sequence[str], memory: Mapping[str, Any] | None
) -> None:
    """Keep in the run directory what `penstock plan` predicted of the configuration that it wrote, if the run begins
    from it unchanged, and the plan of the run's memory."""
    found = jsonl.read_json(config_file.parent / summary.PREDICTION)
    is_other = any(not word.startswith(UNPREDICTED) for word in overrides)
    if found and (is_other or not summary.predicted_config(config_file).items() <= found.items()):
        found = {}
    if memory is not None:
        found["memory"] = [{key: need[key] for key in ("who", "count", "total")} for need in memory["needs"]]
    if found:
        jsonl.write_json(run_dir / summary.PREDICTION, found)


def shown_if(dashboard: bool, run_dir: Path) -> AbstractContextManager[None]:
    """Show a run in the browser during the body, if the user asked for it."""
    if not dashboard:
        return nullcontext()
    from penstock.cli.dashboard import beside_run

    return beside_run(run_dir)


@refusing
def evaluate(path: Path, overrides: Sequence[str], checkpoint: str | None, runs_dir: Path, results: Path | None) -> int:
    """Run the validation tasks, also write the results to `results`; return the exit code. Raises `Refused`."""
    if results is not None and not results.absolute().parent.is_dir():
        raise Refused(f"--json: there is no directory {results.parent}")
    words = [*AS_IT_IS, *overrides, *policy_word(checkpoint, runs_dir)]
    check_checkpoint(checkpoint, load_config(path, words))
    return begin("eval", path, words, detach=False, dry_run=False, results=results)


@refusing
def rollout(
    path: Path, overrides: Sequence[str], *, checkpoint: str | None, runs_dir: Path, detach: bool, dry_run: bool
) -> int:
    """Run every task and dump the trajectories; return the exit code."""
    own = [*overrides, *policy_word(checkpoint, runs_dir)]
    config = load_config(path, [*PLAYS_ONLY, *own])
    check_checkpoint(checkpoint, config)
    words = [*PLAYS_ONLY, *no_held_out_tasks(config), *own]
    return begin("rollout", path, words, detach=detach, dry_run=dry_run)


def no_held_out_tasks(config: Config) -> list[str]:
    """Return settings with which `config` holds out no task, in any environment of its mixture."""
    entries = {tag: {"data": {"eval_tasks": 0}} for tag in config.env.mixture}
    mixture = [f"env.mixture={json.dumps(entries)}"] if entries else []
    return ["data.eval_tasks=0", "validation.tasks=0", *mixture]


def policy_word(checkpoint: str | None, runs_dir: Path) -> list[str]:
    """Return the setting for the model directory or run that `--checkpoint` names; empty if `--checkpoint` is not
    given. Raises `Refused`."""
    if checkpoint is None:
        return []
    directory = Path(checkpoint).absolute()
    if has_weights(directory):
        return [f"model.path={directory}"]
    run_dir = find_directory(runs_dir, checkpoint)
    found = newest(run_dir / CHECKPOINTS)
    if found is None:
        raise Refused(f"--checkpoint {checkpoint}: run {run_dir.name} has no complete checkpoint: see `penstock runs`")
    return [f"model.path={Path(found.directory).absolute()}"]


def check_checkpoint(checkpoint: str | None, config: Config) -> None:
    """Check that the run plays the given checkpoint. Raises `Refused`."""
    if checkpoint is not None and (config.uses_given_weights or not config.policy.has_tokens):
        other = "rollout.urls name servers" if config.uses_given_weights else f"policy.name is {config.policy.name}"
        raise Refused(f"--checkpoint {checkpoint}: {other}, which would not play it: leave out one of them")


@refusing
def resume(run_dir: Path, overrides: Sequence[str], *, detach: bool) -> int:
    """Resume a run and return the exit code."""
    run_dir = run_dir.absolute()
    resumption = run_directory.plan_resumption(run_dir, overrides)
    if resumption.is_complete:
        ended = [e for e in jsonl.read(run_dir / "events.jsonl") if e.get("event") == "early_stop"]
        how = f"it ended early ({ended[-1].get('reason')})" if ended else further(resumption.config)
        print(f"run {run_dir.name} is complete, so there is nothing to resume: {visible(how)}")
        return 0
    if not detach:  # the process in the background checks the data itself
        run_directory.check_data(run_dir, resumption.config)
    run_directory.check_unsupervised(run_dir)
    check(resumption.config)
    if detach:
        return start_detached(run_dir, ["resume", str(run_dir), *overrides], resumption.config)
    with reserving(resumption.config) as resources, run_directory.reopen_run(run_dir, overrides) as run:
        return conclude(run, carry_out(run, resources))


def further(config: Config) -> str:
    """Return a suggestion for a complete run."""
    if config.pipeline == "train":
        return "raise trainer.steps to train further"
    if config.pipeline == "eval":
        return f"its results are in its {summary.EVALUATION}; `penstock eval` evaluates again"
    if config.synthesis.tasks < 0:
        return "it has played every task of its data; `penstock rollout` plays them again, or others"
    return f"raise synthesis.tasks to play further, if its data have more than {config.synthesis.tasks} tasks"


def carry_out(run: OpenRun, resources: ClusterResources | None) -> Outcome:
    """Supervise one life of a run, until all its processes have ended."""
    try:
        prepare(run.config, run.run_dir)
        return asyncio.run(supervise(run, resources))
    except (ConfigError, OSError) as error:
        outcome = failed(str(error))
    except KeyboardInterrupt:
        outcome = Outcome(status=RunState.STOPPED, message="interrupted")
    if not run.journal.status.is_final:
        run.journal.move(outcome.status, actor="command line", reason=outcome.message)
    return outcome


async def supervise(run: OpenRun, resources: ClusterResources | None) -> Outcome:
    """Supervise the run with a log file, and show its progress."""
    with log_lines.logging_to(run.run_dir / "logs" / "supervisor.log", "supervisor"):
        logger.info("starts run %s (%s; pid %d)", run.journal.run_id, log_lines.versions(), os.getpid())
        async with launching(run, resources) as launcher, asyncio.TaskGroup() as tasks:
            processes, settings = stages(run.config), run.config.supervisor
            supervisor = Supervisor(
                run_dir=run.run_dir, stages=processes, launcher=launcher, journal=run.journal, settings=settings
            )
            display = tasks.create_task(show_progress(run))
            outcome = await supervisor.run()
            display.cancel()
        logger.info("ends: the run is %s", outcome.status.value)
    return outcome


async def show_progress(run: OpenRun) -> None:
    """Show the progress. An error of the display is recorded as an event and never ends a run."""
    if not run.config.observe.progress:
        return
    try:
        await progress.follow(run.run_dir, Plan.of(run.config))
    except Exception as error:
        run.journal.note("display", error=repr(error))


def conclude(run: OpenRun, outcome: Outcome, results: Path | None = None) -> int:
    """Write and show the results of the run (those of an evaluation also to the file `results`), print how it ended,
    and return the exit code."""
    try:
        sum_up(run, results)
    except OSError as error:
        print(f"warning: the summary of the run cannot be written: {error}", file=sys.stderr)
    if outcome.message:
        label = "error" if outcome.status is RunState.FAILED else outcome.status.value
        print(visible(f"{label}: {outcome.message}"), file=sys.stderr)
    return EXIT_CODES[outcome.status]


def sum_up(run: OpenRun, results: Path | None) -> None:
    """Write the summary and the output of the pipeline: the results of an evaluation, otherwise plots and the closing
    report."""
    summary.write(run.run_dir)
    console = open_console()
    if run.config.pipeline == "eval":
        if (found := summary.write_evaluation(run.run_dir, model=run.config.model_name, copy=results)) is not None:
            console.print(closing_report.evaluation_table(found))
            console.print(f"results in {results or run.run_dir / summary.EVALUATION}", soft_wrap=True)
        return
    if run.config.observe.plots:
        from penstock.observe import plots

        plots.draw(run.run_dir)
    closing_report.show(run.run_dir, console, config=run.config, commands=status(run.run_dir)["next"])


def why_not_started(run: str, log: Path, begun: log_files.LogPosition) -> str:
    """Return why a detached command did not start: its own error line if the log has one, otherwise all new lines.
    Other processes may write to the log too."""
    refusals = [line for line in log_files.tail(log, since=begun) if line.startswith(REFUSAL)]
    if refusals:
        return refusals[-1].removeprefix(REFUSAL)
    return f"run {run} did not start{log_files.quote(log, begun)}"


def start_detached(run_dir: Path, words: Sequence[str], config: Config) -> int:
    """Start a command in a new session that outlives the current one. Return 0 once the command owns the run. Raises
    `Refused` if it does not start."""
    log = run_dir / "logs" / "supervisor.log"
    with run_directory.written_by_us_only():
        run_directory.make_run_dir(run_dir, config)
        out = log.open("ab")
    begun = log_files.end_of(log)
    with out:
        command = [sys.executable, "-P", "-m", "penstock.cli.main", *words]
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    joined_s = JOIN_S + config.cluster.place_timeout_s if config.cluster.address else 0.0
    limit = time.monotonic() + DETACH_S + joined_s
    while (read_state(run_dir) or {}).get("supervisor", {}).get("pid") != child.pid:
        if child.poll() is not None or time.monotonic() > limit:
            raise Refused(why_not_started(run_dir.name, log, begun))
        time.sleep(0.02)
    print(f"run {run_dir.name} started in {run_dir}\nfollow it with: penstock status {run_dir.name}")
    return 0
