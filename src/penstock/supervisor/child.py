"""The child's side of supervision: the first thing every process of a run imports (standard library only).

`Child.from_environment()` arms the death pipe before anything slow is imported, asyncio included. The pipe's write end
lives in the supervisor alone, so end-of-file means that the supervisor is gone, and then this process ends its whole
group. Whatever else goes wrong here is left behind as an error file with a timestamp, from which the supervisor tells
cause from effect. SIGUSR1 makes it write the stacks of all its threads into its log.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import asyncio

FAILED = 1
CONFIG_ERROR = 2
GAVE_UP = 3
"""Of a run that cannot go on, whoever tries."""
HEARTBEAT_S = "PENSTOCK_HEARTBEAT_S"
"""Environment variable: seconds between two heartbeats."""
ADDRESS = "PENSTOCK_ADDRESS"
"""Environment variable of a run on several machines: where this one is reached by the others."""
HOST = "PENSTOCK_HOST"
"""Environment variable of a run on several machines: the name of whoever started this process here."""
BEAT_BYTES = 256
"""A heartbeat is written over the one before, a predecessor's too: that takes no space, so a full disk does not silence
a process."""
JANITOR_FIRST_S = 1.0
"""The janitor kills a family as a whole as long as it is one: a parent that went first would leave orphans nobody can
tell from strangers. So the death pipe is only the second insurance."""


class Child:
    """Who this process is within its run, and how it talks to the supervisor. Made once, by `from_environment`."""

    def __init__(
        self,
        *,
        name: str,
        run_dir: Path,
        runtime_dir: Path,
        run_id: str,
        nonce: str,
        address: str | None = None,
        host: str = "",
    ) -> None:
        """`address` and `host`: of a run on several machines; see `ADDRESS` and `HOST`."""
        self.name = name
        self.run_dir = run_dir
        self.runtime_dir = runtime_dir
        self.run_id = run_id
        self.nonce = nonce
        self.address, self.host = address, host
        self._reported = False
        self._progress, self._doing = 0, ""

    @classmethod
    def from_environment(cls, argv: Sequence[str] | None = None) -> Child:
        """Read `--run-dir`, `--name` and the environment; from here on the child outlives its supervisor no more."""
        words = list(sys.argv[1:] if argv is None else argv)
        options = dict(zip(words[::2], words[1::2], strict=False))
        if "--run-dir" not in options or "--name" not in options or "PENSTOCK_NONCE" not in os.environ:
            sys.exit("this process belongs to a run: start it with `penstock train`")
        if fd := os.environ.pop("PENSTOCK_DEATH_FD", None):
            _arm(int(fd))
        child = cls(
            name=options["--name"],
            run_dir=Path(options["--run-dir"]),
            runtime_dir=Path(os.environ["PENSTOCK_RUNTIME_DIR"]),
            run_id=os.environ["PENSTOCK_RUN_ID"],
            nonce=os.environ["PENSTOCK_NONCE"],
            address=os.environ.get(ADDRESS),
            host=os.environ.get(HOST, ""),
        )
        sys.excepthook = child._uncaught
        faulthandler.register(signal.SIGUSR1)
        return child

    def report_ready(self, url: str | None = None) -> None:
        """Tell the supervisor that this process serves, and where."""
        record = {"nonce": self.nonce, "pid": os.getpid()}
        self._publish("ready", record if url is None else record | {"url": url})

    def pulse(self, progress: int, doing: str) -> None:
        """How far this process is, in whatever it counts, and what it is doing; empty if it has nothing to do. Goes out
        with the next heartbeat: who does something for long and gets no further is taken for hung."""
        self._progress, self._doing = progress, doing

    def stop_event(self) -> asyncio.Event:
        """An event that SIGTERM or SIGINT sets; call it inside the running loop."""
        import asyncio

        stop, loop = asyncio.Event(), asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, stop.set)
        return stop

    def leave(self) -> NoReturn:
        """End at once, whatever other threads are doing: for who has nothing to lose."""
        os._exit(0)

    def fail(self, message: str, code: int = FAILED) -> NoReturn:
        """End with an error people can act upon: no traceback, one message."""
        self._report(message)
        with suppress(OSError):  # the disk with the log may be full: then the supervisor still knows why
            print(f"error: {message}", file=sys.stderr, flush=True)
        sys.exit(code)

    def run(self, main: Callable[[], object]) -> NoReturn:
        """Run `main` (plain or async) to the end of the process; every error is recorded before the exit."""
        try:
            result = main()
            if isinstance(result, Coroutine):
                import uvloop

                uvloop.run(self._living(result))
        except Exception as error:
            cause = leaf(error)
            if getattr(cause, "self_explanatory", False):
                self.fail(" ".join(str(cause).split()), _code_of(cause))
            self._uncaught(type(error), error, error.__traceback__)
            sys.exit(FAILED)
        sys.exit(0)

    async def _living(self, work: Coroutine[Any, Any, object]) -> None:
        """`work`, and heartbeats as long as the event loop turns, if anybody wants them."""
        import asyncio

        if HEARTBEAT_S not in os.environ:
            await work
            return
        beating = asyncio.create_task(self._beat(float(os.environ[HEARTBEAT_S])))
        try:
            await work
        finally:
            beating.cancel()

    async def _beat(self, period_s: float) -> None:
        import asyncio

        directory = self.runtime_dir / "heartbeats"
        directory.mkdir(exist_ok=True)
        file = os.open(directory / f"{self.name}.json", os.O_WRONLY | os.O_CREAT, 0o600)
        while True:
            beat = {"pid": os.getpid(), "time": time.monotonic(), "progress": self._progress, "doing": self._doing}
            with suppress(OSError):  # the first one needs room
                os.pwrite(file, json.dumps(beat).encode().ljust(BEAT_BYTES), 0)
            await asyncio.sleep(period_s)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        import traceback

        if not issubclass(kind, KeyboardInterrupt):
            self._report(describe(error))
        with suppress(OSError):
            traceback.print_exception(kind, error, trace)

    def _report(self, message: str) -> None:
        if not self._reported:
            self._reported = True
            with suppress(OSError):
                self._publish("errors", {"time": time.time(), "pid": os.getpid(), "message": message})

    def _publish(self, folder: str, record: dict[str, object]) -> None:
        directory = self.runtime_dir / folder
        directory.mkdir(exist_ok=True)
        temporary = directory / f".{self.name}.tmp"
        temporary.write_text(json.dumps(record))
        temporary.replace(directory / f"{self.name}.json")


def leaf(error: BaseException) -> BaseException:
    """The exception itself; of a group, its first leaf."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe(error: BaseException) -> str:
    """One line for an exception."""
    error = leaf(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _code_of(error: BaseException) -> int:
    """Of the process that ends with it. Whoever raised a ConfigError has imported it; nobody else should have to."""
    module = sys.modules.get("penstock.config.errors")
    if module is not None and isinstance(error, module.ConfigError):
        return CONFIG_ERROR
    return GAVE_UP if getattr(error, "hopeless", False) else FAILED


def _arm(fd: int) -> None:
    os.set_inheritable(fd, False)
    threading.Thread(target=_end_with_supervisor, args=(fd,), name="death-pipe", daemon=True).start()


def _end_with_supervisor(fd: int) -> None:
    while os.read(fd, 1):
        pass
    os.close(fd)
    time.sleep(JANITOR_FIRST_S)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
