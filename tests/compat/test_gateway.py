"""Agents with the unmodified OpenAI SDK, played by the EnvManager through a gateway on a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiohttp
import openai
import pytest
from fake_ports import leased
from openai import AsyncOpenAI, OpenAI
from scripted_policy import ScriptedPolicy

from penstock.compat.gateway import AgentGateway
from penstock.config import Config, TinyModelConfig
from penstock.envs.manager import EnvManager
from penstock.model.chat import ChatTokenizer
from penstock.model.tiny import write_tiny_model
from penstock.ports.environment import Endpoint
from penstock.ports.work import Work
from penstock.rollout.session import RolloutError
from penstock.runtime.http_server import bind, listening, url_of
from penstock.samples import Segment, Trajectory
from penstock.types import Sampling, SegmentGrant, Task

Credit = Callable[[float, Any], Any]
Play = Callable[[Endpoint], Awaitable[float]]


class Always:
    """Grants at once; remembers who asked."""

    def __init__(self, max_tokens: int = 100) -> None:
        self.max_tokens = max_tokens
        self.asked: list[bool] = []

    async def request(self, so_far: Trajectory, *, unfinished: bool, num_tokens: int) -> SegmentGrant:
        self.asked.append(unfinished)
        return SegmentGrant(episode=so_far.episode, max_tokens=self.max_tokens)


class Gated(ScriptedPolicy):
    """Answers once it is let."""

    def __init__(self, answers: Sequence[Sequence[int]]) -> None:
        super().__init__(answers, policy_version=3)
        self.let = asyncio.Event()

    async def generate(self, *args: Any) -> list[Segment]:
        await self.let.wait()
        return await super().generate(*args)


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, TinyModelConfig(), 512)
    return ChatTokenizer.load(directory)


def config(max_turns: int = 4) -> Config:
    return Config.model_validate({"env": {"max_turns": max_turns, "max_new_tokens": 8}, "model": {"max_context": 96}})


def one(deadline_s: float = 20.0) -> Work:
    return leased(range(1), max_tokens=8, sampling=Sampling(max_new_tokens=8), deadline_s=deadline_s, env_seed=7)


async def play(
    chat: ChatTokenizer,
    policy: ScriptedPolicy,
    agent: Play,
    *,
    settings: Config | None = None,
    grants: Always | None = None,
    job: Work | None = None,
    blocking: bool = False,
    credit: Credit | None = None,
) -> Trajectory:
    class Agent:
        def __init__(self, task: Task) -> None:
            self.blocking = blocking

        def play(self, llm: Endpoint, seed: int) -> Any:
            assert seed == 7
            return agent(llm)

    if credit is not None:
        Agent.credit = staticmethod(credit)  # type: ignore[attr-defined]

    gateway, listener = AgentGateway(chat, model_name="tiny"), bind("127.0.0.1", 0)
    gateway.url = url_of("127.0.0.1", listener)
    ended: list[Trajectory] = []
    async with listening(gateway, listener):
        manager = EnvManager(
            settings or config(),
            make=Agent,  # type: ignore[arg-type]
            policy=policy,
            grants=grants or Always(),
            chat=chat,
            gateway=gateway,
        )
        await manager.play(job or one(), lambda trajectory, text: ended.append(trajectory))
    (trajectory,) = ended
    return trajectory


async def two_conversations(llm: Endpoint) -> float:
    await converse(llm, "a", "b")
    await converse(llm, "c")
    return 1.0


async def test_an_agent_may_credit_each_conversation(chat: ChatTokenizer) -> None:
    heard: list[Any] = []

    def credit(reward: float, conversations: Any) -> list[Any]:
        heard.extend([reward, *([message["content"] for message in each] for each in conversations)])
        return [0.25, (2.0, "helper")]

    policy = ScriptedPolicy(says(chat, "x", "y", "z"))
    trajectory = await play(chat, policy, two_conversations, credit=credit)
    assert heard == [1.0, ["a", "x", "b", "y"], ["c", "z"]]
    assert (trajectory.reward, trajectory.error) == (1.0, None)
    first, second = trajectory.formulate("branches")
    assert (first.credit, second.credit) == ((0.25, ""), (2.0, "helper"))
    assert [turn.reward for turn in first.turns] == [0.0, 0.25]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([1.0], "returned [1.0], not a list of one reward for each of 2 conversations"),
        (1.0, "returned 1.0, not a list"),
        ([1.0, float("nan")], "the reward is nan"),
        ([1.0, None], "returned None for a conversation"),
        ([1.0, (1.0, 3)], "returned (1.0, 3) for a conversation"),
    ],
)
async def test_wrong_credits_fail_their_episode(chat: ChatTokenizer, given: Any, message: str) -> None:
    policy = ScriptedPolicy(says(chat, "x", "y", "z"))
    trajectory = await play(chat, policy, two_conversations, credit=lambda reward, conversations: given)
    assert trajectory.status == "failed" and message in (trajectory.error or "")
    assert "Agent.credit" in (trajectory.error or "")


@pytest.mark.parametrize("page", [{"Origin": "https://evil.example"}, {"Host": "evil.example"}])
async def test_no_web_page_takes_a_turn_of_an_episode(chat: ChatTokenizer, page: dict[str, str]) -> None:
    async def agent(llm: Endpoint) -> float:
        body = {"messages": [{"role": "user", "content": "a"}]}
        where = f"{llm.base_url}/chat/completions"
        async with aiohttp.ClientSession(headers=page) as session, session.post(where, json=body) as reply:
            assert reply.status == 403
        return 1.0

    trajectory = await play(chat, ScriptedPolicy(says(chat, "a")), agent)
    assert not trajectory.turns


@pytest.mark.parametrize("treatment", ["count", "fail"])
async def test_an_agent_that_swallows_a_refusal_is_noticed(
    chat: ChatTokenizer, treatment: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def agent(llm: Endpoint) -> float:
        messages: list[Any] = [{"role": "user", "content": "a"}]
        async with client_of(llm, max_retries=0) as client:
            await client.chat.completions.create(model=llm.model, messages=messages)
            for _ in range(2):
                with pytest.raises(openai.BadRequestError):
                    await client.chat.completions.create(model=llm.model, messages=messages, frequency_penalty=0.5)
        return 1.0

    tree = {"env": {"max_new_tokens": 8, "refused_requests": treatment}, "model": {"max_context": 96}}
    trajectory = await play(chat, ScriptedPolicy(says(chat, "a")), agent, settings=Config.model_validate(tree))
    reason = "frequency_penalty: not served in an episode"
    assert sum(reason in record.getMessage() for record in caplog.records) == 1
    if treatment == "count":
        assert (trajectory.status, trajectory.reward, trajectory.error) == ("completed", 1.0, None)
    else:
        assert trajectory.status == "failed" and reason in (trajectory.error or "")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_conversation_without_a_new_message_counts_as_refused(chat: ChatTokenizer, stream: bool) -> None:
    async def agent(llm: Endpoint) -> float:
        messages: list[Any] = [{"role": "user", "content": "a"}]
        async with client_of(llm, max_retries=0) as client:
            await client.chat.completions.create(model=llm.model, messages=messages)
            messages += [{"role": "assistant", "content": "a"}]
            with pytest.raises(openai.APIError, match="ends with the assistant's own answer"):
                reply = await client.chat.completions.create(model=llm.model, messages=messages, stream=stream)
                if stream:
                    async for _ in reply:
                        pass
        return 1.0

    tree = {"env": {"max_turns": 4, "max_new_tokens": 8, "refused_requests": "fail"}, "model": {"max_context": 96}}
    trajectory = await play(chat, ScriptedPolicy(says(chat, "a")), agent, settings=Config.model_validate(tree))
    assert trajectory.status == "failed" and "own answer" in (trajectory.error or "")


@pytest.mark.parametrize("size", [95, 200, 50_000])
async def test_an_agent_that_fills_the_context_ends_its_episode(chat: ChatTokenizer, size: int) -> None:
    async def agent(llm: Endpoint) -> float:
        async with client_of(llm, max_retries=0) as client:
            messages: list[Any] = [{"role": "user", "content": "a"}]
            reply = await client.chat.completions.create(model=llm.model, messages=messages)
            messages += [reply.choices[0].message, {"role": "user", "content": "b" * size}]
            await client.chat.completions.create(model=llm.model, messages=messages)
        return 1.0

    tree = {"env": {"max_turns": 4, "max_new_tokens": 8, "refused_requests": "fail"}, "model": {"max_context": 96}}
    trajectory = await play(chat, ScriptedPolicy(says(chat, "a")), agent, settings=Config.model_validate(tree))
    assert (trajectory.status, trajectory.stop_reason, trajectory.error) == ("truncated", "max_length", None)


def client_of(llm: Endpoint, **settings: Any) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key, **settings)


def says(chat: ChatTokenizer, *texts: str) -> list[list[int]]:
    return [[*chat.encode(text), chat.eos_ids[0]] for text in texts]


async def converse(llm: Endpoint, *words: str) -> list[str]:
    """A conversation by the book: every answer is sent back as it came."""
    heard: list[str] = []
    messages: list[Any] = []
    async with client_of(llm) as client:
        for word in words:
            messages.append({"role": "user", "content": word})
            reply = await client.chat.completions.create(model=llm.model, messages=messages)
            heard.append(reply.choices[0].message.content or "")
            messages.append(reply.choices[0].message)
    return heard


async def test_what_an_agent_asks_becomes_its_episode(chat: ChatTokenizer) -> None:
    # A special token in mid-answer has no text: tokenised again, the history would differ.
    answers = says(chat, "ab<|user|>c", "de")
    policy = ScriptedPolicy(answers, policy_version=3)

    async def agent(llm: Endpoint) -> float:
        assert await converse(llm, "one", "two") == ["abc", "de"]
        return 0.5

    grants = Always()
    trajectory = await play(chat, policy, agent, grants=grants)
    assert (trajectory.status, trajectory.reward, trajectory.error) == ("completed", 0.5, None)
    first, second = trajectory.turns
    assert [part.token_ids for turn in trajectory.turns for part in turn.segments] == answers
    assert first.observation_ids == chat.prompt([{"role": "user", "content": "one"}])
    assert second.observation_ids == chat.continuation([{"role": "user", "content": "two"}], ended=True)
    assert policy.prompts[1] == [*first.observation_ids, *answers[0], *second.observation_ids]
    sample = trajectory.flatten()
    assert set(sample.versions[sample.loss_mask == 1]) == {3} and grants.asked == [False]


AGAIN = {"x-stainless-retry-count": "1"}
"""What the official SDKs send with a retry."""


async def ask_natively(
    session: aiohttp.ClientSession, llm: Endpoint, headers: dict[str, str] | None = None, **body: Any
) -> tuple[int, Any]:
    url = f"{llm.base_url.removesuffix('/v1')}/generate"
    async with session.post(url, json={"return_logprob": True, **body}, headers=headers) as reply:
        return reply.status, await reply.json()


async def test_an_agent_may_speak_tokens(chat: ChatTokenizer) -> None:
    answers = says(chat, "abc", "de")

    async def agent(llm: Endpoint) -> float:
        history = chat.prompt([{"role": "user", "content": "one"}])
        async with aiohttp.ClientSession() as session:
            for answer in answers:
                for headers in ({}, AGAIN):  # a retry is no further turn
                    status, reply = await ask_natively(session, llm, headers, input_ids=history)
                    assert (status, reply["output_ids"]) == (200, answer)
                assert [span["version"] for span in reply["meta_info"]["weight_versions"]] == ["3"]
                assert len(reply["meta_info"]["output_token_logprobs"]) == len(answer)
                history = [*history, *answer, *chat.continuation([{"role": "user", "content": "two"}], ended=True)]
            for refused in (
                {"logprob_start_len": 0},
                {"sampling_params": {"min_new_tokens": 2}},
                {"input_ids": [10_000]},
            ):
                status, reply = await ask_natively(session, llm, **{"input_ids": history, **refused})
                assert status == 400 and reply["error"]["message"]
        return 1.0

    trajectory = await play(chat, ScriptedPolicy(answers, policy_version=3), agent)
    assert (trajectory.status, trajectory.reward, trajectory.error) == ("completed", 1.0, None)
    assert [part.token_ids for turn in trajectory.turns for part in turn.segments] == answers


async def test_a_blocking_agent_with_the_plain_client_streams(chat: ChatTokenizer) -> None:
    def agent(llm: Endpoint) -> Any:
        with OpenAI(base_url=llm.base_url, api_key="anything: the url says it") as client:
            stream = client.chat.completions.create(
                model=llm.model, messages=[{"role": "user", "content": "x"}], stream=True, logprobs=True
            )
            chunks = [chunk.choices[0] for chunk in stream]
            assert sum(len(chunk.logprobs.content or ()) for chunk in chunks if chunk.logprobs) == len("hello") + 1
            return float("".join(chunk.delta.content or "" for chunk in chunks) == "hello")

    trajectory = await play(chat, ScriptedPolicy(says(chat, "hello")), agent, blocking=True)
    assert (trajectory.reward, len(trajectory.turns)) == (1.0, 1)


async def test_the_key_alone_tells_the_episode_too(chat: ChatTokenizer) -> None:
    async def agent(llm: Endpoint) -> float:
        shared = llm.base_url.partition("/s/")[0] + "/v1"
        async with AsyncOpenAI(base_url=shared, api_key=llm.api_key) as client:
            reply = await client.completions.create(model="any", prompt=chat.prompt([{"role": "user", "content": "x"}]))
            assert (await client.models.list()).data[0].id == "tiny"
        return float(reply.choices[0].text == "hey")

    assert (await play(chat, ScriptedPolicy(says(chat, "hey")), agent)).reward == 1.0


async def test_a_retry_gets_the_answer_that_is_being_made(chat: ChatTokenizer) -> None:
    policy = Gated(says(chat, "once", "twice"))

    async def agent(llm: Endpoint) -> float:
        async with client_of(llm, timeout=0.3, max_retries=5) as client:
            asyncio.get_running_loop().call_later(0.8, policy.let.set)
            reply = await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "x"}])
        return float(reply.choices[0].message.content == "once")

    trajectory = await play(chat, policy, agent)
    assert (trajectory.reward, len(policy.prompts), len(trajectory.turns)) == (1.0, 1, 1)


async def test_a_late_retry_gets_the_answer_of_its_turn(chat: ChatTokenizer) -> None:
    policy = ScriptedPolicy(says(chat, "a<|user|>b", "c<|user|>d", "e"), policy_version=3)

    async def agent(llm: Endpoint) -> float:
        messages: list[Any] = [{"role": "user", "content": "one"}]
        async with client_of(llm) as client:
            first = await client.chat.completions.create(model=llm.model, messages=messages)
            messages += [first.choices[0].message, {"role": "user", "content": "two"}]
            second = await client.chat.completions.create(model=llm.model, messages=messages)
            again = await client.chat.completions.create(model=llm.model, messages=messages, extra_headers=AGAIN)
        return float(second.choices[0].message.content == again.choices[0].message.content == "cd")

    trajectory = await play(chat, policy, agent)
    assert (trajectory.reward, len(trajectory.turns), len(policy.prompts)) == (1.0, 2, 2)


async def test_a_short_answer_does_not_shorten_the_next(chat: ChatTokenizer) -> None:
    async def agent(llm: Endpoint) -> float:
        messages: list[Any] = [{"role": "user", "content": "x"}]
        async with client_of(llm) as client:
            first = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=1)
            messages += [first.choices[0].message, {"role": "user", "content": "y"}]
            second = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=500)
        assert (first.choices[0].finish_reason, first.choices[0].message.content) == ("length", "l")
        return float(second.choices[0].message.content == "longer")

    trajectory = await play(chat, ScriptedPolicy(says(chat, "long", "longer")), agent)
    assert (trajectory.reward, trajectory.status) == (1.0, "completed")


async def test_an_agent_that_does_not_wait_for_its_answer_ends_without_it(chat: ChatTokenizer) -> None:
    policy = Gated(says(chat, "a", "b"))

    async def agent(llm: Endpoint) -> float:
        policy.let.set()
        await converse(llm, "x")
        policy.let.clear()
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(converse(llm, "x", "y"), 0.2)
        return 1.0

    trajectory = await play(chat, policy, agent)
    assert (trajectory.status, trajectory.reward, len(trajectory.turns)) == ("completed", 1.0, 1)


async def test_a_lost_server_is_an_error_worth_trying_again(chat: ChatTokenizer) -> None:
    class Lost(ScriptedPolicy):
        async def generate(self, *args: Any) -> list[Segment]:
            raise RolloutError("http://there", "got no answer")

    async def agent(llm: Endpoint) -> float:
        async with client_of(llm, max_retries=0) as client:
            await client.chat.completions.create(model=llm.model, messages=[{"role": "user", "content": "x"}])
        return 1.0

    trajectory = await play(chat, Lost([]), agent)
    assert trajectory.status == "failed" and "http://there: got no answer" in (trajectory.error or "")


async def test_after_the_end_nothing_more_is_said(chat: ChatTokenizer) -> None:
    kept: list[Endpoint] = []

    async def agent(llm: Endpoint) -> float:
        kept.append(llm)
        await converse(llm, "x")
        return 1.0

    gateway, listener = AgentGateway(chat, model_name="tiny"), bind("127.0.0.1", 0)
    gateway.url = url_of("127.0.0.1", listener)
    async with listening(gateway, listener):
        manager = EnvManager(
            config(),
            make=lambda task: type("Agent", (), {"play": lambda self, llm, seed: agent(llm)})(),
            policy=ScriptedPolicy(says(chat, "a")),
            grants=Always(),
            chat=chat,
            gateway=gateway,
        )
        await manager.play(one(), lambda trajectory, text: None)
        async with client_of(kept[0]) as client:
            with pytest.raises(openai.APIStatusError, match="this episode is over") as caught:
                await client.models.list()
        assert caught.value.status_code == 410
        async with AsyncOpenAI(base_url=f"{gateway.url}/s/guessed/v1", api_key="guessed") as stranger:
            with pytest.raises(openai.AuthenticationError, match="no episode has this key"):
                await stranger.models.list()


@pytest.mark.parametrize("asked", [{"frequency_penalty": 0.5}, {"logit_bias": {"5": 1}}, {"seed": 3, "logprobs": True}])
async def test_what_would_change_the_policys_answer_is_refused(chat: ChatTokenizer, asked: dict[str, Any]) -> None:
    async def agent(llm: Endpoint) -> float:
        async with client_of(llm) as client:
            await client.chat.completions.create(
                model=llm.model, messages=[{"role": "user", "content": "x"}], temperature=0.3, **asked
            )
        return 1.0

    trajectory = await play(chat, ScriptedPolicy(says(chat, "a")), agent)
    if "seed" in asked:  # sampling is the run's own, whatever is asked
        assert trajectory.status == "completed"
    else:
        assert trajectory.status == "failed" and "BadRequestError" in (trajectory.error or "")


async def test_an_agent_that_wants_more_turns_than_there_are_is_cut(chat: ChatTokenizer) -> None:
    async def agent(llm: Endpoint) -> float:
        await converse(llm, "1", "2", "3")
        return 1.0

    trajectory = await play(chat, ScriptedPolicy(says(chat, "a", "b", "c")), agent, settings=config(max_turns=2))
    assert (trajectory.status, trajectory.reward, len(trajectory.turns)) == ("truncated", 0.0, 2)


async def test_a_long_answer_is_cut_by_grants_and_goes_on(chat: ChatTokenizer) -> None:
    answer = says(chat, "abcdefg")[0]

    def whole(prompt_ids: list[int], seed: int) -> list[int]:
        return answer[len(prompt_ids) - len(chat.prompt([{"role": "user", "content": "x"}])) :]

    settings = Config.model_validate(
        {
            "env": {"max_new_tokens": 8},
            "model": {"max_context": 96},
            "scheduler": {"segment_length": 3},
        }
    )

    async def agent(llm: Endpoint) -> float:
        assert await converse(llm, "x") == ["abcdefg"]
        return 1.0

    grants = Always(max_tokens=3)
    job = leased(range(1), max_tokens=3, sampling=Sampling(max_new_tokens=8), deadline_s=20.0, env_seed=7)
    trajectory = await play(chat, ScriptedPolicy(whole), agent, settings=settings, grants=grants, job=job)
    assert [len(part.token_ids) for part in trajectory.turns[0].segments] == [3, 3, 2]
    assert (trajectory.status, grants.asked) == ("completed", [True, True])


@pytest.mark.parametrize(("reward", "message"), [(None, "no reward"), (1.0, "sent no request to the policy")])
async def test_an_agent_that_plays_wrong_fails_its_episode(chat: ChatTokenizer, reward: Any, message: str) -> None:
    async def agent(llm: Endpoint) -> Any:
        if reward is None:
            await converse(llm, "x")
        return reward

    trajectory = await play(chat, ScriptedPolicy(says(chat, "a")), agent)
    assert trajectory.status == "failed" and message in (trajectory.error or "")


async def test_an_agent_that_never_ends_is_a_stall(chat: ChatTokenizer) -> None:
    async def agent(llm: Endpoint) -> float:
        await converse(llm, "x")
        await asyncio.Event().wait()
        return 1.0

    trajectory = await play(chat, ScriptedPolicy(says(chat, "a")), agent, job=one(deadline_s=0.3))
    assert trajectory.status == "failed" and "held by its agent" in (trajectory.error or "")
