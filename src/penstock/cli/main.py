"""The commands. Each only reads its words and calls what does the work; imports wait until a command needs them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

app = typer.Typer(
    help="Asynchronous reinforcement learning for LLM agents.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        from penstock import __version__

        typer.echo(f"penstock {__version__}")
        raise typer.Exit


env_app = typer.Typer(help="Try an environment.", no_args_is_help=True)
app.add_typer(env_app, name="env")

PolicyName = Literal["random", "scripted", "human", "openai"]
ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="A YAML file.")]
Overrides = Annotated[list[str] | None, typer.Argument(metavar="[a.b=c]...", help="Settings to change.")]
Detach = Annotated[bool, typer.Option("--detach", help="Run in the background.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration and exit.")]
RunsDir = Annotated[Path, typer.Option(help="Where runs are kept.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]
OnCluster = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="ADDRESS", help="Of a Ray cluster (`auto`: this machine's): where cluster.pools are."
    ),
]
RunName = Annotated[str, typer.Argument(metavar="RUN", help="A run id, the unique beginning of one, or a directory.")]


def _words(overrides: list[str] | None, cluster: str | None) -> list[str]:
    """What an option says in the words of the configuration."""
    return [*(overrides or []), *([f"cluster.address={cluster}"] if cluster else [])]


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="And exit.")
    ] = False,
) -> None:
    """Asynchronous reinforcement learning for LLM agents."""


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    cluster: OnCluster = None,
    detach: Detach = False,
    dry_run: DryRun = False,
) -> None:
    """Train a policy. Ctrl-C stops it cleanly with a checkpoint, twice kills it."""
    from penstock.cli import train as command

    raise typer.Exit(command.train(config, _words(overrides, cluster), detach=detach, dry_run=dry_run))


@app.command()
def rollout(
    config: ConfigFile,
    overrides: Overrides = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="Play with the newest checkpoint of this run (id or directory), or with this model."
        ),
    ] = None,
    cluster: OnCluster = None,
    detach: Detach = False,
    dry_run: DryRun = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Play a whole dataset with a policy that does not change, and dump the trajectories. Nothing is trained."""
    from penstock.cli import rollout as command

    raise typer.Exit(
        command.rollout(
            config, _words(overrides, cluster), checkpoint=checkpoint, runs_dir=runs_dir, detach=detach, dry_run=dry_run
        )
    )


@app.command()
def resume(
    run: RunName,
    overrides: Overrides = None,
    cluster: OnCluster = None,
    detach: Detach = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Continue a run that was stopped, has failed, or was killed, in its own directory."""
    from penstock.cli import resume as command
    from penstock.cli.runs import find

    raise typer.Exit(command.resume(find(runs_dir, run), _words(overrides, cluster), detach=detach))


@app.command("eval")
def evaluate(
    config: ConfigFile,
    overrides: Overrides = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="RUN_OR_DIR", help="The newest checkpoint of a run, or a model directory; else model.path."
        ),
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Where the results go too.")] = None,
    cluster: OnCluster = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Play the held-out tasks with a policy as it is, without training."""
    from penstock.cli import evaluate as command

    raise typer.Exit(
        command.evaluate(config, _words(overrides, cluster), checkpoint=checkpoint, runs_dir=runs_dir, json=json)
    )


@app.command()
def simulate(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG", help="A YAML file.")] = None,
    overrides: Overrides = None,
    calibrate: Annotated[
        str | None, typer.Option(metavar="RUN", help="Fit the simulator to this run instead (id or directory).")
    ] = None,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Where the results go.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Where the picture goes.")] = None,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Compare strategies on modelled machines: the real scheduler and loop, on a virtual clock."""
    from penstock.cli import simulate as command
    from penstock.cli.runs import find

    if (config is None) == (calibrate is None):
        raise typer.BadParameter("give either CONFIG or --calibrate RUN")
    if config is not None:
        raise typer.Exit(command.simulate(config, overrides or [], json=json, plot=plot))
    assert calibrate is not None
    run_dir = Path(calibrate) if Path(calibrate).is_dir() else find(runs_dir, calibrate)
    raise typer.Exit(command.calibrate(run_dir, json=json))


@app.command()
def serve(
    model: Annotated[Path, typer.Option(metavar="PATH", help="A Hugging Face model directory.")],
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    host: Annotated[str, typer.Option(help="Anything but loopback needs PENSTOCK_API_KEY.")] = "127.0.0.1",
    name: Annotated[
        str | None, typer.Option(help="Under which clients know the model; its directory by default.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Serve a model to SGLang and OpenAI clients, without a run."""
    from penstock.cli import serve as command

    raise typer.Exit(command.serve(model, overrides or [], host=host, port=port, name=name))


@app.command()
def envs(
    place: Annotated[
        Path | None, typer.Argument(metavar="PATH", help="Look for classes in this file, or in the files below.")
    ] = None,
) -> None:
    """List the environments, without importing any."""
    from penstock.cli import envs as command

    raise typer.Exit(command.show(place))


@env_app.command("try")
def env_try(
    name: Annotated[str, typer.Argument(metavar="NAME", help="What env.name takes, or a configuration file.")],
    overrides: Overrides = None,
    policy: Annotated[
        PolicyName | None,
        typer.Option(help="Who plays; the environment's own demonstrate() where there is one, else chance."),
    ] = None,
    task: Annotated[int, typer.Option(min=0, help="Its index among the training tasks, from 0.")] = 0,
    seed: Annotated[
        int | None,
        typer.Option(help="Of the environment, and of a random policy; that of the task in a run by default."),
    ] = None,
    base_url: Annotated[str | None, typer.Option(metavar="URL", help="Of an OpenAI endpoint.")] = None,
    model: Annotated[str | None, typer.Option(help="Its name at the endpoint; the first there by default.")] = None,
) -> None:
    """Play one episode in the terminal, and see what a policy would see."""
    from penstock.cli import env_try as command

    code = command.try_environment(
        name, overrides or [], policy=policy, task=task, seed=seed, base_url=base_url, model=model
    )
    raise typer.Exit(code)


@app.command()
def runs(runs_dir: RunsDir = Path("runs"), json: AsJson = False) -> None:
    """List the runs, the newest first."""
    from penstock.cli import runs as command

    command.show(runs_dir, as_json=json)


@app.command()
def status(
    run: RunName,
    runs_dir: RunsDir = Path("runs"),
    json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until the run has ended.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Answer now, whatever supervisor.status_interval_s is.")
    ] = False,
) -> None:
    """Show how a run and its processes are doing, and what to do next."""
    from penstock.cli import status as command
    from penstock.cli.runs import find

    command.answer(find(runs_dir, run), as_json=json, watch=watch, force=force)


@app.command()
def trajectories(
    run: RunName,
    group: Annotated[int | None, typer.Option(metavar="N", help="All of this group.")] = None,
    best: Annotated[bool, typer.Option("--best", help="Those with the highest reward first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Those with the lowest reward first.")] = False,
    limit: Annotated[int | None, typer.Option("--limit", "-n", min=1, help="How many; 3 by default.")] = None,
    runs_dir: RunsDir = Path("runs"),
    json: AsJson = False,
) -> None:
    """Read what a run played, the newest first."""
    from penstock.cli import trajectories as command
    from penstock.cli.runs import find

    if best and worst:
        raise typer.BadParameter("give either --best or --worst")
    order: command.Order = "best" if best else "worst" if worst else "newest"
    raise typer.Exit(command.trajectories(find(runs_dir, run), group=group, order=order, limit=limit, as_json=json))


@app.command()
def logs(
    run: RunName,
    process: Annotated[str | None, typer.Argument(metavar="PROCESS", help="One of them; all by default.")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Until the run has ended.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Of each process, from the end.")] = 40,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Show what the processes of a run wrote."""
    from penstock.cli import logs as command
    from penstock.cli.runs import find_directory

    raise typer.Exit(command.logs(find_directory(runs_dir, run), process, follow=follow, num_lines=lines))


@app.command()
def stop(
    run: RunName,
    now: Annotated[bool, typer.Option("--now", help="Kill it, without a checkpoint.")] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Stop a run, wherever it was started, and wait until it has ended."""
    from penstock.cli import stop as command
    from penstock.cli.runs import find

    raise typer.Exit(command.stop(find(runs_dir, run), now=now))


@app.command()
def doctor(
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove what dead runs left behind, and nothing else.")
    ] = False,
    runs_dir: RunsDir = Path("runs"),
) -> None:
    """Check this machine: versions, room, ports, and what dead runs left behind."""
    from penstock.cli import doctor as command

    raise typer.Exit(command.doctor(runs_dir, clean=clean))


def main() -> None:
    """The `penstock` command."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
