"""A judge behind a real HTTP server that speaks as OpenAI's does, asked by OpenAI's own client."""

from __future__ import annotations

import inspect
import json
import threading
from collections.abc import Iterator
from contextlib import aclosing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import pytest

from penstock.config import Config, ConfigError, EnvConfig, EnvironmentConfig
from penstock.envs.rewards.judge import Judge
from penstock.envs.rewards.scorer import Scorers


class Server(ThreadingHTTPServer):
    """Replies with these, in order; a number is a status, and bytes are a whole body."""

    replies: Iterator[str | int | bytes]
    asked: list[dict[str, Any]]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body | {"key": self.headers["authorization"]})
        reply = next(self.server.replies)
        if isinstance(reply, bytes):
            self._send_data(200, reply)
            return
        if isinstance(reply, int):
            self._send(reply, {"error": {"message": "later"}})
            return
        message = {"role": "assistant", "content": reply}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self._send(200, {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})

    def _send(self, status: int, body: dict[str, Any]) -> None:
        self._send_data(status, json.dumps(body).encode())

    def _send_data(self, status: int, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.send_header("retry-after", "0")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextmanager
def judging(*replies: str | int | bytes, **options: Any) -> Iterator[tuple[Judge, list[dict[str, Any]]]]:
    """A judge, and what it is asked."""
    with Server(("127.0.0.1", 0), Handler) as server:
        server.replies, server.asked = iter(replies), []
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        try:
            url = f"http://127.0.0.1:{server.server_address[1]}/v1"
            yield Judge(model="m", base_url=url, api_key_variable="JUDGE_KEY", **options), server.asked
        finally:
            server.shutdown()
            serving.join()


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")


TASK = {"question": "What is 2+2?"}


async def test_its_last_score_counts() -> None:
    with judging("Score: 2? No.\n**Score**: 7.5") as (judge, asked):
        assert (await judge.score("It is 4.", TASK)).reward == 0.75
        await judge.close()
    (request,) = asked
    assert request["key"] == "Bearer secret" and request["temperature"] == 0.0
    content = request["messages"][0]["content"]
    assert "What is 2+2?" in content and "It is 4." in content


@pytest.mark.parametrize(
    "body",
    [
        *(b"null", b"[]", b"<html>", b'{"choices": [', b'{"choices": null}', b'{"choices": [null]}'),
        *(b'{"choices": [{"message": null}]}', b'{"choices": [{}]}', b'{"choices": [{"message": {"content": 7}}]}'),
    ],
)
async def test_a_reply_that_is_no_chat_completion_scores_nothing(body: bytes) -> None:
    with judging("Score: .5", body, "Score: 5") as (judge, _):
        assert (await judge.score("4", TASK)).reward == 0.05
        found = await judge.score("4", TASK)
        assert (found.reward, found.parts) == (0.0, {"unjudged": 1.0})
        assert (await judge.score("4", TASK)).reward == 0.5
        await judge.close()


async def test_a_server_that_is_no_judge_fails_the_first_episode() -> None:
    with judging(b"<html>a page</html>", b"[]") as (judge, _):
        for _ in range(2):
            with pytest.raises(ValueError, match="a reply that is no chat completion"):
                await judge.score("4", TASK)
        await judge.close()


async def test_what_fails_for_a_moment_is_asked_again() -> None:
    with judging(503, 429, "Score: 10") as (judge, asked):
        assert (await judge.score("4", TASK)).reward == 1.0
        await judge.close()
    assert len(asked) == 3


async def test_the_answer_stands_between_marks_that_it_cannot_know() -> None:
    with judging("Score: 1", "Score: 1") as (judge, asked):
        for _ in range(2):
            await judge.score("It is 4.", TASK)
        await judge.close()
    first, second = (each["messages"][0]["content"].split("\nIt is 4.\n") for each in asked)
    (before, after), mark = first, first[1].splitlines()[0]
    assert before.endswith(f"\n{mark}") and after.startswith(f"{mark}\n") and len(mark) == 16
    assert mark not in "".join(second)


@pytest.mark.parametrize(
    "reply", ["Nice.", "", "Score: 11", "Score: -1", "Score: none", f"Score: {'9' * 400}", 400, 403, 413, 422, 451]
)
async def test_an_answer_without_a_usable_score_earns_nothing(
    reply: str | int, caplog: pytest.LogCaptureFixture
) -> None:
    with judging("Score: 10", reply, reply, "Score: 10") as (judge, _):
        results = [await judge.score("4", TASK) for _ in range(4)]
        await judge.close()
    assert [each.reward for each in results] == [1.0, 0.0, 0.0, 1.0]
    assert [each.parts["unjudged"] for each in results] == [0.0, 1.0, 1.0, 0.0]
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert (
        "reward_unjudged counts such answers" in said
        and ("refused" if isinstance(reply, int) else repr(reply)[:200]) in said
    )


@pytest.mark.parametrize("statuses", [(400,), (413,), (422,), ("Score: 1", 401), ("Score: 1", 405), ("Score: 1", 404)])
async def test_settings_that_do_not_fit_the_judge_fail_the_episode(statuses: tuple[str | int, ...]) -> None:
    with judging(*statuses) as (judge, _):
        with pytest.raises(openai.APIStatusError, match="later"):
            for _ in statuses:
                await judge.score("4", TASK)
        await judge.close()


async def test_answers_without_a_score_are_counted() -> None:
    with judging("Nice.", "Score: 5") as (judge, _):
        url = str(judge._client.base_url)
        options = {"model": "m", "base_url": url, "api_key_variable": "JUDGE_KEY"}
        config = Config(env=EnvConfig(reward="judge", reward_options=options))
        async with aclosing(Scorers(config)) as scorers:
            scorer = scorers.of(config.env, {})
            assert scorer is not None
            assert [await scorer.score("4", TASK, waiter="t") for _ in range(2)] == [0.0, 0.5]
            assert scorers.counts()["reward_unjudged"] == 1 and scorers.counts()["scored"] == 2
        await judge.close()


async def test_a_prompt_that_does_not_fit_is_named() -> None:
    with judging() as (judge, _):
        with pytest.raises(ValueError, match="does not fit the task, which has index: 'question'"):
            await judge.score("4", {"index": 1})
        await judge.close()


def test_all_its_attempts_fit_into_the_time_of_a_reward() -> None:
    options = inspect.signature(Judge).parameters
    attempts = 1 + options["max_retries"].default
    assert attempts * options["timeout_s"].default < EnvironmentConfig().reward_timeout_s


def test_without_a_key_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match="the environment variable JUDGE_KEY has no key"):
        Judge(model="m", api_key_variable="JUDGE_KEY")
