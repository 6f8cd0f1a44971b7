"""The numbers of one simulated run. Rates and shares are those of its steady part: after the warm-up steps, up to the
last one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.scheduler.segments import SegmentPolicy
from penstock.simulator.limits import limit
from penstock.simulator.simulation import Outcome, StepMark
from penstock.simulator.workload import Population, Workload, population
from penstock.types import EpisodeState

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """All times in simulated seconds; None where there was nothing to measure."""

    samples_per_s: float
    """Trained."""
    limit_samples_per_s: float
    """X*; see `limits.py`."""
    limit_generation: float
    limit_training: float
    efficiency: float
    """samples_per_s / limit_samples_per_s."""
    generator_bubble: float
    """Share of the servers' slot-time in which no token was made; on shared devices, of the time the learner left."""
    generator_idle: float
    """Share of the servers' time without any step."""
    trainer_idle: float
    """Share of the time in which the learner did nothing; on shared devices that is when the servers had them."""
    staleness_mean: float
    staleness_max: int
    staleness_histogram: dict[int, int]
    """Episodes trained, by the age of their oldest token in policy versions."""
    wait_p50_s: float
    """Between a group's admission and its start."""
    wait_p99_s: float
    wait_max_s: float
    tokens_generated: int
    wasted_discarded: float
    """Shares of the tokens generated: of episodes too old to train."""
    wasted_filtered: float
    wasted_restarted: float
    wasted_surplus: float
    """Of redundant members, once their groups were whole."""
    wasted_masked: float
    """Of tokens too old to train in episodes that were trained."""
    filtered_groups: float
    """Share of the groups played."""
    length_ks_trained_played: float
    """Kolmogorov-Smirnov distance between response lengths of trained and of played episodes."""
    length_ks_trained_population: float
    """The same against all episodes of the tasks admitted."""
    length_p50_ratio: float
    """Trained / population."""
    length_p90_ratio: float
    length_mean_ratio: float
    """Below 1 in a run too short for long answers to have come in: then a rate in samples flatters, and so does
    `efficiency`; the product of the two does not."""
    length_mean: float
    """Of the population."""
    first_groups_s: float | None
    """Until as many groups were whole as an optimizer step takes."""
    first_samples_s: float | None
    """Until a quarter of the samples of a step had their last token."""
    first_samples_length_ratio: float | None
    """Mean length of the groups whole by `first_groups_s` / population: the price of an early start."""
    refill_s: float | None
    """Mean time from the moment new weights are served until the next groups of an optimizer step are whole."""
    episode_s: float
    """Mean time between the start of an episode and its answer."""
    step_s: float
    """Mean time of an optimizer step."""
    steps: int
    simulated_s: float

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def measure(outcome: Outcome, workload: Workload, *, shares_devices: bool) -> Measures:
    """What `outcome` comes to."""
    experience, config = outcome.experience, outcome.config
    longest = SegmentPolicy.from_config(config, config.env).max_episode_tokens
    people = population(workload, outcome.num_tasks, longest=longest)
    filtered = experience.num_filtered / max(experience.num_groups, 1)
    kept_tokens = float(np.mean(experience.trained_lengths)) if experience.num_filtered else people.mean_tokens
    bound = limit(config, people, kept=1 - filtered, kept_tokens=kept_tokens, shares_devices=shares_devices)
    first, last = outcome.marks[config.simulator.warmup_steps], outcome.marks[-1]
    rate = (last.num_samples - first.num_samples) / max(last.time - first.time, 1e-12)
    whole, batch = np.sort(np.asarray(outcome.whole_at)), config.trainer.groups_per_step
    ended = np.sort(np.asarray(outcome.ended_at))
    return Measures(
        samples_per_s=rate,
        limit_samples_per_s=bound.samples_per_s,
        limit_generation=bound.generation,
        limit_training=bound.training,
        efficiency=rate / bound.samples_per_s,
        **_idleness(outcome, first, last, shares_devices=shares_devices),
        **_staleness(outcome),
        **_waits(outcome.waits),
        **_waste(outcome, last),
        filtered_groups=filtered,
        **_bias(outcome, people),
        first_groups_s=_nth(whole, batch),
        first_samples_s=_nth(ended, max(batch * config.env.group_size // 4, 1)),
        first_samples_length_ratio=_early_lengths(outcome, people),
        refill_s=refill(whole, outcome.served_at, batch, since=first.time),
        episode_s=experience.played_s / max(len(experience.played_lengths), 1),
        step_s=(last.time - first.time) / max(len(outcome.marks) - 1 - config.simulator.warmup_steps, 1),
        steps=len(outcome.marks) - 1,
        simulated_s=last.time,
    )


def _idleness(outcome: Outcome, first: StepMark, last: StepMark, *, shares_devices: bool) -> dict[str, Any]:
    config = outcome.config
    engine, servers = config.simulator.engine, config.rollout.num_servers
    seconds = max(last.time - first.time, 1e-12)
    training = last.trainer_busy_s - first.trainer_busy_s
    assert first.totals is not None and last.totals is not None
    busy = last.totals.busy_s(engine) - first.totals.busy_s(engine)
    slots = last.totals.slot_s(engine) - first.totals.slot_s(engine)
    available = max(seconds - training, 1e-12) if shares_devices else seconds
    return {
        "generator_bubble": 1 - slots / (available * servers * config.rollout.slots),
        "generator_idle": 1 - busy / (available * servers),
        "trainer_idle": 1 - training / seconds,
    }


def _staleness(outcome: Outcome) -> dict[str, Any]:
    histogram = dict(sorted(outcome.experience.staleness.items()))
    number = max(sum(histogram.values()), 1)
    mean = sum(age * count for age, count in histogram.items()) / number
    return {"staleness_mean": mean, "staleness_max": max(histogram, default=0), "staleness_histogram": histogram}


def _waits(waits: Sequence[float]) -> dict[str, Any]:
    p50, p99, most = np.percentile(np.asarray(waits or [0.0]), [50, 99, 100])
    return {"wait_p50_s": float(p50), "wait_p99_s": float(p99), "wait_max_s": float(most)}


def _waste(outcome: Outcome, last: StepMark) -> dict[str, Any]:
    tokens = outcome.experience.tokens
    assert last.totals is not None
    generated = max(last.totals.b, 1)
    return {
        "tokens_generated": last.totals.b,
        "wasted_discarded": tokens[EpisodeState.DISCARDED_STALE] / generated,
        "wasted_filtered": tokens[EpisodeState.FILTERED] / generated,
        "wasted_restarted": last.cancelled_tokens / generated,
        "wasted_surplus": last.surplus_tokens / generated,
        "wasted_masked": tokens["masked"] / generated,
    }


def _bias(outcome: Outcome, people: Population) -> dict[str, Any]:
    trained, played = (
        _sorted(lengths) for lengths in (outcome.experience.trained_lengths, outcome.experience.played_lengths)
    )
    ratios = np.percentile(trained, [50, 90]) / np.percentile(people.lengths, [50, 90])
    return {
        "length_ks_trained_played": distance(trained, played),
        "length_ks_trained_population": distance(trained, people.lengths),
        "length_p50_ratio": float(ratios[0]),
        "length_p90_ratio": float(ratios[1]),
        "length_mean_ratio": float(np.mean(trained)) / people.mean_tokens,
        "length_mean": people.mean_tokens,
    }


def distance(one: Floats, other: Floats) -> float:
    """Largest difference between two empirical distribution functions; both ascending."""
    points = np.concatenate((one, other))
    shares = (np.searchsorted(side, points, side="right") / len(side) for side in (one, other))
    return float(np.abs(np.subtract(*shares)).max())


def _sorted(values: Sequence[int]) -> Floats:
    return np.sort(np.asarray(values, dtype=np.float64))


def _nth(ascending: Floats, number: int) -> float | None:
    return float(ascending[number - 1]) if len(ascending) >= number else None


def refill(whole: Floats, served_at: Sequence[float], batch: int, *, since: float) -> float | None:
    """Mean time from a moment of `served_at` until `batch` more are whole; `whole` is ascending. What the run ended too
    soon for does not count."""
    served = np.asarray([moment for moment in served_at if moment >= since])
    last = np.searchsorted(whole, served, side="right") + batch - 1
    filled = last < len(whole)
    return float((whole[last[filled]] - served[filled]).mean()) if filled.any() else None


def _early_lengths(outcome: Outcome, people: Population) -> float | None:
    """Groups enter `played_lengths` in the order in which they become whole."""
    config = outcome.config
    number = config.trainer.groups_per_step * config.env.group_size
    lengths = outcome.experience.played_lengths[:number]
    return sum(lengths) / number / people.mean_tokens if len(lengths) == number else None
