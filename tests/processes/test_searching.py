"""The controller's searcher, with its real child process."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from penstock.config import Config
from penstock.config.tunable import movable, settings_of
from penstock.ports.settings_search import Answer, PlayedGroup, Question
from penstock.processes.searching import ENOUGH, LEAST_CPU_S, START_CPU_S, ProcessSearcher
from penstock.rollout.costs import StepCosts
from penstock.simulator.search_process import PRIORITY, SearchRequest
from penstock.types import EpisodeId, EpisodeSummary

pytestmark = pytest.mark.integration

TREE: dict[str, Any] = {
    "env": {"group_size": 4, "max_new_tokens": 400},
    "model": {"max_context": 512},
    "rollout": {"slots": 16},
    "trainer": {"groups_per_step": 4},
    "scheduler": {"tuning": "auto"},
}


def costs() -> dict[str, float]:
    sums = StepCosts()
    for number in range(1, 200):
        active = 1 + number % 16
        sums.add(decoded=active, context=active * 40, prefilled=30 * (number % 3), seconds=0.01 + 0.0005 * active)
    return {name.removeprefix("cost_"): total for name, total in sums.counters().items()}


def question() -> Question:
    config = Config.model_validate(TREE)
    groups = [PlayedGroup(task_id=str(n), episodes=[episode(n, member) for member in range(4)]) for n in range(32)]
    return Question(
        settings=settings_of(config),
        movable=movable(config),
        groups=groups,
        calls=[(4, 1200, True, 0.3)] * 8,
        update_s=0.1,
        trust={},
    )


def episode(group: int, member: int) -> EpisodeSummary:
    tokens = 40 + (17 * group + 5 * member) % 60
    return EpisodeSummary(
        episode=EpisodeId("main", group, member, 0),
        status="completed",
        reward=float(member % 2),
        num_turns=1,
        prompt_tokens=20,
        response_tokens=tokens,
        seconds=1.0,
    )


def searcher(directory: Path, *, run_cpu_s: float = 1000.0) -> ProcessSearcher:
    path = directory / "config.yaml"
    path.write_text(yaml.safe_dump(TREE))
    asked = itertools.count(1)

    def growing() -> dict[str, float]:
        times = next(asked)
        return {name: times * total for name, total in costs().items()}

    return ProcessSearcher(path, max_cpu_share=0.02, run_cpu_s=lambda: run_cpu_s, costs=growing)


def test_a_child_of_low_priority_answers(tmp_path: Path) -> None:
    async def main() -> None:
        one = searcher(tmp_path)
        try:
            found = await one.search(question())
            assert found.num_simulated > 3 and not found.was_postponed, found
            assert found.cpu_s >= START_CPU_S and one.cpu_s == found.cpu_s
            ours = os.getpriority(os.PRIO_PROCESS, 0)
            assert one._child is not None
            assert os.getpriority(os.PRIO_PROCESS, one._child.pid) == min(ours + PRIORITY, 19)
            pid = one._child.pid
            again = await one.search(question())
            assert one._child.pid == pid and one.cpu_s == pytest.approx(found.cpu_s + again.cpu_s)
        finally:
            one.close()

    asyncio.run(main())


def test_a_search_that_may_take_no_time_is_postponed(tmp_path: Path) -> None:
    async def main() -> None:
        short = searcher(tmp_path, run_cpu_s=(START_CPU_S + LEAST_CPU_S) / 0.02 - 1)
        found = await short.search(question())
        assert found.was_postponed and short._child is None

    asyncio.run(main())


async def test_a_search_that_was_cut_too_short_has_twice_the_time_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However fast the machine is: the child says that it has used all its time."""
    one, num_simulated = searcher(tmp_path), ENOUGH - 1
    decoder = msgspec.msgpack.Decoder(SearchRequest)
    monkeypatch.setattr(
        one,
        "_ask",
        lambda request: Answer(
            reason="", cpu_s=decoder.decode(request).max_cpu_s, was_cut=True, num_simulated=num_simulated
        ),
    )

    async def is_postponed(allowed_s: float) -> bool:
        run_cpu_s = (one.cpu_s + START_CPU_S + allowed_s) / 0.02
        monkeypatch.setattr(one, "_run_cpu_s", lambda: run_cpu_s)
        return (await one.search(question())).was_postponed

    assert not await is_postponed(1.1 * LEAST_CPU_S)
    assert await is_postponed(2.1 * LEAST_CPU_S)
    num_simulated = ENOUGH
    assert not await is_postponed(2.3 * LEAST_CPU_S)
    assert await is_postponed(2.2 * LEAST_CPU_S)
    assert not await is_postponed(2.4 * LEAST_CPU_S)


def test_a_child_that_dies_costs_one_search(tmp_path: Path) -> None:
    async def main() -> None:
        one = searcher(tmp_path, run_cpu_s=100_000.0)
        try:
            await one.search(question())
            assert one._child is not None
            os.kill(one._child.pid, signal.SIGKILL)
            failed = await one.search(question())
            assert not failed.changes and failed.reason.startswith("the search failed: "), failed
            assert failed.cpu_s > 1, "it is not known how much it took: all that it might have"
            assert (await one.search(question())).num_simulated > 3
        finally:
            one.close()

    asyncio.run(main())


def test_servers_that_report_no_times_are_no_model(tmp_path: Path) -> None:
    async def main() -> None:
        one = ProcessSearcher(tmp_path / "config.yaml", max_cpu_share=0.5, run_cpu_s=lambda: 100.0, costs=dict)
        found = await one.search(question())
        assert not found.changes and "report no times" in found.reason

    asyncio.run(main())
