"""What a weights update holds before it is served, and what it is once it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch


class Served(NamedTuple):
    """What a commit put in place."""

    policy_version: int
    fingerprint: str


@dataclass(slots=True, eq=False)
class Staged:
    """What is there of an update. All of it is of one sender."""

    policy_version: int | None
    """None until somebody names it."""
    sender: str | None = None
    """The group that broadcasts it; handles, and chunks that come without a group, have none."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    fingerprint: str | None = None
    """Of a handle, which was verified against it."""
    chunks: set[int] = field(default_factory=set)
    """Sequence numbers of what has come."""
    bracketed: bool = False
    """Served when its sender says so, not as soon as it is whole."""
    refused: str | None = None
    """Why a part of it was not taken."""
    pause: int | None = None
    """Under which pause it was made."""

    @property
    def untouched(self) -> bool:
        """Whether nobody has sent anything yet."""
        return not self.tensors and not self.chunks and self.sender is None

    @property
    def owner(self) -> str:
        """Whose it is, in words."""
        if self.sender is not None:
            return f"group {self.sender!r}"
        if self.fingerprint is not None:
            return "whoever sent a handle"
        return "whoever began it" if self.untouched else "a sender without a group"
