"""Fakes of the loop's ports: workers with scripted results, and trainers and servers that only take time."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from xxhash import xxh3_64_intdigest

from penstock.ports.training import SavedState, SavedStates, TrainerLost, TrainerState
from penstock.ports.work import PartialRollout, Work
from penstock.simulator.trainer_model import TrainerWithoutCheckpoints
from penstock.types import (
    NO_VERSION,
    EpisodeId,
    EpisodeSummary,
    GroupAttempt,
    GroupRef,
    LearnerState,
    PayloadRef,
    Purpose,
    Sampling,
    SegmentGrant,
    StopReason,
    Task,
    WeightsHandle,
    WeightsTransport,
)
from penstock.version_history import VersionHistory

RECORD = b"tokens"
REF = PayloadRef(file="env-0-00000.seg", offset=0, length=len(RECORD), checksum=xxh3_64_intdigest(RECORD))
"""The record to which modelled workers refer for all tokens."""

Play = Callable[[Work], tuple[float, list[float]]]
"""(seconds the group takes, reward per member)"""

Collect = Callable[[int, PayloadRef | None, Sequence[EpisodeSummary]], None]

Generated = Callable[[GroupAttempt, Sequence[int], int], None]
"""(attempt, members, tokens of the first member)"""


T = TypeVar("T")


class NumberedTasks:
    """A `TaskSource` of numbered tasks without content."""

    def __init__(self, purpose: Purpose, *, size: int | None = None) -> None:
        self._purpose, self._size = purpose, size

    def task(self, index: int) -> Task | None:
        if self._size is not None and index >= self._size:
            return None
        return Task(task_id=f"{self._purpose}/{index}", tag="train", index=index, purpose=self._purpose)


class ModelledWorkers:
    """`Workers` that finish a group after the seconds that `play` returns, with the version that was served at its
    start."""

    def __init__(
        self,
        play: Play,
        collect: Collect,
        served_version: Callable[[], int],
        *,
        generated: Generated = lambda attempt, members, probe_tokens: None,
    ) -> None:
        """Call `generated` for a group after half its time; the other half is spent on its rewards."""
        self._play, self._collect, self._served_version, self._generated = play, collect, served_version, generated
        self.playing: dict[int, asyncio.Task[None]] = {}
        self.num_started = 0
        self.versions: dict[int, int] = {}
        """Policy version of each group."""

    def start(self, worker: str, work: Work) -> None:
        group = work.group
        self.num_started += 1
        self.playing[group] = asyncio.create_task(self._run(group, work))

    def grant(self, worker: str, grant: SegmentGrant) -> None:
        """Do nothing: modelled groups finish in one grant."""

    def cancel(self, attempts: Sequence[GroupAttempt]) -> None:
        for group, _ in attempts:
            if task := self.playing.pop(group, None):
                task.cancel()

    async def _run(self, group: int, work: Work) -> None:
        version = self.versions[group] = self._served_version()
        seconds, rewards = self._play(work)
        await asyncio.sleep(seconds / 2)
        self._generated(GroupAttempt(group, work.attempt), work.members, 8)
        await asyncio.sleep(seconds / 2)
        self.playing.pop(group, None)
        ended = list(zip(work.episodes, rewards, strict=True))[work.redundancy :]
        summaries = [
            played(episode, reward=reward, policy_version=version, seconds=seconds) for episode, reward in ended
        ]
        ref = None if work.keep_text else REF
        self._collect(group, ref, summaries)


def leased(
    members: Sequence[int] = (0, 1),
    *,
    max_tokens: int,
    sampling: Sampling,
    group: int = 1,
    group_size: int | None = None,
    redundancy: int = 0,
    attempt: int = 0,
    env_seed: int = 7,
    deadline_s: float = 5.0,
    saved: Sequence[PartialRollout] = (),
) -> Work:
    """Return the work of a task without content. It covers the whole group unless `group_size` is given."""
    return Work(
        task=Task(task_id="t", tag="train", index=0),
        group=group,
        attempt=attempt,
        group_size=group_size or len(members),
        redundancy=redundancy,
        members=tuple(members),
        max_tokens=(max_tokens,) * len(members),
        env_seed=env_seed,
        sampling_seed=0,
        deadline_s=deadline_s,
        sampling=sampling,
        saved=tuple(saved),
    )


def played(
    episode: EpisodeId,
    *,
    reward: float,
    policy_version: int = NO_VERSION,
    seconds: float = 0.0,
    response_tokens: int = 8,
    stop_reason: StopReason = "terminated",
    error: str | None = None,
    metrics: dict[str, float] | None = None,
) -> EpisodeSummary:
    """Return the summary of an episode that ended well, or with `error`."""
    return EpisodeSummary(
        episode=episode,
        status="failed" if error else "truncated" if stop_reason == "max_length" else "completed",
        stop_reason=None if error else stop_reason,
        reward=reward,
        num_turns=1,
        prompt_tokens=8,
        response_tokens=response_tokens,
        version_min=policy_version,
        version_max=policy_version,
        seconds=seconds,
        error=error,
        metrics=metrics or {},
    )


class ModelledTrainer(TrainerWithoutCheckpoints):
    """A `Trainer` that takes `seconds_per_group` and records the groups it was given. See `MortalTrainer`."""

    def __init__(self, *, seconds_per_group: float) -> None:
        self._seconds_per_group = seconds_per_group
        self.version = 0
        self.trained: list[int] = []
        self.history: list[tuple[int, tuple[int, ...]]] = []
        """(version being trained, groups) of each call of `accumulate`."""
        self.checkpoints: list[Path] = []
        self.best_steps: list[int | None] = []
        """The step to keep, at each checkpoint."""
        self.save_s = 0.0
        """Seconds of a checkpoint beside training."""
        self.publish_s = 0.0
        """Seconds in which weights are written beside training."""
        self.step_s = 0.0
        """Seconds of an optimizer step."""
        self.stepping = asyncio.Event()
        """Set when a step has begun."""

    async def accumulate(self, groups: Sequence[GroupRef]) -> Mapping[str, float]:
        await asyncio.sleep(self._seconds_per_group * len(groups))
        self.history.append((self.version, tuple(group.group for group in groups)))
        self.trained += [group.group for group in groups]
        return {"tokens": float(len(groups))}

    async def step(self) -> LearnerState:
        self.stepping.set()
        await asyncio.sleep(self.step_s)
        self.version += 1
        return LearnerState(policy_version=self.version, entropy=1.0)

    async def begin_publish(self) -> int:
        return self.version

    async def finish_publish(self, policy_version: int) -> WeightsHandle:
        await asyncio.sleep(self.publish_s)
        return WeightsHandle(policy_version=policy_version, path="none", num_bytes=0, fingerprint="none")

    async def begin_checkpoint(self, directory: Path, state: Mapping[str, Any], *, best: int | None) -> None:
        self._save(directory, best)

    async def finish_checkpoint(self) -> None:
        await asyncio.sleep(self.save_s)

    def _save(self, directory: Path, best: int | None) -> None:
        directory.mkdir(parents=True)
        self.checkpoints.append(directory)
        self.best_steps.append(best)


class MortalTrainer:
    """A `Trainer` that behaves like a separate process: it can be killed and replaced at any moment. It finishes a call
    even if no caller waits for the answer any more. Its checkpoints survive. `holds` stands for the weights: the groups
    of every step, in order. `steps` numbers the same steps, none of them twice."""

    def __init__(self, *, seconds: float, disk: list[SavedState]) -> None:
        self._seconds, self._disk = seconds, disk
        self._numbers = itertools.count()
        self.steps_of: dict[int, list[int]] = {}
        """The steps behind every published version."""
        self._start()

    def _start(self) -> None:
        self._turn, self._died = asyncio.Lock(), asyncio.Event()
        self.begun = False
        self.version = self.step_number = 0
        self.holds: list[list[int]] = []
        self.steps: list[int] = []
        self.accumulated: list[int] = []
        self._learner: LearnerState | None = None
        self._saving: asyncio.Future[None] | None = None
        self._published: dict[int, str] = {}

    def kill(self) -> None:
        """Fail the pending calls. A new trainer without state starts at once."""
        self._died.set()
        self._start()

    async def _answer(self, act: Callable[[], T], *, begun: bool = True) -> T:
        """Run `act` after the delay and return its answer. With `begun`, a trainer that was not initialised fails the
        call."""
        answer = asyncio.ensure_future(self._after_a_while(act, begun=begun))
        answer.add_done_callback(lambda done: done.cancelled() or done.exception())
        return await asyncio.shield(answer)

    async def _after_a_while(self, act: Callable[[], T], *, begun: bool) -> T:
        turn, died = self._turn, self._died
        async with turn:
            try:
                async with asyncio.timeout(self._seconds):
                    await died.wait()
            except TimeoutError:
                if self.begun or not begun:
                    return act()
        raise TrainerLost("killed")

    async def state(self) -> TrainerState:
        return await self._answer(
            lambda: TrainerState(
                begun=self.begun,
                step=self.step_number,
                learner=self._learner,
                trained=self.holds[-1] if self._learner is not None else [],
                accumulated=list(self.accumulated),
            ),
            begun=False,
        )

    async def saved(self, directory: Path) -> SavedStates:
        if self._saving is not None:
            await asyncio.shield(self._saving)
        return await self._answer(lambda: SavedStates(newest=self._disk[-1] if self._disk else None), begun=False)

    async def begin(self, *, policy_version: int, history: VersionHistory) -> Mapping[str, float]:
        def act() -> Mapping[str, float]:
            self.begun, self.version = True, policy_version
            return {}

        return await self._answer(act, begun=False)

    async def restore(self, directory: Path, *, step: int, policy_version: int, history: VersionHistory) -> None:
        def act() -> None:
            self.holds = [list(groups) for groups in self._disk[-1].state["holds"]]
            self.steps = list(self._disk[-1].state["steps"])
            self.begun, self.version, self.step_number = True, policy_version, step

        await self._answer(act, begun=False)

    async def accumulate(self, groups: Sequence[GroupRef]) -> Mapping[str, float]:
        def act() -> Mapping[str, float]:
            self.accumulated += [group.group for group in groups]
            return {"tokens": float(len(groups))}

        return await self._answer(act)

    async def step(self) -> LearnerState:
        def act() -> LearnerState:
            self.holds.append(self.accumulated)
            self.steps.append(next(self._numbers))
            self.accumulated = []
            self.version, self.step_number = self.version + 1, self.step_number + 1
            self._learner = LearnerState(policy_version=self.version, entropy=1.0)
            return self._learner

        return await self._answer(act)

    async def begin_publish(self) -> int:
        def act() -> int:
            self.steps_of[self.version] = list(self.steps)
            self._published[self.version] = repr(self.holds)
            return self.version

        return await self._answer(act)

    async def finish_publish(self, policy_version: int) -> WeightsHandle:
        """Beside other calls."""
        published, died = self._published, self._died
        with suppress(TimeoutError):
            async with asyncio.timeout(self._seconds):
                await died.wait()
        if died.is_set() or policy_version not in published:
            raise TrainerLost("killed")
        fingerprint = published[policy_version]
        return WeightsHandle(policy_version=policy_version, path="none", num_bytes=0, fingerprint=fingerprint)

    async def begin_checkpoint(self, directory: Path, state: Mapping[str, Any], *, best: int | None) -> None:
        def act() -> None:
            held = {**state, "holds": [list(groups) for groups in self.holds], "steps": list(self.steps)}
            point = SavedState(directory=str(directory), step=self.step_number, policy_version=self.version, state=held)
            self._saving = asyncio.ensure_future(self._save(point))

        await self._answer(act)

    async def finish_checkpoint(self) -> None:
        if self._saving is None:
            raise TrainerLost("killed")
        await asyncio.shield(self._saving)

    async def _save(self, point: SavedState) -> None:
        """Save beside other calls. A kill before the end loses the checkpoint."""
        with suppress(TimeoutError):
            async with asyncio.timeout(self._seconds):
                await self._died.wait()
            raise TrainerLost("killed")
        self._disk[:] = [older for older in self._disk if older.step < point.step] + [point]


class ModelledServers:
    """`RolloutServers` that take `seconds` to update their weights."""

    def __init__(self, *, seconds: float = 0.0) -> None:
        self._seconds = seconds
        self.version = NO_VERSION

    async def update_weights(self, handle: WeightsHandle) -> Mapping[WeightsTransport, int]:
        await asyncio.sleep(self._seconds)
        self.version = handle.policy_version
        return {"shared_memory": 1}

    async def release(self) -> None:
        """Do nothing: there is no memory to free."""

    async def resume(self) -> None:
        """Do nothing: there is no memory to take back."""
