"""The grant that all answers of an episode share.

An agent may have several requests at once, and the scheduler gives one grant at a time to an episode. With it each
answer may generate one segment. An answer that has not used the grant joins those that generate with it. The next grant
is requested when an answer needs it and all segments of the current one have ended. Answers that arrive meanwhile wait
for it too. The request goes on if the answer that made it is cancelled: another one takes the grant.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from penstock.deadline import deadline, holding
from penstock.types import SegmentGrant

TURN_S = 6 * 3600.0
"""How long an answer may wait for the other answers of its episode. The lease ends earlier."""
Request = Callable[[bool], Coroutine[Any, Any, SegmentGrant]]
"""Waits for the next grant of an episode. The flag is True if an answer continues with it."""
OTHERS = {"resource": "the next grant of its episode", "holder": "the episode's other answers"}


class SharedGrant:
    """The grant of one episode, and the request for the next one."""

    def __init__(self, first: SegmentGrant, request: Request, *, waiter: str) -> None:
        self._grant, self._request, self._waiter = first, request, waiter
        self._is_new = True
        """Whether no answer has used the grant yet."""
        self._number = 0
        self._renewing = asyncio.Lock()
        self._asking: asyncio.Task[SegmentGrant] | None = None
        self._num_generating = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    async def begin(self, used: int | None) -> tuple[int, SegmentGrant]:
        """Wait for a grant, and return its number and the grant. The caller generates one segment, and then calls
        `end`. `used`: number of the latest grant that the answer has used; None if it has used none."""
        is_open = self._is_new or not self._is_idle.is_set()
        if not is_open or used == self._number or self._renewing.locked():
            await self._renew(continues=used is not None)
        self._is_new = False
        self._num_generating += 1
        self._is_idle.clear()
        return self._number, self._grant

    def end(self) -> None:
        """Note that a segment has ended, or has failed."""
        self._num_generating -= 1
        if not self._num_generating:
            self._is_idle.set()

    async def _renew(self, *, continues: bool) -> None:
        """Wait for the next grant. Of all that wait for it, one requests it."""
        number = self._number
        async with holding(self._renewing, TURN_S, waiter=self._waiter, **OTHERS):
            if self._number == number:
                if not self._is_idle.is_set():
                    async with deadline(TURN_S, waiter=self._waiter, **OTHERS):
                        await self._is_idle.wait()
                if self._asking is None:
                    self._asking = asyncio.create_task(self._request(continues), name=f"grant-{self._waiter}")
                asking = self._asking
                try:
                    self._grant = await asyncio.shield(asking)
                finally:
                    if asking.done():
                        self._asking = None
                self._number += 1

    async def close(self) -> None:
        """Cancel the request for the next grant, if there is one: the episode has ended."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.gather(self._asking, return_exceptions=True)
