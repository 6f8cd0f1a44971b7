"""The location of the experience pool for each process.

On one machine, all processes use the pool in the run's directory. On several machines, only the controller does.
Workers write to the runtime directory of their own machine. The controller fetches each record from there as soon as a
worker reports it. Workers and the trainer fetch the records of other workers from the controller's host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.alarms import HopelessError
from penstock.observe.recorder import Recorder
from penstock.runtime.file_service import POOL
from penstock.store.payload_files import PayloadError, PayloadReader, PayloadWriter, check_ref
from penstock.store.remote_payloads import FetchedPayloads, PayloadsLost, TemporaryPayloadWriter
from penstock.supervisor.child import Child
from penstock.types import PayloadRef

MAX_FAILING_S = 300.0
"""Limit of the time in which a host delivers no records while its workers report some. A dead worker is replaced
before that."""


@dataclass(frozen=True, slots=True)
class WorkerPool:
    """The pool of one worker: a writer for its own records, and access to the records of other workers."""

    writer: PayloadWriter
    payloads: PayloadReader


def pool_of_controller(child: Child) -> tuple[Path, PayloadReader]:
    """Return the directory of the pool, and the object that fetches records into it."""
    directory = child.run_dir / POOL
    return directory, PayloadReader(directory) if child.address is None else _fetched(child, directory)


def payloads_of(child: Child) -> PayloadReader:
    """Return access to the records of other processes."""
    if child.address is None:
        return PayloadReader(child.run_dir / POOL)
    return _fetched(child, child.runtime_dir / f"fetched-{child.name}")


def pool_of_worker(child: Child) -> WorkerPool:
    """Return the pool of one of a run's environment workers."""
    if child.address is None:
        return WorkerPool(PayloadWriter(child.run_dir / POOL, child.name), payloads_of(child))
    return WorkerPool(TemporaryPayloadWriter(child.runtime_dir / POOL, child.name), payloads_of(child))


def _fetched(child: Child, directory: Path) -> PayloadReader:
    return FetchedPayloads(directory, secret=child.nonce, name=child.name)


class HostUnreachable(HopelessError):
    """A host has delivered no records for too long, so everything that its workers complete is lost."""


class PayloadFetcher:
    """Checks the records that workers report, before the controller uses them. Copies those of other machines to the
    controller's pool.

    A record that cannot be fetched or does not match its reference is lost. Its episodes are run again, and an event
    reports that. If a host delivers nothing for minutes while its workers continue, the run ends.
    """

    def __init__(self, payloads: PayloadReader, recorder: Recorder) -> None:
        self._payloads, self._recorder = payloads, recorder
        self._failing_since: dict[str, float] = {}
        """Time of the first failed fetch since the last success, by host."""

    async def fetch(self, refs: Sequence[PayloadRef | None], *, worker: str, host: str) -> str:
        """Fetch records into the pool. Return the reason if that fails, else an empty string. Raises
        `HostUnreachable`."""
        records = [ref for ref in refs if ref is not None]
        if not records:
            return ""
        now = asyncio.get_running_loop().time
        try:
            for ref in records:
                check_ref(ref, worker=worker)
            await self._payloads.fetch(records, host=host)
            await self._payloads.verify(records)
        except (PayloadsLost, PayloadError) as lost:
            self._recorder.event("payloads_unfetched", worker=worker, host=host, reason=str(lost))
            if now() - self._failing_since.setdefault(host, now()) > MAX_FAILING_S:
                raise HostUnreachable(
                    f"host {host} has delivered no records for {MAX_FAILING_S:g} s, so the episodes of its workers are "
                    f"lost: {lost}"
                ) from None
            return str(lost)
        self._failing_since.pop(host, None)
        return ""
