"""`python my_env.py serve`: run a file's environment as a worker of a run that is starting or running.

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

from penstock.cli.refusal import Refused, refusing
from penstock.cli.runs import find
from penstock.config import load_config
from penstock.ports.environment import Environment
from penstock.supervisor.child import Child
from penstock.supervisor.known_runs import RUNS_DIR, known_runs
from penstock.supervisor.run_journal import read_state
from penstock.supervisor.runtime import mark_of_directory

ACTIVE = ("starting", "running")


def main(kind: type[Environment]) -> None:
    """Run the command line of a file that defines the environment `kind`."""
    app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

    @app.callback(help=kind.__doc__)
    def options() -> None:
        """Make `serve` a command of its own; without a callback Typer would drop its name."""

    @app.command()
    def serve(
        config: Annotated[
            Path | None, typer.Option(metavar="FILE", help="Attach to the newest run of this configuration file.")
        ] = None,
        run: Annotated[str | None, typer.Option(metavar="RUN", help="Attach to this run: its id or directory.")] = None,
        runs_dir: Annotated[Path, typer.Option(help="The directory of the runs.")] = RUNS_DIR,
    ) -> None:
        """Run episodes for a run in progress, in addition to its own workers; Ctrl-C detaches."""
        if (config is None) == (run is None):
            raise typer.BadParameter("give either --config FILE or --run RUN")
        raise typer.Exit(attach(kind, find(runs_dir, run) if run is not None else None, config))

    app()


@refusing
def attach(kind: type[Environment], run_dir: Path | None, config: Path | None) -> int:
    """Attach to a run and return the exit code."""
    if run_dir is None:
        assert config is not None
        run_dir = newest_run(config)
    return play(kind, member_of(run_dir))


def newest_run(path: Path) -> Path:
    """Return the newest run of a configuration file that is starting or running. Raises `Refused`."""
    config = load_config(path)
    runs = [run for run in known_runs(Path(config.runs_dir)) if run["status"] in ACTIVE]
    found = [run for run in runs if config.run_id in (None, run["run_id"])]
    if not found:
        raise Refused(f"no run of {path} is active in {config.runs_dir}: `penstock train {path}` starts one")
    return Path(found[0]["run_dir"])


def member_of(run_dir: Path) -> Child:
    """Return the identity of this process within the run. The run must belong to the current user, because only that
    user can read the keys of its members. Raises `Refused`."""
    state = read_state(run_dir) or {}
    mark = mark_of_directory(Path(state.get("runtime_dir", run_dir)))
    if mark is None or mark.run_dir != str(run_dir.absolute()):
        status = state.get("status", "unknown")
        raise Refused(f"run {run_dir.name} is {status}, and there is nothing to attach to in {run_dir}")
    name, runtime_dir = f"env-attached-{os.getpid()}", Path(mark.runtime_dir)
    return Child(name=name, run_dir=run_dir, runtime_dir=runtime_dir, run_id=state["run_id"], nonce=mark.nonce)


def play(kind: type[Environment], child: Child) -> int:
    """Run episodes until the run ends or this process is stopped. Raises `Refused`."""
    import uvloop

    from penstock.processes.env import attend, goes_on

    if not goes_on(child):
        raise Refused(f"run {child.run_id} is not active: `penstock status {child.run_dir}` shows why")
    uvloop.run(attend(child, kind))
    if goes_on(child):
        print(f"left run {child.run_id}: other workers play the unfinished episodes")
    else:
        status = (read_state(child.run_dir) or {}).get("status", "gone")
        print(f"run {child.run_id} needs no more episodes: it is {status}")
    return 0
