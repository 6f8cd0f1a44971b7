"""The commands. Each command only parses its arguments and calls its module, which is imported when the command needs
it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

DESCRIPTION = "Asynchronous reinforcement learning for LLM agents."
app = typer.Typer(help=DESCRIPTION, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)
env_app = typer.Typer(help="Try an environment.", no_args_is_help=True)
app.add_typer(env_app, name="env")

RUNS = Path("runs")
OVERRIDES_HELP = "Settings to change; values are YAML. A mapping is merged into that of the file; `a.b={}` empties it."
CLUSTER_HELP = "Run on the Ray cluster at this address (`auto`: the cluster of this machine), in its cluster.pools."
RUN_HELP = "A run id, the unique beginning of one, or a run directory."
ConfigFile = Annotated[Path, Argument(metavar="CONFIG", help="A YAML file.")]
Overrides = Annotated[list[str] | None, Argument(metavar="[a.b=c]...", help=OVERRIDES_HELP)]
Detach = Annotated[bool, Option("--detach", help="Run in the background.")]
DryRun = Annotated[bool, Option("--dry-run", help="Print the resolved configuration and exit.")]
RunsDir = Annotated[Path, Option(help="The directory of the runs.")]
AsJson = Annotated[bool, Option("--json", help="Print JSON, for programs.")]
Cluster = Annotated[str | None, Option(metavar="ADDRESS", help=CLUSTER_HELP)]
RunName = Annotated[str, Argument(metavar="RUN", help=RUN_HELP)]
Policy = Literal["random", "scripted", "human", "openai"]


def _words(overrides: list[str] | None, cluster: str | None) -> list[str]:
    """Return the overrides, with the options written as overrides."""
    return [*(overrides or []), *([f"cluster.address={cluster}"] if cluster else [])]


def _show_version(is_wanted: bool) -> None:
    if is_wanted:
        from penstock import __version__

        typer.echo(f"penstock {__version__}")
        raise typer.Exit


@app.callback(help=DESCRIPTION)
def options(
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Read the options of `penstock` itself."""


@app.command()
def train(
    config: ConfigFile,
    overrides: Overrides = None,
    cluster: Cluster = None,
    detach: Detach = False,
    dry_run: DryRun = False,
    dashboard: Annotated[bool, Option("--dashboard", help="Show the run in the browser while it lasts.")] = False,
) -> None:
    """Train a policy. Ctrl-C stops the run cleanly with a checkpoint; a second Ctrl-C kills it."""
    from penstock.cli import train as command

    if dashboard and (detach or dry_run):
        raise typer.BadParameter("--dashboard shows a run of this terminal: `penstock dashboard` shows all runs")
    words = _words(overrides, cluster)
    raise typer.Exit(command.begin("train", config, words, detach=detach, dry_run=dry_run, dashboard=dashboard))


@app.command()
def rollout(
    config: ConfigFile,
    overrides: Overrides = None,
    checkpoint: Annotated[
        str | None, Option(metavar="RUN", help="Play the newest checkpoint of this run, or this model directory.")
    ] = None,
    cluster: Cluster = None,
    detach: Detach = False,
    dry_run: DryRun = False,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Run a whole dataset with a fixed policy, and dump the trajectories. Nothing is trained."""
    from penstock.cli import train as command

    words = _words(overrides, cluster)
    code = command.rollout(config, words, checkpoint=checkpoint, runs_dir=runs_dir, detach=detach, dry_run=dry_run)
    raise typer.Exit(code)


@app.command()
def resume(
    run: RunName, overrides: Overrides = None, cluster: Cluster = None, detach: Detach = False, runs_dir: RunsDir = RUNS
) -> None:
    """Continue a run that was stopped, has failed, or was killed, in its own directory."""
    from penstock.cli import train as command
    from penstock.cli.runs import find

    raise typer.Exit(command.resume(find(runs_dir, run), _words(overrides, cluster), detach=detach))


@app.command("eval")
def evaluate(
    config: ConfigFile,
    overrides: Overrides = None,
    checkpoint: Annotated[
        str | None, Option(metavar="RUN", help="Evaluate the newest checkpoint of this run, or this model directory.")
    ] = None,
    json: Annotated[Path | None, Option(metavar="FILE", help="Write the results to this file too.")] = None,
    cluster: Cluster = None,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Evaluate a policy on the held-out tasks, without training."""
    from penstock.cli import train as command

    words = _words(overrides, cluster)
    raise typer.Exit(command.evaluate(config, words, checkpoint=checkpoint, runs_dir=runs_dir, results=json))


@app.command()
def simulate(
    config: Annotated[Path | None, Argument(metavar="CONFIG", help="A YAML file.")] = None,
    overrides: Overrides = None,
    calibrate: Annotated[str | None, Option(metavar="RUN", help="Fit the simulator to this run instead.")] = None,
    json: Annotated[Path | None, Option(metavar="FILE", help="Write the results to this file.")] = None,
    plot: Annotated[Path | None, Option(metavar="FILE", help="Draw the picture to this file.")] = None,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Compare strategies on modelled machines, with the real scheduler and loop on a virtual clock."""
    from penstock.cli import simulate as command
    from penstock.cli.runs import find_directory

    if config is not None and calibrate is None:
        raise typer.Exit(command.simulate(config, overrides or [], json=json, plot=plot))
    if config is not None or calibrate is None:
        raise typer.BadParameter("give either CONFIG or --calibrate RUN")
    raise typer.Exit(command.calibrate(find_directory(runs_dir, calibrate), json=json))


@app.command()
def plan(
    config: Annotated[
        Path, Argument(metavar="CONFIG", help="A YAML file; with `--accelerators`, machines under `simulator`.")
    ],
    overrides: Overrides = None,
    accelerators: Annotated[
        int | None, Option(metavar="N", help="Also find out how to split and use this number of accelerators.")
    ] = None,
    memory: Annotated[
        float | None, Option(metavar="GIB", help="The memory of an accelerator, if it is not in this machine.")
    ] = None,
    price: Annotated[float | None, Option(metavar="PRICE", help="What one accelerator costs per hour.")] = None,
    run: Annotated[str | None, Option(metavar="RUN", help="Take machines and lengths from this run.")] = None,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Show the memory that a run needs, and whether it fits. With `--accelerators`, find out how to split and use them:
    which strategy, which settings, how fast."""
    from penstock.cli import plan as command
    from penstock.cli.runs import find_directory

    if accelerators is None:
        if price is not None or run is not None:
            raise typer.BadParameter("--price and --run are for a plan with --accelerators")
        raise typer.Exit(command.show_memory_plan(config, overrides or [], memory=memory))
    if memory is not None:
        raise typer.BadParameter("give either --memory or --accelerators")
    calibrated_by = None if run is None else find_directory(runs_dir, run)
    raise typer.Exit(
        command.show(config, overrides or [], accelerators=accelerators, price=price, calibrated_by=calibrated_by)
    )


@app.command()
def serve(
    model: Annotated[Path, Option(metavar="PATH", help="A Hugging Face model directory.")],
    port: Annotated[int, Option(help="The port to listen on; 0 takes a free one.")] = 8000,
    host: Annotated[str, Option(help="The address. Any but loopback needs PENSTOCK_API_KEY.")] = "127.0.0.1",
    name: Annotated[str | None, Option(help="The name of the model for clients; its directory by default.")] = None,
    overrides: Overrides = None,
) -> None:
    """Serve a model to SGLang and OpenAI clients, without a run."""
    from penstock.cli import serve as command

    raise typer.Exit(command.serve(model, overrides or [], host=host, port=port, name=name))


@app.command()
def envs(
    place: Annotated[Path | None, Argument(metavar="PATH", help="Search this file or the files below it, too.")] = None,
) -> None:
    """List the environments, without importing any."""
    from penstock.cli import envs as command

    raise typer.Exit(command.show(place))


@env_app.command("try")
def env_try(
    name: Annotated[str, Argument(metavar="NAME", help="A value of env.name, or a configuration file.")],
    overrides: Overrides = None,
    policy: Annotated[
        Policy | None, Option(help="The policy; by default the environment's demonstrate() if it has one, else random.")
    ] = None,
    task: Annotated[int, Option(min=0, help="The index of the training task, from 0.")] = 0,
    seed: Annotated[
        int | None, Option(help="The seed of the environment and of a random policy; by default the seed in a run.")
    ] = None,
    base_url: Annotated[str | None, Option(metavar="URL", help="The URL of an OpenAI endpoint.")] = None,
    model: Annotated[str | None, Option(help="The model at the endpoint; the first one by default.")] = None,
) -> None:
    """Run one episode in the terminal, and show the observations of the policy."""
    from penstock.cli import env_try as command

    words = overrides or []
    code = command.try_environment(name, words, policy=policy, task=task, seed=seed, base_url=base_url, model=model)
    raise typer.Exit(code)


@app.command()
def runs(runs_dir: RunsDir = RUNS, json: AsJson = False) -> None:
    """List the runs, the newest first."""
    from penstock.cli import runs as command

    command.show(runs_dir, as_json=json)


@app.command()
def status(
    run: RunName,
    runs_dir: RunsDir = RUNS,
    json: AsJson = False,
    watch: Annotated[bool, Option("--watch", help="Refresh until the run has ended.")] = False,
    force: Annotated[bool, Option("--force", help="Answer at once despite supervisor.status_interval_s.")] = False,
) -> None:
    """Show the state of a run and its processes, and the commands to use next."""
    from penstock.cli import status as command
    from penstock.cli.runs import find

    command.answer(find(runs_dir, run, shared=True), as_json=json, watch=watch, force=force)


@app.command()
def trajectories(
    run: RunName,
    group: Annotated[int | None, Option(metavar="N", help="Show all trajectories of this group.")] = None,
    best: Annotated[bool, Option("--best", help="Show the highest rewards first.")] = False,
    worst: Annotated[bool, Option("--worst", help="Show the lowest rewards first.")] = False,
    limit: Annotated[int | None, Option("--limit", "-n", min=1, help="Show this many; 3 by default.")] = None,
    runs_dir: RunsDir = RUNS,
    json: AsJson = False,
) -> None:
    """Show trajectories of a run, the newest first."""
    from penstock.cli import trajectories as command
    from penstock.cli.runs import find

    if best and worst:
        raise typer.BadParameter("give either --best or --worst")
    order: command.Order = "best" if best else "worst" if worst else "newest"
    raise typer.Exit(command.trajectories(find(runs_dir, run), group=group, order=order, limit=limit, as_json=json))


@app.command()
def logs(
    run: RunName,
    process: Annotated[str | None, Argument(metavar="PROCESS", help="The process; all by default.")] = None,
    follow: Annotated[bool, Option("--follow", "-f", help="Follow the logs until the run has ended.")] = False,
    lines: Annotated[int, Option("--lines", "-n", min=0, help="Show this many last lines of each process.")] = 40,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Show the logs of the processes of a run."""
    from penstock.cli import logs as command
    from penstock.cli.runs import find_directory

    raise typer.Exit(command.logs(find_directory(runs_dir, run, shared=True), process, follow=follow, num_lines=lines))


@app.command()
def stop(
    run: RunName,
    now: Annotated[bool, Option("--now", help="Kill the run, without a checkpoint.")] = False,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Stop a run, from any terminal, and wait until it has ended."""
    from penstock.cli import stop as command
    from penstock.cli.runs import find

    raise typer.Exit(command.stop(find(runs_dir, run), now=now))


@app.command()
def dashboard(
    runs: Annotated[list[str] | None, Argument(metavar="[RUN]...", help=f"{RUN_HELP} All runs by default.")] = None,
    port: Annotated[int | None, Option(help="The port to listen on; 8730 or a free one by default.")] = None,
    host: Annotated[str, Option(help="The address. Any but loopback needs a key, which is printed.")] = "127.0.0.1",
    demo: Annotated[bool, Option("--demo", help="Show a small recorded run.")] = False,
    runs_dir: RunsDir = RUNS,
    with_stdin: Annotated[bool, Option("--with-stdin", hidden=True)] = False,
) -> None:
    """Show runs in the browser: live, and long after they have ended."""
    from penstock.cli import dashboard as command

    code = command.dashboard(runs or [], host=host, port=port, demo=demo, runs_dir=runs_dir, with_stdin=with_stdin)
    raise typer.Exit(code)


@app.command()
def doctor(
    clean: Annotated[bool, Option("--clean", help="Remove the leftovers of dead runs, and nothing else.")] = False,
    runs_dir: RunsDir = RUNS,
) -> None:
    """Check this machine: versions, free space, ports, and leftovers of dead runs."""
    from penstock.cli import doctor as command

    raise typer.Exit(command.doctor(runs_dir, clean=clean))


def main() -> None:
    """Run the `penstock` command."""
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
