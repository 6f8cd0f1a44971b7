"""Weights updates as transactions: the new is staged and verified while generation goes on, then committed or dropped.

It comes whole, as a handle (`begin`), or in parts that accumulate (`chunk`, `add`) until every weight of the model is
there, or until its bracket ends (`finish`). Calls under a policy_version may be repeated. Nothing is served that was
not verified, parts of two senders never meet in one model, the served weights stay whole until a commit, and a
policy_version never goes back. What nobody goes on with is dropped when its lease ends, or when its group is joined
anew or destroyed; a pause that it was made under ends then too, since whoever paused is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager

import torch

from penstock.deadline import deadline, holding
from penstock.rollout.failures import Conflict
from penstock.rollout.runner import EngineRunner
from penstock.rollout.served import fit_tensors
from penstock.rollout.staged import Served, Staged
from penstock.types import NO_VERSION, DeviceTensors, GroupTensors, UpdateMode, WeightsHandle

RECEIVE_TIMEOUT_S = 300.0
"""For mapping and verifying one set of weights, from a cold disk if need be; or for one chunk."""
LOAD_TIMEOUT_S = 60.0
"""For the engine to end its step and copy."""
LEASE_S = 600.0
"""Between two calls of an update."""
DRAIN_TIMEOUT_S = 1800.0
"""For running samples to end."""

MAX_VERSION = 2**31 - 1
"""Trajectories keep versions as 32-bit integers."""

Tensors = Mapping[str, torch.Tensor]
Chunk = GroupTensors | DeviceTensors
Receive = Callable[[WeightsHandle], Tensors]
ReceiveChunk = Callable[[Chunk], Tensors]
Fingerprint = Callable[[Tensors], str]


def refuse_chunks(chunk: Chunk) -> Tensors:
    """A server without transports."""
    raise ValueError("this server takes weights by handle only")


class WeightsUpdate:
    """The state of the one update a server may have open. A later handle or bracket replaces whatever is open; a part
    joins its own sender's only."""

    def __init__(
        self,
        runner: EngineRunner,
        receive: Receive,
        fingerprint: Fingerprint,
        receive_chunk: ReceiveChunk = refuse_chunks,
    ) -> None:
        """`fingerprint`: of named weights, as publishers compute it."""
        self._runner = runner
        self._receive = receive
        self._receive_chunk = receive_chunk
        self._fingerprint = fingerprint
        self._lock = asyncio.Lock()
        self._draining = False
        """A commit waits for running answers to end."""
        self._staged: Staged | None = None
        self._lease: asyncio.TimerHandle | None = None
        self._lease_s = LEASE_S
        self._ending_pause: asyncio.Task[None] | None = None
        self._served: Served | None = None

    def _alone(self) -> AbstractAsyncContextManager[None]:
        """One call at a time."""
        return holding(
            self._lock, RECEIVE_TIMEOUT_S, waiter="server", resource="the weights update", holder="another call of it"
        )

    @property
    def staged(self) -> Staged | None:
        """What is there of the open update."""
        return self._staged

    async def begin(
        self, handle: WeightsHandle, *, lease_s: float = LEASE_S, bracket: Staged | None = None
    ) -> WeightsHandle:
        """Map and verify `handle` in a thread; inside a `bracket`, if one is given. Conflict unless it is newer than
        what is served. What is not committed within the lease is forgotten, as if it had been aborted."""
        if not self._is_known(handle):
            await self._stop_draining()
        async with self._alone():
            if self._is_known(handle):
                return handle
            self._check_newer(handle.policy_version)
            if bracket is None:
                self._stage(None)
            elif not self.is_open(bracket):
                raise Conflict("the update is no longer open")
            elif bracket.fingerprint is None and not bracket.untouched:
                raise self._open_already(bracket)
            async with deadline(RECEIVE_TIMEOUT_S, waiter="server", resource=handle.path, holder="its storage"):
                tensors = dict(await asyncio.to_thread(self._map, handle))
            staged = Staged(None) if bracket is None else bracket
            staged.policy_version, staged.tensors = handle.policy_version, tensors
            staged.fingerprint = handle.fingerprint
            self._stage(staged, lease_s)
            return handle

    def _is_known(self, handle: WeightsHandle) -> bool:
        known = (handle.policy_version, handle.fingerprint)
        return known == self._served or (
            self._staged is not None and known == (self._staged.policy_version, self._staged.fingerprint)
        )

    def _map(self, handle: WeightsHandle) -> Tensors:
        try:
            return self._receive(handle)
        except OSError as error:
            raise ValueError(f"cannot read the weights: {error}") from error

    async def chunk(self, policy_version: int, seq: int, source: Chunk) -> Staged:
        """Receive one part of `policy_version`, in a thread, unless it is there already. Conflict unless that is newer
        than what is served, and nobody else's update is open. What a group broadcasts is received whatever is wrong
        with it, so that its ranks stay in step. Returns the update."""
        sender = source.group_name if isinstance(source, GroupTensors) else None
        received = None if sender is None else await self._received(seq, source)
        async with self._alone():
            self._check_newer(policy_version)
            self._check_sender(sender, chunked=True)
            staged = self._staged
            if staged is None or staged.policy_version != policy_version:
                staged = Staged(policy_version, sender)
            if seq not in staged.chunks:
                if received is None:
                    received = await self._received(seq, source)
                staged.tensors |= await self._fit(received)
                staged.chunks.add(seq)
            self._stage(staged)
            return staged

    async def _received(self, seq: int, source: Chunk) -> Tensors:
        async with deadline(RECEIVE_TIMEOUT_S, waiter="server", resource=f"chunk {seq}", holder="its sender"):
            return await asyncio.to_thread(self._receive_chunk, source)

    async def open(self, *, lease_s: float = LEASE_S) -> Staged:
        """An update whose parts come by `add`, and which is served at `finish`."""
        await self._stop_draining()
        async with self._alone():
            staged = Staged(None, bracketed=True)
            self._stage(staged, lease_s)
            return staged

    async def add(self, tensors: Tensors, *, sender: str | None = None, policy_version: int | None = None) -> Staged:
        """Part of the open update, or of one that is opened here and whole as soon as every weight is there. Such a one
        starts over when a weight comes again or its policy_version changes: its sender has. Conflict if what it leaves
        behind was not whole, though the new one is begun then; and if somebody else's is open. Returns the update."""
        async with self._alone():
            if policy_version is not None:
                self._check_newer(policy_version)
            self._check_sender(sender)
            fitted = await self._fit(tensors)
            staged, left = self._staged, None
            if staged is None or self._starts_over(staged, fitted, policy_version):
                staged, left = Staged(None), staged
            staged.sender = sender
            if policy_version is not None:
                staged.policy_version = policy_version
            staged.tensors |= fitted
            self._stage(staged)
            if left is not None and (missing := self.missing(left)):
                raise Conflict(
                    f"an update starts over, but {len(missing)} weights of the one before never came, the first is "
                    f"{missing[0]}: it was not served; inside a bracket, what does not come stays as it is"
                )
            return staged

    def spoil(self, sender: str | None, reason: str) -> None:
        """A part that `sender` meant for the open update was not taken: it must not be served as if it were whole."""
        if self._staged is not None and self._staged.sender in (sender, None):
            self._staged.refused = self._staged.refused or reason

    async def drop(self, sender: str) -> None:
        """Forget what this group staged, and a bracket into which nobody has sent anything: its trainer begins anew, or
        is gone. The pause that it was made under ends."""
        if self._staged is not None and self._staged.sender == sender:
            await self._stop_draining()
        async with self._alone():
            staged = self._staged
            if staged is not None and (staged.sender == sender or staged.untouched):
                self._stage(None)
                self._end_pause_of(staged)

    def _starts_over(self, staged: Staged, fitted: Tensors, policy_version: int | None) -> bool:
        if staged.bracketed:
            return False
        renamed = policy_version is not None and staged.policy_version not in (None, policy_version)
        return renamed or not staged.tensors.keys().isdisjoint(fitted)

    async def _fit(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        engine = self._runner.engine
        async with deadline(LOAD_TIMEOUT_S, waiter="server", resource="a comparison of weights", holder="a thread"):
            return await asyncio.to_thread(fit_tensors, engine.parameters(), engine.tied_names(), tensors)

    def missing(self, staged: Staged) -> list[str]:
        """The weights that have not come yet."""
        return sorted(self._runner.engine.parameters().keys() - staged.tensors.keys())

    def _check_sender(self, sender: str | None, *, chunked: bool = False) -> None:
        """Conflict if what is open is somebody else's, or comes another way."""
        staged = self._staged
        if staged is None or (staged.untouched and not chunked):
            return
        if staged.fingerprint is not None or staged.sender != sender or bool(staged.chunks) != chunked:
            raise self._open_already(staged)

    def _open_already(self, staged: Staged) -> Conflict:
        return Conflict(f"an update of {staged.owner} is open: serve it first, or drop it with /weights/abort")

    def is_open(self, staged: Staged | None) -> bool:
        """Whether this update has neither been committed, replaced nor dropped."""
        return staged is not None and staged is self._staged

    async def finish(self, staged: Staged) -> Served | None:
        """Serve the open update, under the next policy_version unless it has one; None if there is nothing in it. What
        a bracket did not bring stays as it is. Whatever the outcome, it is closed then. Conflict if it is not open, not
        whole, or not all of what came was taken."""
        async with self._alone():
            if not self.is_open(staged):
                raise Conflict("the update is no longer open")
            try:
                if staged.untouched and staged.refused is None:
                    return None
                if staged.policy_version is None:
                    staged.policy_version = self._runner.policy_version + 1
                    _check_bound(staged.policy_version)
                if staged.bracketed:
                    self._keep_the_rest(staged)
                return await self._commit(staged, staged.policy_version, "in_place")
            finally:
                self._stage(None)

    def _keep_the_rest(self, staged: Staged) -> None:
        """What did not come is what is served already, if anything is: frozen layers. Conflict if it was refused."""
        missing = self.missing(staged)
        if missing and staged.refused is not None:
            raise Conflict(
                f"the update lacks {len(missing)} weights, the first is {missing[0]}, and part of it was refused: "
                f"{staged.refused}"
            )
        if self._runner.policy_version != NO_VERSION:
            parameters = self._runner.engine.parameters()
            staged.tensors |= {name: parameters[name] for name in missing}

    async def commit(
        self, policy_version: int, *, mode: UpdateMode = "in_place", fingerprint: str | None = None
    ) -> Served:
        """Serve what is staged from the next decode step on, or when what runs has ended (`drain`). What came in chunks
        must be whole; whatever came must have the `fingerprint` if one is given. Returns what is served, with the
        fingerprint of what the engine really holds. While one drains, whoever replaces or drops the update ends it with
        Conflict."""
        async with self._alone():
            if self._served is not None and self._served.policy_version == policy_version:
                if fingerprint not in (None, self._served.fingerprint):
                    raise Conflict(
                        f"policy_version {policy_version} is served already, with fingerprint "
                        f"{self._served.fingerprint}, not {fingerprint}"
                    )
                return self._served
            if self._staged is None or self._staged.policy_version != policy_version:
                version = "nothing" if self._staged is None else f"policy_version {self._staged.policy_version}"
                raise Conflict(f"commit of policy_version {policy_version}, but {version} is staged")
            if fingerprint is not None:
                await self._verify(self._staged, fingerprint)
            served = await self._commit(self._staged, policy_version, mode)
            self._stage(None)
            return served

    async def _verify(self, staged: Staged, fingerprint: str) -> None:
        found = staged.fingerprint or await self._fingerprint_of(staged.tensors)
        if found != fingerprint:
            raise Conflict(f"what is staged has fingerprint {found}, not {fingerprint}: a chunk is missing or differs")

    async def _commit(self, staged: Staged, policy_version: int, mode: UpdateMode) -> Served:
        if missing := self.missing(staged):
            raise Conflict(f"the update lacks {len(missing)} weights, the first is {missing[0]}")
        if mode == "drain" and self._runner.engine.paused:
            raise Conflict("generation is paused: what runs cannot end; continue, or commit in another mode")
        if self._runner.policy_version != policy_version:  # else an earlier commit ran out of time, but took effect
            self._draining = mode == "drain"
            seconds = DRAIN_TIMEOUT_S if self._draining else LOAD_TIMEOUT_S
            try:
                async with deadline(seconds, waiter="server", resource="a weights update", holder="the engine"):
                    await self._runner.load_weights(staged.tensors, policy_version, mode=mode)
            finally:
                self._draining = False
        # Beside the engine's thread, which generates on: only a commit writes weights, and this one holds the lock.
        found = await self._fingerprint_of(self._runner.engine.parameters())
        self._served = Served(policy_version, found)
        return self._served

    async def _fingerprint_of(self, tensors: Tensors) -> str:
        async with deadline(RECEIVE_TIMEOUT_S, waiter="server", resource="a fingerprint", holder="a thread"):
            return await asyncio.to_thread(self._fingerprint, tensors)

    async def rename(self, policy_version: int) -> None:
        """What came last is `policy_version`: the open bracket if there is one, else what is served. Conflict if it
        would go back."""
        _check_bound(policy_version)
        async with self._alone():
            current = self._runner.policy_version
            if self._staged is not None and self._staged.bracketed:
                self._check_newer(policy_version)
                self._staged.policy_version = policy_version
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
        """Somebody else numbers the versions from now on: what is served and staged counts no more, a pause ends, and
        released memory is taken back."""
        await self._stop_draining()
        async with self._alone():
            self._stage(None)
            async with deadline(LOAD_TIMEOUT_S, waiter="server", resource="a new owner", holder="the engine"):
                await self._runner.forget_weights()
                self._served = None
                await self._runner.resume()
                await self._runner.go_on()

    async def abort(self) -> None:
        """Forget what is staged, even if it only waits for running answers to end; the served weights stay."""
        await self._stop_draining()
        async with self._alone():
            self._stage(None)

    async def _stop_draining(self) -> None:
        """A commit that waits for running answers to end, perhaps for long, is refused: whoever calls goes first."""
        if self._draining:
            async with deadline(LOAD_TIMEOUT_S, waiter="server", resource="the end of a drain", holder="the engine"):
                await self._runner.stop_draining()

    def _check_newer(self, policy_version: int) -> None:
        if policy_version <= self._runner.policy_version:
            raise Conflict(
                f"policy_version {policy_version} is not newer than "
                f"{self._runner.policy_version}, which is being served"
            )
        _check_bound(policy_version)

    def _stage(self, staged: Staged | None, lease_s: float | None = None) -> None:
        """Keep this, and for how long from now on."""
        self._staged = staged
        if self._lease is not None:
            self._lease.cancel()
            self._lease = None
        if staged is not None:
            staged.pause = self._runner.num_pauses if self._runner.engine.paused else staged.pause
            self._lease_s = self._lease_s if lease_s is None else lease_s
            self._lease = asyncio.get_running_loop().call_later(self._lease_s, self._expire)
        else:
            self._lease_s = LEASE_S

    def _expire(self) -> None:
        staged = self._staged
        if staged is None:
            return
        if self._lock.locked():  # it is being committed or replaced: see again later
            self._lease = asyncio.get_running_loop().call_later(self._lease_s, self._expire)
            return
        self._staged = None
        self._end_pause_of(staged)

    def _end_pause_of(self, staged: Staged) -> None:
        """Unless it has ended, or somebody has paused again since."""
        if staged.pause == self._runner.num_pauses and self._runner.engine.paused:
            self._ending_pause = asyncio.get_running_loop().create_task(self._runner.go_on())


def _check_bound(policy_version: int) -> None:
    if policy_version > MAX_VERSION:
        raise ValueError(f"policy_version must be at most {MAX_VERSION}, not {policy_version}")
