"""`penstock eval`: play the validation set with a policy as it is. Exit codes are those of `train`.

It is a run like any other, with a directory of its own, except that nothing is trained in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from penstock.cli.policy import model_in
from penstock.cli.preflight import Refused, check
from penstock.cli.refusal import refuse
from penstock.cli.train import carry_out, tell
from penstock.config import Config, ConfigError, WarmStartConfig, load_config, parse_overrides
from penstock.observe import jsonl, report, summary
from penstock.supervisor.child import CONFIG_ERROR
from penstock.supervisor.ownership import Owned
from penstock.supervisor.run_directory import OpenRun, RunExists, open_run


def evaluate(path: Path, overrides: Sequence[str], *, checkpoint: str | None, runs_dir: Path, json: Path | None) -> int:
    """Returns the exit code."""
    try:
        own_id = parse_overrides(overrides).get("run_id")  # one in the file is that of a training run
        config = load_config(path, overrides).model_copy(update={"pipeline": "eval", "run_id": own_id})
    except ConfigError as error:
        return refuse(error, CONFIG_ERROR)
    try:
        if json is not None and not json.absolute().parent.is_dir():
            raise Refused(f"--json: there is no directory {json.parent}")
        if checkpoint is not None:
            config = with_policy(config, model_in(checkpoint, runs_dir))
        if not config.validation_tasks:
            raise Refused("there are no tasks to play: data.eval_tasks and validation.tasks are 0")
        check(config)
        with open_run(config) as run:
            outcome = carry_out(run)
            conclude(run, json)
            return tell(outcome)
    except (ConfigError, Refused, RunExists, Owned) as error:
        return refuse(error, 1)


def with_policy(config: Config, directory: Path) -> Config:
    """The configuration with the policy in `directory`, as it is."""
    model = config.model.model_copy(update={"path": str(directory), "warm_start": WarmStartConfig()})
    return config.model_copy(update={"model": model})


def conclude(run: OpenRun, json: Path | None) -> None:
    """Write and show what was found; nothing, if the run did not come so far."""
    summary.write(run.run_dir)
    events = [event for event in jsonl.read(run.run_dir / "events.jsonl") if event.get("event") == "evaluation"]
    if not events:
        return
    found: dict[str, Any] = {"run_id": run.run_id, "model": run.config.model.path}
    found |= {key: value for key, value in events[-1].items() if key not in ("event", "when", "step")}
    for file in [run.run_dir / summary.EVALUATION, *([json] if json is not None else [])]:
        jsonl.write_json(file, found)
    console = Console(highlight=False)
    console.print(report.evaluation_table(events[-1]))
    console.print(f"results in {json or run.run_dir / summary.EVALUATION}", soft_wrap=True)
