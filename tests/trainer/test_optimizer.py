"""An optimizer whose moments wait in main memory takes the steps of one whose moments stay."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import Parameter

from penstock.trainer import optimizer as module
from penstock.trainer.optimizer import OffloadedAdamW, adamw, load_optimizer, take_step


def parameters(sizes: list[int]) -> list[Parameter]:
    torch.manual_seed(0)
    return [Parameter(torch.randn(size)) for size in sizes]


def step(optimizer: torch.optim.AdamW, own: list[Parameter], number: int) -> float:
    draw = torch.Generator().manual_seed(number)
    for index, parameter in enumerate(own):
        has_gradient = (number + index) % 3 > 0  # some get none
        parameter.grad = torch.randn(parameter.shape, generator=draw) if has_gradient else None
    return take_step(optimizer, learning_rate=0.1, max_grad_norm=1.0)


def moments(optimizer: torch.optim.AdamW) -> dict[tuple[int, str], torch.Tensor]:
    return {
        (number, name): value
        for number, of_one in optimizer.state_dict()["state"].items()
        for name, value in of_one.items()
        if name != "step"
    }


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), bucket=st.integers(1, 20))
def test_steps_and_states_are_the_same(sizes: list[int], bucket: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BUCKET_ELEMENTS", bucket)
        own, expected = parameters(sizes), parameters(sizes)
        waiting, usual = adamw(own, weight_decay=0.1, offload=True), adamw(expected, weight_decay=0.1)
        assert isinstance(waiting, OffloadedAdamW)
        places: Mapping[Any, int] = {}
        for number in range(4):
            assert step(waiting, own, number) == step(usual, expected, number)
            assert all(map(torch.equal, own, expected))
            assert all(parameter.grad is None for parameter in own)
            found, others = moments(waiting), moments(usual)
            assert found.keys() == others.keys() and all(torch.equal(found[key], others[key]) for key in found)
            now = {key: value.data_ptr() for key, value in found.items()}
            assert now | places == now, "moments have one place in main memory"
            places = now


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("after", [False, True])
def test_a_saved_state_goes_on_with_or_without_offload(before: bool, after: bool) -> None:
    own = parameters([3, 5])
    saving = adamw(own, offload=before)
    for number in range(3):
        step(saving, own, number)
    saved = copy.deepcopy(saving.state_dict())
    other = [Parameter(parameter.detach().clone()) for parameter in own]
    loading = adamw(other, offload=after)
    load_optimizer(loading, saved)
    for number in range(3, 6):
        assert step(saving, own, number) == step(loading, other, number)
    assert all(map(torch.equal, own, other))


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    own = parameters([3, 5])
    waiting = adamw(own, offload=True)
    step(waiting, own, 1)
    before, state = [parameter.detach().clone() for parameter in own], copy.deepcopy(moments(waiting))
    own[0].grad = torch.full((3,), torch.inf)
    take_step(waiting, learning_rate=0.1, max_grad_norm=1.0)
    assert all(map(torch.equal, before, own))
    assert all(torch.equal(value, state[key]) for key, value in moments(waiting).items())
