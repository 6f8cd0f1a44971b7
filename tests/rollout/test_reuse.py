"""Reused keys and values change no token and no log-probability, whatever happens to the requests and the weights."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_policy import (
    MAX_CONTEXT,
    VOCAB_SIZE,
    make_engine,
    make_request,
    reference_logprobs,
    reference_model,
    run,
    score,
    sharing_blocks,
    weights,
)

from penstock.rollout import admission
from penstock.rollout.prefix_cache import BLOCK_TOKENS
from penstock.rollout.request import GenerateRequest
from penstock.rollout.shared_blocks import BlockMemory
from penstock.rollout.slot_engine import Finished, SlotEngine
from penstock.samples import Segment


@pytest.fixture(autouse=True, scope="module", params=[False, True], ids=["slots", "shared blocks"])
def _memory(request: pytest.FixtureRequest) -> Iterator[None]:
    with sharing_blocks(BLOCK_TOKENS) if request.param else nullcontext():
        yield


NUM_WEIGHTS = 4
"""Version n has the weights of seed n % NUM_WEIGHTS."""


def drawn(numbers: random.Random, count: int) -> list[int]:
    return [numbers.randrange(2, VOCAB_SIZE) for _ in range(count)]


class Episodes:
    """Groups of episodes in one engine. Each ended answer becomes the beginning of the next prompts of its episode."""

    def __init__(self, engine: SlotEngine, seed: int) -> None:
        self.engine, self.numbers = engine, random.Random(seed)
        self.requests: dict[str, GenerateRequest] = {}
        self.segments: dict[str, list[Segment]] = {}
        self._observations = [drawn(self.numbers, 40) for _ in range(2)]

    def submit(self) -> None:
        """A prompt of one of few tasks, or a turn that continues an answer; of one sample or several."""
        history = self.numbers.choice([[], *self._histories()])
        observation = self.numbers.choice(self._observations)[: self.numbers.randint(1, 40)]
        prompt = (history + observation)[: MAX_CONTEXT - 12]
        seeds = tuple(self.numbers.randrange(1000) for _ in range(self.numbers.choice((1, 1, 3))))
        limits = tuple(self.numbers.randint(1, 12) for _ in seeds)
        request = make_request(str(len(self.requests)), prompt, max_new_tokens=limits, seeds=seeds)
        self.requests[request.rid] = request
        self.engine.submit(request)

    def _histories(self) -> list[list[int]]:
        ended = self.segments.items()
        return [self.requests[rid].prompt_ids + each.token_ids for rid, segments in ended for each in segments]

    def step(self) -> None:
        self._take(self.engine.step())

    def abort(self) -> None:
        if running := self.requests.keys() - self.segments.keys():
            self._take(self.engine.abort([self.numbers.choice(sorted(running))]))

    def finish(self) -> None:
        while self.engine.has_work:
            self.step()
        assert self.segments.keys() == self.requests.keys()

    def _take(self, finished: list[Finished]) -> None:
        for each in finished:
            assert each.error is None
            self.segments[each.request.rid] = each.segments

    def samples(self) -> list[tuple[list[int], Segment]]:
        """Each prompt with each of its samples."""
        found = [(self.requests[rid].prompt_ids, each) for rid, segments in self.segments.items() for each in segments]
        return [(prompt, each) for prompt, each in found if each.token_ids]  # an abort may come before the first token


calls = st.lists(st.sampled_from(["submit", "submit", "step", "step", "step", "abort", "update"]), max_size=40)
sizes = st.sampled_from([0, 48, 96, 1000])
"""Of the cache, in tokens: none, less than a context, one context, and more than all requests need."""
budgets = st.sampled_from([16, 40, 4096])


def played(calls: list[str], num_cached: int, budget: int, seed: int, *, retracts: bool) -> Episodes:
    """Return ended episodes. `retracts`: whether running samples are retracted at each update."""
    episodes = Episodes(make_engine(num_slots=3, num_cached=num_cached), seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(admission, "PREFILL_TOKENS", budget)
        for call in calls:
            if call == "update":
                version = episodes.engine.policy_version + 1
                episodes.engine.load_weights(weights(version % NUM_WEIGHTS), version)
                if retracts:
                    episodes.engine.retract()
            else:
                getattr(episodes, call)()
        episodes.finish()
    return episodes


@settings(deadline=None, max_examples=40, derandomize=True)
@given(calls, sizes, budgets, st.integers(0, 1000))
def test_log_probabilities_are_those_of_a_plain_pass_through_updates_in_place(
    calls: list[str], num_cached: int, budget: int, seed: int
) -> None:
    """A sample keeps its keys through updates, and no other sample gets one of older weights."""
    episodes = played(calls, num_cached, budget, seed, retracts=False)
    for prompt, segment in episodes.samples():
        seeds = [(span.start, span.policy_version % NUM_WEIGHTS) for span in segment.spans]
        expected = reference_logprobs(prompt, segment.token_ids, seeds=seeds)
        assert segment.logprobs == pytest.approx(expected, abs=1e-4)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(calls, sizes, budgets, st.integers(0, 1000))
def test_after_a_retraction_all_keys_are_of_the_new_weights(
    calls: list[str], num_cached: int, budget: int, seed: int
) -> None:
    episodes = played(calls, num_cached, budget, seed, retracts=True)
    for prompt, segment in episodes.samples():
        for span in segment.spans:
            expected = plain_logprobs(prompt, segment.token_ids, seed=span.policy_version % NUM_WEIGHTS)
            assert segment.logprobs[span.start : span.end] == pytest.approx(expected[span.start : span.end], abs=1e-4)


def plain_logprobs(prompt: list[int], token_ids: list[int], *, seed: int) -> list[float]:
    """Of one pass over all tokens."""
    with torch.inference_mode():
        logits = reference_model(seed)(torch.tensor([prompt + token_ids]), use_cache=False).logits[0]
    logprobs = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    return logprobs.gather(1, torch.tensor(token_ids).view(-1, 1))[:, 0].tolist()


@settings(deadline=None, max_examples=20, derandomize=True)
@given(sizes, budgets, st.integers(0, 1000))
def test_the_same_seeds_give_the_same_tokens_as_without_reuse(num_cached: int, budget: int, seed: int) -> None:
    reusing, plain = (Episodes(make_engine(num_slots=3, num_cached=size), seed) for size in (num_cached, 0))
    for _ in range(3):  # turns of all episodes: answers are equal, so later prompts are too
        for _ in range(4):
            reusing.submit()
            plain.submit()
        plain.finish()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(admission, "PREFILL_TOKENS", budget)
            reusing.finish()
        reusing.segments = dict(sorted(reusing.segments.items()))
        plain.segments = dict(sorted(plain.segments.items()))
    for rid, segments in plain.segments.items():
        for found, expected in zip(reusing.segments[rid], segments, strict=True):
            assert found.token_ids == expected.token_ids
            assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-4)


PROMPT = drawn(random.Random(5), 40)


def computed(engine: SlotEngine, *requests: GenerateRequest) -> tuple[int, int]:
    """Serve requests. Return how many prompt tokens were computed, and how many reused."""
    counts = [0, 0]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        assert all(each.error is None for each in engine.step())
        counts[0] += engine.num_prefilled
        counts[1] += engine.num_reused
    return counts[0], counts[1]


def test_a_turn_computes_what_is_new() -> None:
    engine, history = make_engine(), list[int]()
    for turn, observation in enumerate((PROMPT, PROMPT[:7], PROMPT[:3])):
        prompt = history + observation
        engine.submit(make_request("turn", prompt, seeds=(turn,)))
        (finished,) = engine.step()[:1] or [None]
        known = max(len(history) - 1, 0) // BLOCK_TOKENS * BLOCK_TOKENS  # the newest token is not computed yet
        assert (engine.num_prefilled, engine.num_reused) == (len(prompt) - known, known)
        while finished is None:
            (finished,) = engine.step() or [None]
        history = prompt + finished.segments[0].token_ids


def test_later_members_of_a_group_compute_the_end_of_the_prompt() -> None:
    engine = make_engine(num_slots=1)
    assert computed(engine, make_request("group", PROMPT, seeds=(1, 2, 3))) == (40 + 2 * 8, 2 * 32)
    whole = PROMPT[:32]
    assert computed(engine, make_request("same", whole)) == (16, 16), "the last token gives the logits"


@pytest.mark.parametrize("event", ["update", "retract", "forget", "release"])
def test_what_ends_the_use_of_keys_empties_the_cache(event: str) -> None:
    engine = make_engine()
    run(engine, make_request("a", PROMPT))
    engine.submit(make_request("b", PROMPT, max_new_tokens=20))
    engine.step()
    assert engine.num_cached > 0
    if event == "update":
        engine.load_weights(weights(1), 1)
    elif event == "retract":
        engine.retract()
    elif event == "forget":
        engine.forget_weights()
    else:
        engine.release()
    assert engine.num_cached == 0
    if event == "update":
        run(engine)
        assert engine.num_cached == 0, "its keys are of two versions"
    if event == "release":
        engine.resume()
    if event == "forget":
        engine.load_weights(weights(1), 1)
    engine.abort_all()
    if event != "retract":
        assert computed(engine, make_request("c", PROMPT)) == (40, 0)


def test_weights_that_get_another_name_keep_their_keys() -> None:
    engine = make_engine()
    run(engine, make_request("a", PROMPT))
    engine.rename_weights(5)
    assert computed(engine, make_request("b", PROMPT)) == (8, 32)


def test_an_aborted_answer_is_continued_without_computing_it_again() -> None:
    engine = make_engine()
    engine.submit(make_request("a", PROMPT, max_new_tokens=30, seeds=(3,)))
    for _ in range(20):
        engine.step()
    (segment,) = engine.abort(["a"])[0].segments
    rest = make_request("rest", PROMPT + segment.token_ids, max_new_tokens=10, seeds=(3,))
    assert computed(engine, rest) == (60 - 48, 48)
    whole = run(make_engine(), make_request("a", PROMPT, max_new_tokens=30, seeds=(3,)))["a"][0]
    again = run(engine, make_request("again", PROMPT + segment.token_ids, max_new_tokens=10, seeds=(3,)))["again"][0]
    assert segment.token_ids + again.token_ids == whole.token_ids


def test_scores_do_not_depend_on_the_cache() -> None:
    engine = make_engine()
    before = score(engine, PROMPT)
    run(engine, make_request("a", PROMPT))
    assert score(engine, PROMPT) == before


@pytest.fixture
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step computes at most 16 prompt tokens."""
    monkeypatch.setattr(admission, "PREFILL_TOKENS", BLOCK_TOKENS)


@pytest.mark.usefixtures("small_steps")
def test_running_samples_go_on_while_a_long_prompt_is_computed() -> None:
    engine, long = make_engine(num_slots=2), drawn(random.Random(1), 70)
    engine.submit(make_request("running", [5, 6], max_new_tokens=20, seeds=(1,)))
    engine.step()
    engine.submit(make_request("long", long, seeds=(2,)))
    counts = list[tuple[int, int, int, list[str]]]()
    for _ in range(5):
        engine.step()
        counts.append((engine.num_decoded, engine.num_prefilled, engine.num_reused, engine.begun))
    assert counts == [(1, 16, 0, [])] * 4 + [(1, 6, 0, ["long"])], "its own parts are not reused tokens"
    assert len(engine.sequences("running")[0].token_ids) == 6
    segments = run(engine)
    assert segments["long"] == approximately(run(make_engine(), make_request("long", long, seeds=(2,)))["long"])
    assert segments["running"] == approximately(
        run(make_engine(), make_request("running", [5, 6], max_new_tokens=20, seeds=(1,)))["running"]
    )


def approximately(segments: Sequence[Segment]) -> list[Segment]:
    return [
        Segment(
            token_ids=each.token_ids,
            logprobs=pytest.approx(each.logprobs, abs=1e-4),  # type: ignore[arg-type]
            spans=each.spans,
            finish_reason=each.finish_reason,
        )
        for each in segments
    ]


@pytest.mark.usefixtures("small_steps")
def test_a_prompt_that_the_cache_cannot_hold_is_computed_whole() -> None:
    engine = make_engine(num_cached=32)
    engine.submit(make_request("long", PROMPT))
    engine.step()
    assert (engine.num_prefilled, engine.begun) == (40, ["long"])


@pytest.mark.usefixtures("small_steps")
def test_an_aborted_prompt_in_parts_leaves_its_parts() -> None:
    engine = make_engine()
    engine.submit(make_request("a", PROMPT, seeds=(1, 2)))
    engine.step()
    assert (engine.num_active, engine.num_waiting, engine.num_cached) == (0, 2, 16)
    (aborted,) = engine.abort(["a"])
    assert [each.finish_reason for each in aborted.segments] == ["abort", "abort"]
    assert computed(engine, make_request("b", PROMPT)) == (24, 16)


@pytest.mark.usefixtures("small_steps")
def test_a_drain_begins_before_a_prompt_in_parts_has_samples() -> None:
    engine = make_engine()
    engine.submit(make_request("a", PROMPT))
    engine.step()
    engine.admitting = False
    assert engine.num_started == 0 and engine.step() == []
    engine.load_weights(weights(1), 1)
    engine.admitting = True
    (segment,) = run(engine)["a"]
    assert segment.logprobs == pytest.approx(reference_logprobs(PROMPT, segment.token_ids, seeds=((0, 1),)), abs=1e-4)


def memory_of(engine: SlotEngine) -> list[torch.Tensor]:
    """All keys and values that some sequence may read."""
    if isinstance(engine._memory, BlockMemory):
        return [engine._memory._data[:, 1:]]
    cache = engine._memory.cache
    return [cache._pool, cache._keys, cache._values]


@pytest.mark.usefixtures("small_steps")
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:16]], ids=["in parts", "whole"])
def test_values_that_are_not_finite_never_reach_the_cache(prompt: list[int]) -> None:
    engine = make_engine()
    engine.submit(make_request("running", [7, 8], max_new_tokens=40, seeds=(5,)))
    engine.step()
    run_before = engine.num_cached
    engine.load_weights({name: torch.full_like(tensor, torch.nan) for name, tensor in weights(0).items()}, 1)
    engine.abort_all()
    engine.submit(make_request("a", prompt, seeds=(1, 2)))
    (failed,) = engine.step()
    assert failed.request.rid == "a" and "not finite" in str(failed.error)
    assert run_before == engine.num_cached == 0 and not engine.has_work
    assert all(bool(each.isfinite().all()) for each in memory_of(engine))
    engine.load_weights(weights(1), 2)
    (segment,) = run(engine, make_request("b", prompt))["b"]
    assert segment.logprobs == pytest.approx(reference_logprobs(prompt, segment.token_ids, seeds=((0, 1),)), abs=1e-4)


@pytest.mark.usefixtures("small_steps")
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_a_failure_of_one_request_leaves_the_parts_of_another() -> None:
    def fail(token_ids: Sequence[int]) -> bool:
        raise RuntimeError("a bad end")

    engine = make_engine()
    bad = make_request("bad", [5, 6])
    engine.submit(GenerateRequest(**{name: getattr(bad, name) for name in bad.__slots__} | {"ends": fail}))
    engine.submit(make_request("long", PROMPT))
    finished = [each for _ in range(2) for each in engine.step()]
    assert [each.request.rid for each in finished] == ["bad"]
    (segment,) = run(engine)["long"]
    assert segment.logprobs == pytest.approx(reference_logprobs(PROMPT, segment.token_ids), abs=1e-4)
