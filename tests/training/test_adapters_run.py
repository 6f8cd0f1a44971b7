"""A run that trains adapters: only they travel, and servers and trainer agree on the weights, also after deaths."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from test_deaths import LIMIT_S, TWO_OF_EACH, ended_well, has_steps, started, wait_until
from test_training_run import check_logs, lines, only_run

from penstock.supervisor.run_journal import read_state

pytest.importorskip("peft")
pytestmark = pytest.mark.integration

ADAPTERS = ["trainer.lora={rank: 4, alpha: 8}", "trainer.learning_rate=2e-3", "trainer.canaries.parity_every=1"]


@pytest.mark.long
def test_a_server_and_a_trainer_that_die_get_base_and_adapters_again(tmp_path: Path) -> None:
    with started(tmp_path, *TWO_OF_EACH, *ADAPTERS, "trainer.steps=14", "trainer.checkpoint_every=3") as run:
        for number, victim in enumerate(("rollout-1", "trainer-0"), start=1):
            wait_until(run, lambda number=number: has_steps(tmp_path, 4 * number))  # type: ignore[misc]
            run_dir = only_run(tmp_path)
            state = read_state(run_dir)
            assert state is not None
            os.kill(state["processes"][victim]["pid"], signal.SIGKILL)
        output, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, output
    summary = ended_well(run_dir, 14)
    assert summary["kl_engine_trainer"] < 1e-4
    steps = lines(run_dir / "metrics.jsonl")
    assert max(step["parity_gap_max"] for step in steps) < 1e-2
    assert {event["event"] for event in lines(run_dir / "events.jsonl")} >= {"rewound", "server_back"}
    shown = check_logs(run_dir, [("trainer-0", "published the weights of policy_version 0")])
    written = num_bytes(shown, "published the weights")
    served = num_bytes([line for line in shown if line.startswith("rollout-0")], "serves the weights")
    assert len(set(written)) == 1 and written[0] < min(served) < max(served), "the base is loaded first, then targets"


def num_bytes(shown: list[str], event: str) -> list[int]:
    """The sizes that log lines about an event name."""
    found = (re.search(rf"{event} .*?: ([\d,]+) bytes", line) for line in shown)
    return [int(match[1].replace(",", "")) for match in found if match]
