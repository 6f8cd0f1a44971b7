"""Answers to requested prompts for all HTTP protocols, and SGLang's `/generate` endpoint. Torch-free.

The generator behind them is the engine, or one episode of an agent."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import Response

from penstock.rollout import bodies, convert, http
from penstock.rollout.convert import Answer, GrowingSample, PromptRequest, write_replies
from penstock.rollout.generator import Generator, Increment, OnTokens, all_of
from penstock.rollout.prompt_text import PromptText
from penstock.rollout.text import Tokenizer
from penstock.samples import Segment
from penstock.types import NO_VERSION


class Answers:
    """Checks requested prompts and asks the generator for their answers."""

    def __init__(self, generator: Generator, tokenizer: Tokenizer | None) -> None:
        self._generator = generator
        self._tokenizer = tokenizer

    def check(self, prompts: Sequence[PromptRequest]) -> None:
        """Check all requests before any starts. Raises Refused or ValueError if one cannot be served."""
        if self._generator.policy_version == NO_VERSION:
            raise http.Refused(503, "no weights have been loaded yet")
        rids = [prompt.rid for prompt in prompts]
        for rid, count in Counter(rids).items():
            if count > 1:
                raise ValueError(f"request {rid} is in the batch {count} times")
            if self._generator.serves(rid):
                raise ValueError(f"request {rid} is already being served: give each one an id of its own")
        for prompt in prompts:
            if prompt.request is None:
                self._generator.check_prompt(prompt.prompt_ids)
            else:
                self._generator.check(prompt.request)

    async def give(self, prompts: Sequence[PromptRequest]) -> list[Answer]:
        """Return one answer per prompt, in order."""
        return await all_of(self._give(prompt) for prompt in prompts)

    async def follow(self, prompts: Sequence[PromptRequest]) -> AsyncIterator[GrowingSample]:
        """Yield each sample whenever it has grown, and once more at its end. Closing the iterator cancels all
        requests."""
        events: asyncio.Queue[tuple[int, list[Increment], Answer | Exception | None]] = asyncio.Queue()

        async def generate(number: int, prompt: PromptRequest) -> None:
            try:
                answer = await self._give(prompt, lambda grown: events.put_nowait((number, grown, None)))
                events.put_nowait((number, [], answer))
            except Exception as error:  # `follow` raises it
                events.put_nowait((number, [], error))

        samples: list[list[GrowingSample]] = []
        for prompt in prompts:
            first = sum(map(len, samples))
            samples.append([GrowingSample(prompt, n, first + n, self._tokenizer) for n in range(prompt.num_samples)])
        tasks = [asyncio.create_task(generate(number, prompt)) for number, prompt in enumerate(prompts)]
        num_open = len(tasks)
        try:
            while num_open:
                number, grown, end = await events.get()
                for increment in grown:
                    samples[number][increment.sample].add(increment)
                    yield samples[number][increment.sample]
                if isinstance(end, Exception):
                    raise end
                if end is not None:
                    num_open -= 1
                    for sample, segment in zip(samples[number], end.segments, strict=True):
                        sample.answer = Answer(sample.prompt, [segment], end.scores)
                        yield sample
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _give(self, prompt: PromptRequest, on_tokens: OnTokens | None = None) -> Answer:
        scores = None
        if prompt.scored_from is not None:
            scores = await self._generator.score(prompt.prompt_ids, num_top=prompt.num_top)
        if prompt.request is None:
            nothing = Segment(token_ids=[], logprobs=[], spans=[], finish_reason="length")
            return Answer(prompt, [nothing] * prompt.num_samples, scores)
        return Answer(prompt, await self._generator.generate(prompt.request, on_tokens), scores)


class Generation:
    """The `/generate` endpoint."""

    def __init__(self, generator: Generator, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._answers = Answers(generator, tokenizer)
        self._text = None if tokenizer is None else PromptText(tokenizer, max_context=generator.max_context)

    def routes(self) -> list[http.Route]:
        route = partial(http.Route, access="generation", body=bodies.GenerateBody, streams=True)
        reply = bodies.GenerateReply | list[bodies.GenerateReply]
        return [route("/generate", ["POST", "PUT"], self.generate, reply=reply)]

    async def generate(self, request: Request) -> Response:
        """Generate samples. Return one reply per prompt and sample: a list for a batch or for several samples."""
        started = time.perf_counter()
        body = await http.read_body(request, bodies.GenerateBody)
        if self._text is not None:
            body = await self._text.tokenised(body)
        prompts = convert.read_requests(body, self._tokenizer)
        self._answers.check(prompts)
        if body.stream:
            return http.EventStream(self._stream(prompts, started))
        answers = await http.unless_disconnected(request.receive, self._answers.give(prompts))
        latency_s = time.perf_counter() - started
        replies = [reply for each in answers for reply in write_replies(each, self._tokenizer, latency_s=latency_s)]
        response = http.answer(replies if len(replies) > 1 or convert.is_batch(body) else replies[0])
        response.headers.update(convert.version_header(answers))
        return response

    async def _stream(self, prompts: Sequence[PromptRequest], started: float) -> AsyncIterator[bytes]:
        """Yield each sample's text so far, cumulative as in SGLang, and its whole reply when it has ended. An error
        after the status was sent becomes the last event before `[DONE]`."""
        several = sum(prompt.num_samples for prompt in prompts) > 1
        try:
            async for sample in self._answers.follow(prompts):
                latency_s = time.perf_counter() - started
                if sample.answer is None:
                    text = sample.text() if sample.prompt.body.return_text else ""
                    reply = convert.write_reply(sample.prompt, sample.member, sample, text=text, latency_s=latency_s)
                else:
                    (reply,) = write_replies(sample.answer, self._tokenizer, latency_s=latency_s, first=sample.member)
                reply.index = sample.index if several else None
                yield http.event(reply)
        except http.EXPECTED as error:
            yield http.event(http.error_object(str(error)))
        yield http.LAST_EVENT
