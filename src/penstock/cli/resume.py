"""`penstock resume`: check, take the run over, supervise it to its end, sum it up. Exit codes are those of `train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.cli.launching import room
from penstock.cli.preflight import Refused, check
from penstock.cli.refusal import refuse
from penstock.cli.train import carry_out, conclude, owned_within_s, start_detached
from penstock.config import Config, ConfigError
from penstock.observe.summary import EVALUATION
from penstock.supervisor.child import CONFIG_ERROR
from penstock.supervisor.ownership import Owned
from penstock.supervisor.run_directory import NotResumable, check_data, check_unsupervised, plan_resumption, reopen_run

REMEDIES = {
    "train": "raise trainer.steps to go further",
    "eval": f"its results are in its {EVALUATION}; `penstock eval` plays the tasks once more",
}


def remedy(config: Config) -> str:
    """What to do with a complete run."""
    if config.pipeline != "rollout":
        return REMEDIES[config.pipeline]
    if config.synthesis.tasks < 0:
        return "it has played every task of its data; `penstock rollout` plays them once more, or others"
    return f"raise synthesis.tasks to go further, if its data have more than {config.synthesis.tasks} tasks"


def resume(run_dir: Path, overrides: Sequence[str], *, detach: bool) -> int:
    """Returns the exit code."""
    run_dir = run_dir.absolute()
    try:
        resumption = plan_resumption(run_dir, overrides)
        if not resumption.is_complete and not detach:  # whoever goes on in the background looks by itself
            check_data(run_dir, resumption.config)
    except ConfigError as error:
        return refuse(error, CONFIG_ERROR)
    except NotResumable as error:
        return refuse(error, 1)
    if resumption.is_complete:
        print(f"nothing was done, since run {run_dir.name} is complete: {remedy(resumption.config)}")
        return 0
    try:
        check_unsupervised(run_dir)
        check(resumption.config)
        if detach:
            words = ["resume", str(run_dir), *overrides]
            return start_detached(run_dir, words, within_s=owned_within_s(resumption.config))
        with room(resumption.config) as held, reopen_run(run_dir, overrides) as run:
            return conclude(run, carry_out(run, held))
    except (ConfigError, NotResumable, Owned, Refused) as error:
        return refuse(error, 1)
