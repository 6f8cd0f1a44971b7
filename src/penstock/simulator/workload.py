"""The simulated tasks: for every task, the true lengths of its members' answers and their rewards.

The task that the scheduler sees holds none of these. Its text is a fixed random string per task, the same whenever the
task repeats. A predictor can therefore learn from the lengths of the same task, but cannot read a length from the text.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from statistics import fmean
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from penstock.config import WorkloadConfig
from penstock.seeding import stable_seed
from penstock.types import Task

BLOCK = 512
"""Number of tasks drawn at a time."""
MAX_BLOCKS = 64
"""Number of blocks kept. A task that is needed again after its block was removed is drawn again, with the same
lengths."""
FIRST_ATTEMPT = 1 << 20
"""Attempt number of rollouts before the run; larger than any attempt number of a run."""
NUM_AHEAD = 256
"""Number of tasks taught to the length predictor at a time."""
NUM_ROLLOUTS = 2
"""Number of rollouts of each task before the run."""

LearnLengths = Callable[[Iterable[tuple[Task, Sequence[int]]]], None]
"""Called with tasks and the lengths of their answers."""
Floats = npt.NDArray[np.float64]


class Turn(NamedTuple):
    """One answer of an episode, and the seconds that a tool takes before the next answer."""

    tokens: int
    tool_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The planned outcome of a group's episodes."""

    prompt_tokens: int
    lengths: Sequence[int]
    """Response tokens of each member, over all turns."""
    rewards: Sequence[float]
    turns: Sequence[Sequence[Turn]] | None = None
    """Turns of each member; None if all members have one turn."""
    reward_s: Sequence[float] | None = None
    """Seconds from the last token of each member to its reward; None if rewards take no time."""

    def first(self, num_members: int) -> Plan:
        """Return the plan of a group with only the first members."""
        if len(self.lengths) == num_members:
            return self
        return Plan(
            prompt_tokens=self.prompt_tokens,
            lengths=self.lengths[:num_members],
            rewards=self.rewards[:num_members],
            turns=None if self.turns is None else self.turns[:num_members],
            reward_s=None if self.reward_s is None else self.reward_s[:num_members],
        )

    def turns_of(self, member: int) -> Sequence[Turn]:
        return self.turns[member] if self.turns is not None else (Turn(self.lengths[member], 0.0),)


class Workload(Protocol):
    """Source of planned groups; deterministic by seed, task index, member and attempt."""

    max_tokens: int
    """Upper bound of the tokens of an episode."""
    max_turns: int

    def plan(self, index: int, attempt: int) -> Plan:
        """Return the episodes of task `index`; each attempt has other answers."""

    def task_id(self, index: int) -> str:
        """Return the id of the task at `index`; equal for the same task at another index."""

    def tag(self, index: int) -> str:
        """Return which environment of a mixture plays the task at `index`; any text without a mixture."""


class Repeats:
    """Order of the tasks. All `num_tasks` tasks occur once in a random order, then again in another order. With None,
    every index is a new task."""

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
    """Lengths with log L = log(median) + N(0, between) per task + N(0, within) per member; with runaway answers and a
    cap."""

    def __init__(self, config: WorkloadConfig, *, group_size: int, seed: int) -> None:
        self.max_tokens, self.max_turns = config.max_tokens, config.turns
        self._config, self._group_size, self._seed = config, group_size, seed
        self._repeats = Repeats(config.tasks, seed=seed)
        self._traits = lru_cache(MAX_BLOCKS)(self._draw_traits)
        self._plans = lru_cache(MAX_BLOCKS)(self._draw_plans)

    def task_id(self, index: int) -> str:
        return f"task/{self._repeats.task(index)}"

    def tag(self, index: int) -> str:
        return "simulated"

    def plan(self, index: int, attempt: int) -> Plan:
        if attempt:
            return self._draw(np.random.default_rng([self._seed, 2, index, attempt]), [index])[0]
        block, position = divmod(index, BLOCK)
        return self._plans(block)[position]

    def _draw_traits(self, block: int) -> list[tuple[float, float]]:
        """Draw the traits of each task: its mean log length above the median, and the probability that an episode earns
        a reward."""
        rng, mean = np.random.default_rng([self._seed, 3, block]), self._config.reward_probability
        above = rng.normal(0.0, self._config.between_sigma, BLOCK)
        chance = rng.beta(2 * mean, 2 * (1 - mean), BLOCK) if 0 < mean < 1 else np.full(BLOCK, mean)
        return list(zip(above.tolist(), chance.tolist(), strict=True))

    def _draw_plans(self, block: int) -> list[Plan]:
        indexes = range(block * BLOCK, (block + 1) * BLOCK)
        return self._draw(np.random.default_rng([self._seed, 4, block]), indexes)

    def _draw(self, rng: np.random.Generator, indexes: Sequence[int]) -> list[Plan]:
        config, shape = self._config, (len(indexes), self._group_size)
        places = [divmod(self._repeats.task(index), BLOCK) for index in indexes]
        traits = np.array([self._traits(block)[position] for block, position in places])
        logs = np.log(config.median_tokens) + traits[:, :1] + rng.normal(0.0, config.within_sigma, shape)
        lengths = np.clip(np.rint(np.exp(logs)), 1, config.max_tokens).astype(np.int64)
        lengths[rng.random(shape) < config.runaway_share] = config.max_tokens
        rewards = (rng.random(shape) < traits[:, 1:]) & (lengths < config.max_tokens)
        turns = [[self._split(rng, length) for length in row] if config.turns > 1 else None for row in lengths.tolist()]
        waits = config.reward_median_s * np.exp(rng.normal(0.0, config.reward_sigma, shape))
        return [
            Plan(
                prompt_tokens=config.prompt_tokens,
                lengths=row,
                rewards=earned,
                turns=split,
                reward_s=reward_s if config.reward_median_s else None,
            )
            for row, earned, split, reward_s in zip(
                lengths.tolist(), rewards.astype(np.float64).tolist(), turns, waits.tolist(), strict=True
            )
        ]

    def _split(self, rng: np.random.Generator, length: int) -> list[Turn]:
        """Cut an answer at random into one to `turns` turns."""
        config = self._config
        num_turns = min(int(rng.integers(1, config.turns, endpoint=True)), length)
        cuts = sorted((rng.choice(length - 1, num_turns - 1, replace=False) + 1).tolist())
        tokens = [end - start for start, end in pairwise([0, *cuts, length])]
        tools = config.tool_median_s * np.exp(rng.normal(0.0, config.tool_sigma, num_turns))
        return [Turn(count, tool_s) for count, tool_s in zip(tokens, tools.tolist(), strict=True)]


class Tasks:
    """The `TaskSource` of a workload."""

    def __init__(self, workload: Workload, *, seed: int, size: int | None = None) -> None:
        self._workload, self._seed, self._size = workload, seed, size

    def task(self, index: int) -> Task | None:
        if self._size is not None and index >= self._size:
            return None
        task_id = self._workload.task_id(index)
        text = f"{stable_seed(self._seed, task_id):016x}"
        return Task(task_id=task_id, tag=self._workload.tag(index), index=index, payload={"question": text})


class AdmittedTasks:
    """A `TaskSource` that records when each task was requested, which is the time of its admission.

    With `simulator.known_lengths` it teaches rollouts from before the run to the length predictor, as a resumed run
    does. It teaches a block of tasks before the first of them is admitted, so that the number of tasks needs no bound.
    Of the two rollouts of a task, the first teaches the lengths to a predictor without data; the second shows that its
    predictions can be trusted.
    """

    def __init__(self, workload: Workload, tasks: Tasks, *, known_lengths: str, learn_lengths: LearnLengths) -> None:
        self._workload, self._tasks = workload, tasks
        self._known_lengths, self._learn_lengths = known_lengths, learn_lengths
        self._num_taught = 0
        self.admitted_at: list[float] = []

    def task(self, index: int) -> Task | None:
        while self._known_lengths != "none" and index >= self._num_taught:
            ahead = [(i, self._tasks.task(i)) for i in range(self._num_taught, self._num_taught + NUM_AHEAD)]
            known = [(i, task) for i, task in ahead if task is not None]
            self._learn_lengths((task, self._lengths(i, number)) for number in range(NUM_ROLLOUTS) for i, task in known)
            self._num_taught += NUM_AHEAD
        found = self._tasks.task(index)
        if found is not None:
            self.admitted_at.append(asyncio.get_running_loop().time())
        return found

    def _lengths(self, index: int, number: int) -> Sequence[int]:
        """Return the lengths of other answers to the prompt (`history`), or the mean length of the answers that the run
        will see (`oracle`)."""
        if self._known_lengths == "history":
            return self._workload.plan(index, FIRST_ATTEMPT + number).lengths
        return [round(fmean(self._workload.plan(index, 0).lengths))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Population:
    """Statistics of the first tasks of a workload, whether or not they were run."""

    lengths: Floats
    """Response tokens per episode, ascending."""
    prefill_tokens: float
    """Smallest number of tokens to prefill, mean per episode: the prompt once per group, and the whole context of every
    later turn."""
    prompt_tokens: float

    @property
    def mean_tokens(self) -> float:
        return float(self.lengths.mean())

    @property
    def mean_context(self) -> float:
        """Mean number of tokens before a token, prompt included. The mean is over all tokens, so long answers weigh
        more."""
        return self.prompt_tokens + float((self.lengths**2).mean() / self.lengths.mean() - 1) / 2


def population(workload: Workload, num_tasks: int, *, longest: float = math.inf) -> Population:
    """Return statistics of the first `num_tasks` tasks, with answers cut at `longest` tokens."""
    lengths: list[int] = []
    prompts = prefills = 0
    for index in range(num_tasks):
        plan = workload.plan(index, 0)
        lengths.extend(plan.lengths)
        prompts += plan.prompt_tokens * len(plan.lengths)
        prefills += plan.prompt_tokens
        for turns in plan.turns or ():
            _, *later = accumulate((turn.tokens for turn in turns[:-1]), initial=plan.prompt_tokens)
            prefills += sum(later)
    number = max(len(lengths), 1)
    return Population(
        lengths=np.sort(np.minimum(np.asarray(lengths, dtype=np.float64), longest)),
        prefill_tokens=prefills / number,
        prompt_tokens=prompts / number,
    )
