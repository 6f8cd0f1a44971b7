"""A run whose trainer is several processes, of one role or of three: it trains, and survives the loss of one."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from test_deaths import LIMIT_S
from test_training_run import RECIPE, command, leftovers, lines, only_run

from penstock.supervisor.run_journal import read_state

pytestmark = [pytest.mark.integration, pytest.mark.long]
STEPS = 16
OVERRIDES = [
    *("data.eval_tasks=16", "model.warm_start.steps=20", "trainer.groups_per_step=8", "observe.progress=false"),
    *(f"trainer.steps={STEPS}", "trainer.checkpoint_every=2"),
]
SPLIT = [
    *("trainer.critic={}", "trainer.objective.kl_coef=0.01", "scheduler.group_filter=[]"),
    "trainer.split=[critic, reference]",
]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Sequence[str]], subprocess.Popen[str]]]:
    """Start a run with some settings; what still runs at the end of the test is killed."""
    with ExitStack() as stack:

        def begin(settings: Sequence[str]) -> subprocess.Popen[str]:
            words = command(RECIPE, tmp_path, *OVERRIDES, *settings)
            run = stack.enter_context(
                subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
            stack.callback(run.kill)
            return run

        yield begin


def processes(run_dir: Path) -> dict[str, Any]:
    """What is recorded of each."""
    return dict((read_state(run_dir) or {})["processes"])


@pytest.mark.parametrize(
    ("settings", "ranks"),
    [
        pytest.param(["trainer.ranks=2"], ["rank-0", "rank-1"], id="ddp"),
        pytest.param(["trainer.ranks=2", "trainer.distributed.strategy=fsdp"], ["rank-0", "rank-1"], id="fsdp"),
        pytest.param(SPLIT, ["rank-1", "rank-2"], id="roles split", marks=pytest.mark.longest),
    ],
)
def test_a_run_goes_on_after_the_loss_of_a_rank(
    start: Callable[[Sequence[str]], subprocess.Popen[str]], tmp_path: Path, settings: Sequence[str], ranks: list[str]
) -> None:
    run = start(settings)
    give_up = time.monotonic() + LIMIT_S
    while not any(len(lines(path)) >= 4 for path in tmp_path.glob("*/metrics.jsonl")):
        assert run.poll() is None and time.monotonic() < give_up, run.communicate(timeout=10)[0]
        time.sleep(0.1)
    before = processes(only_run(tmp_path))
    os.kill(before[ranks[-1]]["pid"], signal.SIGKILL)
    said, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, said
    run_dir = only_run(tmp_path)
    assert lines(run_dir / "metrics.jsonl")[-1]["step"] == STEPS
    after, restarted = processes(run_dir), {"trainer-0", *ranks}
    assert {name for name, process in after.items() if process["restarts"]} == restarted, "all of them, and no others"
    assert {after[name]["restarts"] for name in restarted} == {1}
    assert all((run_dir / "logs" / f"{name}.log").exists() for name in ranks)
    assert not leftovers(run_dir)
