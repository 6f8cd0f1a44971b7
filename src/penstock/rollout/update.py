"""Weights updates as transactions: begin (map and verify, while generation goes on), then commit or abort.

Every call may be repeated. Nothing is served that was not verified, and a policy_version never goes back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch

from penstock.deadline import deadline
from penstock.rollout.runner import EngineRunner, LoadMode
from penstock.types import WeightsHandle

RECEIVE_TIMEOUT_S = 300.0
"""For mapping and verifying one set of weights, from a cold disk if need be."""
LOAD_TIMEOUT_S = 60.0
"""For the engine to end its step and copy."""
LEASE_S = 600.0
"""Between begin and commit."""
DRAIN_TIMEOUT_S = 1800.0
"""For running samples to end."""

MAX_VERSION = 2**31 - 1
"""Trajectories keep versions as 32-bit integers."""

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
        self._lease: asyncio.TimerHandle | None = None
        self._served: WeightsHandle | None = None

    async def begin(self, handle: WeightsHandle, *, lease_s: float = LEASE_S) -> WeightsHandle:
        """Map and verify `handle` in a thread. Conflict unless it is newer than what is served. What is not committed
        within the lease is forgotten, as if it had been aborted."""
        async with self._lock:
            if _same(handle, self._served) or (self._staged and _same(handle, self._staged[0])):
                return handle
            if handle.policy_version <= self._runner.policy_version:
                raise Conflict(
                    f"policy_version {handle.policy_version} is not newer than "
                    f"{self._runner.policy_version}, which is being served"
                )
            if handle.policy_version > MAX_VERSION:
                raise ValueError(f"policy_version must be at most {MAX_VERSION}, not {handle.policy_version}")
            self._staged = None
            async with deadline(RECEIVE_TIMEOUT_S, waiter="server", resource=handle.path, holder="its storage"):
                self._staged = (handle, await asyncio.to_thread(self._map, handle))
            self._renew(lease_s)
            return handle

    def _renew(self, lease_s: float) -> None:
        if self._lease is not None:
            self._lease.cancel()
        self._lease = asyncio.get_running_loop().call_later(lease_s, self._expire)

    def _expire(self) -> None:
        if not self._lock.locked():  # else it is being committed or replaced
            self._staged = None

    def _map(self, handle: WeightsHandle) -> Mapping[str, torch.Tensor]:
        try:
            return self._receive(handle)
        except OSError as error:
            raise ValueError(f"cannot read the weights: {error}") from error

    async def commit(self, policy_version: int, *, mode: LoadMode = "in_place") -> WeightsHandle:
        """Serve the staged weights from the next decode step on, or when what runs has ended (`drain`). Returns the
        handle of what is served, with the fingerprint of what the engine really holds."""
        async with self._lock:
            if self._served is not None and self._served.policy_version == policy_version:
                return self._served
            if self._staged is None or self._staged[0].policy_version != policy_version:
                staged = "nothing" if self._staged is None else f"policy_version {self._staged[0].policy_version}"
                raise Conflict(f"commit of policy_version {policy_version}, but {staged} is staged")
            if mode == "drain" and self._runner.engine.paused:
                raise Conflict("generation is paused: what runs cannot end; continue, or commit in another mode")
            handle, tensors = self._staged
            if self._runner.policy_version != policy_version:  # else an earlier commit ran out of time, but took effect
                seconds = DRAIN_TIMEOUT_S if mode == "drain" else LOAD_TIMEOUT_S
                async with deadline(seconds, waiter="server", resource="a weights update", holder="the engine"):
                    await self._runner.load_weights(tensors, policy_version, mode=mode)
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
