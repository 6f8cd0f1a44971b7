"""A payload of serialized tensors runs no code, opens nothing but tensors of this user, and ends in one error."""

from __future__ import annotations

import base64
import os
import pickle
import random
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

sys.path.insert(0, str(Path(__file__).parent.parent / "weights"))

from sglang_sender import Sender

from penstock.weights import inert_pickle, tensor_payload
from penstock.weights.tensor_payload import read_tensors

NAME = b"/torch_1_2_3"


class Asks:
    """An object whose pickle asks for a call."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.args


def tensor(
    segment: Any = NAME, size: Any = 8, *, shape: Any = (2,), stride: Any = (1,), offset: Any = 0, manager: bytes = b""
) -> Asks:
    storage = Asks(reductions.rebuild_storage_filename, torch.UntypedStorage, manager, segment, size)
    typed = Asks(reductions.rebuild_typed_storage, storage, torch.float32)
    return Asks(reductions.rebuild_tensor, torch.Tensor, typed, (offset, shape, stride, False))


def on_device(**changed: Any) -> Asks:
    values = {
        "device": 0,
        "handle": b"\x02c" + bytes(64),
        "size": 8,
        "start": 0,
        "counters": b"/torch_1_2_4",
        "counter": 0,
        "event": bytes(64),
    } | changed
    device, handle, size, start, counters, counter, event = values.values()
    first = torch.Tensor, (2,), (1,), 0, torch.UntypedStorage, torch.float32, device, handle, size, start, False
    return Asks(reductions.rebuild_cuda_tensor, *first, counters, counter, event, True)


def read(content: Any, load_format: str | None = None) -> dict[str, torch.Tensor]:
    data = content if isinstance(content, bytes) else pickle.dumps(content, protocol=4)
    text = base64.b64encode(data).decode()
    return read_tensors([text], load_format, max_bytes=2**20, device=torch.device("cpu"))


def refused(content: Any, load_format: str | None = None) -> str:
    with pytest.raises(ValueError) as caught:
        read(content, load_format)
    message = str(caught.value)
    assert len(message) < 600
    return message


@pytest.fixture
def segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tensor_payload, "SEGMENTS", tmp_path)
    return tmp_path


def test_a_name_that_is_no_part_of_a_handle_is_refused_by_name(tmp_path: Path) -> None:
    run = f"touch {tmp_path}/ran"
    system = Asks(os.system, run)
    for content, named in (
        (system, "posix.system"),
        ([("a", system)], "posix.system"),
        ([("a", Asks(reductions.rebuild_tensor, torch.Tensor, system, ()))], "posix.system"),
        ({"flattened_tensor": tensor(), "metadata": [system]}, "posix.system"),
        ([("a", Asks(eval, "1"))], "builtins.eval"),
        ([("a", Asks(getattr, "torch", "load"))], "builtins.getattr"),
        ([("a", Asks(torch.storage._load_from_bytes, b""))], "torch.storage._load_from_bytes"),
        ([("a", torch.zeros(2))], "torch._utils._rebuild_tensor_v2"),
        (b"c__main__\nFlattenedTensorMetadata\ncos\nsystem\n.", "os.system"),
    ):
        assert refused(content).startswith(f"the payload names {named}, which this server does not load: send (name")
    assert not (tmp_path / "ran").exists()


def test_a_nested_pickle_is_read_as_carefully(tmp_path: Path) -> None:
    inner = pickle.dumps(Asks(os.system, f"touch {tmp_path}/ran"))
    sent = b"\x80\x04](\x8c\x01ac__main__\nLocalSerializedTensor\n)\x81}\x8c\x06values](C" + bytes([len(inner)]) + inner
    assert refused(sent + b"esb\x86e.").startswith("the payload names posix.system")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        (b"", "the pickle cannot be read"),
        (b"\x80\x04]", "the pickle"),
        (b"\x80\x04.", "the pickle cannot be read"),
        (b"h\x05.", "the pickle cannot be read: 5"),
        (b"\x82\x01.", "need no instruction EXT1"),
        (b"Pid\n.", "need no instruction PERSID"),
        (b"\x8e" + b"\xff" * 7 + b"\x7f" + b"x.", "the pickle cannot be read"),
        (b"Nr\xff\xff\xff\xff.", "NoneType instead of a list of"),
        (b"N" + b"\x85" * 1_000_000 + b".", "tuple instead of a list of"),
        (b"}N" + b"\x85" * 1_000_000 + b"Ns.", "a tuple stands where a str belongs"),
        (b"}N]s.", "a NoneType stands where a str belongs"),
        (b"](NNN", "the pickle cannot be read"),
        (b"N)R.", "a NoneType stands where a Name belongs"),
        (b"ctorch\nTensor\nNR.", "a NoneType stands where a tuple belongs"),
        (b"ctorch\nTensor\n}b.", "a Name stands where a Call belongs"),
        (b"(" * 100 + b"t" * 101 + b".", "the pickle cannot be read"),
    ],
)
def test_a_malformed_pickle_is_refused(sent: bytes, message: str) -> None:
    assert message in refused(sent)


def test_the_work_for_a_pickle_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inert_pickle, "MAX_INSTRUCTIONS", 1000)
    assert "more than 1000 instructions" in refused(b"N" * 1001 + b".")


@pytest.mark.parametrize("sent", [["gASV"], ["gAS"], ["???"], ["gA==="], ["é"], [""], [], ["", ""]])
def test_text_that_is_no_payload_is_refused(sent: list[str]) -> None:
    with pytest.raises(ValueError, match=r"pickle|base64|tp_size 1"):
        read_tensors(sent, None, max_bytes=1, device=torch.device("cpu"))


HUGE = 2**62


@pytest.mark.parametrize(
    ("handle", "message"),
    [
        (tensor(shape=(HUGE, HUGE), stride=(1, 1)), "leaves its memory of 8 bytes"),
        (tensor(shape=(2,), stride=(HUGE,)), "leaves its memory of 8 bytes"),
        (tensor(offset=HUGE), "leaves its memory of 8 bytes"),
        (tensor(shape=(3,)), "leaves its memory of 8 bytes"),
        (tensor(shape=(HUGE,), stride=(0,)), "bytes are sent, but this model takes at most"),
        (tensor(shape=(HUGE, 0), stride=(HUGE, HUGE), size=0), ""),
        (tensor(shape=(2, 1)), "have different lengths"),
        (tensor(shape=(-2,)), "the size of tensor a is not a count"),
        (tensor(stride=(-1,), offset=1), "the size of tensor a is not a count"),
        (tensor(offset=-1), "the offset of tensor a is not a count"),
        (tensor(size=2**70), "the size of tensor a is not a count"),
        (tensor(size=True), "the size of tensor a is not a count"),
        (tensor(shape=(1,) * 65, stride=(1,) * 65), "is not a tuple of at most 64 sizes"),
        (tensor(shape=[2]), "is not a tuple of at most 64 sizes"),
        (tensor(segment="x"), "str instead of the name of a segment"),
        (tensor(), "/torch_1_2_3 cannot be opened (No such file or directory): keep the tensors until"),
        (tensor(size=HUGE), "/torch_1_2_3 cannot be opened (No such file or directory)"),
        (on_device(), "this server computes on the CPU: send CPU tensors"),
        (on_device(counter=10_000), "counter 10000 is not below 10000"),
        (on_device(counter=-1), "the counter of tensor a is not a count"),
        (on_device(counters=b"/etc/passwd"), "is not the name of a shared-memory segment"),
        (on_device(handle=bytes(64)), "its handle of device memory is not one that torch"),
        (on_device(handle=b"\x02e" + bytes(64)), "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"),
        (on_device(start=2), "is not aligned for torch.float32"),
        (on_device(start=-4), "the storage offset of tensor a is not a count"),
        (Asks(reductions.rebuild_tensor, torch.Tensor), "its handle does not have the 3 values"),
        (Asks(reductions.rebuild_tensor, 1, 2, 3), "int instead of the handle of a storage"),
        (Asks(torch.Size, (1,)), "torch.Size instead of the handle of a tensor"),
        (7, "int instead of the handle of tensor a"),
    ],
)
def test_a_handle_with_impossible_values_is_refused(segments: Path, handle: Any, message: str) -> None:
    if message:
        assert message in refused([("a", handle)])
    else:
        assert read([("a", handle)])["a"].shape == (HUGE, 0)


@pytest.mark.parametrize(
    "name",
    [b"/etc/passwd", b"/torch_1_2_3/../../etc/passwd", b"../torch_1_2_3", b"torch_1_2_3", b"/torch_1_2_3\n", b""],
)
def test_only_names_of_torchs_segments_are_opened(segments: Path, name: bytes) -> None:
    assert "is not the name of a shared-memory segment of torch" in refused([("a", tensor(name))])


def test_only_plain_files_of_this_user_and_of_enough_bytes_are_mapped(
    segments: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path_factory.mktemp("other") / "file"
    other.write_bytes(bytes(72))
    place = segments / "torch_1_2_3"
    place.symlink_to(other)
    assert "cannot be opened (Too many levels of symbolic links)" in refused([("a", tensor())])
    place.unlink()
    os.mkfifo(place)  # opening it for reading would wait for a writer
    assert "does not belong to the user of this server" in refused([("a", tensor())])
    place.unlink()
    place.mkdir()
    assert "does not belong to the user of this server" in refused([("a", tensor())])
    place.rmdir()
    place.write_bytes(bytes(71))
    assert "is shorter than the 8 bytes that its handle says" in refused([("a", tensor())])
    place.write_bytes(bytes(72))
    monkeypatch.setattr(os, "geteuid", lambda: place.stat().st_uid + 1)
    assert "does not belong to the user of this server" in refused([("a", tensor())])


@pytest.fixture(scope="module")
def sender() -> Iterator[Sender]:
    sender = Sender()
    yield sender
    sender.close()


SHAPES = {"a": [2, 3], "b": [4]}


@pytest.mark.integration
def test_no_socket_that_a_payload_names_is_connected_to(sender: Sender, tmp_path: Path) -> None:
    payload = base64.b64decode(sender.serialize("pairs", SHAPES))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "sock"))
        listener.listen()
        listener.setblocking(False)
        segment = sender.segments()[0]
        size = Path(f"/dev/shm/{segment}").stat().st_size - 64
        shape = (size // 4,)
        content = [("a", tensor(f"/{segment}".encode(), size, shape=shape, manager=str(tmp_path / "sock").encode()))]
        assert read(content)["a"].shape == shape
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert payload


@pytest.mark.integration
@pytest.mark.parametrize("form", ["pairs", "bucket"])
def test_damaged_payloads_raise_nothing_but_a_refusal(sender: Sender, form: str) -> None:
    payload = base64.b64decode(sender.serialize(form, SHAPES))
    load_format = "flattened_bucket" if form == "bucket" else None
    draw = random.Random(0)
    for end in range(len(payload)):
        refused(payload[:end], load_format)
    for _ in range(3000):
        damaged = bytearray(payload)
        for _ in range(draw.randint(1, 3)):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        try:
            read(bytes(damaged), load_format)
        except ValueError as error:
            assert len(str(error)) < 600
    refused([("a", tensor()), ("a", tensor())])
