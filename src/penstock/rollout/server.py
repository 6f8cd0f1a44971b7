"""The rollout server's HTTP surface: SGLang's `/generate`, readiness with identity, weights as transactions.

Bad input is answered with 4xx before it reaches the engine. `/metrics` is for Prometheus, `/openapi.json` describes all
paths of the server, those of other surfaces included.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.deadline import deadline
from penstock.rollout import wire
from penstock.rollout.app import App
from penstock.rollout.claim import Claim
from penstock.rollout.generation import Generation
from penstock.rollout.http import (
    HANDLE_FORMAT,
    Refused,
    Route,
    Surface,
    answer,
    error_object,
    read_body,
    unless_gone,
)
from penstock.rollout.keys import Keys
from penstock.rollout.metrics import ServerMetrics
from penstock.rollout.runner import EngineRunner
from penstock.rollout.schema import openapi
from penstock.rollout.staged import Served
from penstock.rollout.text import Tokenizer
from penstock.rollout.update import WeightsUpdate
from penstock.types import NO_VERSION, WeightsHandle

MEMORY_TIMEOUT_S = 60.0
"""For the engine to end its step and free or allocate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which process answers: the run it belongs to and the nonce it was started with."""

    run_id: str
    nonce: str


def create_app(
    runner: EngineRunner,
    *,
    identity: Identity,
    update: WeightsUpdate,
    tokenizer: Tokenizer | None = None,
    keys: Keys | None = None,
    claim: Claim | None = None,
    foreign: Sequence[Surface] = (),
) -> App:
    """The application around a started `runner`. `claim`: whose it is; free without. `foreign`: other protocols'
    paths."""
    keys = keys or Keys()
    surfaces = (RolloutServer(runner, identity, update, tokenizer, keys, claim or Claim()), *foreign)
    about = About([route for surface in surfaces for route in surface.routes()], keys)
    app = App(about.all_routes, keys)
    about.metrics = ServerMetrics(runner, app.responses)
    return app


class About:
    """What the server tells of itself."""

    def __init__(self, routes: Sequence[Route], keys: Keys) -> None:
        self.metrics: ServerMetrics
        self.all_routes = [
            *routes,
            Route("/metrics", ["GET"], self.tell_metrics, "generation", reply=None),
            Route("/openapi.json", ["GET"], self.tell_schema, "generation", reply=dict[str, Any]),
        ]
        self._schema = wire.encode(openapi(self.all_routes, keys))

    async def tell_metrics(self, request: Request) -> Response:
        """For Prometheus."""
        text, content_type = self.metrics.text(request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    async def tell_schema(self, request: Request) -> Response:
        """This description."""
        return Response(self._schema, media_type="application/json")


class RolloutServer:
    """The endpoints."""

    def __init__(
        self,
        runner: EngineRunner,
        identity: Identity,
        update: WeightsUpdate,
        tokenizer: Tokenizer | None,
        keys: Keys,
        claim: Claim,
    ) -> None:
        self._runner = runner
        self._claim = claim
        self._keys = keys
        self._identity = identity
        self._update = update
        self._generation = Generation(runner, tokenizer)

    def routes(self) -> list[Route]:
        return [
            *self._generation.routes(),
            Route(
                "/abort_request", ["POST"], self.abort_request, "generation", body=wire.AbortBody, reply=wire.AbortReply
            ),
            Route("/health", ["GET"], self.health, "everybody", reply=wire.Health),
            Route("/ready", ["GET"], self.ready, "generation", reply=wire.Ready, error=dict[str, Any]),
            Route("/claim", ["POST"], self.claim, body=wire.ClaimBody, reply=wire.MemoryReply),
            Route("/weights/begin", ["POST"], self.begin_weights, body=WeightsHandle, reply=wire.WeightsReply),
            Route("/weights/chunk", ["POST"], self.take_chunk, body=wire.ChunkBody, reply=wire.ChunkReply),
            Route("/weights/commit", ["POST"], self.commit_weights, body=wire.CommitBody, reply=wire.WeightsReply),
            Route("/weights/forget", ["POST"], self.forget_weights, reply=wire.MemoryReply),
            Route("/weights/abort", ["POST"], self.abort_weights, reply=wire.MemoryReply),
            Route(
                "/release_memory_occupation",
                ["GET", "POST"],
                self.release,
                body=wire.MemoryBody,
                reply=wire.MemoryReply,
            ),
            Route(
                "/resume_memory_occupation", ["GET", "POST"], self.resume, body=wire.MemoryBody, reply=wire.MemoryReply
            ),
        ]

    async def abort_request(self, request: Request) -> Response:
        """Ends one request, or those whose ids have a prefix; all of them only for whoever may control the server."""
        body = await read_body(request, wire.AbortBody)
        if body.abort_all:
            self._keys.check("control", request)
            return answer(wire.AbortReply(aborted=self._runner.abort_all(), unknown=[]))
        if body.rid_prefix is not None:
            if body.rid:
                raise ValueError("give `rid` or `rid_prefix`, not both")
            return answer(wire.AbortReply(aborted=self._runner.abort_all(body.rid_prefix), unknown=[]))
        found = self._runner.abort(body.rid)
        return answer(wire.AbortReply(aborted=int(found), unknown=[] if found or not body.rid else [body.rid]))

    async def health(self, request: Request) -> Response:
        """Alive: the engine's thread has not failed. Constant time, whatever the load."""
        error = self._runner.error
        return answer(wire.Health(status="ok")) if error is None else answer(error_object(str(error)), 500)

    async def ready(self, request: Request) -> Response:
        """Ready: weights are loaded, and generation is neither paused nor released. Says which process this is."""
        version = self._runner.policy_version
        engine = self._runner.engine
        state = "paused" if engine.paused else "released" if engine.released else "serving"
        if version == NO_VERSION:
            state = "waiting_for_weights"
        if self._runner.error is not None:
            state = "dead"
        identity = self._identity
        reply = wire.Ready(run_id=identity.run_id, nonce=identity.nonce, policy_version=version, state=state)
        return answer(reply, 200 if state == "serving" else 503)

    async def claim(self, request: Request) -> Response:
        """The server is one run's, as long as that renews its claim; others are told whose."""
        body = await read_body(request, wire.ClaimBody)
        self._claim.take(body.run_id, body.nonce, lease_s=body.lease_s, now=asyncio.get_running_loop().time())
        return answer(wire.MemoryReply(state="claimed" if body.lease_s else "free"))

    async def begin_weights(self, request: Request) -> Response:
        """Maps and verifies weights; nothing is served yet."""
        try:
            handle = await read_body(request, WeightsHandle)
        except msgspec.DecodeError as error:
            raise Refused(400, f"{HANDLE_FORMAT} ({error})") from None
        begun = await self._update.begin(handle)
        return _answer_weights("staged", Served(begun.policy_version, begun.fingerprint))

    async def take_chunk(self, request: Request) -> Response:
        """Answered once the chunk is there. A group's chunk is broadcast while this call is in flight."""
        body = await read_body(request, wire.ChunkBody)
        source = body.group or body.device
        if source is None or (body.group and body.device):
            raise ValueError("a chunk comes by exactly one way: `group` or `device`")
        staged = await self._update.chunk(body.policy_version, body.seq, source)
        return answer(
            wire.ChunkReply(
                policy_version=body.policy_version,
                chunks=sorted(staged.chunks),
                num_missing=len(self._update.missing(staged)),
            )
        )

    async def commit_weights(self, request: Request) -> Response:
        """Serves what has been staged; waits for running answers to end only as long as its client waits too."""
        body = await read_body(request, wire.CommitBody)
        update = self._update.commit(body.policy_version, mode=body.mode, fingerprint=body.fingerprint)
        served = await (unless_gone(request, update) if body.mode == "drain" else update)
        return _answer_weights("committed", served)

    async def forget_weights(self, request: Request) -> Response:
        """For a run that takes this server over, in whatever state an earlier one left it: its versions begin anew, a
        pause ends, released memory is taken back. Nothing is served until its first weights."""
        await self._update.forget()
        return answer(wire.MemoryReply(state="forgotten"))

    async def abort_weights(self, request: Request) -> Response:
        """Forgets what has been staged."""
        await self._update.abort()
        return answer(wire.MemoryReply(state="aborted"))

    async def release(self, request: Request) -> Response:
        """Running requests end with what they have, later ones with nothing; the KV memory is freed."""
        _check_tags(await read_body(request, wire.MemoryBody))
        async with deadline(MEMORY_TIMEOUT_S, waiter="server", resource="the release of memory", holder="the engine"):
            await self._runner.release()
        return answer(wire.MemoryReply(state="released"))

    async def resume(self, request: Request) -> Response:
        """The KV memory is taken back; requests are served again."""
        _check_tags(await read_body(request, wire.MemoryBody))
        async with deadline(MEMORY_TIMEOUT_S, waiter="server", resource="memory", holder="the engine"):
            await self._runner.resume()
        return answer(wire.MemoryReply(state="resumed"))


def _check_tags(body: wire.MemoryBody) -> None:
    if body.tags is not None and body.tags != ["kv_cache"]:
        raise ValueError(f"only the memory tagged kv_cache can be released, not {', '.join(body.tags) or 'nothing'}")


def _answer_weights(state: str, weights: Served) -> Response:
    return answer(
        wire.WeightsReply(state=state, policy_version=weights.policy_version, fingerprint=weights.fingerprint)
    )
