"""What the clients of vLLM and SGLang have in common: weights from a file, adapters, and sleep. Torch-free."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.deadline import Stalled, deadline
from penstock.rollout import bodies
from penstock.rollout.client import ASLEEP, BEGIN_SLACK_S, CONFLICT, ServedLabel, ServerClient
from penstock.rollout.served_adapters import HELD, ServedAdapters, name_of
from penstock.rollout.session import HttpSession, RolloutError
from penstock.rollout.weights_group import WeightsGroup
from penstock.samples import Segment
from penstock.types import Sampling, SegmentGrant, UpdateMode, WeightsHandle

logger = logging.getLogger(__name__)

STAT_S = 30.0
"""Timeout for a file's status, which may be on a slow shared file system."""
FETCH = "/weights/begin"
"""Path of the route with which our process before an engine brings weights to its machine."""


class EngineClient(ServerClient):
    """The client of a server with another engine.

    The engine reads published weights from a directory. If the handle has a link, our process before the engine brings
    the file to the memory of its machine. Else the engine sees the published directory: shared memory on this host, or
    a shared file system. The engine overwrites its weights in place. If an update fails halfway, the engine holds
    weights of no known version."""

    sleeps = True
    adapters_prefix = ""
    """Of the paths of the engine's routes for adapters."""

    def __init__(self, url: str, session: HttpSession, *, update_mode: UpdateMode | None = None) -> None:
        super().__init__(url, session, update_mode=update_mode)
        self._begun: WeightsHandle | None = None
        """The weights of the latest `begin_weights`, where the engine can read them."""
        self._group: WeightsGroup | None = None
        """The group in which the trainer sends the next weights."""
        self._broke_off = False
        """Whether the last weights broke off on their way in a group. The next ones come as a file."""

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        """Return one segment per grant, without tokens if the engine is asleep. The engine itself would let requests
        wait for the end of training, and their time would run."""
        if self.takes_turns and await self.is_asleep():
            return [Segment(token_ids=[], logprobs=[], spans=[], finish_reason="abort") for _ in grants]
        adapter = await self._adapter_name() if self.serves_adapters else None
        return await self._generate(prompt_ids, grants, sampling, seeds, adapter=adapter)

    @abstractmethod
    async def _generate(
        self,
        prompt_ids: Sequence[int],
        grants: Sequence[SegmentGrant],
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        adapter: str | None,
    ) -> list[Segment]:
        """Return one segment per grant. `adapter`: name of the adapters that compute them, or None."""

    async def is_asleep(self) -> bool:
        return (await self._busy_label()) == ASLEEP

    async def _busy_label(self) -> str:
        """Return the label of the weights, from a server that may be too busy to answer within seconds."""
        return (await self._session.call("GET", self.url, self.label_path, None, ServedLabel)).weight_version

    async def _adapter_name(self) -> str:
        """Return the name of the served adapters, which a request must name. Raises RolloutError with status 503 if the
        label of the weights is no version."""
        return name_of(self._version(await self._busy_label()))

    async def forget_weights(self) -> None:
        """Reset version numbers. An engine that is asleep has no version already."""
        if not await self.is_asleep():
            await super().forget_weights()

    async def _open_group(self, kind: type[WeightsGroup], handle: WeightsHandle) -> None:
        """Open a group in which the trainer sends these weights. Raises RolloutError or Stalled."""
        assert self.sender is not None
        self._group = await kind.open(self.url, self._session, self.sender, handle.policy_version)

    async def _try_group(self, kind: type[WeightsGroup], handle: WeightsHandle) -> bool:
        """Open such a group if the server and the trainer can, and return whether they could. If not, a file remains,
        also after the death of the trainer."""
        if self._broke_off:
            return False
        try:
            await self._open_group(kind, handle)
        except (RolloutError, Stalled) as error:
            logger.warning("policy_version %d comes as a file: %s", handle.policy_version, error)
            return False
        return True

    async def _take(self, group: WeightsGroup, handle: WeightsHandle, *, flush: bool) -> None:
        self._broke_off = True
        await group.take(str(handle.policy_version), flush=flush)
        self.transport = group.transport

    async def _leave_group(self) -> None:
        group, self._group = self._group, None
        if group is not None:
            await group.leave()

    async def begin_weights(self, handle: WeightsHandle) -> None:
        """Bring the file to the machine of the engine, or check its size, before generation pauses, since the engine
        stages nothing. Load adapters, unless the engine is asleep: it has given away the memory for them."""
        if self._is_fetched(handle):
            handle = self._begun = await self._fetch(handle)
        else:
            await self._check_size(handle)
        if handle.adapters is not None and not (self.takes_turns and await self.is_asleep()):
            await self._adapters.load(handle)

    def _is_fetched(self, handle: WeightsHandle) -> bool:
        """Return whether our process before the engine gets the file of these weights."""
        return bool(handle.url) and self._group is None

    async def _fetch(self, handle: WeightsHandle) -> WeightsHandle:
        """Return the handle with the path of the file on the machine of the engine."""
        limit_s = handle.receive_limit_s + BEGIN_SLACK_S
        fetched = await self._session.call("POST", self.url, FETCH, handle, bodies.FetchedWeights, timeout_s=limit_s)
        self.transport = fetched.transport
        return replace(handle, path=fetched.path, url="")

    async def _check_size(self, handle: WeightsHandle) -> None:
        path = Path(handle.path)
        async with deadline(STAT_S, waiter="rollout client", resource=handle.path, holder="its storage"):
            found = await asyncio.to_thread(lambda: path.stat().st_size if path.is_file() else -1)
        if found != handle.num_bytes:
            raise RolloutError(self.url, f"weights file {path} has {found} bytes, expected {handle.num_bytes}", 400)
        self.transport = "file"

    def _readable(self, handle: WeightsHandle) -> WeightsHandle:
        """Return the handle with a path that the engine can read. Raises RolloutError with status 409 if the file was
        not brought to its machine."""
        if not self._is_fetched(handle):
            return handle
        begun = self._begun
        if begun is None or (begun.policy_version, begun.fingerprint) != (handle.policy_version, handle.fingerprint):
            raise RolloutError(self.url, f"has not fetched policy_version {handle.policy_version}", CONFLICT)
        return begun

    async def commit_weights(self, handle: WeightsHandle) -> None:
        """Wake an engine that is asleep, let new requests name adapters that are loaded, or replace the weights. Leave
        the group in which they came."""
        try:
            handle = self._readable(handle)
            if await self.is_asleep():
                await self._wake_with(handle)
            elif handle.adapters is not None:
                await self._commit_adapters(handle.policy_version)
            else:
                await self._replace_weights(handle)
            self._broke_off = False
        finally:
            await self._leave_group()

    async def abort_weights(self) -> None:
        """Leave the group, and unload adapters that are newer than the served ones. No request names them yet."""
        await self._leave_group()
        served = (await self._label()).weight_version if self.serves_adapters else ""
        if served.isdecimal():
            for version in await self._adapters.held():
                if version > int(served):
                    await self._adapters.unload(version)

    async def resume(self) -> None:
        """Check that a weights update has woken the engine."""
        if await self.is_asleep():
            raise RolloutError(self.url, "is asleep: it has given its memory away, and the last update failed", 503)

    @property
    def _adapters(self) -> ServedAdapters:
        return ServedAdapters(self.url, self._session, prefix=self.adapters_prefix)

    async def _commit_adapters(self, policy_version: int) -> None:
        """Let new requests name the adapters of this version.

        Running requests keep theirs to the end, and nothing pauses. With `retract`, or if the server holds too many
        adapters, they end with their tokens so far, and old adapters are unloaded. Raises RolloutError with status 409
        if the server does not hold the adapters, because it was restarted since they were staged.
        """
        held, label = await self._adapters.held(), str(policy_version)
        if policy_version not in held:
            raise RolloutError(self.url, f"does not hold the adapters of policy_version {policy_version}", CONFLICT)
        if self.update_mode != "retract" and len(held) < HELD:
            await self.label_weights(label)
            return
        before = (await self._label()).weight_version
        try:
            await self._end_running()
            await self.label_weights(label)
            for version in held:
                if str(version) not in (label, before):
                    await self._adapters.unload(version)
        finally:
            await self._continue()

    async def _load_adapters(self, handle: WeightsHandle) -> None:
        """Load the adapters of a handle while an engine wakes, and name their version. Of the other adapters keep the
        newest ones: requests on their way may still name the version before."""
        await self._adapters.load(handle)
        for version in (await self._adapters.held())[:-2]:
            if version != handle.policy_version:
                await self._adapters.unload(version)
        await self.label_weights(str(handle.policy_version))

    @abstractmethod
    async def _replace_weights(self, handle: WeightsHandle) -> None:
        """Pause as `update_mode` says, load the weights, and continue."""

    @abstractmethod
    async def _wake_with(self, handle: WeightsHandle) -> None:
        """Wake the engine with these weights or adapters. If that fails, it sleeps on, and any later update may wake
        it."""

    @abstractmethod
    async def _end_running(self) -> None:
        """Pause, and end all running requests with their tokens so far."""

    @abstractmethod
    async def _continue(self) -> None:
        """End the pause."""
