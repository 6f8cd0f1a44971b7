"""Recovery: how a run continues after a process has died, or when it is resumed.

The trainer recovers from its newest checkpoint, and the ledger from the pool's index. Groups trained after that
checkpoint are ready again. So no group is lost, and the surviving line of weights trains on no group twice. The
policy_version only grows: restored weights get the next number, unless no later version exists.

  lost                how the run continues
  trainer             `rewind`: a new trainer starts from the checkpoint, while everything else goes on
  controller          `begin`: the trainer reports its state (`_adopt`), the index restores ledger and queues, and
                      incomplete groups start over
  both, or the run    `begin`: the checkpoint restores the trainer, the index restores the rest (`_restore`)

Rollout servers and environment workers hold no state that exists only there.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.alarms import HopelessError
from penstock.config import ConfigError
from penstock.observe import jsonl
from penstock.observe.summary import held_out_rewards
from penstock.ports.group_records import GroupRecord
from penstock.ports.training import SavedState, TrainerLost, TrainerState
from penstock.scheduler.ledger import FINAL
from penstock.system import CHECKPOINTS, System
from penstock.types import EpisodeState, Task, WeightsHandle

MAX_LEARNED_GROUPS = 20_000
"""Most groups from which a new controller learns lengths. It is enough for any predictor, and takes under a minute."""
AGAIN_S = 1.0
"""Wait in seconds before weights that no server could get are published or restored again."""
FIRST_VERSION = 0
"""Version of the weights that a run begins with."""
LEARNED_AT_ONCE = 100
"""Groups learned before other asyncio tasks run: a fraction of a second, so that the controller stays responsive."""


class NoCheckpoint(HopelessError):
    """All checkpoints are damaged."""


def was_evaluated(system: System) -> bool:
    """Return whether the held-out tasks were played before training, under this or an earlier controller."""
    return any(event.get("when") == "before" for event in _evaluations(system))


def last_validated_step(system: System) -> int:
    """Return the latest step with a completed validation; 0 if there is none."""
    return max((event.get("step", 0) for event in _evaluations(system)), default=0)


def _evaluations(system: System) -> list[dict[str, Any]]:
    events = jsonl.read(system.run_dir / "events.jsonl")
    return [event for event in events if event.get("event") == "evaluation"]


def _ends_early(system: System, step: int) -> bool:
    """Return whether the controller that died had ended training after this step."""
    events = jsonl.read(system.run_dir / "events.jsonl")
    return any(event.get("event") == "early_stop" and event.get("step") == step for event in events)


async def begin(system: System) -> None:
    """Start or continue a run: restore trainer and scheduler, and bring the weights to the servers."""
    await system.free_devices()
    while True:
        try:
            held = await system.trainer.state()
            handle = await (_adopt(system, held) if held.begun else _restore(system))
            system.validated = held_out_rewards(jsonl.read(system.run_dir / "events.jsonl"))
            break
        except TrainerLost:
            continue
    try:
        await system.update_servers(handle)
        system.scheduler.mark_served(handle.policy_version)
    except TrainerLost:
        await regain_weights(system)


async def begin_without_trainer(system: System) -> None:
    """Start or continue a run without a trainer, from the pool. The servers have their weights."""
    num_groups = await _restore_groups(system)
    system.update_pool()
    if num_groups:
        await system.recorder.restore(system.pool.each_record())
        system.recorder.event("went_on", tasks=system.scheduler.groups.num_ended, groups=num_groups)


async def regain_weights(system: System) -> None:
    """Recover from weights that no server could get: publish them again if the trainer lives, else `rewind`."""
    while True:
        try:
            if not (await system.trainer.state()).begun:
                break
            handle = await _publish(system)
            await system.update_servers(handle)
            system.scheduler.mark_served(handle.policy_version)
            return
        except TrainerLost:
            await asyncio.sleep(AGAIN_S)
    await rewind(system)


async def rewind(system: System) -> None:
    """Continue from the newest checkpoint with the successor of a dead trainer.

    Groups of the dead trainer keep their states until the servers have weights again. So alternating modes start no
    group with the weights of the dead trainer.
    """
    await system.free_devices()
    lost: list[GroupRecord] = []
    while True:
        try:
            point = await _newest_checkpoint(system)
            lost += await _revive_groups(system, point)
            handle = await _go_back(system, point)
            await system.update_servers(handle)
            break
        except TrainerLost:
            await asyncio.sleep(AGAIN_S)
    system.scheduler.restoring.rewind(handle.policy_version, lost, lambda record: _task(system, record))
    system.update_pool()
    system.scheduler.mark_served(handle.policy_version)
    num_steps, system.num_steps = system.num_steps, point.step if point else 0
    system.saved_versions.clear()
    system.validated = {step: reward for step, reward in system.validated.items() if step <= system.num_steps}
    details = {"policy_version": handle.policy_version, "groups": len(lost)}
    system.recorder.event("rewound", step=system.num_steps, lost_steps=num_steps - system.num_steps, **details)


async def _restore(system: System) -> WeightsHandle:
    """Restore a new trainer and a new scheduler."""
    point = await _newest_checkpoint(system)
    num_lost = len(await _revive_groups(system, point))
    handle = await _go_back(system, point)
    system.num_steps = point.step if point else 0
    num_groups = await _restore_groups(system)
    if point is not None:
        system.scheduler.restoring.load_state_dict(point.state["scheduler"])
        if not num_groups:
            _restore_without_pool(system, point)
        counts = {"groups": num_groups, "revived": num_lost}
        system.recorder.event("resumed", step=point.step, policy_version=handle.policy_version, **counts)
    system.scheduler.restoring.attach_learner(handle.policy_version)
    system.update_pool()
    return handle


async def _adopt(system: System, held: TrainerState) -> WeightsHandle:
    """Continue with a trainer that outlived its controller. The controller may have died before it recorded the latest
    step. Feedback, filters and tuned settings are those of the newest checkpoint."""
    handle = await _publish(system)
    num_groups = await _restore_groups(system)
    if (point := (await system.trainer.saved(system.run_dir / CHECKPOINTS)).newest) is not None:
        _record_checkpoint(system, point)
        system.scheduler.restoring.load_state_dict(point.state["scheduler"])
    system.scheduler.restoring.use_history(system.pool.history)
    system.num_steps = held.step
    system.ends_early = _ends_early(system, held.step)
    unrecorded = [r.group for r in system.pool.get_groups(held.trained) if r.state == EpisodeState.READY]
    if unrecorded and held.learner is not None:
        system.num_steps -= 1
        system.scheduler.restoring.attach_learner(handle.policy_version - 1, accumulated=unrecorded)
        system.complete_step(held.learner)
    system.scheduler.restoring.attach_learner(handle.policy_version, accumulated=held.accumulated)
    system.update_pool()
    system.recorder.event("adopted", step=held.step, policy_version=handle.policy_version, groups=num_groups)
    return handle


async def _newest_checkpoint(system: System) -> SavedState | None:
    """Return the newest checkpoint; None before the first one. Raises `NoCheckpoint` if all are damaged."""
    found = await system.trainer.saved(system.run_dir / CHECKPOINTS)
    for directory, reason in found.torn.items():
        system.recorder.event("checkpoint_skipped", path=directory, reason=reason)
    if found.newest is None and found.torn:
        reasons = "; ".join(f"{directory}: {reason}" for directory, reason in found.torn.items())
        raise NoCheckpoint(f"all checkpoints are damaged ({reasons}): remove them to start over")
    if found.newest is not None:
        _record_checkpoint(system, found.newest)
    return found.newest


def _record_checkpoint(system: System, point: SavedState) -> None:
    """Record a checkpoint if no event names its step: the controller died while the trainer wrote it."""
    events = jsonl.read(system.run_dir / "events.jsonl")
    if not any(event.get("event") == "checkpoint" and event.get("step") == point.step for event in events):
        system.recorder.event("checkpoint", step=point.step, path=f"{CHECKPOINTS}/{Path(point.directory).name}")


async def _go_back(system: System, point: SavedState | None) -> WeightsHandle:
    """Let a new trainer load `point`, or the initial weights, under a new version, and publish."""
    highest = max(system.pool.highest_version, system.scheduler.policy_version)
    version = point.policy_version if point is not None and highest <= point.policy_version else highest + 1
    system.pool.raise_version(version, weights_of=point.policy_version if point is not None else FIRST_VERSION)
    history = system.pool.history
    system.scheduler.restoring.use_history(history)
    if point is not None:
        await system.trainer.restore(Path(point.directory), step=point.step, policy_version=version, history=history)
    elif warm := await system.trainer.begin(policy_version=version, history=history):
        system.recorder.event("warm_start", **warm)
    return await _publish(system)


async def _publish(system: System) -> WeightsHandle:
    """Write the weights as they are, and return their handle."""
    return await system.trainer.finish_publish(await system.trainer.begin_publish())


async def _revive_groups(system: System, point: SavedState | None) -> list[GroupRecord]:
    """Mark the groups trained after `point` as ready in the pool. Returns their earlier records.

    This happens before the trainer goes back to `point`. So a new controller that adopts the restored trainer finds a
    pool that agrees with it.
    """
    since = point.policy_version if point is not None else 0
    lost = [r async for r in system.pool.each_record() if r.trained_in is not None and r.trained_in > since]
    system.pool.revive_groups([record.group for record in lost])
    return lost


async def _restore_groups(system: System) -> int:
    """Restore ledger, queues, task position and length predictions from the pool. Returns the number of groups."""
    records: list[GroupRecord] = []
    damaged: list[GroupRecord] = []
    completed: deque[GroupLengths] = deque(maxlen=MAX_LEARNED_GROUPS)
    written = {attempt for shard in system.pool.shards() if shard.written for attempt in shard.groups}
    async for record in system.pool.each_record():
        is_undumped = record.state == EpisodeState.COLLECTED and record.group_attempt not in written
        is_needed = record.state == EpisodeState.READY or is_undumped
        if is_needed and record.ref is not None and not system.pool.is_whole(record.ref):
            damaged.append(record)  # its tokens are needed but damaged, so it is played again
            facts = {"state": EpisodeState.PENDING, "counts": {}, "attempt": record.next_attempt}
            record = msgspec.structs.replace(record, ref=None, episodes=[], **facts)
        if record.episodes:
            completed.append(lengths_of(record))
        records.append(msgspec.structs.replace(record, episodes=[]) if record.counts else record)
    system.scheduler.restoring.restore_groups(records, lambda record: _task(system, record))
    system.tasks.position = max([system.tasks.position, *(record.task_index + 1 for record in records)])
    if damaged:
        system.pool.admit_groups([(record.group, _task(system, record)) for record in damaged])
        system.recorder.event("payloads_lost", groups=[record.group for record in damaged])
    await _learn_lengths(system, completed)
    return len(records)


async def _learn_lengths(system: System, completed: Iterable[GroupLengths]) -> None:
    lengths = ((_task(system, group), group.lengths) for group in completed)
    while some := list(islice(lengths, LEARNED_AT_ONCE)):
        system.scheduler.lengths.learn_lengths(some)
        await asyncio.sleep(0)


def _restore_without_pool(system: System, point: SavedState) -> None:
    """Restore the counts of the ledger from the checkpoint, if the index is gone.

    Episodes that were active at the checkpoint count as cancelled.
    """
    counts = {EpisodeState(name): count for name, count in point.state["ledger"].items() if name != "admitted"}
    final = {state: count for state, count in counts.items() if state in FINAL}
    final[EpisodeState.CANCELLED] = final.get(EpisodeState.CANCELLED, 0) + sum(counts.values()) - sum(final.values())
    system.scheduler.restoring.restore_counts(final, next_group=point.state["scheduler"]["next_group"])
    system.tasks.position = point.state["task_position"]
    system.recorder.event("pool_lost", step=point.step, ledger=system.scheduler.ledger.counts())


class GroupLengths(NamedTuple):
    """What is learned from a completed group."""

    task_id: str
    task_index: int
    lengths: list[int]


def lengths_of(record: GroupRecord) -> GroupLengths:
    return GroupLengths(record.task_id, record.task_index, [each.response_tokens for each in record.episodes])


def _task(system: System, record: GroupRecord | GroupLengths) -> Task:
    task = system.tasks.at(record.task_index)
    if task is None or task.task_id != record.task_id:
        raise ConfigError(
            f"data: task {record.task_index} was {record.task_id} and is now {task.task_id if task else 'missing'}: do "
            "not change the data of a run before it ends"
        )
    return task
