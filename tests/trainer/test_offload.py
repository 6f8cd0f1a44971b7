"""A learner that gives its device up between steps learns what one that keeps it learns."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from made_roles import AllRoles
from transformers import PreTrainedModel

from penstock.config import TrainerConfig
from penstock.groups.batch import Batch
from penstock.samples import Sample
from penstock.trainer.prepare import prepare

MakeModel = Callable[[], PreTrainedModel]
EVERYTHING = {
    "critic": {"learning_rate": 1e-3},
    "objective": {"name": "decoupled", "proximal": "snapshot", "proximal_every": 2, "kl_coef": 0.1},
    "canaries": {"parity_every": 1},
}
ADAPTED = EVERYTHING | {"lora": {"rank": 4}}


def roles_on(device: torch.device, make_model: MakeModel, **settings: Any) -> AllRoles:
    config = TrainerConfig.model_validate({"learning_rate": 1e-2, "warmup_steps": 0, **settings})
    torch.manual_seed(0)
    return AllRoles(lambda: make_model().to(device), config, max_staleness=2)


def batch(samples: list[Sample], version: int) -> Batch:
    """Of samples of the version before: only a copy of that can be compared with the engine."""
    of_version = [
        dataclasses.replace(s, versions=np.where(s.loss_mask, max(version - 1, 0), -1).astype(np.int32))
        for s in samples
    ]
    return prepare(of_version, for_critic=True)[0]


def step(roles: AllRoles, samples: list[Sample]) -> dict[str, float]:
    roles.accumulate(batch(samples, roles.policy_version))
    return roles.step().metrics | {"busy_s": 0.0}


def held(roles: AllRoles) -> Iterator[torch.Tensor]:
    """What is as large as a model, wherever it is."""
    learner, critic, reference = roles.learner, roles._critic, roles._reference
    modules = [learner.model, *learner._criterion.copies]
    modules += [critic._function] if critic is not None else []
    modules += [reference._model] if reference is not None else []
    for module in modules:
        yield from (*module.parameters(), *module.buffers())
    for optimizer in [learner._optimizer] + ([critic._optimizer] if critic is not None else []):
        for state in optimizer.state.values():
            yield from (state["exp_avg"], state["exp_avg_sq"])


@pytest.mark.parametrize("settings", [{}, EVERYTHING, ADAPTED], ids=["plain", "everything", "lora"])
def test_who_gives_the_device_up_learns_the_same(
    device: torch.device, make_model: MakeModel, samples: list[Sample], settings: dict[str, Any]
) -> None:
    staying, leaving = (roles_on(device, make_model, **settings) for _ in range(2))
    compares = set()
    for _ in range(4):
        expected = step(staying, samples)
        leaving.resume()
        assert step(leaving, samples) == expected
        before = [tensor.untyped_storage() for tensor in held(leaving)]
        leaving.release()
        waiting = list(held(leaving))
        assert {tensor.device.type for tensor in waiting} == {"cpu"}
        after = [tensor.untyped_storage() for tensor in waiting]
        assert not {storage.data_ptr() for storage in before} & {storage.data_ptr() for storage in after}
        for name, weight in staying.named_weights().items():
            found = leaving.named_weights()[name]  # what waits can be published; adapters are merged where they are
            torch.testing.assert_close(found, weight.cpu(), rtol=0, atol=1e-6 if "lora" in settings else 0)
        compares.add(leaving.learner._criterion._parity.copy is not None)
    assert True in compares or not settings


def test_a_checkpoint_is_written_without_the_device(
    device: torch.device, make_model: MakeModel, samples: list[Sample], tmp_path: Path
) -> None:
    roles = roles_on(device, make_model, **EVERYTHING)
    step(roles, samples)
    roles.release()
    roles.write(tmp_path)
    roles.resume()
    expected = step(roles, samples)
    roles.read(tmp_path)
    assert step(roles, samples) == pytest.approx(expected, rel=1e-6)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_nothing_is_left_on_the_device(make_model: MakeModel, samples: list[Sample]) -> None:
    device = torch.device("cuda")
    step(roles_on(device, make_model, **EVERYTHING), samples)  # what libraries take once, they keep
    gc.collect()
    before = torch.cuda.memory_allocated()
    roles = roles_on(device, make_model, **EVERYTHING)
    step(roles, samples)
    largest = max(tensor.nbytes for tensor in held(roles))
    assert torch.cuda.memory_allocated() - before > largest
    roles.release()
    assert torch.cuda.memory_allocated() - before < largest
