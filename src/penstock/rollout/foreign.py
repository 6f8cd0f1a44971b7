"""What clients of engines that are not ours have in common: weights are read from files, and memory is theirs."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.deadline import deadline
from penstock.rollout.session import HttpSession, RolloutError
from penstock.types import UpdateMode, WeightsHandle

UNKNOWN = "unknown"
"""Label of weights that are no published version: another run's, or half those of an update that failed."""
RESUME_S = 10.0
"""For going on after a pause."""
STAT_S = 30.0
"""For looking at a file, on a shared file system that is slow."""


class ForeignClient:
    """The engine reads the directory of a published file, so it must see the same one: shared memory on this host, or a
    shared file system. It copies over the weights it has: one that fails on the way is left with none that are known.
    """

    def __init__(self, url: str, session: HttpSession, *, update_mode: UpdateMode = "retract") -> None:
        """`update_mode`: what becomes of running answers when weights are committed. `retract` ends them with what they
        have; whoever asked goes on from there, and all keys and values are the new weights' own."""
        self.url = url
        self._session, self._update_mode = session, update_mode

    async def claim(self, run_id: str, nonce: str, *, lease_s: float) -> None:
        """It remembers nobody: that another run uses it too shows in versions that are yet to be made here."""

    async def begin_weights(self, handle: WeightsHandle) -> None:
        """Look whether the file is whole, before anything is paused for it."""
        path = Path(handle.path)
        async with deadline(STAT_S, waiter="rollout client", resource=handle.path, holder="its storage"):
            found = await asyncio.to_thread(lambda: path.stat().st_size if path.is_file() else -1)
        if found != handle.num_bytes:
            raise RolloutError(self.url, f"weights file {path} has {found} bytes, expected {handle.num_bytes}", 400)

    async def abort_weights(self) -> None:
        """Nothing was staged."""

    async def release(self) -> None:
        """Only our own servers do."""
        raise RolloutError(self.url, "this engine cannot give way to the trainer: use rollout.engine penstock", 400)

    async def resume(self) -> None:
        """Only our own servers do."""
        raise RolloutError(self.url, "this engine cannot give way to the trainer: use rollout.engine penstock", 400)
