"""Whose rollout server it is: one run's at a time, since two trainers that publish to one server train on each other's
weights. A claim lasts for a lease and is renewed by whoever lives, so that a dead run's ends by itself. Torch-free.
"""

from __future__ import annotations

import math

from penstock.rollout.failures import Conflict


class Claim:
    """Pure. Times are seconds on the caller's clock."""

    def __init__(self, run_id: str = "", nonce: str | None = None) -> None:
        """Free, or for ever that of the run that started the server."""
        self._run_id, self._nonce = run_id, nonce
        self._until = -math.inf if nonce is None else math.inf

    def take(self, run_id: str, nonce: str, *, lease_s: float, now: float) -> None:
        """For `lease_s` from now on; 0 gives it up. Conflict if it is another run's."""
        if now < self._until and nonce != self._nonce:
            raise Conflict(
                f"run {self._run_id} uses this server: end that run, or give this one a server of its own in "
                "rollout.urls; what two trainers publish to one server cannot be told apart"
            )
        self._run_id, self._nonce, self._until = run_id, nonce, now + lease_s
