"""What was played and what became of it: `ports.Pool` of a simulated run, and the counts behind its report."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple, Protocol

from penstock.ports import EndedGroup, GroupRecord, Shard
from penstock.simulator.engine import Request
from penstock.types import NO_VERSION, EpisodeState, EpisodeSummary, GroupRef, PayloadRef, Task

REF = PayloadRef(file="simulated", offset=0, length=0, crc32=0)
"""Of every group: there are no tokens to point to."""

Piece = tuple[Request, int]
"""A generate call of an episode: the request, and which of its sequences."""


class Pieces(Protocol):
    """Of each member of a group."""

    def __getitem__(self, member: int, /) -> Sequence[Piece]: ...


class OneRequest:
    """`Pieces` of a group that was answered at once."""

    __slots__ = ("_request",)

    def __init__(self, request: Request) -> None:
        self._request = request

    def __getitem__(self, member: int) -> Sequence[Piece]:
        return ((self._request, member),)


class Held(NamedTuple):
    """What is needed of a played group until it is trained or dropped; read off while its summaries are at hand."""

    lengths: array[int]
    """Response tokens of each member."""
    oldest: Sequence[int]
    """Policy version of each member's oldest token."""
    prompt_tokens: int
    """Of all members."""
    pieces: Pieces


class Cost(NamedTuple):
    """What a group costs the learner."""

    tokens: int
    """Prompt and response, of all members."""
    response_tokens: int
    """Of the members that are trained."""
    masked_tokens: int
    """Response tokens too old to train."""


class Experience:
    """The groups in play at the learner's side. `add` finds the pieces that the workers left under `pieces`."""

    def __init__(self, *, max_staleness: int) -> None:
        self._max_staleness = max_staleness
        self._held: dict[int, Held] = {}
        self.pieces: dict[int, Pieces] = {}
        self.played_lengths, self.trained_lengths = array("l"), array("l")
        self.staleness: Counter[int] = Counter()
        """Episodes trained, by (version being trained - version of the oldest of their tokens that is trained)."""
        self.tokens: Counter[str] = Counter()
        """Response tokens by what became of them: trained, masked, or the final state of their group."""
        self.num_samples = self.num_groups = self.num_filtered = 0
        self.played_s = 0.0
        """Sum over all episodes of the time they took."""

    def admit(self, groups: Sequence[tuple[int, Task]]) -> None:
        """What is not played yet is nothing to this side."""

    def add(self, group: int, task: Task, ref: PayloadRef, episodes: Sequence[EpisodeSummary]) -> None:
        lengths = array("l", [episode.response_tokens for episode in episodes])
        oldest = [episode.version_min for episode in episodes]
        prompt_tokens = sum([episode.prompt_tokens for episode in episodes])
        self._held[group] = Held(lengths, oldest, prompt_tokens, self.pieces.pop(group))
        self.played_lengths.extend(lengths)
        self.played_s += sum([episode.seconds for episode in episodes])
        self.num_groups += 1

    def end(self, groups: Sequence[EndedGroup]) -> None:
        for each in groups:
            held = self._held.pop(each.group, None)
            if held is None or each.trained_in is not None:
                continue
            self.num_filtered += each.state is EpisodeState.FILTERED
            self.tokens[each.state] += sum(held.lengths)

    def train(self, ref: GroupRef, version: int) -> Cost:
        """The learner at `version` takes the members of `ref`; it reads the whole group."""
        held = self._held[ref.group]
        lengths, oldest = held.lengths, held.oldest
        whole = response = sum(lengths)
        if len(ref.episodes) < len(lengths):
            lengths = array("l", [lengths[member] for member in ref.episodes])
            oldest = [oldest[member] for member in ref.episodes]
            response = sum(lengths)
        self.trained_lengths.extend(lengths)
        for made in set(oldest) - {NO_VERSION}:
            self.staleness[min(version - made, self._max_staleness)] += oldest.count(made)
        oldest_allowed, masked = version - self._max_staleness, 0
        if min(oldest, default=version) < oldest_allowed:
            for member, made in zip(ref.episodes, oldest, strict=True):
                if NO_VERSION != made < oldest_allowed:
                    masked += sum(request.num_older(s, oldest_allowed) for request, s in held.pieces[member])
        self.num_samples += len(ref.episodes)
        self.tokens["trained"] += response - masked
        self.tokens["masked"] += masked
        self.tokens[EpisodeState.DISCARDED_STALE] += whole - response
        return Cost(whole + held.prompt_tokens, response, masked)

    def revive(self, groups: Sequence[int]) -> None:
        """Nobody dies here."""

    def covered(self, policy_version: int, *, keep: Collection[int] = ()) -> None:
        """There is no disk to free."""

    def records(self) -> Iterator[GroupRecord]:
        return iter(())

    def get(self, groups: Sequence[int]) -> list[GroupRecord]:
        return []

    def shards(self) -> list[Shard]:
        return []

    def is_whole(self, ref: PayloadRef) -> bool:
        return True

    @property
    def highest_version(self) -> int:
        return NO_VERSION

    def raise_version(self, policy_version: int) -> None:
        """The learner counts."""

    def sync(self) -> None:
        """Nothing is durable here."""

    def close(self) -> None:
        """Nothing to close."""
