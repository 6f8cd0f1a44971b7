"""A trainer's end of a group as a process of its own, that does what the lines of its input say; for tests."""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from penstock.weights.collective import Broadcast, GroupFailed, GroupPlace


def numbers(shapes: dict[str, list[int]], value: float) -> dict[str, torch.Tensor]:
    """Tensors that both ends can make: each counts up from `value`."""
    return {
        name: value + torch.arange(torch.Size(shape).numel(), dtype=torch.float32).reshape(shape)
        for name, shape in shapes.items()
    }


def main() -> None:
    broadcast: Broadcast | None = None
    for line in sys.stdin:
        told = json.loads(line)
        try:
            match told.pop("do"):
                case "join":
                    limits = {"join_timeout_s": told.pop("join_timeout_s"), "transfer_timeout_s": told.pop("timeout_s")}
                    broadcast = Broadcast(GroupPlace(**told), **limits)
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
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__))], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def place(self, **more: Any) -> dict[str, Any]:
        return {"name": "g", "address": "127.0.0.1", "port": self.port, "world_size": 2, **more}

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
