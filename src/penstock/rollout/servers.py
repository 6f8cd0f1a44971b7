"""All rollout servers of a run as one: the least loaded answers, an episode stays where it was, and what a dead server
was generating is asked of another.

A server is lost when it gives no answer or fails by itself (5xx), or when nothing has come from it for a while and it
does not say that it lives. It is asked again, after a while, whether it serves; until then others are used. If all are
lost, the next call tries them all, and its error is the last one's.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

from penstock.deadline import Stalled
from penstock.rollout.client import RolloutClient
from penstock.rollout.session import HttpSession, RolloutError
from penstock.rollout.sglang import SGLangClient
from penstock.rollout.vllm import VllmClient
from penstock.types import EpisodeId, Sampling, Segment, SegmentGrant, UpdateMode, WeightsHandle

Engine = Literal["penstock", "sglang", "vllm"]

RETRY_S = 5.0
"""Until a lost server is asked again."""
SILENCE_S = 10.0
"""Without an answer, after which a server is asked whether it lives: one that hangs would cost a whole timeout."""
SLACK = 32
"""Samples by which an episode's server may be busier than the least loaded one: a cached prefix is worth that much."""
REMEMBERED_EPISODES = 16384


class ServerClient(Protocol):
    """One server, whatever its engine."""

    url: str

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]: ...

    async def alive(self) -> None:
        """Raises unless it answers; bounded by seconds."""
        ...

    async def served_version(self) -> int:
        """Raises unless it can generate with published weights; bounded by seconds."""
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


def connect(engine: Engine, url: str, session: HttpSession, *, update_mode: UpdateMode | None = None) -> ServerClient:
    """The client of one server. `update_mode` None leaves it to the client."""
    how = {} if update_mode is None else {"update_mode": update_mode}
    return CLIENTS[engine](url.rstrip("/"), session, **how)


T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Member:
    """A server as this process sees it."""

    client: ServerClient
    load: int = 0
    """Our samples in flight."""
    lost_at: float | None = None
    heard_at: float = 0.0
    """When it answered last."""


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
        if not urls:
            raise ValueError("no rollout servers given")
        self._session = HttpSession(api_key=api_key, timeout_s=timeout_s)
        self._members = [Member(connect(engine, url, self._session, update_mode=update_mode)) for url in urls]
        self._homes = Homes()
        self._tell_lost = lost

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        """On the episode's own server or the least loaded one; if that is lost meanwhile, on another, from the same
        tokens. Raises what the last of them said, or at once what is the request's own fault."""
        tried: list[Member] = []
        while True:
            member = await self._choose(grants[0].episode, tried)
            member.load += len(grants)
            try:
                segments = await self._while_alive(member, member.client.generate(prompt_ids, grants, sampling, seeds))
            except (RolloutError, Stalled) as error:
                tried.append(member)
                if not _is_lost(error):
                    raise
                self._lose(member, error)
                if len(tried) == len(self._members):
                    raise
            else:
                if len(self._members) > 1:
                    self._homes.set([grant.episode for grant in grants], member)
                return segments
            finally:
                member.load -= len(grants)

    async def _while_alive(self, member: Member, answer: Coroutine[Any, Any, T]) -> T:
        """The answer, as long as its server lives. Raises what `alive` raises."""
        now = asyncio.get_running_loop().time
        asked_at, task = now(), asyncio.ensure_future(answer)
        try:
            while not (await asyncio.wait([task], timeout=SILENCE_S))[0]:
                if now() - max(asked_at, member.heard_at) >= SILENCE_S:
                    await member.client.alive()
                    member.heard_at = now()
            member.heard_at = now()
            return task.result()
        finally:
            task.cancel()

    async def _choose(self, episode: EpisodeId, tried: Sequence[Member]) -> Member:
        left = [member for member in self._members if member not in tried]
        usable = [member for member in left if member.lost_at is None or await self._is_back(member)] or left
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
            await member.client.served_version()
        except (RolloutError, Stalled):
            return False
        member.lost_at = None
        return True

    def _lose(self, member: Member, error: Exception) -> None:
        if member.lost_at is None:
            self._tell_lost(member.client.url, str(error))
        member.lost_at = asyncio.get_running_loop().time()

    async def forget_weights(self) -> None:
        """This run numbers the versions from now on. For servers that were there before it."""
        await self._each(self._members, lambda client: client.forget_weights())

    async def update_weights(self, handle: WeightsHandle) -> None:
        """Stage everywhere, then commit everywhere. If staging is refused anywhere, no server changes. A server that
        does not answer is left behind; it gets the next weights if it is back by then."""
        members = await self._each(self._members, lambda client: client.alive())
        try:
            members = await self._each(members, lambda client: client.begin_weights(handle))
        except (RolloutError, TimeoutError):
            await asyncio.gather(*(member.client.abort_weights() for member in members), return_exceptions=True)
            raise
        for member in await self._each(members, lambda client: client.commit_weights(handle)):
            member.lost_at = None

    async def release(self) -> None:
        """Every server gives way to the trainer."""
        await self._each(self._members, lambda client: client.release())

    async def resume(self) -> None:
        """Every server generates again."""
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
