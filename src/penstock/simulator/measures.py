"""Measured figures of one simulated run. Rates and shares are those of its steady part: from the end of the warm-up
steps to the last step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.config import Config
from penstock.scheduler.bias import ks_distance
from penstock.scheduler.segments import SegmentPolicy
from penstock.simulator.simulated_run import Simulation, StepMark
from penstock.simulator.workload import Population, Workload, population
from penstock.types import EpisodeState

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Figures of one run. All times are in simulated seconds; None if there was nothing to measure."""

    samples_per_s: float
    """Samples trained per second."""
    limit_samples_per_s: float
    """X*, the upper bound for any scheduler; see `limits`."""
    limit_generation: float
    limit_training: float
    efficiency: float
    """samples_per_s / limit_samples_per_s."""
    generator_bubble: float
    """Share of the servers' slot-time in which no token was generated. On shared devices, the share of the time that
    training left."""
    generator_idle: float
    """Share of the servers' time in which no step ran."""
    trainer_idle: float
    """Share of the time in which the learner was idle. On shared devices the servers had the devices then."""
    staleness_mean: float
    staleness_max: int
    staleness_histogram: dict[int, int]
    """Number of trained episodes, by the age of their oldest token in policy versions."""
    token_staleness_mean: float | None
    """Mean age of all trained tokens; None if it was not counted."""
    wait_p50_s: float
    """Waiting time between a group's admission and its start."""
    wait_p99_s: float
    wait_max_s: float
    tokens_generated: int
    wasted_discarded: float
    """Share of the generated tokens in episodes that were too old to train. The other `wasted_` figures are shares of
    the generated tokens too."""
    wasted_filtered: float
    wasted_restarted: float
    wasted_surplus: float
    """Tokens of redundant members, unused because their groups were complete."""
    wasted_masked: float
    """Tokens that were too old to train, in episodes that were trained."""
    filtered_groups: float
    """Share of the finished groups that a filter dropped."""
    length_ks_trained_played: float
    """Kolmogorov-Smirnov distance between the response lengths of trained episodes and of all finished episodes."""
    length_ks_trained_population: float
    """Kolmogorov-Smirnov distance between the response lengths of trained episodes and of all episodes of the admitted
    tasks (the population)."""
    length_p50_ratio: float
    """Trained / population; the other `ratio` figures too."""
    length_p90_ratio: float
    length_mean_ratio: float
    """Trained / population. It is below 1 if the run was too short for long answers to finish. A rate in samples is
    then too favourable, and so is `efficiency`; the product of `efficiency` and this ratio is not."""
    length_mean: float
    """Mean response length of the population."""
    first_groups_s: float | None
    """Time until as many groups were complete as an optimizer step takes."""
    first_samples_s: float | None
    """Time until a quarter of the samples of a step had their last token."""
    first_samples_length_ratio: float | None
    """Mean response length of the groups complete by `first_groups_s` / population: the bias of an early start."""
    refill_s: float | None
    """Mean time from the moment new weights are served until all groups of the next optimizer step are complete."""
    episode_s: float
    """Mean time between the start of an episode and its answer."""
    step_s: float
    """Mean time of an optimizer step."""
    steps: int
    simulated_s: float

    @property
    def fair_samples_per_s(self) -> float:
        """Return trained samples per second, reduced if the run was too short for long answers to finish."""
        return self.samples_per_s * min(self.length_mean_ratio, 1.0)


def measure(run: Simulation, workload: Workload, *, shares_devices: bool) -> Measures:
    """Compute the figures of a simulated run."""
    experience, config = run.experience, run.config
    longest = SegmentPolicy.from_config(config, config.env).max_episode_tokens
    people = population(workload, run.num_tasks, longest=longest)
    filtered = experience.num_filtered / max(experience.num_groups, 1)
    kept_tokens = float(np.mean(experience.trained_lengths)) if experience.num_filtered else people.mean_tokens
    bounds = limits(config, people, kept=1 - filtered, kept_tokens=kept_tokens, shared=shares_devices)
    first, last = run.marks[config.simulator.warmup_steps], run.marks[-1]
    rate = (last.num_samples - first.num_samples) / max(last.time - first.time, 1e-12)
    whole, batch = np.sort(np.asarray(run.workers.whole_at)), config.trainer.groups_per_step
    ended = np.sort(np.asarray(run.workers.ended_at))
    return Measures(
        samples_per_s=rate,
        **bounds,
        efficiency=rate / bounds["limit_samples_per_s"],
        **_idleness(run, first, last, shares_devices=shares_devices),
        **_staleness(run),
        **_waits(run.waits),
        **_waste(run, last),
        filtered_groups=filtered,
        **_bias(run, people),
        first_groups_s=_nth(whole, batch),
        first_samples_s=_nth(ended, max(batch * config.env.group_size // 4, 1)),
        first_samples_length_ratio=_early_lengths(run, people),
        refill_s=refill(whole, run.fleet.served_at, batch, since=first.time),
        episode_s=experience.played_s / max(len(experience.played_lengths), 1),
        step_s=(last.time - first.time) / max(len(run.marks) - 1 - config.simulator.warmup_steps, 1),
        steps=len(run.marks) - 1,
        simulated_s=last.time,
    )


def limits(config: Config, population: Population, *, kept: float, kept_tokens: float, shared: bool) -> dict[str, Any]:
    """Return the samples per second that the modelled machines allow: the upper bound X* for any scheduler, and its
    parts.

        generation = kept * servers / (E[L] * d(K, c) / K + E[P] * prefill_token_s)
        training   = 1 / (token_s * (E[L'] + E[prompt]) + (call_s + step_s) / samples per step)
        X*         = min(generation, training),   or 1 / (1 / generation + 1 / training) on shared devices

    K: the slots of a server, or as many sequences as its memory holds at mean length.
    c: the tokens that K sequences hold; for each sequence, the mean context before a token, over all tokens.
    L: the response tokens of an episode. L': the same for episodes that the filter keeps (`kept_tokens`).
    P: the prompt and context tokens of an episode that must be computed.
    kept: the share of finished groups that the filter keeps.
    """
    generation = kept * _generation(config, population)
    training = _training(config, population.prompt_tokens + kept_tokens)
    both = 1 / (1 / generation + 1 / training) if shared else min(generation, training)
    return {"limit_samples_per_s": both, "limit_generation": generation, "limit_training": training}


def _generation(config: Config, population: Population) -> float:
    engine, slots = config.simulator.engine, float(config.rollout.slots)
    if engine.kv_tokens is not None:
        slots = min(slots, max(engine.kv_tokens / (population.prompt_tokens + population.mean_tokens), 1.0))
    token_s = (engine.step_s + engine.sequence_s * slots) / slots + engine.context_token_s * population.mean_context
    sample_s = population.mean_tokens * token_s + population.prefill_tokens * engine.prefill_token_s
    return config.rollout.num_servers / sample_s


def _training(config: Config, tokens: float) -> float:
    """Return the training rate for samples with `tokens` tokens, prompt included."""
    times, batch = config.simulator.trainer, config.trainer.groups_per_step * config.env.group_size
    sample_s = times.token_s * tokens + (times.call_s + times.step_s) / batch
    return 1 / max(sample_s, 1e-12)


def _idleness(run: Simulation, first: StepMark, last: StepMark, *, shares_devices: bool) -> dict[str, Any]:
    config = run.config
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


def _staleness(run: Simulation) -> dict[str, Any]:
    histogram = dict(sorted(run.experience.staleness.items()))
    number = max(sum(histogram.values()), 1)
    mean = sum(age * count for age, count in histogram.items()) / number
    lags = run.experience.lags
    of_tokens = sum(lag * count for lag, count in lags.items()) / max(lags.total(), 1)
    return {
        "staleness_mean": mean,
        "staleness_max": max(histogram, default=0),
        "staleness_histogram": histogram,
        "token_staleness_mean": of_tokens if lags else None,
    }


def _waits(waits: Sequence[float]) -> dict[str, Any]:
    p50, p99, most = np.percentile(np.asarray(waits or [0.0]), [50, 99, 100])
    return {"wait_p50_s": float(p50), "wait_p99_s": float(p99), "wait_max_s": float(most)}


def _waste(run: Simulation, last: StepMark) -> dict[str, Any]:
    tokens = run.experience.tokens
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


def _bias(run: Simulation, people: Population) -> dict[str, Any]:
    trained, played = (np.sort(lengths) for lengths in (run.experience.trained_lengths, run.experience.played_lengths))
    ratios = np.percentile(trained, [50, 90]) / np.percentile(people.lengths, [50, 90])
    return {
        "length_ks_trained_played": ks_distance(trained, played),
        "length_ks_trained_population": ks_distance(trained, people.lengths),
        "length_p50_ratio": float(ratios[0]),
        "length_p90_ratio": float(ratios[1]),
        "length_mean_ratio": float(np.mean(trained)) / people.mean_tokens,
        "length_mean": people.mean_tokens,
    }


def _nth(ascending: Floats, number: int) -> float | None:
    return float(ascending[number - 1]) if len(ascending) >= number else None


def refill(whole: Floats, served_at: Sequence[float], batch: int, *, since: float) -> float | None:
    """Return the mean time from a moment of `served_at` until `batch` more groups are complete; `whole` is ascending.
    Moments after which the run ended too soon do not count."""
    served = np.asarray([moment for moment in served_at if moment >= since])
    last = np.searchsorted(whole, served, side="right") + batch - 1
    filled = last < len(whole)
    return float((whole[last[filled]] - served[filled]).mean()) if filled.any() else None


def _early_lengths(run: Simulation, people: Population) -> float | None:
    """Return the length ratio of the first groups. Groups enter `played_lengths` in the order in which they are
    complete."""
    config = run.config
    number = config.trainer.groups_per_step * config.env.group_size
    lengths = run.experience.played_lengths[:number]
    return sum(lengths) / number / people.mean_tokens if len(lengths) == number else None
