"""Weights that SGLang's serializer pickles in another process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from sglang_sender import Sender, numbers

from penstock.weights import tensor_payload
from penstock.weights.tensor_payload import read_tensors

SHAPES = {"a.weight": [3, 5], "b.bias": [7], "scale": []}
CPU = torch.device("cpu")
pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def sender() -> Iterator[Sender]:
    sender = Sender()
    yield sender
    sender.close()


def read(payload: str, load_format: str | None = None, max_bytes: int = 2**20) -> dict[str, torch.Tensor]:
    return read_tensors([payload], load_format, max_bytes=max_bytes, device=CPU)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", ["pairs", "parameters", "ranks", "bucket", "bucket of one dtype"])
def test_every_form_of_the_senders_is_read(sender: Sender, form: str, dtype: str) -> None:
    payload = sender.serialize(form, SHAPES, 0.5, dtype)
    found = read(payload, "flattened_bucket" if form.startswith("bucket") else None)
    expected = numbers(SHAPES, 0.5, dtype)
    assert found.keys() == expected.keys()
    assert all(found[name].dtype == tensor.dtype for name, tensor in expected.items())
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert not any(tensor.requires_grad for tensor in found.values())


def test_what_was_read_is_a_copy_and_the_senders_memory_is_freed(sender: Sender) -> None:
    found = read(sender.serialize("pairs", SHAPES, 1.0))
    assert sender.segments()
    sender.drop()
    assert sender.segments() == []
    assert all(torch.equal(found[name], tensor) for name, tensor in numbers(SHAPES, 1.0, "float32").items())


def test_tensors_may_share_memory(sender: Sender) -> None:
    found = read(sender.serialize("views", {}))
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == {
        "rows": (2, 6),
        "columns": (6, 4),
        "empty": (0, 6),
    }
    assert found["columns"].is_contiguous()
    sender.drop()
    assert sender.segments() == []


def test_an_empty_bucket_brings_nothing(sender: Sender) -> None:
    assert read(sender.serialize("bucket", {}), "flattened_bucket") == {}


def test_more_bytes_than_the_model_has_are_refused(sender: Sender) -> None:
    with pytest.raises(ValueError, match="92 bytes are sent, but this model takes at most 91"):
        read(sender.serialize("pairs", SHAPES), max_bytes=91)


def test_memory_that_is_gone_is_named(sender: Sender) -> None:
    payload = sender.serialize("pairs", SHAPES)
    segment = sender.segments()[0]
    read(payload)
    sender.drop()
    with pytest.raises(ValueError, match=r"cannot be opened .No such file or directory.: keep the tensors until"):
        read(payload)
    assert segment.startswith("torch_")


def test_file_descriptors_are_refused_with_the_remedy() -> None:
    sender = Sender("file_descriptor")
    try:
        with pytest.raises(ValueError, match=r'call torch.multiprocessing.set_sharing_strategy\("file_system"\)'):
            read(sender.serialize("pairs", SHAPES))
    finally:
        sender.close()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("form", ["pairs", "ranks", "bucket"])
def test_device_memory_is_copied_and_its_bounds_are_kept(sender: Sender, form: str) -> None:
    def read_on_device() -> dict[str, torch.Tensor]:
        payload = sender.serialize(form, SHAPES, 1.0, device="cuda")
        load_format = "flattened_bucket" if form == "bucket" else None
        return read_tensors([payload], load_format, max_bytes=2**20, device=torch.device("cuda", 0))

    found = read_on_device()
    assert all(torch.equal(found[name].cpu(), tensor) for name, tensor in numbers(SHAPES, 1.0).items())
    taken = tensor_payload._device_memory
    for changed, message in (
        ({"offset_bytes": 2**30}, "bytes exceed an allocation of"),
        ({"num_bytes": 2**40}, "bytes exceed an allocation of"),
        ({"handle": b"\x02c" + bytes(64)}, "its memory cannot be opened"),
        ({"event": bytes(64)}, "its memory cannot be opened"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(tensor_payload, "_device_memory", lambda *args, new=changed: taken(*args)._replace(**new))
            with pytest.raises(ValueError, match=message):
                read_on_device()
        assert torch.ones(3, device="cuda").sum().item() == 3
