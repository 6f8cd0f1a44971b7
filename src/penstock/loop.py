"""The system on a page. Runs in the controller, or in the simulator on a virtual clock.

     tasks ─admit─► scheduler ─dispatch─► environment workers ─HTTP─► rollout servers
                       ▲  │                       │                        ▲
                       │  └─train─► trainer       │ collect                │ swap
                       └──────────────────────────┘      trainer ─publish──┘

  loop      waits for                                       is woken by
  admit     room in the look-ahead                          a dispatched group
  dispatch  something to run, slots, staleness budget       an admitted group, a grant request, a finished group,
                                                            a new worker, weights served
  collect   a played group (not a loop: one call each)      DATA_GENERATED on the bus
  train     the trigger: N_min samples, or T_max            a group becoming ready, or the clock
  swap      a published policy version                      the trainer having stepped

The trainer is the finite clock: when its last step is served, the other loops end. A group's place in the staleness
budget is freed only after the swap. In the alternating modes generation gives way between a whole batch and the swap.
What happens after a death is in `recovery.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import NoReturn, ParamSpec

from penstock import recovery
from penstock.deadline import patient
from penstock.ports import TrainerLost, Work
from penstock.scheduler.scheduler import TrainBatch
from penstock.system import CHECKPOINTS, System
from penstock.types import EpisodeSummary, GroupAttempt, LearnerState, PayloadRef, WeightsHandle
from penstock.validation import Validation, evaluate

Swaps = asyncio.Queue[tuple[int, WeightsHandle]]
"""What was published after which optimizer step."""

P = ParamSpec("P")

SHOW_EVERY_S = 1.0
PATIENCE_S = 3600.0
"""Of one loop with another: an optimizer step and its swap take less."""


async def run(system: System) -> None:
    """Begin, or go on where the run was; evaluate, train to the last step, evaluate again."""
    await recovery.begin(system)
    take_up_dumps(system)
    async with asyncio.TaskGroup() as loops:
        dispatching = loops.create_task(never_returns(dispatch, system))
        if not recovery.was_evaluated(system):
            await evaluate(system, "before")
        await train_all(system)
        cancel_rest(system)
        await evaluate(system, "after")
        dispatching.cancel()
    await finish_dumps(system)
    system.recorder.event("completed", step=system.num_steps, ledger=system.scheduler.ledger.counts())


async def evaluate_only(system: System) -> None:
    """Play the held-out tasks with the policy that there is."""
    await (recovery.begin(system) if system.config.has_trainer else recovery.begin_to_play(system))
    async with asyncio.TaskGroup() as loops:
        dispatching = loops.create_task(never_returns(dispatch, system))
        await evaluate(system, "given")
        dispatching.cancel()
    system.recorder.event("completed", step=system.num_steps, ledger=system.scheduler.evaluations.counts())


async def synthesize(system: System) -> None:
    """Rollout only: play every task once, as a group. Nothing is trained, weights never change."""
    await recovery.begin_to_play(system)
    take_up_dumps(system)
    async with asyncio.TaskGroup() as loops:
        endless = [
            loops.create_task(never_returns(dispatch, system)),
            loops.create_task(never_returns(show_progress, system)),
        ]
        await admit(system)
        await system.scheduler.all_ended()
        for loop in endless:
            loop.cancel()
    await finish_dumps(system)
    show(system)
    system.recorder.event("completed", step=system.scheduler.num_ended, ledger=system.scheduler.ledger.counts())


async def train_all(system: System) -> None:
    """Admit, train and swap beside dispatch, until the trainer has taken its last step and its weights are served."""
    swaps: Swaps = asyncio.Queue(maxsize=1)
    async with asyncio.TaskGroup() as loops:
        validation = Validation(system, loops)
        validation.make_up()
        endless = [
            loops.create_task(admit(system)),
            loops.create_task(never_returns(swap, system, swaps, validation)),
        ]
        while True:
            try:
                await train(system, swaps)
                await swapped(swaps)
                system.scheduler.check_weights()
                break
            except TrainerLost:
                await swapped(swaps)
                await recovery.regain(system)
        for loop in endless:
            loop.cancel()
        await validation.ended()


async def admit(system: System) -> None:
    """Endless, unless the task source ends."""
    while True:
        room = await system.scheduler.room()
        tasks = system.tasks.take(room)
        system.pool.admit(system.scheduler.admit(tasks))
        if len(tasks) < room:
            break
    system.scheduler.out_of_tasks(
        f"data: the task source is used up after {system.tasks.position - 1} tasks, before the last of "
        f"{system.config.trainer.steps} optimizer steps: give it more tasks or lower trainer.steps"
    )


async def dispatch(system: System) -> NoReturn:
    while True:
        for assignment in await system.scheduler.next_assignments():
            if isinstance(assignment.item, Work):
                system.workers.start(assignment.worker, assignment.item)
            else:
                system.workers.grant(assignment.worker, assignment.item)


def collect(system: System, group: int, ref: PayloadRef | None, episodes: Sequence[EpisodeSummary]) -> None:
    """A group was played."""
    task = system.scheduler.task_of(group, episodes[0].episode.attempt) if episodes else None
    if task is None:
        return
    if ref is not None:
        system.pool.add(group, task, ref, episodes)
    state = system.scheduler.finish(group, ref, episodes)
    if ref is not None and state is not None and task.purpose == "train":
        system.recorder.played(task.tag, episodes)
    system.settle()
    system.tell()
    if ref is not None and state is not None:
        for dump in system.dumps:
            dump.played(GroupAttempt(group, episodes[0].episode.attempt), state, len(episodes))


async def train(system: System, swaps: Swaps) -> None:
    settings = system.config.trainer
    if not system.num_steps and system.config.model.warm_start.steps:
        await checkpoint(system)  # so that nobody has to warm it up again
    while not system.done:
        batch = await system.scheduler.next_batch()
        await give_way(system, batch)
        if batch.groups:
            system.recorder.accumulated(await system.trainer.accumulate(batch.groups))
        if not batch.step:
            continue
        system.stepping = asyncio.create_task(step(system))
        learner = await asyncio.shield(system.stepping)
        handle = await system.trainer.publish()
        with patient(PATIENCE_S, waiter="the trainer's loop", resource="the swap before", holder="the rollout servers"):
            await swaps.put((system.num_steps, handle))
        scheduler = system.scheduler
        system.recorder.stepped(system.num_steps, learner, scheduler.ledger.counts(), scheduler.metrics())
        for dump in system.dumps:
            dump.stepped(system.num_steps)
        system.tell(learner.alarms)
        if system.num_steps % settings.checkpoint_every == 0:
            await checkpoint(system)
    if not system.is_saved:
        await checkpoint(system)


async def give_way(system: System, batch: TrainBatch) -> None:
    """Colocated: the servers hand over the device; what they had begun goes on, or starts over, after the swap."""
    if system.config.scheduler.mode == "colocated":
        if batch.restarted:
            system.workers.cancel(batch.restarted)
        await system.servers.release()


async def step(system: System) -> LearnerState:
    """The optimizer step and its books. Never cancelled halfway: a stop waits for `system.stepping`."""
    learner = await system.trainer.step()
    system.book(learner)
    return learner


async def swap(system: System, swaps: Swaps, validation: Validation) -> NoReturn:
    while True:
        with patient(PATIENCE_S, waiter="swap", resource="a published policy_version", holder="the trainer's loop"):
            step, handle = await swaps.get()
        try:
            await system.bring_servers_to(handle)
        except TrainerLost as lost:
            system.recorder.event("weights_lost", policy_version=handle.policy_version, reason=str(lost))
            system.scheduler.weights_lost(str(lost))
        else:
            system.scheduler.published(handle.policy_version)
            validation.served(step)
        swaps.task_done()


async def swapped(swaps: Swaps) -> None:
    """Until what was published is served."""
    with patient(PATIENCE_S, waiter="the trainer's loop", resource="the last swap", holder="the rollout servers"):
        await swaps.join()


async def checkpoint(system: System) -> None:
    """Weights, optimizer and the scheduler's side; the pool's index knows which groups they were trained on, and may
    forget the tokens of those in the oldest checkpoint that is kept."""
    directory = system.run_dir / CHECKPOINTS / f"step_{system.num_steps}"
    version, keep = system.scheduler.trained_version, system.config.trainer.keep_checkpoints
    system.pool.sync()
    await system.trainer.checkpoint(
        directory,
        {
            "step": system.num_steps,
            "policy_version": version,
            "task_position": system.tasks.position,
            "ledger": system.scheduler.ledger.counts(),
            "scheduler": system.scheduler.state_dict(),
        },
    )
    system.recorder.event("checkpoint", step=system.num_steps, path=str(directory.relative_to(system.run_dir)))
    system.saved_versions = [*system.saved_versions, version][-keep:]
    if len(system.saved_versions) == keep:
        unwritten = {group for dump in system.dumps for group in dump.unwritten}
        system.pool.covered(system.saved_versions[0], keep=unwritten)


async def show_progress(system: System) -> NoReturn:
    """While nothing is trained, time makes the steps."""
    while True:
        await asyncio.sleep(SHOW_EVERY_S)
        show(system)


def show(system: System) -> None:
    """How far a run that only plays is."""
    scheduler = system.scheduler
    system.recorder.progressed(scheduler.num_ended, scheduler.ledger.counts(), scheduler.metrics())


def take_up_dumps(system: System) -> None:
    """What was played before is written, if it is not yet."""
    for dump in system.dumps:
        dump.take_up(system.pool.records())


async def finish_dumps(system: System) -> None:
    """Write what is left."""
    for dump in system.dumps:
        await dump.finish()


def cancel_rest(system: System) -> None:
    """Give up what is still in flight."""
    attempts = system.scheduler.cancel_all()
    system.workers.cancel(attempts)
    system.settle()


async def never_returns(loop: Callable[P, Awaitable[None]], *args: P.args, **kwargs: P.kwargs) -> NoReturn:
    """An endless loop that ends is an error."""
    await loop(*args, **kwargs)
    raise RuntimeError(f"the {loop.__name__} loop ended by itself")
