"""The search of better settings, and simulated runs that tune themselves by it."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import pytest

from penstock.config import Config, WorkloadConfig
from penstock.config.tunable import movable, settings_of
from penstock.ports.settings_search import Answer, PlayedGroup, Question
from penstock.simulator import search as module
from penstock.simulator.fitting import fit_calls
from penstock.simulator.model_searcher import ModelSearcher
from penstock.simulator.search import Search, answer
from penstock.simulator.simulated_run import Simulation, simulate
from penstock.simulator.trace import open_workload
from penstock.simulator.workload import LogNormalWorkload
from penstock.types import EpisodeId, EpisodeSummary

SLOW_TOOLS = {"median_tokens": 60.0, "max_tokens": 400, "turns": 4, "tool_median_s": 3.0, "tool_sigma": 1.2}
EVEN = {"median_tokens": 60.0, "max_tokens": 400, "within_sigma": 0.1, "between_sigma": 0.1}


def config(workload: Mapping[str, Any] = SLOW_TOOLS, *, steps: int = 40, **scheduler: Any) -> Config:
    return Config.model_validate(
        {
            "env": {"group_size": 4, "max_new_tokens": 400, "max_turns": 4, "episode_timeout_s": 1e9},
            "model": {"max_context": 512},
            "data": {"eval_tasks": 0},
            "rollout": {"slots": 16},
            "trainer": {"groups_per_step": 4, "steps": steps, "checkpoint_every": 1000},
            "scheduler": {"group_filter": [], "early_stop": None, **scheduler},
            "simulator": {
                "engine": {"step_s": 0.01, "sequence_s": 0.0005, "update_s": 0.2},
                "trainer": {"token_s": 1e-5, "step_s": 0.2},
                "workload": workload,
                "strategies": ["configured"],
                "steps": steps,
            },
        }
    )


def search_of(settings: Config, **more: Any) -> Search:
    def workload(num_members: int, seed: int) -> LogNormalWorkload:
        return LogNormalWorkload(settings.simulator.workload, group_size=num_members, seed=seed)

    words = {"movable": movable(settings), "max_staleness": settings.scheduler.max_staleness, **more}
    return Search(config=settings, workload=workload, **words)


def test_stragglers_are_worth_redundant_members() -> None:
    found = search_of(config()).run()
    assert found.changes["redundancy"] > 0 and found.gain > 1.1
    assert found.predicted["predicted_samples_per_s"] > found.predicted["predicted_samples_per_s_now"]
    assert f"{found.num_simulated} simulated runs" in found.reason


@pytest.mark.integration
@pytest.mark.long
def test_a_run_without_a_bottleneck_keeps_its_settings() -> None:
    search = search_of(config(EVEN, max_staleness=1))
    found = search.run()
    assert not found.changes and found.gain == 1.0 and "no setting is" in found.reason


def test_only_what_may_move_moves() -> None:
    search = search_of(config(), movable=("max_running",))
    search.run()
    assert {name for each in search.tried for name in each.changes} == {"max_running"}


def test_a_search_with_little_time_finds_that_far_more_episodes_should_run() -> None:
    """Slow tools: most episodes wait, and four times as many keep the servers busy."""
    settings = config(SLOW_TOOLS | {"tool_sigma": 0.1, "tool_median_s": 10.0}, max_running=16, max_staleness=8)
    search = search_of(settings, movable=("max_running",))
    found = search.run()
    assert found.changes == {"max_running": 64}
    tried = [each.changes["max_running"] for each in search.tried]
    assert tried[:2] == [32, 64] and min(tried) > 16, "where more help, fewer are not simulated"


@pytest.mark.integration
@pytest.mark.long
def test_no_setting_leaves_its_bounds() -> None:
    settings = config(max_staleness=3)
    search = search_of(settings, knows_lengths=True, lengths=range(1, 300))
    search.run()
    assert len(search.tried) > 10
    for each in search.tried:
        assert 1 <= each.changes.get("max_staleness", 3) <= 3
        assert each.measures.staleness_max <= 3
        assert settings.env.num_members <= each.changes.get("max_running", 32) <= settings.max_open
        assert each.measures.length_ks_trained_population <= module.critical_distance(40, 40)


@pytest.mark.integration
@pytest.mark.long
def test_what_was_rejected_is_not_proposed_again() -> None:
    first = search_of(config()).run()
    again = search_of(config(), rejected=[first.changes])
    again.run()
    assert again.tried and not any(first.changes.items() <= each.changes.items() for each in again.tried)


def test_distrusted_promises_count_less() -> None:
    plain = search_of(config(), movable=("redundancy",)).run()
    distrusted = search_of(config(), movable=("redundancy",), trust={"redundancy": 0.1}).run()
    assert plain.gain > 1.1 and distrusted.gain < 1 + 0.2 * (plain.gain - 1)


@pytest.mark.integration
@pytest.mark.long
def test_samples_do_not_become_staler_when_they_may_not() -> None:
    search = search_of(config(), may_be_staler=False)
    search.run()
    (now,) = {each.measures.staleness_mean for each in [search._simulate({}, search.config.seed)]}
    assert all(each.measures.staleness_mean <= now for each in search.tried)


def test_a_search_ends_when_its_processor_time_is_spent() -> None:
    found = search_of(config(), max_cpu_s=1e-6).run()
    assert found.num_simulated <= 3


def test_a_search_that_is_cut_short_keeps_the_best_change_so_far() -> None:
    """On a clock that goes on by one with each simulated group."""
    names = ("redundancy", "max_running", "dispatch", "max_staleness")
    clock = itertools.count(1)
    whole = search_of(config(), movable=names, clock=lambda: next(clock)).run()
    assert not whole.was_cut and not whole.left_out
    answers = {}
    for share in (0.02, 0.5, 0.9):
        clock = itertools.count(1)
        most = share * whole.cpu_s
        answers[share] = search_of(config(), movable=names, clock=lambda clock=clock: next(clock), max_cpu_s=most).run()
        assert answers[share].was_cut and answers[share].cpu_s < 1.1 * most + 10
    assert not answers[0.02].changes and answers[0.02].left_out == list(names)
    assert answers[0.5].changes and 0 < len(answers[0.5].left_out) < len(names)
    assert answers[0.9].gain >= answers[0.5].gain > 1.05


def test_a_search_does_not_wait_for_a_simulation_that_takes_too_long() -> None:
    """Nearly all groups are filtered, so a step needs thousands of them."""
    settings = config({**EVEN, "reward_probability": 0.0005}, group_filter=["zero_variance"])
    found = search_of(settings, max_cpu_s=0.3).run()
    assert not found.changes and found.reason.startswith("the search has used its 0.3 s of processor time")
    assert found.cpu_s < 3


def test_the_learner_s_times_come_back() -> None:
    calls = [
        (4, 1000 * (1 + n % 3), n % 2 == 0, 0.1 + 2e-5 * 1000 * (1 + n % 3) + 0.5 * (n % 2 == 0)) for n in range(12)
    ]
    found = fit_calls(calls)
    assert (found.call_s, found.token_s, found.step_s) == pytest.approx((0.1, 2e-5, 0.5))


def played(settings: Config, episode: Callable[[int, int], EpisodeSummary], count: int = 64) -> Question:
    groups = [PlayedGroup(task_id=str(n), episodes=[episode(n, member) for member in range(4)]) for n in range(count)]
    return Question(
        settings=settings_of(settings),
        movable=movable(settings),
        groups=groups,
        calls=[(8, 2400, True, 0.3)] * 8,
        update_s=0.1,
        trust={},
    )


def episode(group: int, member: int) -> EpisodeSummary:
    """The last member of every fourth group waits a minute for its tools."""
    return EpisodeSummary(
        episode=EpisodeId("main", group, member, 0),
        status="completed",
        reward=float(member % 2),
        num_turns=3,
        prompt_tokens=40,
        response_tokens=random.Random(f"{group}.{member}").randint(50, 70),
        env_s=60.0 if member == 3 and group % 4 == 0 else 1.0,
        reward_s=0.5,
        seconds=65.0,
    )


def test_a_question_holds_all_that_a_search_needs() -> None:
    settings = config()
    question = played(settings, episode)
    sent = msgspec.msgpack.decode(msgspec.msgpack.encode(question), type=Question)
    found = answer(settings, sent, settings.simulator.engine)
    assert found.changes.get("redundancy", 0) > 0, found


def test_a_run_of_a_mixture_can_be_searched() -> None:
    entries = {tag: {"name": "guess_number", "data": {"source": "seeds"}} for tag in ("game", "words")}
    tree = config(SLOW_TOOLS).model_dump(mode="json")
    settings = Config.model_validate({**tree, "env": {**tree["env"], "mixture": entries}})

    def of_tag(group: int, member: int) -> EpisodeSummary:
        tag = ("game", "words")[group % 2]
        return msgspec.structs.replace(episode(group, member), episode=EpisodeId(tag, group, member, 0))

    found = answer(settings, played(settings, of_tag), settings.simulator.engine)
    assert found.num_simulated > 2, found.reason


def test_a_run_that_has_played_nothing_is_told_so() -> None:
    settings = config()
    assert answer(settings, played(settings, episode, count=0), settings.simulator.engine).changes == {}


def tuned_run(settings: Config, monkeypatch: pytest.MonkeyPatch) -> tuple[Simulation, list[tuple[str, Any]]]:
    said: list[tuple[str, Any]] = []
    monkeypatch.setattr(
        Simulation,
        "decision",
        lambda run, decider, reason, inputs: decider == "tuning" and said.append((reason, inputs)),
    )
    size = settings.env.num_members + module.MAX_REDUNDANCY
    workload = open_workload(settings.simulator.workload, group_size=size, seed=0)
    return simulate(settings, workload, seed=0, searcher=ModelSearcher(settings)), said


def rate(run: Simulation) -> float:
    """Samples per second in the second half."""
    half, last = run.marks[len(run.marks) // 2], run.marks[-1]
    return (last.num_samples - half.num_samples) / (last.time - half.time)


@pytest.mark.integration
@pytest.mark.long
def test_a_run_with_stragglers_makes_itself_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    fixed, nothing = tuned_run(config(), monkeypatch)
    assert not nothing
    tuned, said = tuned_run(config(tuning="auto"), monkeypatch)
    assert rate(tuned) > 1.15 * rate(fixed)
    (change,) = [inputs["adapted"] for _, inputs in said if "adapted" in inputs][:1]
    assert change["env.redundancy"][0] == 0
    assert any(reason.startswith("kept") for reason, _ in said)
    tuned.system.scheduler.ledger.check()


def test_a_model_that_promises_too_much_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Boaster(ModelSearcher):
        async def search(self, question: Question) -> Answer:
            return Answer(changes={"max_running": 8}, gain=3.0, reason="3 times the speed predicted")

    settings = config(EVEN, tuning="auto")
    monkeypatch.setitem(globals(), "ModelSearcher", Boaster)
    run, said = tuned_run(settings, monkeypatch)
    assert any(reason.startswith("undone") for reason, _ in said)
    assert run.system.scheduler.tuning.in_force["max_running"] == settings.max_running
    assert run.system.scheduler._dispatcher.capacity.max_running == settings.max_running


def test_a_trace_of_slow_rewards_is_simulated() -> None:
    """With one group in flight, its time is that of generation, reward and training."""
    slow = {
        "median_tokens": 50.0,
        "within_sigma": 0.0,
        "between_sigma": 0.0,
        "reward_median_s": 30.0,
        "reward_sigma": 0.0,
    }
    settings = config({**slow, "max_tokens": 400}, steps=4)
    run = simulate(settings, LogNormalWorkload(WorkloadConfig(**slow), group_size=4, seed=0), seed=0)
    assert min(run.workers.whole_at) > 30.0
    assert run.experience.played_s / len(run.experience.played_lengths) > 30.0
