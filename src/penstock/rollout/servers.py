"""All rollout servers of a run as one: the least loaded answers, an episode stays where it was, and what a dead server
was generating is asked of another.

A server is lost when it gives no answer or fails by itself (5xx), or when nothing has come from it for a while and it
does not say that it lives, while others could be asked instead, or weights are to be served. It is asked again, after a
while, whether it serves; until then others are used. While all of them are gone, a call waits for the first that is
back: its caller's deadline bounds that.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NoReturn, Protocol, TypeVar

from penstock.deadline import Stalled, holding, patient, report
from penstock.ports import TrainerLost
from penstock.rollout.client import BEGIN_S, COMMIT_S, RolloutClient
from penstock.rollout.session import HttpSession, RolloutError
from penstock.rollout.sglang import SGLangClient
from penstock.rollout.vllm import VllmClient
from penstock.types import NO_VERSION, EpisodeId, Sampling, Segment, SegmentGrant, UpdateMode, WeightsHandle

T = TypeVar("T")
Engine = Literal["penstock", "sglang", "vllm"]

RETRY_S = 5.0
"""Until a lost server is asked again."""
PATIENCE_S = 0.5
"""Between two looks for a server that is back, while all are lost."""
ALL_LOST_S = 20.0
"""All of them, before it is worth a report: one that was killed is back by then."""
SILENCE_S = 10.0
"""Without an answer, after which a server is asked whether it lives: one that hangs would cost a whole deadline."""
LEAVE_S = 10.0
"""For a call that is given up to undo what it has begun, before another begins."""
MISSED = 2
"""Times in a row that it did not say so."""
FAILED = 500
"""Status of a request that a server cannot serve. If the server says that it lives, waiting would be in vain."""
UNHEARD = 408
"""Status of a request that did not come in time: the line is slow, or the server was held up."""
CONFLICT = 409
"""Status of a commit of what is not staged, and of a claim on what is another run's."""
OUT_OF_REACH = 424
"""Status of an update with weights that the server cannot get from where they lie."""
SLACK = 32
"""Samples by which an episode's server may be busier than the least loaded one: a cached prefix is worth that much."""
REMEMBERED_EPISODES = 16384
BACK_S = 300.0
"""For a server to be back, while an update of weights finds none; longer than a restart with its pauses."""
UPDATE_S = BACK_S + BEGIN_S + max(COMMIT_S.values())
"""An update of weights takes no longer."""


class ServerClient(Protocol):
    """One server, whatever its engine."""

    url: str

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]: ...

    async def check(self) -> None:
        """Raises RolloutError that names what it lacks to be used at all."""
        ...

    async def alive(self) -> None:
        """Raises unless it answers; bounded by seconds."""
        ...

    async def served_version(self) -> int:
        """Raises unless it can generate with published weights; bounded by seconds."""
        ...

    async def claim(self, run_id: str, nonce: str, *, lease_s: float) -> None:
        """This run's from now on, unless it is another one's (RolloutError 409); `lease_s` 0 gives it up."""
        ...

    async def forget_weights(self) -> None:
        """Versions begin anew: a run takes over a server that another one may have used."""
        ...

    async def begin_weights(self, handle: WeightsHandle) -> None:
        """Stage and verify; what is served does not change."""
        ...

    async def commit_weights(self, handle: WeightsHandle) -> None:
        """Serve what was staged."""
        ...

    async def abort_weights(self) -> None:
        """Forget what was staged."""
        ...

    async def release(self) -> None: ...

    async def resume(self) -> None: ...


CLIENTS: dict[Engine, Callable[..., ServerClient]] = {
    "penstock": RolloutClient,
    "sglang": SGLangClient,
    "vllm": VllmClient,
}


def connect(engine: Engine, url: str, session: HttpSession, update_mode: UpdateMode | None = None) -> ServerClient:
    """The client of one server. `update_mode` None leaves it to the client."""
    how = {} if update_mode is None else {"update_mode": update_mode}
    return CLIENTS[engine](url.rstrip("/"), session, **how)


@dataclass(slots=True, eq=False)
class Member:
    """A server as this process sees it."""

    client: ServerClient
    load: int = 0
    """Our samples in flight."""
    lost_at: float | None = None
    heard_at: float = 0.0
    """When it answered last."""
    probing: bool = False
    missed: int = 0
    """Times in a row that it did not say that it lives."""
    newest: int = NO_VERSION
    """Version it has answered with; one that is back with an older one has been started anew."""


@dataclass(slots=True)
class Homes:
    """Which server an episode was on last."""

    _places: OrderedDict[EpisodeId, Member] = field(default_factory=OrderedDict)

    def get(self, episode: EpisodeId) -> Member | None:
        return self._places.get(episode)

    def set(self, episodes: Sequence[EpisodeId], member: Member) -> None:
        for episode in episodes:
            self._places[episode] = member
            self._places.move_to_end(episode)
        while len(self._places) > REMEMBERED_EPISODES:
            self._places.popitem(last=False)


class Servers:
    """`ports.PolicyClient` and `ports.RolloutServers`. `lost` hears the url of a server and why it counts as lost."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        engine: Engine = "penstock",
        update_mode: UpdateMode | None = None,
        api_key: str | None = None,
        timeout_s: float = 120.0,
        lost: Callable[[str, str], object] = lambda url, why: None,
    ) -> None:
        """`update_mode` None leaves it to the engine's client."""
        self._session = HttpSession(api_key=api_key, timeout_s=timeout_s)
        self._connect = partial(connect, engine, session=self._session, update_mode=update_mode)
        self._members = [Member(self._connect(url)) for url in urls]
        self._homes = Homes()
        self._tell_lost = lost
        self._updating = asyncio.Lock()
        self._latest: WeightsHandle | None = None
        self._released = False

    def _alone(self) -> AbstractAsyncContextManager[None]:
        """One update of weights at a time."""
        return holding(
            self._updating, UPDATE_S, waiter="rollout client", resource="a weights update", holder="another one"
        )

    def set_urls(self, urls: Sequence[str]) -> None:
        """The servers there are now. A new one is used once it serves weights; one that is gone is asked no more."""
        known = {member.client.url: member for member in self._members}
        now = asyncio.get_running_loop().time()
        self._members = [
            known.get(url.rstrip("/")) or Member(self._connect(url), lost_at=now - RETRY_S) for url in urls
        ]

    async def bring_up(self, url: str) -> None:
        """Give a server that was started anew the weights that the others serve. Raises RolloutError or Stalled if it
        is gone again."""
        async with self._alone():
            member = next((member for member in self._members if member.client.url == url.rstrip("/")), None)
            if member is None:
                raise RolloutError(url, "was replaced by another one before it had weights")
            if self._latest is not None:
                await self._tell(member, partial(_restage, handle=self._latest))
            if self._released:
                await self._tell(member, lambda client: client.release())
            self._find(member)

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        """On the episode's own server or the least loaded one; if that is lost meanwhile, on another, from the same
        tokens. Raises at once what is the request's own fault, and what all servers say that live and still fail."""
        tried: list[Member] = []
        while True:
            member = await self._choose(grants[0].episode, tried)
            try:
                segments = await self._ask(member, prompt_ids, grants, sampling, seeds)
            except (RolloutError, Stalled) as error:
                if not _is_lost(error):
                    raise
                self._lose(member, error)
                tried.append(member)
                if all(each in tried for each in self._members):
                    if isinstance(error, RolloutError) and error.status == FAILED and await _lives(member):
                        raise
                    tried.clear()
            else:
                if len(self._members) > 1:
                    self._homes.set([grant.episode for grant in grants], member)
                return segments

    async def _ask(
        self,
        member: Member,
        prompt_ids: Sequence[int],
        grants: Sequence[SegmentGrant],
        sampling: Sampling,
        seeds: Sequence[int],
    ) -> list[Segment]:
        """The answer, as long as its server lives."""
        asked = member.client.generate(prompt_ids, grants, sampling, seeds)
        member.load += len(grants)
        try:
            segments = await self._answer(member, asked, partial(self._despair, member, grants[0].episode))
            versions = (span.policy_version for segment in segments for span in segment.spans[-1:])
            member.newest = max(versions, default=member.newest)
            return segments
        except asyncio.CancelledError:
            if member.missed:  # whoever waited gave up on it
                self._lose(member, RolloutError(member.client.url, "was given up by whoever waited for it"))
            raise
        finally:
            member.load -= len(grants)

    async def _answer(self, member: Member, asked: Coroutine[Any, Any, T], despair: Callable[[float], None]) -> T:
        """What `asked` comes to; `despair` is called with the seconds that it has lasted each time that its server does
        not say that it lives."""
        now = asyncio.get_running_loop().time
        asked_at, task = now(), asyncio.ensure_future(asked)
        try:
            while not (await asyncio.wait([task], timeout=SILENCE_S))[0]:
                if now() - max(asked_at, member.heard_at) >= SILENCE_S:
                    await self._probe(member)
                if member.missed >= MISSED and not task.done():
                    despair(now() - asked_at)
            member.heard_at, member.missed = now(), 0
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=LEAVE_S)

    def _despair(self, member: Member, episode: EpisodeId, waited_s: float) -> None:
        """Of a server that does not say that it lives: raises if there are others, or if it is none of this run any
        more. Else it may yet come to itself."""
        if self._has_others(member) or member not in self._members:
            _give_up(member, waited_s)
        report(waiter=str(episode), resource="an answer", holder=member.client.url, seconds=waited_s)

    async def _probe(self, member: Member) -> None:
        """Whether it lives, asked by one of those who wait."""
        if member.probing:
            return
        member.probing = True
        try:
            if await _lives(member):
                member.heard_at, member.missed = asyncio.get_running_loop().time(), 0
            else:
                member.missed += 1
        finally:
            member.probing = False

    def _has_others(self, member: Member) -> bool:
        return any(other.lost_at is None for other in self._members if other is not member)

    async def _choose(self, episode: EpisodeId, tried: Sequence[Member]) -> Member:
        with patient(ALL_LOST_S, waiter=str(episode), resource="a server that serves", holder=self._names):
            while True:
                left = [member for member in self._members if member not in tried]
                usable = [member for member in left if member.lost_at is None or await self._is_back(member)]
                if usable or tried:
                    break
                await asyncio.sleep(PATIENCE_S)
        usable = usable or left
        least = min(usable, key=lambda member: member.load)
        home = self._homes.get(episode)
        return home if home in usable and home.load <= least.load + SLACK else least

    def _names(self) -> str:
        return ", ".join(member.client.url for member in self._members) or "nobody: there is none"

    async def _is_back(self, member: Member) -> bool:
        """Whether a lost server serves again; asked by one call at a time, and not too often."""
        now = asyncio.get_running_loop().time()
        if member.lost_at is None or now - member.lost_at < RETRY_S:
            return member.lost_at is None
        member.lost_at = now
        try:
            if await member.client.served_version() < member.newest:
                return False
        except (RolloutError, Stalled):
            return False
        self._find(member)
        return True

    def _find(self, member: Member) -> None:
        member.lost_at, member.missed = None, 0

    def _lose(self, member: Member, error: Exception) -> None:
        if member.lost_at is None:
            self._tell_lost(member.client.url, str(error))
        member.lost_at = asyncio.get_running_loop().time()

    async def forget_weights(self) -> None:
        """This run numbers the versions from now on. For servers that were there before it; raises unless all heard."""
        await asyncio.gather(*(member.client.forget_weights() for member in self._members))

    async def update_weights(self, handle: WeightsHandle) -> None:
        """Stage everywhere, then commit everywhere. If staging is refused anywhere, no server changes. A server that
        does not answer is left behind; it gets the next weights if it is back by then. If none answers, the first that
        is back gets these; after `BACK_S` that raises what the last one said. `TrainerLost` if nobody who answers can
        get at them."""
        async with self._alone():
            limit = asyncio.get_running_loop().time() + BACK_S
            while True:
                try:
                    await self._update_weights(handle)
                    break
                except (RolloutError, Stalled) as error:
                    if isinstance(error, RolloutError) and error.status == OUT_OF_REACH:
                        raise TrainerLost(str(error)) from None
                    if not _is_lost(error) or asyncio.get_running_loop().time() > limit:
                        raise
                await asyncio.sleep(PATIENCE_S)
            self._latest = handle

    async def _update_weights(self, handle: WeightsHandle) -> None:
        lost = [member for member in self._members if member.lost_at is not None]
        back = await asyncio.gather(*(member.client.alive() for member in lost), return_exceptions=True)
        gone = {id(member) for member, error in zip(lost, back, strict=True) if error is not None}
        members: Sequence[Member] = [member for member in self._members if id(member) not in gone] or self._members
        try:
            members = await self._each(members, lambda client: client.begin_weights(handle))
        except (RolloutError, TimeoutError):
            aborted = (self._tell(member, lambda client: client.abort_weights()) for member in members)
            await asyncio.gather(*aborted, return_exceptions=True)
            raise
        for member in await self._each(members, lambda client: _commit(client, handle)):
            self._find(member)

    async def release(self) -> None:
        """Every server gives way to the trainer; one that is lost holds nothing."""
        self._released = True
        await self._each_that_lives(lambda client: client.release())

    async def resume(self) -> None:
        """Every server generates again; one that is lost does so once it is brought up."""
        self._released = False
        await self._each_that_lives(lambda client: client.resume())

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def _each_that_lives(self, call: Callable[[ServerClient], Coroutine[Any, Any, None]]) -> None:
        """Even if that is none."""
        try:
            await self._each(self._members, call)
        except (RolloutError, Stalled) as error:
            if not _is_lost(error):
                raise

    async def _tell(self, member: Member, call: Callable[[ServerClient], Coroutine[Any, Any, None]]) -> None:
        """Call it, as long as it lives. Raises RolloutError, Stalled."""
        await self._answer(member, call(member.client), partial(_give_up, member))

    async def _each(
        self, members: Sequence[Member], call: Callable[[ServerClient], Coroutine[Any, Any, None]]
    ) -> Sequence[Member]:
        """Call all of them and wait for all; returns those that did it. Raises the first refusal, or, if nobody is
        left, why."""
        outcomes = await asyncio.gather(*(self._tell(member, call) for member in members), return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for member, outcome in zip(members, outcomes, strict=True):
            if isinstance(outcome, Exception) and _is_lost(outcome):
                self._lose(member, outcome)
        refusals = [failure for failure in failures if not (isinstance(failure, Exception) and _is_lost(failure))]
        if refusals or len(failures) == len(members):
            raise (refusals or failures)[0]
        return [member for member, outcome in zip(members, outcomes, strict=True) if outcome is None]


async def _commit(client: ServerClient, handle: WeightsHandle) -> None:
    """Also on a server that was started anew since it staged them."""
    try:
        await client.commit_weights(handle)
    except RolloutError as error:
        if error.status != CONFLICT:
            raise
        await _restage(client, handle)


async def _restage(client: ServerClient, handle: WeightsHandle) -> None:
    await client.begin_weights(handle)
    await client.commit_weights(handle)


def _give_up(member: Member, waited_s: float) -> NoReturn:
    raise RolloutError(member.client.url, f"has been silent for {waited_s:.0f} s")


async def _lives(member: Member) -> bool:
    """Whether it says so."""
    try:
        await member.client.alive()
    except (RolloutError, Stalled):
        return False
    return True


def _is_lost(error: Exception) -> bool:
    """Whether it is the server that failed, and not the request."""
    if isinstance(error, RolloutError):
        return error.status is None or error.status >= 500 or error.status in (UNHEARD, OUT_OF_REACH)
    return isinstance(error, Stalled)
