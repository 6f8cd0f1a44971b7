import json
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from published import publish, publish_next
from safetensors.torch import save_file

from penstock.types import WeightsHandle
from penstock.weights.publication import WeightsPublisher
from penstock.weights.shared_memory import (
    WeightsMismatch,
    describe,
    fingerprint,
    layout,
    receive,
)


def weights() -> dict[str, torch.Tensor]:
    return {
        "a.weight": torch.arange(12, dtype=torch.float32).reshape(3, 4),
        "b.bias": torch.tensor([1.5, -2.5], dtype=torch.bfloat16),
        "c.scale": torch.tensor(3.0),
        "d.strided": torch.arange(6, dtype=torch.float32).reshape(2, 3).t(),
    }


@pytest.fixture
def handle(tmp_path: Path) -> WeightsHandle:
    return publish(weights(), directory=tmp_path / "weights", policy_version=7)


def test_what_is_published_is_received(handle: WeightsHandle) -> None:
    received = receive(handle, layout(weights()))
    assert handle.policy_version == 7
    assert received.keys() == weights().keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in weights().items())
    assert fingerprint(received) == handle.fingerprint


def test_the_file_is_mapped_and_outlives_its_name(handle: WeightsHandle) -> None:
    received = receive(handle, layout(weights()))
    Path(handle.path).unlink()
    assert handle.path in Path("/proc/self/maps").read_text()
    assert torch.equal(received["a.weight"], weights()["a.weight"])


def test_only_the_owner_may_read_and_nothing_unfinished_stays(handle: WeightsHandle) -> None:
    path = Path(handle.path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert {file.name for file in path.parent.iterdir()} == {path.name, "outcome.json"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"a.weight": torch.zeros(4, 3)}, r"a.weight has shape \(3, 4\), expected \(4, 3\)"),
        ({"b.bias": torch.zeros(2)}, "b.bias has dtype torch.bfloat16, expected torch.float32"),
        ({"aa.new": torch.zeros(1)}, "aa.new is missing from the weights"),
    ],
)
def test_the_first_difference_is_named(handle: WeightsHandle, change: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(WeightsMismatch, match=message):
        receive(handle, layout(weights() | change))


def test_a_parameter_the_model_lacks_is_named(handle: WeightsHandle) -> None:
    expected = {name: entry for name, entry in layout(weights()).items() if name != "b.bias"}
    with pytest.raises(WeightsMismatch, match=r"b\.bias is unknown to the model"):
        receive(handle, expected)


def test_a_corrupted_byte_is_found(handle: WeightsHandle) -> None:
    content = bytearray(Path(handle.path).read_bytes())
    content[-5] ^= 1
    Path(handle.path).write_bytes(content)
    with pytest.raises(WeightsMismatch, match="its bytes changed"):
        receive(handle, layout(weights()))


def test_a_truncated_a_foreign_and_a_missing_file_are_refused(handle: WeightsHandle) -> None:
    path = Path(handle.path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(WeightsMismatch, match=f"has {handle.num_bytes - 1} bytes, expected {handle.num_bytes}"):
        receive(handle, layout(weights()))
    path.write_bytes(b"x" * handle.num_bytes)
    with pytest.raises(WeightsMismatch, match="not a safetensors file"):
        receive(handle, layout(weights()))
    with pytest.raises(WeightsMismatch, match="does not exist"):
        receive(replace(handle, path=str(path.parent / "gone")), layout(weights()))


def test_a_file_of_another_program_is_received(tmp_path: Path) -> None:
    """It may have metadata, and tensors at places that are not aligned. It may not have other dtypes than weights."""
    tensors = {"a": torch.arange(3.0), "b": torch.arange(5.0).bfloat16()}
    content = tensors["b"].view(torch.uint8).numpy().tobytes() + tensors["a"].numpy().tobytes()
    entries = {
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "BF16", "shape": [5], "data_offsets": [0, 10]},
        "a": {"dtype": "F32", "shape": [3], "data_offsets": [10, 22]},
    }
    header = json.dumps(entries).encode()
    path = tmp_path / "model.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + content)
    handle = WeightsHandle(
        policy_version=1, path=str(path), num_bytes=path.stat().st_size, fingerprint=fingerprint(tensors)
    )
    received = receive(handle, layout(tensors))
    assert all(torch.equal(received[name], tensor) for name, tensor in tensors.items())
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"'))
    with pytest.raises(WeightsMismatch, match=r"parameter a of .* has dtype I32"):
        receive(handle, layout(tensors))


def test_the_fingerprint_sees_swapped_tensors_and_ignores_order() -> None:
    named = {"a": torch.zeros(2), "b": torch.ones(2)}
    assert fingerprint(named) == fingerprint(dict(reversed(named.items())))
    assert fingerprint(named) != fingerprint({"a": named["b"], "b": named["a"]})


def test_the_publisher_keeps_three_versions(tmp_path: Path) -> None:
    publisher = WeightsPublisher(tmp_path)
    for version in (1, 2, 3, 4, 4):
        publish_next(publisher, weights(), version)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "3", "4"]


def test_a_model_directory_is_received_whole_and_in_the_models_own_dtype(tmp_path: Path) -> None:
    named = {name: tensor.contiguous() for name, tensor in weights().items()}
    first, second = dict(list(named.items())[:1]), dict(list(named.items())[1:])
    save_file(first, tmp_path / "model-1.safetensors")
    save_file({name: tensor.float() for name, tensor in second.items()}, tmp_path / "model-2.safetensors")
    expected = layout(named)
    handle = describe(tmp_path, expected, policy_version=3)
    received = receive(handle, expected)
    assert received.keys() == named.keys()
    assert all(torch.equal(received[name], tensor) for name, tensor in named.items())
    assert handle.fingerprint == fingerprint(named)
    (tmp_path / "model-2.safetensors").unlink()
    with pytest.raises(WeightsMismatch, match=r"bytes, expected"):
        receive(handle, expected)
    with pytest.raises(WeightsMismatch, match=r"is missing from the weights"):
        describe(tmp_path, expected, policy_version=4)


def test_a_directory_without_weights_is_named(tmp_path: Path) -> None:
    with pytest.raises(WeightsMismatch, match=f"{tmp_path} has no weights"):
        describe(tmp_path, {}, policy_version=1)
