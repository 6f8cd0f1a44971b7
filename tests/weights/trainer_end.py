"""A trainer's end of a group as a process of its own, that does what the lines of its input say; for tests."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parent.parent))

from free_port import free_port

from penstock.weights.collective import Group, GroupFailed, GroupTensors, Rendezvous


def numbers(shapes: dict[str, list[int]], value: float) -> dict[str, torch.Tensor]:
    """Tensors that both ends can make: each counts up from `value`."""
    return {
        name: value + torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
        for name, shape in shapes.items()
    }


class Broadcast:
    """A trainer's end."""

    def __init__(self, place: Rendezvous, *, join_timeout_s: float = 60.0, transfer_timeout_s: float = 60.0) -> None:
        """Blocks until every server has joined, so the servers are told at the same time."""
        self._group = Group(place, 0, join_timeout_s=join_timeout_s, transfer_timeout_s=transfer_timeout_s)

    def send(self, named: Mapping[str, Tensor]) -> None:
        """One bucket, as `announce` describes it. Raises `GroupFailed`."""
        self._group.broadcast([flatten(list(named.values()))], f"{len(named)} tensors to be taken")

    def close(self) -> None:
        """Leave the group."""
        self._group.close()


def announce(named: Mapping[str, Tensor], group: str) -> GroupTensors:
    """What a server must be told of `named`, in their order."""
    return GroupTensors(
        group_name=group,
        names=list(named),
        dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in named.values()],
        shapes=[list(tensor.shape) for tensor in named.values()],
        load_format="flattened_bucket",
    )


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Their bytes, end to end."""
    return torch.cat([tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors])


def buckets(named: Mapping[str, Tensor], num_bytes: int) -> Iterator[dict[str, Tensor]]:
    """`named` in pieces of at most `num_bytes`, but for a single tensor that is larger."""
    bucket: dict[str, Tensor] = {}
    size = 0
    for name, tensor in named.items():
        if bucket and size + tensor.nbytes > num_bytes:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor
        size += tensor.nbytes
    if bucket:
        yield bucket


def main() -> None:
    broadcast: Broadcast | None = None
    for line in sys.stdin:
        told = json.loads(line)
        try:
            match told.pop("do"):
                case "join":
                    limits = {"join_timeout_s": told.pop("join_timeout_s"), "transfer_timeout_s": told.pop("timeout_s")}
                    broadcast = Broadcast(Rendezvous(**told), **limits)
                case "send":
                    assert broadcast is not None
                    broadcast.send(numbers(told["shapes"], told["value"]))
                case "close":
                    assert broadcast is not None
                    broadcast.close()
        except GroupFailed as error:
            print(json.dumps({"error": str(error)}), flush=True)
        else:
            print(json.dumps({"error": None}), flush=True)


class TrainerProcess:
    """Starts one and talks to it. Calls wait for its answer."""

    def __init__(self) -> None:
        self.port = free_port()
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def place(self, **more: Any) -> dict[str, Any]:
        return {
            "group_name": "g",
            "master_address": "127.0.0.1",
            "master_port": self.port,
            "world_size": 2,
            "backend": "gloo",
            **more,
        }

    def call(self, do: str, **told: Any) -> str | None:
        """The error, if there was one."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps({"do": do, **told}) + "\n")
        self._process.stdin.flush()
        error: str | None = json.loads(self._process.stdout.readline())["error"]
        return error

    async def asked(self, do: str, **told: Any) -> str | None:
        return await asyncio.to_thread(self.call, do, **told)

    async def join(self, *, timeout_s: float = 60.0, **more: Any) -> str | None:
        return await self.asked("join", join_timeout_s=60.0, timeout_s=timeout_s, **self.place(**more))

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


if __name__ == "__main__":
    main()
