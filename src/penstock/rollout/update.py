"""Weights updates as transactions: new weights are staged and verified during generation, then committed or dropped.

An update arrives whole, as a handle (`begin`), or in parts (`add`). Parts accumulate until every weight of the model
has arrived, or until the sender ends its bracket (`finish`). Calls with the same policy_version may be repeated.

Invariants: Only verified weights are served. Parts of two senders never mix in one model. The served weights stay
complete until a commit. A policy_version never decreases, except after `forget`.

An abandoned update is dropped when its lease ends. It is also dropped when its process group is joined again or
destroyed. A pause during which it was staged ends then too, because the client that paused is gone.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from penstock.deadline import deadline, holding
from penstock.observe.log_lines import Paced
from penstock.rollout.generator import Conflict
from penstock.rollout.model_check import fit_tensors
from penstock.rollout.runner import EngineRunner
from penstock.types import MAX_VERSION, NO_VERSION, RECEIVE_S, AdaptersForm, UpdateMode, WeightsHandle

logger = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 60.0
"""Time limit for the engine to end its step and copy the weights."""
LEASE_S = 600.0
"""Maximum time between two calls of an update."""
DRAIN_TIMEOUT_S = 1800.0
"""Time limit for running samples to end."""

MAX_JUMP = 2**20
"""Largest distance from the served version to a new one. A trainer counts up by one; after a rewind it continues at the
highest version that it published plus one. A version far above is a mistake that would use up all numbers. A server
without weights accepts any version."""

Tensors = Mapping[str, torch.Tensor]
Receive = Callable[[WeightsHandle], Tensors]
Fingerprint = Callable[[Tensors], str]


class CommittedWeights(NamedTuple):
    """The weights that a commit put in place."""

    policy_version: int
    fingerprint: str


@dataclass(slots=True, eq=False)
class StagedWeights:
    """The received part of an open update. All of it comes from one sender."""

    policy_version: int | None = None
    """None until a call gives the update a version."""
    sender: str | None = None
    """The process group that broadcasts the weights; None for a handle, and for tensors in a request."""
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    fingerprint: str | None = None
    """The fingerprint of the handle. The weights were verified against it."""
    adapters: AdaptersForm | None = None
    """The form of the adapters that were added to a base, or None."""
    sum_fingerprint: str | None = None
    """The fingerprint of the weights with these adapters, or None without adapters."""
    bracketed: bool = False
    """The update is served when its sender ends the bracket, not as soon as it is complete."""
    refused: str | None = None
    """The reason why a part of the update was refused, or None."""
    pause: int | None = None
    """Number of the pause during which the update was staged (`EngineRunner.num_pauses`), or None."""
    begun_at: float = field(default_factory=time.monotonic)
    patience: float = 1.0
    """How many times `LEASE_S` it waits for the next call: more for large weights, for which other servers wait too."""

    @property
    def untouched(self) -> bool:
        """Whether no sender has sent any weights yet."""
        return not self.tensors and self.sender is None

    def accepts_parts_of(self, sender: str | None) -> bool:
        """Return whether tensors of `sender` may join this update."""
        return self.untouched or (self.fingerprint is None and self.sender == sender)


class WeightsUpdate:
    """The single weights update that a server may have open.

    A later handle or bracket replaces the open update. A part joins only an update of the same sender."""

    def __init__(self, runner: EngineRunner, receive: Receive, fingerprint: Fingerprint) -> None:
        """`fingerprint` computes the fingerprint of named weights, as publishers do."""
        self._runner = runner
        self._receive = receive
        self._fingerprint = fingerprint
        self._log = Paced(logger)
        self._lock = asyncio.Lock()
        self._draining = False
        """True while a commit waits for running samples to end."""
        self.staged: StagedWeights | None = None
        """The received part of the open update, or None."""
        self._lease: asyncio.TimerHandle | None = None
        self._ending_pause: asyncio.Task[None] | None = None
        self._served: CommittedWeights | None = None
        self._longest_s = RECEIVE_S
        """The longest limit of the handles so far."""
        self._base: tuple[str, frozenset[str]] | None = None
        """(fingerprint of the base, names of the weights with adapters), if the engine serves adapters. Its other
        weights are then those of the base."""

    def _exclusive(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager that admits one call at a time."""
        return holding(
            self._lock, self._longest_s, waiter="server", resource="the weights update", holder="another update"
        )

    async def begin(self, handle: WeightsHandle, *, bracket: StagedWeights | None = None) -> WeightsHandle:
        """Map and verify `handle` in a thread; inside a `bracket`, if one is given.

        Raises Conflict unless the handle is newer than the served weights, and if the `bracket` is closed or has parts.
        Raises ValueError if the file cannot be read. An update that is not committed within the lease is dropped, as
        by `abort`."""
        if not self._is_known(handle):
            await self._stop_draining()
        async with self._exclusive():
            if self._is_known(handle):
                return handle
            self._check_newer(handle.policy_version)
            if bracket is None:
                self._stage(None)
            elif not self.is_open(bracket):
                raise Conflict("the update is no longer open")
            elif bracket.fingerprint is None and not bracket.untouched:
                raise self._open_already(bracket)
            staged = StagedWeights() if bracket is None else bracket
            limit_s = handle.receive_limit_s
            staged.patience = limit_s / RECEIVE_S
            self._longest_s = max(self._longest_s, limit_s)
            async with deadline(limit_s, waiter="server", resource=handle.path, holder="its storage"):
                tensors = dict(await asyncio.to_thread(self._map, handle))
            staged.policy_version, staged.tensors = handle.policy_version, tensors
            staged.fingerprint, staged.adapters = handle.fingerprint, handle.adapters
            if handle.adapters is not None:
                staged.sum_fingerprint = await self._fingerprint_of(tensors)
            self._stage(staged)
            return handle

    def _is_known(self, handle: WeightsHandle) -> bool:
        staged, known = self.staged, (handle.policy_version, handle.fingerprint)
        return known == self._served or (staged is not None and known == (staged.policy_version, staged.fingerprint))

    def _map(self, handle: WeightsHandle) -> Tensors:
        try:
            return self._receive(handle)
        except OSError as error:
            raise ValueError(f"cannot read the weights: {error}") from error

    async def open(self) -> StagedWeights:
        """Open a bracket and return its update. `add` adds its parts, and `finish` serves it."""
        await self._stop_draining()
        async with self._exclusive():
            staged = StagedWeights(bracketed=True)
            self._stage(staged)
            return staged

    async def add(
        self, tensors: Tensors, *, sender: str | None = None, policy_version: int | None = None
    ) -> StagedWeights:
        """Add tensors to the open update, or to a new one if none is open. Return the update.

        An update without a bracket is complete once every weight has arrived. It starts over if a weight arrives again
        or the policy_version changes, because its sender has started over. If the old update was incomplete, this
        raises Conflict, but the new update is open. Raises Conflict too if another sender's update is open, or if
        `policy_version` is not newer than the served one. Raises ValueError if a tensor does not fit the model."""
        async with self._exclusive():
            if policy_version is not None:
                self._check_newer(policy_version)
            staged, left = self.staged, None
            if staged is not None and not staged.accepts_parts_of(sender):
                raise self._open_already(staged)
            fitted = await self._fit(tensors)
            if staged is None or self._starts_over(staged, fitted, policy_version):
                staged, left = StagedWeights(), staged
            staged.sender = sender
            if policy_version is not None:
                staged.policy_version = policy_version
            staged.tensors |= fitted
            self._stage(staged)
            if left is not None and (missing := self.missing(left)):
                raise Conflict(
                    f"a new update starts over; the update before it was not served, because {len(missing)} weights "
                    f"did not arrive, the first is {missing[0]}: send all weights, or open a bracket first"
                )
            return staged

    def spoil(self, sender: str | None, reason: str) -> None:
        """Mark the open update of `sender`, or one without a sender, as refused in part: it must not be served as if it
        were complete."""
        if self.staged is not None and self.staged.sender in (sender, None):
            self.staged.refused = self.staged.refused or reason

    async def drop(self, sender: str) -> None:
        """Drop the update of a process group after its trainer restarted or ended. Drop an empty bracket too. The pause
        during which the update was staged ends."""
        if self.staged is not None and self.staged.sender == sender:
            await self._stop_draining()
        async with self._exclusive():
            staged = self.staged
            if staged is not None and (staged.sender == sender or staged.untouched):
                self._stage(None)
                self._end_pause_of(staged)

    def _starts_over(self, staged: StagedWeights, fitted: Tensors, policy_version: int | None) -> bool:
        if staged.bracketed:
            return False
        renamed = policy_version is not None and staged.policy_version not in (None, policy_version)
        return renamed or not staged.tensors.keys().isdisjoint(fitted)

    async def _fit(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        engine = self._runner.engine
        async with deadline(LOAD_TIMEOUT_S, waiter="server", resource="a comparison of weights", holder="a thread"):
            return await asyncio.to_thread(fit_tensors, engine.parameters(), engine.tied_names(), tensors)

    def missing(self, staged: StagedWeights) -> list[str]:
        """Return the names of the weights that have not arrived yet."""
        return sorted(self._runner.engine.parameters().keys() - staged.tensors.keys())

    def _open_already(self, staged: StagedWeights) -> Conflict:
        owner = "another client" if staged.sender is None else f"group {staged.sender!r}"
        return Conflict(f"{owner} has an open update: commit it first, or drop it with /weights/abort")

    def is_open(self, staged: StagedWeights | None) -> bool:
        """Return whether this update is still open: it was not committed, replaced or dropped."""
        return staged is not None and staged is self.staged

    async def finish(self, staged: StagedWeights) -> CommittedWeights | None:
        """Serve the open update and close it, even on failure. Return the committed weights; None for an empty update.

        An update without a policy_version gets the next one. A bracket keeps the served values of weights that it did
        not send. Raises Conflict if the update is not open or not complete. A bracket is incomplete if weights are
        missing after a part was refused."""
        async with self._exclusive():
            if not self.is_open(staged):
                raise Conflict("the update is no longer open")
            try:
                if staged.untouched and staged.refused is None:
                    return None
                if staged.policy_version is None:
                    staged.policy_version = self._runner.policy_version + 1
                    self._check_bound(staged.policy_version)
                if staged.bracketed and staged.refused is None and self._runner.policy_version != NO_VERSION:
                    staged.tensors = self._runner.engine.parameters() | staged.tensors  # for example frozen layers
                return await self._commit(staged, staged.policy_version, "in_place")
            finally:
                self._stage(None)

    async def commit(
        self, policy_version: int, *, mode: UpdateMode = "in_place", fingerprint: str | None = None
    ) -> CommittedWeights:
        """Serve the staged weights from the next decode step on, or once all running samples have ended (`drain`).

        Return the served weights, with the fingerprint of the engine's actual weights. An update in parts must be
        complete. If `fingerprint` is given, the staged weights must have it. Raises Conflict otherwise, or if
        `policy_version` is not staged. Raises Conflict too if another call replaces or drops the update while this one
        drains."""
        async with self._exclusive():
            if self._served is not None and self._served.policy_version == policy_version:
                if fingerprint not in (None, self._served.fingerprint):
                    raise Conflict(
                        f"policy_version {policy_version} is served already, with fingerprint "
                        f"{self._served.fingerprint}, not {fingerprint}"
                    )
                return self._served
            if self.staged is None or self.staged.policy_version != policy_version:
                version = "nothing" if self.staged is None else f"policy_version {self.staged.policy_version}"
                raise Conflict(f"commit of policy_version {policy_version}, but {version} is staged")
            if fingerprint is not None:
                found = self.staged.fingerprint or await self._fingerprint_of(self.staged.tensors)
                if found != fingerprint:
                    raise Conflict(f"the staged fingerprint {found} is not {fingerprint}: a part is missing or differs")
            served = await self._commit(self.staged, policy_version, mode)
            self._stage(None)
            return served

    async def _commit(self, staged: StagedWeights, policy_version: int, mode: UpdateMode) -> CommittedWeights:
        if missing := self.missing(staged):
            reason = "" if staged.refused is None else f", and part of it was refused: {staged.refused}"
            raise Conflict(f"the update lacks {len(missing)} weights, the first is {missing[0]}{reason}")
        if mode == "drain" and self._runner.engine.paused:
            raise Conflict("generation is paused, so running answers cannot end: continue, or commit in another mode")
        if self._runner.policy_version != policy_version:  # if equal, an earlier commit took effect after its deadline
            self._draining = mode == "drain"
            tensors = self._changed(staged)
            self._base = None
            seconds = DRAIN_TIMEOUT_S if self._draining else LOAD_TIMEOUT_S
            try:
                async with deadline(seconds, waiter="server", resource="a weights update", holder="the engine"):
                    pause_s = await self._runner.load_weights(tensors, policy_version, mode=mode)
            finally:
                self._draining = False
            own = self._runner.engine.parameters()
            num_bytes = sum(tensor.nbytes for name, tensor in tensors.items() if tensor is not own.get(name))
            self._log.info(
                f"serves the weights of policy_version {policy_version}: {num_bytes:,} bytes, received and loaded in "
                f"{time.monotonic() - staged.begun_at:.3f} s, generation paused for {pause_s:.3f} s"
            )
        # This runs in parallel with generation. Only a commit writes weights, and this commit holds the lock.
        found = await self._fingerprint_of(self._runner.engine.parameters())
        if staged.adapters is not None and staged.fingerprint is not None and found == staged.sum_fingerprint:
            self._base, found = _base_of(staged.adapters), staged.fingerprint
        self._served = CommittedWeights(policy_version, found)
        return self._served

    def _changed(self, staged: StagedWeights) -> Tensors:
        """Return what to load. If the engine has the base of the staged adapters, its own weights stand for those that
        are the same."""
        if staged.adapters is None or self._base != _base_of(staged.adapters):
            return staged.tensors
        targets = staged.adapters.targets
        return self._runner.engine.parameters() | {name: staged.tensors[name] for name in targets}

    async def _fingerprint_of(self, tensors: Tensors) -> str:
        async with deadline(RECEIVE_S, waiter="server", resource="a fingerprint", holder="a thread"):
            return await asyncio.to_thread(self._fingerprint, tensors)

    async def rename(self, policy_version: int) -> None:
        """Give the latest weights the name `policy_version`: the open bracket if there is one, otherwise the served
        weights. Raises Conflict if the version would decrease."""
        self._check_bound(policy_version)
        async with self._exclusive():
            current = self._runner.policy_version
            if self.staged is not None and self.staged.bracketed:
                self._check_newer(policy_version)
                self.staged.policy_version = policy_version
                return
            if current == NO_VERSION:
                raise Conflict("no weights have been loaded yet")
            if policy_version < current:
                raise Conflict(f"policy_version {policy_version} is older than {current}, which is being served")
            async with deadline(LOAD_TIMEOUT_S, waiter="server", resource="a new name", holder="the engine"):
                await self._runner.rename_weights(policy_version)
            if self._served is not None:
                self._served = self._served._replace(policy_version=policy_version)

    async def forget(self) -> None:
        """Reset the server for a new owner with its own version numbers. Served and staged weights are dropped, a pause
        ends, and released memory is allocated again."""
        await self._stop_draining()
        async with self._exclusive():
            self._stage(None)
            async with deadline(LOAD_TIMEOUT_S, waiter="server", resource="a new owner", holder="the engine"):
                await self._runner.forget_weights()
                self._served = None
                await self._runner.resume()
                await self._runner.continue_generation()

    async def abort(self) -> None:
        """Drop the staged weights, even during a drain. The served weights stay."""
        await self._stop_draining()
        async with self._exclusive():
            self._stage(None)

    async def _stop_draining(self) -> None:
        """Refuse a commit that waits for running samples to end, because the new call takes precedence."""
        if self._draining:
            async with deadline(LOAD_TIMEOUT_S, waiter="server", resource="the end of a drain", holder="the engine"):
                await self._runner.stop_draining()

    def _check_newer(self, policy_version: int) -> None:
        if policy_version <= self._runner.policy_version:
            raise Conflict(
                f"policy_version {policy_version} is not newer than the served {self._runner.policy_version}"
            )
        self._check_bound(policy_version)

    def _check_bound(self, policy_version: int) -> None:
        """Raise ValueError for a version that no trainer of the served weights reaches next."""
        if policy_version > MAX_VERSION:
            raise ValueError(f"policy_version must be at most {MAX_VERSION}, not {policy_version}")
        served = self._runner.policy_version
        if served != NO_VERSION and policy_version > served + MAX_JUMP:
            raise ValueError(
                f"policy_version {policy_version} is more than {MAX_JUMP} above the served {served}: send the next "
                "version, or withdraw the served weights first (/weights/forget)"
            )

    def _stage(self, staged: StagedWeights | None) -> None:
        """Set the open update (None for no update) and restart its lease."""
        self.staged = staged
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
        if staged is not None:
            staged.pause = self._runner.num_pauses if self._runner.engine.paused else staged.pause
            self._lease = asyncio.get_running_loop().call_later(LEASE_S * staged.patience, self._expire)

    def _expire(self) -> None:
        staged = self.staged
        if staged is None:
            return
        if self._lock.locked():  # it is being committed or replaced: check again later
            self._lease = asyncio.get_running_loop().call_later(LEASE_S * staged.patience, self._expire)
            return
        self.staged = None
        self._end_pause_of(staged)

    def _end_pause_of(self, staged: StagedWeights) -> None:
        """End the pause during which `staged` was staged, unless it has ended or another pause has begun since."""
        if staged.pause == self._runner.num_pauses and self._runner.engine.paused:
            self._ending_pause = asyncio.get_running_loop().create_task(self._runner.continue_generation())


def _base_of(adapters: AdaptersForm) -> tuple[str, frozenset[str]]:
    return "" if adapters.base is None else adapters.base.fingerprint, frozenset(adapters.targets)
