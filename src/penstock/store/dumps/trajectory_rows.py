"""One row for each trajectory: its record in the pool, its text, and named values of the task and the environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import attrgetter
from typing import Any

from penstock.config import Config
from penstock.config.trajectory_dump import KEPT_TOKENS, OTHER_NAMES, OWN_COLUMNS, Column
from penstock.model.chat import ChatTokenizer
from penstock.ports.group_records import GroupRecord
from penstock.samples import Sample
from penstock.store.dumps.columns import DumpError, Row, converter
from penstock.store.dumps.kept_tokens import MAX_GROUP_TOKENS, KeptTokens, kept
from penstock.store.dumps.transcript import Message, Transcript
from penstock.types import NO_VERSION, EpisodeSummary


@dataclass(frozen=True, kw_only=True)
class Played:
    """A trajectory in the pool."""

    record: GroupRecord
    summary: EpisodeSummary
    samples: Sequence[Sample]
    payload: Mapping[str, Any]
    """Payload of the task."""
    config: Config
    model: str
    step: int | None
    """Optimizer step after which the trajectory was written; None if the run has no steps."""
    transcript: Transcript
    keeps_tokens: bool
    """Whether the group has room for these tokens in `training_samples`."""

    @property
    def name(self) -> str:
        """Return a name that no other trajectory of any run has."""
        return f"{self.config.run_id}/{self.summary.episode}"

    @cached_property
    def sample(self) -> Sample:
        """Return the branch with the last answer, with all its actions."""
        return Sample.overlaid(self.samples)

    @cached_property
    def messages(self) -> list[Message]:
        return self.transcript.messages(self.sample)

    @property
    def training_samples(self) -> list[KeptTokens] | None:
        return [kept(sample) for sample in self.samples] if self.keeps_tokens else None

    @property
    def branches(self) -> list[list[Message]] | None:
        """Return the messages of every branch, in the order of their last answers. None if there is one branch."""
        samples = self.samples
        ends = [end for end, each in enumerate(samples) if not any(map(each.is_continued_by, samples[end + 1 :]))]
        whole = [Sample.overlaid(samples[: end + 1]) for end in ends]
        return [self.transcript.messages(each) for each in whole] if len(whole) > 1 else None


def _num_tokens(name: str, played: Played) -> int | None:
    """Return a count of tokens. None for a policy without tokens."""
    return getattr(played.summary, name) if played.config.policy.has_tokens else None


OF_EPISODE = ("tag", "group", "episode", "attempt")
OF_SUMMARY = ("status", "stop_reason", "error", "reward", "num_turns", "seconds")
COUNTS = ("prompt_tokens", "response_tokens")
FACTS: Mapping[str, Callable[[Played], Any]] = {
    **{name: attrgetter(name) for name in ("step", "messages", "branches", KEPT_TOKENS)},
    **{name: attrgetter(f"record.{name}") for name in ("task_index", "task_id")},
    **{name: attrgetter(f"summary.episode.{name}") for name in OF_EPISODE},
    **{name: attrgetter(f"summary.{name}") for name in OF_SUMMARY},
    **{name: partial(_num_tokens, name) for name in COUNTS},
    "token_ids": lambda it: it.sample.token_ids.tolist(),
    "loss_mask": lambda it: it.sample.loss_mask.tolist(),
    "logprobs": lambda it: it.sample.logprobs.tolist(),
    "versions": lambda it: it.sample.versions.tolist(),
    "trajectory": attrgetter("name"),
    "mode": attrgetter("config.pipeline"),
    "model": attrgetter("model"),
    "seed": attrgetter("summary.env_seed"),
    "policy_version_min": lambda it: _version(it.summary.version_min),
    "policy_version_max": lambda it: _version(it.summary.version_max),
}
"""Values that every trajectory has, by column name. `OWN_COLUMNS` has the same names, and ROLL's names for some of
them."""


class RowMaker:
    """Makes rows of the declared columns, in their order."""

    def __init__(
        self, config: Config, chat: ChatTokenizer, *, columns: Sequence[Column], model_name: str | None = None
    ) -> None:
        """`model_name`: the model that plays; by default the one that the configuration names."""
        self._model = model_name or config.model_name
        self.columns = columns
        self._config = config
        self.unfilled = {column.name for column in columns} - OWN_COLUMNS
        """Columns that neither the task nor the environment has filled so far."""
        self.num_misfits = 0
        """Values of environments that do not fit their columns, and became null."""
        self.misfit = ""
        """The first of them, for messages."""
        self._transcript = Transcript(chat)
        self._values = [(column.name, self._value(column)) for column in columns]

    def rows(
        self, record: GroupRecord, samples: Sequence[Sample], payload: Mapping[str, Any], *, step: int | None = None
    ) -> list[Row]:
        """Return the rows of a completed group. Raises `DumpError` that names the trajectory and the column."""
        tokens: dict[int, list[Sample]] = {}
        for sample in samples:
            tokens.setdefault(sample.episode, []).append(sample)
        played = partial(
            Played,
            record=record,
            payload=payload,
            config=self._config,
            model=self._model,
            step=step,
            transcript=self._transcript,
        )
        rows, room = list[Row](), MAX_GROUP_TOKENS
        for summary in record.episodes:
            own = tokens[summary.episode.episode]
            num_tokens = sum(len(sample.token_ids) for sample in own)
            rows.append(self._row(played(summary=summary, samples=own, keeps_tokens=num_tokens <= room)))
            room -= num_tokens if num_tokens <= room else 0
        return rows

    def _row(self, played: Played) -> Row:
        try:
            row = {name: value(played) for name, value in self._values}
        except DumpError as error:
            raise DumpError(f"trajectory {played.name}: {error}") from None
        if self.unfilled:
            self.unfilled = {name for name in self.unfilled if row[name] is None}
        return row

    def _value(self, column: Column) -> Callable[[Played], Any]:
        """Return the source of a column's values: the trajectory itself, else the task, else the environment."""
        name, convert = column.name, converter(column)
        if fact := FACTS.get(OTHER_NAMES.get(name, name)):
            return lambda it: convert(fact(it))
        return lambda it: convert(it.payload[name]) if name in it.payload else self._of_environment(it, name, convert)

    def _of_environment(self, played: Played, name: str, convert: Callable[[object], Any]) -> Any:
        """Return a value of the environment's info. The policy may choose such a value, so a misfit becomes null."""
        try:
            return convert(played.summary.info.get(name))
        except DumpError as error:
            self.num_misfits += 1
            self.unfilled.discard(name)
            self.misfit = self.misfit or f"trajectory {played.name}: {error}"
            return None


def _version(policy_version: int) -> int | None:
    return None if policy_version == NO_VERSION else policy_version
