"""Where a process finds the experience pool: in the run's directory, where there is one machine.

On several, only the controller's lies there. Workers write to their own machine's runtime directory, from which the
controller fetches each record as soon as it hears of it; whoever reads what others wrote fetches it from there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from penstock.ports import Payloads, SegmentWriter
from penstock.store.payload import PayloadWriter
from penstock.store.payloads import POOL, FetchedPayloads, PassingWriter, SharedPayloads
from penstock.supervisor.child import Child


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """A worker's: what it writes, and what others wrote."""

    writer: SegmentWriter
    payloads: Payloads


def pool_of_controller(child: Child) -> tuple[Path, Payloads]:
    """The pool itself, and how records get there."""
    directory = child.run_dir / POOL
    return directory, SharedPayloads(directory) if child.address is None else _fetched(child, directory)


def payloads_of(child: Child) -> Payloads:
    """For whoever reads what others wrote."""
    if child.address is None:
        return SharedPayloads(child.run_dir / POOL)
    return _fetched(child, child.runtime_dir / f"fetched-{child.name}")


def pool_of_worker(child: Child) -> WorkerPool:
    """For one of a run's environment workers."""
    if child.address is None:
        return shared_pool(child.run_dir / POOL, child.name)
    return WorkerPool(PassingWriter(child.runtime_dir / POOL, child.name), payloads_of(child))


def shared_pool(directory: Path, worker: str) -> WorkerPool:
    """Of a worker on one machine with all others."""
    return WorkerPool(PayloadWriter(directory, worker), SharedPayloads(directory))


def _fetched(child: Child, directory: Path) -> Payloads:
    return FetchedPayloads(directory, runtime_dir=child.runtime_dir, name=child.name)
