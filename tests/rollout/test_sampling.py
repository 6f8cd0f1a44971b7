"""Batch sampling: the right distribution, restrictions, log-probabilities, reproducibility."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from penstock.rollout.request import SamplingParams
from penstock.rollout.sampling import sample, uniforms
from penstock.rollout.slot_rows import ROW

LOGITS = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0])


def draw(
    num_rows: int,
    *,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    shaped: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    params = np.full(num_rows, np.array((0, top_k, temperature, top_p, min_p), dtype=ROW))
    seeds = np.arange(num_rows, dtype=np.uint64)
    tokens, logprobs = sample(LOGITS.repeat(num_rows, 1), params, uniforms(seeds, np.full(num_rows, 3)), shaped=shaped)
    return tokens, logprobs.gather(1, tokens[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_frequencies_follow_the_distribution(temperature: float) -> None:
    num_rows = 20_000
    tokens, logprobs = draw(num_rows, temperature=temperature)
    probs = torch.softmax(LOGITS / temperature, -1)
    frequencies = torch.bincount(tokens, minlength=len(LOGITS)) / num_rows
    assert torch.all((frequencies - probs).abs() < 4 * (probs * (1 - probs) / num_rows).sqrt() + 1e-4)
    torch.testing.assert_close(logprobs, probs.log()[tokens])


def test_greedy_takes_the_largest_and_reports_the_raw_log_probability() -> None:
    tokens, logprobs = draw(3, temperature=0.0)
    assert tokens.tolist() == [0, 0, 0]
    assert logprobs.tolist() == pytest.approx([torch.log_softmax(LOGITS, -1)[0].item()] * 3)


def test_greedy_and_sampled_rows_mix() -> None:
    params = np.array([(0, 0, 0.0, 1.0, 0.0), (0, 0, 1.0, 1.0, 0.0)], dtype=ROW)
    tokens, _ = sample(LOGITS.repeat(2, 1), params, np.array([0.999999, 0.999999]))
    assert tokens.tolist() == [0, len(LOGITS) - 1]


@pytest.mark.parametrize(
    ("top_p", "top_k", "min_p", "allowed"),
    [
        (1.0, 2, 0.0, {0, 1}),
        (0.55, 0, 0.0, {0}),
        (0.9, 0, 0.0, {0, 1, 2, 3}),
        (0.8, 3, 0.0, {0, 1}),
        (1e-9, 0, 0.0, {0}),
        (1.0, 99, 0.0, set(range(6))),
        (1.0, 0, 0.3, {0, 1}),  # e^-1 of the likeliest is enough, e^-1.5 is not
        (1.0, 1, 1.0, {0}),
    ],
)
def test_restrictions_keep_the_most_likely_and_the_full_log_probability(
    top_p: float, top_k: int, min_p: float, allowed: set[int]
) -> None:
    tokens, logprobs = draw(4000, top_p=top_p, top_k=top_k, min_p=min_p)
    assert set(tokens.tolist()) == allowed
    torch.testing.assert_close(logprobs, torch.log_softmax(LOGITS, -1)[tokens])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_other_logits_to_draw_from_leave_the_log_probability_the_policys_own(temperature: float) -> None:
    shaped = LOGITS.flip(0).repeat(500, 1) * 20
    tokens, logprobs = draw(500, temperature=temperature, shaped=shaped)
    assert set(tokens.tolist()) == {5}
    torch.testing.assert_close(logprobs, torch.log_softmax(LOGITS, -1)[tokens])


def test_excluded_tokens_are_never_drawn_at_the_edges() -> None:
    logits = torch.tensor([[-torch.inf, 0.0, 0.0, -torch.inf]] * 2)
    params = np.array([(0, 0, 1.0, 1.0, 0.0)] * 2, dtype=ROW)
    tokens, _ = sample(logits, params, np.array([0.0, 1.0 - 2.0**-53]))
    assert tokens.tolist() == [1, 2]


def test_uniforms_are_uniform_over_seeds_and_positions() -> None:
    seeds, positions = np.meshgrid(np.arange(200, dtype=np.uint64), np.arange(200))
    numbers = uniforms(seeds.ravel(), positions.ravel())
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert np.all(np.abs(counts - 2000) < 5 * np.sqrt(2000))
    by_seed = numbers.reshape(200, 200)
    assert abs(np.corrcoef(by_seed[:-1].ravel(), by_seed[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(by_seed[:, :-1].ravel(), by_seed[:, 1:].ravel())[0, 1]) < 0.02


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": 1.1},
        {"min_p": float("nan")},
        {"min_new_tokens": -1},
        {"presence_penalty": 2.1},
        {"frequency_penalty": float("nan")},
        {"repetition_penalty": 0.0},
        {"logit_bias": {3: float("inf")}},
    ],
)
def test_parameters_out_of_range_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SamplingParams(**wrong)
