"""Every objective against its formula in plain Python, token by token: the loss's gradient is what trains."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.config import ObjectiveConfig
from penstock.trainer.losses.objective import OBJECTIVES, PolicyLoss, Tokens, batch_mask
from penstock.trainer.losses.parts import largest_kept, smallest_until


class Token(NamedTuple):
    pi: float
    mu: float
    advantage: float
    sample: int
    staleness: int

    @property
    def rho(self) -> float:
        return math.exp(self.pi - self.mu)


def siblings(tokens: Sequence[Token], token: Token) -> list[Token]:
    return [other for other in tokens if other.sample == token.sample]


def slope(ratio: float, advantage: float, low: float, high: float) -> float:
    """d/dr of min(r A, clip(r) A)."""
    bounded = min(max(ratio, 1 - low), 1 + high)
    return advantage if ratio * advantage <= bounded * advantage else 0.0


def product(tokens: Sequence[Token], token: Token) -> float:
    return math.prod(other.rho for other in siblings(tokens, token))


def ppo(tokens: Sequence[Token], token: Token) -> float:
    return -slope(token.rho, token.advantage, 0.2, 0.28) * token.rho


def interpolated(token: Token) -> float:
    if token.staleness == 0:
        return token.mu
    return token.mu + (token.staleness - 1) / token.staleness * (token.pi - token.mu)


def decoupled(tokens: Sequence[Token], token: Token, prox: float | None = None) -> float:
    prox = token.pi if prox is None else prox
    weight, u = min(math.exp(prox - token.mu), 2.0), math.exp(token.pi - prox)
    return -weight * slope(u, token.advantage, 0.2, 0.28) * u


def geometric_mask(tokens: Sequence[Token], token: Token) -> float:
    mean = math.exp(sum(other.pi - other.mu for other in siblings(tokens, token)) / len(siblings(tokens, token)))
    return ppo(tokens, token) if 0.99 <= mean <= 1.01 else 0.0


def gspo(tokens: Sequence[Token], token: Token) -> float:
    s = math.exp(sum(other.pi - other.mu for other in siblings(tokens, token)) / len(siblings(tokens, token)))
    return -slope(s, token.advantage, 3e-4, 4e-4) * s


def topr(tokens: Sequence[Token], token: Token) -> float:
    return -token.advantage * (1.0 if token.advantage > 0 else min(product(tokens, token), 1.0))


SETTINGS = {name: {"name": name} for name in OBJECTIVES} | {"m2po": {"name": "m2po", "second_moment_over": "sample"}}
"""Settings of each objective with which it needs a few samples alone."""


def m2po(tokens: Sequence[Token], token: Token) -> float:
    def at_stake(other: Token) -> bool:
        return (other.pi - other.mu) * other.advantage > 0

    left = sorted((other for other in siblings(tokens, token) if at_stake(other)), key=lambda t: (t.pi - t.mu) ** 2)
    while left and sum((t.pi - t.mu) ** 2 for t in left) / len(left) > 0.04:
        left.pop()
    return -token.rho * token.advantage if token in left or not at_stake(token) else 0.0


GRADIENTS: dict[str, Callable[[Sequence[Token], Token], float]] = {
    "ppo": ppo,
    "pois": lambda tokens, token: -token.advantage,
    "reinforce": lambda tokens, token: -token.advantage,
    "decoupled": lambda tokens, token: decoupled(tokens, token, interpolated(token)),
    "tis": lambda tokens, token: -min(token.rho, 2.0) * token.advantage,
    "sequence_tis": lambda tokens, token: -min(product(tokens, token), 2.0) * token.advantage,
    "sequence_mis": lambda tokens, token: (
        -product(tokens, token) * token.advantage if product(tokens, token) <= 2.0 else 0.0
    ),
    "geometric_mask": geometric_mask,
    "cispo": lambda tokens, token: -min(token.rho, 1.28) * token.advantage,
    "gspo": gspo,
    "topr": topr,
    "icepop": lambda tokens, token: -token.rho * token.advantage if 0.5 <= token.rho <= 5.0 else 0.0,
    "m2po": m2po,
}

LOGPROB = st.floats(-3, -0.01)


@st.composite
def sampled(draw: st.DrawFn) -> list[Token]:
    """A few samples, each with one advantage."""
    tokens = []
    for sample in range(draw(st.integers(1, 3))):
        advantage = draw(st.sampled_from([-1.5, -0.5, 0.0, 0.7, 2.0]))
        for _ in range(draw(st.integers(1, 4))):
            mu = draw(LOGPROB)
            pi = mu + draw(st.one_of(st.just(0.0), st.floats(-0.02, 0.02), st.floats(-2, 2)))
            tokens.append(Token(pi, mu, advantage, sample, draw(st.integers(0, 3))))
    return tokens


def gradient(tokens: Sequence[Token], config: ObjectiveConfig, **more: Any) -> tuple[list[float], PolicyLoss]:
    pi, mu, advantages, samples, staleness = zip(*tokens, strict=True)
    logprobs = torch.tensor(pi, dtype=torch.float64, requires_grad=True)
    known = Tokens(
        logprobs=logprobs,
        behaviour=torch.tensor(mu, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        samples=torch.tensor(samples),
        staleness=torch.tensor(staleness),
        **more,
    )
    found = OBJECTIVES[config.name](known, config)
    found.loss.sum().backward()
    assert logprobs.grad is not None
    return logprobs.grad.tolist(), found


def on_an_edge(tokens: Sequence[Token]) -> bool:
    """Where a bound is met exactly, rounding decides on which side."""
    edges = (0.5, 0.8, 0.99, 1.01, 1.28, 2.0, 5.0, 1 - 3e-4, 1 + 4e-4)
    values = [value for token in tokens for value in (token.rho, product(tokens, token))]
    return any(abs(value - edge) < 1e-9 for value in values for edge in edges)


@pytest.mark.parametrize("name", OBJECTIVES)
@given(tokens=sampled())
def test_the_gradient_is_the_formulas(name: str, tokens: list[Token]) -> None:
    if on_an_edge(tokens):
        return
    found, loss = gradient(tokens, ObjectiveConfig.model_validate(SETTINGS[name]))
    assert found == pytest.approx([GRADIENTS[name](tokens, token) for token in tokens], rel=1e-6, abs=1e-9)
    assert not loss.clipped.requires_grad
    without = [token.advantage != 0 and slope == 0 for token, slope in zip(tokens, found, strict=True)]
    clipped = [bool(flag) and token.advantage != 0 for token, flag in zip(tokens, loss.clipped, strict=True)]
    assert clipped == without, "what lost its gradient is counted as clipped"


@pytest.mark.parametrize(("ratio", "slope"), [(2.0, 2.0), (4.0, 0.0)])
def test_a_dual_clip_ends_what_a_bad_token_can_do(ratio: float, slope: float) -> None:
    tokens = [Token(math.log(ratio) - 1.0, -1.0, -1.0, 0, 1)]
    found, loss = gradient(tokens, ObjectiveConfig(name="ppo", dual_clip=3.0))
    assert found == pytest.approx([slope])
    assert loss.clipped.tolist() == [slope == 0]


@given(tokens=sampled())
def test_the_current_policy_as_the_proximal_one_weighs_and_never_clips(tokens: list[Token]) -> None:
    config = ObjectiveConfig(name="decoupled", proximal="current")
    expected = [decoupled(tokens, token) for token in tokens]
    assert gradient(tokens, config)[0] == pytest.approx(expected, rel=1e-6, abs=1e-9)


@given(tokens=sampled())
def test_tokens_beyond_the_cap_may_be_masked(tokens: list[Token]) -> None:
    if on_an_edge(tokens):
        return
    config = ObjectiveConfig(name="decoupled", proximal="current", beyond_cap="mask")
    found, loss = gradient(tokens, config)
    expected = [0.0 if token.rho > 2.0 else -token.rho * token.advantage for token in tokens]
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-9)
    assert loss.clipped.tolist() == [float(token.rho > 2.0) for token in tokens]


def test_weights_of_cispo_have_a_lower_bound_if_it_is_set() -> None:
    tokens = [Token(-2.0, -1.0, 1.0, 0, 1)]
    assert gradient(tokens, ObjectiveConfig.model_validate({"name": "cispo"}))[0] == pytest.approx([-math.exp(-1.0)])
    bounded = ObjectiveConfig.model_validate({"name": "cispo", "clip_low": 0.2})
    assert gradient(tokens, bounded)[0] == pytest.approx([-0.8])


def test_a_recomputed_proximal_policy_bounds_the_step_and_the_weight_corrects() -> None:
    """Three versions in one answer, trained by a fourth; prox is yet another policy, log prox = -1.1 everywhere."""
    tokens = [Token(-1.0, -1.5, 1.0, 0, 3), Token(-1.0, -1.2, 1.0, 0, 2), Token(-0.7, -0.9, 1.0, 0, 1)]
    prox = torch.full((3,), -1.1, dtype=torch.float64)
    found, loss = gradient(tokens, ObjectiveConfig(name="decoupled"), proximal=prox)
    # w = exp(prox - mu) = e^0.4, e^0.1, e^-0.2; u = exp(pi - prox) = e^0.1, e^0.1, e^0.4 (clipped, above 1.28)
    assert found == pytest.approx([-math.exp(0.4 + 0.1), -math.exp(0.1 + 0.1), 0.0])
    assert loss.clipped.tolist() == [0, 0, 1]


def test_three_versions_in_one_answer() -> None:
    """Segments sampled at log-probabilities that differ from the newest policy's by 0.5, 0.1 and 0."""
    tokens = [Token(-1.0, -1.5, 1.0, 0, 2), Token(-1.0, -1.1, 1.0, 0, 1), Token(-1.0, -1.0, 1.0, 0, 0)]
    segment_aware = gradient(tokens, ObjectiveConfig(name="ppo"))[0]
    assert segment_aware == pytest.approx([0.0, -math.exp(0.1), -1.0]), "the oldest is above 1.28: clipped"
    assert gradient(tokens, ObjectiveConfig(name="pois"))[0] == pytest.approx([-1.0, -1.0, -1.0])


@pytest.mark.parametrize(("floor", "expected"), [(None, math.exp(2.0)), (3.0, 0.0)])
def test_dual_clip_bounds_what_one_token_can_do(floor: float | None, expected: float) -> None:
    config = ObjectiveConfig(name="ppo", dual_clip=floor)
    assert gradient([Token(-0.5, -2.5, -1.0, 0, 1)], config)[0] == pytest.approx([expected])


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_absurd_ratio_leaves_finite_gradients(name: str, advantage: float) -> None:
    tokens = [Token(-0.1, -200.0, advantage, 0, 1), Token(-200.0, -0.1, advantage, 1, 1)]
    found, loss = gradient(tokens, ObjectiveConfig.model_validate(SETTINGS[name]))
    assert all(map(math.isfinite, found)) and torch.isfinite(loss.loss).all()


@given(
    values=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 2), st.booleans()), min_size=1, max_size=12),
    budget=st.floats(0.01, 0.5),
)
def test_as_few_as_possible_are_left_out(values: list[tuple[float, int, bool]], budget: float) -> None:
    squares, samples, candidates = (torch.tensor(column) for column in zip(*values, strict=True))
    keep = smallest_until(squares.double(), samples, candidates, budget).bool()
    assert keep[~candidates].all()
    for sample in set(samples.tolist()):
        mine = candidates & (samples == sample)
        left, gone = squares[mine & keep].tolist(), sorted(squares[mine & ~keep].tolist())
        if left:
            assert sum(left) / len(left) <= budget + 1e-9 and max(left) <= min(gone, default=1.0)
        if gone:
            assert (sum(left) + gone[0]) / (len(left) + 1) > budget - 1e-9


def m2po_of_batch(tokens: Sequence[Token], token: Token) -> float:
    """Algorithm 1 of M2PO, over all samples. Equal squares leave together."""

    def at_stake(other: Token) -> bool:
        return (other.pi - other.mu) * other.advantage > 0

    left = [(other.pi - other.mu) ** 2 for other in tokens if at_stake(other)]
    while left and sum(left) / len(left) > 0.04:
        left = [square for square in left if square != max(left)]
    is_kept = not at_stake(token) or (token.pi - token.mu) ** 2 in left
    return -token.rho * token.advantage if is_kept else 0.0


def kept_of(tokens: Sequence[Token], config: ObjectiveConfig) -> torch.Tensor:
    """The mask that one rank with all tokens finds."""
    log_rho = torch.tensor([token.pi - token.mu for token in tokens], dtype=torch.float32)
    return batch_mask(log_rho, torch.tensor([token.advantage for token in tokens]), config, list)


@st.composite
def exact_tokens(draw: st.DrawFn) -> list[Token]:
    """Ragged samples. All sums of squares are exact, and equal squares are frequent, also at the bound."""
    tokens = []
    for sample in range(draw(st.integers(1, 4))):
        advantage = draw(st.sampled_from([-1.5, 0.0, 0.5, 2.0]))
        for _ in range(draw(st.integers(1, 6))):
            mu, steps = -draw(st.integers(1, 100)) / 32, draw(st.integers(-20, 20))
            tokens.append(Token(mu + steps / 32, mu, advantage, sample, 1))
    return tokens


@given(tokens=exact_tokens())
def test_a_mask_over_the_batch_looks_at_all_samples(tokens: list[Token]) -> None:
    config = ObjectiveConfig(name="m2po")
    found, loss = gradient(tokens, config, kept=kept_of(tokens, config))
    assert found == pytest.approx([m2po_of_batch(tokens, token) for token in tokens], rel=1e-6, abs=1e-9)
    without = [token.advantage != 0 and slope == 0 for token, slope in zip(tokens, found, strict=True)]
    assert [bool(flag) for flag in loss.clipped] == without


def test_a_sample_far_from_the_policy_keeps_what_others_in_the_batch_make_room_for() -> None:
    """Squares 0.01 and 0.01 in one sample; 0.09, 0.09 and 0.16 in the other."""
    far = [(0.1, 0), (0.1, 0), (0.3, 1), (0.3, 1), (0.4, 1)]
    tokens = [Token(log_rho - 1.0, -1.0, 1.0, sample, 1) for log_rho, sample in far]
    over_samples = ObjectiveConfig(name="m2po", second_moment_over="sample", second_moment=0.055)
    assert gradient(tokens, over_samples)[1].clipped.tolist() == [0, 0, 1, 1, 1]
    assert kept_of(tokens, ObjectiveConfig(name="m2po", second_moment=0.055)).tolist() == [True] * 4 + [False]
    kept = kept_of(tokens, ObjectiveConfig(name="m2po", second_moment=0.04)).tolist()
    assert kept == [True] * 2 + [False] * 3, "one of the two equal squares would fit, and they leave together"


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_absurd_ratio_is_masked_over_the_batch_too(advantage: float) -> None:
    tokens = [Token(-0.1, -200.0, advantage, 0, 1), Token(-200.0, -0.1, advantage, 1, 1)]
    config = ObjectiveConfig(name="m2po")
    found, loss = gradient(tokens, config, kept=kept_of(tokens, config))
    assert sorted(loss.clipped.tolist()) == [0, 1] and all(map(math.isfinite, found))


SQUARES = st.one_of(
    st.sampled_from([0.0, 0.0625, math.inf]), st.floats(0, 1, width=32), st.floats(0, 2.0**120, width=32)
)


@given(squares=st.lists(SQUARES, max_size=12), budget=st.floats(0.01, 0.5))
def test_the_bound_is_the_largest_that_fits(squares: list[float], budget: float) -> None:
    bound = largest_kept(torch.tensor(squares, dtype=torch.float32), budget, list)
    assert bound < math.inf
    means = {}
    for square in sorted({square for square in squares if square < math.inf}):
        upto = [other for other in squares if other <= square]
        means[square] = math.fsum(upto) / len(upto)
    if not any(mean == pytest.approx(budget, rel=1e-9) for mean in means.values()):  # there rounding decides
        assert [square <= bound for square in means] == [mean <= budget for mean in means.values()]


def test_bad_settings_are_refused_with_the_reason() -> None:
    with pytest.raises(ValidationError, match="must be below mask_high"):
        ObjectiveConfig(name="icepop", mask_low=2.0, mask_high=1.0)
    with pytest.raises(ValidationError, match="Input should be"):
        ObjectiveConfig.model_validate({"name": "grpo2"})


def test_an_objective_brings_its_own_defaults_and_says_so_in_the_configuration() -> None:
    gspo = ObjectiveConfig.model_validate({"name": "gspo", "clip_low": 1e-3})
    assert (gspo.clip_low, gspo.clip_high, gspo.normalize) == (1e-3, 4e-4, "sequence")
