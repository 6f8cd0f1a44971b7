"""The trainer, as the loop sees it, and the checkpoints that it can restore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock.types import GroupRef, LearnerState, WeightsHandle
from penstock.version_history import VersionHistory


class TrainerLost(RuntimeError):
    """The trainer died, and lost its unsaved state. Its successor is starting."""


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a trainer beyond its checkpoints. A new controller continues from it."""

    begun: bool
    """Whether the trainer holds weights. If not, it must restore a checkpoint or begin."""
    step: int = 0
    learner: LearnerState | None = None
    """Report of the latest optimizer step that this trainer took."""
    trained: list[int] = []
    """Groups trained in that step."""
    accumulated: list[int] = []
    """Groups with gradients accumulated for the next step."""


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    """A complete checkpoint."""

    directory: str
    step: int
    policy_version: int
    state: dict[str, Any]
    """The state that the loop saved with the weights."""


class SavedStates(msgspec.Struct, frozen=True, kw_only=True):
    """Checkpoints that a trainer can restore."""

    newest: SavedState | None
    torn: dict[str, str] = {}
    """Damaged checkpoints that are newer than `newest`, with the reason for each."""


class Trainer(Protocol):
    """A trainer: it accumulates, steps and publishes; it also begins, saves and restores.

    Calls never overlap, except that `finish_publish` and `finish_checkpoint` may wait beside all others. Each call
    raises `TrainerLost` if the trainer dies before it answers.
    """

    async def state(self) -> TrainerState:
        """Return the state that the trainer holds."""

    async def saved(self, directory: Path) -> SavedStates:
        """Return the checkpoints in `directory`."""

    async def begin(self, *, policy_version: int, history: VersionHistory) -> Mapping[str, float]:
        """Load the initial weights as `policy_version`, and imitate demonstrations if the configuration asks for it.
        The staleness of tokens follows from `history`.

        Returns steps, seconds and loss of the imitation; empty without imitation.
        """

    async def restore(self, directory: Path, *, step: int, policy_version: int, history: VersionHistory) -> None:
        """Restore the checkpoint in `directory`, under the number `policy_version`. The staleness of tokens follows
        from `history`."""

    async def accumulate(self, groups: Sequence[GroupRef]) -> Mapping[str, float]:
        """Add the gradient of `groups`, without an optimizer step.

        Returns counts and sums (tokens, masked tokens, busy seconds).
        """

    async def step(self) -> LearnerState:
        """Take one optimizer step over all accumulated gradients, normalised by their token count. Version += 1."""

    async def begin_publish(self) -> int:
        """Begin to write the current weights where servers can map them, and return their policy_version. Training may
        go on at once."""

    async def finish_publish(self, policy_version: int) -> WeightsHandle:
        """Wait until the weights of this version, one of the newest three, are complete."""

    async def begin_checkpoint(self, directory: Path, state: Mapping[str, Any], *, best: int | None) -> None:
        """Begin to save weights, optimizer and RNG as they are now, and the caller's `state`, atomically under
        `directory`. Training may go on at once. The checkpoint of the step `best` is kept beside the newest ones."""

    async def finish_checkpoint(self) -> None:
        """Wait until the checkpoint that was begun last is complete."""
