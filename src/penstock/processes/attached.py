"""Environment workers that attached themselves to the run: nobody supervises them, so the controller keeps these books.
It does so of workers on other machines too: one may be cut off long before anybody knows that it is gone.

Such a worker says goodbye, or is silent for too long; in either case others play what it had. One that was only silent
is welcome again. While a run starts no workers of its own, it may have none for a while: that is said, not an error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock.config import Config
from penstock.config.imports import is_file
from penstock.observe.recorder import Recorder


class AttachedWorkers:
    """Who is there, and when each was heard last; `now` in seconds of any clock."""

    def __init__(self, config: Config, run_dir: Path, recorder: Recorder, *, now: Callable[[], float]) -> None:
        self._heard: dict[str, float] = {}
        self._departed: set[str] = set()
        self._recorder, self._now = recorder, now
        self._silent_s = config.supervisor.silent_s
        self._needed = config.env.workers == 0
        self._command = command(config, run_dir)

    def join(self, name: str) -> None:
        self._departed.discard(name)  # another process with the pid of one that left
        self._recorder.event("attached", name=name)
        self.watch(name)

    def watch(self, name: str) -> None:
        """From now on it is lost when it is silent."""
        self._heard[name] = self._now()

    def hear(self, name: str) -> None:
        """It said something."""
        if name in self._heard:
            self._heard[name] = self._now()

    def has_departed(self, name: str) -> bool:
        """It said goodbye: what still arrives from it means nothing."""
        return name in self._departed

    def depart(self, name: str) -> None:
        """It said goodbye."""
        self._departed.add(name)
        self._leave(name, "it said goodbye")

    def lose_silent(self) -> list[str]:
        """Those that are lost because they said nothing for too long."""
        lost = [name for name, heard in self._heard.items() if self._now() - heard > self._silent_s]
        for name in lost:
            self._leave(name, f"it said nothing for {self._silent_s:g} s")
        return lost

    def ask_for_some(self) -> None:
        """Tell people how to attach a worker, if the run cannot go on without."""
        if self._needed and not self._heard:
            self._recorder.event("no_workers", command=self._command)
            print(f"waiting for an environment worker to attach: {self._command}", flush=True)

    def _leave(self, name: str, reason: str) -> None:
        del self._heard[name]
        self._recorder.event("left", name=name, reason=reason)
        self.ask_for_some()


def command(config: Config, run_dir: Path) -> str:
    """What attaches an environment worker."""
    files = [file for name in config.environments.names if is_file(file := name.rpartition(":")[0])]
    return f"python {files[0] if files else 'YOUR_ENVIRONMENT.py'} serve --run {run_dir}"
