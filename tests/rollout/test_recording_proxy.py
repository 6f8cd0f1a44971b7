"""The policy behind one address for programs of their own: whole answers, cut where they ask, and remembered."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from scripted_policy import ScriptedPolicy

from penstock.deadline import Stalled
from penstock.rollout.generation_cache import GenerationCache, Prefixes
from penstock.rollout.http import Refused
from penstock.rollout.recording_proxy import RecordingProxy, ServedVersions
from penstock.rollout.request import GenerateRequest, SamplingParams
from penstock.rollout.session import RolloutError
from penstock.samples import Segment, VersionSpan
from penstock.types import NO_VERSION


class Interrupted(ScriptedPolicy):
    """Gives way once: at first with nothing, or with what it has."""

    def __init__(self, *pieces: Segment) -> None:
        super().__init__([])
        self.pieces = list(pieces)
        self.prompts: list[list[int]] = []

    async def generate(self, prompt_ids: Sequence[int], *args: Any) -> list[Segment]:
        self.prompts.append(list(prompt_ids))
        return [self.pieces.pop(0)]


def piece(*token_ids: int, version: int, reason: Any) -> Segment:
    spans = [VersionSpan(version, 0, len(token_ids))] if token_ids else []
    return Segment(token_ids=list(token_ids), logprobs=[-0.5] * len(token_ids), spans=spans, finish_reason=reason)


def request(**changes: Any) -> GenerateRequest:
    settings = {"rid": "r", "prompt_ids": [1, 2], "params": SamplingParams(), "max_new_tokens": (8,), "seeds": (7,)}
    return GenerateRequest(**(settings | changes))


def relay(
    policy: Any, remembered: GenerationCache | None = None, *, is_open: bool = True, published: int = 9
) -> RecordingProxy:
    return RecordingProxy(
        policy,
        remembered or GenerationCache(),
        name="outside",
        max_context=16,
        is_open=lambda: is_open,
        published=lambda: published,
    )


async def test_what_it_says_is_remembered_by_its_prompt() -> None:
    remembered = GenerationCache()
    through = relay(ScriptedPolicy([[5, 6], [7]], policy_version=4), remembered)
    params = SamplingParams(temperature=0.5)
    segments = await through.generate(request(params=params, max_new_tokens=(8, 8), seeds=(1, 2)))
    assert [segment.token_ids for segment in segments] == [[5, 6], [7]]
    found = remembered.answers(Prefixes([1, 2]), len([1, 2]))
    assert [each.segment() for each in found] == segments[::-1]
    assert {each.sampling.temperature for each in found} == {0.5} and remembered.answers(Prefixes([1]), len([1])) == []
    assert through.policy_version == 4


async def test_an_answer_that_was_given_up_goes_on_from_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.rollout.recording_proxy.PAUSE_S", 0.0)
    policy = Interrupted(
        piece(5, 6, version=3, reason="abort"),
        piece(version=3, reason="abort"),
        piece(9, version=4, reason="stop"),
    )
    (segment,) = await relay(policy).generate(request())
    assert policy.prompts == [[1, 2], [1, 2, 5, 6], [1, 2, 5, 6]]
    assert segment.token_ids == [5, 6, 9] and segment.finish_reason == "stop"
    assert segment.spans == [VersionSpan(3, 0, 2), VersionSpan(4, 2, 3)]


@pytest.mark.parametrize(
    "stop",
    [{"params": SamplingParams(stop_token_ids=frozenset({6}))}, {"ends": lambda ids: ids[-1] == 6}],
    ids=["at a token", "at a string"],
)
async def test_an_answer_ends_where_its_caller_wants_it_to(stop: dict[str, Any]) -> None:
    remembered = GenerationCache()
    (segment,) = await relay(ScriptedPolicy([[5, 6, 7]], policy_version=4), remembered).generate(request(**stop))
    assert segment.token_ids == [5, 6] and segment.finish_reason == "stop"
    assert segment.spans == [VersionSpan(4, 0, 2)] and len(segment.logprobs) == 2
    assert remembered.answers(Prefixes([1, 2]), len([1, 2]))[0].segment().token_ids == [5, 6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"params": SamplingParams(min_p=0.1, frequency_penalty=1.0)}, "does not serve frequency_penalty, min_p"),
        ({"max_new_tokens": (15,)}, "2 prompt tokens and 15 new ones do not fit into model.max_context 16"),
    ],
)
def test_what_servers_are_not_asked_for_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        relay(ScriptedPolicy([])).check(request(**changes))


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (RolloutError("http://a", "no such token", 400), 400),
        (RolloutError("http://a", "got no answer"), 503),
        (RolloutError("http://a", "broke", 500), 503),
        (Stalled(waiter="a", resource="b", holder="c", seconds=1.0), 503),
    ],
)
async def test_only_its_own_faults_are_the_callers(error: Exception, status: int) -> None:
    class Broken(ScriptedPolicy):
        async def generate(self, *args: Any) -> list[Segment]:
            raise error

    with pytest.raises(Refused) as refused:
        await relay(Broken([])).generate(request())
    assert refused.value.status == status


def test_there_is_nothing_to_answer_with_before_the_run_begins() -> None:
    assert relay(ScriptedPolicy([]), is_open=False).policy_version == NO_VERSION


def test_the_oldest_policy_that_may_have_spoken_since_then() -> None:
    served = ServedVersions()
    assert served.oldest_since(0.0) == served.newest == NO_VERSION
    for now, version in ((10.0, 3), (20.0, 4), (21.0, 4), (30.0, 6)):
        served.note([piece(5, version=version, reason="stop")], published=6, now=now)
    assert [served.oldest_since(then) for then in (0.0, 15.0, 20.0, 29.0, 40.0)] == [3, 3, 4, 4, 6]
    assert served.newest == 6


async def test_a_server_that_claims_versions_that_do_not_exist_changes_nothing() -> None:
    policy = ScriptedPolicy([[5]] * 4, policy_version=2**31 - 1)
    through = relay(policy, published=3)
    for claimed, newest in ((2**31 - 1, 0), (3, 3), (4, 3), (9000, 3)):
        policy.policy_version = claimed
        await through.generate(request())
        assert through.policy_version == newest


async def test_answers_that_were_asked_for_together_all_come() -> None:
    through = relay(ScriptedPolicy([[5]] * 4, policy_version=1))
    answers = await asyncio.gather(*(through.generate(request(prompt_ids=[number])) for number in range(4)))
    assert [answer[0].token_ids for answer in answers] == [[5]] * 4
