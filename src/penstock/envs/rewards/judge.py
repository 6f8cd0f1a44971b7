"""A reward from a judge model behind an OpenAI endpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from penstock.config import ConfigError
from penstock.config.imports import import_package

PROMPT = """Judge how good the answer to a question is.

Question: {question}

Answer: {answer}

Reply with one line, `Score: X`, with X from 0 (useless) to {best:g} (perfect)."""
SCORE = re.compile(r"score\W*?(-?\d+(?:\.\d+)?)", re.IGNORECASE)


class Judge:
    """The judge model's score of an answer, scaled to 0..1."""

    def __init__(
        self,
        *,
        model: str,
        base_url: str | None = None,
        api_key_variable: str = "OPENAI_API_KEY",
        prompt: str = PROMPT,
        best: float = 10.0,
        max_tokens: int = 256,
        timeout_s: float = 9.0,
        max_retries: int = 2,
        max_concurrent: int = 32,
    ) -> None:
        """`prompt`: a format string with the task's payload, `answer` and `best`. The judge must end its reply with
        `Score: X`, X from 0 to `best`. `api_key_variable`: the environment variable that holds the API key.
        `timeout_s`: time limit of one call. `max_retries`: number of retries after a temporary failure. All calls
        together must end within `env.reward_timeout_s`."""
        openai = import_package("openai", needed_by="env.reward judge", install="'penstock[judge]'")
        key = os.environ.get(api_key_variable)
        if not key:
            raise ConfigError(f"env.reward judge: the environment variable {api_key_variable} has no key")
        self._client = openai.AsyncOpenAI(api_key=key, base_url=base_url, timeout=timeout_s, max_retries=max_retries)
        self._model, self._prompt, self._best, self._max_tokens = model, prompt, best, max_tokens
        self.max_concurrent = max_concurrent

    async def score(self, answer: str, payload: Mapping[str, Any]) -> float:
        try:
            question = self._prompt.format_map({**payload, "answer": answer, "best": self._best})
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"env.reward_options prompt does not fit the task, which has {', '.join(sorted(payload))}: {error}"
            ) from None
        messages = [{"role": "user", "content": question}]
        reply = await self._client.chat.completions.create(
            model=self._model, messages=messages, max_tokens=self._max_tokens, temperature=0.0
        )
        return self._read(reply.choices[0].message.content or "")

    async def close(self) -> None:
        """Close the connections of the client."""
        await self._client.close()

    def _read(self, reply: str) -> float:
        found = SCORE.findall(reply)
        if not found:
            raise ValueError(f"the judge gave no score: {reply[:200]!r}")
        score = float(found[-1])
        if not 0 <= score <= self._best:
            raise ValueError(f"the judge gave {score:g}, and {self._best:g} is the best there is")
        return score / self._best
