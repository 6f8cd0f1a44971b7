"""`penstock eval`: play the validation set with a policy as it is. Exit codes are those of `train`.

It is a run like any other, with a directory of its own, except that nothing is trained in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.cli.policy import policy_word
from penstock.cli.preflight import Refused
from penstock.cli.refusal import refuse
from penstock.cli.train import begin

AS_IT_IS = ("pipeline=eval", "run_id=null", "model.warm_start.steps=0")
"""Over what the file says, which is for training, and under what is said on the command line."""


def evaluate(path: Path, overrides: Sequence[str], *, checkpoint: str | None, runs_dir: Path, json: Path | None) -> int:
    """Returns the exit code."""
    try:
        if json is not None and not json.absolute().parent.is_dir():
            raise Refused(f"--json: there is no directory {json.parent}")
        words = [*AS_IT_IS, *overrides, *policy_word(checkpoint, runs_dir)]
    except Refused as error:
        return refuse(error, 1)
    return begin("eval", path, words, results=json)
