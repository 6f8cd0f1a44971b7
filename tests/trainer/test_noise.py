"""The gradient noise scale: the estimator on known noise, and the learner's two norms."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from made_samples import make_sample
from transformers import PreTrainedModel

from penstock.config import TrainerConfig
from penstock.samples import Sample
from penstock.trainer.learner import Learner
from penstock.trainer.noise import GradientNorm, first_half, gradient_norm, noise
from penstock.trainer.prepare import prepare
from penstock.types import LearnerState

MakeModel = Callable[[], PreTrainedModel]
LOOSE = TrainerConfig(max_grad_norm=1e9)


def norm_of(gradients: np.ndarray) -> GradientNorm:
    return GradientNorm(samples=len(gradients), squared=float((gradients.mean(axis=0) ** 2).sum()))


@pytest.mark.parametrize(("small", "large"), [(8, 64), (32, 64), (1, 16)])
def test_the_estimate_is_unbiased_on_known_noise(small: int, large: int) -> None:
    draw, trials = np.random.default_rng(3), 4000
    signal = np.asarray([1.0, -2.0, 0.5])
    deviations = np.asarray([2.0, 1.0, 3.0])
    found = {"noise_signal": [], "noise_trace": []}
    for _ in range(trials):
        gradients = signal + deviations * draw.standard_normal((large, 3))
        for name, value in noise(norm_of(gradients[:small]), norm_of(gradients)).items():
            found[name].append(value)
    for name, expected in (("noise_signal", 5.25), ("noise_trace", 14.0)):
        error = np.std(found[name]) / np.sqrt(trials)
        assert abs(np.mean(found[name]) - expected) < 4 * error, name
        assert error < 0.1 * expected, name


def test_one_size_measures_nothing() -> None:
    norm = GradientNorm(samples=8, squared=1.0)
    assert noise(norm, norm) == {}


@pytest.mark.parametrize(
    ("groups", "expected"),
    [([], 0), ([3, 3, 3], 3), ([1, 1, 2, 2], 2), ([1, 1, 1, 2, 2, 5], 3), ([1, 2, 2, 2, 2, 2], 1), ([7] * 5 + [8], 5)],
)
def test_the_first_half_is_made_of_whole_groups(groups: list[int], expected: int) -> None:
    assert first_half(np.asarray(groups, dtype=np.int64)) == expected


def test_no_norm_without_tokens_or_of_a_broken_gradient() -> None:
    assert gradient_norm([], samples=1, divisor=1) is None
    found = gradient_norm([torch.full((3,), 2.0)], samples=4, divisor=2)
    assert found == GradientNorm(samples=4, squared=pytest.approx(3.0))
    assert gradient_norm([torch.full((3,), float("nan"))], samples=4, divisor=2) is None


def step(model: PreTrainedModel, calls: Sequence[Sequence[Sample]], *, measure_noise: bool) -> LearnerState:
    learner = Learner(model, LOOSE, max_staleness=2, measure_noise=measure_noise)
    for samples in calls:
        learner.accumulate(prepare(samples)[0])
    return learner.step()


def grad_norm(make_model: MakeModel, samples: Sequence[Sample]) -> float:
    return step(make_model(), [samples], measure_noise=False).metrics["grad_norm"]


@pytest.mark.parametrize("cut", [4, 8, 12, 20])
def test_the_learner_measures_the_first_half_of_its_first_call_against_the_step(
    make_model: MakeModel, samples: list[Sample], cut: int
) -> None:
    found = step(make_model(), [samples[:cut], samples[cut:]], measure_noise=True).metrics
    small = {4: 4, 8: 4, 12: 4, 20: 8}[cut]  # whole groups of four; one group alone is the small batch itself
    expected = noise(
        GradientNorm(samples=small, squared=grad_norm(make_model, samples[:small]) ** 2),
        GradientNorm(samples=20, squared=grad_norm(make_model, samples) ** 2),
    )
    assert {name: found[name] for name in expected} == pytest.approx(expected, rel=1e-3)


def test_measuring_changes_neither_the_update_nor_the_counts(make_model: MakeModel, samples: list[Sample]) -> None:
    plain, measured = make_model(), make_model()
    calls = [samples[:12], samples[12:]]
    expected, found = step(plain, calls, measure_noise=False), step(measured, calls, measure_noise=True)
    for one, other in zip(plain.parameters(), measured.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=2e-5, rtol=1e-4)
    assert found.metrics.keys() - expected.metrics.keys() == {"noise_signal", "noise_trace"}
    for name in expected.metrics.keys() - {"busy_s"}:
        assert found.metrics[name] == pytest.approx(expected.metrics[name], abs=1e-5), name


def test_counts_are_those_of_the_whole_call(make_model: MakeModel, samples: list[Sample]) -> None:
    batch = prepare(samples)[0]
    plain = Learner(make_model(), LOOSE, max_staleness=2).accumulate(batch)
    measured = Learner(make_model(), LOOSE, max_staleness=2, measure_noise=True).accumulate(batch)
    assert plain | {"busy_s": 0} == measured | {"busy_s": 0}


def test_what_cannot_be_measured_is_not_reported(make_model: MakeModel, samples: list[Sample]) -> None:
    assert (
        "noise_trace" not in step(make_model(), [samples[:4]], measure_noise=True).metrics
    )  # one group is no two sizes
    assert "noise_trace" not in step(make_model(), [[]], measure_noise=True).metrics
    stale = [make_sample(0, prompt=[5], response=[6], reward=float(r), versions=[0]) for r in range(2)]
    learner = Learner(make_model(), LOOSE, max_staleness=2, policy_version=9, measure_noise=True)
    learner.accumulate(prepare(stale)[0])
    assert "noise_trace" not in learner.step().metrics


def test_every_step_is_measured_again(make_model: MakeModel, samples: list[Sample]) -> None:
    learner = Learner(make_model(), LOOSE, max_staleness=2, measure_noise=True)
    for _ in range(2):
        learner.accumulate(prepare(samples)[0])
        assert "noise_trace" in learner.step().metrics
    learner.accumulate(prepare(samples)[0])
    learner.load_state_dict(learner.state_dict())
    learner.accumulate(prepare(samples[:4])[0])
    assert "noise_trace" not in learner.step().metrics, "the dropped gradients' norm must not be used"
