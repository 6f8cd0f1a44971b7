"""Runs that meet faults: one life of one, in this process (`python faulty_run.py BASE`)."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "supervisor"))
from injection import Fault, Plan
from stand_in_run import SOURCE, Run

from penstock.config import SupervisorConfig
from penstock.ports.process_launcher import ProcessSpec
from penstock.processes.layout import prepare, stages

HERE = Path(__file__).parent
STEPS, GROUPS_PER_STEP, GROUP_SIZE, EVAL_TASKS = 12, 2, 2, 1
UNHURRIED = SupervisorConfig(heartbeat_s=0.1, ready_timeout_s=60.0, grace_s=4.0, backoff_s=0.01, max_restarts=8)
WATCHFUL = UNHURRIED.model_copy(update={"silent_s": 5.0, "ready_timeout_s": 20.0})
"""Settings for faults in which the supervisor has to notice that a process hangs."""


class FaultyRun(Run):
    """The real supervisor, controller and environment worker; a server and a trainer that stand in."""

    def __init__(self, base: Path, plan: Plan) -> None:
        super().__init__(
            base,
            settings=WATCHFUL if plan.fault is Fault.HANG else UNHURRIED,
            data={"source": "seeds", "eval_tasks": EVAL_TASKS},
            env={"name": "roles.game:Game", "group_size": GROUP_SIZE},
            rollout={"slots": 8, "request_timeout_s": 20.0},
            scheduler={"max_staleness": 2, "trigger": {"min_samples": 2}},
            trainer={"steps": STEPS, "groups_per_step": GROUPS_PER_STEP, "checkpoint_every": 2},
        )
        self.stages = tuple([played(spec) for spec in stage] for stage in stages(self.config))
        prepare(self.config, self.run_dir)


def played(spec: ProcessSpec) -> ProcessSpec:
    """By a module of `roles`."""
    return replace(
        spec,
        module=f"roles.{spec.role}",
        env={**spec.env, "PYTHONPATH": os.pathsep.join([str(HERE), str(SOURCE)])},
    )


if __name__ == "__main__":
    signal.signal(signal.SIGUSR2, lambda *_: os._exit(0))
    print(asyncio.run(FaultyRun(Path(sys.argv[1]), Plan.of_this_process()).supervise()))
