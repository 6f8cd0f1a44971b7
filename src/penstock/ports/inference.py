"""The rollout servers, as the loop sees them: weights and memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from penstock.types import WeightsHandle, WeightsTransport


class WeightsOutOfReach(RuntimeError):
    """The publisher of the weights cannot deliver them: it died, or this process cannot reach it."""


class RolloutServers(Protocol):
    """Weights and memory of all rollout servers of a run."""

    async def update_weights(self, handle: WeightsHandle) -> Mapping[WeightsTransport, int]:
        """Bring every server that answers to `handle.policy_version`, in one transaction. Return the number of updated
        servers by the transport of their weights.

        A server that keeps older weights does no harm, because each token carries the version that sampled it. Raises
        `TrainerLost` if no server can get these weights. Raises another error if a server refuses the weights, or if no
        server answers for a long time.
        """

    async def release(self) -> None:
        """Free the generation memory for the trainer. Running requests end early with the tokens they have; later
        requests end at once without any."""

    async def resume(self) -> None:
        """Take the memory back and serve again."""
