"""`python my_env.py serve`: a file with an environment plays for a run that is going on.

The file ends with:

    if __name__ == "__main__":
        from penstock.cli.attach import main

        main(MyEnv)
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.refusal import refuse
from penstock.cli.runs import RUNS_DIR, find, known_runs
from penstock.config import ConfigError, load_config
from penstock.ports import Environment
from penstock.supervisor.child import CONFIG_ERROR, Child, leaf
from penstock.supervisor.record import read_state
from penstock.supervisor.runtime import mark_of_directory

GOING_ON = ("starting", "running")


class NotRunning(RuntimeError):
    """There is no run to attach to."""


def main(kind: type[Environment]) -> None:
    """The command line of a file that defines the environment `kind`."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

    @app.callback()
    def describe() -> None:
        pass

    describe.__doc__ = kind.__doc__

    @app.command()
    def serve(
        config: Annotated[
            Path | None, typer.Option(metavar="FILE", help="Of the run: its newest one is taken.")
        ] = None,
        run: Annotated[str | None, typer.Option(metavar="RUN", help="Or this run, by id or directory.")] = None,
        runs_dir: Annotated[Path, typer.Option(help="Where RUN is looked for.")] = RUNS_DIR,
    ) -> None:
        """Play for a run that is going on, beside its own workers; Ctrl-C leaves it."""
        if (config is None) == (run is None):
            raise typer.BadParameter("give either --config FILE or --run RUN")
        raise typer.Exit(attach(kind, find(runs_dir, run) if run is not None else None, config))

    app()


def attach(kind: type[Environment], run_dir: Path | None, config: Path | None) -> int:
    """Returns the exit code."""
    try:
        if run_dir is None:
            assert config is not None
            run_dir = newest_run(config)
        return play(kind, member_of(run_dir))
    except ConfigError as error:
        return refuse(error, CONFIG_ERROR)
    except NotRunning as error:
        return refuse(error, 1)


def newest_run(path: Path) -> Path:
    """The newest run of a configuration file that is going on."""
    config = load_config(path)
    runs = [run for run in known_runs(Path(config.runs_dir)) if run["status"] in GOING_ON]
    found = [run for run in runs if config.run_id in (None, run["run_id"])]
    if not found:
        raise NotRunning(f"no run of {path} is going on in {config.runs_dir}: `penstock train {path}` starts one")
    return Path(found[0]["run_dir"])


def member_of(run_dir: Path) -> Child:
    """What this process is within the run. It has to be this user's: only he can read what members know."""
    state = read_state(run_dir) or {}
    mark = mark_of_directory(Path(state.get("runtime_dir", run_dir)))
    if mark is None or mark.run_dir != str(run_dir.absolute()):
        status = state.get("status", "unknown")
        raise NotRunning(f"run {run_dir.name} is {status}, and there is nothing to attach to in {run_dir}")
    return Child(
        name=f"env-attached-{os.getpid()}",
        run_dir=run_dir,
        runtime_dir=Path(mark.runtime_dir),
        run_id=state["run_id"],
        nonce=mark.nonce,
    )


def play(kind: type[Environment], child: Child) -> int:
    """Until the run ends, or somebody ends this."""
    import uvloop

    from penstock.processes.attaching import attend, goes_on

    if not goes_on(child):
        raise NotRunning(f"run {child.run_id} is not going on: `penstock status {child.run_dir}` tells why")
    try:
        uvloop.run(attend(child, kind))
    except Exception as error:
        cause = leaf(error)
        if not getattr(cause, "self_explanatory", False):
            raise
        return refuse(cause, 1)
    if goes_on(child):
        print(f"left run {child.run_id}: what was being played is played by others")
    else:
        status = (read_state(child.run_dir) or {}).get("status", "gone")
        print(f"run {child.run_id} needs no more episodes: it is {status}")
    return 0
