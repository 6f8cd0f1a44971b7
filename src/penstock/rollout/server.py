"""The rollout server's HTTP surface: SGLang's `/generate`, readiness with identity, weights as transactions.

Bad input is answered with 4xx before it reaches the engine. Bodies are decoded and encoded by msgspec in plain
Starlette routes: at hundreds of requests per second the validation of FastAPI's own routes would be the larger part
of the work.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

import msgspec
from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Scope, Send
from starlette.types import Receive as ReceiveMessage

from penstock.deadline import Stalled, deadline
from penstock.rollout import wire
from penstock.rollout.convert import Asked, is_batch, read_requests, write_growing, write_replies
from penstock.rollout.runner import EngineDead, EngineRunner, GenerationFailed
from penstock.rollout.streaming import follow, scored
from penstock.rollout.text import Tokenizer
from penstock.rollout.update import Conflict, Fingerprint, Receive, WeightsUpdate
from penstock.types import NO_VERSION, Segment, WeightsHandle

MAX_BODY_BYTES = 16 * 2**20
MEMORY_TIMEOUT_S = 60.0
"""For the engine to end its step and free or allocate."""
HANDLE_FORMAT = (
    "weights are announced by a JSON handle with policy_version, path, num_bytes and fingerprint, "
    "where path names a safetensors file in shared memory or on disk; tensors in the body are not accepted"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Which process answers: the run it belongs to and the nonce it was started with."""

    run_id: str
    nonce: str


class Refused(Exception):
    """A request turned down with `status`."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


EXPECTED: tuple[type[Exception], ...] = (
    msgspec.DecodeError,
    ValueError,
    Refused,
    Conflict,
    EngineDead,
    GenerationFailed,
    Stalled,
    ClientDisconnect,
)
"""What `_answer_error` answers; anything else is a defect, logged with its traceback."""


def create_app(
    runner: EngineRunner,
    *,
    identity: Identity,
    receive: Receive,
    fingerprint: Fingerprint,
    tokenizer: Tokenizer | None = None,
    api_key: str | None = None,
) -> FastAPI:
    """The application around a started `runner`. `receive` maps and verifies published weights, `fingerprint`
    tells what an engine holds; both run in a thread."""
    app = FastAPI(openapi_url=None)
    server = RolloutServer(runner, identity, WeightsUpdate(runner, receive, fingerprint), tokenizer)
    for path, methods, endpoint in server.routes():
        app.router.add_route(path, endpoint, methods)
    for kind in EXPECTED:
        app.add_exception_handler(kind, _answer_error)
    if api_key is not None:
        app.add_middleware(BearerAuth, api_key=api_key)
    return app


class RolloutServer:
    """The endpoints."""

    def __init__(
        self, runner: EngineRunner, identity: Identity, update: WeightsUpdate, tokenizer: Tokenizer | None
    ) -> None:
        self._runner = runner
        self._identity = identity
        self._update = update
        self._tokenizer = tokenizer

    def routes(self) -> list[tuple[str, list[str], Callable[[Request], Awaitable[Response]]]]:
        return [
            ("/generate", ["POST", "PUT"], self.generate),
            ("/abort_request", ["POST"], self.abort_request),
            ("/health", ["GET"], self.health),
            ("/ready", ["GET"], self.ready),
            ("/weights/begin", ["POST"], self.begin_weights),
            ("/weights/commit", ["POST"], self.commit_weights),
            ("/weights/abort", ["POST"], self.abort_weights),
            ("/release_memory_occupation", ["POST"], self.release),
            ("/resume_memory_occupation", ["POST"], self.resume),
        ]

    async def generate(self, request: Request) -> Response:
        started = time.perf_counter()
        body = await _read(request, wire.GenerateBody)
        asked = read_requests(body, self._tokenizer)
        if self._runner.policy_version == NO_VERSION:
            raise Refused(503, "no weights have been loaded yet")
        for each in asked:
            self._check(each)
        if body.stream:
            return StreamingResponse(self._stream(asked, started), media_type="text/event-stream")
        async with self._aborted_on_disconnect(request, [each.rid for each in asked]):
            replies = await self._play(asked, started)
        return _answer(replies if len(replies) > 1 or is_batch(body) else replies[0])

    async def _play(self, asked: Sequence[Asked], started: float) -> list[wire.GenerateReply]:
        """The replies to all prompts of a body, in order."""
        if len(asked) == 1:
            return await self._play_one(asked[0], started)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._play_one(each, started)) for each in asked]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [reply for task in tasks for reply in task.result()]

    async def _play_one(self, asked: Asked, started: float) -> list[wire.GenerateReply]:
        prompt_logprobs = await self._score(asked)
        segments = (
            [scored()] * asked.num_samples if asked.request is None else await self._runner.generate(asked.request)
        )
        return self._told(asked, segments, prompt_logprobs, started)

    def _told(
        self, asked: Asked, segments: Sequence[Segment], prompt_logprobs: list[float] | None, started: float
    ) -> list[wire.GenerateReply]:
        return write_replies(
            asked,
            segments,
            prompt_logprobs=prompt_logprobs,
            tokenizer=self._tokenizer,
            latency_s=time.perf_counter() - started,
        )

    async def _score(self, asked: Asked) -> list[float] | None:
        return None if asked.scored_from is None else await self._runner.score(asked.prompt_ids)

    def _check(self, asked: Asked) -> None:
        if asked.request is None:
            self._runner.engine.check_prompt(asked.prompt_ids)
        else:
            self._runner.engine.check(asked.request)

    async def _stream(self, asked: Sequence[Asked], started: float) -> AsyncIterator[bytes]:
        """Server-sent events: each sample's text so far, cumulative as SGLang's is, and its whole reply at its end.
        What goes wrong once the status is sent is the last event."""
        several = sum(each.num_samples for each in asked) > 1
        try:
            scores = {each.rid: await self._score(each) for each in asked}
            async for growing in follow(self._runner, asked, self._tokenizer):
                mine = growing.asked
                if growing.segment is None:
                    text = growing.text if mine.body.return_text else ""
                    reply = write_growing(
                        mine,
                        growing.member,
                        text=text,
                        token_ids=growing.token_ids,
                        logprobs=growing.logprobs,
                        latency_s=time.perf_counter() - started,
                    )
                else:
                    (reply,) = self._told(mine, [growing.segment], scores[mine.rid], started)
                    reply.meta_info.id = mine.rid if mine.num_samples == 1 else f"{mine.rid}_{growing.member}"
                reply.index = growing.index if several else None
                yield b"data: " + wire.encode(reply) + b"\n\n"
        except EXPECTED as error:
            yield b"data: " + wire.encode(_error_object(str(error))) + b"\n\n"
        yield b"data: [DONE]\n\n"

    async def abort_request(self, request: Request) -> Response:
        body = await _read(request, wire.AbortBody)
        if body.abort_all:
            return _answer(wire.AbortReply(aborted=self._runner.abort_all(), unknown=[]))
        found = self._runner.abort(body.rid)
        return _answer(wire.AbortReply(aborted=int(found), unknown=[] if found or not body.rid else [body.rid]))

    async def health(self, request: Request) -> Response:
        """Alive: the engine's thread has not failed. Constant time, whatever the load."""
        error = self._runner.error
        return _answer({"status": "ok"}) if error is None else _answer(_error_object(str(error)), 500)

    async def ready(self, request: Request) -> Response:
        """Ready: weights are loaded. Says which process this is."""
        version = self._runner.policy_version
        state = "serving" if version != NO_VERSION else "waiting_for_weights"
        if self._runner.error is not None:
            state = "dead"
        identity = self._identity
        reply = wire.Ready(run_id=identity.run_id, nonce=identity.nonce, policy_version=version, state=state)
        return _answer(reply, 200 if state == "serving" else 503)

    async def begin_weights(self, request: Request) -> Response:
        try:
            handle = await _read(request, WeightsHandle)
        except msgspec.DecodeError as error:
            raise Refused(400, f"{HANDLE_FORMAT} ({error})") from None
        return _answer_weights("staged", await self._update.begin(handle))

    async def commit_weights(self, request: Request) -> Response:
        body = await _read(request, wire.CommitBody)
        return _answer_weights("committed", await self._update.commit(body.policy_version))

    async def abort_weights(self, request: Request) -> Response:
        await self._update.abort()
        return _answer({"state": "aborted"})

    async def release(self, request: Request) -> Response:
        """Running requests end with what they have, later ones with nothing; the KV memory is freed."""
        _check_tags(await _read(request, wire.MemoryBody))
        async with deadline(MEMORY_TIMEOUT_S, waiter="server", resource="the release of memory", holder="the engine"):
            await self._runner.release()
        return _answer(wire.MemoryReply(state="released"))

    async def resume(self, request: Request) -> Response:
        """The KV memory is taken back; requests are served again."""
        _check_tags(await _read(request, wire.MemoryBody))
        async with deadline(MEMORY_TIMEOUT_S, waiter="server", resource="memory", holder="the engine"):
            await self._runner.resume()
        return _answer(wire.MemoryReply(state="resumed"))

    @asynccontextmanager
    async def _aborted_on_disconnect(self, request: Request, rids: Sequence[str]) -> AsyncIterator[None]:
        """The body is read, so all that can still arrive is the client's departure."""

        async def watch() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass
            for rid in rids:
                self._runner.abort(rid)

        watcher = asyncio.create_task(watch())
        try:
            yield
        finally:
            watcher.cancel()


class BearerAuth:
    """ASGI middleware: every path but `/health` needs `Authorization: Bearer <api_key>`."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: ReceiveMessage, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                await _answer(_error_object("missing or wrong API key"), 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _read(request: Request, kind: type[wire.T]) -> wire.T:
    """The decoded body, refused as soon as it turns out too long."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise Refused(413, f"the body exceeds {MAX_BODY_BYTES} bytes")
    return wire.decode(bytes(body), kind)


def _check_tags(body: wire.MemoryBody) -> None:
    if body.tags is not None and body.tags != ["kv_cache"]:
        raise ValueError(f"only the memory tagged kv_cache can be released, not {', '.join(body.tags) or 'nothing'}")


def _answer(value: object, status: int = 200) -> Response:
    return Response(wire.encode(value), status, media_type="application/json")


def _answer_weights(state: str, handle: WeightsHandle) -> Response:
    return _answer(wire.WeightsReply(state=state, policy_version=handle.policy_version, fingerprint=handle.fingerprint))


def _error_object(message: str) -> dict[str, dict[str, str]]:
    return {"error": {"message": message}}


async def _answer_error(request: Request, error: Exception) -> Response:
    match error:
        case msgspec.DecodeError():
            return _answer({"error": str(error)}, 400)  # SGLang's shape for a malformed body
        case Refused():
            status = error.status
        case Conflict():
            status = 409
        case ValueError():
            status = 400
        case Stalled():
            status = 504
        case _:
            status = 500
    return _answer(_error_object(str(error)), status)
