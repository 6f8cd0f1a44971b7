"""A machine that receives weights: a process that reads handles from its input, and answers how each one came."""

from __future__ import annotations

import subprocess
import sys
from hashlib import sha256
from pathlib import Path
from types import TracebackType

import msgspec
import torch

from penstock.types import WeightsHandle
from penstock.weights import broadcast
from penstock.weights import receiver as receiver_module
from penstock.weights.receiver import Receiver

BUCKET_BYTES = 50_000
"""So that even little comes in several buckets."""


class Told(msgspec.Struct, kw_only=True):
    handle: WeightsHandle
    join_s: float


class Received(msgspec.Struct, kw_only=True):
    transport: str
    digest: str = ""
    """Of all values, in the order of their names."""


def digest(named: dict[str, torch.Tensor]) -> str:
    return sha256(b"".join(named[name].contiguous().numpy().tobytes() for name in sorted(named))).hexdigest()


class Machine:
    """The process, as a test sees it."""

    def __init__(self, name: str, directory: Path, shapes: dict[str, list[int]]) -> None:
        words = [sys.executable, __file__, name, str(directory / name), msgspec.json.encode(shapes).decode()]
        self._process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def tell(self, handle: WeightsHandle, *, join_s: float = 20.0) -> None:
        """`join_s`: how long the machine waits for the other machines of a broadcast."""
        assert self._process.stdin is not None
        self._process.stdin.write(msgspec.json.encode(Told(handle=handle, join_s=join_s)) + b"\n")
        self._process.stdin.flush()

    def received(self) -> Received:
        assert self._process.stdout is not None
        return msgspec.json.decode(self._process.stdout.readline(), type=Received)


def main() -> None:
    name, directory, shapes = sys.argv[1:]
    broadcast.BUCKET_BYTES = BUCKET_BYTES
    receiver_module.FILES = Path(f"{directory}.files")
    receiver_module.FILES.symlink_to(name)  # so that it sees other files than the other machines
    named = msgspec.json.decode(shapes, type=dict[str, list[int]])
    expected = {each: (tuple(shape), torch.float32) for each, shape in named.items()}
    receiver = Receiver(expected, machine=name, directory=Path(directory))
    for line in sys.stdin.buffer:
        try:
            told = msgspec.json.decode(line, type=Told)
            broadcast.JOIN_S = told.join_s
            received = receiver(told.handle)
            answer = Received(transport=receiver.transport, digest=digest(received))
        except Exception as error:
            answer = Received(transport=f"{type(error).__name__}: {error}")
        sys.stdout.buffer.write(msgspec.json.encode(answer) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
