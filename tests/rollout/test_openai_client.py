"""A model behind an endpoint, over real HTTP: what it is asked, what comes back, and what its errors become."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import Callable, Coroutine
from email.utils import formatdate
from typing import Any

import pytest
from endpoint_stand_in import KEY, Answer, Endpoint, error, said, serving

from penstock.config import ConfigError, PolicyConfig
from penstock.deadline import Stalled
from penstock.model.message_tokens import MessageTokenizer
from penstock.rollout import openai_client
from penstock.rollout.openai_client import EndpointError, OpenAIPolicy, check_endpoint
from penstock.samples import Segment
from penstock.types import NO_VERSION, EpisodeId, Sampling, SegmentGrant

CHAT = MessageTokenizer()
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}},
}
QUESTION = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"}]


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", KEY)
    monkeypatch.setattr(openai_client, "FIRST_PAUSE_S", 0.01)


def settings(server: Endpoint, **more: Any) -> PolicyConfig:
    given = {"name": "openai", "base_url": server.url, "model": "teacher", "api_key_variable": "TEACHER_KEY"}
    return PolicyConfig.model_validate(given | more)


def with_policy(given: PolicyConfig, use: Callable[[OpenAIPolicy], Coroutine[Any, Any, Any]]) -> Any:
    async def run() -> Any:
        policy = OpenAIPolicy(given)
        try:
            async with asyncio.timeout(60):
                return await use(policy)
        finally:
            await policy.close()

    return asyncio.run(run())


def grants(number: int) -> list[SegmentGrant]:
    return [SegmentGrant(episode=EpisodeId("t", 0, member, 0), max_tokens=5) for member in range(number)]


def ask(
    server: Endpoint, *, number: int = 1, tools: list[Any] | None = None, must_call: str | None = None, **more: Any
) -> list[Segment]:
    prompt = CHAT.prompt(QUESTION, must_call=must_call, **({"tools": tools} if tools else {}))

    async def use(policy: OpenAIPolicy) -> list[Segment]:
        sampling = Sampling(temperature=0.5, top_p=0.9, max_new_tokens=5)
        return await policy.generate(prompt, grants(number), sampling, list(range(number)))

    segments: list[Segment] = with_policy(settings(server, **more), use)
    return segments


def text(segment: Segment) -> str:
    return CHAT.decode(segment.token_ids)


def test_messages_go_out_and_a_text_comes_back() -> None:
    with serving(lambda body: said(f"two {body['seed']}")) as server:
        segments = ask(server, number=3)
    assert len({text(each) for each in segments}) == 3, "each member has its own seed"
    for body in server.asked:
        assert body["messages"] == QUESTION and "tools" not in body and "top_k" not in body
        assert (body["model"], body["max_tokens"], body["temperature"], body["top_p"]) == ("teacher", 5, 0.5, 0.9)


def test_a_segment_says_that_there_are_no_numbers() -> None:
    with serving(lambda body: said("né <|end|> ☃")) as server:
        (segment,) = ask(server)
    assert text(segment) == "né <|end|> ☃" and segment.finish_reason == "stop"
    assert all(map(math.isnan, segment.logprobs)) and len(segment.logprobs) == len(segment.token_ids)
    assert [span.policy_version for span in segment.spans] == [NO_VERSION]


def test_an_answer_at_its_limit_is_cut() -> None:
    with serving(lambda body: said("tw", finish="length")) as server:
        (segment,) = ask(server)
    assert segment.finish_reason == "length" and segment.token_ids[-1] not in CHAT.eos_ids


def test_calls_of_tools_become_calls_and_results_find_them() -> None:
    calls = [("add", '{"a": 1, "b": "</tool_call>"}'), ("add", "{broken")]
    with serving(lambda body: said("let me see", calls=calls)) as server:
        (segment,) = ask(server, tools=[TOOL])
        assert server.asked[0]["tools"] == [TOOL]
    answer = CHAT.answers.read(text(segment), [TOOL])
    assert answer.fault is not None, "arguments that are no JSON are the model's fault, which the environment is told"
    with serving(lambda body: said("let me see", calls=calls[:1])) as server:
        (segment,) = ask(server, tools=[TOOL])
        answer = CHAT.answers.read(text(segment), [TOOL])
        assert answer.content == "let me see" and json.loads(answer.calls[0].arguments) == json.loads(calls[0][1])
        prompt = CHAT.prompt(QUESTION, tools=[TOOL])
        result = CHAT.continuation([{"role": "tool", "content": "3"}], ended=True, tools=[TOOL])

        async def use(policy: OpenAIPolicy) -> None:
            await policy.generate([*prompt, *segment.token_ids, *result], grants(1), Sampling(), [0])

        with_policy(settings(server), use)
    *_, assistant, tool = server.asked[-1]["messages"]
    assert assistant["content"] == "let me see" and assistant["tool_calls"][0]["function"]["name"] == "add"
    assert tool == {"role": "tool", "content": "3", "tool_call_id": assistant["tool_calls"][0]["id"]}


def test_an_agent_may_demand_a_call() -> None:
    with serving(lambda body: said(None, calls=[("add", '{"a": 1}')])) as server:
        (segment,) = ask(server, tools=[TOOL], must_call="add")
        (any_tool,) = ask(server, tools=[TOOL], must_call="")
    named, required = (body["tool_choice"] for body in server.asked)
    assert named == {"type": "function", "function": {"name": "add"}} and required == "required"
    for name, each in (("add", segment), ("", any_tool)):
        read = CHAT.answers.read(CHAT.answers.beginning(name) + text(each), [TOOL])
        assert [(call.name, json.loads(call.arguments)) for call in read.calls] == [("add", {"a": 1})]
    with serving(lambda body: said("no")) as server, pytest.raises(Exception, match="without the call that"):
        ask(server, tools=[TOOL], must_call="add")


def test_options_replace_and_remove_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENANT", "me")
    options = {"max_tokens": None, "max_completion_tokens": 99, "temperature": 1.0, "user": "${TENANT}"}
    with serving(lambda body: said("two")) as server:
        ask(server, options=options)
    (body,) = server.asked
    assert "max_tokens" not in body and (body["max_completion_tokens"], body["temperature"]) == (99, 1.0)
    assert body["user"] == "me"


def in_order(*answers: Answer) -> Callable[[dict[str, Any]], Answer]:
    left = iter(answers)
    return lambda body: next(left)


def test_what_may_pass_is_tried_again() -> None:
    with serving(in_order(error(500, "oops"), error(429, "slow down"), error(503, "busy"), said("two"))) as server:
        (segment,) = ask(server)
    assert text(segment) == "two" and len(server.asked) == 4


@pytest.mark.parametrize("form", ["number", "date"])
def test_all_requests_wait_as_long_as_the_endpoint_asks(form: str) -> None:
    def reply(body: dict[str, Any]) -> Answer:
        if len(server.asked) == 1:
            after = "1" if form == "number" else formatdate(time.time() + 2, usegmt=True)
            return error(429, "slow down", ("Retry-After", after))
        return said("two")

    async def use(policy: OpenAIPolicy) -> None:
        prompt = CHAT.prompt(QUESTION)
        first = asyncio.create_task(policy.generate(prompt, grants(1), Sampling(), [0]))
        while not policy.counts().get("endpoint_retries"):  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
        await asyncio.gather(first, *(policy.generate(prompt, grants(1), Sampling(), [0]) for _ in range(3)))
        assert policy.counts()["endpoint_completion_tokens"] == 3 * 4
        assert policy.counts()["endpoint_retries"] == 1 and policy.counts()["endpoint_requests"] == 5

    with serving(reply) as server:
        with_policy(settings(server), use)
    first, *later = server.times
    assert len(later) == 4 and min(later) - first > 0.9


def test_an_endpoint_that_is_down_is_one_error() -> None:
    with serving(lambda body: error(500, "the model crashed")) as server:
        with pytest.raises(EndpointError, match=r"endpoint http://.*answered 500: the model crashed"):
            ask(server, max_retries=2)
        assert len(server.asked) == 3
    with pytest.raises(EndpointError, match="got no answer"):
        ask(server, max_retries=1)


def test_an_endpoint_that_hangs_is_given_up() -> None:
    is_over = threading.Event()

    def reply(body: dict[str, Any]) -> Answer:
        is_over.wait(60)
        return said("late")

    with serving(reply) as server:
        try:
            with pytest.raises(Stalled, match=r"/chat/completions"):
                ask(server, timeout_s=0.2)
        finally:
            is_over.set()


def test_an_hour_is_too_long_to_wait() -> None:
    with (
        serving(lambda body: error(429, "quota", ("Retry-After", "86400"))) as server,
        pytest.raises(EndpointError, match="asks to wait for 86400 s"),
    ):
        ask(server)


def test_a_wrong_key_is_the_configurations_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "the-wrong-key")
    with serving(lambda body: said("two")) as server:
        for use in (lambda: ask(server), lambda: check_endpoint(settings(server))):
            with pytest.raises(ConfigError, match=r"refuses the key in TEACHER_KEY: .*Incorrect API key") as failed:
                use()
            assert "the-wrong-key" not in str(failed.value)
        monkeypatch.delenv("TEACHER_KEY")
        with pytest.raises(ConfigError, match="refuses a request without a key: set TEACHER_KEY"):
            check_endpoint(settings(server))


def test_a_model_that_is_not_there_is_the_configurations_error() -> None:
    with (
        serving(lambda body: error(404, "The model `teacher` does not exist")) as server,
        pytest.raises(ConfigError, match=r"policy\.model teacher is wrong: .*does not exist"),
    ):
        ask(server)


def test_an_endpoint_is_checked_before_a_run() -> None:
    with serving(lambda body: said("two")) as server:
        check_endpoint(settings(server))
        check_endpoint(settings(server, base_url=f"{server.url}/"))
        assert server.asked == [], "nothing is generated"
    with pytest.raises(ConfigError, match=r"policy\.base_url: http://127.*got no answer"):
        check_endpoint(settings(server))


def test_an_endpoint_without_tools_is_found_out() -> None:
    def reply(body: dict[str, Any]) -> Answer:
        return error(400, "tools are not supported") if "tools" in body else said("two")

    with serving(reply) as server, pytest.raises(ConfigError, match="takes no tools, and the environment has some"):
        ask(server, tools=[TOOL])
    with (
        serving(lambda body: error(400, "context too long")) as server,
        pytest.raises(EndpointError, match="context too long"),
    ):
        ask(server, tools=[TOOL])


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(200, {"choices": []}), "returned no answer"),
        (Answer(200, {"hello": 1}), "returned an unexpected body"),
        (Answer(200, ["x"]), "returned an unexpected body"),
        (said(None, finish="content_filter"), "has filtered the answer out"),
        (error(400, "too long"), "answered 400: too long"),
    ],
)
def test_a_useless_answer_fails_its_episode_alone(answer: Answer, message: str) -> None:
    with serving(lambda body: answer) as server, pytest.raises(EndpointError, match=message):
        ask(server, max_retries=0)


def test_text_without_messages_is_refused() -> None:
    with serving(lambda body: said("two")) as server, pytest.raises(Exception, match="send a chat request"):

        async def use(policy: OpenAIPolicy) -> None:
            await policy.generate(CHAT.encode("1+1=?"), grants(1), Sampling(), [0])

        with_policy(settings(server), use)
