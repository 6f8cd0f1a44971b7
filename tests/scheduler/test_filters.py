"""Which groups are dropped, by whom and why; and what a bad filter does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from fake_ports import played

from penstock.alarms import Alarms
from penstock.config import ConfigError, GroupFilterConfig
from penstock.scheduler.failure_budget import FailureBudget, NothingToLearn
from penstock.scheduler.filters import Drop, Dropped, FilterChain, FilterFailed, FinishedGroup, Keep
from penstock.types import EpisodeId, StopReason, Task

TASK = Task(task_id="task-7", tag="train", index=7)


class EverySecond:
    """Keeps every second group, which takes a memory."""

    def __init__(self) -> None:
        self.num_seen = 0

    def decide(self, group: FinishedGroup) -> Keep | Drop:
        self.num_seen += 1
        return Keep() if self.num_seen % 2 else Drop(reason="every second one")

    def state_dict(self) -> dict[str, Any]:
        return {"num_seen": self.num_seen}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.num_seen = state["num_seen"]


class Raises:
    def decide(self, group: FinishedGroup) -> Keep | Drop:
        raise KeyError("difficulty")


class AnswersTrue:
    def decide(self, group: FinishedGroup) -> bool:
        return True


class NoFilter:
    pass


def group(rewards: Sequence[float], *, tokens: Sequence[int] = (), stops: Sequence[StopReason] = ()) -> FinishedGroup:
    episodes = [
        played(
            EpisodeId("train", 0, member, 0),
            reward=reward,
            response_tokens=tokens[member] if tokens else 8,
            stop_reason=stops[member] if stops else "terminated",
        )
        for member, reward in enumerate(rewards)
    ]
    return FinishedGroup(task=TASK, episodes=episodes)


def chain(*filters: GroupFilterConfig | str) -> FilterChain:
    return FilterChain([GroupFilterConfig(name=each) if isinstance(each, str) else each for each in filters])


def with_options(name: str, **options: Any) -> GroupFilterConfig:
    return GroupFilterConfig(name=name, options=options)


@pytest.mark.parametrize(
    ("config", "dropped", "kept", "reason"),
    [
        (with_options("zero_variance"), group([1, 1, 1]), group([0, 1, 1]), "all rewards are 1"),
        (
            with_options("over_long", max_tokens=9, max_share=0.5),
            group([0, 1, 1], tokens=[10, 10, 9]),
            group([0, 1], tokens=[10, 9]),
            "more than 50% of the answers are longer than 9 tokens",
        ),
        (
            with_options("stop_reason", max_share=0.0),
            group([0, 1], stops=["terminated", "max_length"]),
            group([0, 1]),
            "more than 0% of the members stopped for max_length",
        ),
        (with_options("score_range", low=0.25), group([0, 0, 0.5]), group([0, 0.5]), "the mean reward is below 0.25"),
        (with_options("score_range", high=0.75), group([0.5, 1.5]), group([0.5, 1]), "the mean reward is above 0.75"),
    ],
    ids=lambda value: value.name if isinstance(value, GroupFilterConfig) else "",
)
def test_what_each_drops(config: GroupFilterConfig, dropped: FinishedGroup, kept: FinishedGroup, reason: str) -> None:
    assert chain(config).decide(dropped) == Dropped(name=config.name, reason=reason)
    assert chain(config).decide(kept) is None


def test_without_a_filter_all_is_kept() -> None:
    assert chain().decide(group([0, 0])) is None


def test_the_first_that_drops_decides() -> None:
    filters = chain(with_options("score_range", low=0.1), "zero_variance")
    assert [filters.decide(group([reward, reward])).name for reward in (0.0, 1.0)] == ["score_range", "zero_variance"]


def test_a_filter_of_ones_own_goes_on_from_its_saved_state() -> None:
    name = f"{__name__}:EverySecond"
    filters = chain("zero_variance", name)
    assert filters.decide(group([0, 1])) is None
    successor = chain("zero_variance", name)
    successor.load_state_dict(filters.state_dict())
    assert successor.decide(group([0, 1])) == Dropped(name=name, reason="every second one")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (with_options("zero_varience"), "it is one of zero_variance, over_long, stop_reason, score_range, or package"),
        (with_options("over_long"), "scheduler.group_filter over_long with options {}: TypeError: "),
        (with_options("over_long", max_token=3), "max_token"),
        (
            with_options("stop_reason", reasons=["cut"]),
            "unknown stop reason cut: use terminated, truncated",
        ),
        (with_options("nowhere.to:BeFound"), "cannot be imported: ModuleNotFoundError"),
        (with_options(f"{__name__}:Absent"), "test_filters has no Absent; there are EverySecond"),
        (with_options(f"{__name__}:NoFilter"), "has no decide(group)"),
    ],
)
def test_what_is_no_filter_is_refused(config: GroupFilterConfig, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        chain(config)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", "raised KeyError on task-7: 'difficulty'"),
        ("AnswersTrue", "returned True for task-7: return Keep or Drop"),
    ],
)
def test_a_bad_filter_is_named(name: str, message: str) -> None:
    with pytest.raises(FilterFailed) as failure:
        chain(f"{__name__}:{name}").decide(group([0, 1]))
    assert f"{__name__}:{name} {message}" in str(failure.value)


def test_patience_ends_with_the_reasons_and_how_often_each_came() -> None:
    budget = FailureBudget(max_filtered=20, alarms=Alarms())
    hard, easy = (Dropped(name="zero_variance", reason=f"all rewards are {reward}") for reward in (0, 1))
    assert budget.filter_group(easy) is None and budget.filter_alarm() is None
    budget.keep_group()
    for _ in range(18):
        assert budget.filter_group(hard) is None
    assert budget.filter_group(easy) is None
    assert "19 groups in a row were filtered: 18 by zero_variance (all rewards are 0), 1 by" in str(
        budget.filter_alarm()
    )
    ended = budget.filter_group(easy)
    assert isinstance(ended, NothingToLearn)
    assert "20 groups in a row were filtered: 18 by zero_variance (all rewards are 0), 2 by zero_v" in str(ended)
    assert "scheduler.group_filter=[]" in str(ended)


def test_filtered_groups_in_a_row_name_those_that_failed_between_them() -> None:
    budget = FailureBudget(max_filtered=3, alarms=Alarms())
    dropped = Dropped(name="zero_variance", reason="all rewards are 0")
    budget.fail_group("KeyError: 1", command=None)
    budget.keep_group()
    budget.filter_group(dropped)
    assert "failed" not in str(budget.filter_alarm())
    budget.fail_group("KeyError: 2", command=None)
    assert str(budget.filter_group(dropped)) == "None"
    assert "2 groups in a row were filtered" in str(budget.filter_alarm())
    assert "; 1 more failed between them, the last with: KeyError: 2" in str(budget.filter_group(dropped))


def test_many_failed_groups_among_others_are_an_alarm_until_there_are_half_as_many() -> None:
    budget = FailureBudget(max_filtered=20, alarms=Alarms())
    for number in range(25):
        assert budget.failure_alarm() is None
        for _ in range(3):
            budget.complete_group()
        budget.fail_group(f"KeyError: {number}", command=None)
    alarm = str(budget.failure_alarm())
    assert alarm.startswith("25 of the latest 100 groups failed: repair the environment")
    assert alarm.endswith("the last error was: KeyError: 24")
    for _ in range(48):
        budget.complete_group()
    assert "13 of the latest 100" in str(budget.failure_alarm())
    for _ in range(4):
        budget.complete_group()
    assert budget.failure_alarm() is None
