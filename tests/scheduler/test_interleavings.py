"""Whatever finishes, is cut, fails, crashes, is filtered or discarded, in any order: the books stay right."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_ports import NumberedTasks, played
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.config import Config
from penstock.ports.work import Work
from penstock.scheduler.dispatcher import Assignment
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.tuning import InForce
from penstock.simulator.clock import run_virtual
from penstock.types import EpisodeId, EpisodeSummary, LearnerState, PayloadRef, SegmentGrant

GROUP_SIZE, MAX_STALENESS, MAX_WAIT_S = 3, 1, 40.0
REF = PayloadRef(file="none", offset=0, length=0, checksum=0)
LIVE = ("pending", "leased", "unfinished", "rewarding", "ready", "training")

MODES: dict[str, dict[str, Any]] = {
    "asynchronous": {"mode": "asynchronous", "max_staleness": MAX_STALENESS},
    "one step off": {"mode": "one_step_off", "max_staleness": MAX_STALENESS},
    "synchronous": {"mode": "synchronous", "max_staleness": 0},
    "resumed leftovers": {"mode": "colocated", "over_sampling": 1.5, "max_staleness": MAX_STALENESS},
    "restarted leftovers": {"mode": "colocated", "over_sampling": 1.5, "max_staleness": 0, "leftovers": "restart"},
}


class Play:
    """Workers, servers and a learner that do whatever Hypothesis draws."""

    def __init__(self, draw: st.DataObject, mode: dict[str, Any], policy: str) -> None:
        self.draw = draw
        self.redundancy = draw.draw(st.integers(0, 2))
        self.config = Config.model_validate(
            {
                "env": {"group_size": GROUP_SIZE, "redundancy": self.redundancy, "max_attempts": 2},
                "scheduler": mode
                | {
                    "segment_length": 8,
                    "max_running": 7,
                    "dispatch": {"policy": policy, "look_ahead": 6, "max_wait": f"{MAX_WAIT_S}s"},
                    "length": {"predictor": "heuristic"},
                    "trigger": {"min_samples": 3, "max_wait": "5s"},
                },
                "trainer": {"groups_per_step": 3},
            }
        )
        self.scheduler = Scheduler(
            self.config, now=asyncio.get_running_loop().time, log_decision=lambda *decision: None
        )
        self.workers = ["a", "b"]
        for worker in self.workers:
            self.scheduler.add_worker(worker, 12)
        self.scheduler.mark_served(0)
        self.tasks = NumberedTasks("train")
        self.num_tasks = 0
        self.unstarted: dict[int, float] = {}
        """Groups that no worker has played yet, with the time of their admission."""
        self.past: list[EpisodeId] = []
        """Episodes of attempts that the scheduler has given up."""
        self.works: dict[int, str] = {}
        """Group -> its worker."""
        self.generating: dict[EpisodeId, int] = {}
        """Episodes that hold a grant, with the version served when they got it."""
        self.waiting: set[EpisodeId] = set()
        self.rewarding: dict[EpisodeId, int] = {}
        """Episodes that have generated everything, with the version that did."""
        self.ended: dict[int, dict[int, EpisodeSummary]] = {}
        self.broken: dict[int, dict[int, bool]] = {}
        """Members that failed and are not needed, by group; whether their reward did."""
        self.kept: dict[int, list[int]] = {}
        """The members that make a group."""
        self.trained: set[tuple[int, int]] = set()
        self.versions: dict[tuple[int, int], int] = {}
        """Version that ended each episode."""
        self.stepping = self.closing = False
        self.version = 0

    def pick(self, items: Any) -> Any:
        return self.draw.draw(st.sampled_from(sorted(items)))

    async def fill(self) -> None:
        room = await self.scheduler.wait_for_room() if self.scheduler._num_room else 0
        tasks = [task for i in range(room) if (task := self.tasks.task(self.num_tasks + i))]
        for _ in tasks:  # groups are numbered in the order of their admission
            self.unstarted[self.num_tasks] = asyncio.get_running_loop().time()
            self.num_tasks += 1
        if tasks:
            self.scheduler.admit_tasks(tasks)

    async def dispatch(self) -> None:
        for assignment in await soon(self.scheduler.next_assignments()) or ():
            self._assigned(assignment)

    def _assigned(self, assignment: Assignment) -> None:
        item = assignment.item
        episodes = [item.episode] if isinstance(item, SegmentGrant) else self._work(assignment.worker, item)
        for episode in episodes:
            self.waiting.discard(episode)
            self.generating[episode] = self.scheduler.policy_version
        assert len(self.generating) <= 7, "more episodes generate than may"

    def _work(self, worker: str, work: Work) -> list[EpisodeId]:
        episodes = [lease.episode for lease in work.leases]
        group = episodes[0].group
        self._started(group)
        self.works[group] = worker
        over = {saved.episode for saved in work.saved if saved.ended}
        kept = self.ended.setdefault(group, {})
        for episode in over:
            kept[episode.episode] = self._summary(episode, version=self.scheduler.policy_version)
        return [episode for episode in episodes if episode not in over]

    def _started(self, group: int) -> None:
        """Nobody starves: who has waited too long starts before all others."""
        since = self.unstarted.pop(group, None)
        if since is not None and self.unstarted:
            waited = asyncio.get_running_loop().time() - min(self.unstarted.values())
            assert waited < MAX_WAIT_S or since <= min(self.unstarted.values()), "an older group was passed over"

    def _summary(self, episode: EpisodeId, *, version: int, error: str | None = None) -> EpisodeSummary:
        reward = float(episode.episode % 2 if self.closing else self.draw.draw(st.booleans()))
        self.versions[episode.group, episode.episode] = version
        return played(episode, reward=reward, policy_version=version, response_tokens=8, error=error)

    def cut(self) -> None:
        episode = self.pick(self.generating)
        del self.generating[episode]
        self.waiting.add(episode)
        saved = REF if self.draw.draw(st.booleans()) else None
        self.scheduler.members.request_grant(
            episode.group_attempt, episode.episode, unfinished=True, num_tokens=8, saved=saved
        )

    def generate_all(self) -> None:
        """A member said its last word; its reward is still being computed."""
        episode = self.pick(self.generating)
        self.rewarding[episode] = self.generating.pop(episode)
        self.scheduler.members.finish_generation(episode.group_attempt, [episode.episode], 8)

    def end(self, *, error: str | None = None) -> None:
        """A member ends; with it perhaps its group."""
        playing = self.generating | self.rewarding
        episode = min(playing) if self.closing else self.pick(playing)
        summary = self._summary(episode, version=playing[episode], error=error)
        self.generating.pop(episode, None)
        was_rewarding = self.rewarding.pop(episode, None) is not None
        ended = self.ended.setdefault(episode.group, {})
        if error:
            broken = self.broken.setdefault(episode.group, {})
            broken[episode.episode] = was_rewarding
            if len(broken) > self.redundancy:
                self._forget(episode.group)
            self.scheduler.members.end_members(
                episode.group_attempt, [summary], [self.draw.draw(st.sampled_from([None, REF]))]
            )
            return
        ended[episode.episode] = summary
        if len(ended) == GROUP_SIZE:
            self._forget(episode.group)
            if not self.closing and self.draw.draw(st.sampled_from([False, False, True])):
                self.scheduler.reissue_group(episode.group_attempt, "the host is gone")
                return
            self.kept[episode.group] = sorted(ended)
            self.scheduler.finish_group(episode.group_attempt, REF, [ended[member] for member in sorted(ended)])
        else:
            self.scheduler.members.end_members(episode.group_attempt, [summary], [REF])

    def _forget(self, group: int) -> None:
        self.works.pop(group, None)
        played_ = (*self.generating, *self.rewarding, *self.waiting)
        self.past += [episode for episode in played_ if episode.group == group]
        self.ended.pop(group, None)
        self.broken.pop(group, None)
        self.generating = {e: v for e, v in self.generating.items() if e.group != group}
        self.rewarding = {e: v for e, v in self.rewarding.items() if e.group != group}
        self.waiting = {e for e in self.waiting if e.group != group}

    def crash(self) -> None:
        worker = self.pick(self.workers)
        for group in [group for group, owner in self.works.items() if owner == worker]:
            self._forget(group)
        self.scheduler.remove_worker(worker)
        self.scheduler.add_worker(worker, 12)

    def late(self) -> None:
        """Messages about an attempt of the past change nothing."""
        before = self.scheduler.ledger.counts(), self.scheduler.num_in_flight
        episode = self.pick(self.past)
        summary = played(episode, reward=1.0)
        assert self.scheduler.task_of(episode.group_attempt) is None
        assert self.scheduler.finish_group(episode.group_attempt, REF, [summary]) is None
        self.scheduler.members.end_members(episode.group_attempt, [summary], [REF])
        self.scheduler.members.request_grant(episode.group_attempt, episode.episode, unfinished=True, num_tokens=8)
        self.scheduler.members.finish_generation(episode.group_attempt, [episode.episode], 8)
        self.scheduler.reissue_group(episode.group_attempt, "the host is gone")
        assert before == (self.scheduler.ledger.counts(), self.scheduler.num_in_flight)

    async def train(self) -> None:
        batch = await soon(self.scheduler.next_batch())
        if batch is None:
            return
        for group, _ in batch.restarted:
            self._forget(group)
        for ref in batch.groups:
            for member in ref.episodes:
                assert (ref.group, member) not in self.trained, "trained twice"
                self.trained.add((ref.group, member))
                age = self.scheduler.trained_version - self.versions[ref.group, self.kept[ref.group][member]]
                assert age <= self.config.scheduler.max_staleness, "too old to train"
        if batch.step:
            self.version += 1
            self.scheduler.complete_step(LearnerState(policy_version=self.version, entropy=1.0))
            self.stepping = True

    def serve(self) -> None:
        self.scheduler.mark_served(self.version)
        self.stepping = False

    def tune(self) -> None:
        """Settings change in mid-run, as tuning changes them."""
        values = {
            "dispatch": st.sampled_from(["fifo", "sjf", "ljf", "probe"]),
            "look_ahead": st.integers(1, 8),
            "max_running": st.integers(GROUP_SIZE + self.redundancy, 7),
            "min_samples": st.sampled_from([None, 1, 6, 9]),
            "max_wait": st.sampled_from(["1s", "0.25x"]),
            "segment_length": st.sampled_from([None, 4, 8]),
            "max_staleness": st.integers(0, self.config.scheduler.max_staleness),
        }
        chosen = self.draw.draw(st.fixed_dictionaries({}, optional=values))
        in_force = {
            name: InForce(value=value, policy_version=self.version, reason="") for name, value in chosen.items()
        }
        self.scheduler.tuning.state.changed = in_force
        self.scheduler._use_tuned()

    def actions(self) -> list[str]:
        possible = ["fill", "dispatch", "wait", "tune"]
        if self.generating:
            possible += ["cut", "generate all"]
        if self.generating or self.rewarding:
            possible += ["end", "end", "end", "fail"]
        if self.works:
            possible += ["crash"]
        if self.past:
            possible += ["late"]
        return [*possible, "serve" if self.stepping else "train"]

    async def act(self) -> None:
        match self.draw.draw(st.sampled_from(self.actions())):
            case "fill":
                await self.fill()
            case "dispatch":
                await self.dispatch()
            case "cut":
                self.cut()
            case "generate all":
                self.generate_all()
            case "end":
                self.end()
            case "fail":
                self.end(error="ValueError: broke")
            case "crash":
                self.crash()
            case "late":
                self.late()
            case "train":
                await self.train()
            case "serve":
                self.serve()
            case "wait":
                await asyncio.sleep(9.0)
            case "tune":
                self.tune()
        self.check()

    def check(self) -> None:
        scheduler = self.scheduler
        scheduler.ledger.check()
        capacity = scheduler._dispatcher.capacity
        assert capacity.free_grants == capacity.max_running - len(self.generating)
        counts = scheduler.ledger.counts()
        assert counts["unfinished"] == len(self.waiting)
        assert counts["rewarding"] == len(self.rewarding) + sum(sum(each.values()) for each in self.broken.values())
        assert counts["trained"] + counts["training"] == len(self.trained)

    async def finish_everything(self) -> None:
        """No interleaving leads into a dead end: the run can always go on to its next step."""
        self.closing = True
        target = self.version + 2
        for _ in range(400):
            if self.stepping:
                self.serve()
            if self.version >= target:
                return
            await self.fill()
            await self.dispatch()
            while self.generating or self.rewarding:
                self.end()
            await self.train()
            await asyncio.sleep(1.0)
        raise AssertionError(f"no step any more: {self.scheduler.ledger.counts()}")


async def soon(waiting: Any) -> Any:
    """The result, if it is there now."""
    try:
        async with asyncio.timeout(0.001):
            return await waiting
    except TimeoutError:
        return None


@pytest.mark.parametrize("policy", ["fifo", "sjf", "ljf", "probe"])
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(draw=st.data())
def test_any_interleaving(mode: str, policy: str, draw: st.DataObject) -> None:
    async def main() -> None:
        play = Play(draw, MODES[mode], policy)
        for _ in range(draw.draw(st.integers(10, 60))):
            await play.act()
        await play.finish_everything()
        play.scheduler.cancel_all()
        counts = play.scheduler.ledger.counts()
        assert not any(counts[state] for state in LIVE)
        assert counts["trained"] == len(play.trained)

    run_virtual(main())
