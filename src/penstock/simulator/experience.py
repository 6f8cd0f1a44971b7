"""Finished groups and their fate: `ports.Pool` of a simulated run, and the counts behind its report."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from typing import NamedTuple

from penstock.ports.group_records import EndedGroup, GroupRecord, Shard
from penstock.simulator.server_model import Request
from penstock.types import NO_VERSION, EpisodeState, GroupRef, PayloadRef, Summaries, Task
from penstock.version_history import VersionHistory

REF = PayloadRef(file="simulated", offset=0, length=0, checksum=0)
"""Payload reference of every group; a simulation has no tokens to point to."""

Piece = tuple[Request, int]
"""A generate call of an episode: the request, and the index of the episode's sequence in it."""


Pieces = Request | Sequence[Sequence[Piece]]
"""The generate calls of a group: of each member, or one request that answered all members."""


class Held(NamedTuple):
    """Data of a finished group that is needed until the group is trained or dropped; copied while its summaries are
    available."""

    lengths: array[int]
    """Response tokens of each member."""
    oldest: Sequence[int]
    """Policy version of each member's oldest token."""
    prompt_tokens: int
    """Prompt tokens of all members."""
    pieces: Pieces


class Cost(NamedTuple):
    """Token counts that give a group's training cost."""

    tokens: int
    """Prompt and response tokens of all members."""
    response_tokens: int
    """Response tokens of the trained members."""
    masked_tokens: int
    """Response tokens too old to train."""


class Experience:
    """Finished groups until they are trained or dropped. `add_group` takes the generate calls that the workers left
    under `pieces`."""

    def __init__(self, *, max_staleness: int, counts_lags: bool = False) -> None:
        """`counts_lags`: whether trained tokens are counted by their staleness, which takes some time."""
        self._max_staleness, self._counts_lags = max_staleness, counts_lags
        self._held: dict[int, Held] = {}
        self.pieces: dict[int, Pieces] = {}
        self.played_lengths, self.trained_lengths = array("l"), array("l")
        self.staleness: Counter[int] = Counter()
        """Number of trained episodes, by staleness: the version being trained - the version of the oldest token that is
        trained."""
        self.lags: Counter[int] = Counter()
        """Number of trained tokens by staleness, if they are counted."""
        self._lags_before: Counter[int] = Counter()
        self.tokens: Counter[str] = Counter()
        """Response tokens by their fate: trained, masked, or the final state of their group."""
        self.num_samples = self.num_groups = self.num_filtered = 0
        self.played_s = 0.0
        """Total duration of all episodes, in seconds."""

    def admit_groups(self, groups: Sequence[tuple[int, Task]]) -> None:
        """Do nothing: the simulation counts only finished groups."""

    def add_group(self, group: int, task: Task, ref: PayloadRef, episodes: Summaries) -> None:
        lengths = array("l", [episode.response_tokens for episode in episodes])
        oldest = [episode.version_min for episode in episodes]
        prompt_tokens = sum([episode.prompt_tokens for episode in episodes])
        self._held[group] = Held(lengths, oldest, prompt_tokens, self.pieces.pop(group))
        self.played_lengths.extend(lengths)
        self.played_s += sum([episode.seconds for episode in episodes])
        self.num_groups += 1

    def end_groups(self, groups: Sequence[EndedGroup]) -> None:
        for each in groups:
            held = self._held.pop(each.group, None)
            if held is None or each.trained_in is not None:
                continue
            self.num_filtered += each.state is EpisodeState.FILTERED
            self.tokens[each.state] += sum(held.lengths)

    def train(self, ref: GroupRef, version: int) -> Cost:
        """Count the members of `ref` as trained at `version`, and return the cost. The learner reads the whole group,
        even if it trains only some members."""
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
        if self._counts_lags:
            self._count_lags(ref.episodes, held, oldest, lengths, version)
        oldest_allowed, masked = version - self._max_staleness, 0
        if min(oldest, default=version) < oldest_allowed:
            for member, made in zip(ref.episodes, oldest, strict=True):
                if NO_VERSION != made < oldest_allowed:
                    masked += _num_older(held.pieces, member, oldest_allowed)
        self.num_samples += len(ref.episodes)
        self.tokens["trained"] += response - masked
        self.tokens["masked"] += masked
        self.tokens[EpisodeState.DISCARDED_STALE] += whole - response
        return Cost(whole + held.prompt_tokens, response, masked)

    def _count_lags(
        self, members: Sequence[int], held: Held, oldest: Sequence[int], lengths: Sequence[int], version: int
    ) -> None:
        """Count the trained tokens of `members` by staleness."""
        for member, made, length in zip(members, oldest, lengths, strict=True):
            newer = length
            for lag in range(min(version - made, self._max_staleness) + 1 if made != NO_VERSION else 0):
                older = _num_older(held.pieces, member, version - lag) if version - lag > made else 0
                self.lags[lag] += newer - older
                newer = older

    def take_lags(self) -> Counter[int]:
        """Return the number of tokens by staleness that were trained since the last call."""
        found = self.lags - self._lags_before
        self._lags_before = self.lags.copy()
        return found

    def revive_groups(self, groups: Sequence[int]) -> None:
        """Do nothing. Never called, because a simulation loses no data."""

    def free_covered(self, policy_version: int, *, keep: Collection[int] = ()) -> None:
        """Do nothing: there is no disk to free."""

    async def each_record(self) -> AsyncIterator[GroupRecord]:
        return
        yield  # makes it a generator

    def get_groups(self, groups: Sequence[int]) -> list[GroupRecord]:
        return []

    def shards(self) -> list[Shard]:
        return []

    def is_whole(self, ref: PayloadRef) -> bool:
        return True

    @property
    def highest_version(self) -> int:
        return NO_VERSION

    @property
    def history(self) -> VersionHistory:
        return VersionHistory()

    def raise_version(self, policy_version: int, *, weights_of: int) -> None:
        """Do nothing: the learner counts the versions."""

    def sync(self) -> None:
        """Do nothing: no data is stored."""

    def close(self) -> None:
        """Do nothing: no file is open."""


def _num_older(pieces: Pieces, member: int, version: int) -> int:
    """Return how many tokens of a member come from versions before `version`."""
    own = [(pieces, member)] if isinstance(pieces, Request) else pieces[member]
    return sum(request.num_older(sequence, version) for request, sequence in own)
