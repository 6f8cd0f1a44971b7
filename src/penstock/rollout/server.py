"""The rollout server's HTTP surface: SGLang's `/generate`, readiness with identity, weights as transactions.

Bad input is answered with 4xx before it reaches the engine. Bodies are decoded and encoded by msgspec in plain
Starlette routes: at hundreds of requests per second the validation of FastAPI's own routes would be the larger part
of the work.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

import msgspec
from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from penstock.deadline import deadline
from penstock.rollout import wire
from penstock.rollout.answers import Answers
from penstock.rollout.convert import Answer, Asked, is_batch, read_requests, sample_id, write_growing, write_replies
from penstock.rollout.http import (
    EXPECTED,
    HANDLE_FORMAT,
    LAST_EVENT,
    BearerAuth,
    Refused,
    Route,
    Surface,
    answer,
    answer_error,
    error_object,
    event,
    read_body,
    unless_gone,
)
from penstock.rollout.runner import EngineRunner
from penstock.rollout.text import Tokenizer
from penstock.rollout.update import Served, WeightsUpdate
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
    api_key: str | None = None,
    foreign: Sequence[Surface] = (),
) -> FastAPI:
    """The application around a started `runner`. `foreign`: other protocols' paths."""
    app = FastAPI(openapi_url=None)
    server = RolloutServer(runner, identity, update, tokenizer)
    for surface in (server, *foreign):
        for path, methods, endpoint in surface.routes():
            app.router.add_route(path, endpoint, methods)
    for kind in EXPECTED:
        app.add_exception_handler(kind, answer_error)
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
        self._answers = Answers(runner, tokenizer)

    def routes(self) -> list[Route]:
        return [
            Route("/generate", ["POST", "PUT"], self.generate),
            Route("/abort_request", ["POST"], self.abort_request),
            Route("/health", ["GET"], self.health),
            Route("/ready", ["GET"], self.ready),
            Route("/weights/begin", ["POST"], self.begin_weights),
            Route("/weights/chunk", ["POST"], self.take_chunk),
            Route("/weights/commit", ["POST"], self.commit_weights),
            Route("/weights/abort", ["POST"], self.abort_weights),
            Route("/release_memory_occupation", ["GET", "POST"], self.release),
            Route("/resume_memory_occupation", ["GET", "POST"], self.resume),
        ]

    async def generate(self, request: Request) -> Response:
        started = time.perf_counter()
        body = await read_body(request, wire.GenerateBody)
        asked = read_requests(body, self._tokenizer)
        self._answers.check(asked)
        if body.stream:
            return StreamingResponse(self._stream(asked, started), media_type="text/event-stream")
        answers = await unless_gone(request, self._answers.give(asked))
        replies = [reply for each in answers for reply in self._told(each, started)]
        return answer(replies if len(replies) > 1 or is_batch(body) else replies[0])

    def _told(self, answer: Answer, started: float) -> list[wire.GenerateReply]:
        return write_replies(answer, tokenizer=self._tokenizer, latency_s=time.perf_counter() - started)

    async def _stream(self, asked: Sequence[Asked], started: float) -> AsyncIterator[bytes]:
        """Each sample's text so far, cumulative as SGLang's is, and its whole reply at its end. What goes wrong once
        the status is sent is the last event."""
        several = sum(each.num_samples for each in asked) > 1
        try:
            async for sample in self._answers.follow(asked):
                if sample.answer is None:
                    reply = write_growing(
                        sample.asked,
                        sample.member,
                        text=sample.text() if sample.asked.body.return_text else "",
                        token_ids=sample.token_ids,
                        logprobs=sample.logprobs,
                        latency_s=time.perf_counter() - started,
                    )
                else:
                    (reply,) = self._told(sample.answer, started)
                    reply.meta_info.id = sample_id(sample.asked, sample.member)
                reply.index = sample.index if several else None
                yield event(reply)
        except EXPECTED as error:
            yield event(error_object(str(error)))
        yield LAST_EVENT

    async def abort_request(self, request: Request) -> Response:
        body = await read_body(request, wire.AbortBody)
        if body.abort_all:
            return answer(wire.AbortReply(aborted=self._runner.abort_all(), unknown=[]))
        found = self._runner.abort(body.rid)
        return answer(wire.AbortReply(aborted=int(found), unknown=[] if found or not body.rid else [body.rid]))

    async def health(self, request: Request) -> Response:
        """Alive: the engine's thread has not failed. Constant time, whatever the load."""
        error = self._runner.error
        return answer({"status": "ok"}) if error is None else answer(error_object(str(error)), 500)

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

    async def begin_weights(self, request: Request) -> Response:
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
        body = await read_body(request, wire.CommitBody)
        update = self._update.commit(body.policy_version, mode=body.mode, fingerprint=body.fingerprint)
        return _answer_weights("committed", await update)

    async def abort_weights(self, request: Request) -> Response:
        await self._update.abort()
        return answer({"state": "aborted"})

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
