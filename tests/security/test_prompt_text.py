"""Text that is too long is refused before it is tokenised, and nothing that a text costs holds up the server."""

from __future__ import annotations

import asyncio
import io
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from letters import Letters
from tiny_policy import MAX_CONTEXT, serve

from penstock.compat.openai import OpenAI
from penstock.config import TinyModelConfig
from penstock.model import text_threads
from penstock.model.chat import ChatTokenizer
from penstock.model.text_threads import INLINE_CHARACTERS
from penstock.model.tiny import write_tiny_model
from penstock.rollout.prompt_text import PromptText, has_more_characters
from penstock.rollout.runner import EngineRunner

LONG = 15_000_000


class Slow(Letters):
    """A tokenizer with long tokens. Its work on a long text, and each of its templates, ends when `released` is set."""

    longest_token = 2 * INLINE_CHARACTERS

    def __init__(self) -> None:
        self.released = threading.Event()
        self.threads: set[str] = set()

    def encode(self, text: str) -> list[int]:
        self.threads.add(threading.current_thread().name)
        if len(text) > INLINE_CHARACTERS:
            self.released.wait(60)
            return [1]
        return super().encode(text)

    def prompt(self, messages: Any, **settings: Any) -> list[int]:
        self.threads.add(threading.current_thread().name)
        if messages[0]["content"] == "ENDLESS":
            self.released.wait(60)
        return [1]


@pytest.fixture
def slow() -> Iterator[Slow]:
    slow = Slow()
    yield slow
    slow.released.set()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "x" * LONG}),
        ("/generate", {"text": ["a", "x" * LONG]}),
        ("/v1/completions", {"prompt": "x" * LONG}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * LONG}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}] * 300_000}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "tools": [{"function": {"name": "x" * LONG}}]},
        ),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a", "x" * LONG: ""}]}),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}], "tools": [{"function": {"x" * LONG: 1}}]},
        ),
    ],
)
async def test_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    runner: EngineRunner, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def no(*_: object, **__: object) -> Any:
        pytest.fail("it was tokenised")

    monkeypatch.setattr(Letters, "encode", no)
    surfaces = [OpenAI(runner, Letters(), model_name="tiny")]
    async with (
        serve(runner, tokenizer=Letters(), foreign=surfaces) as url,
        aiohttp.ClientSession(url) as session,
        session.post(path, data=io.BytesIO(json.dumps(body).encode())) as response,
    ):
        text = await response.text()
        assert response.status == 400 and str(MAX_CONTEXT) in text and "characters" in text, text[:300]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "A" * (INLINE_CHARACTERS + 1)}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ENDLESS"}]}),
    ],
)
async def test_health_is_answered_while_text_takes_its_time(
    runner: EngineRunner, slow: Slow, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_threads, "TEXT_S", 0.3)
    surfaces = [OpenAI(runner, slow, model_name="tiny")]
    async with serve(runner, tokenizer=slow, foreign=surfaces) as url, aiohttp.ClientSession(url) as session:

        async def ask() -> int:
            async with session.post(path, json=body) as response:
                return response.status

        asked = [asyncio.create_task(ask()) for _ in range(12)]
        await asyncio.sleep(0)
        begun = time.monotonic()
        async with session.get("/health") as response:
            assert response.status == 200
        short = {"text": "AB", "sampling_params": {"max_new_tokens": 1}}
        async with session.post("/generate", json=short) as response:
            assert response.status == 200, await response.text()
        assert time.monotonic() - begun < 30
        assert await asyncio.gather(*asked) == [504] * 12, "a wait for text has a limit"
        assert {name for name in slow.threads if name != "MainThread"} <= {f"prompt-text-{n}" for n in range(4)}
        slow.released.set()
        monkeypatch.setattr(text_threads, "TEXT_S", 60.0)
        chat = {"messages": [{"role": "user", "content": "A"}], "max_tokens": 1}
        async with session.post("/v1/chat/completions", json=chat) as response:
            assert response.status == 200, await response.text()


async def test_a_real_tokenizer_does_not_hold_up_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_threads, "TEXT_S", 120.0)
    write_tiny_model(tmp_path, TinyModelConfig(), 4096)
    chat = ChatTokenizer.load(tmp_path)
    text = PromptText(chat, max_context=400_000)
    pauses, beat = [0.0], asyncio.get_running_loop().time
    from penstock.rollout.bodies import GenerateBody

    working = asyncio.create_task(text.tokenised(GenerateBody(text="a b " * 100_000)))
    while not working.done():
        before = beat()
        await asyncio.sleep(0.001)
        pauses.append(beat() - before)
    ids = working.result().input_ids
    assert ids == chat.encode("a b " * 100_000)
    assert len(pauses) > 5, "the event loop ran meanwhile"


def test_the_longest_token_bounds_the_text(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, TinyModelConfig(), 64)
    chat = ChatTokenizer.load(tmp_path)
    assert chat.longest_token >= max(
        len(chat.decode([number], skip_special=False)) for number in range(chat.vocab_size)
    )


def test_characters_are_counted_in_strings_of_any_depth() -> None:
    deep: Any = "abc"
    for _ in range(5_000):
        deep = [{"key": deep}, "x"]
    assert has_more_characters(deep, 20_002) and not has_more_characters(deep, 20_003)
    assert has_more_characters([1, None, {}, [], True], 4) and not has_more_characters([1, None, {}, [], True], 5)


async def test_a_template_that_multiplies_its_text_is_refused_before_it_is_tokenised(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, TinyModelConfig(), 64)
    path = tmp_path / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config["chat_template"] = "{% for m in messages %}{{ m.content * 1000 }}{% endfor %}"
    path.write_text(json.dumps(config))
    chat = ChatTokenizer.load(tmp_path)
    messages = [{"role": "user", "content": "a"}]
    assert len(chat.prompt(messages)) == 1000
    chat.max_characters = 999
    with pytest.raises(ValueError, match="1000 characters"):
        chat.prompt(messages)
