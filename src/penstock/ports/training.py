"""The trainer, as the loop sees it, and the checkpoints that it can restore."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec

from penstock.types import GroupRef, LearnerState, WeightsHandle
from penstock.version_history import VersionHistory

LAGS = tuple(f"tokens_of_lag_{lag}" for lag in range(16))
"""Metrics of an optimizer step: its trained tokens by staleness in policy versions. The last one has all older tokens
too."""


class TrainerLost(RuntimeError):
    """The trainer died, and lost its unsaved state. Its successor is starting."""


class WeightsNotSent(RuntimeError):
    """The trainer could not send weights to a server. It still has them."""


SendingWay = Literal["rendezvous", "communicator", "sglang_memory", "vllm_memory"]
"""How a server takes weights. `rendezvous`: as a rank of a torch group, at the group's address. `communicator`: as a
rank of a bare NCCL communicator, with its id. The other ways: from memory of the device that it shares with the
trainer, with handles as the engine reads them."""


class TensorBucket(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors that the trainer sends together: their bytes, end to end."""

    names: list[str]
    dtypes: list[str]
    """Names as in torch, e.g. `bfloat16`."""
    shapes: list[list[int]]


class SendingGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A process group in which the trainer, rank 0, broadcasts one version to one server."""

    name: str
    address: str
    port: int
    """Where the ranks meet."""
    world_size: int
    backend: str
    buckets: list[TensorBucket]
    """The broadcasts, in their order."""
    communicator: bytes = b""
    """The id of its NCCL communicator, for servers that join with `communicator`."""


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


class WeightsSender(Protocol):
    """A trainer that broadcasts published weights to servers of other engines.

    Calls may overlap with each other and with those of `Trainer`. Each raises `TrainerLost` if the trainer dies before
    it answers, or if it does not have the weights.
    """

    async def open_group(
        self, server: str, policy_version: int, *, world_size: int, way: SendingWay = "rendezvous"
    ) -> SendingGroup:
        """Open a group for one of the newest versions, and close an earlier one of this server. Raises
        `WeightsNotSent`."""

    async def send_weights(self, group: str) -> None:
        """Broadcast all buckets of the named group. Raises `WeightsNotSent` if the server does not take them."""

    async def lend_bucket(self, group: str, number: int) -> str:
        """Return the payload with which the server of the named group finds a bucket in the memory of the device. The
        bucket before is lent no longer. Raises `WeightsNotSent`."""

    async def close_group(self, group: str) -> None:
        """Close the named group if it exists. This ends a broadcast."""
