"""The trackers of a run: TensorBoard, Weights & Biases, Trackio, MLflow, SwanLab.

Each has a thread here and a process with its library (`tracker_process.py`). The thread looks at the files of the run
once per `LOOK_EVERY_S` and asks the process to read on. No other part of the run waits for a tracker, except the end
of the run for at most `END_S`. A tracker that raises, dies or hangs is reported once, and tried again later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from penstock.observe.tracker_libraries import Tracking
from penstock.observe.tracker_process import Advance, Finish, Open, Reply, Request, TrackerAnswerer
from penstock.runtime import frames
from penstock.runtime.child_process import ChildProcess

logger = logging.getLogger(__name__)

ANSWERER = f"{TrackerAnswerer.__module__}:{TrackerAnswerer.__name__}"
LOOK_EVERY_S = 1.0
"""Seconds between two looks for new points."""
ANSWER_S = 60.0
"""Time limit for a library to open a run, to take some points, or to close the run."""
END_S = 30.0
"""Time limit for all trackers to take the last points and to close the run, at the end of the controller."""
KILLED_S = 1.0
"""Time for the thread of a killed process to notice."""
RETRY_S = 30.0
"""Pause before a failed tracker is tried again. It doubles with each failure in a row, up to `MAX_RETRY_S`."""
MAX_RETRY_S = 600.0


class TrackerFailed(Exception):
    """The library raised, or its process died or did not answer in time."""


class Trackers:
    """The trackers of a run, from the start of the controller to its end."""

    def __init__(
        self,
        names: Sequence[str],
        run_dir: Path,
        *,
        identity: Mapping[str, str],
        uploads: bool,
        axis: str,
        config: Mapping[str, Any],
    ) -> None:
        """`identity`: project, name and id of the tracker runs, as state.json has them. `axis`: the key of a point's x
        in metrics.jsonl. `config`: the settings of the run without secrets."""

        def request(name: str) -> Open:
            place = {"run_dir": str(run_dir), **identity}
            return Open(tracking=Tracking(tracker=name, uploads=uploads, config=config, **place), axis=axis)

        self._feeders = [_Feeder(request(name)) for name in dict.fromkeys(names)]

    def close(self) -> None:
        """Give the trackers the last points and close their runs. Returns after at most `END_S`, and a moment more if a
        process must be killed."""
        limit = time.monotonic() + END_S
        for feeder in self._feeders:
            feeder.end()
        for feeder in self._feeders:
            feeder.join(max(0.0, limit - time.monotonic()))


class _Feeder:
    """The thread of one tracker."""

    def __init__(self, request: Open) -> None:
        self._request, self._name = request, request.tracking.tracker
        self._ended = threading.Event()
        self._child: ChildProcess | None = None
        self._lock = threading.Lock()
        self._gave_up = False
        self._thread = threading.Thread(target=self._run, name=f"tracker-{self._name}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Let the thread end after the last points."""
        self._ended.set()

    def join(self, limit_s: float) -> None:
        """Wait for the thread; after `limit_s`, kill the process of the library."""
        self._thread.join(limit_s)
        if self._thread.is_alive():
            with self._lock:
                self._gave_up = True
                if self._child is not None:
                    self._child.kill()
            logger.warning("%s did not take the last points in time: metrics.jsonl has them", self._name)
            self._thread.join(KILLED_S)

    def _run(self) -> None:
        num_failed = 0
        while not self._gave_up:
            try:
                self._feed(num_failed > 0)
                return
            except TrackerFailed as failure:
                pause_s = min(RETRY_S * 2**num_failed, MAX_RETRY_S)
                if not num_failed and not self._gave_up:
                    logger.warning(
                        "observe.trackers %s: %s. The run goes on, metrics.jsonl has all points, and the tracker is "
                        "tried again from time to time: check its server, keys and disk",
                        self._name,
                        failure,
                    )
                num_failed += 1
            if self._ended.wait(pause_s):
                return

    def _feed(self, is_again: bool) -> None:
        """Give the tracker all points until the end of the run. Raises `TrackerFailed`."""
        try:
            self._start()
            self._ask(self._request)
            if is_again:
                logger.info("observe.trackers %s: works again", self._name)
            has_ended, seen = False, tuple[int, ...]()
            while not has_ended:
                has_ended = self._ended.wait(LOOK_EVERY_S)
                before, seen = seen, self._sizes()
                while (has_ended or seen != before) and self._ask(Advance()).is_behind:
                    pass
            self._ask(Finish())
        finally:
            self._stop()

    def _sizes(self) -> tuple[int, ...]:
        """Return the sizes of the files with points."""
        files = [Path(self._request.tracking.run_dir) / name for name in ("metrics.jsonl", "events.jsonl")]
        return tuple(file.stat().st_size if file.exists() else 0 for file in files)

    def _start(self) -> None:
        with self._lock:
            if self._gave_up:
                raise TrackerFailed("the run has ended")
            try:
                self._child = ChildProcess(ANSWERER)
            except OSError as error:
                raise TrackerFailed(f"its process cannot be started: {error}") from error
            self._child.pipe.settimeout(ANSWER_S)

    def _ask(self, request: Request) -> Reply:
        assert self._child is not None, "it was started"
        try:
            frames.send(self._child.pipe, [msgspec.msgpack.encode(request)])
            reply = msgspec.msgpack.decode(frames.receive(self._child.pipe)[0], type=Reply)
        except TimeoutError:
            raise TrackerFailed(f"its library has not answered for {ANSWER_S:.0f} s") from None
        except (EOFError, OSError):
            self._child.kill()
            raise TrackerFailed(f"its process ended ({self._child.wait()})") from None
        if reply.error:
            raise TrackerFailed(reply.error)
        return reply

    def _stop(self) -> None:
        with self._lock:
            child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            with suppress(OSError):
                child.pipe.close()
