"""The controller's list of attached environment workers, which the supervisor does not watch.

If there are several machines, the list also has the run's own workers: a network failure may cut one off long before
the supervisor notices.

Such a worker leaves when it says goodbye or is silent for too long. In both cases other workers run its groups again. A
worker that was only silent may join again. A run that starts no workers of its own may have none for a while: the
controller reports that, and it is not an error.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from penstock.config import Config
from penstock.config.imports import is_file
from penstock.observe.recorder import Recorder


class WorkerRegistry:
    """The workers that no supervisor watches, and the time of each one's last message. `now` returns seconds of any
    clock."""

    def __init__(self, config: Config, run_dir: Path, recorder: Recorder, *, now: Callable[[], float]) -> None:
        self._heard: dict[str, float] = {}
        self._left: set[str] = set()
        self._recorder, self._now = recorder, now
        self._silent_s = config.supervisor.silent_s
        self._needed = config.env.workers == 0
        self._command = command(config, run_dir)

    def attach(self, name: str) -> None:
        """Add an attached worker."""
        self._left.discard(name)  # a new process may have the pid, and so the name, of a worker that left
        self._recorder.event("attached", name=name)
        self.watch(name)

    def watch(self, name: str) -> None:
        """Watch this worker: from now on it counts as lost when it is silent for too long."""
        self._heard[name] = self._now()

    def hear(self, name: str) -> None:
        """Record that the worker sent a message."""
        if name in self._heard:
            self._heard[name] = self._now()

    def has_left(self, name: str) -> bool:
        """Return whether the worker said goodbye. The controller ignores its later messages."""
        return name in self._left

    def leave(self, name: str) -> None:
        """Remove a worker that said goodbye."""
        self._left.add(name)
        self._remove(name, "it said goodbye")

    def remove_silent(self) -> list[str]:
        """Remove the workers that were silent for too long, and return their names."""
        silent = [name for name, heard in self._heard.items() if self._now() - heard > self._silent_s]
        for name in silent:
            self._remove(name, f"it sent no message for {self._silent_s:g} s")
        return silent

    def ask_for_worker(self) -> None:
        """Print how to attach a worker, if the run has no worker and starts none itself."""
        if self._needed and not self._heard:
            self._recorder.event("no_workers", command=self._command)
            print(f"waiting for an environment worker to attach: {self._command}", flush=True)

    def _remove(self, name: str, reason: str) -> None:
        del self._heard[name]
        self._recorder.event("left", name=name, reason=reason)
        self.ask_for_worker()


def command(config: Config, run_dir: Path) -> str:
    """Return the shell command that attaches an environment worker."""
    files = [file for name in config.environments.names if is_file(file := name.rpartition(":")[0])]
    return f"python {files[0] if files else 'YOUR_ENVIRONMENT.py'} serve --run {run_dir}"
