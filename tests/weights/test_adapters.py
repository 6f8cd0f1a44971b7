"""Servers add adapters to the weights that they have, as the trainer does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import Linear, Module

from penstock.model.low_rank import change_of, merged, names_of
from penstock.types import AdaptersForm, WeightsHandle
from penstock.weights.adapters import MergingReceiver, layout_of_adapters
from penstock.weights.publication import KEPT_VERSIONS, WeightsPublisher
from penstock.weights.receiver import Receiver
from penstock.weights.shared_memory import WeightsMismatch, fingerprint, layout

CPU = torch.device("cpu")
TARGETS = ("q.weight", "v.weight")


def base_weights(seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = {"q.weight": (12, 7), "v.weight": (5, 7), "embed.weight": (9, 7), "norm.weight": (7,)}
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def adapters(seed: int, rank: int = 3, targets: tuple[str, ...] = TARGETS) -> dict[str, Tensor]:
    generator, base = torch.Generator().manual_seed(seed), base_weights()
    made = {}
    for target in targets:
        a, b = names_of(target)
        made[a] = torch.randn(rank, base[target].shape[1], generator=generator)
        made[b] = torch.randn(base[target].shape[0], rank, generator=generator)
    return made


def expected(base: Mapping[str, Tensor], given: Mapping[str, Tensor], alpha: int) -> dict[str, Tensor]:
    """In the words of the paper: W + alpha / r * B A, rounded once."""
    found = dict(base)
    for name in given:
        if ".lora_A." in name:
            a, b = given[name], given[name.replace("lora_A", "lora_B")]
            target = name.removeprefix("base_model.model.").replace(".lora_A", "")
            found[target] = (base[target].float() + alpha / a.shape[0] * (b @ a)).to(base[target].dtype)
    return found


@dataclass
class Trainer:
    """Publishes a base once, and then adapters."""

    directory: Path
    seed: int = 0

    def __post_init__(self) -> None:
        self.publisher = WeightsPublisher(self.directory / "weights")
        named = base_weights(self.seed)
        with self.publisher.open_base(layout(named)) as opened:
            opened.write_whole(named.items(), 0)

    def publish(self, version: int, named: Mapping[str, Tensor] | None = None, **changes: object) -> WeightsHandle:
        named = adapters(version) if named is None else named
        base = self.publisher.base()
        assert base is not None
        form = replace(AdaptersForm(base=base, rank=3, alpha=4, targets=TARGETS), **changes)  # type: ignore[arg-type]
        with self.publisher.open(layout(named), version, adapters=True) as opened:
            return opened.write_whole(named.items(), version, adapters=form)


def receiver(tmp_path: Path, **options: object) -> Receiver:
    return Receiver(layout(base_weights()), machine="here", directory=tmp_path / "received", **options)  # type: ignore[arg-type]


@pytest.fixture
def receive(tmp_path: Path) -> MergingReceiver:
    return MergingReceiver(receiver(tmp_path), CPU)


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], each) for name, each in wanted.items())


def test_each_version_is_the_base_with_its_adapters(tmp_path: Path, receive: MergingReceiver) -> None:
    trainer, asked = Trainer(tmp_path), []

    def noted(handle: WeightsHandle) -> Mapping[str, Tensor]:
        asked.append(handle)
        return receiver(tmp_path)(handle)

    once = MergingReceiver(noted, CPU)
    for version in (1, 2):
        handle = trainer.publish(version)
        found = once(handle)
        wanted = expected(base_weights(), adapters(version), 4)
        assert found.keys() == wanted.keys()
        for name in wanted.keys() - set(TARGETS):
            assert torch.equal(found[name], wanted[name])
        for name in TARGETS:
            torch.testing.assert_close(found[name], wanted[name])
        assert same(found, receive(handle))
    assert [each.adapters is None for each in asked] == [True, False, False], "the base is mapped once"


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    rank=st.integers(1, 9),
    alpha=st.integers(1, 64),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_sums_are_those_of_peft_to_the_bit(
    sizes: tuple[int, int], rank: int, alpha: int, dtype: torch.dtype, seed: int
) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(seed)
    model = Module()
    model.q = Linear(*sizes, bias=False, dtype=dtype)
    weight = model.q.weight.detach().clone()
    config = peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=["q"], init_lora_weights=False)
    peft.inject_adapter_in_model(config, model)
    a, b = (part["default"].weight.detach().float() for part in (model.q.lora_A, model.q.lora_B))
    change = model.q.float().get_delta_weight("default").detach()
    assert torch.equal(change_of(a, b, alpha=alpha), change)
    with TemporaryDirectory() as directory:
        named, (name_a, name_b) = {"q.weight": weight}, names_of("q.weight")
        publisher = WeightsPublisher(Path(directory))
        with publisher.open_base(layout(named)) as opened:
            form = AdaptersForm(
                base=opened.write_whole(named.items(), 0), rank=rank, alpha=alpha, targets=("q.weight",)
            )
        both = {name_a: a, name_b: b}
        with publisher.open(layout(both), 1, adapters=True) as opened:
            handle = opened.write_whole(both.items(), 1, adapters=form)
        found = MergingReceiver(Receiver(layout(named), machine="", directory=Path(directory)), CPU)(handle)
    assert torch.equal(found["q.weight"], (weight + change).to(dtype))
    assert torch.equal(found["q.weight"], merged(weight, change.clone()))


def test_the_base_stays_while_versions_come_and_go(tmp_path: Path, receive: MergingReceiver) -> None:
    trainer = Trainer(tmp_path)
    handles = [trainer.publish(version) for version in range(2 * KEPT_VERSIONS)]
    folders = sorted(path.name for path in (tmp_path / "weights").iterdir())
    assert folders == [*map(str, range(KEPT_VERSIONS, 2 * KEPT_VERSIONS)), "base"]
    assert same(receive(handles[-1]), MergingReceiver(receiver(tmp_path), CPU)(handles[-1]))
    with pytest.raises(WeightsMismatch, match="does not exist"):
        receive(handles[0])


def test_a_new_trainer_writes_its_base_again(tmp_path: Path, receive: MergingReceiver) -> None:
    old = Trainer(tmp_path)
    found = receive(old.publish(1))
    assert WeightsPublisher(tmp_path / "weights").base() is None
    new = Trainer(tmp_path)
    assert new.publisher.base() == old.publisher.base()
    assert same(receive(new.publish(2, adapters(1))), found)
    (tmp_path / "weights" / "base" / "model.safetensors").unlink()
    assert new.publisher.base() is None, "it is written again"


def test_adapters_of_another_base_are_refused(tmp_path: Path, receive: MergingReceiver) -> None:
    trainer, other = Trainer(tmp_path), Trainer(tmp_path / "other", seed=1)
    held, foreign = trainer.publisher.base(), other.publisher.base()
    assert held is not None and foreign is not None
    receive(trainer.publish(6))
    gone = other.publish(7)
    Path(foreign.path).unlink()
    message = (
        f"the adapters of policy_version 7 belong to base {foreign.fingerprint}, and this server has {held.fingerprint}"
        ": .*does not exist"
    )
    with pytest.raises(WeightsMismatch, match=message):
        receive(gone)
    with pytest.raises(WeightsMismatch, match="and this server has none"):
        MergingReceiver(receiver(tmp_path), CPU)(gone)
    assert gone.adapters is not None
    swapped = replace(gone, adapters=replace(gone.adapters, base=held))
    with pytest.raises(WeightsMismatch, match=f"do not belong to base {held.fingerprint}"):
        receive(swapped)
    assert same(receive(trainer.publish(8, adapters(6))), receive(trainer.publish(9, adapters(6))))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 2}, r"q.lora_A.weight has shape \(3, 7\), expected \(2, 7\)"),
        ({"rank": 0}, "a rank and an alpha of at least 1"),
        ({"targets": ()}, "at least one weight"),
        ({"targets": ("q.weight",)}, "v.lora_A.weight is unknown"),
        ({"targets": (*TARGETS, "embed.weight")}, "embed.lora_A.weight is missing"),
        ({"targets": ("k.weight",)}, "adapters are for parameter k.weight, which is unknown to the model"),
        ({"targets": ("norm.weight",)}, r"norm.weight, which has shape \(7,\) and is no matrix"),
        ({"alpha": 5}, "its bytes changed, or its adapters do not belong to base"),
    ],
)
def test_adapters_that_do_not_fit_are_refused(
    tmp_path: Path, receive: MergingReceiver, changes: dict[str, object], message: str
) -> None:
    handle = Trainer(tmp_path).publish(1)
    assert handle.adapters is not None
    with pytest.raises(WeightsMismatch, match=message):
        receive(replace(handle, adapters=replace(handle.adapters, **changes)))  # type: ignore[arg-type]


def test_a_base_of_other_shapes_is_refused(tmp_path: Path) -> None:
    handle = Trainer(tmp_path).publish(1)
    model = layout(base_weights() | {"embed.weight": torch.zeros(9, 8)})
    receive = MergingReceiver(Receiver(model, machine="", directory=tmp_path / "received"), CPU)
    with pytest.raises(WeightsMismatch, match=r"this server has none: parameter embed.weight has shape \(9, 7\)"):
        receive(handle)


def test_a_base_has_no_adapters_itself(tmp_path: Path) -> None:
    trainer = Trainer(tmp_path)
    handle = trainer.publish(1)
    assert handle.adapters is not None
    form = replace(handle.adapters, base=handle)
    with pytest.raises(WeightsMismatch, match="it has adapters itself"):
        layout_of_adapters(form, layout(base_weights()))


def test_the_fingerprint_names_base_and_adapters(tmp_path: Path) -> None:
    handle = Trainer(tmp_path).publish(1)
    assert handle.adapters is not None
    named = adapters(1)
    assert handle.fingerprint == fingerprint(named, handle.adapters)
    others = [None, replace(handle.adapters, alpha=5)]
    assert len({fingerprint(named, form) for form in (handle.adapters, *others)}) == 3
