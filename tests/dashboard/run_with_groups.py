"""Run directories with groups, as environment workers and the controller would have left them."""

from __future__ import annotations

import functools
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from penstock.config import Column, DumpConfig, TinyModelConfig, load_config
from penstock.config.trajectory_dump import KEPT_TOKENS
from penstock.dashboard.opened_run import OpenedRun, Requests
from penstock.model.chat import ChatTokenizer
from penstock.model.tiny import write_tiny_model
from penstock.ports.group_records import EndedGroup
from penstock.processes.layout import chat_of
from penstock.samples import Segment, Trajectory, Turn, VersionSpan
from penstock.store.dumps.targets import open_target
from penstock.store.dumps.trajectory_rows import RowMaker
from penstock.store.experience_pool import ExperiencePool
from penstock.store.payload_files import PayloadReader, PayloadWriter
from penstock.types import EpisodeId, EpisodeState, Formulation, Task

MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script>\"'&amp;"


@functools.cache
def chat() -> ChatTokenizer:
    """The tiny policy's."""
    with tempfile.TemporaryDirectory() as directory:
        write_tiny_model(Path(directory), TinyModelConfig(), 64)
        return ChatTokenizer.load(Path(directory))


def said(*parts: str, versions: Sequence[int] = (3,)) -> list[Segment]:
    """An answer in segments, each of one version; the last one ends the turn."""
    found = []
    for number, part in enumerate(parts):
        ids = [*chat().encode(part), *([chat().eos_ids[0]] if number == len(parts) - 1 else [])]
        version = versions[min(number, len(versions) - 1)]
        spans = [VersionSpan(version, 0, len(ids))]
        found.append(Segment(token_ids=ids, logprobs=[-0.25] * len(ids), spans=spans, finish_reason="stop"))
    return found


def turn(observation: str, *parts: str, first: bool = False, role: str = "user", **facts: Any) -> Turn:
    versions = facts.pop("versions", (3,))
    messages = [{"role": role, "content": observation}]
    ids = chat().prompt(messages) if first else chat().continuation(messages, ended=True)
    return Turn(observation_ids=ids, segments=said(*parts, versions=versions), **facts)


def two_turns(group: int, reward: float) -> list[Turn]:
    return [
        turn(f"say {group}", "a", "b", first=True, versions=(3, 4), reward=0.5),
        turn("more", "cd" if reward else "xy", versions=(4,)),
    ]


def task(group: int) -> Task:
    return Task(task_id=f"t/{group}", tag="Game", index=group, payload={})


class ShownRun:
    """A run directory, written by a controller and one worker as long as it is open."""

    def __init__(self, run_dir: Path, **settings: Any) -> None:
        self.run_dir = run_dir
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(yaml.safe_dump({"run_id": run_dir.name, "pipeline": "train", **settings}))
        write_tiny_model(run_dir / "model", TinyModelConfig(), 64)
        self._open()

    def _open(self) -> None:
        self.pool = ExperiencePool(self.run_dir / "pool")
        self._writer = PayloadWriter(self.run_dir / "pool", "env-0")

    def __enter__(self) -> ShownRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._writer.close()
        self.pool.close()

    def go_on(self) -> ShownRun:
        """Open it again: LMDB allows a process to open an index once at a time."""
        self._open()
        return self

    def admit(self, *groups: int) -> None:
        self.pool.admit_groups([(group, task(group)) for group in groups])

    def play(
        self,
        group: int,
        rewards: Sequence[float] = (0.0, 1.0),
        *,
        turns: Sequence[Turn] | None = None,
        task_id: str | None = None,
        formulation: Formulation = "branches",
        **facts: Any,
    ) -> None:
        """Admit a group and complete it."""
        of = task(group) if task_id is None else Task(task_id=task_id, tag="Game", index=group, payload={})
        played = [
            Trajectory(
                episode=EpisodeId("Game", group, member, 0),
                task_id=of.task_id,
                turns=list(turns) if turns is not None else two_turns(group, reward),
                reward=reward,
                **{"status": "completed", "stop_reason": "terminated", "env_seed": 2**61 + 1, **facts},
            )
            for member, reward in enumerate(rewards)
        ]
        ref = self._writer.append([sample for each in played for sample in each.formulate(formulation)])
        self.pool.admit_groups([(group, of)])
        self.pool.add_group(group, of, ref, [each.summary() for each in played])

    def end(self, group: int, state: EpisodeState, *, trained_in: int | None = None) -> None:
        self.pool.end_groups([EndedGroup(group=group, counts={state: 2}, trained_in=trained_in)])

    def keep(self, group: int, step: int, *, tokens: bool = True) -> Path:
        """Write the kept sample of a step, as the controller does."""
        config = load_config(self.run_dir / "config.yaml")
        columns = [*DumpConfig().columns, *([Column(name=KEPT_TOKENS, type="json")] if tokens else [])]
        dump = DumpConfig(url=str(self.run_dir / "trajectories"), columns=columns)
        (record,) = self.pool.get_whole_groups([group])
        assert record.ref is not None
        samples = PayloadReader(self.run_dir / "pool").read(record.ref)
        rows = RowMaker(config, chat_of(config, self.run_dir), columns=columns).rows(record, samples, {}, step=step)
        open_target(dump).write(f"step_{step:06d}", rows, again=False)
        return self.run_dir / "trajectories" / f"step_{step:06d}.jsonl"

    def decide(self, decider: str, reason: str, **inputs: Any) -> None:
        line = {"kind": "decision", "decider": decider, "time": time.time(), "reason": reason, **inputs}
        with (self.run_dir / "timeline.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def delete_tokens(self) -> None:
        """Delete the token files, as a checkpoint does that covers all groups."""
        for path in (self.run_dir / "pool").glob("*.seg"):
            path.unlink()

    def shown(self) -> OpenedRun:
        return OpenedRun(self.run_dir, Requests())
