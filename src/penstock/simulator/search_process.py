"""The child process of a run that searches better settings, and its requests."""

from __future__ import annotations

import math
import os
import resource
import time
from pathlib import Path

import msgspec

from penstock.config import load_config
from penstock.ports.settings_search import Answer, Question
from penstock.runtime.frames import Frames
from penstock.simulator.fitting import fit_engine
from penstock.simulator.search import answer

PRIORITY = 10
"""A low priority, with which a search gets a tenth of a core that the run keeps busy, until its time is used up. With
the lowest one it would never end there."""


OVERRUN = 1.5
"""The kernel ends this process after this factor times the allowed processor time. A search itself looks at the clock
only when a simulated group begins."""


class SearchRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A question, and what the controller knows about the servers."""

    config: str
    """Path of the run's configuration."""
    question: Question
    costs: dict[str, float]
    """Sums over the decode steps of all servers (`rollout/costs.py`)."""
    max_cpu_s: float


class SearchAnswerer:
    """Answers one search after the other."""

    def __init__(self) -> None:
        os.nice(PRIORITY)
        self._decoder = msgspec.msgpack.Decoder(SearchRequest)

    def answer(self, request: Frames) -> Frames:
        asked, began = self._decoder.decode(request[0]), time.process_time()
        try:
            _limit(began + OVERRUN * asked.max_cpu_s)
            engine = fit_engine(asked.costs, update_s=asked.question.update_s)
            found = answer(load_config(Path(asked.config)), asked.question, engine, max_cpu_s=asked.max_cpu_s)
        except Exception as error:  # the run goes on with the settings that it has
            reason = f"the search failed: {type(error).__name__}: {error}"
            found = Answer(reason=reason, cpu_s=time.process_time() - began)
        return [msgspec.msgpack.encode(found)]


def _limit(cpu_s: float) -> None:
    """Let the kernel end this process after so much processor time in all."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(cpu_s) + 1, most))
