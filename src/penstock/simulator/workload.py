"""What there is to play: for every task, how long its members' answers truly are, and what they earn.

Nothing of that is in the task the scheduler sees: its text is a fixed jumble per task, the same whenever a task comes
again, so that what similar tasks took can be learned and nothing can be read off.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.config import WorkloadConfig
from penstock.types import Task, stable_seed

BLOCK = 512
"""Tasks drawn at a time."""
MAX_BLOCKS = 64
"""Blocks kept; a task played again later than that is drawn again, to the same lengths."""

Floats = npt.NDArray[np.float64]
T = TypeVar("T")


class Turn(NamedTuple):
    """One answer of an episode, and what a tool takes before the next."""

    tokens: int
    tool_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a group's episodes will turn out to be."""

    prompt_tokens: int
    lengths: Sequence[int]
    """Response tokens of each member, over all turns."""
    rewards: Sequence[float]
    turns: Sequence[Sequence[Turn]] | None = None
    """Of each member; None if all have one."""

    def turns_of(self, member: int) -> Sequence[Turn]:
        return self.turns[member] if self.turns is not None else (Turn(self.lengths[member], 0.0),)


class Workload(Protocol):
    """Deterministic by seed, task index, member and attempt."""

    max_tokens: int
    """No episode has more."""
    max_turns: int

    def plan(self, index: int, attempt: int) -> Plan:
        """The episodes of task `index`; each attempt meets other answers."""
        ...

    def task_id(self, index: int) -> str:
        """Equal for the same task at another index."""
        ...


class Repeats:
    """Which of `num_tasks` tasks comes at an index: all of them once, in an order of its own, then again; or, with
    None, always a new one."""

    def __init__(self, num_tasks: int | None, *, seed: int, in_order_first: bool = False) -> None:
        self._num_tasks, self._seed, self._in_order_first = num_tasks, seed, in_order_first
        self._orders: dict[int, npt.NDArray[np.int64]] = {}

    def task(self, index: int) -> int:
        if self._num_tasks is None:
            return index
        epoch, position = divmod(index, self._num_tasks)
        if epoch == 0 and self._in_order_first:
            return position
        if epoch not in self._orders:
            self._orders[epoch] = np.random.default_rng([self._seed, 1, epoch]).permutation(self._num_tasks)
        return int(self._orders[epoch][position])


class LogNormalWorkload:
    """log L = log(median) + N(0, between) per task + N(0, within) per member; runaways and caps."""

    def __init__(self, config: WorkloadConfig, *, group_size: int, seed: int) -> None:
        self.max_tokens, self.max_turns = config.max_tokens, config.turns
        self._config, self._group_size, self._seed = config, group_size, seed
        self._repeats = Repeats(config.tasks, seed=seed)
        self._traits = _Blocks(self._draw_traits)
        self._plans = _Blocks(self._draw_plans)

    def task_id(self, index: int) -> str:
        return f"task/{self._repeats.task(index)}"

    def plan(self, index: int, attempt: int) -> Plan:
        if attempt:
            return self._draw(np.random.default_rng([self._seed, 2, index, attempt]), [index])[0]
        return self._plans[index]

    def _draw_traits(self, block: int) -> list[tuple[float, float]]:
        """Of each task: its mean log length above the median, and the chance that an episode earns a reward."""
        rng, mean = np.random.default_rng([self._seed, 3, block]), self._config.reward_probability
        above = rng.normal(0.0, self._config.between_sigma, BLOCK)
        chance = rng.beta(2 * mean, 2 * (1 - mean), BLOCK) if 0 < mean < 1 else np.full(BLOCK, mean)
        return list(zip(above.tolist(), chance.tolist(), strict=True))

    def _draw_plans(self, block: int) -> list[Plan]:
        indexes = range(block * BLOCK, (block + 1) * BLOCK)
        return self._draw(np.random.default_rng([self._seed, 4, block]), indexes)

    def _draw(self, rng: np.random.Generator, indexes: Sequence[int]) -> list[Plan]:
        config, shape = self._config, (len(indexes), self._group_size)
        traits = np.array([self._traits[self._repeats.task(index)] for index in indexes])
        logs = np.log(config.median_tokens) + traits[:, :1] + rng.normal(0.0, config.within_sigma, shape)
        lengths = np.clip(np.rint(np.exp(logs)), 1, config.max_tokens).astype(np.int64)
        lengths[rng.random(shape) < config.runaway_share] = config.max_tokens
        rewards = (rng.random(shape) < traits[:, 1:]) & (lengths < config.max_tokens)
        rows = zip(lengths.tolist(), rewards.astype(np.float64).tolist(), strict=True)
        return [
            Plan(prompt_tokens=config.prompt_tokens, lengths=row, rewards=earned, turns=self._split(rng, row))
            for row, earned in rows
        ]

    def _split(self, rng: np.random.Generator, lengths: Sequence[int]) -> list[list[Turn]] | None:
        """Cut each answer at random into one to `turns` turns."""
        if self._config.turns == 1:
            return None
        return [self._split_one(rng, length) for length in lengths]

    def _split_one(self, rng: np.random.Generator, length: int) -> list[Turn]:
        config = self._config
        num_turns = min(int(rng.integers(1, config.turns, endpoint=True)), length)
        cuts = sorted((rng.choice(length - 1, num_turns - 1, replace=False) + 1).tolist())
        tokens = [end - start for start, end in pairwise([0, *cuts, length])]
        tools = config.tool_median_s * np.exp(rng.normal(0.0, config.tool_sigma, num_turns))
        return [Turn(count, tool_s) for count, tool_s in zip(tokens, tools.tolist(), strict=True)]


class _Blocks(Generic[T]):
    """Items drawn a block at a time, the latest kept."""

    def __init__(self, draw: Callable[[int], list[T]]) -> None:
        self._draw = draw
        self._kept: OrderedDict[int, list[T]] = OrderedDict()

    def __getitem__(self, index: int) -> T:
        block, position = divmod(index, BLOCK)
        found = self._kept.get(block)
        if found is None:
            found = self._kept[block] = self._draw(block)
            if len(self._kept) > MAX_BLOCKS:
                self._kept.popitem(last=False)
        return found[position]


class Tasks:
    """`TaskSource` of a workload."""

    def __init__(self, workload: Workload, *, seed: int, size: int | None = None) -> None:
        self._workload, self._seed, self._size = workload, seed, size

    def task(self, index: int) -> Task | None:
        if self._size is not None and index >= self._size:
            return None
        task_id = self._workload.task_id(index)
        text = f"{stable_seed(self._seed, task_id):016x}"
        return Task(task_id=task_id, tag="simulated", index=index, payload={"question": text})


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """The first tasks of a workload, whatever was played of them."""

    lengths: Floats
    """Response tokens per episode, ascending."""
    prefill_tokens: float
    """Least that must be computed, mean per episode: the prompt once per group, every later turn's whole context."""
    prompt_tokens: float

    @property
    def mean_tokens(self) -> float:
        return float(self.lengths.mean())

    @property
    def mean_context(self) -> float:
        """Tokens before a token, prompt included, mean over all tokens: long answers count for their length."""
        return self.prompt_tokens + float((self.lengths**2).mean() / self.lengths.mean() - 1) / 2


def population(workload: Workload, num_tasks: int, *, longest: float = math.inf) -> Population:
    """Of the first `num_tasks` tasks, their answers cut at `longest` tokens."""
    lengths: list[int] = []
    prompts = prefills = 0
    for index in range(num_tasks):
        plan = workload.plan(index, 0)
        lengths.extend(plan.lengths)
        prompts += plan.prompt_tokens * len(plan.lengths)
        prefills += plan.prompt_tokens
        if plan.turns is not None:
            prefills += sum(_later_contexts(plan.prompt_tokens, turns) for turns in plan.turns)
    number = max(len(lengths), 1)
    return Population(
        lengths=np.sort(np.minimum(np.asarray(lengths, dtype=np.float64), longest)),
        prefill_tokens=prefills / number,
        prompt_tokens=prompts / number,
    )


def _later_contexts(prompt_tokens: int, turns: Sequence[Turn]) -> int:
    total, context = 0, prompt_tokens
    for turn in turns[:-1]:
        context += turn.tokens
        total += context
    return total
