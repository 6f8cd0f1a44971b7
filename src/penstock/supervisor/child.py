"""The child's side of supervision. Every process of a run imports this module first (standard library only).

`Child.from_environment()` arms the death pipe before the process imports anything slow. Only the
supervisor holds the pipe's write end, so end-of-file means that the supervisor is gone. Then this process kills its
whole process group. Any other error is written to an error file with a timestamp. The supervisor compares these times
to find the cause of a failure. On SIGUSR1 the process writes the stacks of all its threads to its log, its stderr.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import hashlib
import hmac
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, NoReturn

from penstock.observe import jsonl, log_lines
from penstock.ports.process_launcher import Device

logger = logging.getLogger(__name__)

FAILED = 1
CONFIG_ERROR = 2
GAVE_UP = 3
"""Exit code of a process that found that no restart can save the run."""
HEARTBEAT_S = "PENSTOCK_HEARTBEAT_S"
"""Environment variable: seconds between two heartbeats; 1 by default."""
ADDRESS = "PENSTOCK_ADDRESS"
"""Environment variable, set in runs on several machines: the address at which other machines reach this machine."""
HOST = "PENSTOCK_HOST"
"""Environment variable, set in runs on several machines: the URL of this machine's file service."""
PORT = "PENSTOCK_PORT"
"""Environment variable: the port at which the process serves, which its launcher keeps for it."""
BEAT_BYTES = 256
"""Size of a heartbeat. Each heartbeat overwrites the one before, also that of an earlier process of the same name. This
takes no new space, so a full disk does not stop the heartbeats."""
JANITOR_FIRST_S = 1.0
"""Pause between end-of-file on the death pipe and the end of this process. In this time the janitor kills the whole
process tree. If a parent ended first, the janitor could not recognize its orphans. So the death pipe is only a second
safeguard."""


@dataclass(eq=False, kw_only=True)
class Child:
    """The identity of this process within its run, and its reports to the supervisor. `from_environment` makes it,
    once per process."""

    name: str
    run_dir: Path
    runtime_dir: Path
    run_id: str
    nonce: str
    address: str | None = None
    """See `ADDRESS`."""
    host: str = ""
    """See `HOST`."""
    port: int = 0
    """See `PORT`; 0 lets the system choose."""
    totals: Mapping[str, float] = field(default_factory=dict)
    """Totals over the life of this process, for its last log line."""
    _reported: bool = False
    _progress: int = 0
    _doing: str = ""
    _begun_at: float = field(default_factory=time.monotonic)
    _end_reason: str = "its work is done"

    @classmethod
    def from_environment(cls, argv: Sequence[str] | None = None) -> Child:
        """Read `--run-dir`, `--name` and the environment. From here on this process ends when its supervisor ends."""
        words = list(sys.argv[1:] if argv is None else argv)
        options = dict(zip(words[::2], words[1::2], strict=False))
        if "--run-dir" not in options or "--name" not in options or "PENSTOCK_NONCE" not in os.environ:
            sys.exit("this process belongs to a run: start it with `penstock train`")
        if fd := os.environ.pop("PENSTOCK_DEATH_FD", None):
            os.set_inheritable(int(fd), False)
            threading.Thread(target=_end_with_supervisor, args=(int(fd),), name="death-pipe", daemon=True).start()
        child = cls(
            name=options["--name"],
            run_dir=Path(options["--run-dir"]),
            runtime_dir=Path(os.environ["PENSTOCK_RUNTIME_DIR"]),
            run_id=os.environ["PENSTOCK_RUN_ID"],
            nonce=os.environ["PENSTOCK_NONCE"],
            address=os.environ.get(ADDRESS),
            host=os.environ.get(HOST, ""),
            port=int(os.environ.get(PORT, 0)),
        )
        sys.excepthook = child._uncaught
        log_lines.log_to_stderr(child.name)
        faulthandler.register(signal.SIGUSR1)
        return child

    def secret(self, purpose: Literal["claim", "greeting", "identity"]) -> str:
        """Return the run's own value for one purpose. It is derived from the nonce, and reveals neither the nonce nor
        the value for another purpose. Tokens of files are derived from paths, which begin with a slash."""
        return hmac.new(self.nonce.encode(), purpose.encode(), hashlib.sha256).hexdigest()

    def log_start(self, **settings: object) -> None:
        """Log that this process starts, with versions and the settings that matter to it."""
        shown = f": {log_lines.pairs(settings)}" if settings else ""
        logger.info("starts (%s; pid %d)%s", log_lines.versions(), os.getpid(), shown)

    def report_ready(self, url: str | None = None, *, devices: Sequence[Device] | None = ()) -> None:
        """Tell the supervisor that this process is ready, the `url` at which it serves, if any, and its accelerators.
        `devices`: None if they are not known."""
        logger.info("is ready%s", "" if url is None else f" at {url}")
        record: dict[str, object] = {"nonce": self.nonce, "pid": os.getpid()}
        if devices is not None:
            record["devices"] = [asdict(each) for each in devices]
        self._publish("ready", record if url is None else record | {"url": url})

    def pulse(self, progress: int, doing: str) -> None:
        """Set the progress count (in any unit) and the current activity (empty while idle) for the next heartbeat. The
        supervisor takes a process for hung if it is busy for long and neither value changes."""
        self._progress, self._doing = progress, doing

    def stop_event(self) -> asyncio.Event:
        """Return an event that SIGTERM or SIGINT sets. Call this inside the running event loop."""
        stop, loop = asyncio.Event(), asyncio.get_running_loop()

        def request_stop(name: str) -> None:
            self._end_reason = f"it received {name}"
            stop.set()

        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, request_stop, signum.name)
        return stop

    def leave(self) -> NoReturn:
        """End the process at once, without waiting for other threads. For processes that have nothing to save."""
        os._exit(0)

    def fail(self, message: str, code: int = FAILED) -> NoReturn:
        """End the process with one message that a user can act upon, without a traceback."""
        self._report(message)
        logger.error("ends: %s", message)
        sys.exit(code)

    def run(self, main: Callable[[], object]) -> NoReturn:
        """Run `main` (plain or async), then end the process. Record every error before the exit."""
        try:
            result = main()
            if isinstance(result, Coroutine):
                import uvloop

                uvloop.run(self._living(result))
        except Exception as error:
            cause = leaf(error)
            if getattr(cause, "self_explanatory", False):
                code = GAVE_UP if getattr(cause, "hopeless", False) else FAILED
                self.fail(" ".join(str(cause).split()), getattr(cause, "exit_code", code))
            self._uncaught(type(error), error, error.__traceback__)
            sys.exit(FAILED)
        times = {"lived_s": time.monotonic() - self._begun_at, "cpu_s": time.process_time()}
        logger.info("ends because %s: %s", self._end_reason, log_lines.pairs({**times, **self.totals}))
        gc.freeze()  # the end of the interpreter would look for garbage several times
        sys.exit(0)

    async def _living(self, work: Coroutine[Any, Any, object]) -> None:
        """Run `work`. Meanwhile write heartbeats from the event loop."""
        beating = asyncio.create_task(self._beat(float(os.environ.get(HEARTBEAT_S, 1.0))))
        try:
            await work
        finally:
            beating.cancel()

    async def _beat(self, period_s: float) -> None:
        directory = self.runtime_dir / "heartbeats"
        directory.mkdir(exist_ok=True)
        file = os.open(directory / f"{self.name}.json", os.O_WRONLY | os.O_CREAT, 0o600)
        while True:
            beat = {"pid": os.getpid(), "time": time.monotonic(), "progress": self._progress, "doing": self._doing}
            with suppress(OSError):  # the first heartbeat needs disk space
                os.pwrite(file, jsonl.dumps(beat).encode().ljust(BEAT_BYTES), 0)
            await asyncio.sleep(period_s)

    def _uncaught(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, KeyboardInterrupt):
            self._report(describe(error))
        logger.error("ends: %s", describe(error), exc_info=(kind, error, trace))

    def _report(self, message: str) -> None:
        if not self._reported:
            self._reported = True
            with suppress(OSError):
                self._publish("errors", {"time": time.time(), "pid": os.getpid(), "message": message})

    def _publish(self, folder: str, record: dict[str, object]) -> None:
        directory = self.runtime_dir / folder
        directory.mkdir(exist_ok=True)
        jsonl.write_json(directory / f"{self.name}.json", record)


def leaf(error: BaseException) -> BaseException:
    """Return the exception itself, or the first leaf of an exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def describe(error: BaseException) -> str:
    """Return one line of text for an exception."""
    error = leaf(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _end_with_supervisor(fd: int) -> None:
    while os.read(fd, 1):
        pass
    os.close(fd)
    time.sleep(JANITOR_FIRST_S)
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)
