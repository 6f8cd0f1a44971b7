"""The order of pending groups: what every policy promises, and what each one is for."""

import itertools
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import DispatchConfig
from penstock.scheduler.active_group import ActiveGroup
from penstock.scheduler.dispatch import DispatchDecision, DispatchPolicy
from penstock.scheduler.ledger import Ledger
from penstock.scheduler.order import Order
from penstock.types import Task

TASK = Task(task_id="t", tag="play", index=0)
POLICIES = ("fifo", "sjf", "ljf", "probe")
ENOUGH = 1000

seconds = st.floats(0, 1000, allow_nan=False).map(lambda value: round(value, 2))
tokens = st.floats(0, 4000, allow_nan=False).map(round).map(float)
arrivals = st.lists(st.tuples(seconds, tokens), min_size=1, max_size=30)


def pending(number: int, *, at: float = 0.0, tokens: float = 0.0, size: int = 4) -> ActiveGroup:
    return ActiveGroup(number=number, task=TASK, size=size, ledger=Ledger(), admitted_at=at, predicted_tokens=tokens)


def policy_of(
    name: str, *, look_ahead: int = 1000, aging_s: float = 60.0, max_wait_s: float = 1e6, groups: Sequence = ()
) -> DispatchPolicy:
    config = DispatchConfig.model_validate({"policy": name, "aging": f"{aging_s}s", "max_wait": f"{max_wait_s}s"})
    policy = DispatchPolicy(config, look_ahead=look_ahead)
    for group in groups:
        policy.push(group)
    return policy


def groups_of(arrived: Sequence[tuple[float, float]]) -> list[ActiveGroup]:
    return [pending(number, at=at, tokens=tokens) for number, (at, tokens) in enumerate(arrived)]


def take(policy: DispatchPolicy, now: float = 1000.0) -> DispatchDecision:
    decision = policy.pop(now=now, free=ENOUGH, may_start=True)
    assert decision is not None
    return decision


def drain(policy: DispatchPolicy, now: float = 1000.0) -> list[int]:
    """Group numbers in the order of dispatch; probes take as many tokens as were predicted."""
    order = []
    while len(policy):
        decision = take(policy, now)
        order.append(decision.group.number)
        if decision.part == "probe":
            policy.push_rest(decision.group, int(decision.group.predicted_tokens), now=now)
    return order


@given(arrivals, st.lists(st.tuples(st.sampled_from(POLICIES), st.integers(1, 40)), min_size=1, max_size=4))
def test_a_change_of_policy_loses_no_group_and_orders_all_that_wait(
    arrived: list[tuple[float, float]], changes: list[tuple[str, int]]
) -> None:
    groups = groups_of(arrived)
    policy, fresh = policy_of("fifo", groups=groups), None
    for name, look_ahead in changes:
        config = DispatchConfig.model_validate({"policy": name, "aging": "60s", "max_wait": "1000000s"})
        policy.change(config, look_ahead=look_ahead)
        policy.adapt(preference=1.0, trusted=True)
        fresh = policy_of(name, look_ahead=look_ahead, groups=groups)
    assert fresh is not None
    order = drain(policy)
    assert sorted(set(order)) == [group.number for group in groups]
    assert order == drain(fresh), "as if it had always been so"


class Model:
    """What `Order` must do, written to be obvious."""

    def __init__(self, order: Order[int], sign: int, aging_s: float, max_wait_s: float, look_ahead: int) -> None:
        self.order, self.sign, self.factor = order, sign, 1.0
        self.aging_s, self.max_wait_s, self.look_ahead = aging_s, max_wait_s, look_ahead
        self.waiting: list[tuple[float, int, float]] = []

    def next(self, now: float) -> tuple[int, bool]:
        window = sorted(self.waiting)[: self.look_ahead]
        if now - window[0][0] >= self.max_wait_s:
            return window[0][1], True
        scale = self.order.scale
        weight = self.sign * self.factor / scale if scale > 0 else 0.0
        return min(window, key=lambda entry: (weight * entry[2] + entry[0] / self.aging_s, entry))[1], False


@given(
    sign=st.sampled_from([-1, 0, 1]),
    aging_s=st.sampled_from([1.0, 60.0]),
    max_wait_s=st.sampled_from([5.0, 300.0, 1e6]),
    look_ahead=st.integers(1, 6),
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("push"), seconds, tokens),
            st.tuples(st.just("take"), seconds),
            st.tuples(st.just("adapt"), st.sampled_from([0.0, 0.5, 1.0, 4.0])),
        ),
        max_size=60,
    ),
)
def test_order_is_what_the_model_says(
    sign: int, aging_s: float, max_wait_s: float, look_ahead: int, actions: list[tuple]
) -> None:
    order = Order[int](sign=sign, aging=f"{aging_s}s", max_wait=f"{max_wait_s}s", look_ahead=look_ahead)
    model = Model(order, sign, aging_s, max_wait_s, look_ahead)
    for number, (action, *values) in enumerate(actions):
        if action == "push":
            order.push(number, number=number, since=values[0], tokens=values[1])
            model.waiting.append((values[0], number, values[1]))
        elif action == "adapt":
            order.adapt(values[0])
            model.factor = values[0]
        elif model.waiting:
            found = order.next(values[0])
            assert found is not None and (found[0].item, found[1]) == model.next(values[0])
            order.take(found[0], values[0])
            model.waiting = [entry for entry in model.waiting if entry[1] != found[0].item]
        assert len(order) == len(model.waiting)
        oldest = order.oldest()
        assert (oldest.item if oldest else None) == (min(model.waiting)[1] if model.waiting else None)


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=40)
@given(arrived=arrivals, look_ahead=st.integers(1, 40), chosen=st.lists(st.booleans(), max_size=80), max_wait_s=seconds)
def test_every_group_goes_exactly_once(
    name: str, arrived: list[tuple[float, float]], look_ahead: int, chosen: list[bool], max_wait_s: float
) -> None:
    policy, coming = policy_of(name, look_ahead=look_ahead, max_wait_s=max_wait_s + 0.1), groups_of(arrived)
    parts: list[tuple[int, str]] = []
    for pop in [*chosen, *[False] * len(coming)]:
        if pop and len(policy):
            decision = take(policy)
            parts.append((decision.group.number, decision.part))
            if decision.part == "probe":
                policy.push_rest(decision.group, 7, now=1000.0)
        elif coming:
            policy.push(coming.pop())
    while len(policy):
        decision = take(policy)
        parts.append((decision.group.number, decision.part))
        if decision.part == "probe":
            policy.push_rest(decision.group, 7, now=1000.0)
    expected = ("probe", "rest") if name == "probe" else ("whole",)
    assert sorted(parts) == sorted((number, part) for number in range(len(arrived)) for part in expected)
    assert policy.pop(now=1000.0, free=ENOUGH, may_start=True) is None


@pytest.mark.parametrize("name", ["fifo", "sjf", "ljf"])
@settings(max_examples=40)
@given(arrived=arrivals, now=seconds, max_wait_s=seconds, trusted=st.booleans())
def test_whoever_waited_too_long_goes_first(
    name: str, arrived: list[tuple[float, float]], now: float, max_wait_s: float, trusted: bool
) -> None:
    groups = groups_of(arrived)
    policy = policy_of(name, max_wait_s=max_wait_s + 0.1, groups=groups)
    policy.adapt(preference=1.0, trusted=trusted)
    oldest = min(groups, key=lambda group: (group.admitted_at, group.number))
    overdue = now - oldest.admitted_at >= max_wait_s + 0.1
    decision = take(policy, now)
    assert ("past max_wait" in decision.reason) == overdue
    if overdue:
        assert decision.group == oldest


@given(times=st.lists(seconds, min_size=1, max_size=30), length=tokens, preference=st.floats(0, 10))
def test_sjf_of_equal_predictions_is_fifo(times: list[float], length: float, preference: float) -> None:
    groups = groups_of([(at, length) for at in times])
    sjf = policy_of("sjf", groups=groups)
    sjf.adapt(preference=preference, trusted=True)
    assert drain(sjf) == drain(policy_of("fifo", groups=groups))


@pytest.mark.parametrize("name", ["sjf", "ljf"])
@settings(max_examples=40)
@given(arrived=arrivals, preference=st.floats(0, 10))
def test_untrusted_predictions_mean_fifo(name: str, arrived: list[tuple[float, float]], preference: float) -> None:
    groups = groups_of(arrived)
    policy = policy_of(name, groups=groups)
    policy.adapt(preference=preference, trusted=False)
    assert drain(policy) == drain(policy_of("fifo", groups=groups))
    again = policy_of(name, groups=groups)
    again.adapt(preference=preference, trusted=False)
    again.adapt(preference=1.0, trusted=True)
    assert drain(again) == drain(policy_of(name, groups=groups))


@given(
    short=st.floats(1, 500),
    more=st.just(0.0) | st.floats(1, 1e5),
    preference=st.floats(0.1, 8),
    aging_s=st.floats(1, 100),
    excess=st.sampled_from([0.9, 1.1]),
)
def test_aging_bounds_the_wait(short: float, more: float, preference: float, aging_s: float, excess: float) -> None:
    long = short + more
    scale = (long + short) / 2
    bound_s = aging_s * preference * (long - short) / scale
    groups = [pending(0, at=0.0, tokens=long), pending(1, at=bound_s * excess, tokens=short)]
    policy = policy_of("sjf", aging_s=aging_s, groups=groups)
    policy.adapt(preference=preference, trusted=True)
    passed = drain(policy)[0] == 1
    assert passed == (excess < 1 and more > 0)


@settings(max_examples=50)
@given(arrived=arrivals, low=st.floats(0, 8), more=st.floats(0, 8))
def test_stronger_preference_never_moves_a_longer_group_forward(
    arrived: list[tuple[float, float]], low: float, more: float
) -> None:
    groups = groups_of(arrived)
    weak, strong = (policy_of("sjf", groups=groups) for _ in range(2))
    weak.adapt(preference=low, trusted=True)
    strong.adapt(preference=low + more, trusted=True)
    before, after = ({number: place for place, number in enumerate(drain(policy))} for policy in (weak, strong))
    for one in groups:
        for other in groups:
            if one.predicted_tokens > other.predicted_tokens and before[one.number] > before[other.number]:
                assert after[one.number] > after[other.number]


def test_sjf_and_ljf_by_length() -> None:
    groups = groups_of([(0.0, 300), (0.0, 100), (0.0, 200)])
    assert drain(policy_of("sjf", groups=groups)) == [1, 2, 0]
    assert drain(policy_of("ljf", groups=groups)) == [0, 2, 1]
    assert drain(policy_of("fifo", groups=groups)) == [0, 1, 2]


def test_only_the_oldest_compete() -> None:
    groups = groups_of([(0.0, 300), (1.0, 200), (2.0, 1)])
    assert drain(policy_of("sjf", look_ahead=2, groups=groups)) == [1, 2, 0]


def test_a_retried_group_keeps_its_age() -> None:
    groups = [pending(number, at=float(number)) for number in range(4)]
    policy = policy_of("fifo", look_ahead=2, groups=groups)
    first = take(policy).group
    policy.push(first)
    assert drain(policy) == [0, 1, 2, 3]


def test_a_group_is_never_passed_over_for_its_size() -> None:
    policy = policy_of("sjf", groups=[pending(0, tokens=1, size=8), pending(1, tokens=99, size=2)])
    assert policy.pop(now=0.0, free=7, may_start=True) is None
    assert policy.pop(now=0.0, free=8, may_start=False) is None
    assert len(policy) == 2
    assert [take(policy).group.number for _ in range(2)] == [0, 1]


def test_reasons_name_their_inputs() -> None:
    policy = policy_of("sjf", max_wait_s=600, groups=[pending(0, at=1.0, tokens=412)])
    assert take(policy, 4.0).reason == "sjf: waited 3.000 s, 412 tokens predicted"
    policy.push(pending(1, tokens=5))
    policy.adapt(preference=1.0, trusted=False)
    assert take(policy, 4.0).reason.endswith("not trusted: first come, first served")
    policy.push(pending(2, tokens=5))
    assert take(policy, 700.0).reason == "sjf: waited 700.000 s, 5 tokens predicted; the oldest, and past max_wait"


def test_waits_in_units_of_the_queues_own_waits() -> None:
    """Twenty groups wait at any time, one starts each second: by Little's law a group waits twenty seconds."""
    for scale in (0.01, 1.0, 100.0):
        order = Order[int](sign=1, aging="1x", max_wait="3x", look_ahead=1000)
        draw, waits, number = random.Random(0), [], 0
        for second in range(2000):
            while len(order) < 20:
                order.push(number, number=number, since=second * scale, tokens=draw.lognormvariate(5, 1))
                number += 1
            following = order.next(second * scale)
            assert following is not None
            waits.append(second * scale - following[0].since)
            order.take(following[0], second * scale)
        assert order.aging_s == pytest.approx(20 * scale, rel=0.5)
        assert order.max_wait_s == pytest.approx(3 * 20 * scale, rel=0.5)
        assert max(waits[100:]) <= 4 * 20 * scale


def test_before_the_first_waits_nothing_is_overdue() -> None:
    order = Order[int](sign=1, aging="1x", max_wait="3x", look_ahead=10)
    for number, length in enumerate([300.0, 100.0, 200.0]):
        order.push(number, number=number, since=0.0, tokens=length)
    following = order.next(1e9)
    assert following is not None and (following[0].item, following[1]) == (1, False)


def test_the_oldest_wait() -> None:
    policy = policy_of("ljf")
    assert policy.oldest_wait_s(5.0) == 0.0
    policy.push(pending(0, at=3.0))
    policy.push(pending(1, at=1.0))
    assert policy.oldest_wait_s(5.0) == 4.0


def test_forced_pops_leave_nothing_behind() -> None:
    draw = random.Random(0)
    policy = policy_of("sjf", max_wait_s=1e-9)
    order = []
    for number in range(6000):
        policy.push(pending(number, at=float(number), tokens=draw.random()))
        if number >= 100:
            order.append(take(policy, 1e9).group.number)
    assert order == list(range(5900))


@pytest.mark.parametrize("preference", [-1.0, float("nan")])
def test_senseless_preferences_are_refused(preference: float) -> None:
    with pytest.raises(ValueError, match="cannot count"):
        policy_of("sjf").adapt(preference=preference, trusted=True)


def test_probes_go_first_then_rests_longest_probe_first() -> None:
    policy = policy_of("probe", groups=[pending(number, at=float(number)) for number in range(3)])
    probes = [take(policy, 10.0) for _ in range(3)]
    assert [(probe.group.number, probe.part) for probe in probes] == [(0, "probe"), (1, "probe"), (2, "probe")]
    for probe, length in zip(probes, (50, 500, 5), strict=True):
        policy.push_rest(probe.group, length, now=10.0)
    policy.push(pending(3, at=10.0))
    decisions = [take(policy, 10.0) for _ in range(4)]
    assert [(each.group.number, each.part) for each in decisions] == [
        (3, "probe"),
        (1, "rest"),
        (0, "rest"),
        (2, "rest"),
    ]
    assert "500 tokens in the probe" in decisions[1].reason


def test_rests_may_run_when_nothing_may_start_and_need_room_for_all_but_one() -> None:
    policy = policy_of("probe", groups=[pending(0, size=4), pending(1, size=4)])
    policy.push_rest(take(policy).group, 9, now=1000.0)
    assert policy.pop(now=1000.0, free=2, may_start=False) is None
    decision = policy.pop(now=1000.0, free=3, may_start=False)
    assert decision is not None and decision.part == "rest"
    assert policy.pop(now=1000.0, free=3, may_start=False) is None
    assert policy.pop(now=1000.0, free=0, may_start=True) is None


def test_a_rest_that_waited_too_long_goes_before_probes() -> None:
    policy = policy_of("probe", max_wait_s=30.0, groups=[pending(0), pending(1, at=100.0), pending(2, at=100.0)])
    probe = take(policy, 100.0)
    policy.push_rest(probe.group, 9, now=100.0)
    assert take(policy, 129.0).part == "probe"
    assert policy.oldest_wait_s(130.0) == 30.0
    overdue = take(policy, 130.0)
    assert overdue.part == "rest" and "past max_wait" in overdue.reason


def test_an_untrusted_probe_does_not_order_the_rests() -> None:
    policy = policy_of("probe", groups=[pending(number, at=float(number)) for number in range(3)])
    probes = [take(policy, 10.0 + number) for number in range(3)]
    for probe in probes:
        policy.push_rest(probe.group, 10 * probe.group.number, now=12.0)
    policy.adapt(preference=1.0, trusted=False)
    assert [take(policy, 20.0).group.number for _ in range(3)] == [0, 1, 2]


def test_a_group_of_one_needs_no_probe() -> None:
    assert take(policy_of("probe", groups=[pending(0, size=1)])).part == "whole"


@pytest.mark.parametrize("look_ahead", [3, 1000])
def test_better_predictions_change_the_order_of_what_waits(look_ahead: int) -> None:
    waiting = [pending(number, tokens=100.0) for number in range(6)]
    policy = policy_of("sjf", look_ahead=look_ahead, groups=waiting)
    policy.revise({0: 900.0, 2: 5.0, 5: 1.0})
    assert sorted(group.number for group in policy.pending()) == list(range(6))
    assert drain(policy) == ([5, 2, 1, 3, 4, 0] if look_ahead > 6 else [2, 1, 3, 5, 4, 0])


@given(arrived=arrivals, later=st.lists(tokens, min_size=30, max_size=30))
def test_revised_groups_are_ordered_as_if_they_had_come_like_that(
    arrived: list[tuple[float, float]], later: list[float]
) -> None:
    revised = policy_of("sjf", groups=groups_of(arrived))
    revised.revise(dict(enumerate(later)))
    fresh = groups_of([(at, tokens) for (at, _), tokens in zip(arrived, later, strict=False)])
    scale = sum(group.predicted_tokens for group in fresh) / len(fresh)

    def score(group: ActiveGroup) -> float:
        return (group.predicted_tokens / scale if scale else 0.0) + group.admitted_at / 60.0

    scores = {group.number: score(group) for group in fresh}
    taken = drain(revised)
    assert sorted(taken) == sorted(scores)
    assert all(scores[a] <= scores[b] + 1e-9 for a, b in itertools.pairwise(taken))
