"""Weights updates as transactions: begin (map and verify, while generation goes on), then commit or abort.

Every call may be repeated. Nothing is served that was not verified, and a policy_version never goes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from penstock.deadline import deadline
from penstock.rollout.runner import EngineRunner
from penstock.types import WeightsHandle

RECEIVE_TIMEOUT_S = 300.0
"""For mapping and verifying one set of weights, from a cold disk if need be."""
LOAD_TIMEOUT_S = 60.0
"""For the engine to end its step and copy."""

Receive = Callable[[WeightsHandle], Mapping[str, torch.Tensor]]
Fingerprint = Callable[[Mapping[str, torch.Tensor]], str]


class Conflict(ValueError):
    """The call does not fit the state of the transaction."""


class WeightsUpdate:
    """The state of the one transaction a server may have open. A later `begin` replaces an earlier one."""

    def __init__(self, runner: EngineRunner, receive: Receive, fingerprint: Fingerprint) -> None:
        """`fingerprint`: of named weights, as publishers compute it."""
        self._runner = runner
        self._receive = receive
        self._fingerprint = fingerprint
        self._lock = asyncio.Lock()
        self._staged: tuple[WeightsHandle, Mapping[str, torch.Tensor]] | None = None
        self._served: WeightsHandle | None = None

    async def begin(self, handle: WeightsHandle) -> WeightsHandle:
        """Map and verify `handle` in a thread. Conflict unless it is newer than what is served."""
        async with self._lock:
            if _same(handle, self._served) or (self._staged and _same(handle, self._staged[0])):
                return handle
            if handle.policy_version <= self._runner.policy_version:
                raise Conflict(
                    f"policy_version {handle.policy_version} is not newer than "
                    f"{self._runner.policy_version}, which is being served"
                )
            self._staged = None
            async with deadline(RECEIVE_TIMEOUT_S, waiter="server", resource=handle.path, holder="its storage"):
                self._staged = (handle, await asyncio.to_thread(self._map, handle))
            return handle

    def _map(self, handle: WeightsHandle) -> Mapping[str, torch.Tensor]:
        try:
            return self._receive(handle)
        except OSError as error:
            raise ValueError(f"cannot read the weights: {error}") from error

    async def commit(self, policy_version: int) -> WeightsHandle:
        """Serve the staged weights from the next decode step on. Returns the handle of what is served, with the
        fingerprint of what the engine really holds."""
        async with self._lock:
            if self._served is not None and self._served.policy_version == policy_version:
                return self._served
            if self._staged is None or self._staged[0].policy_version != policy_version:
                staged = "nothing" if self._staged is None else f"policy_version {self._staged[0].policy_version}"
                raise Conflict(f"commit of policy_version {policy_version}, but {staged} is staged")
            handle, tensors = self._staged
            if self._runner.policy_version != policy_version:  # else an earlier commit ran out of time, but took effect
                async with deadline(LOAD_TIMEOUT_S, waiter="server", resource="a weights update", holder="the engine"):
                    await self._runner.load_weights(tensors, policy_version)
            found = await asyncio.to_thread(self._fingerprint, self._runner.engine.parameters())
            self._served, self._staged = replace(handle, fingerprint=found), None
            return self._served

    async def abort(self) -> None:
        """Forget what is staged; the served weights stay."""
        async with self._lock:
            self._staged = None


def _same(handle: WeightsHandle, other: WeightsHandle | None) -> bool:
    return other is not None and (handle.policy_version, handle.fingerprint) == (
        other.policy_version,
        other.fingerprint,
    )
