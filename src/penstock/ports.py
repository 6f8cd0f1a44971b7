"""The boundaries: small Protocols that the loop, the scheduler and the supervisor talk to.

Fakes ship with the package (`rollout/scripted.py`, `simulator/parts.py`), so that every part can be tested alone.
Every method that waits may raise `penstock.deadline.Stalled`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import msgspec

from penstock.types import (
    Endpoint,
    EpisodeId,
    EpisodeLease,
    EpisodeState,
    EpisodeSummary,
    GroupAttempt,
    GroupRef,
    LearnerState,
    PayloadRef,
    Sample,
    Sampling,
    Segment,
    SegmentGrant,
    StopReason,
    Task,
    WeightsHandle,
    nth_seed,
)


class TaskSource(Protocol):
    """An endless or finite, deterministic supply of tasks."""

    def task(self, index: int) -> Task | None:
        """The task at `index`, always the same one; None past the end."""
        ...


class Environment(Protocol):
    """One world for one episode, in the shape Gymnasium and GEM share. Methods may also be `async`."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        """Start over. Returns (observation, info)."""
        ...

    def step(self, action: str) -> tuple[str, float | None, bool, bool, dict[str, Any]]:
        """Act. Returns (observation, reward, terminated, truncated, info). No reward: `env.reward` gives it."""
        ...


class Agent(Protocol):
    """A program that plays an episode by itself, speaking to the policy through any OpenAI client."""

    async def play(self, llm: Endpoint, seed: int) -> float | None:
        """Returns the reward, or leaves it to `env.reward`. A plain function if the class says `blocking = True`: it
        gets a thread of its own."""
        ...


class PolicyClient(Protocol):
    """Asks a rollout server for actions."""

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        """One segment per grant for the same prompt (one request with n = len(grants)).

        A server that gave way answers at once, with empty segments that end in `abort`.
        """
        ...


class RolloutServers(Protocol):
    """The weights side of all rollout servers of a run."""

    async def update_weights(self, handle: WeightsHandle) -> None:
        """Bring every server that answers to `handle.policy_version` as a transaction; raises if one of them refuses,
        or if none answers for long; `TrainerLost` if none of them can have these weights. Tokens say which version made
        them, so one that is left behind misleads nobody."""
        ...

    async def release(self) -> None:
        """Give way to the trainer: running requests end early with what they have, later ones at once with nothing;
        generation memory is freed."""
        ...

    async def resume(self) -> None:
        """Take the memory back and serve again."""
        ...


class SavedEpisode(msgspec.Struct, frozen=True, kw_only=True):
    """An episode's tokens so far, in the pool; of a group that is not whole yet.

    Episodes are saved only where groups stay open for long: with `scheduler.segment_length` set, or colocated with
    over-sampling. Members that ended always are then, cut ones only if the environment is single-turn.
    """

    episode: EpisodeId
    refs: tuple[PayloadRef, ...]
    """Of one that ended: the record of the whole. Of a cut one: a record per cut with what was new, in order; one that
    begins with an observation begins the episode anew, and what lies before it no longer counts."""
    ended: bool
    stop_reason: StopReason | None = None
    info: dict[str, Any] = {}
    """Of one that ended, as of its trajectory."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Members of a group handed to an environment worker: one lease and one first grant each.

    A worker that has played `group_size` members, in one piece of work or two (a probe, then the rest), reports the
    group; whatever members end before that are reported as they do, and kept: always by the worker, and also in the
    pool, where another worker finds them, if `SavedEpisode` says that such episodes are saved.
    """

    task: Task
    group: int
    attempt: int
    group_size: int
    """Members that make the group."""
    redundancy: int = 0
    """Further ones. So many may fail, and who still plays when the group is made is given up."""
    members: tuple[int, ...]
    max_tokens: tuple[int, ...]
    """Of each member's first grant."""
    env_seed: int
    """Shared by all members and attempts: they meet the same world."""
    sampling_seed: int
    """Of this attempt; each member's own follows from it."""
    deadline_s: float
    """Seconds after which a lease is void and its episode counts as failed."""
    sampling: Sampling
    saved: tuple[SavedEpisode, ...] = ()
    """Members that another worker had begun or ended: they go on from there instead of starting over. Where nothing is
    saved there are none, and a lost worker's groups start over."""
    keep_text: bool = False
    """Return the decoded last action with the summary (evaluation samples)."""

    @property
    def episodes(self) -> list[EpisodeId]:
        """The members, as episodes."""
        return [EpisodeId(self.task.tag, self.group, member, self.attempt) for member in self.members]

    @property
    def leases(self) -> list[EpisodeLease]:
        """One per member."""
        return [
            EpisodeLease(
                episode=episode,
                env_seed=self.env_seed,
                sampling_seed=nth_seed(self.sampling_seed, episode.episode),
                deadline_s=self.deadline_s,
            )
            for episode in self.episodes
        ]

    @property
    def grants(self) -> list[SegmentGrant]:
        """The first one of each member."""
        pairs = zip(self.episodes, self.max_tokens, strict=True)
        return [SegmentGrant(episode=episode, max_tokens=max_tokens) for episode, max_tokens in pairs]


class Workers(Protocol):
    """The environment workers, seen from the loop. Results come back through the scheduler's own methods.

    Nothing here waits: a worker slow to acknowledge holds up nobody else, and one that never does ends the run.
    """

    def start(self, worker: str, work: Work) -> None:
        """Hand `work` to `worker`."""
        ...

    def grant(self, worker: str, grant: SegmentGrant) -> None:
        """Let a waiting episode generate again."""
        ...

    def cancel(self, attempts: Sequence[GroupAttempt]) -> None:
        """Nobody waits for these any more."""
        ...


class TrainerLost(RuntimeError):
    """The trainer died; what it had not saved is lost. Another one is on its way."""


class WeightsOutOfReach(RuntimeError):
    """Whoever published the weights does not give them out: it died, or cannot be reached from here."""


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer holds beyond the checkpoints, so that a controller that died can be replaced."""

    begun: bool
    """False: it holds nothing yet, and must be restored, or warmed up."""
    step: int = 0
    learner: LearnerState | None = None
    """Of the latest optimizer step it took itself."""
    trained: list[int] = []
    """Groups of that step."""
    accumulated: list[int] = []
    """Groups whose gradients wait for the next one."""


class SavedState(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint that is whole."""

    directory: str
    step: int
    policy_version: int
    state: dict[str, Any]
    """What the loop had saved with it."""


class SavedStates(msgspec.Struct, frozen=True, kw_only=True):
    """What a trainer may go back to."""

    newest: SavedState | None
    torn: dict[str, str] = {}
    """Newer checkpoints that cannot be trusted, and why."""


class Trainer(Protocol):
    """Three verbs (accumulate, step, publish), a start and a checkpoint. Calls never overlap. Every one of them raises
    `TrainerLost` when the trainer dies before it has answered."""

    async def state(self) -> TrainerState:
        """What it holds."""
        ...

    async def saved(self, directory: Path) -> SavedStates:
        """Look through the checkpoints in `directory`."""
        ...

    async def begin(self, *, policy_version: int) -> Mapping[str, float]:
        """Hold what a run starts with, as `policy_version`; after imitating demonstrations, if the configuration asks
        for it: returns steps, seconds, loss of that, or nothing."""
        ...

    async def restore(self, directory: Path, *, step: int, policy_version: int) -> None:
        """Go back to the checkpoint in `directory`, as `policy_version`."""
        ...

    async def accumulate(self, groups: Sequence[GroupRef]) -> Mapping[str, float]:
        """Add the gradient of `groups`; no step. Returns counts and sums (tokens, masked tokens, busy seconds)."""
        ...

    async def step(self) -> LearnerState:
        """One optimizer step over everything accumulated, normalised by its token count; version += 1."""
        ...

    async def publish(self) -> WeightsHandle:
        """Write the current weights where servers can map them."""
        ...

    async def checkpoint(self, directory: Path, state: Mapping[str, Any]) -> None:
        """Save weights, optimizer, RNG and the caller's `state` atomically under `directory`."""
        ...


class Observer(Protocol):
    """Writes down what happens."""

    def event(self, event: str, **details: Any) -> None:
        """Something worth knowing later."""
        ...

    def decision(self, decider: str, reason: str, inputs: Mapping[str, Any]) -> None:
        """A decider decided."""
        ...

    def take_up(self, records: Iterable[GroupRecord]) -> None:
        """Go on where another controller of a run that only plays was: all its groups."""
        ...

    def played(self, tag: str, episodes: Sequence[EpisodeSummary]) -> None:
        """A whole group of the run was played."""
        ...

    def accumulated(self, counts: Mapping[str, float]) -> None:
        """Gradients were added."""
        ...

    def stepped(
        self, step: int, learner: LearnerState, ledger: Mapping[str, int], scheduling: Mapping[str, float | None]
    ) -> None:
        """An optimizer step was taken."""
        ...

    def progressed(self, groups: int, ledger: Mapping[str, int], scheduling: Mapping[str, float | None]) -> None:
        """A moment of a run without optimizer steps: `groups` have ended. Told again, it is no news."""
        ...

    def evaluated(
        self,
        when: str,
        step: int,
        tasks: Sequence[Task],
        played: Sequence[Sequence[EpisodeSummary]],
        *,
        num_shown: int,
        solved_at: float,
    ) -> None:
        """The held-out tasks were played, each once or several times, after optimizer step `step`."""
        ...


class EndedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A training group of which nothing is to be played or trained any more."""

    group: int
    counts: dict[EpisodeState, int]
    """Of its episodes by final state."""
    trained_in: int | None = None
    """Policy version that its trained members made."""

    @property
    def state(self) -> EpisodeState:
        """Of the group: that of its trained members, else that of most."""
        if self.trained_in is not None:
            return EpisodeState.TRAINED
        return max(self.counts, key=self.counts.__getitem__)


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the pool knows of an admitted group except its tokens. Enough to take up the ledger and all queues."""

    group: int
    task_id: str
    task_index: int
    admitted_at: float = 0.0
    """Seconds since the epoch."""
    ref: PayloadRef | None = None
    """Of a played group."""
    episodes: list[EpisodeSummary] = []
    state: str = "pending"
    """`pending` (to be played), `ready` (to be trained), or the final state of (most of) its episodes."""
    counts: dict[EpisodeState, int] = {}
    """Once it has ended; see `EndedGroup`."""
    trained_in: int | None = None
    attempt: int = 0
    """At which it was played; of a group that is to be played, one at which it never was."""

    @property
    def group_attempt(self) -> GroupAttempt:
        return GroupAttempt(self.group, self.attempt)

    @property
    def next_attempt(self) -> int:
        """At which it would be played anew."""
        return self.attempt + (self.ref is not None)


class Shard(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a dump: what it is called, and of which groups it is made."""

    name: str
    groups: list[GroupAttempt]
    step: int | None = None
    """Optimizer step after which it was planned; None where there are none."""
    written: bool = False
    num_rows: int = 0
    cpu_s: float = 0.0
    """What it took to write it; both are known once it is written."""


class Dump(Protocol):
    """Shows others what was played, beside the loops. Only `finish` waits."""

    @property
    def unwritten(self) -> Collection[int]:
        """Groups whose tokens it still needs."""
        ...

    def take_up(self, records: Iterable[GroupRecord]) -> None:
        """What was played before, under an earlier controller."""
        ...

    def played(self, attempt: GroupAttempt, state: EpisodeState, num_rows: int) -> None:
        """A group is in the pool; `state` is what its episodes are now."""
        ...

    def stepped(self, step: int) -> None:
        """An optimizer step was taken."""
        ...

    async def finish(self) -> None:
        """Nothing more will be played: write the rest."""
        ...


class Pool(Protocol):
    """The experience pool's index: what became of every training group."""

    def admit(self, groups: Sequence[tuple[int, Task]]) -> None:
        """New groups, `pending`; or known ones that are to be played anew."""
        ...

    def add(self, group: int, task: Task, ref: PayloadRef, episodes: Sequence[EpisodeSummary]) -> None:
        """A played group, `ready`."""
        ...

    def end(self, groups: Sequence[EndedGroup]) -> None:
        """Nothing more will come of these."""
        ...

    def revive(self, groups: Sequence[int]) -> None:
        """Trained groups whose training is lost: `ready` again."""
        ...

    def covered(self, policy_version: int, *, keep: Collection[int] = ()) -> None:
        """Durable checkpoints hold all that was trained up to `policy_version`: tokens of groups that ended, and were
        not trained later, are not needed any more, but those of the groups to keep. Frees the disk."""
        ...

    def records(self) -> Iterator[GroupRecord]:
        """All groups, in the order of their admission."""
        ...

    def get(self, groups: Sequence[int]) -> list[GroupRecord]:
        """Those of `groups` that are known."""
        ...

    def shards(self) -> list[Shard]:
        """Of the dump, whether written or only planned."""
        ...

    def is_whole(self, ref: PayloadRef) -> bool:
        """A played group's tokens are there as they were written."""
        ...

    @property
    def highest_version(self) -> int:
        """The highest policy_version there ever was in this run."""
        ...

    def raise_version(self, policy_version: int) -> None:
        """There is such a one now, though nothing was trained into it yet."""
        ...

    def sync(self) -> None:
        """Make everything so far durable."""
        ...

    def close(self) -> None: ...


class PayloadsLost(RuntimeError):
    """Records of the pool cannot be had from where they are said to be; the message names host and file."""

    self_explanatory = True


class Payloads(Protocol):
    """Records of the pool that other processes wrote, perhaps on other machines."""

    async def fetch(self, refs: Sequence[PayloadRef], *, host: str) -> None:
        """Have them here, as `host` has them. Raises `PayloadsLost`."""
        ...

    def read(self, ref: PayloadRef) -> list[Sample]:
        """One that was fetched. Raises `PayloadError` if it is damaged."""
        ...

    def drop(self, refs: Iterable[PayloadRef]) -> None:
        """They are not needed here any more, nor is anything else that lies in their files."""
        ...

    def close(self) -> None: ...


class SegmentWriter(Protocol):
    """A worker's own records."""

    def append(self, samples: Sequence[Sample]) -> PayloadRef:
        """Write one; the reference is valid as soon as this returns."""
        ...

    def release(self, ref: PayloadRef) -> None:
        """The controller has it, or nobody wants it."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """How to start one process of a run."""

    name: str
    """Unique within the run, e.g. `rollout-0`; also the log's name."""
    role: str
    module: str
    """Python module run with `-m`; it receives the run directory and its own name."""
    ready_s: float
    """Deadline for readiness."""
    grace_s: float
    """Time between SIGTERM and SIGKILL."""
    env: Mapping[str, str] = field(default_factory=dict)
    pool: str | None = None
    """Of the cluster, where it lives; None: on the supervisor's machine."""
    num_slots: int = 1
    """That it takes of its pool, all of one node."""
    saves: str = ""
    """Name of the event that tells of its having saved what a successor goes back to; empty if none goes back."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A heartbeat, as the process wrote it."""

    time: float
    """Seconds of the process's own steady clock."""
    progress: int
    """In whatever the process counts; only its changes mean anything."""
    doing: str
    """Empty: it has nothing to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A process said itself what went wrong."""

    time: float
    """Seconds since the epoch."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What a process has told of itself lately."""

    beat: Beat | None = None
    """The latest; None if there is none, or it is just being written."""
    report: Report | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """A process is no more."""

    returncode: int | None = None
    """Follows subprocess: negative for a signal. None of one that was lost."""
    report: Report | None = None
    """Its last words."""
    is_out_of_memory: bool = False
    """The kernel killed somebody for that while it lived."""
    lost: str = ""
    """Why nobody knows how it ended; empty if it is known."""


class ProcessHandle(Protocol):
    """A started process."""

    @property
    def spec(self) -> ProcessSpec: ...

    @property
    def pid(self) -> int: ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """Who and where it is, as it is recorded: its pid, and what tells it from others."""
        ...

    @property
    def end(self) -> End | None:
        """None while it lives."""
        ...


class Launcher(Protocol):
    """Starts, probes, signals and awaits the processes of a run; on this machine or on those of a Ray cluster."""

    async def spawn(self, spec: ProcessSpec) -> ProcessHandle:
        """Raises `OSError` if it cannot be started."""
        ...

    async def probe(self, process: ProcessHandle) -> str | None:
        """None once this very process (identity checked) is ready to serve, else what is still missing."""
        ...

    async def look(self, process: ProcessHandle) -> Look:
        """What this very process has told, in this life or at its end. Nothing, if it cannot be asked now."""
        ...

    async def signal(self, process: ProcessHandle, signum: int) -> None:
        """Signal the process and everything it started. Who cannot be reached with SIGKILL is lost."""
        ...

    async def wait(self, process: ProcessHandle) -> End:
        """Until it ends."""
        ...

    async def sweep(self) -> list[str]:
        """End whatever the run's processes left behind; returns what could not be removed."""
        ...


class Demonstrations(Protocol):
    """Worked examples for the warm start: token ids and the positions to imitate."""

    def __iter__(self) -> Iterator[tuple[list[int], list[int]]]:
        """Yields (token_ids, loss_mask), as long as there are tasks."""
        ...
