"""Every await that can wait on somebody else goes through `deadline`; on expiry it says who waited for whom."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Stalled(TimeoutError):
    """Somebody waited longer than allowed: `waiter` for `resource`, held by `holder`."""

    self_explanatory = True

    def __init__(self, *, waiter: str, resource: str, holder: str, seconds: float) -> None:
        self.waiter, self.resource, self.holder, self.seconds = waiter, resource, holder, seconds
        super().__init__(f"{waiter} waited {seconds:g} s for {resource}, held by {holder}")


@asynccontextmanager
async def deadline(seconds: float, *, waiter: str, resource: str, holder: str) -> AsyncIterator[None]:
    """Bound the body to `seconds`. A timeout raised by something else inside the body passes through unchanged."""
    timer = asyncio.timeout(seconds)
    try:
        async with timer:
            yield
    except TimeoutError as error:
        if not timer.expired() or isinstance(error, Stalled):
            raise
        raise Stalled(waiter=waiter, resource=resource, holder=holder, seconds=seconds) from None
