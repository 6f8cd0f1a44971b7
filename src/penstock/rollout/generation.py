"""SGLang's `/generate`, in front of whoever generates: the engine, or one episode of an agent. Torch-free."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from penstock.rollout import wire
from penstock.rollout.answers import Answers
from penstock.rollout.convert import (
    Answer,
    Asked,
    is_batch,
    read_requests,
    sample_id,
    version_header,
    write_growing,
    write_replies,
)
from penstock.rollout.generator import Generator
from penstock.rollout.http import EXPECTED, LAST_EVENT, Route, answer, error_object, event, read_body, unless_gone
from penstock.rollout.text import Tokenizer


class Generation:
    """The endpoint."""

    def __init__(self, generator: Generator, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._answers = Answers(generator, tokenizer)

    def routes(self) -> list[Route]:
        return [
            Route(
                "/generate",
                ["POST", "PUT"],
                self.generate,
                "generation",
                body=wire.GenerateBody,
                reply=wire.GenerateReply | list[wire.GenerateReply],
                streams=True,
            ),
        ]

    async def generate(self, request: Request) -> Response:
        """One reply per prompt and sample; a list if there can be several."""
        started = time.perf_counter()
        body = await read_body(request, wire.GenerateBody)
        asked = read_requests(body, self._tokenizer)
        self._answers.check(asked)
        if body.stream:
            return StreamingResponse(self._stream(asked, started), media_type="text/event-stream")
        answers = await unless_gone(request, self._answers.give(asked))
        replies = [reply for each in answers for reply in self._told(each, started)]
        response = answer(replies if len(replies) > 1 or is_batch(body) else replies[0])
        response.headers.update(version_header(answers))
        return response

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
                        spans=sample.spans,
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
