"""Pushed groups: what is refused, and what the policy said is found again token by token."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest

from penstock.compat.pushed_groups import Provenance, ProvenanceMatch, PushedGroup, parse, read_group
from penstock.config import Config
from penstock.rollout.generation_cache import GenerationCache, Prefixes
from penstock.samples import Segment, Trajectory, VersionSpan
from penstock.types import EpisodeId, FinishReason, Sampling

VOCAB_SIZE = 100
CONFIG = Config.model_validate(
    {"env": {"group_size": 2, "max_new_tokens": 8}, "model": {"max_context": 16}, "trainer": {"steps": 1}}
)
OLDEST = 3


def group(**changes: Any) -> dict[str, Any]:
    tokens = [[1, 2, 10, 11], [1, 2, 12]]
    masks = [[-100, -100, 10, 11], [-100, -100, 12]]
    return {"tokens": tokens, "masks": masks, "scores": [1.0, 0.0], "env_id": 0} | changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [1.0, math.nan]}, r"scores\[1\] is nan"),
        ({"scores": [1.0, 1e308]}, r"scores\[1\] is 1e\+308, not a number from -1000000 to 1000000"),
        ({"scores": [1.0, 10**400]}, r"scores\[1\]"),
        ({"scores": [1.0]}, r"scores holds 1 sequences, and env.group_size is 2: .*--env.group_size 2"),
        ({"tokens": [[1, 2]] * 3}, "tokens holds 3 sequences"),
        ({"masks": [[-100, -100, 10], [-100, -100, 12]]}, r"masks\[0\] has 3 values for the 4 of tokens\[0\]"),
        ({"masks": [[-100, -100, 10, 9], [-100] * 3]}, r"masks\[0\]\[3\] is 9, neither -100 nor the token 11"),
        ({"tokens": [[1, 2, 10, 11], [1, 2, 100]]}, r"tokens\[1\]\[2\] is 100, .* model's own tokenizer"),
        (
            {"tokens": [[1] * 17, [1]], "masks": [[-100] * 17, [-100]]},
            r"tokens\[0\] are 17, more than model.max_context",
        ),
        ({"tokens": [[1, "2"], [1]]}, r"Expected `int`, got `str` - at `tokens\[0\]\[1\]`"),
        ({"tokens": [[1, 2**70], [1]], "masks": [[-100] * 2, [-100]]}, r"tokens\[0\] .* that no token can be"),
        ({"tokens": None}, "`tokens`"),
        ({"masks": [[-100] * 4, [-100] * 3]}, "masks hold no token to train: all are -100"),
        ({"tokens": [[1, 2], []], "masks": [[-100, 2], []]}, r"tokens\[1\] is empty"),
        ({"inference_logprobs": [[1.0], [1.0]]}, "inference_logprobs do not have a value for every token"),
        ({"advantages": [[0.1]]}, "advantages are not served"),
        ({"overrides": [{"set_advantage_to_zero": True}, {}]}, r"overrides\[0\] are not served"),
        ({"overrides": [{"x": "y" * 10_000}, {}]}, r"overrides\[0\] are not served.{,100}$"),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_group(group(**changes), CONFIG, vocab_size=VOCAB_SIZE)


def test_what_environments_send_beside_it_does_no_harm() -> None:
    """The aggregator of `collect_trajectory` sends empty lists, and nulls for the rest."""
    empty = {"advantages": [], "ref_logprobs": [], "messages": [], "overrides": [], "images": [], "group_overrides": {}}
    data = read_group(
        group(**empty, distill_logprobs=None, generation_params=None, unheard_of=1), CONFIG, vocab_size=VOCAB_SIZE
    )
    assert data.scores == [1.0, 0.0]


def test_a_body_that_is_no_json_is_refused() -> None:
    with pytest.raises(ValueError, match="not JSON"):
        parse(b"{")
    assert math.isnan(parse(json.dumps({"score": math.nan}).encode())["score"])


def said(token_ids: list[int], *, version: int = 5, reason: FinishReason = "stop") -> Segment:
    logprobs = [-token / 100 for token in token_ids]
    spans = [VersionSpan(version, 0, 1), VersionSpan(version + 1, 1, len(token_ids))]
    return Segment(token_ids=token_ids, logprobs=logprobs, spans=spans[: len(token_ids)], finish_reason=reason)


@pytest.fixture
def remembered() -> GenerationCache:
    """The policy was asked [1, 2] and said three things; then one thing more in the first conversation."""
    remembered = GenerationCache()
    remembered.add([1, 2], said([10, 11]), Sampling())
    remembered.add([1, 2], said([12], reason="length"), Sampling())
    remembered.add([1, 2], said([13, 14]), Sampling(temperature=0.5))
    remembered.add([1, 2, 10, 11, 3], said([15, 16], version=8), Sampling())
    return remembered


def trace(remembered: GenerationCache, **changes: Any) -> ProvenanceMatch:
    return Provenance(remembered, CONFIG, Letters()).match(group(**changes), oldest_version=OLDEST)


class Letters:
    """Token 36 reads as 10 does: every letter has several tokens."""

    vocab_size = VOCAB_SIZE

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(chr(ord("a") + token % 26) for token in token_ids)


def flat(traced: ProvenanceMatch, number: int) -> dict[str, Any]:
    """Of a member: (token, log-probability, version) of what is trained, and all tokens."""
    scored = traced.episodes[number]
    episode = EpisodeId("train", 0, number, 0)
    whole = Trajectory(
        episode=episode, task_id="", turns=scored.turns, reward=scored.reward, status=scored.status
    ).flatten()
    trained = whole.loss_mask == 1
    return {
        "tokens": whole.token_ids.tolist(),
        "trained": whole.token_ids[trained].tolist(),
        "logprobs": [round(float(each), 4) for each in whole.logprobs[trained]],
        "versions": whole.versions[trained].tolist(),
    }


def test_tokens_get_their_log_probabilities_and_versions_back(remembered: GenerationCache) -> None:
    traced = trace(remembered)
    assert traced.num_unknown == 0
    assert flat(traced, 0) == {
        "tokens": [1, 2, 10, 11],
        "trained": [10, 11],
        "logprobs": [-0.1, -0.11],
        "versions": [5, 6],
    }
    assert [episode.status for episode in traced.episodes] == ["completed", "truncated"]


def test_every_turn_of_a_conversation_is_found(remembered: GenerationCache) -> None:
    tokens = [1, 2, 10, 11, 3, 15, 16]
    mask = [-100, -100, 10, 11, -100, 15, 16]
    traced = trace(remembered, tokens=[tokens, [1, 2, 12]], masks=[mask, [-100, -100, 12]])
    assert traced.num_unknown == 0 and len(traced.episodes[0].turns) == 2
    assert flat(traced, 0)["versions"] == [5, 6, 8, 9] and flat(traced, 0)["tokens"] == tokens


def test_a_mask_that_goes_on_after_the_answer_is_taken_back(remembered: GenerationCache) -> None:
    tokens, mask = [1, 2, 10, 11, 4, 4], [-100, -100, 10, 11, 4, 4]
    traced = trace(remembered, tokens=[tokens, [1, 2, 12]], masks=[mask, [-100, -100, 12]])
    assert traced.num_unknown == 0
    assert flat(traced, 0)["trained"] == [10, 11] and flat(traced, 0)["tokens"] == tokens


def test_an_answer_cut_by_the_environment_keeps_that_much(remembered: GenerationCache) -> None:
    traced = trace(remembered, tokens=[[1, 2, 10], [1, 2, 12]], masks=[[-100, -100, 10], [-100, -100, 12]])
    assert flat(traced, 0)["versions"] == [5] and traced.num_unknown == 0


def test_the_last_answer_may_have_been_tokenised_anew(remembered: GenerationCache) -> None:
    tokens, mask = [1, 2, 36, 11], [-100, -100, 36, 11]
    traced = trace(remembered, tokens=[tokens, [1, 2, 12]], masks=[mask, [-100, -100, 12]])
    assert flat(traced, 0)["tokens"] == [1, 2, 10, 11] and traced.num_unknown == 0


def test_an_earlier_answer_that_was_tokenised_anew_is_not_trained(remembered: GenerationCache) -> None:
    """What follows was said after the new tokens."""
    remembered.add([1, 2, 36, 11, 3], said([15], version=8), Sampling())
    tokens, mask = [1, 2, 36, 11, 3, 15], [-100, -100, 36, 11, -100, 15]
    traced = trace(remembered, tokens=[tokens, [1, 2, 12]], masks=[mask, [-100, -100, 12]])
    assert (traced.num_unknown, traced.num_left_out) == (0, 1)
    assert flat(traced, 0) == {"tokens": tokens, "trained": [15], "logprobs": [-0.15], "versions": [8]}


def test_a_retokenised_end_of_a_span_stays_in_the_context(remembered: GenerationCache) -> None:
    """Two answers stand in one span. The second one is tokenised again, so it is left out of the training, not lost."""
    remembered.add([1, 2, 10, 11], said([12, 13]), Sampling())
    remembered.add([1, 2, 10, 11, 38, 13, 3], said([15], version=8), Sampling())
    tokens, mask = [1, 2, 10, 11, 38, 13, 3, 15], [-100, -100, 10, 11, 38, 13, -100, 15]
    traced = trace(remembered, tokens=[tokens, [1, 2, 12]], masks=[mask, [-100, -100, 12]])
    assert (traced.num_unknown, traced.num_left_out) == (0, 1)
    assert flat(traced, 0)["tokens"] == tokens
    assert flat(traced, 0)["trained"] == [10, 11, 15] and flat(traced, 0)["versions"] == [5, 6, 8]


@pytest.mark.parametrize(("own", "expected"), [(None, [math.nan]), ([[1.0, 1.0, -0.7], [1.0, 1.0, -0.2]], [-0.7])])
def test_what_nobody_remembers_counts_as_said_by_the_oldest_policy(
    remembered: GenerationCache, own: Any, expected: list[float]
) -> None:
    tokens, masks = [[1, 2, 50], [1, 2, 12]], [[-100, -100, 50], [-100, -100, 12]]
    traced = trace(remembered, tokens=tokens, masks=masks, inference_logprobs=own)
    assert traced.num_unknown == 1
    assert flat(traced, 0)["versions"] == [OLDEST]
    assert flat(traced, 0)["logprobs"] == pytest.approx(expected, nan_ok=True)
    assert flat(traced, 1)["logprobs"] == [-0.12], "what is known needs no help"


def test_prefixes_are_looked_up_one_after_the_other() -> None:
    ids = [3, 1, 2**31 - 1, 5]
    walked = Prefixes(ids)
    assert [walked.key(n) for n in (0, 1, 1, 3, 4)] == [Prefixes(ids[:n]).key(n) for n in (0, 1, 1, 3, 4)]


def test_a_group_of_which_nothing_is_known_is_refused(remembered: GenerationCache) -> None:
    with pytest.raises(ValueError, match=r"inference_logprobs are missing, .* no token can be trained"):
        trace(remembered, tokens=[[1, 2, 50], [1, 2, 51]], masks=[[-100, -100, 50], [-100, -100, 51]])


def test_what_was_sampled_in_another_way_is_refused(remembered: GenerationCache) -> None:
    with pytest.raises(ValueError, match=r"tokens\[0\] were sampled at temperature 0.5, .* env.temperature 1"):
        trace(remembered, tokens=[[1, 2, 13, 14], [1, 2, 12]], masks=[[-100, -100, 13, 14], [-100, -100, 12]])


def test_what_was_said_longest_ago_is_forgotten_first() -> None:
    remembered = GenerationCache(max_tokens=4)
    for prompt in range(4):
        remembered.add([prompt], said([10, 11]), Sampling())
    assert [len(remembered.answers(Prefixes([prompt]), 1)) for prompt in range(4)] == [0, 0, 1, 1]


def test_a_group_needs_no_more_than_tokens_masks_and_scores() -> None:
    plain = {name: value for name, value in group().items() if name != "env_id"}
    assert isinstance(read_group(plain, CONFIG, vocab_size=VOCAB_SIZE), PushedGroup)
