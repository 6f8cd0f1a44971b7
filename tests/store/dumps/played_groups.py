"""Groups in a pool, as environment workers and the controller would have left them, and who renders them."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

from penstock.config import Config, TinyModelConfig
from penstock.model.chat import ChatTokenizer
from penstock.model.tiny import write_tiny_model
from penstock.ports.group_records import EndedGroup, GroupRecord
from penstock.samples import Segment, Trajectory, Turn, VersionSpan
from penstock.store.experience_pool import ExperiencePool
from penstock.store.payload_files import PayloadWriter
from penstock.types import EpisodeId, EpisodeState, Formulation, GroupAttempt, Task


@functools.cache
def chat() -> ChatTokenizer:
    """The tiny policy's."""
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(Path(directory), TinyModelConfig(), 64)
        return ChatTokenizer.load(Path(directory))


def config(pipeline: str = "rollout", *, run_id: str = "mine", **dump: Any) -> Config:
    return Config.model_validate({"pipeline": pipeline, "run_id": run_id, "dump": dump})


def task(group: int) -> Task:
    return Task(task_id=f"t/{group}", tag="train", index=group, payload={"question": f"q{group}", "level": group})


def trajectory(group: int, member: int, *, attempt: int = 0, **facts: Any) -> Trajectory:
    """Two turns: `say`, `ab`; `more`, `cd`."""
    words = chat()
    first = words.prompt([{"role": "user", "content": f"say {group}"}])
    later = words.continuation([{"role": "user", "content": "more"}], ended=True)
    return Trajectory(
        episode=EpisodeId("train", group, member, attempt),
        task_id=task(group).task_id,
        **{
            "turns": [turn(first, said("ab"), version=3), turn(later, said("cd"), version=4)],
            "reward": float(member),
            "status": "completed",
            "stop_reason": "terminated",
            "env_seed": 7,
            **facts,
        },
    )


def said(text: str) -> list[int]:
    """Its tokens, and the one that ends a turn."""
    return [*chat().encode(text), chat().eos_ids[0]]


def turn(observation_ids: list[int], token_ids: list[int], *, version: int = 0) -> Turn:
    segment = Segment(
        token_ids=token_ids,
        logprobs=[-0.5] * len(token_ids),
        spans=[VersionSpan(version, 0, len(token_ids))],
        finish_reason="stop",
    )
    return Turn(observation_ids=observation_ids, segments=[segment])


class Played:
    """A pool and the one worker that fills it, as long as it is open."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pool = ExperiencePool(directory)
        self._writer = PayloadWriter(directory, "env-0")

    def __enter__(self) -> Played:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()
        self.pool.close()

    def play(
        self,
        group: int,
        *,
        size: int = 2,
        state: EpisodeState = EpisodeState.COLLECTED,
        formulation: Formulation = "trajectory",
        **facts: Any,
    ) -> tuple[GroupAttempt, EpisodeState, int]:
        """Admit it, play it, end it; returns what a dump hears of it."""
        played = [trajectory(group, member, **facts) for member in range(size)]
        ref = self._writer.append([sample for each in played for sample in each.formulate(formulation)])
        self.pool.admit_groups([(group, task(group))])
        self.pool.add_group(group, task(group), ref, [each.summary() for each in played])
        self.pool.end_groups([EndedGroup(group=group, counts={state: size})])
        return GroupAttempt(group, played[0].episode.attempt), state, size


def payload(record: GroupRecord) -> dict[str, Any]:
    return task(record.group).payload
