"""What changes a row's logits before a token is drawn, seen through the engine."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from tiny_policy import (
    EOS,
    VOCAB_SIZE,
    make_engine,
    make_request,
    reference_logprobs,
    reference_model,
    run,
    score,
    weights,
)

from penstock.rollout.request import SamplingParams

PROMPT = [5, 9, 9]


def answer(**params: object) -> list[int]:
    """Greedy, 24 tokens if nothing ends it."""
    asked = SamplingParams(temperature=0.0, **{"ignore_eos": True, **params})  # type: ignore[arg-type]
    (segment,) = run(make_engine(0), make_request("a", PROMPT, max_new_tokens=24, params=asked))["a"]
    return segment.token_ids


def expected(adjust: object) -> list[int]:
    """Greedy by the plain model, one forward per token."""
    tokens: list[int] = []
    with torch.inference_mode():
        for _ in range(24):
            logits = reference_model(0)(input_ids=torch.tensor([PROMPT + tokens])).logits[0, -1].clone()
            adjust(logits, tokens)  # type: ignore[operator]
            tokens.append(int(logits.argmax()))
    return tokens


def test_frequency_and_presence_concern_what_was_answered() -> None:
    def adjust(logits: torch.Tensor, tokens: list[int]) -> None:
        for token, count in Counter(tokens).items():
            logits[token] -= 0.5 * count + 0.25

    found = answer(frequency_penalty=0.5, presence_penalty=0.25)
    assert found == expected(adjust) != answer()


def test_repetition_concerns_the_prompt_too() -> None:
    def adjust(logits: torch.Tensor, tokens: list[int]) -> None:
        for token in set(PROMPT + tokens):
            logits[token] = logits[token] / 10 if logits[token] > 0 else logits[token] * 10

    found = answer(repetition_penalty=10.0)
    assert found == expected(adjust) != answer()


def test_a_bias_decides_and_the_recorded_log_probabilities_stay_the_policys() -> None:
    asked = SamplingParams(temperature=0.0, ignore_eos=True, logit_bias={7: 100.0})
    (segment,) = run(make_engine(0), make_request("a", PROMPT, max_new_tokens=4, params=asked))["a"]
    assert segment.token_ids == [7] * 4
    assert segment.logprobs == pytest.approx(reference_logprobs(PROMPT, [7] * 4), abs=1e-4)


def test_no_answer_ends_before_its_least_length() -> None:
    asked = {"ignore_eos": False, "logit_bias": {EOS: 100.0}}
    assert answer(**asked) == [EOS]
    found = answer(**asked, min_new_tokens=3)
    assert len(found) == 4 and found[3] == EOS and EOS not in found[:3]


def test_neighbours_are_not_touched() -> None:
    plain = make_request("plain", PROMPT, params=SamplingParams(temperature=0.0, ignore_eos=True))
    biased = make_request("biased", PROMPT, params=SamplingParams(temperature=0.0, logit_bias={7: 100.0}))
    together, alone = run(make_engine(0), plain, biased), run(make_engine(0), plain)
    assert together["plain"][0].token_ids == alone["plain"][0].token_ids
    assert together["plain"][0].logprobs == pytest.approx(alone["plain"][0].logprobs, abs=1e-4)
    assert together["biased"][0].token_ids == [7] * 8


def test_the_likeliest_tokens_of_every_place() -> None:
    asked = SamplingParams(temperature=0.0, ignore_eos=True, top_logprobs=3)
    (segment,) = run(make_engine(0), make_request("a", PROMPT, params=asked))["a"]
    assert segment.top_logprobs is not None and [len(place) for place in segment.top_logprobs] == [3] * 8
    assert [place[0][1] for place in segment.top_logprobs] == segment.token_ids
    assert [place[0][0] for place in segment.top_logprobs] == pytest.approx(segment.logprobs)


def test_a_request_says_itself_where_its_samples_end() -> None:
    whole = answer()
    request = make_request("a", PROMPT, max_new_tokens=24, params=SamplingParams(temperature=0.0, ignore_eos=True))
    ending = dataclasses.replace(request, ends=lambda tokens: len(tokens) == 5)
    (segment,) = run(make_engine(0), ending)["a"]
    assert (segment.token_ids, segment.finish_reason) == (whole[:5], "stop")


def test_a_prompt_is_scored_while_others_are_being_served() -> None:
    engine = make_engine(0)
    engine.submit(make_request("a", PROMPT))
    engine.step()
    assert score(engine, [*PROMPT, 3, 8]) == pytest.approx(reference_logprobs(PROMPT[:1], [9, 9, 3, 8]), abs=1e-4)
    while engine.has_work:
        (finished,) = engine.step() or [None]
    assert finished is not None
    assert finished.segments == run(make_engine(0), make_request("a", PROMPT))["a"]


def test_a_long_prompt_is_computed_once_whatever_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, prompt, computed = make_engine(0), list(range(2, 32)), list[int]()
    whole = score(engine, prompt)
    forward = engine.model.forward

    def counted(input_ids: torch.Tensor, **options: Any) -> Any:
        computed.append(input_ids.shape[1])
        return forward(input_ids=input_ids, **options)

    monkeypatch.setattr(engine.model, "forward", counted)
    monkeypatch.setattr("penstock.rollout.slot_engine.SCORED_PLACES", 8)
    assert score(engine, prompt) == pytest.approx(whole, abs=1e-4)
    assert computed == [8, 8, 8, 5]
    assert whole == pytest.approx(reference_logprobs(prompt[:1], prompt[1:]), abs=1e-4)


def test_new_weights_score_what_is_left_as_if_they_had_seen_it_all(monkeypatch: pytest.MonkeyPatch) -> None:
    prompt = list(range(2, 22))
    expected = [score(make_engine(seed), prompt) for seed in (0, 1)]
    monkeypatch.setattr("penstock.rollout.slot_engine.SCORED_PLACES", 8)
    engine = make_engine(0)
    parts = engine.scoring(prompt)
    found = next(parts)
    engine.load_weights(weights(1), 1)
    found += [token for part in parts for token in part]
    assert [token.logprob for token in found] == pytest.approx(expected[0][:8] + expected[1][8:], abs=1e-4)


@pytest.mark.parametrize("wrong", [{"logit_bias": {VOCAB_SIZE: 1.0}}, {"stop_token_ids": frozenset({-1})}])
def test_tokens_outside_the_vocabulary_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="outside the vocabulary"):
        make_engine(0).check(make_request("a", PROMPT, params=SamplingParams(**wrong)))  # type: ignore[arg-type]
