import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import MasteredConfig
from penstock.trainer.forward import token_statistics
from penstock.trainer.losses.parts import denominator, kl_k3, mastered, shares


@given(
    logits=st.lists(st.lists(st.floats(-8, 8), min_size=5, max_size=5), min_size=1, max_size=4),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
)
def test_likelihood_and_entropy_equal_their_definitions(logits: list[list[float]], temperature: float) -> None:
    chosen = torch.tensor([i % 5 for i in range(len(logits))])
    logprobs, entropies = token_statistics(torch.tensor(logits), chosen, temperature=temperature)
    for row, token, logprob, entropy in zip(logits, chosen.tolist(), logprobs, entropies, strict=True):
        weights = [math.exp(logit / temperature) for logit in row]
        pi = [weight / sum(weights) for weight in weights]
        assert logprob.item() == pytest.approx(math.log(pi[token]), abs=1e-4)
        assert entropy.item() == pytest.approx(-sum(p * math.log(p) for p in pi if p > 0), abs=1e-4)


def test_a_forbidden_token_does_not_spoil_the_entropy() -> None:
    _, entropy = token_statistics(torch.tensor([[0.0, 0.0, -math.inf]]), torch.tensor([0]))
    assert entropy.item() == pytest.approx(math.log(2))


def test_the_penalty_is_zero_at_the_reference_and_pulls_towards_it() -> None:
    logprobs = torch.tensor([-1.0, -1.5, -0.5], requires_grad=True)
    kl = kl_k3(logprobs, torch.full((3,), -1.0))
    assert kl.tolist() == pytest.approx([0.0, math.exp(0.5) - 0.5 - 1, math.exp(-0.5) + 0.5 - 1])
    kl.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.sign().tolist() == [0, -1, 1]


@given(rows=st.lists(st.lists(st.floats(0.1, 1.0), min_size=6, max_size=6), min_size=2, max_size=2))
def test_the_penalty_is_unbiased(rows: list[list[float]]) -> None:
    pi, reference = (torch.tensor(row, dtype=torch.float64) / sum(row) for row in rows)
    exact = (pi * (pi / reference).log()).sum().item()
    assert (pi * kl_k3(pi.log(), reference.log())).sum().item() == pytest.approx(exact)


def test_only_sure_tokens_of_good_samples_with_little_entropy_are_mastered() -> None:
    logprobs = torch.tensor([0.995, 0.5, 0.995, 0.995, 0.5]).log()
    entropy = torch.tensor([0.1, 0.2, 0.1, 0.1, 0.9])
    advantages = torch.tensor([1.0, 1.0, -1.0, 1.0, 1.0])
    samples = torch.tensor([0, 0, 1, 2, 2])
    found = mastered(logprobs, entropy, advantages, samples, MasteredConfig(probability=0.99, entropy=0.2))
    assert found.tolist() == [1, 0, 0, 0, 0], "unsure; bad; a sample whose mean entropy is 0.5"


def test_what_a_sum_over_tokens_is_divided_by() -> None:
    samples = torch.tensor([0, 0, 0, 3])
    assert shares(samples, "token").tolist() == shares(samples, "constant").tolist() == [1, 1, 1, 1]
    assert shares(samples, "sequence").tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 1])
    sizes = {"tokens": 4, "samples": 2, "max_tokens": 10}
    assert denominator("token", **sizes) == 4
    assert denominator("sequence", **sizes) == 2
    assert denominator("constant", **sizes) == 20
