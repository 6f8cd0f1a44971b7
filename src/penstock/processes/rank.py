"""A rank of the trainer in its own process. It executes the trainer's calls, one after the other.

The supervisor starts and watches it like every process of the run, and restarts it together with the trainer and the
other ranks. It ends when it loses its connection to the trainer. The event loop stays free for heartbeats; models run
on another thread.
"""

from __future__ import annotations

import asyncio
from contextlib import closing, suppress
from importlib import import_module

from penstock.control.rank_channel import connect_to_trainer
from penstock.deadline import first
from penstock.groups.rank_worker import RankWorker
from penstock.runtime.lasting_imports import lasting_imports
from penstock.supervisor.child import Child
from penstock.ticks import heard_by

WORKING = "a call of the trainer"
GRACE_S = 5.0
"""Time for the supervisor to end this process after the trainer is gone. The supervisor's reason is better than
ours."""


async def serve(child: Child) -> None:
    stop = child.stop_event()
    child.log_start()
    working = asyncio.ensure_future(asyncio.to_thread(_answer_calls, child))
    await first(stop.wait(), asyncio.wait([working]))
    if stop.is_set():
        child.leave()
    await working
    await asyncio.sleep(GRACE_S)
    child.fail(f"{child.name} lost its connection to the trainer, and cannot work without it")


def _answer_calls(child: Child) -> None:
    """Execute the trainer's calls until the trainer is gone."""
    with lasting_imports():
        import_module("penstock.processes.trainer_rank")  # imports what every rank needs, while the trainer starts
        from penstock.processes.devices import devices_in_use
    worker, num_done, doing = RankWorker(), 0, ""

    def ticked() -> None:
        nonlocal num_done
        num_done += 1
        child.pulse(num_done, doing)
        channel.tick()

    with (
        closing(connect_to_trainer(child.runtime_dir, child.name)) as channel,
        heard_by(ticked),  # files are also written between two calls
        suppress(EOFError, ConnectionError),
    ):
        while True:
            request, was_built = channel.receive(), worker.has_workers
            num_done, doing = num_done + 1, WORKING
            child.pulse(num_done, doing)
            channel.send(worker.answer(request))
            doing = ""
            child.pulse(num_done, doing)
            if worker.has_workers and not was_built:
                child.report_ready(devices=devices_in_use())
