"""How what workers wrote on other machines gets into the controller's pool, before anybody counts on it.

A record that cannot be had is lost with whoever wrote it: what it held is played anew, and an event says so. A host
from which nothing comes for minutes, though its workers go on, ends the run.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.observe.recorder import Recorder
from penstock.ports import Payloads, PayloadsLost
from penstock.types import PayloadRef

PATIENCE_S = 300.0
"""With a host whose workers report records that do not come; one that died is replaced before."""


class HostUnreachable(RuntimeError):
    """Whatever the workers on a host play is lost."""

    self_explanatory = True
    hopeless = True


class Gathering:
    """Of one controller."""

    def __init__(self, payloads: Payloads, recorder: Recorder) -> None:
        self._payloads, self._recorder = payloads, recorder
        self._failing_since: dict[str, float] = {}
        """Of hosts: when the first record of late did not come."""

    async def gather(self, refs: Sequence[PayloadRef], *, worker: str, host: str) -> str:
        """Have them in the pool; returns why that cannot be, or nothing. Raises `HostUnreachable`."""
        now = asyncio.get_running_loop().time
        try:
            await self._payloads.fetch(refs, host=host)
        except PayloadsLost as lost:
            self._recorder.event("payloads_unfetched", worker=worker, host=host, reason=str(lost))
            if now() - self._failing_since.setdefault(host, now()) > PATIENCE_S:
                raise HostUnreachable(
                    f"nothing that is played on host {host} has come for {PATIENCE_S:g} s: {lost}"
                ) from None
            return str(lost)
        self._failing_since.pop(host, None)
        return ""

    def close(self) -> None:
        self._payloads.close()
