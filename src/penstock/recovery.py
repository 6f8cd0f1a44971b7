"""What a run does after a death, or when it is resumed: everything goes on from what survived.

The trainer's truth is its newest checkpoint, the ledger's is the pool's index. What was trained after that checkpoint
is ready again: nothing is lost, and nothing is trained twice in the lineage that survives. policy_versions go on
upwards: weights that servers have not seen under this very number get the next one.

  lost                what goes on
  trainer             `rewind`: it starts from the checkpoint, everything else goes on meanwhile
  controller          `begin`: the trainer tells what it holds (`_adopt`); ledger and queues from the index; groups that
                      were being played are played from their start
  both, or the run    `begin`: as after the loss of either (`_restore`)

Rollout servers and environment workers have nothing that is not elsewhere too.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from penstock.config import ConfigError
from penstock.observe import jsonl
from penstock.ports import GroupRecord, SavedState, TrainerLost, TrainerState
from penstock.scheduler.ledger import FINAL
from penstock.system import CHECKPOINTS, System
from penstock.types import EpisodeState, Task, WeightsHandle

LEARNT_GROUPS = 20_000
"""Whose lengths a new controller learns from, or another run: enough for any predictor, and no more than a minute of
reading."""
RECALLED_AT_ONCE = 100
"""A fraction of a second: then others have their turn, so that the controller is not silent."""


class NoCheckpoint(RuntimeError):
    """There are checkpoints, and none can be trusted."""

    self_explanatory = True
    hopeless = True


def was_evaluated(system: System) -> bool:
    """Whether the held-out tasks were played before training, in an earlier life."""
    events = jsonl.read(system.run_dir / "events.jsonl")
    return any(event.get("event") == "evaluation" and event.get("when") == "before" for event in events)


def validated_until(system: System) -> int:
    """The latest step after which the held-out tasks were played; 0 if only before the first."""
    events = jsonl.read(system.run_dir / "events.jsonl")
    return max((event.get("step", 0) for event in events if event.get("event") == "evaluation"), default=0)


async def begin(system: System) -> None:
    """The trainer holds weights, the servers serve them, and the scheduler knows every group there is."""
    while True:
        try:
            held = await system.trainer.state()
            handle = await (_adopt(system, held) if held.begun else _restore(system))
            break
        except TrainerLost:
            continue
    try:
        await system.bring_servers_to(handle)
        system.scheduler.published(handle.policy_version)
    except TrainerLost:
        await regain(system)


async def begin_to_play(system: System) -> None:
    """A run without a trainer: the pool knows how far it is, and servers have their weights."""
    known = await _take_up(system)
    system.settle()
    if known:
        system.recorder.take_up(system.pool.records())
        system.recorder.event("went_on", tasks=system.scheduler.num_ended, groups=known)


async def regain(system: System) -> None:
    """The trainer died, or nobody could have its weights. One that lives publishes them again."""
    while True:
        try:
            if not (await system.trainer.state()).begun:
                break
            handle = await system.trainer.publish()
            await system.bring_servers_to(handle)
            system.scheduler.published(handle.policy_version)
            return
        except TrainerLost:
            continue
    await rewind(system)


async def rewind(system: System) -> None:
    """The trainer died, and its successor goes on from the newest checkpoint. What the dead one held stays where it is
    until the weights are served again, so that alternating modes play nothing with those of the dead one."""
    lost: list[GroupRecord] = []
    while True:
        try:
            point = await _newest_checkpoint(system)
            lost += _revive(system, point)
            handle = await _go_back(system, point)
            await system.bring_servers_to(handle)
            break
        except TrainerLost:
            continue
    system.scheduler.rewind(handle.policy_version, lost, lambda record: _task(system, record))
    system.settle()
    system.scheduler.published(handle.policy_version)
    num_steps, system.num_steps = system.num_steps, point.step if point else 0
    system.saved_versions.clear()
    system.recorder.event(
        "rewound",
        step=system.num_steps,
        lost_steps=num_steps - system.num_steps,
        policy_version=handle.policy_version,
        groups=len(lost),
    )


async def _restore(system: System) -> WeightsHandle:
    """A trainer that holds nothing, and a scheduler that knows nothing."""
    point = await _newest_checkpoint(system)
    num_lost = len(_revive(system, point))
    handle = await _go_back(system, point)
    system.num_steps = point.step if point else 0
    known = await _take_up(system)
    if point is not None:
        system.scheduler.load_state_dict(point.state["scheduler"])
        if not known:
            _without_pool(system, point)
        system.recorder.event(
            "resumed", step=point.step, policy_version=handle.policy_version, groups=known, revived=num_lost
        )
    system.scheduler.learner_at(handle.policy_version)
    system.settle()
    return handle


async def _adopt(system: System, held: TrainerState) -> WeightsHandle:
    """A trainer that outlived a controller. That may have died before it wrote down the latest optimizer step."""
    handle = await system.trainer.publish()
    known = await _take_up(system)
    system.num_steps = held.step
    unbooked = [r.group for r in system.pool.get(held.trained) if r.state == EpisodeState.READY]
    if unbooked and held.learner is not None:
        system.num_steps -= 1
        system.scheduler.learner_at(handle.policy_version - 1, accumulated=unbooked)
        system.book(held.learner)
    system.scheduler.learner_at(handle.policy_version, accumulated=held.accumulated)
    system.settle()
    system.recorder.event("adopted", step=held.step, policy_version=handle.policy_version, groups=known)
    return handle


async def _newest_checkpoint(system: System) -> SavedState | None:
    """None before the first one. Raises `NoCheckpoint`."""
    found = await system.trainer.saved(system.run_dir / CHECKPOINTS)
    for directory, reason in found.torn.items():
        system.recorder.event("checkpoint_skipped", path=directory, reason=reason)
    if found.newest is None and found.torn:
        reasons = "; ".join(f"{directory}: {reason}" for directory, reason in found.torn.items())
        raise NoCheckpoint(f"no checkpoint is whole ({reasons}): remove them to begin anew")
    return found.newest


async def _go_back(system: System, point: SavedState | None) -> WeightsHandle:
    """A new trainer holds what `point` says, or what a run begins with, under a number of its own; and publishes it."""
    highest = max(system.pool.highest_version, system.scheduler.policy_version)
    version = point.policy_version if point is not None and highest <= point.policy_version else highest + 1
    system.pool.raise_version(version)
    if point is not None:
        await system.trainer.restore(Path(point.directory), step=point.step, policy_version=version)
    else:
        if warm := await system.trainer.begin(policy_version=version):
            system.recorder.event("warm_start", **warm)
    return await system.trainer.publish()


def _revive(system: System, point: SavedState | None) -> list[GroupRecord]:
    """What was trained after `point`, as it was before; the pool counts it as ready from now on. It does so before any
    trainer goes back: whoever adopts one that has, finds the pool in agreement."""
    since = point.policy_version if point is not None else 0
    lost = [r for r in system.pool.records() if r.trained_in is not None and r.trained_in > since]
    system.pool.revive([record.group for record in lost])
    return lost


async def _take_up(system: System) -> int:
    """Ledger, queues, task position and length predictions from the pool; returns how many groups there are. Those
    whose tokens are needed, to be trained or dumped, and damaged are to be played anew."""
    number = position = 0
    damaged: list[GroupRecord] = []
    written = {attempt for shard in system.pool.shards() if shard.written for attempt in shard.groups}

    def is_damaged(record: GroupRecord) -> bool:
        is_undumped = record.state == EpisodeState.COLLECTED and record.group_attempt not in written
        is_needed = record.state == EpisodeState.READY or is_undumped
        return is_needed and record.ref is not None and not system.pool.is_whole(record.ref)

    def records() -> Iterator[GroupRecord]:
        nonlocal number, position
        for record in system.pool.records():
            number, position = number + 1, max(position, record.task_index + 1)
            if is_damaged(record):
                damaged.append(record)
                facts = {"state": EpisodeState.PENDING, "counts": {}, "attempt": record.next_attempt}
                yield msgspec.structs.replace(record, ref=None, episodes=[], **facts)
            else:
                yield record

    system.scheduler.take_up(records(), lambda record: _task(system, record))
    system.tasks.position = max(system.tasks.position, position)
    if damaged:
        system.pool.admit([(record.group, _task(system, record)) for record in damaged])
        system.recorder.event("payloads_lost", groups=[record.group for record in damaged])
    played = deque((r for r in system.pool.records() if r.episodes), maxlen=LEARNT_GROUPS)
    lengths = ((_task(system, r), [episode.response_tokens for episode in r.episodes]) for r in played)
    while some := list(islice(lengths, RECALLED_AT_ONCE)):
        system.scheduler.recall(some)
        await asyncio.sleep(0)
    return number


def _without_pool(system: System, point: SavedState) -> None:
    """The index is gone: the checkpoint knows the sums, and what was live then is given up."""
    counts = {EpisodeState(name): count for name, count in point.state["ledger"].items() if name != "admitted"}
    final = {state: count for state, count in counts.items() if state in FINAL}
    final[EpisodeState.CANCELLED] = final.get(EpisodeState.CANCELLED, 0) + sum(counts.values()) - sum(final.values())
    system.scheduler.begin_from(final, next_group=point.state["scheduler"]["next_group"])
    system.tasks.position = point.state["task_position"]
    system.recorder.event("pool_lost", step=point.step, ledger=system.scheduler.ledger.counts())


def _task(system: System, record: GroupRecord) -> Task:
    task = system.tasks.at(record.task_index)
    if task is None or task.task_id != record.task_id:
        raise ConfigError(
            f"data: task {record.task_index} was {record.task_id} and is {task.task_id if task else 'gone'}: the data "
            "of a run must not change while it lasts"
        )
    return task
