"""One trajectory of a run: its messages as a tree of turns, its tokens, and the facts that the run recorded about it.

Tokens come from the pool, or from the kept samples once a checkpoint covers the group. Both are read the same way. A
sample of an older run has only its messages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from penstock.config import Config, ConfigError, load_config
from penstock.config.trajectory_dump import KEPT_TOKENS
from penstock.dashboard.groups import Groups, step_of, version_or_none
from penstock.dashboard.heard import Message, messages_in
from penstock.dashboard.kept_samples import KeptSamples, Row
from penstock.dashboard.timeline_index import TimelineIndex
from penstock.dashboard.token_texts import token_texts
from penstock.model.chat import ChatTokenizer
from penstock.model.files import ModelError
from penstock.model.message_tokens import MessageTokenizer
from penstock.ports.group_records import GroupRecord
from penstock.processes.layout import chat_of
from penstock.samples import ROOT, Sample, TrainedTurn, Trajectory, Turn, parent_of, path_to
from penstock.store.dumps.kept_tokens import samples_of
from penstock.store.payload_files import PayloadError, PayloadReader
from penstock.trainer.advantages import advantages
from penstock.types import NO_VERSION, EpisodeSummary

MAX_TOKENS = 200_000
"""Most tokens of a trajectory that a strip shows. Later turns have only their messages."""
ANY_TOOL = [{"type": "function", "function": {"name": "", "parameters": {}}}]
"""Calls are shown whatever tools were offered."""

MAX_SAFE = 2**53 - 1
"""The largest whole number from which on JavaScript leaves some out."""
DAMAGE = (PayloadError, ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError)
"""What reading damaged tokens raises."""


class UnknownEpisode(LookupError):
    """The group has no such episode, or it has not ended."""


class Trajectories:
    """The trajectories of one run. Its methods may be called from any thread."""

    def __init__(self, run_dir: Path, timeline: TimelineIndex) -> None:
        self._run_dir = run_dir
        self.samples = KeptSamples(run_dir)
        self.groups = Groups(run_dir, self.samples, timeline)

    @cached_property
    def config(self) -> Config:
        """Return the configuration of the run. Raises `ConfigError`."""
        return load_config(self._run_dir / "config.yaml")

    @cached_property
    def _chat(self) -> ChatTokenizer:
        """Return the tokenizer of the run. Raises `ConfigError` or `ModelError`."""
        return chat_of(self.config, self._run_dir)

    def episode(self, group: int, episode: int) -> dict[str, Any]:
        """Return a trajectory. Raises `UnknownGroup` or `UnknownEpisode`."""
        record = self.groups.record(group)
        summary = next((each for each in record.episodes if each.episode.episode == episode), None)
        if summary is None:
            raise UnknownEpisode(f"group {group} has no episode {episode} that has ended")
        warnings: list[str] = []
        rows = self.samples.rows(group)
        kept = next((row for row in rows if row["episode"] == episode), None)
        samples = self._samples(record, rows, warnings)
        document: dict[str, Any] = {
            "row": _exact(self._row(record, summary, kept)),
            "messages": [],
            "branches": [],
            "turns": [],
            "tokens": None,
        }
        own = [sample for sample in samples if sample.episode == episode]
        if own:
            try:
                config = self.config
                document |= _Reading(
                    chat=self._chat,
                    record=record,
                    summary=summary,
                    samples=own,
                    advantages=self._advantages(samples),
                    groups=self.groups,
                    max_staleness=config.scheduler.max_staleness if config.has_trainer else None,
                ).document()
            except (ConfigError, ModelError) as error:
                warnings.append(f"the tokens cannot be shown as text: {error}")
            except DAMAGE as error:
                warnings.append(f"the tokens are damaged: {error}")
        if not document["turns"] and kept is not None:
            try:
                document |= _of_row(kept)
            except DAMAGE as error:
                warnings.append(f"the messages of the kept sample are damaged: {error!r}")
        if not document["turns"] and not warnings:
            warnings.append("the text is gone: a checkpoint covers the group, and it is not among the kept samples")
        return {**document, "raw": _raw(record, summary, kept), "warnings": warnings}

    def _samples(self, record: GroupRecord, rows: Sequence[Row], warnings: list[str]) -> list[Sample]:
        """Return the samples of a group: those of the pool, else those that were kept; none without any tokens."""
        if record.ref is not None and (self._run_dir / "pool" / record.ref.file).is_file():
            try:
                return PayloadReader(self._run_dir / "pool").read(record.ref)
            except PayloadError as error:
                warnings.append(str(error))
        try:
            return [sample for row in rows for sample in samples_of(row)]
        except DAMAGE as error:
            warnings.append(f"the tokens of the kept sample are damaged: {error}")
            return []

    def _advantages(self, samples: Sequence[Sample]) -> Callable[[Sample], Any] | None:
        """Return the function that gives the advantage of a sample: one number, or one for each of its tokens. None if
        it does not follow from the rewards of the group."""
        try:
            config = self.config
            if not config.has_trainer or config.trainer.critic is not None:
                return None
            values = advantages(samples, config.trainer.advantages)
        except (ConfigError, *DAMAGE):
            return None
        by_sample = {id(sample): value for sample, value in zip(samples, values, strict=True)}
        return lambda sample: by_sample[id(sample)]

    def _row(self, record: GroupRecord, summary: EpisodeSummary, kept: Row | None) -> dict[str, Any]:
        names = (
            "status",
            "stop_reason",
            "num_turns",
            "prompt_tokens",
            "response_tokens",
            "seconds",
            "env_s",
            "reward_s",
        )
        more = ("error", "metrics", "info")
        return {
            "group": record.group,
            "episode": summary.episode.episode,
            "attempt": summary.episode.attempt,
            "tag": summary.episode.tag,
            "task_id": record.task_id,
            "state": record.state,
            "reward": summary.reward if math.isfinite(summary.reward) else None,
            **{name: getattr(summary, name) for name in (*names, *more)},
            "policy_version_min": version_or_none(summary.version_min),
            "policy_version_max": version_or_none(summary.version_max),
            "seed": summary.env_seed if kept is None else kept.get("seed"),
            "step": step_of(record, self.groups.history),
            "trained_in": record.trained_in,
            "members": sorted(each.episode.episode for each in record.episodes),
        }


@dataclass(slots=True, kw_only=True)
class _Reading:
    """Reads the tokens of one trajectory."""

    chat: ChatTokenizer
    record: GroupRecord
    summary: EpisodeSummary
    samples: Sequence[Sample]
    advantages: Callable[[Sample], Any] | None
    groups: Groups
    max_staleness: int | None

    def document(self) -> dict[str, Any]:
        played = Trajectory.unflatten(
            self.samples, episode=self.summary.episode, task_id=self.record.task_id, ended=True
        )
        turns = played.turns
        has_tokens = not isinstance(self.chat, MessageTokenizer)
        messages = self._of_tokens(turns) if has_tokens else self._of_messages(turns)
        shown = [
            {
                "turn": index,
                "parent": parent_of(turns, index),
                "reward": turn.reward,
                "messages": said,
                "num_observed": len(turn.observation_ids) if has_tokens else None,
                "num_sampled": len(turn.token_ids) if has_tokens else None,
                "policy_versions": _versions(turn),
            }
            for index, (turn, said) in enumerate(zip(turns, messages, strict=True))
        ]
        last = path_to(turns, len(turns) - 1) if turns else []
        return {
            "turns": shown,
            "branches": played.branches(),
            "messages": [{**each, "turn": index} for index in last for each in messages[index]],
            "tokens": self._strips(turns) if has_tokens else None,
        }

    def _of_tokens(self, turns: Sequence[Turn]) -> list[list[Message]]:
        found = []
        for turn in turns:
            heard, action = messages_in(self.chat, turn.observation_ids), turn.token_ids
            is_thinking = self.chat.answers.is_thinking(turn.observation_ids, self.chat.decode)
            if action:
                said = _said(self.chat, self.chat.decode(action), is_thinking=is_thinking)
                heard = [*heard, {**said, "reward": turn.reward}]
            found.append(heard)
        return found

    def _of_messages(self, turns: Sequence[Turn]) -> list[list[Message]]:
        """Return the messages of a policy without tokens: what each turn adds to its context."""
        chat, found = self.chat, list[list[Message]]()
        assert isinstance(chat, MessageTokenizer)
        for index, turn in enumerate(turns):
            before = [token for each in path_to(turns, parent_of(turns, index)) for token in _whole(turns[each])]
            known = len(chat.transcript(before)) if before else 0
            messages = [_shown(each) for each in chat.transcript([*before, *_whole(turn)])[known:]]
            if messages and messages[-1]["role"] == "assistant":
                messages[-1]["reward"] = turn.reward
            found.append(messages)
        return found

    def _strips(self, turns: Sequence[Turn]) -> list[dict[str, Any]]:
        """Return the tokens of each turn: first the observation, then the action."""
        strips: list[dict[str, Any]] = []
        num_tokens = 0
        places = _places(self.samples)
        for index, turn in enumerate(turns):
            action = turn.token_ids
            num_tokens += len(turn.observation_ids) + len(action)
            if num_tokens > MAX_TOKENS:
                break
            spans, start = [], 0
            for segment in turn.segments:
                spans += [[version, start + a, start + b] for version, a, b in segment.spans]
                start += len(segment.token_ids)
            sampled = turn.trained or [True] * len(action)
            stale = [False] * len(action)
            for version, a, b in spans:
                stale[a:b] = [self._is_stale(version)] * (b - a)
            strips.append(
                {
                    "turn": index,
                    "observed": token_texts(self._decode, turn.observation_ids),
                    "texts": token_texts(self._decode, action),
                    "ids": action,
                    "logprobs": [_short(value) for segment in turn.segments for value in segment.logprobs],
                    "policy_versions": [[version_or_none(v), a, b] for v, a, b in spans],
                    "trained": _runs([each and not old for each, old in zip(sampled, stale, strict=True)]),
                    "stale": _runs([each and old for each, old in zip(sampled, stale, strict=True)]),
                    "segments": list(accumulate(len(segment.token_ids) for segment in turn.segments)),
                    "advantage": self._advantage(*places[index]) if index in places else None,
                }
            )
        return strips

    def _is_stale(self, version: int) -> bool:
        """Return whether the learner masked a token of this version out, because it was too old. `trained_in` is the
        version that followed the one being trained."""
        if self.record.trained_in is None or self.max_staleness is None or version == NO_VERSION:
            return False
        return self.groups.history.steps_between(version, self.record.trained_in - 1) > self.max_staleness

    def _advantage(self, sample: Sample, turn: TrainedTurn) -> float | None:
        """Return the advantage of a turn. All its tokens have the same."""
        if self.advantages is None or turn.end <= turn.start:
            return None
        value = self.advantages(sample)
        return _short(value if np.ndim(value) == 0 else value[turn.start])

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self.chat.decode(token_ids, skip_special=False)


def _places(samples: Sequence[Sample]) -> dict[int, tuple[Sample, TrainedTurn]]:
    """Return where each turn is trained. Turns have the numbers that `Trajectory.unflatten` gives them."""
    numbers = sorted(each.turn for sample in samples for each in sample.turns)
    renumbered = {turn: number for number, turn in enumerate(numbers)}
    return {renumbered[each.turn]: (sample, each) for sample in samples for each in sample.turns}


def _versions(turn: Turn) -> list[int]:
    """Return the versions that sampled an action, in order."""
    versions = [span.policy_version for segment in turn.segments for span in segment.spans]
    return [version for version, _ in groupby(versions) if version != NO_VERSION]


def _whole(turn: Turn) -> list[int]:
    return [*turn.observation_ids, *turn.token_ids]


def _said(chat: ChatTokenizer, text: str, *, is_thinking: bool) -> Message:
    """Return an answer as a message."""
    answer = chat.answers.read(text, ANY_TOOL, is_thinking=is_thinking)
    calls = [{"name": call.name, "arguments": call.arguments} for call in answer.calls]
    return {
        "role": "assistant",
        "content": answer.content,
        "thinking": answer.reasoning or None,
        "tool_calls": calls,
        "fault": answer.fault,
    }


def _shown(message: Mapping[str, Any]) -> Message:
    """Return a message of the OpenAI API as the dashboard shows it."""
    content = message.get("content") or ""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return {
        "role": str(message.get("role", "")),
        "content": content if isinstance(content, str) else msgspec.json.encode(content).decode(),
        "thinking": message.get("reasoning_content") or None,
        "tool_calls": [{"name": str(call["name"]), "arguments": str(call["arguments"])} for call in calls],
    }


def _of_row(row: Row) -> dict[str, Any]:
    """Return the messages of a kept sample without tokens, as turns of its branches."""
    messages, branches = _decoded(row.get("messages")), _decoded(row.get("branches"))
    paths = branches or ([messages] if messages else [])
    turns: list[dict[str, Any]] = []
    children: dict[tuple[int, str], int] = {}
    ends: list[list[int]] = []
    for path in paths:
        parent, pending, indexes = ROOT, list[Message](), list[int]()
        for place, message in enumerate(path):
            pending.append(_shown(message))
            if message.get("role") != "assistant" and place < len(path) - 1:
                continue
            key = parent, msgspec.json.encode(pending).decode()
            if key not in children:
                children[key] = len(turns)
                facts: dict[str, Any] = {
                    "reward": None,
                    "num_observed": None,
                    "num_sampled": None,
                    "policy_versions": [],
                }
                turns.append({"turn": len(turns), "parent": parent, "messages": pending, **facts})
            parent, pending = children[key], []
            indexes.append(parent)
        ends.append(indexes)
    last = [{**message, "turn": index} for index in (ends[-1] if ends else []) for message in turns[index]["messages"]]
    return {"turns": turns, "branches": ends, "messages": last, "tokens": None}


def _decoded(column: object) -> list[Any]:
    """Return a column with messages, which are JSON in a text or as they are; empty if it holds none."""
    try:
        found = msgspec.json.decode(column) if isinstance(column, str) else column
    except msgspec.MsgspecError:
        return []
    return found if isinstance(found, list) else []


def _raw(record: GroupRecord, summary: EpisodeSummary, kept: Row | None) -> dict[str, Any]:
    group = msgspec.to_builtins(msgspec.structs.replace(record, episodes=[]))
    raw: dict[str, Any] = {"group": group, "episode": msgspec.to_builtins(summary)}
    if kept is not None:
        raw["sample"] = {name: value for name, value in kept.items() if name != KEPT_TOKENS}
    exact: dict[str, Any] = _exact(raw)
    return exact


def _exact(value: Any) -> Any:
    """Return a JSON value in which whole numbers that JavaScript cannot hold exactly are texts."""
    if isinstance(value, dict):
        return {key: _exact(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_exact(each) for each in value]
    return str(value) if isinstance(value, int) and abs(value) > MAX_SAFE else value


def _runs(flags: Sequence[bool]) -> list[list[int]]:
    """Return [start, end) of each run of true values."""
    edges = np.flatnonzero(np.diff(np.asarray([False, *flags, False], dtype=np.int8)))
    return edges.reshape(-1, 2).tolist()


def _short(value: float) -> float | None:
    return round(float(value), 4) if math.isfinite(value) else None
