import copy
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from made_roles import ENOUGH_S, AllRoles
from made_samples import make_sample
from transformers import PreTrainedModel

from penstock.config import TrainerConfig
from penstock.groups.batch import Batch
from penstock.ports.training import LAGS
from penstock.samples import Sample
from penstock.ticks import heard_by
from penstock.trainer.critic import whitened
from penstock.trainer.learner import NAME, Learner, NothingLearnt
from penstock.trainer.losses.objective import OBJECTIVES
from penstock.trainer.prepare import prepare
from penstock.types import LearnerState

MakeModel = Callable[[], PreTrainedModel]
LOOSE = TrainerConfig(max_grad_norm=1e9)
METRICS = {
    *("loss", "grad_norm", "clip_fraction", "ratio_mean", "kl_engine_trainer", "kl_tokens", "entropy", "tokens"),
    *("tokens_masked_stale", "staleness_mean", "staleness_max", "samples", "learning_rate", "skipped", "busy_s"),
    *("ess", "sample_ess", "kl_reference", "mastered_fraction", "parity_gap_max", "tokens_masked_segments"),
    "tokens_masked_foreign",
    "tokens_replayed",
    *LAGS,
}


def learner_for(model: PreTrainedModel, config: TrainerConfig = LOOSE, **settings: float) -> Learner:
    return Learner(model, config, max_staleness=int(settings.pop("max_staleness", 2)), **settings)  # type: ignore[arg-type]


def accumulate(learner: Learner | AllRoles, samples: Sequence[Sample]) -> dict[str, float]:
    return learner.accumulate(prepare(samples, for_critic=True)[0])


def sampled_at(temperatures: Sequence[float], samples: Sequence[Sample]) -> list[Sample]:
    """The same samples, as if drawn at these temperatures in turn."""
    return [dataclasses.replace(s, temperature=t) for s, t in zip(samples, itertools.cycle(temperatures), strict=False)]


def gradients(model: PreTrainedModel) -> torch.Tensor:
    found = [p.grad.flatten() if p.grad is not None else p.new_zeros(p.numel()) for p in model.parameters()]
    return torch.cat(found).cpu()


def reference_loss(model: PreTrainedModel, samples: Sequence[Sample]) -> torch.Tensor:
    """GRPO sample by sample and token by token, summed; no padding, no packing, no sharing."""
    advantages = prepare(samples)[0]["advantages"]
    total = torch.zeros(())
    for sample, advantage in zip(samples, advantages.tolist(), strict=True):
        logits = model(input_ids=torch.from_numpy(sample.token_ids.astype(np.int64))[None]).logits[0]
        for t in np.flatnonzero(sample.loss_mask):
            log_pi = torch.log_softmax(logits[t - 1] / sample.temperature, dim=-1)[int(sample.token_ids[t])]
            ratio = torch.exp(log_pi - float(sample.logprobs[t]))
            clipped = torch.clamp(ratio, 0.8, 1.28)
            total = total - torch.minimum(ratio * advantage, clipped * advantage)
    return total


@pytest.mark.parametrize("tokens_per_microbatch", [1, 40, 8192])
@pytest.mark.parametrize("temperatures", [[1.0], [0.6], [1.0, 0.6, 1.3]])
def test_loss_and_gradient_equal_the_plain_reference(
    make_model: MakeModel,
    samples: list[Sample],
    tokens_per_microbatch: int,
    temperatures: list[float],
    device: torch.device,
) -> None:
    plain, model = make_model(), make_model().to(device)
    samples = sampled_at(temperatures, samples)
    expected = reference_loss(plain, samples)
    expected.backward()
    config = TrainerConfig(max_grad_norm=1e9, tokens_per_microbatch=tokens_per_microbatch)
    learner = learner_for(model, config)
    counted = accumulate(learner, samples)
    torch.testing.assert_close(gradients(model), gradients(plain), atol=2e-5, rtol=1e-4)
    metrics = learner.step().metrics
    assert metrics.keys() == METRICS
    assert counted["tokens"] == metrics["tokens"] == sum(int(sample.loss_mask.sum()) for sample in samples)
    assert metrics["loss"] == pytest.approx(expected.item() / metrics["tokens"], abs=1e-5)
    norm = gradients(plain).norm().item() / metrics["tokens"]
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-3)


@pytest.mark.parametrize("cuts", [[], [1], [2, 3], [1, 2, 3, 4]])
def test_any_partition_into_whole_groups_gives_the_same_update(
    make_model: MakeModel, samples: list[Sample], cuts: list[int]
) -> None:
    whole, parts = make_model(), make_model()
    first, second = learner_for(whole), learner_for(parts)
    accumulate(first, samples)
    bounds = [0, *cuts, 5]
    for start, end in pairwise(bounds):
        accumulate(second, [sample for sample in samples if start <= sample.group < end])
    torch.testing.assert_close(gradients(parts), gradients(whole), atol=1e-5, rtol=1e-4)
    one, other = first.step(), second.step()
    assert one.metrics.keys() == other.metrics.keys()
    for name in METRICS - {"busy_s"}:
        assert other.metrics[name] == pytest.approx(one.metrics[name], abs=1e-5), name


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.parametrize("normalize", ["token", "sequence", "constant"])
def test_of_every_objective_any_partition_gives_the_same_update(
    make_model: MakeModel, samples: list[Sample], name: str, normalize: str, device: torch.device
) -> None:
    objective = {"name": name, "normalize": normalize, "kl_coef": 0.1, "mastered": {"probability": 0.5, "entropy": 9.0}}
    if name == "m2po":
        objective["second_moment_over"] = "sample"  # a mask over the batch depends on the partition into calls
    config = {"max_grad_norm": 1e9, "objective": objective}
    common = {"max_staleness": 2, "max_tokens": 10}
    first = AllRoles(make_model, TrainerConfig.model_validate(config), **common)
    small = TrainerConfig.model_validate(config | {"tokens_per_microbatch": 40})
    second = AllRoles(lambda: make_model().to(device), small, **common)
    accumulate(first, samples)
    for group in range(5):
        accumulate(second, [sample for sample in samples if sample.group == group])
    torch.testing.assert_close(gradients(second.learner.model), gradients(first.learner.model), atol=1e-5, rtol=1e-4)
    one, other = first.step().metrics, second.step().metrics
    for metric in METRICS - {"busy_s"}:
        assert other[metric] == pytest.approx(one[metric], abs=1e-5), metric


BATCH_MASK = {"max_grad_norm": 1e9, "objective": {"name": "m2po"}}


def m2po_reference(model: PreTrainedModel, samples: Sequence[Sample]) -> tuple[torch.Tensor, int]:
    """M2PO sample by sample and token by token, summed, with one mask over all samples, and the number of tokens that
    the mask drops. No padding, no packing, no sharing."""
    logprobs, advantages = [], []
    for sample, advantage in zip(samples, prepare(samples)[0]["advantages"].tolist(), strict=True):
        logits = model(input_ids=torch.from_numpy(sample.token_ids.astype(np.int64))[None]).logits[0]
        for t in np.flatnonzero(sample.loss_mask):
            log_pi = torch.log_softmax(logits[t - 1], dim=-1)[int(sample.token_ids[t])]
            logprobs.append(log_pi - float(sample.logprobs[t]))
            advantages.append(advantage)
    at_stake = [log_rho.item() * a > 0 for log_rho, a in zip(logprobs, advantages, strict=True)]
    left = sorted(log_rho.item() ** 2 for log_rho, is_one in zip(logprobs, at_stake, strict=True) if is_one)
    while left and np.mean(left) > 0.04:
        left.pop()
    bound = left[-1] if left else 0.0
    kept = [not is_one or log_rho.item() ** 2 <= bound for log_rho, is_one in zip(logprobs, at_stake, strict=True)]
    terms = [-log_rho.exp() * a for log_rho, a, keep in zip(logprobs, advantages, kept, strict=True) if keep]
    return torch.stack(terms).sum(), kept.count(False)


@pytest.mark.parametrize("tokens_per_microbatch", [1, 40, 8192])
@pytest.mark.parametrize("measure_noise", [False, True])
def test_a_mask_over_the_batch_is_the_same_for_any_micro_batches(
    make_model: MakeModel,
    samples: list[Sample],
    tokens_per_microbatch: int,
    measure_noise: bool,
    device: torch.device,
) -> None:
    plain, model = make_model(), make_model().to(device)
    expected, num_dropped = m2po_reference(plain, samples)
    expected.backward()
    config = TrainerConfig.model_validate(BATCH_MASK | {"tokens_per_microbatch": tokens_per_microbatch})
    learner = learner_for(model, config, measure_noise=measure_noise)
    counted = accumulate(learner, samples)
    torch.testing.assert_close(gradients(model), gradients(plain), atol=2e-5, rtol=1e-4)
    metrics = learner.step().metrics
    assert counted["tokens"] == metrics["tokens"] == sum(int(sample.loss_mask.sum()) for sample in samples)
    assert metrics["loss"] == pytest.approx(expected.item() / metrics["tokens"], abs=1e-5)
    assert 0 < num_dropped == pytest.approx(metrics["clip_fraction"] * metrics["tokens"])


def test_every_call_has_a_mask_of_its_own(make_model: MakeModel, samples: list[Sample]) -> None:
    plain, model = make_model(), make_model()
    parts = [[sample for sample in samples if sample.group < 2], [sample for sample in samples if sample.group >= 2]]
    learner = learner_for(model, TrainerConfig.model_validate(BATCH_MASK))
    num_dropped = 0
    for part in parts:
        expected, dropped = m2po_reference(plain, part)
        expected.backward()
        accumulate(learner, part)
        num_dropped += dropped
    torch.testing.assert_close(gradients(model), gradients(plain), atol=2e-5, rtol=1e-4)
    metrics = learner.step().metrics
    assert num_dropped == pytest.approx(metrics["clip_fraction"] * metrics["tokens"])


def test_a_batch_without_a_token_for_the_mask_is_trained_as_it_is(make_model: MakeModel) -> None:
    learner = learner_for(make_model(), TrainerConfig.model_validate(BATCH_MASK))
    assert accumulate(learner, [])["samples"] == 0
    accumulate(learner, [make_sample(0, prompt=[5], response=[6 + i], reward=0.1) for i in range(3)])
    metrics = learner.step().metrics
    assert (metrics["tokens"], metrics["clip_fraction"]) == (3, 0), "no advantage, so no candidate"


def test_every_sample_weighs_the_same_or_every_token_does(make_model: MakeModel) -> None:
    short = make_sample(0, prompt=[5], response=[6], reward=1.0)
    long = make_sample(0, prompt=[5], response=[7, 8, 9], reward=0.0)
    norms = {}
    for normalize in ("token", "sequence", "constant"):
        model = make_model()
        config = TrainerConfig.model_validate({"max_grad_norm": 1e9, "objective": {"normalize": normalize}})
        learner = learner_for(model, config, max_tokens=5)
        accumulate(learner, [short, long])
        norms[normalize] = learner.step().metrics["loss"]
    ratio = {name: loss / norms["token"] for name, loss in norms.items()}
    assert ratio["constant"] == pytest.approx(4 / (2 * 5))
    # by token: (l0 + l1 + l2 + l3) / 4; by sequence: (l0 + (l1 + l2 + l3) / 3) / 2
    assert ratio["sequence"] != pytest.approx(1.0)


def test_the_learning_rate_follows_the_steps_size_and_the_data_s_worth(
    make_model: MakeModel, samples: list[Sample]
) -> None:
    tree = {"learning_rate": 1e-3, "warmup_steps": 0, "scale_learning_rate": ["samples", "ess"]}
    learner = learner_for(make_model(), TrainerConfig.model_validate(tree), whole_step=80)
    metrics = run(learner, samples, 1)[0].metrics
    assert 0 < metrics["sample_ess"] < 1
    assert metrics["learning_rate"] == pytest.approx(1e-3 * (20 / 80) ** 0.5 * metrics["sample_ess"] ** 0.5)


@pytest.mark.parametrize("name", ["ppo", "reinforce"])
def test_effective_sizes_are_those_of_ratios_whatever_the_objective_makes_of_them(
    make_model: MakeModel, name: str
) -> None:
    """Two answers of one token and one of two, sampled at half, once and twice what the policy gives them."""
    model, factors = make_model(), {7: 0.5, 8: 1.0, 9: 2.0}
    made = []
    for response in ([7], [8], [9, 9]):
        sample = make_sample(0, prompt=[5, 6], response=response, reward=float(len(made)))
        with torch.no_grad():
            log_pi = torch.log_softmax(
                model(input_ids=torch.from_numpy(sample.token_ids.astype(np.int64))[None]).logits[0], -1
            )
        for place in np.flatnonzero(sample.loss_mask):
            token = int(sample.token_ids[place])
            sample.logprobs[place] = float(log_pi[place - 1, token]) - math.log(factors[token])
        made.append(sample)
    learner = learner_for(model, TrainerConfig.model_validate({"objective": {"name": name}}))
    accumulate(learner, made)
    metrics = learner.step().metrics
    assert metrics["ess"] == pytest.approx(5.5**2 / (4 * (0.25 + 1 + 4 + 4)), rel=1e-4)
    assert metrics["sample_ess"] == pytest.approx(3.5**2 / (3 * (0.25 + 1 + 4)), rel=1e-4), "a product of 4 counts 2"


@pytest.mark.parametrize("offload", [False, True])
def test_recomputed_activations_change_nothing_but_memory(
    make_model: MakeModel, samples: list[Sample], device: torch.device, offload: bool
) -> None:
    if offload and device.type == "cpu":
        pytest.skip("nothing leaves a CPU for main memory")
    plain, recomputed = make_model(), make_model().to(device)
    accumulate(learner_for(plain), samples)
    places = ["activations"] if offload else []
    config = TrainerConfig.model_validate({"max_grad_norm": 1e9, "activation_checkpointing": True, "offload": places})
    learner = learner_for(recomputed, config)
    assert recomputed.is_activation_checkpointing
    accumulate(learner, samples)
    torch.testing.assert_close(gradients(recomputed), gradients(plain), atol=1e-5, rtol=1e-4)


def test_bfloat16_compute_keeps_weights_and_gradients_in_float32(
    make_model: MakeModel, samples: list[Sample], device: torch.device
) -> None:
    plain, rounded = make_model(), make_model().to(device)
    accumulate(learner_for(plain), samples)
    accumulate(learner_for(rounded, compute_dtype=torch.bfloat16), samples)
    exact, found = gradients(plain), gradients(rounded)
    assert found.dtype == torch.float32 and not torch.equal(exact, found)
    assert torch.nn.functional.cosine_similarity(exact, found, dim=0) > 0.98


def test_the_newest_versions_tokens_are_trained_with_the_rest_as_context(make_model: MakeModel) -> None:
    mixed = make_sample(0, prompt=[5, 6], response=[7, 8, 9], reward=1.0, versions=[4, 5, 5])
    other = make_sample(0, prompt=[5, 6], response=[9, 10], reward=0.0, versions=[4, 4])
    config = TrainerConfig.model_validate({"max_grad_norm": 1e9, "objective": {"segments": "newest"}})
    model, masked = make_model(), make_model()
    counted = accumulate(learner_for(model, config, policy_version=5), [mixed, other])
    assert counted["tokens"] == 4
    mask = mixed.loss_mask.copy()
    mask[2] = 0
    accumulate(learner_for(masked, policy_version=5), [dataclasses.replace(mixed, loss_mask=mask), other])
    torch.testing.assert_close(gradients(model), gradients(masked))


def test_a_snapshot_is_the_policy_of_some_steps_ago(make_model: MakeModel, samples: list[Sample]) -> None:
    objective = {"name": "decoupled", "proximal": "snapshot", "proximal_every": 2}
    tree = {"learning_rate": 1e-2, "warmup_steps": 0, "objective": objective}
    learner = learner_for(make_model(), TrainerConfig.model_validate(tree))
    clipped = [state.metrics["clip_fraction"] for state in run(learner, samples, 4)]
    assert clipped[0] == clipped[2] == 0, "right after it was renewed it is the policy itself"
    assert clipped[1] > 0 and clipped[3] > 0


def test_the_reference_stays_where_training_began(make_model: MakeModel, samples: list[Sample]) -> None:
    config = TrainerConfig.model_validate({"learning_rate": 1e-2, "objective": {"kl_coef": 0.01}})
    learner = AllRoles(make_model, config, max_staleness=2)
    distances = [state.metrics["kl_reference"] for state in run(learner, samples, 3)]
    assert distances[0] == pytest.approx(0.0, abs=1e-6) and 0 < distances[1] < distances[2]


def test_a_cut_through_groups_gives_the_same_update_once_advantages_are_fixed(
    make_model: MakeModel, samples: list[Sample]
) -> None:
    whole, parts = make_model(), make_model()
    batch, _ = prepare(samples)
    learner_for(whole).accumulate(batch)
    learner = learner_for(parts)
    for chunk in batch.chunk(7):
        learner.accumulate(chunk)
    torch.testing.assert_close(gradients(parts), gradients(whole), atol=1e-5, rtol=1e-4)


def test_tokens_of_weights_that_are_yet_to_be_made_here_are_never_trained(make_model: MakeModel) -> None:
    own = [make_sample(0, prompt=[5, 6], response=[7, 8], reward=r, versions=[5, 5]) for r in (0.0, 1.0)]
    foreign = make_sample(0, prompt=[5, 6], response=[9, 10, 11], reward=1.0, versions=[5, 6, 20])
    model = make_model()
    learner = learner_for(model, max_staleness=2, policy_version=5)
    accumulate(learner, [*own, foreign])
    found, state = gradients(model), learner.step()
    masked = {name: state.metrics[name] for name in ("tokens", "tokens_masked_stale", "tokens_masked_foreign")}
    assert masked == {"tokens": 5, "tokens_masked_stale": 0, "tokens_masked_foreign": 2}
    assert state.metrics["staleness_mean"] == 0
    assert [alarm.partition(":")[0] for alarm in state.alarms if "2 tokens" in alarm] == ["another trainer"]

    mask = foreign.loss_mask.copy()
    mask[3:] = 0
    other = make_model()
    unseen = dataclasses.replace(foreign, loss_mask=mask)
    accumulate(learner_for(other, max_staleness=2, policy_version=5), [*own, unseen])
    torch.testing.assert_close(found, gradients(other))


def test_stale_tokens_are_counted_and_leave_no_trace(make_model: MakeModel) -> None:
    fresh = [make_sample(0, prompt=[5, 6], response=[7, 8], reward=r, versions=[4, 5]) for r in (0.0, 1.0)]
    stale = make_sample(0, prompt=[5, 6], response=[9, 10, 11], reward=1.0, versions=[1, 2, 3])
    model = make_model()
    learner = learner_for(model, max_staleness=2, policy_version=5)
    counted = accumulate(learner, [*fresh, stale])
    assert (counted["tokens"], counted["tokens_masked_stale"]) == (5, 2)
    found = gradients(model)
    metrics = learner.step().metrics
    assert metrics["staleness_max"] == 2
    assert metrics["staleness_mean"] == pytest.approx((1 + 0 + 1 + 0 + 2) / 5)
    assert [metrics[name] for name in LAGS] == [2, 2, 1] + [0] * (len(LAGS) - 3)
    assert metrics["kl_tokens"] == 0, "every sample begins with a token of an older version"

    mask = stale.loss_mask.copy()
    mask[2:4] = 0  # masking is exactly not training: the tokens stay context
    other = make_model()
    accumulate(
        learner_for(other, max_staleness=2, policy_version=5), [*fresh, dataclasses.replace(stale, loss_mask=mask)]
    )
    torch.testing.assert_close(found, gradients(other))


def test_what_the_trained_version_began_compares_engine_and_trainer(make_model: MakeModel) -> None:
    mixed = make_sample(0, prompt=[5, 6], response=[7, 8], reward=0.0, versions=[4, 5])
    own = make_sample(0, prompt=[5, 6], response=[7, 8, 9], reward=1.0, versions=[5, 5, 6])
    learner = learner_for(make_model(), policy_version=5)
    accumulate(learner, [mixed, own, mixed])
    assert learner.step().metrics["kl_tokens"] == 2


def test_nothing_but_stale_tokens_changes_nothing(make_model: MakeModel, samples: list[Sample]) -> None:
    model = make_model()
    learner = learner_for(model, policy_version=9)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    assert accumulate(learner, samples)["tokens"] == 0
    assert accumulate(learner, [])["samples"] == 0
    state = learner.step()
    assert state.policy_version == 10 and state.metrics["tokens"] == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_equal_rewards_give_zero_gradient(make_model: MakeModel) -> None:
    model = make_model()
    accumulate(learner_for(model), [make_sample(0, prompt=[5], response=[6 + i], reward=0.1) for i in range(3)])
    assert not gradients(model).any()


def test_entropy_and_disagreement_are_those_of_the_policy(make_model: MakeModel, samples: list[Sample]) -> None:
    model = make_model()
    learner = learner_for(model)
    accumulate(learner, sampled_at([0.6], samples))
    state = learner.step()
    entropies, differences = [], []
    fresh = make_model()
    for sample in samples:
        with torch.no_grad():
            logits = fresh(input_ids=torch.from_numpy(sample.token_ids.astype(np.int64))[None]).logits[0]
        for t in np.flatnonzero(sample.loss_mask):
            log_pi = torch.log_softmax(logits[t - 1] / 0.6, dim=-1)
            entropies.append(-(log_pi.exp() * log_pi).sum().item())
            differences.append(abs(log_pi[int(sample.token_ids[t])].item() - float(sample.logprobs[t])))
    assert state.entropy == state.metrics["entropy"] == pytest.approx(np.mean(entropies), abs=1e-5)
    assert state.metrics["kl_engine_trainer"] == pytest.approx(np.mean(differences), abs=1e-4)


def run(learner: Learner | AllRoles, samples: list[Sample], steps: int) -> list[LearnerState]:
    states = []
    for _ in range(steps):
        versions = np.int32(learner.policy_version)
        accumulate(
            learner,
            [dataclasses.replace(s, versions=np.where(s.loss_mask, versions, -1).astype(np.int32)) for s in samples],
        )
        states.append(learner.step())
    return states


def test_the_same_run_twice_is_bit_identical(
    make_model: MakeModel, samples: list[Sample], device: torch.device
) -> None:
    first, second = make_model().to(device), make_model().to(device)
    losses = [[state.metrics["loss"] for state in run(learner_for(model), samples, 3)] for model in (first, second)]
    assert losses[0] == losses[1]
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


def test_a_restored_learner_goes_on_as_if_never_stopped(
    make_model: MakeModel, samples: list[Sample], device: torch.device
) -> None:
    objective = {"name": "decoupled", "proximal": "snapshot", "proximal_every": 3}
    config = TrainerConfig.model_validate({"warmup_steps": 4, "objective": objective})
    steady = learner_for(make_model().to(device), config)
    run(steady, samples, 2)
    saved = copy.deepcopy(steady.state_dict())
    resumed = learner_for(make_model().to(device), config)
    resumed.load_state_dict(saved)
    assert resumed.policy_version == 2
    expected, found = run(steady, samples, 2), run(resumed, samples, 2)
    assert [state.metrics["loss"] for state in found] == [state.metrics["loss"] for state in expected]
    assert [state.metrics["learning_rate"] for state in found] == [pytest.approx(3e-4 * s / 4) for s in (3, 4)]


def poison(model: PreTrainedModel) -> None:
    next(model.parameters()).grad = torch.full_like(next(model.parameters()), float("nan"))


def test_a_nonfinite_gradient_skips_the_step_and_too_many_end_the_run(
    make_model: MakeModel, samples: list[Sample]
) -> None:
    model = make_model()
    learner = learner_for(model, TrainerConfig(max_bad_steps=2))
    run(learner, samples, 1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    moments = [state["exp_avg"].clone() for state in learner.state_dict()["optimizer"]["state"].values()]
    poison(model)
    state = run(learner, samples, 1)[0]
    assert state.metrics["skipped"] == 1 and state.policy_version == 2
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    after = [state["exp_avg"] for state in learner.state_dict()["optimizer"]["state"].values()]
    assert all(torch.equal(a, b) for a, b in zip(moments, after, strict=True))
    assert run(learner, samples, 1)[0].metrics["skipped"] == 0  # and the count starts over
    poison(model)
    run(learner, samples, 1)
    poison(model)
    with pytest.raises(
        NothingLearnt, match="2 optimizer steps in a row changed no weights; the last one had a non-finite"
    ):
        run(learner, samples, 1)


def test_steps_without_a_token_to_train_end_the_run_too(make_model: MakeModel) -> None:
    learner = learner_for(make_model(), TrainerConfig(max_bad_steps=2))
    learner.step()
    with pytest.raises(NothingLearnt, match="2 optimizer steps in a row changed no weights; the last one had no token"):
        learner.step()


def test_gradients_are_clipped_and_reported_unclipped(make_model: MakeModel, samples: list[Sample]) -> None:
    model = make_model()
    learner = learner_for(model, TrainerConfig(max_grad_norm=1e-12, learning_rate=1.0))
    assert run(learner, samples, 1)[0].metrics["grad_norm"] > 1e-3


def test_named_weights_hold_each_tensor_once(make_model: MakeModel) -> None:
    weights = learner_for(make_model()).named_weights()
    assert "model.embed_tokens.weight" in weights and "lm_head.weight" not in weights
    assert len({tensor.data_ptr() for tensor in weights.values()}) == len(weights)


def test_a_critic_learns_what_episodes_earn_and_replaces_the_group_mean(make_model: MakeModel, tmp_path: Path) -> None:
    """One episode per group: there are no siblings to compare with."""
    config = TrainerConfig.model_validate({"critic": {"learning_rate": 1e-2, "clip": 10.0, "trace": 1.0}})
    learner = AllRoles(make_model, config, max_staleness=2)
    lone = [make_sample(i, prompt=[5, 6], response=[7, 8, 9], reward=1.0) for i in range(4)]
    losses = [state.metrics["value_loss"] for state in run(learner, lone, 12)]
    assert losses[0] == pytest.approx(0.5, abs=1e-6), "V is 0 at first"
    assert losses[-1] < 0.05
    learner.write(tmp_path)
    other = AllRoles(make_model, config, max_staleness=2)
    other.read(tmp_path)
    assert run(other, lone, 1)[0].metrics["value_loss"] == run(learner, lone, 1)[0].metrics["value_loss"]


@given(
    parts=st.lists(
        st.lists(st.lists(st.tuples(st.floats(-5, 5), st.booleans()), min_size=1, max_size=5), max_size=3),
        min_size=1,
        max_size=3,
    )
)
def test_whitened_advantages_have_mean_zero_and_deviation_one_over_all_ranks(
    parts: list[list[list[tuple[float, bool]]]],
) -> None:
    batches = [
        Batch(
            values={
                "advantages": [np.asarray([value for value, _ in row], dtype=np.float32) for row in part],
                "loss_mask": [np.asarray([flag for _, flag in row], dtype=np.uint8) for row in part],
            }
        )
        for part in parts
    ]
    before = [value for part in parts for row in part for value, flag in row if flag]
    found = whitened(batches)
    after = [
        float(value)
        for batch in found
        for row, mask in zip(batch["advantages"], batch["loss_mask"], strict=True)
        for value, flag in zip(row, mask, strict=True)
        if flag
    ]
    if len(before) > 1 and np.std(before) > 1e-2:
        assert np.mean(after) == pytest.approx(0.0, abs=1e-3) and np.std(after) == pytest.approx(1.0, abs=1e-3)


def test_every_micro_batch_is_a_sign_of_progress(make_model: MakeModel, samples: list[Sample]) -> None:
    ticks: list[None] = []
    learner = learner_for(make_model(), TrainerConfig(tokens_per_microbatch=1))
    with heard_by(lambda: ticks.append(None)):
        accumulate(learner, samples)
    assert len(ticks) == len(samples)


def test_a_step_without_tokens_leaves_the_critic_alone(make_model: MakeModel) -> None:
    learner = AllRoles(make_model, TrainerConfig.model_validate({"critic": {}}), max_staleness=2)
    assert learner.step().metrics["value_loss"] == 0.0


def test_the_rewarded_token_of_a_bandit_becomes_likely(make_model: MakeModel) -> None:
    """Sampling from the model itself, an arm that pays is found among four and pulled ever more often."""
    model, arms, prompt = make_model(), [20, 21, 22, 23], [5, 6, 7]
    learner = Learner(model, TrainerConfig(learning_rate=3e-3), max_staleness=0)
    generator = torch.Generator().manual_seed(0)

    def policy() -> torch.Tensor:
        with torch.no_grad():
            return torch.softmax(model(input_ids=torch.tensor([prompt])).logits[0, -1], dim=-1)

    before = policy()[arms[2]].item()
    for version in range(35):
        pi = policy()
        pulls = torch.multinomial(pi, 256, replacement=True, generator=generator).tolist()
        accumulate(
            learner,
            [
                make_sample(
                    0,
                    prompt=prompt,
                    response=[pull],
                    reward=float(pull == arms[2]),
                    logprob=float(pi[pull].log()),
                    versions=[version],
                )
                for pull in pulls
            ],
        )
        assert learner.step().metrics["kl_engine_trainer"] < 1e-4
    assert before < 0.05
    assert policy()[arms[2]].item() > 0.5


def test_a_full_disk_is_called_one_when_the_state_is_written(make_model: MakeModel, tmp_path: Path) -> None:
    learner = learner_for(make_model())
    (tmp_path / f"{NAME}.pt").symlink_to("/dev/full")
    learner.write(tmp_path)
    with pytest.raises(OSError, match="No space left on device"):
        learner.is_written(ENOUGH_S)


def test_what_a_call_counts_can_be_sent(make_model: MakeModel, samples: list[Sample]) -> None:
    counted = accumulate(learner_for(make_model()), samples)
    assert all(type(count) is float for count in counted.values())
