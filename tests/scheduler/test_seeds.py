"""The same configuration plays the same tasks in the same worlds, byte for byte; nothing else shares a seed."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from penstock.config import Config
from penstock.data.sources import TaskStream, held_out_tasks, open_tasks
from penstock.ports.work import Work
from penstock.scheduler.active_group import ActiveGroup
from penstock.scheduler.leases import Leases, env_seed
from penstock.scheduler.ledger import Ledger
from penstock.types import Purpose, Task

MIXTURE: dict[str, Any] = {
    "game": {"name": "guess_number", "max_turns": 4, "max_new_tokens": 4, "data": {"source": "seeds"}},
    "sums": {"max_new_tokens": 16, "eval_temperature": 0.5, "data": {"dataset": "basic_arithmetic"}},
}


def config(seed: int = 0, **env: Any) -> Config:
    return Config.model_validate({"seed": seed, "data": {"eval_tasks": 20}, "env": {"mixture": MIXTURE, **env}})


def group_of(task: Task, *, number: int = 1, size: int = 8) -> ActiveGroup:
    return ActiveGroup(number=number, task=task, size=size, ledger=Ledger(), admitted_at=0.0)


def works(settings: Config) -> list[Work]:
    """What the first training and held-out tasks are handed out as."""
    leases, held_out = Leases(settings), held_out_tasks(settings)
    tasks = [*TaskStream(open_tasks(settings), held_out=held_out).take(40), *held_out]
    return [leases.work(group_of(task, number=number), range(8), policy_version=0) for number, task in enumerate(tasks)]


def test_the_same_seed_gives_the_same_work_byte_for_byte() -> None:
    first, again, other = (msgspec.msgpack.encode(works(config(seed))) for seed in (0, 0, 1))
    assert first == again != other


def test_members_and_attempts_share_a_world_and_sample_apart() -> None:
    task = Task(task_id="t", tag="game", index=3)
    leases, group = Leases(config()), group_of(task)
    first = leases.work(group, range(8), policy_version=0)
    group.attempt, group.num_failures = 1, 1
    second = leases.work(group, range(8), policy_version=0)
    both = [*first.leases, *second.leases]
    assert len({lease.env_seed for lease in both}) == 1
    assert len({lease.sampling_seed for lease in both}) == 16


def test_no_two_tasks_share_a_world() -> None:
    purposes: tuple[Purpose, ...] = ("train", "eval")
    settings = config()
    tasks = [
        Task(task_id="t", tag=tag, index=index, purpose=purpose)
        for purpose in purposes
        for tag in MIXTURE
        for index in range(1000)
    ]
    assert len({env_seed(settings, task) for task in tasks}) == len(tasks)


def test_arithmetic_seeds_are_those_of_the_rule_and_collide() -> None:
    settings = Config.model_validate({"seed": 100, "env": {"seeds": "arithmetic"}, "trainer": {"groups_per_step": 3}})
    found = [env_seed(settings, Task(task_id="t", tag="t", index=index)) for index in range(9)]
    assert found == [100 + group + episode for episode in range(3) for group in range(3)]
    assert len(set(found)) == 5


@pytest.mark.parametrize(
    ("tag", "purpose", "tokens", "temperature"),
    [("game", "train", 4, 0.9), ("sums", "train", 16, 0.9), ("game", "eval", 4, 0.0), ("sums", "eval", 16, 0.5)],
)
def test_work_is_on_the_terms_of_its_tag(tag: str, purpose: Purpose, tokens: int, temperature: float) -> None:
    task = Task(task_id="t", tag=tag, index=0, purpose=purpose)
    work = Leases(config(temperature=0.9)).work(group_of(task), range(8), policy_version=0)
    assert (work.sampling.max_new_tokens, work.sampling.temperature) == (tokens, temperature)
    assert set(work.max_tokens) == {tokens}
    assert work.keep_text == (purpose == "eval")
