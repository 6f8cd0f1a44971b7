"""The HTTP routes of the rollout server: SGLang's `/generate`, readiness with identity, and weights transactions.

The server answers bad input with 4xx before it reaches the engine. `/metrics` is for Prometheus. `/openapi.json`
describes all paths of the server, including those of other protocols.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.deadline import deadline
from penstock.rollout import bodies, http
from penstock.rollout.app import TAKE_CLAIM, ApiKeys, App, check_claim, openapi
from penstock.rollout.claim import Claim
from penstock.rollout.generation import Generation
from penstock.rollout.metrics import ServerMetrics
from penstock.rollout.runner import EngineRunner
from penstock.rollout.slot_engine import ALL_MEMORY, MemoryTag
from penstock.rollout.text import Tokenizer
from penstock.rollout.update import CommittedWeights, WeightsUpdate
from penstock.types import NO_VERSION, WeightsHandle, WeightsTransport

MEMORY_TIMEOUT_S = 60.0
"""Time limit for the engine to end its step and free or allocate memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The identity of a server process: the run it belongs to, and a value that distinguishes this run from others of
    the same id. Every holder of the generation key may see both."""

    run_id: str
    nonce: str


def create_app(
    runner: EngineRunner,
    *,
    identity: Identity,
    update: WeightsUpdate,
    tokenizer: Tokenizer | None = None,
    keys: ApiKeys | None = None,
    claim: Claim | None = None,
    transport: Callable[[], WeightsTransport] = lambda: "shared_memory",
    foreign: Sequence[http.Surface] = (),
) -> App:
    """Return the application around a started `runner`.

    `claim` is the server's current claim; without it, the server is unclaimed. `transport` tells how the latest
    weights came. `foreign` adds routes of other protocols."""
    keys, claim = keys or ApiKeys(), claim or Claim()

    async def show_metrics(request: Request) -> Response:
        """Return metrics for Prometheus."""
        text, content_type = metrics.text(request.headers.get("accept", ""))
        return Response(text, headers={"Content-Type": content_type})

    async def show_schema(request: Request) -> Response:
        """Return this description."""
        return Response(schema, media_type="application/json")

    own = RolloutServer(
        runner=runner, identity=identity, update=update, keys=keys, claim_state=claim, transport=transport
    )
    surfaces: list[http.Surface] = [Generation(runner, tokenizer), own, *foreign]
    routes = [
        *(route for surface in surfaces for route in surface.routes()),
        http.Route("/metrics", ["GET"], show_metrics, "generation", reply=None),
        http.Route("/openapi.json", ["GET"], show_schema, "generation", reply=dict[str, Any]),
    ]
    schema = bodies.encode(openapi(routes, keys))
    app = App(routes, keys, claim)
    metrics = ServerMetrics(runner, app.responses)
    return app


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutServer:
    """The endpoints for readiness, claims, weights and memory."""

    runner: EngineRunner
    identity: Identity
    update: WeightsUpdate
    keys: ApiKeys
    claim_state: Claim
    transport: Callable[[], WeightsTransport]

    def routes(self) -> list[http.Route]:
        weights = partial(http.Route, methods=["POST"], reply=bodies.WeightsReply)
        state = partial(http.Route, methods=["POST"], reply=bodies.StateReply)
        memory = partial(http.Route, methods=["GET", "POST"], body=bodies.MemoryBody, reply=bodies.StateReply)
        abort = partial(http.Route, access="generation", body=bodies.AbortBody, reply=bodies.AbortReply)
        return [
            abort("/abort_request", ["POST"], self.abort_request),
            http.Route("/health", ["GET"], self.health, "public", reply=dict[str, str]),
            http.Route("/ready", ["GET"], self.ready, "generation", reply=bodies.Ready, error=dict[str, Any]),
            state(TAKE_CLAIM, endpoint=self.claim, body=bodies.ClaimBody),
            weights("/weights/begin", endpoint=self.begin_weights, body=WeightsHandle),
            weights("/weights/commit", endpoint=self.commit_weights, body=bodies.CommitBody),
            state("/weights/forget", endpoint=self.forget_weights),
            state("/weights/abort", endpoint=self.abort_weights),
            memory("/release_memory_occupation", endpoint=self.release),
            memory("/resume_memory_occupation", endpoint=self.resume),
        ]

    async def abort_request(self, request: Request) -> Response:
        """Abort one request, or as control all requests, or all with an id prefix: the requests of any client."""
        body = await http.read_body(request, bodies.AbortBody)
        if body.rid_prefix is not None and body.rid:
            raise ValueError("give `rid` or `rid_prefix`, not both")
        if body.abort_all or body.rid_prefix is not None:
            self.keys.check("control", request)
            check_claim(self.claim_state, request)
            prefix = "" if body.abort_all else body.rid_prefix or ""
            return http.answer(bodies.AbortReply(aborted=self.runner.abort_all(prefix), unknown=[]))
        found = self.runner.abort(body.rid)
        return http.answer(bodies.AbortReply(aborted=int(found), unknown=[] if found or not body.rid else [body.rid]))

    async def health(self, request: Request) -> Response:
        """Return whether the engine's thread is alive. It takes constant time under any load."""
        error = self.runner.error
        return http.answer({"status": "ok"}) if error is None else http.answer(http.error_object(str(error)), 500)

    async def ready(self, request: Request) -> Response:
        """Return the server's state and identity. A ready server has weights and is neither paused nor released."""
        version = self.runner.policy_version
        engine = self.runner.engine
        state = "paused" if engine.paused else "released" if engine.released else "serving"
        if version == NO_VERSION:
            state = "waiting_for_weights"
        if self.runner.error is not None:
            state = "dead"
        identity = self.identity
        reply = bodies.Ready(run_id=identity.run_id, nonce=identity.nonce, policy_version=version, state=state)
        return http.answer(reply, 200 if state == "serving" else 503)

    async def claim(self, request: Request) -> Response:
        """Claim the server for one run, as long as the run renews its claim. A refusal names the other run."""
        body = await http.read_body(request, bodies.ClaimBody)
        self.claim_state.take(body.run_id, body.nonce, lease_s=body.lease_s, now=asyncio.get_running_loop().time())
        return http.answer(bodies.StateReply(state="claimed" if body.lease_s else "free"))

    async def begin_weights(self, request: Request) -> Response:
        """Map and verify weights. The served weights do not change yet."""
        try:
            handle = await http.read_body(request, WeightsHandle)
        except msgspec.DecodeError as error:
            raise http.Refused(400, f"{http.HANDLE_FORMAT} ({error})") from None
        return _answer_weights("staged", await self.update.begin(handle), self.transport())

    async def commit_weights(self, request: Request) -> Response:
        """Serve the staged weights. With `drain`, the wait for running samples ends if the client disconnects."""
        body = await http.read_body(request, bodies.CommitBody)
        update = self.update.commit(body.policy_version, mode=body.mode, fingerprint=body.fingerprint)
        served = await (http.unless_disconnected(request.receive, update) if body.mode == "drain" else update)
        return _answer_weights("committed", served, self.transport())

    async def forget_weights(self, request: Request) -> Response:
        """Reset the server for a run that takes it over, from any state that an earlier run left. Version numbers start
        again, a pause ends, and released memory is allocated. Nothing is served until the run's first weights."""
        await self.update.forget()
        return http.answer(bodies.StateReply(state="forgotten"))

    async def abort_weights(self, request: Request) -> Response:
        """Drop the staged weights."""
        await self.update.abort()
        return http.answer(bodies.StateReply(state="aborted"))

    async def release(self, request: Request) -> Response:
        """Free memory: of the weights, which move to the host, of the KV cache, and of CUDA graphs. Running requests
        end with their tokens so far, later requests with none. Released memory may be released again."""
        return await self._change_memory(request, self.runner.release, "released")

    async def resume(self, request: Request) -> Response:
        """Allocate memory again. Once no part is released, requests are served again."""
        return await self._change_memory(request, self.runner.resume, "resumed")

    async def _change_memory(
        self, request: Request, change: Callable[[Collection[MemoryTag]], Awaitable[None]], state: str
    ) -> Response:
        tags = (await http.read_body(request, bodies.MemoryBody)).tags or ALL_MEMORY
        async with deadline(MEMORY_TIMEOUT_S, waiter="server", resource="a change of memory", holder="the engine"):
            await change(tags)
        return http.answer(bodies.StateReply(state=state))


def _answer_weights(state: str, weights: CommittedWeights | WeightsHandle, transport: WeightsTransport) -> Response:
    version, fingerprint = weights.policy_version, weights.fingerprint
    reply = bodies.WeightsReply(state=state, policy_version=version, fingerprint=fingerprint, transport=transport)
    return http.answer(reply)
