"""The search for better settings, as the scheduler asks for it. It runs outside the controller's event loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from penstock.types import Summaries


class PlayedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A completed group."""

    task_id: str
    episodes: Summaries


class Question(msgspec.Struct, frozen=True, kw_only=True):
    """What the run has measured, and what may change. Settings have the short names of `config/tunable.py`."""

    settings: dict[str, Any]
    """The settings in force."""
    movable: Sequence[str]
    """Names of the settings that may change, in the order in which they are to be tried."""
    groups: Sequence[PlayedGroup]
    """The latest groups, the oldest first."""
    calls: Sequence[tuple[int, int, bool, float]]
    """Latest calls of the learner: groups, tokens, whether an optimizer step and publication followed, seconds."""
    update_s: float
    """Mean seconds in which the servers took new weights."""
    trust: dict[str, float]
    """Factor on the predicted gain of a change, by setting; 1 where it is missing."""
    rejected: Sequence[dict[str, Any]] = ()
    """Changes that were tried and did not help."""
    knows_lengths: bool = False
    """Whether the run predicts lengths well enough to order groups by them."""
    may_be_staler: bool = True
    """Whether samples may become older than they are."""
    min_gain: float = 0.05


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The best change that the search found."""

    changes: dict[str, Any] = {}
    """Settings to change; empty if none is worth it."""
    gain: float = 1.0
    """Predicted samples per second with the changes, divided by those without."""
    predicted: dict[str, float] = {}
    """Predicted samples per second and mean staleness, with the changes and with the settings in force (`_now`)."""
    reason: str
    num_simulated: int = 0
    """Number of simulated runs."""
    cpu_s: float = 0.0
    left_out: Sequence[str] = ()
    """Settings that the search did not reach."""
    was_cut: bool = False
    """Whether the search ended because its processor time was used up."""
    was_postponed: bool = False
    """Whether the search has not begun, because searches may take no more processor time now."""


class Searcher(Protocol):
    """Searches settings on a model of the run."""

    async def search(self, question: Question) -> Answer:
        """Return the best change. Raises nothing: a search that fails says so in its answer."""
