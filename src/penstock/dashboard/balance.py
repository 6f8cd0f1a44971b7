"""Who waits for whom in a run, and how far its throughput is from what its parts could do. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

BUSY = 0.9
"""Share of time from which a part counts as always busy."""
NEAR = 0.1
"""Two busy shares that differ by less are about the same."""


def balance(progress: Mapping[str, Any]) -> str | None:
    """Return one sentence about who waits for whom, from the progress of a status; None before it is known."""
    trainer, servers = progress.get("trainer_busy_fraction"), progress.get("generator_busy_fraction")
    if trainer is None or servers is None:
        return None
    shares = f"the trainer is busy {trainer:.0%} of the time, the servers {servers:.0%}"
    if min(trainer, servers) >= BUSY:
        return f"Trainer and servers hardly wait: {shares}."
    if abs(trainer - servers) < NEAR:
        return f"Trainer and servers wait about equally: {shares}."
    if trainer < servers:
        return f"The trainer waits for the servers: {shares}."
    return f"The servers wait for the trainer: {shares}."


def bound(progress: Mapping[str, Any]) -> dict[str, float] | None:
    """Return the throughput, and an estimate of X*, the most that the same trainer and servers could do: the throughput
    if the busier of the two never waited; if they take turns on the same devices, if one of them always worked. None
    before it is known.

    `share`: throughput / bound. A server counts as busy with few answers in it too, so the real bound can be higher.
    """
    trainer, servers = progress.get("trainer_busy_fraction"), progress.get("generator_busy_fraction")
    tokens = progress.get("tokens_trained_per_second")
    if trainer is None or servers is None or not tokens:
        return None
    busiest = min(trainer + servers if progress.get("takes_turns") else max(trainer, servers), 1.0)
    if busiest <= 0:
        return None
    return {"tokens_trained_per_second": tokens, "bound": tokens / busiest, "share": busiest}
