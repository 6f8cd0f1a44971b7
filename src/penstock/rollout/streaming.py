"""Answers told while they grow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from penstock.rollout.convert import Asked
from penstock.rollout.runner import EngineRunner, Increment
from penstock.rollout.text import GrowingText, Tokenizer
from penstock.types import Segment


@dataclass(slots=True)
class Growing:
    """One sample so far."""

    asked: Asked
    member: int
    """Among the prompt's samples."""
    index: int
    """Among all of the body's."""
    tokenizer: Tokenizer | None
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    segment: Segment | None = None
    """Set when the sample has ended."""
    _text: GrowingText | None = None

    def add(self, increment: Increment) -> None:
        self.token_ids += increment.token_ids
        self.logprobs += increment.logprobs

    @property
    def text(self) -> str:
        """What will stay, whatever comes: no half character, nothing that may yet turn out to begin a stop string."""
        if self.tokenizer is None:
            return ""
        self._text = self._text or GrowingText(self.tokenizer)
        so_far = self._text.add(self.token_ids[self._text.num_tokens :])
        return self.asked.stops.settled(self.asked.stops.cut(so_far))


async def follow(
    runner: EngineRunner, all_asked: Sequence[Asked], tokenizer: Tokenizer | None
) -> AsyncIterator[Growing]:
    """Every sample each time it has grown, and once more when it has ended. Whoever stops listening ends them all."""
    news: asyncio.Queue[tuple[int, list[Increment], list[Segment] | Exception | None]] = asyncio.Queue()

    async def play(number: int, asked: Asked) -> None:
        try:
            if asked.request is None:
                segments = [scored()] * asked.num_samples
            else:
                segments = await runner.generate(asked.request, lambda grown: news.put_nowait((number, grown, None)))
            news.put_nowait((number, [], segments))
        except Exception as error:
            news.put_nowait((number, [], error))

    samples: list[list[Growing]] = []
    for asked in all_asked:
        first = sum(map(len, samples))
        samples.append([Growing(asked, member, first + member, tokenizer) for member in range(asked.num_samples)])
    tasks = [asyncio.create_task(play(number, asked)) for number, asked in enumerate(all_asked)]
    try:
        for _ in range(len(tasks)):
            ended = False
            while not ended:
                number, grown, end = await news.get()
                for increment in grown:
                    samples[number][increment.sample].add(increment)
                    yield samples[number][increment.sample]
                if isinstance(end, Exception):
                    raise end
                for sample, segment in zip(samples[number], end or (), strict=False):
                    sample.segment, ended = segment, True
                    yield sample
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def scored() -> Segment:
    """The answer to a prompt that is only scored."""
    return Segment(token_ids=[], logprobs=[], spans=[], finish_reason="length")
