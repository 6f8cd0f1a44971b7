"""One row per trajectory: what the pool knows of it, its words, and what the task and the environment add by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.config import Config
from penstock.config.dump import OTHER_NAMES, OWN_COLUMNS, Column
from penstock.model.chat import ChatTokenizer
from penstock.ports import GroupRecord
from penstock.store.dumps.columns import DumpError, Row, converter
from penstock.store.dumps.transcript import Message, Transcript
from penstock.types import NO_VERSION, EpisodeSummary, Sample


@dataclass(frozen=True, kw_only=True)
class Played:
    """A trajectory of the pool."""

    record: GroupRecord
    summary: EpisodeSummary
    sample: Sample
    payload: Mapping[str, Any]
    """Of the task."""
    run_id: str | None
    mode: str
    step: int | None
    """Optimizer step after which it was written; None where there are none."""
    model: str
    transcript: Transcript

    @property
    def name(self) -> str:
        """Of no other trajectory, in whatever run."""
        return f"{self.run_id}/{self.summary.episode}"

    @cached_property
    def messages(self) -> list[Message]:
        return self.transcript.messages(self.sample)


FACTS: Mapping[str, Callable[[Played], Any]] = {
    "trajectory": lambda it: it.name,
    "task_index": lambda it: it.record.task_index,
    "task_id": lambda it: it.record.task_id,
    "tag": lambda it: it.summary.episode.tag,
    "group": lambda it: it.summary.episode.group,
    "episode": lambda it: it.summary.episode.episode,
    "attempt": lambda it: it.summary.episode.attempt,
    "seed": lambda it: it.summary.env_seed,
    "mode": lambda it: it.mode,
    "step": lambda it: it.step,
    "model": lambda it: it.model,
    "policy_version_min": lambda it: _version(it.summary.version_min),
    "policy_version_max": lambda it: _version(it.summary.version_max),
    "status": lambda it: it.summary.status,
    "stop_reason": lambda it: it.summary.stop_reason,
    "error": lambda it: it.summary.error,
    "reward": lambda it: it.summary.reward,
    "num_turns": lambda it: it.summary.num_turns,
    "prompt_tokens": lambda it: it.summary.prompt_tokens,
    "response_tokens": lambda it: it.summary.response_tokens,
    "seconds": lambda it: it.summary.seconds,
    "messages": lambda it: it.messages,
    "token_ids": lambda it: it.sample.token_ids.tolist(),
    "loss_mask": lambda it: it.sample.loss_mask.tolist(),
    "logprobs": lambda it: it.sample.logprobs.tolist(),
    "versions": lambda it: it.sample.versions.tolist(),
}
"""What every trajectory has; `config.dump.OWN_COLUMNS` are these names, and ROLL's for some of them."""


class RowMaker:
    """Rows of the declared columns, in their order."""

    def __init__(self, config: Config, chat: ChatTokenizer, *, columns: Sequence[Column]) -> None:
        self.columns = columns
        self._run_id, self._mode, self._model = config.run_id, config.pipeline, config.model.path
        self.unfilled = {column.name for column in columns} - OWN_COLUMNS
        """Columns for which neither a task nor an environment has had a value yet."""
        self._transcript = Transcript(chat)
        self._values = [(column.name, converter(column), _value(column.name)) for column in columns]

    def rows(
        self, record: GroupRecord, samples: Sequence[Sample], payload: Mapping[str, Any], *, step: int | None = None
    ) -> list[Row]:
        """Of a group that was played. Raises `DumpError` naming trajectory and column."""
        tokens: dict[int, list[Sample]] = {}
        for sample in samples:
            tokens.setdefault(sample.episode, []).append(sample)
        return [
            self._row(
                Played(
                    record=record,
                    summary=summary,
                    sample=Sample.overlaid(tokens[summary.episode.episode]),
                    payload=payload,
                    run_id=self._run_id,
                    mode=self._mode,
                    step=step,
                    model=self._model,
                    transcript=self._transcript,
                )
            )
            for summary in record.episodes
        ]

    def _row(self, played: Played) -> Row:
        try:
            row = {name: convert(value(played)) for name, convert, value in self._values}
        except DumpError as error:
            raise DumpError(f"trajectory {played.name}: {error}") from None
        if self.unfilled:
            self.unfilled = {name for name in self.unfilled if row[name] is None}
        return row


def _value(name: str) -> Callable[[Played], Any]:
    """Where a column's values come from: the trajectory itself, else the task, else the environment."""
    fact = FACTS.get(OTHER_NAMES.get(name, name))
    return fact or (lambda it: it.payload[name] if name in it.payload else it.summary.info.get(name))


def _version(policy_version: int) -> int | None:
    return None if policy_version == NO_VERSION else policy_version
