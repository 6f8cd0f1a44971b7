"""A trainer's process that serializes weights as SGLang's trainers do: `multiprocessing`'s pickler with torch's
reductions, over (name, tensor) pairs, values for each rank, or a flattened bucket."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing


@dataclasses.dataclass
class FlattenedTensorMetadata:
    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


@dataclasses.dataclass
class LocalSerializedTensor:
    values: list[bytes]


def pickled(value: object) -> bytes:
    buffer = io.BytesIO()
    ForkingPickler(buffer).dump(value)
    return buffer.getvalue()


def serialized(value: object) -> str:
    return base64.b64encode(pickled(value)).decode()


def bucket(named: dict[str, torch.Tensor], *, as_bytes: bool = True) -> dict[str, object]:
    entries, start = [], 0
    flat = [tensor.flatten().view(torch.uint8) if as_bytes else tensor.flatten() for tensor in named.values()]
    for (name, tensor), part in zip(named.items(), flat, strict=True):
        end = start + part.numel()
        entries.append(FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, end, part.numel()))
        start = end
    return {"flattened_tensor": torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8), "metadata": entries}


def numbers(
    shapes: dict[str, list[int]], value: float, dtype: str = "float32", device: str = "cpu"
) -> dict[str, torch.Tensor]:
    return {
        name: torch.arange(torch.Size(shape).numel(), device=device)
        .reshape(shape)
        .remainder(7)
        .add(value)
        .to(getattr(torch, dtype))
        for name, shape in shapes.items()
    }


def content(form: str, named: dict[str, torch.Tensor]) -> object:
    match form:
        case "pairs":
            return list(named.items())
        case "parameters":
            return [(name, torch.nn.Parameter(tensor)) for name, tensor in named.items()]
        case "views":  # several tensors in one memory, one of them not contiguous
            whole = torch.zeros(4, 6)
            return [("rows", whole[1:3]), ("columns", whole.t()), ("empty", whole[:0])]
        case "ranks":
            pairs = [(name, LocalSerializedTensor([pickled(tensor), b"of rank 1"])) for name, tensor in named.items()]
            return pairs
        case "bucket":
            return bucket(named)
        case "bucket of one dtype":
            return bucket(named, as_bytes=False)
    raise ValueError(form)


class Sender:
    """The end of the test that speaks with a sender's process."""

    def __init__(self, strategy: str = "file_system") -> None:
        command = [sys.executable, str(Path(__file__)), strategy]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
        )
        self._before = self._named()

    def serialize(
        self,
        form: str,
        shapes: dict[str, list[int]],
        value: float = 0.0,
        dtype: str = "float32",
        *,
        device: str = "cpu",
    ) -> str:
        """Return the payload of such numbers. The process keeps them until the next call."""
        request = {"form": form, "shapes": shapes, "value": value, "dtype": dtype, "device": device}
        return str(self._asked(request))

    def drop(self) -> None:
        """Let the process free its tensors."""
        self._asked({})

    def segments(self) -> list[str]:
        """Return the shared-memory segments of the process."""
        return sorted(self._named() - self._before)

    def _named(self) -> set[str]:
        """Those that are named for its pid. An earlier process with the same pid may have left some."""
        return {path.name for path in Path("/dev/shm").glob(f"torch_{self.process.pid}_*")}

    def _asked(self, request: dict[str, Any]) -> object:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
        self.process.stdout.close()
        for name in self.segments():  # of payloads that were refused: torch waits for a reader
            Path("/dev/shm", name).unlink()


def main() -> None:
    torch.multiprocessing.set_sharing_strategy(sys.argv[1])
    kept: object = None
    for line in sys.stdin:
        request = json.loads(line)
        kept = None
        if not request:
            print("null", flush=True)
            continue
        kept = content(request.pop("form"), numbers(**request))
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        print(json.dumps(serialized(kept)), flush=True)
    del kept


if __name__ == "__main__":
    main()
