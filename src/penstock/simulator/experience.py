"""What was played and what became of it: `ports.Pool` of a simulated run, and the counts behind its report."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from penstock.simulator.engine import Request
from penstock.types import NO_VERSION, EpisodeState, EpisodeSummary, GroupRef, PayloadRef, Task

REF = PayloadRef(file="simulated", offset=0, length=0, crc32=0)
"""Of every group: there are no tokens to point to."""

Piece = tuple[Request, int]
"""A generate call of an episode: the request, and which of its sequences."""


class Held(NamedTuple):
    """A played group until it is trained or dropped."""

    episodes: Sequence[EpisodeSummary]
    pieces: Sequence[Sequence[Piece]]
    """Of each episode."""


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
        self.pieces: dict[int, Sequence[Sequence[Piece]]] = {}
        self.played_lengths, self.trained_lengths = array("l"), array("l")
        self.staleness: Counter[int] = Counter()
        """Episodes trained, by (version being trained - version of their oldest token)."""
        self.tokens: Counter[str] = Counter()
        """Response tokens by what became of them: trained, masked, or the final state of their group."""
        self.num_samples = self.num_groups = self.num_filtered = 0
        self.played_s = 0.0
        """Sum over all episodes of the time they took."""

    def add(self, group: int, task: Task, ref: PayloadRef | None, episodes: Sequence[EpisodeSummary]) -> None:
        """A played group."""
        self._held[group] = Held(episodes, self.pieces.pop(group))
        self.played_lengths.extend([episode.response_tokens for episode in episodes])
        self.played_s += sum([episode.seconds for episode in episodes])
        self.num_groups += 1

    def mark(self, groups: Sequence[int], state: str, *, trained_in: int | None = None) -> None:
        """What became of them."""
        for group in groups:
            held = self._held.pop(group, None)
            if held is None or state == EpisodeState.TRAINED:
                continue
            self.num_filtered += state == EpisodeState.FILTERED
            self.tokens[state] += sum(episode.response_tokens for episode in held.episodes)

    def train(self, ref: GroupRef, version: int) -> Cost:
        """The learner at `version` takes the members of `ref`; it reads the whole group."""
        held = self._held[ref.group]
        oldest_allowed = version - self._max_staleness
        response = masked = 0
        for member in ref.episodes:
            episode = held.episodes[member]
            response += episode.response_tokens
            self.trained_lengths.append(episode.response_tokens)
            if episode.version_min != NO_VERSION:
                self.staleness[version - episode.version_min] += 1
                if episode.version_min < oldest_allowed:
                    masked += sum(r.num_older(s, oldest_allowed) for r, s in held.pieces[member])
        whole = sum([episode.response_tokens for episode in held.episodes])
        self.num_samples += len(ref.episodes)
        self.tokens["trained"] += response - masked
        self.tokens["masked"] += masked
        self.tokens[EpisodeState.DISCARDED_STALE] += whole - response
        prompts = sum([episode.prompt_tokens for episode in held.episodes])
        return Cost(whole + prompts, response, masked)

    def sync(self) -> None:
        """Nothing is durable here."""

    def close(self) -> None:
        """Nothing to close."""
