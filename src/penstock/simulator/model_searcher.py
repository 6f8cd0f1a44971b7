"""The searcher of a simulated run. Its machines are known exactly; its workload is learnt from the groups played."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from penstock.config import Config
from penstock.ports.settings_search import Answer, Question
from penstock.simulator.search import answer


class ModelSearcher:
    """`ports.Searcher` for a run on the virtual clock. A search takes as long there as it takes processor time."""

    def __init__(self, config: Config) -> None:
        self._config = config

    async def search(self, question: Question) -> Answer:
        with ThreadPoolExecutor(max_workers=1) as apart:  # a second event loop needs a thread of its own
            found = apart.submit(answer, self._config, question, self._config.simulator.engine).result()
        await asyncio.sleep(found.cpu_s)
        return found
