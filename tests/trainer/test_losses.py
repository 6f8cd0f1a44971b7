import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.trainer.losses.divergence import absolute_difference
from penstock.trainer.losses.likelihood import token_statistics
from penstock.trainer.losses.policy_gradient import clipped_policy_loss

LOGPROB = st.floats(-6, -0.01)
TOKENS = st.lists(st.tuples(LOGPROB, LOGPROB, st.floats(-3, 3)), min_size=1, max_size=8)


@given(tokens=TOKENS)
def test_the_clipped_loss_equals_its_formula(tokens: list[tuple[float, float, float]]) -> None:
    logprobs, behaviour, advantages = (
        torch.tensor(column, dtype=torch.float64) for column in zip(*tokens, strict=True)
    )
    found = clipped_policy_loss(logprobs, behaviour, advantages, clip_low=0.2, clip_high=0.28)
    for i, (new, old, advantage) in enumerate(tokens):
        ratio = math.exp(new - old)
        bounded = min(max(ratio, 0.8), 1.28)
        assert found.loss[i].item() == pytest.approx(-min(ratio * advantage, bounded * advantage))
        assert found.ratio[i].item() == pytest.approx(ratio)
        assert bool(found.clipped[i]) == (bounded * advantage < ratio * advantage)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "gradient"),
    [
        (0.0, 2.0, -2.0),
        (0.5, 2.0, 0.0),  # already more likely by more than clip_high
        (0.5, -2.0, 2.0 * math.exp(0.5)),  # moving back is never clipped
        (-0.5, -2.0, 0.0),  # already less likely by more than clip_low
        (-0.5, 2.0, -2.0 * math.exp(-0.5)),
    ],
)
def test_the_clip_removes_the_gradient_in_one_direction(log_ratio: float, advantage: float, gradient: float) -> None:
    logprobs = torch.tensor([log_ratio - 1.0], requires_grad=True)
    loss = clipped_policy_loss(logprobs, torch.tensor([-1.0]), torch.tensor([advantage]), clip_low=0.2, clip_high=0.28)
    loss.loss.sum().backward()
    assert logprobs.grad is not None
    assert logprobs.grad.item() == pytest.approx(gradient, abs=1e-6)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_absurd_ratio_leaves_finite_gradients(advantage: float) -> None:
    logprobs = torch.tensor([-0.1, -200.0], requires_grad=True)
    loss = clipped_policy_loss(
        logprobs, torch.tensor([-200.0, -0.1]), torch.full((2,), advantage), clip_low=0.2, clip_high=0.28
    )
    loss.loss.sum().backward()
    assert logprobs.grad is not None and torch.isfinite(logprobs.grad).all()
    assert torch.isfinite(loss.loss).all()


def test_loss_and_likelihood_pass_a_gradient_check() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    chosen = torch.tensor([0, 3, 5, 3])
    advantages = torch.tensor([1.0, -1.0, 0.5, -2.0], dtype=torch.float64)
    with torch.no_grad():
        behaviour = torch.log_softmax(logits / 0.7, dim=-1).gather(1, chosen[:, None])[:, 0] - 0.05

    def loss(logits: torch.Tensor) -> torch.Tensor:
        log_pi = torch.log_softmax(logits / 0.7, dim=-1).gather(1, chosen[:, None])[:, 0]
        return clipped_policy_loss(log_pi, behaviour, advantages, clip_low=0.2, clip_high=0.28).loss

    assert torch.autograd.gradcheck(loss, (logits,))


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


def test_the_difference_has_no_sign() -> None:
    found = absolute_difference(torch.tensor([-1.5, -1.0, -0.5]), torch.tensor([-1.0, -1.0, -1.0]))
    assert found.tolist() == [0.5, 0.0, 0.5]
