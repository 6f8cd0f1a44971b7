"""Traces of the episodes that an environment worker plays (`observe.opentelemetry`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from penstock.config import Config, ConfigError
from penstock.deadline import deadline
from penstock.samples import Trajectory
from penstock.supervisor.child import Child
from penstock.types import Task

logger = logging.getLogger(__name__)

Trace = Callable[[Task, Trajectory], None]
"""Called with a task and the trajectory of each ended episode."""
CLOSE_S = 60.0
"""Time limit to close the traces; they close by themselves before."""


@asynccontextmanager
async def tracing(config: Config, child: Child) -> AsyncIterator[Trace | None]:
    """Yield the function that traces ended episodes; None if the run has no traces. The last spans are sent after the
    body. Raises `ConfigError` if the packages are missing here, or refuse values of their variables."""
    address = config.observe.opentelemetry
    if address is None:
        yield None
        return
    try:
        from penstock.observe.episode_traces import EpisodeTraces

        traces = EpisodeTraces(config, address, run_id=child.run_id, worker=child.name)
    except ImportError as error:
        raise ConfigError(f"observe.opentelemetry: {error}: pip install 'penstock[otel]' on this machine") from None
    except ValueError as error:
        raise ConfigError(f"observe.opentelemetry: {error}: check the variables OTEL_*") from None
    is_broken = False

    def trace(task: Task, trajectory: Trajectory) -> None:
        nonlocal is_broken
        if is_broken:
            return
        try:
            traces.add(task, trajectory)
        except Exception:  # an observer ends no episode
            is_broken = True
            logger.exception("observe.opentelemetry: an episode cannot be traced; this worker traces no more")

    try:
        yield trace
    finally:
        async with deadline(CLOSE_S, waiter=child.name, resource="its last spans", holder="the collector"):
            await asyncio.to_thread(traces.close)
