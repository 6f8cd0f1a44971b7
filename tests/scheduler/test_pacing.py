"""How many groups may start: single decisions, and whole runs in which groups finish, are filtered and are trained."""

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.scheduling import SchedulerConfig
from penstock.scheduler.pacing import PacingDecision, PacingState, pace


@dataclass(frozen=True)
class Policy:
    """The configured pacing, for steps of `batch` groups."""

    config: SchedulerConfig
    batch: int

    def decide(self, seen: PacingState) -> PacingDecision:
        return pace(self.config, msgspec.structs.replace(seen, groups_per_step=self.batch))


def policy(mode: str, batch: int = 4, **options: Any) -> Policy:
    if mode in ("synchronous", "colocated"):
        options = {"max_staleness": 0} | options
    return Policy(SchedulerConfig(**{"mode": mode} | options), batch)


def state(*, playing: int = 0, ready: int = 0, unserved: int = 0, **others: Any) -> PacingState:
    return PacingState(
        groups_per_step=4,
        num_playing=playing,
        num_ready=ready,
        num_unserved=unserved,
        **{"num_leftovers": 0} | others,
    )


ASYNCHRONOUS, ONE_STEP_OFF, SYNCHRONOUS = policy("asynchronous"), policy("one_step_off"), policy("synchronous")
SHORT_ROUNDS = policy("colocated", over_sampling=1.5, leftovers="restart")


@pytest.mark.parametrize(
    ("subject", "seen", "num_groups"),
    [
        (ASYNCHRONOUS, state(), 12),
        (ASYNCHRONOUS, state(playing=5, ready=2, unserved=4), 1),
        (ASYNCHRONOUS, state(playing=9, ready=2, unserved=4), 0),
        (ONE_STEP_OFF, state(), 4),
        (ONE_STEP_OFF, state(playing=4), 0),
        (ONE_STEP_OFF, state(playing=1, ready=2), 1),  # one was filtered
        (ONE_STEP_OFF, state(unserved=4), 4),  # the next batch while this one is trained
        (ONE_STEP_OFF, state(ready=4), 4),
        (ONE_STEP_OFF, state(ready=4, unserved=4), 0),  # two steps off
        (ONE_STEP_OFF, state(playing=1, ready=2, unserved=4), 1),
        (ONE_STEP_OFF, state(ready=3, unserved=4), 1),  # the last one playing was filtered
        (SYNCHRONOUS, state(), 4),
        (SYNCHRONOUS, state(playing=2, ready=1), 1),
        (SYNCHRONOUS, state(ready=4), 0),
        (SYNCHRONOUS, state(unserved=4), 0),
        (policy("colocated", over_sampling=1.3, max_staleness=1), state(playing=1), 5),
        (policy("colocated", 10, over_sampling=1.1, max_staleness=1), state(), 11),
        (SHORT_ROUNDS, state(num_leftovers=3), 6),
        (SHORT_ROUNDS, state(ready=4, num_leftovers=5), 0),
    ],
)
def test_one_decision(subject: Policy, seen: PacingState, num_groups: int) -> None:
    decision = subject.decide(seen)
    assert (decision.num_groups, decision.leftovers_only) == (num_groups, False)
    assert decision.reason


def test_a_whole_batch_of_leftovers_is_a_round_of_its_own() -> None:
    assert SHORT_ROUNDS.decide(state(num_leftovers=5)) == PacingDecision(
        num_groups=4, leftovers_only=True, reason="a round of leftovers: 0 of 4 started, 5 wait"
    )
    under_way = state(playing=2, ready=1, num_leftovers=1, playing_leftovers=True)
    found = SHORT_ROUNDS.decide(under_way)
    assert (found.num_groups, found.leftovers_only) == (1, True)
    none_left = state(playing=2, ready=1, playing_leftovers=True)
    found = SHORT_ROUNDS.decide(none_left)
    assert (found.num_groups, found.leftovers_only) == (1, False)  # not three: no over-sampling


COUNTS = st.builds(
    state,
    playing=st.integers(0, 9),
    ready=st.integers(0, 9),
    unserved=st.integers(0, 9),
    num_leftovers=st.integers(0, 9),
    playing_leftovers=st.booleans(),
)
POLICIES = st.one_of(
    st.builds(policy, st.just("asynchronous"), st.integers(1, 9), max_staleness=st.integers(0, 4)),
    st.builds(policy, st.just("one_step_off"), st.integers(1, 9)),
    st.builds(policy, st.sampled_from(["synchronous", "colocated"]), st.integers(1, 9)),
    st.builds(
        policy,
        st.just("colocated"),
        st.integers(1, 9),
        over_sampling=st.floats(1.01, 3.0),
        leftovers=st.sampled_from(["resume", "restart"]),
        max_staleness=st.just(1),
    ),
)


@given(POLICIES, COUNTS)
def test_what_cannot_go_on_by_itself_may_start(subject: Policy, seen: PacingState) -> None:
    found = subject.decide(seen)
    batch = subject.batch
    assert found.num_groups >= 0 and found.reason
    if found.leftovers_only:
        assert found.num_groups <= seen.num_leftovers
    if not seen.num_playing and seen.num_ready < batch and not seen.num_unserved:
        assert found.num_groups > 0
    if subject.config.mode == "one_step_off":
        assert seen.num_in_flight + found.num_groups <= max(2 * batch, seen.num_in_flight)
    if subject.config.mode == "asynchronous":
        bound = (subject.config.max_staleness + 1) * batch
        assert seen.num_in_flight + found.num_groups <= max(bound, seen.num_in_flight)


@dataclass
class Group:
    version: int
    leftover: bool = False


@dataclass
class Run:
    """A run reduced to counts: what plays ends in any order, the learner takes groups in the order they were ready."""

    policy: Policy
    chance: random.Random
    filtered: float
    whole_batches: bool = True
    playing: list[Group] = field(default_factory=list)
    ready: list[Group] = field(default_factory=list)
    training: list[Group] = field(default_factory=list)
    unserved: list[Group] = field(default_factory=list)
    leftovers: int = 0
    served: int = 0
    trained: int = 0
    staleness: list[int] = field(default_factory=list)
    most_in_flight: int = 0

    @property
    def alternates(self) -> bool:
        return self.policy.config.mode in ("synchronous", "colocated")

    def state(self) -> PacingState:
        return state(
            playing=len(self.playing),
            ready=len(self.ready),
            unserved=len(self.training) + len(self.unserved),
            num_leftovers=self.leftovers,
            playing_leftovers=any(group.leftover for group in self.playing),
        )

    def start(self) -> None:
        """Everything that may start, one by one or as many at once as the decision allows."""
        while (found := self.policy.decide(self.state())).num_groups:
            count = found.num_groups if self.chance.random() < 0.5 else 1
            if found.leftovers_only:
                self.leftovers -= count
            self.playing += [Group(self.served, found.leftovers_only) for _ in range(count)]
            self.most_in_flight = max(self.most_in_flight, self.state().num_in_flight)
        if self.policy.config.mode == "one_step_off":
            assert self.state().num_in_flight % self.policy.batch == 0, "a round that is not whole"

    def turn(self) -> None:
        """One of the things that can happen now; the run is stuck if there is none."""
        self.start()
        missing = self.policy.batch - len(self.training)
        can = []
        if self.playing and not (self.alternates and (self.training or self.unserved)):
            can += [self.end] * 3
        if missing and not self.unserved and self.ready and (len(self.ready) >= missing or not self.whole_batches):
            can.append(self.take)
        if not missing:
            can.append(self.step)
        if self.unserved:
            can.append(self.serve)
        assert can, f"stuck: {self.state()}"
        self.chance.choice(can)()

    def end(self) -> None:
        group = self.playing.pop(self.chance.randrange(len(self.playing)))
        if self.chance.random() >= self.filtered:
            self.ready.append(group)

    def take(self) -> None:
        count = self.policy.batch - len(self.training)
        if not self.whole_batches:
            count = self.chance.randint(1, min(count, len(self.ready)))
        self.training += self.ready[:count]
        del self.ready[:count]
        if self.alternates and self.policy.config.leftovers == "restart":
            assert not any(group.leftover for group in self.playing), "cut off twice"
            self.leftovers += len(self.playing)
            self.playing.clear()

    def step(self) -> None:
        self.staleness += [self.trained - group.version for group in self.training]
        self.unserved, self.training = self.training, []
        self.trained += 1
        if self.policy.config.max_staleness == 0:
            self.ready.clear()  # swept

    def serve(self) -> None:
        self.unserved, self.served = [], self.trained


def run(subject: Policy, seed: int, filtered: float, *, whole_batches: bool = True) -> Run:
    world = Run(subject, random.Random(seed), filtered, whole_batches)
    while world.trained < 12:
        world.turn()
    return world


SEEDS, FILTERED, BATCHES = st.integers(0, 2**32), st.sampled_from([0.0, 0.3, 0.7]), st.integers(1, 6)
RUNS = settings(max_examples=40, deadline=None)


@RUNS
@given(SEEDS, FILTERED, BATCHES, st.integers(0, 3), st.booleans())
def test_asynchronous_keeps_its_capacity(seed: int, filtered: float, batch: int, eta: int, whole: bool) -> None:
    world = run(policy("asynchronous", batch, max_staleness=eta), seed, filtered, whole_batches=whole)
    assert world.most_in_flight == (eta + 1) * batch


@RUNS
@given(SEEDS, FILTERED, BATCHES, st.booleans())
def test_one_step_off_is_at_most_one_step_off(seed: int, filtered: float, batch: int, whole: bool) -> None:
    world = run(policy("one_step_off", batch), seed, filtered, whole_batches=whole)
    assert world.most_in_flight <= 2 * batch
    assert max(world.staleness) <= 1


@RUNS
@given(SEEDS, FILTERED, BATCHES, st.sampled_from(["synchronous", "colocated"]))
def test_alternating_modes_are_on_policy(seed: int, filtered: float, batch: int, mode: str) -> None:
    world = run(policy(mode, batch), seed, filtered)
    assert world.most_in_flight == batch
    assert set(world.staleness) == {0}


@RUNS
@given(SEEDS, FILTERED, BATCHES, st.floats(1.01, 3.0))
def test_over_sampling_that_resumes_starts_no_more_than_it_says(
    seed: int, filtered: float, batch: int, over_sampling: float
) -> None:
    subject = policy("colocated", batch, over_sampling=over_sampling, max_staleness=1)
    assert run(subject, seed, filtered).most_in_flight <= over_sampling * batch + 1


@RUNS
@given(SEEDS, FILTERED, BATCHES, st.floats(1.01, 3.0))
def test_leftovers_that_start_again_are_never_cut_off_again(
    seed: int, filtered: float, batch: int, over_sampling: float
) -> None:
    world = run(policy("colocated", batch, over_sampling=over_sampling, leftovers="restart"), seed, filtered)
    assert set(world.staleness) == {0}
    assert world.leftovers < batch + over_sampling * batch
