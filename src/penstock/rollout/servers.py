"""All rollout servers of a run as one: the least loaded answers, an episode stays where it was, and what a dead server
was generating is asked of another.

A server is lost when it gives no answer or fails by itself (5xx), or when nothing has come from it for a while and it
does not say that it lives, while others could be asked instead. It is asked again, after a while, whether it serves;
until then others are used. While all of them are gone, a call waits for the first that is back: its caller's deadline
bounds that.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

from penstock.deadline import Stalled
from penstock.rollout.client import RolloutClient
from penstock.rollout.session import HttpSession, RolloutError
from penstock.rollout.sglang import SGLangClient
from penstock.rollout.vllm import VllmClient
from penstock.types import NO_VERSION, EpisodeId, Sampling, Segment, SegmentGrant, UpdateMode, WeightsHandle

Engine = Literal["penstock", "sglang", "vllm"]

RETRY_S = 5.0
"""Until a lost server is asked again."""
PATIENCE_S = 0.5
"""Between two looks for a server that is back, while all are lost."""
SILENCE_S = 10.0
"""Without an answer, after which a server is asked whether it lives: one that hangs would cost a whole deadline."""
MISSED = 2
"""Times in a row that it did not say so."""
FAILED = 500
"""Status of a server that lives and cannot do what it should: waiting for it would be in vain."""
SLACK = 32
"""Samples by which an episode's server may be busier than the least loaded one: a cached prefix is worth that much."""
REMEMBERED_EPISODES = 16384


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

    def set_urls(self, urls: Sequence[str]) -> None:
        """The servers there are now. A new one is used once it serves weights; one that is gone is asked no more."""
        known = {member.client.url: member for member in self._members}
        now = asyncio.get_running_loop().time()
        self._members = [
            known.get(url.rstrip("/")) or Member(self._connect(url), lost_at=now - RETRY_S) for url in urls
        ]

    async def bring_up(self, url: str) -> None:
        """Give a server that was started anew the weights that the others serve."""
        async with self._updating:
            member = next(member for member in self._members if member.client.url == url.rstrip("/"))
            if self._latest is not None:
                await member.client.begin_weights(self._latest)
                await member.client.commit_weights(self._latest)
            if self._released:
                await member.client.release()
            self._find(member)

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        """On the episode's own server or the least loaded one; if that is lost meanwhile, on another, from the same
        tokens. Raises at once what is the request's own fault, and what servers say that live and still fail."""
        tried: list[Member] = []
        while True:
            member = await self._choose(grants[0].episode, tried)
            try:
                segments = await self._ask(member, len(grants), prompt_ids, grants, sampling, seeds)
            except (RolloutError, Stalled) as error:
                if not _is_lost(error):
                    raise
                self._lose(member, error)
                tried.append(member)
                if len(tried) == len(self._members):
                    if isinstance(error, RolloutError) and error.status == FAILED:
                        raise
                    tried.clear()
            else:
                if len(self._members) > 1:
                    self._homes.set([grant.episode for grant in grants], member)
                return segments

    async def _ask(self, member: Member, num_samples: int, *request: Any) -> list[Segment]:
        """The answer, as long as its server lives."""
        now = asyncio.get_running_loop().time
        member.load += num_samples
        asked_at, task = now(), asyncio.ensure_future(member.client.generate(*request))
        try:
            while not (await asyncio.wait([task], timeout=SILENCE_S))[0]:
                if now() - max(asked_at, member.heard_at) >= SILENCE_S:
                    await self._probe(member)
                if member.missed >= MISSED and not task.done() and self._has_others(member):
                    raise RolloutError(member.client.url, f"has been silent for {now() - asked_at:.0f} s")
            member.heard_at, member.missed = now(), 0
            segments = task.result()
            versions = (span.policy_version for segment in segments for span in segment.spans[-1:])
            member.newest = max(versions, default=member.newest)
            return segments
        except asyncio.CancelledError:
            if member.missed:  # whoever waited gave up on it
                self._lose(member, RolloutError(member.client.url, "was given up by whoever waited for it"))
            raise
        finally:
            member.load -= num_samples
            task.cancel()

    async def _probe(self, member: Member) -> None:
        """Whether it lives, asked by one of those who wait."""
        if member.probing:
            return
        member.probing = True
        try:
            await member.client.alive()
        except (RolloutError, Stalled):
            member.missed += 1
        else:
            member.heard_at, member.missed = asyncio.get_running_loop().time(), 0
        finally:
            member.probing = False

    def _has_others(self, member: Member) -> bool:
        return any(other.lost_at is None for other in self._members if other is not member)

    async def _choose(self, episode: EpisodeId, tried: Sequence[Member]) -> Member:
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
        does not answer is left behind; it gets the next weights if it is back by then."""
        async with self._updating:
            await self._update_weights(handle)
            self._latest = handle

    async def _update_weights(self, handle: WeightsHandle) -> None:
        lost = [member for member in self._members if member.lost_at is not None]
        back = await asyncio.gather(*(member.client.alive() for member in lost), return_exceptions=True)
        gone = {id(member) for member, error in zip(lost, back, strict=True) if error is not None}
        members: Sequence[Member] = [member for member in self._members if id(member) not in gone] or self._members
        try:
            members = await self._each(members, lambda client: client.begin_weights(handle))
        except (RolloutError, TimeoutError):
            await asyncio.gather(*(member.client.abort_weights() for member in members), return_exceptions=True)
            raise
        for member in await self._each(members, lambda client: client.commit_weights(handle)):
            self._find(member)

    async def release(self) -> None:
        """Every server gives way to the trainer."""
        self._released = True
        await self._each(self._members, lambda client: client.release())

    async def resume(self) -> None:
        """Every server generates again."""
        self._released = False
        await self._each(self._members, lambda client: client.resume())

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def _each(
        self, members: Sequence[Member], call: Callable[[ServerClient], Awaitable[None]]
    ) -> Sequence[Member]:
        """Call all of them and wait for all; returns those that did it. Raises the first refusal, or, if nobody is
        left, why."""
        outcomes = await asyncio.gather(*(call(member.client) for member in members), return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
        for member, outcome in zip(members, outcomes, strict=True):
            if isinstance(outcome, Exception) and _is_lost(outcome):
                self._lose(member, outcome)
        refusals = [failure for failure in failures if not (isinstance(failure, Exception) and _is_lost(failure))]
        if refusals or len(failures) == len(members):
            raise (refusals or failures)[0]
        return [member for member, outcome in zip(members, outcomes, strict=True) if outcome is None]


def _is_lost(error: Exception) -> bool:
    """Whether it is the server that failed, and not the request."""
    if isinstance(error, RolloutError):
        return error.status is None or error.status >= 500
    return isinstance(error, Stalled)
