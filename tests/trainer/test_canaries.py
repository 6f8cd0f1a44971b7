"""Planted faults that a run would otherwise survive in silence."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from penstock.config import CanaryConfig, TrainerConfig
from penstock.samples import Sample
from penstock.trainer.canaries import Canaries
from penstock.trainer.learner import Learner
from penstock.trainer.prepare import prepare

UNCOMPARED = {"kl_engine_trainer": 0.0, "parity_gap_max": 0.0, "kl_tokens": 0.0} | {
    "tokens": 10.0,
    "tokens_masked_foreign": 0.0,
}
"""Metrics of a step that compared nothing."""


def truthful(model: PreTrainedModel, sample: Sample) -> Sample:
    """With the log-probabilities that `model` itself gives the tokens."""
    with torch.no_grad():
        logits = model(input_ids=torch.from_numpy(sample.token_ids.astype(np.int64))[None]).logits[0]
    chosen = torch.from_numpy(sample.token_ids[1:].astype(np.int64))
    logprobs = torch.log_softmax(logits[:-1], dim=-1).gather(1, chosen[:, None])[:, 0]
    found = np.concatenate([[0.0], logprobs.numpy()]) * sample.loss_mask
    return dataclasses.replace(sample, logprobs=found.astype(np.float32))


def alarms(model: PreTrainedModel, samples: list[Sample]) -> list[str]:
    learner = Learner(model, TrainerConfig(), max_staleness=1)
    learner.accumulate(prepare(samples)[0])
    return learner.step().alarms


def test_an_engine_that_agrees_raises_none(make_model: Callable[[], PreTrainedModel], samples: list[Sample]) -> None:
    model = make_model()
    assert alarms(model, [truthful(model, sample) for sample in samples]) == []


def test_a_stale_server_that_names_the_newest_version(
    make_model: Callable[[], PreTrainedModel], samples: list[Sample]
) -> None:
    model = make_model()
    stale = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in stale.parameters():
            parameter.mul_(1.3)
    (alarm,) = alarms(model, [truthful(stale, sample) for sample in samples])
    assert alarm.startswith("log-probability parity: engine and trainer differ by") and "other weights" in alarm


def test_shifted_log_probabilities(make_model: Callable[[], PreTrainedModel], samples: list[Sample]) -> None:
    model = make_model()
    honest = [truthful(model, sample) for sample in samples]
    shifted = [dataclasses.replace(s, logprobs=s.logprobs + np.float32(0.1) * s.loss_mask) for s in honest]
    (alarm,) = alarms(model, shifted)
    assert "differ by 0.1 nats per token (largest 0.1" in alarm


def test_one_token_with_a_large_gap_is_no_alarm(
    make_model: Callable[[], PreTrainedModel], samples: list[Sample]
) -> None:
    model = make_model()
    first, *others = [truthful(model, sample) for sample in samples]
    logprobs = first.logprobs.copy()
    logprobs[np.flatnonzero(first.loss_mask)[0]] -= 5.0
    assert alarms(model, [dataclasses.replace(first, logprobs=logprobs), *others]) == []


def test_a_wrong_tokenizer(make_model: Callable[[], PreTrainedModel], samples: list[Sample]) -> None:
    """The trainer reads other tokens than the engine wrote."""
    model = make_model()
    misread = [
        dataclasses.replace(
            truthful(model, sample), token_ids=np.where(sample.loss_mask, sample.token_ids ^ 1, sample.token_ids)
        )
        for sample in samples
    ]
    assert any("log-probability parity" in alarm for alarm in alarms(model, misread))


@pytest.mark.parametrize("shift", [0.0, 0.1])
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_a_policy_that_only_ever_trains_the_version_before_compares_with_a_copy_of_it(
    make_model: Callable[[], PreTrainedModel], samples: list[Sample], lora: dict[str, int] | None, shift: float
) -> None:
    config = {"learning_rate": 1e-2, "warmup_steps": 0, "canaries": {"parity_every": 2}, "lora": lora}
    learner = Learner(make_model(), TrainerConfig.model_validate(config), max_staleness=1)
    sampled: list[Sample] = []
    found = []
    for version in range(6):
        engine = copy.deepcopy(learner.model)
        learner.accumulate(prepare(sampled)[0])
        found.append(learner.step())
        honest = [truthful(engine, sample) for sample in samples]
        sampled = [
            dataclasses.replace(
                sample,
                logprobs=sample.logprobs + np.float32(shift) * sample.loss_mask,
                versions=np.where(sample.loss_mask, version, sample.versions),
            )
            for sample in honest
        ]
    assert [bool(state.metrics["kl_tokens"]) for state in found] == [False] * 3 + [True, False, False]
    assert found[3].metrics["kl_engine_trainer"] == pytest.approx(shift, abs=1e-4)
    assert [bool(state.alarms) for state in found] == [False] * 3 + [shift > 0, False, False]


def test_an_alarm_is_raised_once_per_onset() -> None:
    canaries = Canaries(CanaryConfig(max_parity_gap=0.01, min_ess=0.5))
    good = UNCOMPARED | {"kl_engine_trainer": 0.001, "parity_gap_max": 0.1, "kl_tokens": 10.0, "ess": 0.9}
    bad = good | {"kl_engine_trainer": 0.02}
    nothing = good | {"kl_engine_trainer": 0.0, "kl_tokens": 0.0}
    steps = (good, bad, nothing, bad, good, bad)
    assert [len(canaries.look(step, metrics)) for step, metrics in enumerate(steps)] == [0, 1, 0, 0, 0, 1]


HEALTHY, LOW = 0.9, 0.01


def sizes_alarmed(sizes: list[float]) -> list[tuple[int, str]]:
    """The alarms, each with the step that raised it; steps count from 1."""
    canaries = Canaries(CanaryConfig(min_ess=0.2))
    steps = enumerate(sizes, start=1)
    return [(step, alarm) for step, size in steps for alarm in canaries.look(step, UNCOMPARED | {"ess": size})]


def test_one_step_of_hundreds_with_an_outlier_is_no_alarm() -> None:
    assert sizes_alarmed([HEALTHY] * 200 + [LOW] + [HEALTHY] * 200) == []
    assert sizes_alarmed([LOW] + [HEALTHY] * 50) == []


def test_outliers_now_and_then_are_no_alarm() -> None:
    assert sizes_alarmed(([HEALTHY] * 4 + [LOW]) * 50) == []


def test_a_low_sample_size_that_lasts_is_one_alarm_that_says_what_it_saw() -> None:
    ((step, alarm),) = sizes_alarmed([HEALTHY] * 30 + [0.1, HEALTHY] + [0.1] * 40)
    assert step == 41
    assert alarm.startswith(
        "effective sample size: below 20% in 10 of the latest 20 steps, since step 31 (median of these 10%, lowest 10%)"
    )
    assert "scheduler.max_staleness" in alarm and "trainer.learning_rate" in alarm


def test_a_run_that_is_low_from_its_beginning_raises_the_alarm_within_ten_steps() -> None:
    ((step, alarm),) = sizes_alarmed([0.05] * 100)
    assert step == 10 and "in 10 of the latest 10 steps, since step 1 " in alarm


def test_the_alarm_is_raised_again_after_a_recovery_and_not_while_it_hovers() -> None:
    hovering = ([LOW] * 3 + [HEALTHY] * 3) * 20
    assert len(sizes_alarmed([LOW] * 20 + hovering)) == 1
    assert [step for step, _ in sizes_alarmed([LOW] * 20 + [HEALTHY] * 20 + [LOW] * 20)] == [10, 50]


def test_a_step_without_a_token_changes_nothing() -> None:
    canaries = Canaries(CanaryConfig())
    empty = UNCOMPARED | {"tokens": 0.0, "ess": 0.0}
    assert [alarm for step in range(50) for alarm in canaries.look(step, empty)] == []
