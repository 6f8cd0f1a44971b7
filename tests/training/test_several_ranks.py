"""A run whose trainer is several processes, of one role or of three: it trains, and survives the loss of one."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from test_training_run import command, leftovers, lines, only_run

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


def ranks_of(run: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes of the trainer's ranks, in the order of their start."""
    found = []
    for process in psutil.Process(run.pid).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if "penstock.groups.hosted" in process.cmdline():
                found.append(process)
    return found


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[Sequence[str]], subprocess.Popen[str]]]:
    """Start a run with some settings; what still runs at the end of the test is killed."""
    with ExitStack() as stack:

        def begin(settings: Sequence[str]) -> subprocess.Popen[str]:
            words = command("quickstart", tmp_path, *OVERRIDES, *settings)
            run = stack.enter_context(
                subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            )
            stack.callback(run.kill)
            return run

        yield begin


@pytest.mark.parametrize(
    ("settings", "lost"),
    [
        pytest.param(["trainer.ranks=2"], "of rank 1", id="ddp"),
        pytest.param(["trainer.ranks=2", "trainer.distributed.strategy=fsdp"], "of rank 1", id="fsdp"),
        pytest.param(SPLIT, "of rank 0", id="roles split"),
    ],
)
def test_a_run_goes_on_after_the_loss_of_a_rank(
    start: Callable[[Sequence[str]], subprocess.Popen[str]], tmp_path: Path, settings: Sequence[str], lost: str
) -> None:
    run = start(settings)
    give_up = time.monotonic() + 120
    while not any(len(lines(path)) >= 4 for path in tmp_path.glob("*/metrics.jsonl")):
        assert run.poll() is None and time.monotonic() < give_up, run.communicate(timeout=10)[0]
        time.sleep(0.1)
    _, second = ranks_of(run)
    second.kill()
    said, _ = run.communicate(timeout=240)
    assert run.returncode == 0, said
    run_dir = only_run(tmp_path)
    assert lines(run_dir / "metrics.jsonl")[-1]["step"] == STEPS
    assert f"lost its worker {lost}: SIGKILL" in (run_dir / "logs" / "trainer-0.log").read_text()
    assert not leftovers(run_dir)
