"""Every lease ends in exactly one trajectory, whatever environment, servers, scheduler and the clock do."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from fake_ports import leased
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.config import Config
from penstock.envs.manager import EnvManager
from penstock.model.chat import ChatTokenizer
from penstock.ports.episode_manager import ManagedEpisode
from penstock.rollout.session import RolloutError
from penstock.samples import Segment, Trajectory, VersionSpan
from penstock.simulator.clock import run_virtual
from penstock.types import EpisodeId, Sampling, SegmentGrant, Task

DEADLINE_S, TURN_TIMEOUT_S = 10.0, 4.0
MISCHIEF = (
    "nothing",
    "raises",
    "exits",
    "cancels itself",
    "hangs",
    "dawdles",
    "shows nothing",
    "shows too much",
    "rewards with nan",
    "returns too little",
    "ends",
    "is cut short",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What the members' environments, and whatever else they meet, will do."""

    resets: list[str]
    steps: list[list[str]]
    """Of each member, one per step; then it ends."""
    closes: list[str]
    answers: list[str]
    """Of the server, one per request; then they are quick."""
    cancelled_at_s: float | None
    managed: list[str] = field(default_factory=list)
    """Of the members' own managers, one per turn; none: the built-in loop plays."""


class Misbehaving:
    """Does, in turn, what its member's plan says."""

    made = 0
    plan: Plan
    closed: Counter[int]

    def __init__(self, task: Task) -> None:
        self._member = Misbehaving.made
        Misbehaving.made += 1
        self._steps = iter(self.plan.steps[self._member])

    async def reset(self, seed: int) -> Any:
        return await _mischief(self.plan.resets[self._member], ("hello", {}))

    async def step(self, action: str) -> Any:
        what = next(self._steps, "ends")
        ends = ("", 1.0, what == "ends", what == "is cut short", {})
        return await _mischief(what, ends)

    async def close(self) -> None:
        self.closed[self._member] += 1
        await _mischief(self.plan.closes[self._member], None)


class MisbehavingManager:
    """Does what the plan says between the turns of an episode."""

    async def play(self, episode: ManagedEpisode) -> None:
        mischief = iter(Misbehaving.plan.managed)
        observation, _ = await episode.reset()
        while True:
            await _mischief(next(mischief, "nothing"), None)
            answer = await episode.answer([{"role": "user", "content": str(observation)}])
            match next(mischief, "nothing"):
                case "ends":
                    return
                case "shows nothing":
                    await episode.answer([])
                case "returns too little":
                    episode.train_only(answer, [])
                case "rewards with nan":
                    episode.earn(answer, float("nan"))
            outcome = await episode.step(answer)
            if outcome.terminated or outcome.truncated:
                return
            observation = outcome.observation


async def _mischief(what: str, usual: Any) -> Any:
    match what:
        case "raises":
            raise KeyError("broke")
        case "exits":
            raise SystemExit(1)
        case "cancels itself":
            raise asyncio.CancelledError
        case "hangs":
            await asyncio.Event().wait()
        case "dawdles":
            await asyncio.sleep(1.5)
        case "shows nothing":
            return (None, *usual[1:]) if usual else None
        case "shows too much":
            return ("x" * 2000, *usual[1:]) if usual else None
        case "rewards with nan":
            return ("", float("nan"), False, False, {})
        case "returns too little":
            return ("",)
    return usual


class Servers:
    """Answer at once, or late, or never, or refuse, or give way."""

    def __init__(self, chat: ChatTokenizer, answers: Sequence[str]) -> None:
        self._tokens = [*chat.encode("ok"), chat.eos_ids[0]]
        self._answers = iter(answers)

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        match next(self._answers, "quick"):
            case "late":
                await asyncio.sleep(3.0)
            case "never":
                await asyncio.Event().wait()
            case "refuses":
                raise RolloutError("no server answers")
            case "gives way":
                return [Segment(token_ids=[], logprobs=[], spans=[], finish_reason="abort") for _ in grants]
        return [self._segment(grant) for grant in grants]

    def _segment(self, grant: SegmentGrant) -> Segment:
        tokens = self._tokens[: grant.max_tokens]
        return Segment(
            token_ids=tokens,
            logprobs=[-1.0] * len(tokens),
            spans=[VersionSpan(0, 0, len(tokens))],
            finish_reason="stop" if len(tokens) == len(self._tokens) else "length",
        )


class Grants:
    """Given after a while."""

    async def request(self, so_far: Trajectory, *, unfinished: bool, num_tokens: int) -> SegmentGrant:
        await asyncio.sleep(0.5)
        return SegmentGrant(episode=so_far.episode, max_tokens=2)

    def generated(self, episode: EpisodeId, *, num_tokens: int) -> None:
        raise AssertionError("nothing is scored here")


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, Plan]:
    size = draw(st.integers(1, 4))
    each = st.lists(st.sampled_from(MISCHIEF), min_size=size, max_size=size)
    steps = st.lists(st.sampled_from(MISCHIEF), max_size=4)
    plan = Plan(
        resets=draw(each),
        steps=draw(st.lists(steps, min_size=size, max_size=size)),
        closes=draw(each),
        answers=draw(st.lists(st.sampled_from(["quick", "late", "never", "refuses", "gives way"]), max_size=4)),
        cancelled_at_s=draw(st.none() | st.floats(0.0, 15.0)),
        managed=draw(st.lists(st.sampled_from(MISCHIEF), max_size=6)),
    )
    return size, plan


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(plans())
def test_one_trajectory_per_lease(chat: ChatTokenizer, drawn: tuple[int, Plan]) -> None:
    size, plan = drawn
    Misbehaving.plan, Misbehaving.made, Misbehaving.closed = plan, 0, Counter()
    manager = "tests:MisbehavingManager" if plan.managed else None
    tree = {"env": {"max_turns": 3, "turn_timeout_s": TURN_TIMEOUT_S, "manager": manager}}
    config, managers = Config.model_validate(tree), {manager or "": MisbehavingManager}
    submitted: list[Trajectory] = []

    async def main() -> float:
        policy = Servers(chat, plan.answers)
        manager = EnvManager(config, make=Misbehaving, policy=policy, grants=Grants(), chat=chat, managers=managers)
        sampling = Sampling(max_new_tokens=8)
        work = leased(range(size), max_tokens=2, sampling=sampling, deadline_s=DEADLINE_S)
        playing = asyncio.create_task(manager.play(work, lambda trajectory, text: submitted.append(trajectory)))
        await asyncio.wait([playing], timeout=plan.cancelled_at_s)
        playing.cancel()
        await asyncio.wait([playing])
        assert playing.cancelled() or playing.exception() is None
        return asyncio.get_running_loop().time()

    seconds = run_virtual(main())
    assert sorted(trajectory.episode.episode for trajectory in submitted) == list(range(size))
    assert all(count == 1 for count in Misbehaving.closed.values()) and len(Misbehaving.closed) == size
    for trajectory in submitted:
        assert (trajectory.error is not None) == (trajectory.status in ("failed", "aborted"))
        assert trajectory.status != "aborted" or plan.cancelled_at_s is not None
        assert (trajectory.stop_reason is None) == (trajectory.status in ("failed", "aborted"))
    grants_s = 0.5 * 3 * 8  # as many as an episode can wait for, and none of its own time
    assert seconds <= 2 * DEADLINE_S + grants_s + 5.0 * size, "deadlines bound it all"
