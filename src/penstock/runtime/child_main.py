"""The main program of a `ChildProcess`."""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
from importlib import import_module
from typing import Protocol

from penstock.runtime import frames
from penstock.runtime.frames import Frames


class Answerer(Protocol):
    """The object in the child that answers requests."""

    def answer(self, request: Frames) -> Frames:
        """Carry out a request and return the answer. An error of the request is returned as an answer too."""


def main() -> None:
    pipe, (module, _, name) = socket.socket(fileno=int(sys.argv[1])), sys.argv[2].partition(":")
    pipe.set_inheritable(False)  # otherwise programs started by the answerer would keep the pipe open
    sys.stdout = sys.stderr
    requests: queue.Queue[Frames] = queue.Queue()
    threading.Thread(target=_read, args=(pipe, requests), daemon=True).start()
    answerer: Answerer = getattr(import_module(module), name)()
    while True:
        frames.send(pipe, answerer.answer(requests.get()))


def _read(pipe: socket.socket, requests: queue.Queue[Frames]) -> None:
    """Queue requests until the pipe closes. Then the parent is gone, and this process exits."""
    try:
        while True:
            requests.put(frames.receive(pipe))
    except (EOFError, OSError):
        os._exit(0)


if __name__ == "__main__":
    main()
