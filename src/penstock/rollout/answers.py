"""From prompts that were asked to answers, whole or while they grow; whatever protocol asked."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from penstock.rollout.convert import Answer, Asked
from penstock.rollout.failures import Conflict
from penstock.rollout.generator import Generator, Increment, OnTokens
from penstock.rollout.http import Refused
from penstock.rollout.text import GrowingText, Tokenizer
from penstock.types import NO_VERSION, Segment, VersionSpan, add_spans


@dataclass(slots=True)
class Growing:
    """One sample so far."""

    asked: Asked
    member: int
    """Among the prompt's samples."""
    index: int
    """Among all that were asked for together."""
    tokenizer: Tokenizer | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    top_logprobs: list[list[tuple[float, int]]] = field(default_factory=list)
    answer: Answer | None = None
    """Of this sample alone; set when it has ended."""
    _text: GrowingText | None = None

    def add(self, increment: Increment) -> None:
        add_spans(self.spans, increment.spans, offset=self.num_tokens)
        self.token_ids += increment.token_ids
        self.logprobs += increment.logprobs
        self.top_logprobs += increment.top_logprobs or ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def since(self, place: int) -> tuple[list[int], list[float], list[list[tuple[float, int]]] | None]:
        """(tokens, log-probabilities, likeliest tokens if they were asked for) from `place` on."""
        tops = self.top_logprobs[place:] if self.top_logprobs else None
        return self.token_ids[place:], self.logprobs[place:], tops

    def text(self) -> str:
        """What will stay, whatever comes: no half character, no stop token, nothing that may yet turn out to begin a
        stop string."""
        if self.tokenizer is None:
            return ""
        self._text = self._text or GrowingText(self.tokenizer)
        so_far = self._text.add(self.asked.stops.spoken(self.token_ids)[self._text.num_tokens :])
        return self.asked.stops.settled(self.asked.stops.cut(so_far))


class Answers:
    """Asks whoever generates."""

    def __init__(self, generator: Generator, tokenizer: Tokenizer | None) -> None:
        self._generator = generator
        self._tokenizer = tokenizer

    def check(self, all_asked: Sequence[Asked]) -> None:
        """Refuse what cannot be served, before anything is begun."""
        if self._generator.policy_version == NO_VERSION:
            raise Refused(503, "no weights have been loaded yet")
        rids = [asked.rid for asked in all_asked]
        for rid, count in Counter(rids).items():
            if count > 1:
                raise ValueError(f"request {rid} is in the batch {count} times")
            if self._generator.serves(rid):
                raise Conflict(f"request {rid} is already being served")
        for asked in all_asked:
            if asked.request is None:
                self._generator.check_prompt(asked.prompt_ids)
            else:
                self._generator.check(asked.request)

    async def give(self, all_asked: Sequence[Asked]) -> list[Answer]:
        """One per prompt, in order."""
        if len(all_asked) == 1:
            return [await self._give(all_asked[0])]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._give(asked)) for asked in all_asked]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def follow(self, all_asked: Sequence[Asked]) -> AsyncIterator[Growing]:
        """Every sample each time it has grown, and once more when it has ended. Whoever stops listening ends them."""
        news: asyncio.Queue[tuple[int, list[Increment], Answer | Exception | None]] = asyncio.Queue()

        async def play(number: int, asked: Asked) -> None:
            try:
                answer = await self._give(asked, lambda grown: news.put_nowait((number, grown, None)))
                news.put_nowait((number, [], answer))
            except Exception as error:  # handed to whoever listens
                news.put_nowait((number, [], error))

        samples: list[list[Growing]] = []
        for asked in all_asked:
            first = sum(map(len, samples))
            samples.append([Growing(asked, n, first + n, self._tokenizer) for n in range(asked.num_samples)])
        tasks = [asyncio.create_task(play(number, asked)) for number, asked in enumerate(all_asked)]
        num_open = len(tasks)
        try:
            while num_open:
                number, grown, end = await news.get()
                for increment in grown:
                    samples[number][increment.sample].add(increment)
                    yield samples[number][increment.sample]
                if isinstance(end, Exception):
                    raise end
                if end is not None:
                    num_open -= 1
                    for sample, segment in zip(samples[number], end.segments, strict=True):
                        sample.answer = Answer(sample.asked, [segment], end.prompt_logprobs, end.scored_by)
                        yield sample
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _give(self, asked: Asked, on_tokens: OnTokens | None = None) -> Answer:
        scores = (None, ()) if asked.scored_from is None else await self._generator.score(asked.prompt_ids)
        if asked.request is None:
            nothing = Segment(token_ids=[], logprobs=[], spans=[], finish_reason="length")
            return Answer(asked, [nothing] * asked.num_samples, *scores)
        return Answer(asked, await self._generator.generate(asked.request, on_tokens), *scores)
