"""Whole simulated runs: what theory says must come out of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.config import Config, ConfigError
from penstock.simulator.measures import Measures, refill
from penstock.simulator.prediction import predict
from penstock.simulator.simulated_run import simulate
from penstock.simulator.strategies import combinations
from penstock.simulator.trace import open_workload


def config(**changes: Any) -> Config:
    """Generation bounds everything; nothing is filtered."""
    tree: dict[str, Any] = {
        "env": {"group_size": 4},
        "rollout": {"servers": 2, "slots": 16},
        "trainer": {"groups_per_step": 16},
        "scheduler": {"group_filter": [], "trigger": {"min_samples": 16}},
        "simulator": {
            "engine": {"step_s": 0.01, "sequence_s": 0.0, "prefill_token_s": 0.0, "update_s": 0.0},
            "trainer": {"token_s": 0.0, "step_s": 0.0},
            "workload": {"median_tokens": 200.0, "max_tokens": 2000, "prompt_tokens": 20},
            "strategies": ["asynchronous"],
            "steps": 12,
            "warmup_steps": 2,
        },
    }
    return Config.model_validate(_merge(tree, changes))


def _merge(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    return base | {
        key: _merge(base.get(key, {}), value) if isinstance(value, dict) else value for key, value in over.items()
    }


def measures(settings: Config) -> dict[str, Measures]:
    """By combination; the first seed."""
    return {result.name: result.runs[0] for result in predict(settings).results}


LONG_TAIL = {"median_tokens": 100.0, "between_sigma": 0.2, "within_sigma": 0.2, "runaway_share": 0.05}


def test_the_bubble_of_lock_step_is_what_the_lengths_say() -> None:
    """All start at once and wait for the longest: 1 - E[L] / L_max, with constant time per step."""
    settings = config(
        simulator={"strategies": ["synchronous"], "workload": LONG_TAIL}, rollout={"servers": 1, "slots": 64}
    )
    workload = open_workload(settings.simulator.workload, group_size=4, seed=0)
    (combination,) = combinations(settings, workload)
    outcome = simulate(combination.config, workload, seed=0)
    lengths = outcome.experience.played_lengths[2 * 64 :]
    rounds = [lengths[first : first + 64] for first in range(0, len(lengths), 64)]
    expected = 1 - sum(map(sum, rounds)) / sum(64 * max(each) for each in rounds)
    found = measures(settings)["synchronous"]
    assert found.generator_bubble == pytest.approx(expected, abs=1e-6)
    assert found.generator_bubble > 0.8 and found.generator_idle == pytest.approx(0.0, abs=1e-6)
    assert found.staleness_max == 0


@pytest.mark.parametrize("bound", ["generation", "training"])
def test_asynchronous_reaches_the_limit(bound: str) -> None:
    token_s = 0.0 if bound == "generation" else 1.5e-3
    settings = config(
        scheduler={"max_staleness": 4},
        simulator={
            "workload": {"median_tokens": 50.0},
            "engine": {"sequence_s": 0.001},
            "trainer": {"token_s": token_s},
            "steps": 40,
        },
    )
    found = measures(settings)["asynchronous"]
    assert (found.limit_training < found.limit_generation) == (bound == "training")
    assert 0.93 < found.efficiency < 1.03


def test_nothing_beats_the_limit_where_answers_are_cut_or_groups_filtered() -> None:
    cut = config(
        env={"max_new_tokens": 50},
        scheduler={"max_staleness": 4},
        simulator={"strategies": ["configured"], "steps": 30},
    )
    assert 0.9 < measures(cut)["configured"].efficiency < 1.03
    long_ones_earn_nothing = config(
        scheduler={"max_staleness": 4, "group_filter": "zero_variance"},
        simulator={"workload": LONG_TAIL | {"runaway_share": 0.2}, "trainer": {"token_s": 1.5e-3}, "steps": 30},
    )
    assert measures(long_ones_earn_nothing)["asynchronous"].efficiency < 1.05


def test_order_changes_no_steady_throughput() -> None:
    """In an endless stream every order keeps the slots full."""
    settings = config(
        scheduler={"max_staleness": 7, "dispatch": {"look_ahead": 64}},
        simulator={"dispatch": ["fifo", "sjf", "ljf"], "workload": {"tasks": 40}, "steps": 12},
    )
    found = measures(settings)
    assert set(found) == {"asynchronous", "asynchronous sjf", "asynchronous ljf"}
    assert [round(run.generator_bubble, 2) for run in found.values()] == [0, 0, 0]


def test_overlap_and_over_sampling_beat_lock_step_on_a_long_tail() -> None:
    settings = config(
        simulator={
            "strategies": ["synchronous", "colocated", "over_sampling", "asynchronous", "segments"],
            "workload": LONG_TAIL,
            "trainer_devices": 1,
        }
    )
    found = measures(settings)
    assert found["over_sampling"].samples_per_s > 1.5 * found["colocated"].samples_per_s
    assert found["asynchronous"].samples_per_s > 1.5 * found["synchronous"].samples_per_s
    assert found["segments"].samples_per_s > 1.5 * found["synchronous"].samples_per_s
    assert found["colocated"].samples_per_s > found["synchronous"].samples_per_s, "it has one more server"


def test_redundant_members_spare_groups_their_stragglers() -> None:
    modes = [{"strategies": ["synchronous"], "workload": LONG_TAIL}] * 2
    alone, spared = (
        measures(config(env={"redundancy": redundancy}, simulator=mode))["synchronous"]
        for redundancy, mode in zip((0, 1), modes, strict=True)
    )
    assert spared.samples_per_s > 1.5 * alone.samples_per_s
    assert alone.wasted_surplus == 0.0 < spared.wasted_surplus
    assert spared.length_mean_ratio < alone.length_mean_ratio, "which prefers short answers"


def test_restarted_leftovers_waste_what_resumed_ones_keep() -> None:
    strategies = ["over_sampling", "tail_batching"]
    found = measures(config(simulator={"strategies": strategies, "workload": LONG_TAIL, "trainer_devices": 1}))
    assert found["over_sampling"].wasted_restarted == 0
    assert found["tail_batching"].wasted_restarted > 0.05
    assert found["tail_batching"].staleness_max == 0 < found["over_sampling"].staleness_max


def test_segments_end_exactly_where_uncut_answers_do() -> None:
    settings = config(simulator={"strategies": ["segments"], "segments": 8, "workload": {"turns": 3}})
    workload = open_workload(settings.simulator.workload, group_size=4, seed=0)
    (combination,) = combinations(settings, workload)
    outcome = simulate(combination.config, workload, seed=0)
    planned = sorted(length for index in range(outcome.num_tasks) for length in workload.plan(index, 0).lengths)
    played = sorted(outcome.experience.played_lengths)
    assert set(played) <= set(planned)
    assert combination.config.scheduler.segment_length == 250


@pytest.mark.parametrize(
    "strategy", ["synchronous", "colocated", "one_step_off", "over_sampling", "tail_batching", "segments"]
)
def test_every_order_works_with_every_strategy(strategy: str) -> None:
    simulator = {"strategies": [strategy], "dispatch": ["probe", "sjf", "ljf"], "steps": 4}
    workload, engine = {"turns": 2, "tasks": 30}, {"latency_s": 0.05}
    every = measures(config(simulator={**simulator, "workload": workload, "engine": engine}))
    assert set(every) == {f"{strategy} {dispatch}" for dispatch in ("probe", "sjf", "ljf")}
    for found in every.values():
        assert found.steps == 4 and found.samples_per_s > 0
        assert found.staleness_max <= 4


def test_tokens_too_old_are_masked_and_counted() -> None:
    """One version is trained every few answers' time: long answers span more of them than allowed."""
    settings = config(
        scheduler={"max_staleness": 1},
        simulator={"strategies": ["segments"], "workload": LONG_TAIL, "steps": 12},
    )
    found = measures(settings)["segments"]
    assert found.staleness_max == 1 and found.wasted_masked > 0, "what is trained keeps the bound"


def test_equal_seeds_give_equal_reports() -> None:
    settings = config(simulator={"strategies": ["asynchronous", "over_sampling"], "seeds": 2, "steps": 5})
    first, again = predict(settings), predict(settings)
    assert first == again
    assert first.results[0].runs[0] != first.results[0].runs[1]
    assert first["asynchronous"].spread("samples_per_s") > 0


def test_a_closed_set_takes_what_list_scheduling_allows() -> None:
    """Between the lower bound and (2 - 1/K) times it (Graham); a probe may add the longest answer once more."""
    simulator = {"dispatch": ["fifo", "probe"], "makespan_groups": 50, "steps": 3}
    settings = config(rollout={"servers": 1}, simulator=simulator)
    workload = open_workload(settings.simulator.workload, group_size=4, seed=0)
    lengths = [length for index in range(50) for length in workload.plan(index, 0).lengths]
    bound, longest = 0.01 * max(sum(lengths) / 16, max(lengths)), 0.01 * max(lengths)
    fifo, probe = (made.seconds[0] for made in predict(settings).makespans)
    assert bound <= fifo <= (2 - 1 / 16) * bound
    assert bound <= probe <= (2 - 1 / 16) * bound + longest


@pytest.mark.parametrize("known", ["history", "oracle"])
def test_known_lengths_order_a_closed_set(known: str) -> None:
    """The long ones first: shorter in all. The short ones first: an early supply, of short answers."""
    simulator = {
        "strategies": ["synchronous"],
        "dispatch": ["fifo", "sjf", "ljf"],
        "makespan_groups": 60,
        "known_lengths": known,
        "workload": {"between_sigma": 0.9, "max_tokens": 4000},
        "steps": 3,
    }
    report = predict(config(rollout={"servers": 1}, scheduler={"dispatch": {"look_ahead": 64}}, simulator=simulator))
    seconds = {made.dispatch: made.seconds[0] for made in report.makespans}
    assert seconds["ljf"] < 0.9 * seconds["fifo"] and seconds["fifo"] <= seconds["sjf"]
    fifo, sjf = report["synchronous"].runs[0], report["synchronous sjf"].runs[0]
    assert fifo.first_samples_s and sjf.first_samples_s and sjf.first_samples_s < 0.5 * fifo.first_samples_s
    assert sjf.first_samples_length_ratio and sjf.first_samples_length_ratio < 0.5
    assert fifo.refill_s and sjf.refill_s and sjf.refill_s < fifo.refill_s


def test_unknown_lengths_leave_a_closed_set_as_it_came() -> None:
    simulator = {"dispatch": ["fifo", "sjf"], "makespan_groups": 30, "steps": 3}
    fifo, sjf = (made.seconds for made in predict(config(simulator=simulator)).makespans)
    assert fifo == sjf


def test_known_tasks_that_repeat_are_trusted_all_along() -> None:
    simulator = {"dispatch": ["sjf"], "known_lengths": "history", "workload": {"tasks": 40}, "steps": 6}
    found = measures(config(scheduler={"dispatch": {"look_ahead": 40}}, simulator=simulator))["asynchronous sjf"]
    assert found.first_samples_length_ratio and found.first_samples_length_ratio < 0.7


def test_a_refill_after_an_update_takes_as_long_as_its_answers() -> None:
    even = {"median_tokens": 200.0, "between_sigma": 0.0, "within_sigma": 0.0}
    simulator = {"strategies": ["synchronous"], "workload": even, "steps": 4}
    found = measures(config(rollout={"servers": 1, "slots": 64}, simulator=simulator))["synchronous"]
    assert found.refill_s == pytest.approx(200 * 0.01)


def test_refills_that_never_came_do_not_count() -> None:
    whole = np.array([1.0, 2.0, 3.0, 4.0])
    assert refill(whole, [0.0, 2.5, 3.5], 2, since=0.0) == pytest.approx((2.0 + 1.5) / 2)
    assert refill(whole, [0.0, 2.5, 3.5], 2, since=1.0) == pytest.approx(1.5)
    assert refill(whole, [3.5], 2, since=0.0) is None


def test_the_end_of_a_run_is_the_simulators_own() -> None:
    found = measures(config(trainer={"total_samples": 1}, simulator={"steps": 4}))["asynchronous"]
    assert found.steps == 4


@pytest.mark.parametrize("name", ["strategies", "dispatch", "triggers"])
def test_nothing_to_compare_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="at least 1 item"):
        config(simulator={name: []})


def test_memory_bounds_what_is_active() -> None:
    roomy = measures(config(simulator={"steps": 6}))["asynchronous"]
    tight = measures(config(simulator={"steps": 6, "engine": {"kv_tokens": 2020}}))["asynchronous"]
    assert tight.samples_per_s < 0.7 * roomy.samples_per_s
    with pytest.raises(ConfigError, match="does not hold the longest sequence"):
        predict(config(simulator={"engine": {"kv_tokens": 2000}}))


def test_a_strategy_that_contradicts_the_rest_is_refused() -> None:
    simulator = {"strategies": ["one_step_off"], "trainer": {"step_s": 5.0}}
    settings = config(scheduler={"max_staleness": 0}, simulator=simulator)
    assert predict(settings).results[0].runs[0].staleness_max == 1, "it says itself what staleness it needs"
    with pytest.raises(ValueError, match="leaves nothing"):
        config(simulator={"steps": 2, "warmup_steps": 2})
