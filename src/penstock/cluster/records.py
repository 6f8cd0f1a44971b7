"""Payload records between nodes: an actor where they lie reads them, the object store carries them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import RayError

from penstock.cluster.calls import call, end_of
from penstock.ports import PayloadsLost
from penstock.store.payloads import FETCH_S, read_records
from penstock.types import PayloadRef

ASIDE = "aside"
"""Of a depot's calls: those that do not wait for others."""
Record = Any
"""Bytes as an array: only arrays travel beside their pickle, and are read without a copy."""


class Depot:
    """Gives others what processes of its machine wrote to the pool. An actor, or part of one."""

    def __init__(self, directories: Sequence[Path], name: str) -> None:
        self._directories, self._name = directories, name

    @ray.method(concurrency_group=ASIDE)
    def ping(self) -> None:
        """It can be reached, whatever it reads meanwhile."""

    def read(self, refs: Sequence[PayloadRef]) -> list[Record]:
        """Raises `PayloadsLost`."""
        return [np.frombuffer(each, np.uint8) for each in read_records(self._directories, refs, host=self._name)]


async def records_of(host: str, refs: Sequence[PayloadRef], *, namespace: str) -> list[Record]:
    """As the host or depot of that name has them. Raises `PayloadsLost`, `Stalled`."""
    what = f"records of {', '.join(sorted({ref.file for ref in refs}))}"
    try:
        actor = await asyncio.to_thread(ray.get_actor, host, namespace)
        records: list[Record] = await call(actor.read, refs, seconds=FETCH_S, what=what, holder=f"host {host}")
    except ValueError:
        raise PayloadsLost(f"host {host} is gone, and {what} with it") from None
    except RayError as error:
        raise PayloadsLost(f"host {host} does not give {what}: {end_of(error)}") from None
    return records
