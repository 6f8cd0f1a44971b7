"""The claim of a run on a rollout server: one run at a time controls it."""

from __future__ import annotations

import hmac
import math

from penstock.rollout.generator import Conflict

CLAIM = "X-Penstock-Claim"
"""Header with which the holder of a claim controls the server: the nonce of the claim, which `/ready` does not show."""


class Claim:
    """The claim of a run on one server. One run at a time may hold it. Times are seconds on the caller's clock.

    If two trainers published to one server, each would train on samples of the other's weights. A claim lasts for a
    lease, and a live run renews it. So the claim of a dead run expires by itself."""

    def __init__(self, run_id: str = "", nonce: str | None = None) -> None:
        """Create an unclaimed server, or with a `nonce` one that belongs for ever to the run that started it."""
        self._run_id, self._nonce = run_id, nonce
        self._until = -math.inf if nonce is None else math.inf

    def take(self, run_id: str, nonce: str, *, lease_s: float, now: float) -> None:
        """Claim the server for `lease_s` seconds; 0 releases it. Raises Conflict if another run holds the claim.

        A server that a run started keeps that run's claim."""
        if not self._is_of(nonce, now):
            raise Conflict(
                f"run {self._run_id} already uses this server: stop that run, or set rollout.urls of this run to "
                "another server; the weights of two trainers on one server cannot be distinguished"
            )
        if self._until != math.inf:
            self._run_id, self._nonce, self._until = run_id, nonce, now + lease_s

    def check(self, nonce: str, *, now: float) -> None:
        """Check that a request that controls the server has the current claim's nonce, if there is a claim. Raises
        Conflict."""
        if not self._is_of(nonce, now):
            raise Conflict(
                f"run {self._run_id} uses this server, and only this run may control it: stop the run first (its own "
                f"requests carry its nonce in the header {CLAIM})"
            )

    def _is_of(self, nonce: str, now: float) -> bool:
        """Return whether the server is unclaimed or claimed with this nonce."""
        return now >= self._until or hmac.compare_digest(nonce.encode(), (self._nonce or "").encode())
