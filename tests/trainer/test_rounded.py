"""Passes with rounded weights are those of a model whose weights were rounded, and train the weights before."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from made_roles import ENOUGH_S, AllRoles
from test_forward import SMALL, small_model
from test_learner import accumulate, learner_for
from transformers import LlamaConfig, PreTrainedModel

from penstock.config import TrainerConfig
from penstock.samples import Sample
from penstock.trainer import critic as critic_module
from penstock.trainer import learner as learner_module
from penstock.trainer.prepare import prepare
from penstock.trainer.rounded import Rounded

MakeModel = Callable[[], PreTrainedModel]
DTYPE = torch.bfloat16
TOKENS = torch.tensor([[5, 6, 7, 8]])


def rounded_copy(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy whose parameters alone are rounded."""
    made = copy.deepcopy(model)
    for parameter in made.parameters():
        parameter.data = parameter.data.to(DTYPE)
    return made


def loss_of(model: PreTrainedModel, row: int) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=TOKENS + row).logits.float().square().mean()
    return loss


@pytest.mark.parametrize("tied", [False, True])
def test_gradients_are_those_of_a_rounded_model_and_add_up_in_float32(tied: bool) -> None:
    model = small_model(LlamaConfig(**SMALL, tie_word_embeddings=tied))
    plain, names = rounded_copy(model), [name for name, _ in model.named_parameters()]
    expected = {name: torch.zeros_like(weight) for name, weight in model.named_parameters()}
    rounded = Rounded(model, DTYPE)
    for row in range(3):
        with rounded.in_use():
            loss = loss_of(model, row)
            loss.backward()
        plain_loss = loss_of(plain, row)
        plain_loss.backward()
        assert loss.dtype == torch.float32 and torch.equal(loss, plain_loss)
        for name, weight in plain.named_parameters():
            expected[name] += weight.grad.float()
            weight.grad = None
    assert [name for name, _ in model.named_parameters()] == names
    for name, weight in model.named_parameters():
        assert weight.dtype == weight.grad.dtype == torch.float32
        assert torch.equal(weight.grad, expected[name]), name


def test_copies_follow_the_weights_however_these_change() -> None:
    model = small_model(LlamaConfig(**SMALL))
    weights, rounded, seen = list(model.parameters()), Rounded(model, DTYPE), []

    def logits() -> torch.Tensor:
        with rounded.in_use(), torch.no_grad():
            found: torch.Tensor = model(input_ids=TOKENS).logits
        seen.append(found)
        return found

    def expected() -> torch.Tensor:
        found: torch.Tensor = rounded_copy(model)(input_ids=TOKENS).logits
        return found

    assert torch.equal(logits(), expected())
    for weight in model.parameters():
        weight.data.mul_(1.5)
    rounded.changed()
    assert torch.equal(logits(), expected())
    with rounded.in_use():
        for weight in weights:
            weight.data.mul_(0.5)
        rounded.changed()
        with torch.no_grad():
            seen.append(model(input_ids=TOKENS).logits)
    assert torch.equal(seen[-1], expected())
    rounded.forget()
    assert torch.equal(logits(), expected())
    assert not any(torch.equal(one, other) for one, other in pairwise(seen[:3]))


def test_a_fused_optimizer_is_followed_too(
    make_model: MakeModel, samples: Sequence[Sample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It leaves the version counters of the weights as they are. It is the one on accelerators."""

    def fused(parameters: Sequence[torch.nn.Parameter], **_: object) -> torch.optim.AdamW:
        return torch.optim.AdamW(parameters, fused=True)

    for module in (learner_module, critic_module):
        monkeypatch.setattr(module, "adamw", fused)
    settings = {"learning_rate": 0.05, "warmup_steps": 0, "critic": {"learning_rate": 0.05}}
    roles = AllRoles(make_model, TrainerConfig.model_validate(settings), max_staleness=9, compute_dtype=DTYPE)
    for _ in range(2):
        accumulate(roles, samples)
        roles.step()
    for role, model in ((roles.learner, roles.learner.model), (roles._critic, roles._critic._function.body)):
        copied = rounded_copy(model)
        with role._strategy.computing(), torch.no_grad():
            assert torch.equal(model(input_ids=TOKENS)[0], copied(input_ids=TOKENS)[0])


def test_an_error_in_a_pass_leaves_the_weights_in_their_places() -> None:
    model = small_model(LlamaConfig(**SMALL))
    before = dict(model.named_parameters())
    with pytest.raises(ZeroDivisionError), Rounded(model, DTYPE).in_use():
        assert model.dtype == DTYPE
        raise ZeroDivisionError
    assert all(before[name] is weight for name, weight in model.named_parameters())


def test_all_products_of_a_learner_that_rounds_are_in_its_dtype(
    make_model: MakeModel, samples: Sequence[Sample]
) -> None:
    model, dtypes = make_model(), set()
    learner = learner_for(model, compute_dtype=DTYPE)
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear):
            layer.register_forward_hook(lambda own, given, made: dtypes.update({given[0].dtype, made.dtype}))
    accumulate(learner, samples)
    assert dtypes == {DTYPE}
    assert {weight.dtype for weight in learner.named_weights().values()} == {torch.float32}


def test_a_copy_of_an_earlier_version_computes_with_its_own_rounded_weights(
    make_model: MakeModel, samples: Sequence[Sample]
) -> None:
    """Between the forward and the backward pass of the policy, which must not notice."""
    config = TrainerConfig.model_validate(
        {"learning_rate": 0.05, "warmup_steps": 0, "max_grad_norm": 1e9, "canaries": {"parity_every": 1}}
    )
    learner = learner_for(make_model(), config, compute_dtype=DTYPE, max_staleness=3, policy_version=1)
    batch = prepare(samples, for_critic=True)[0]
    first = learner.accumulate(batch)
    assert first["tokens"] > 0
    learner.step()  # no token of version 1: the learner keeps a copy
    assert learner._criterion.has_parity_copy
    copied = rounded_copy(learner.model)
    learner.accumulate(batch)
    learner.step()
    exchange = learner._criterion._parity.copy
    assert exchange is not None
    with exchange.placed() as model, learner._strategy.computing(), torch.no_grad():
        assert torch.equal(model(input_ids=TOKENS).logits, copied(input_ids=TOKENS).logits)
    with learner._strategy.computing(), torch.no_grad():
        assert not torch.equal(learner.model(input_ids=TOKENS).logits, copied(input_ids=TOKENS).logits)


def test_a_learner_goes_on_from_its_checkpoint(
    make_model: MakeModel, samples: Sequence[Sample], tmp_path: Path
) -> None:
    config = TrainerConfig(learning_rate=0.05, warmup_steps=0)
    learner = learner_for(make_model(), config, compute_dtype=DTYPE)
    accumulate(learner, samples)
    learner.step()
    learner.write(tmp_path)
    assert learner.is_written(ENOUGH_S)
    other = learner_for(make_model(), config, compute_dtype=DTYPE)
    accumulate(other, samples)  # its copies are of other weights
    other.read(tmp_path)
    for each in (learner, other):
        accumulate(each, samples)
    expected, found = learner.step().metrics, other.step().metrics
    assert found | {"busy_s": 0} == expected | {"busy_s": 0}
