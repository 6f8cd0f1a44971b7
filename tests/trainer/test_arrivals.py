"""Whatever the pattern in which groups arrive, the accumulated gradient is that of one big batch.

In double precision wherever the model allows it, so that rounding cannot hide a wrong weight.
"""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from penstock.config import TrainerConfig
from penstock.samples import Sample
from penstock.trainer.learner import Learner
from penstock.trainer.prepare import prepare

MakeModel = Callable[[], PreTrainedModel]
Calls = list[list[Sample]]
NUM_GROUPS = 5


@pytest.fixture
def groups(samples: list[Sample]) -> Calls:
    """The samples by group, their tokens up to three versions old: some are masked for their age."""
    draw, made = np.random.default_rng(1), []
    for group in range(NUM_GROUPS):
        members = [sample for sample in samples if sample.group == group]
        ages = [np.where(m.loss_mask, draw.integers(0, 4, len(m.loss_mask)), -1).astype(np.int32) for m in members]
        made.append([dataclasses.replace(m, versions=age) for m, age in zip(members, ages, strict=True)])
    return made


def arrive(
    model: PreTrainedModel, calls: Sequence[Sequence[Sample]], *, tokens: int = 8192, measure_noise: bool = False
) -> tuple[torch.Tensor, dict[str, float]]:
    """The gradient that the calls accumulate, and the metrics of the step after them."""
    config = TrainerConfig(max_grad_norm=1e9, tokens_per_microbatch=tokens)
    learner = Learner(model, config, max_staleness=1, policy_version=3, measure_noise=measure_noise)
    for samples in calls:
        colder = [dataclasses.replace(sample, temperature=0.8) for sample in samples]
        learner.accumulate(prepare(colder)[0])
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    return gradient, learner.step().metrics


@pytest.fixture
def one_batch(make_model: MakeModel, groups: Calls) -> tuple[torch.Tensor, dict[str, float]]:
    return arrive(make_model().double(), [[sample for group in groups for sample in group]])


@settings(
    max_examples=12,
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # a smaller pattern would not be worth the wait
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    order=st.permutations(range(NUM_GROUPS)),
    calls=st.lists(st.integers(0, NUM_GROUPS - 1), min_size=NUM_GROUPS, max_size=NUM_GROUPS),
    tokens=st.sampled_from([64, 8192]),
    measure_noise=st.booleans(),
)
def test_any_arrival_pattern_gives_the_gradient_of_one_big_batch(
    make_model: MakeModel,
    groups: Calls,
    one_batch: tuple[torch.Tensor, dict[str, float]],
    order: list[int],
    calls: list[int],
    tokens: int,
    measure_noise: bool,
) -> None:
    """Group i arrives in call `calls[i]`, within a call in `order`; some calls bring nothing."""
    pattern = [[s for g in order if calls[g] == call for s in groups[g]] for call in range(NUM_GROUPS)]
    expected, whole = one_batch
    found, parts = arrive(make_model().double(), pattern, tokens=tokens, measure_noise=measure_noise)
    assert whole["tokens"] > 0 and whole["tokens_masked_stale"] > 0
    assert (found - expected).norm() < 1e-7 * expected.norm()
    for name in whole.keys() - {"busy_s"}:
        assert parts[name] == pytest.approx(whole[name], rel=1e-6, abs=1e-8), name
