"""All rollout servers of a run behind one client.

The least loaded server answers, and an episode stays on its server. Requests of a dead server go to another one.

A server counts as lost in three cases:

* It gives no answer.
* It fails by itself (5xx), or gives a reply that its protocol does not know.
* It has been silent for a while and fails its probes. A weights update then gives up on it. A generation request gives
  up on it only if other servers are usable.

The client probes a lost server after a while, and uses the other servers until it serves again. While all servers are
lost, a call waits for the first server to come back. The caller's deadline limits this wait.

A server may be alive, take weights, and still generate nothing: it lets requests wait until their deadline, or aborts
all of them, while other servers generate. Then it counts as idle. For a while, which doubles each time, the other
servers get its requests. After that, the idle server gets one request at a time until it generates again.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar

from penstock.deadline import Stalled, holding, report, warn_if_stalled
from penstock.ports.training import TrainerLost, WeightsSender
from penstock.rollout.client import BEGIN_SLACK_S, COMMIT_S, CONFLICT, Claimed, RolloutClient, ServerClient
from penstock.rollout.session import HttpSession, RolloutError
from penstock.rollout.sglang_client import SGLangClient
from penstock.rollout.vllm_client import VllmClient
from penstock.rollout.weights_group import UNREACHABLE_WEIGHTS
from penstock.routed_experts import Routing
from penstock.samples import Segment
from penstock.types import (
    NO_VERSION,
    RECEIVE_S,
    DirectWeights,
    EpisodeId,
    Sampling,
    SegmentGrant,
    UpdateMode,
    WeightsHandle,
    WeightsTransport,
)

T = TypeVar("T")
Engine = Literal["penstock", "sglang", "vllm"]

RETRY_S = 5.0
"""Pause before a lost server is probed again."""
POLL_S = 0.5
"""Pause between two checks for a usable server, while all are lost."""
ALL_LOST_S = 20.0
"""Time with all servers lost before a stall is reported. A killed server is back by then."""
SILENCE_S = 10.0
"""Silence after which the client probes a server. Without the probe, a hung server would cost a whole deadline."""
CLEANUP_S = 10.0
"""Time limit for a cancelled call to clean up before the next call begins."""
MAX_FAILED_PROBES = 2
"""Consecutive failed probes after which a server counts as not alive."""
MAX_DOUBLINGS = 6
"""Number of times that the wait of `Backoff` doubles."""
OWN_FAULTS = (401, 403, 404, 405, 408, UNREACHABLE_WEIGHTS, 429)
"""Statuses of the range 4xx that say nothing about the request."""
IDLE_S = 10.0
"""Time without a token, while other servers generate, after which a server counts as idle."""
ABORT_PAUSE_S, MAX_ABORT_PAUSE_S = 0.001, 0.5
"""The client waits before it returns an empty answer, so that its caller does not ask again at once. The wait is the
first number times the number of empty answers in a row, and at most the second number."""
LOAD_SLACK = 32
"""Samples that an episode's server may have in excess of the least loaded server. A cached prefix is worth this
much."""
REMEMBERED_EPISODES = 16384
RECOVERY_S = 300.0
"""How long a weights update waits for a server if all are lost. It is longer than a restart with its pauses."""


ClientCall = Callable[[ServerClient], Coroutine[Any, Any, None]]

CLIENTS: dict[Engine, type[ServerClient]] = {"penstock": RolloutClient, "sglang": SGLangClient, "vllm": VllmClient}


def connect(
    engine: Engine,
    url: str,
    session: HttpSession,
    update_mode: UpdateMode | None = None,
    routing: Routing | None = None,
    *,
    seeded: bool = False,
    keeps_weights: bool = False,
    takes_turns: bool = False,
    serves_adapters: bool = False,
    direct_weights: DirectWeights | None = None,
    sender: WeightsSender | None = None,
) -> ServerClient:
    """Return the client of one server. With `update_mode` None, the client's default applies. `routing`, `seeded`,
    `keeps_weights`, `takes_turns`, `serves_adapters`, `direct_weights` and `sender`: see `ServerClient`."""
    client = CLIENTS[engine](url.rstrip("/"), session, update_mode=update_mode)
    client.routing, client.seeded, client.keeps_weights = routing, seeded, keeps_weights
    client.takes_turns, client.serves_adapters = takes_turns, serves_adapters
    client.direct_weights, client.sender = direct_weights, sender
    return client


@dataclass(slots=True)
class Backoff:
    """Waits after consecutive failures: 1, 2, 4, ... units, of calls or of seconds."""

    num_failed: int = 0
    retry_at: float = 0.0
    """Number of the call, or time, at which the next attempt is due."""

    def fail(self, now: float, *, unit: float = 1.0) -> None:
        """Record a failure at `now`."""
        self.retry_at = now + unit * 2 ** min(self.num_failed, MAX_DOUBLINGS)
        self.num_failed += 1

    def is_due(self, now: float) -> bool:
        return now >= self.retry_at

    def reset(self) -> None:
        """Record a success."""
        self.num_failed, self.retry_at = 0, 0.0


@dataclass(slots=True, eq=False)
class ServerState:
    """The state of a server, as this process sees it."""

    client: ServerClient
    load: int = 0
    """Number of this process's samples that the server is generating."""
    lost_at: float | None = None
    answered_at: float = 0.0
    """Time of the server's last answer."""
    probing: bool = False
    failed_probes: int = 0
    """Number of consecutive failed probes."""
    refuses: bool = False
    """It refused weights that another server took. It stays lost until it takes the next ones."""
    updates: Backoff = field(default_factory=Backoff)
    """In weights updates. Each failure may take as long as an update may."""
    memory: Backoff = field(default_factory=Backoff)
    """In calls that release or resume memory. Each failure may take as long as a call may."""
    idle: Backoff = field(default_factory=Backoff)
    """In seconds. A failure is that the server was idle, and a success an answer with tokens."""
    tokens_at: float = 0.0
    """Time of its last answer with tokens."""
    num_empty: int = 0
    """Number of answers without tokens since then."""
    empty_since: float = 0.0
    """Time of the first of these answers."""
    newest: int = NO_VERSION
    """Version of its last answer. A server that comes back with an older version was restarted."""


class Servers:
    """`ports.PolicyClient` and `ports.RolloutServers` for all servers of a run."""

    def __init__(
        self,
        urls: Sequence[str],
        *,
        engine: Engine = "penstock",
        update_mode: UpdateMode | None = None,
        api_key: str | None = None,
        claim: str | None = None,
        timeout_s: float = 120.0,
        lost: Callable[[str, str], object] = lambda url, why: None,
        routing: Routing | None = None,
        seeded: bool = False,
        keeps_weights: bool = False,
        takes_turns: bool = False,
        serves_adapters: bool = False,
        direct_weights: DirectWeights | None = None,
        sender: WeightsSender | None = None,
    ) -> None:
        """`claim`: nonce of the run, for a process that controls its servers. `lost` is called with the URL of a lost
        server and the reason. With `update_mode` None, the engine client's default applies. `routing`: what the
        policy's routers record; None: nothing. `seeded`, `keeps_weights`, `takes_turns`, `serves_adapters`,
        `direct_weights`, `sender`: see `ServerClient`."""
        self._session = HttpSession(api_key=api_key, claim=claim, timeout_s=timeout_s)
        self._connect = partial(
            connect,
            engine,
            session=self._session,
            update_mode=update_mode,
            routing=routing,
            seeded=seeded,
            keeps_weights=keeps_weights,
            takes_turns=takes_turns,
            serves_adapters=serves_adapters,
            direct_weights=direct_weights,
            sender=sender,
        )
        self._servers = [ServerState(self._connect(url)) for url in urls]
        self._last_server: OrderedDict[EpisodeId, ServerState] = OrderedDict()
        """The last server of each recent episode."""
        self._on_lost = lost
        self._updating = asyncio.Lock()
        self._latest: WeightsHandle | None = None
        self._receive_s = RECEIVE_S
        """The longest time that servers had for weights so far."""
        self._num_updates = self._num_memory_calls = 0
        self._any_away = False
        """Whether a server gave no answer when the last update began. It may come back."""
        self._released = False

    def _exclusive(self) -> AbstractAsyncContextManager[None]:
        """Return a context manager that admits one change of weights or memory at a time."""
        longest_s = RECOVERY_S + self._receive_s + BEGIN_SLACK_S + max(COMMIT_S.values())
        resource, holder = "a change of weights or memory", "another change"
        return holding(self._updating, longest_s, waiter="rollout client", resource=resource, holder=holder)

    def set_urls(self, urls: Sequence[str]) -> None:
        """Set the current servers. A new server is used once it serves weights. A removed one gets no more calls."""
        known = {server.client.url: server for server in self._servers}
        due = asyncio.get_running_loop().time() - RETRY_S
        self._servers = [known.get(url.rstrip("/")) or ServerState(self._connect(url), lost_at=due) for url in urls]

    async def bring_up(self, url: str) -> None:
        """Give a restarted server the weights that the other servers serve. While the trainer has the device, a server
        without room for weights gets the next ones. Raises RolloutError or Stalled if the server is gone again."""
        async with self._exclusive():
            server = next((server for server in self._servers if server.client.url == url.rstrip("/")), None)
            if server is None:
                raise RolloutError(url, "was replaced by another server before it received weights")
            if self._latest is not None and not (self._released and server.client.sleeps):
                await self._call(server, partial(_restage, handle=self._latest))
            if self._released:
                await self._call(server, lambda client: client.release())
            server.memory.reset()
            self._mark_usable(server)

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        """Generate on the episode's last server or on the least loaded one. Return one segment per grant.

        If the server is lost meanwhile, another server gets the same request. So does another server if one refuses the
        request. If all usable servers refuse, the first refusal is raised; if one answers, those that refused count as
        lost. If every server has failed, and the last one is alive and answered 500 or what its protocol does not know,
        its error is raised."""
        tried: list[ServerState] = []
        refusals: list[tuple[ServerState, RolloutError | Stalled]] = []
        while True:
            server = await self._choose_server(grants[0].episode, tried)
            try:
                call = server.client.generate(prompt_ids, grants, sampling, seeds)
                segments = await self._generate_on(server, grants, call)
            except (RolloutError, Stalled) as error:
                tried.append(server)
                if _is_lost(error):
                    self._mark_lost(server, error)
                else:
                    refusals.append((server, error))
                if refusals and all(each in tried or each.lost_at is not None for each in self._servers):
                    raise refusals[0][1] from None
                if all(each in tried for each in self._servers):
                    if _is_repeatable(error) and await _is_alive(server):
                        raise
                    tried.clear()
            else:
                for refusing, why in refusals:
                    self._mark_lost(refusing, why)
                for grant in grants:
                    self._last_server[grant.episode] = server
                    self._last_server.move_to_end(grant.episode)
                while len(self._last_server) > REMEMBERED_EPISODES:
                    self._last_server.popitem(last=False)
                return segments

    async def _generate_on(
        self, server: ServerState, grants: Sequence[SegmentGrant], call: Coroutine[Any, Any, list[Segment]]
    ) -> list[Segment]:
        """Return the server's answer, and watch the server meanwhile."""
        server.load += len(grants)
        began = asyncio.get_running_loop().time()
        try:
            segments = await self._watch(server, call, partial(self._on_unresponsive, server, grants[0].episode))
            versions = (span.policy_version for segment in segments for span in segment.spans[-1:])
            server.newest = max(versions, default=server.newest)
            await self._take_note(server, has_tokens=any(segment.token_ids for segment in segments))
            return segments
        except asyncio.CancelledError:
            if server.failed_probes:  # the caller's deadline passed while the server failed probes
                self._mark_lost(server, RolloutError(server.client.url, "did not answer before the request's deadline"))
            elif self._is_idle(server, began):
                self._avoid(server)
                why = "did not answer before the request's deadline, while other servers generate"
                self._mark_lost(server, RolloutError(server.client.url, why))
            raise
        finally:
            server.load -= len(grants)

    async def _take_note(self, server: ServerState, *, has_tokens: bool) -> None:
        """Record whether an answer has tokens. Raises RolloutError if the server aborts all requests, while others
        generate."""
        now = asyncio.get_running_loop().time()
        if has_tokens:
            server.tokens_at, server.num_empty = now, 0
            server.idle.reset()
            return
        if not server.num_empty:
            server.empty_since = now
        server.num_empty += 1
        if self._is_idle(server, server.empty_since):
            self._avoid(server)
            raise RolloutError(server.client.url, "aborts every request, while other servers generate")
        await asyncio.sleep(min(ABORT_PAUSE_S * server.num_empty, MAX_ABORT_PAUSE_S))

    def _is_idle(self, server: ServerState, since: float) -> bool:
        """Return whether the server has generated nothing since `since`, for at least `IDLE_S`, while another server
        has."""
        others = (other for other in self._servers if other is not server and other.lost_at is None)
        has_waited = asyncio.get_running_loop().time() - since >= IDLE_S
        return has_waited and server.tokens_at < since and any(other.tokens_at > since for other in others)

    def _avoid(self, server: ServerState) -> None:
        """Send the requests of an idle server to other servers for a while."""
        now = asyncio.get_running_loop().time()
        if server.idle.is_due(now):  # else another request has recorded it already
            server.idle.fail(now, unit=2 * RETRY_S)

    async def _watch(
        self, server: ServerState, call: Coroutine[Any, Any, T], on_unresponsive: Callable[[float], None]
    ) -> T:
        """Return the result of `call`. After each silence in which the server has failed `MAX_FAILED_PROBES` probes in
        a row, call `on_unresponsive` with the seconds since the call began."""
        now = asyncio.get_running_loop().time
        started_at, task = now(), asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait([task], timeout=SILENCE_S))[0]:
                if now() - max(started_at, server.answered_at) >= SILENCE_S:
                    await self._probe(server)
                if server.failed_probes >= MAX_FAILED_PROBES and not task.done():
                    on_unresponsive(now() - started_at)
            server.answered_at, server.failed_probes = now(), 0
            return task.result()
        finally:
            if not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=CLEANUP_S)

    def _on_unresponsive(self, server: ServerState, episode: EpisodeId, waited_s: float) -> None:
        """Handle a server that has failed its probes.

        Raises RolloutError if another server is usable, or if this server no longer belongs to the run. Otherwise the
        server may recover, so only report the stall."""
        others = [other for other in self._servers if other is not server]
        if any(other.lost_at is None for other in others) or server not in self._servers:
            _raise_unresponsive(server, waited_s)
        report(waiter=str(episode), resource="an answer", holder=server.client.url, seconds=waited_s)

    async def _probe(self, server: ServerState) -> None:
        """Probe a server and count failed probes. Only one of the waiting calls probes it at a time."""
        if server.probing:
            return
        server.probing = True
        try:
            if await _is_alive(server):
                server.answered_at, server.failed_probes = asyncio.get_running_loop().time(), 0
            else:
                server.failed_probes += 1
        finally:
            server.probing = False

    async def _choose_server(self, episode: EpisodeId, tried: Sequence[ServerState]) -> ServerState:
        usable = await self._usable(tried)
        if not usable and not tried:
            with warn_if_stalled(ALL_LOST_S, waiter=str(episode), resource="a server that serves", holder=self._names):
                while not usable:
                    await asyncio.sleep(POLL_S)
                    usable = await self._usable(tried)
        now = asyncio.get_running_loop().time()
        generating = [s for s in usable if not s.idle.num_failed or (s.idle.is_due(now) and not s.load)]
        usable = generating or usable or [server for server in self._servers if server not in tried]
        least = min(usable, key=lambda server: server.load)
        last = self._last_server.get(episode)
        return last if last in usable and last.load <= least.load + LOAD_SLACK else least

    async def _usable(self, tried: Sequence[ServerState]) -> list[ServerState]:
        left = [server for server in self._servers if server not in tried]
        return [server for server in left if server.lost_at is None or await self._is_back(server)]

    def _names(self) -> str:
        return ", ".join(server.client.url for server in self._servers) or "no server: the run has none"

    async def _is_back(self, server: ServerState) -> bool:
        """Return whether a lost server serves again. One call at a time probes it, at most every `RETRY_S`."""
        now = asyncio.get_running_loop().time()
        if server.lost_at is None or server.refuses or now - server.lost_at < RETRY_S:
            return server.lost_at is None
        server.lost_at = now
        try:
            if await server.client.served_version() < server.newest:
                return False
        except (RolloutError, Stalled):
            return False
        self._mark_usable(server)
        return True

    def _mark_usable(self, server: ServerState) -> None:
        server.lost_at, server.failed_probes, server.refuses = None, 0, False
        server.updates.reset()

    def _mark_lost(self, server: ServerState, error: BaseException) -> None:
        if server.lost_at is None:
            self._on_lost(server.client.url, str(error))
        server.lost_at = asyncio.get_running_loop().time()

    async def claimed(self) -> list[Claimed]:
        """Return what each server says that it serves."""
        return await asyncio.gather(*(server.client.claimed() for server in self._servers))

    async def forget_weights(self) -> None:
        """Reset version numbers on all servers, which may have served an earlier run. A server that fails is lost.
        Raises RolloutError or Stalled if all fail."""
        await self._call_all(self._servers, lambda client: client.forget_weights())

    async def update_weights(self, handle: WeightsHandle) -> Mapping[WeightsTransport, int]:
        """Stage weights on all servers, then commit on all servers. Return the number of servers by transport.

        If all servers refuse staging, no server changes. A server that refuses while another one accepts, or that does
        not answer, is skipped. It gets the next weights if it is back by then. If no server answers, the first server
        that comes back gets these weights. After `RECOVERY_S` without a server, the last error is raised. Raises
        `TrainerLost` if no answering server can fetch the weights."""
        self._receive_s = max(self._receive_s, handle.receive_limit_s)
        async with self._exclusive():
            limit = asyncio.get_running_loop().time() + RECOVERY_S
            while True:
                try:
                    updated = await self._update_weights(handle)
                    break
                except (RolloutError, Stalled) as error:
                    is_unreachable = isinstance(error, RolloutError) and error.status == UNREACHABLE_WEIGHTS
                    if is_unreachable and not self._any_away:
                        raise TrainerLost(str(error)) from None
                    is_final = not _is_lost(error) or _is_unfit(error)
                    if asyncio.get_running_loop().time() > limit or (is_final and not self._any_away):
                        raise
                await asyncio.sleep(POLL_S)
            self._latest, self._released = handle, False  # a server that comes back before `resume` gets them too
            return Counter(server.client.transport for server in updated)

    async def _update_weights(self, handle: WeightsHandle) -> Sequence[ServerState]:
        """Return the updated servers."""
        self._num_updates += 1
        asked = await self._to_update()
        try:
            staged = await self._call_all(asked, lambda client: client.begin_weights(handle))
        except (RolloutError, TimeoutError):
            aborted = (self._call(server, lambda client: client.abort_weights()) for server in asked)
            await asyncio.gather(*aborted, return_exceptions=True)
            raise
        updated = await self._call_all(staged, lambda client: _commit(client, handle))
        for server in asked:
            if server in updated:
                self._mark_usable(server)
                server.memory.reset()  # it is awake, so `release` must not leave it out
            else:
                server.updates.fail(self._num_updates)
        return updated

    async def _to_update(self) -> Sequence[ServerState]:
        """Return the servers to update: the usable ones, and lost ones that answer and are due; all if there are
        none."""
        lost = [server for server in self._servers if server.lost_at is not None]
        back = await asyncio.gather(*map(_is_alive, lost))
        away = [server for server, is_alive in zip(lost, back, strict=True) if not is_alive]
        self._any_away = bool(away)
        left_out = [server for server in lost if server in away or not server.updates.is_due(self._num_updates)]
        return [server for server in self._servers if server not in left_out] or self._servers

    async def release(self) -> None:
        """Make every server free its memory for the trainer. A lost server holds no memory."""
        await self._change_memory(lambda client: client.release(), released=True)

    async def resume(self) -> None:
        """Make every server generate again. A lost server does so once `bring_up` has restored it."""
        await self._change_memory(lambda client: client.resume(), released=False)

    async def _change_memory(self, call: ClientCall, *, released: bool) -> None:
        """Call every server. It is no error if all servers are lost. A server that fails repeatedly is called less and
        less often."""
        async with self._exclusive():
            self._released = released
            self._num_memory_calls += 1
            number = self._num_memory_calls
            called = [server for server in self._servers if server.memory.is_due(number)] or self._servers
            worked: Sequence[ServerState] = ()
            try:
                worked = await self._call_all(called, call)
            except (RolloutError, Stalled) as error:
                if not _is_lost(error):
                    raise
            for server in called:
                if server in worked:
                    server.memory.reset()
                else:
                    server.memory.fail(number, unit=2)  # the next call of the same kind

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def _call(self, server: ServerState, call: ClientCall) -> None:
        """Call one server while it is alive. Raises RolloutError or Stalled."""
        await self._watch(server, call(server.client), partial(_raise_unresponsive, server))

    async def _call_all(self, servers: Sequence[ServerState], call: ClientCall) -> Sequence[ServerState]:
        """Call all servers and wait for all. Return the servers that succeeded; the others are lost. If no server
        succeeded, raises the error of one that may come back, or else the first refusal."""
        outcomes = await asyncio.gather(*(self._call(server, call) for server in servers), return_exceptions=True)
        failures = [outcome for outcome in outcomes if outcome is not None]
        refusals = [failure for failure in failures if not _is_lost(failure)]
        if bugs := [failure for failure in failures if not isinstance(failure, RolloutError | Stalled)]:
            raise bugs[0]
        if len(failures) == len(servers):
            for server, outcome in zip(servers, outcomes, strict=True):
                if outcome is not None and _is_lost(outcome):
                    self._mark_lost(server, outcome)
            hopeful = [failure for failure in failures if _is_lost(failure) and not _is_unfit(failure)]
            raise (hopeful or refusals or failures)[0]
        for server, outcome in zip(servers, outcomes, strict=True):
            if outcome is not None:
                server.refuses = not _is_lost(outcome)
                self._mark_lost(server, outcome)
        return [server for server, outcome in zip(servers, outcomes, strict=True) if outcome is None]


async def _commit(client: ServerClient, handle: WeightsHandle) -> None:
    """Commit weights. A server that restarted since staging stages them again first."""
    try:
        await client.commit_weights(handle)
    except RolloutError as error:
        if error.status != CONFLICT:
            raise
        await _restage(client, handle)


async def _restage(client: ServerClient, handle: WeightsHandle) -> None:
    await client.begin_weights(handle)
    await client.commit_weights(handle)


def _raise_unresponsive(server: ServerState, waited_s: float) -> NoReturn:
    raise RolloutError(server.client.url, f"has not answered for {waited_s:.0f} s")


async def _is_alive(server: ServerState) -> bool:
    """Return whether the server confirms that it is alive."""
    try:
        await server.client.alive()
    except (RolloutError, Stalled):
        return False
    return True


def _is_lost(error: BaseException) -> bool:
    """Return whether the server caused the error, and not the request.

    Below 400: its reply is not what its protocol says. 401 to 405: it is another server than we think, or has other
    keys. 408: the request did not arrive in time, because the connection is slow or the server was busy. 424: the
    server cannot fetch the weights. 429: it has too much to do. Stalled: it did not answer in time."""
    if isinstance(error, RolloutError):
        status = error.status
        return status is None or not 400 <= status < 500 or status in OWN_FAULTS
    return isinstance(error, Stalled)


def _is_unfit(error: BaseException) -> bool:
    """Return whether a server answered something that its protocol does not know, or refused our key or the route."""
    return isinstance(error, RolloutError) and error.status is not None and error.status <= 405


def _is_repeatable(error: RolloutError | Stalled) -> bool:
    """Return whether a living server would answer the same again."""
    return _is_unfit(error) or (isinstance(error, RolloutError) and error.status == 500)
