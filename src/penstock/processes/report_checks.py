"""What the controller demands of a message before it acts on it. A message that its sender must not send is a
`ProtocolViolation`: the scheduler's own checks would end the run for the error of one worker."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from penstock.control.bus import ProtocolViolation
from penstock.control.messages import (
    AnyMessage,
    DataGenerated,
    EpisodesGenerated,
    GrantRequest,
    Heartbeat,
    RewardComputed,
    TaskRequest,
)
from penstock.scheduler.active_group import ActiveGroup
from penstock.scheduler.members import errors_of
from penstock.scheduler.scheduler import Scheduler
from penstock.types import (
    MAX_METRIC_NAME,
    MAX_VERSION,
    MOST_METRICS,
    NO_VERSION,
    EpisodeId,
    EpisodeState,
    EpisodeSummary,
    Summaries,
)

MOST = 1 << 40
"""Limit of every count in a message."""
MAX_SECONDS = 1e9
PLAYED = (EpisodeState.LEASED, EpisodeState.UNFINISHED, EpisodeState.REWARDING, EpisodeState.READY)
"""States of members that may end now."""


def check_alone(message: AnyMessage, role: str) -> None:
    """Check a message without knowledge of the run. Raises `ProtocolViolation`."""
    match message:
        case Heartbeat(counters=counters, spans=spans) as beat:
            figures = [beat.cpu_s, beat.busy_s, *counters.values(), *(span.start for span in spans)]
            demand(all(map(math.isfinite, (*figures, *(span.end for span in spans)))), "a figure is not finite")
        case TaskRequest() | GrantRequest() | EpisodesGenerated() | RewardComputed() | DataGenerated():
            demand(role == "env", f"its sender is not an environment worker but a {role}")
    match message:
        case TaskRequest(capacity=capacity):
            demand(0 < capacity < MOST, f"capacity is {capacity}")
        case GrantRequest(num_tokens=num_tokens):
            check_counts([num_tokens])
        case EpisodesGenerated(episodes=episodes, num_tokens=counts):
            demand(len(episodes) == len(counts), f"it has {len(episodes)} episodes, but {len(counts)} counts")
            check_counts(counts)
            check_episodes(episodes)
        case RewardComputed(episodes=summaries, saved=saved):
            demand(len(summaries) == len(saved), f"it has {len(summaries)} episodes, but {len(saved)} records")
            check_summaries(summaries)
        case DataGenerated(episodes=summaries, group=number):
            check_summaries(summaries)
            named = summaries[0].episode.group
            demand(named == number, f"it names group {number}, but its episodes are of group {named}")


def check_in_run(message: AnyMessage, peer: str, scheduler: Scheduler) -> None:
    """Check a report about episodes against the group as the scheduler knows it. Reports about earlier attempts need no
    check: the scheduler ignores them. Raises `ProtocolViolation`."""
    group = scheduler.groups.find_attempt(episodes_of(message)[0].group_attempt)
    if group is None:
        return
    demand(group.worker == peer, f"group {group.number} is not played by {peer} but by {group.worker}")
    for episode in episodes_of(message):
        demand(episode.tag == group.task.tag, f"{episode} is not of the task source {group.task.tag}")
        demand(0 <= episode.episode < group.size, f"group {group.number} has {group.size} episodes, not {episode}")
    match message:
        case GrantRequest(episode=episode, unfinished=unfinished):
            state = group.ledger.state(group.number, episode.episode)
            allowed = (EpisodeState.LEASED,) if unfinished else (EpisodeState.LEASED, EpisodeState.UNFINISHED)
            demand(state in allowed, f"{episode} is {state}, so it needs no grant")
        case RewardComputed(episodes=summaries) | DataGenerated(episodes=summaries):
            check_end(group, summaries)
    if isinstance(message, DataGenerated):
        check_whole(group, message)


def episodes_of(message: AnyMessage) -> Sequence[EpisodeId]:
    """Return the episodes that a report is about; empty for other messages."""
    match message:
        case GrantRequest(episode=episode):
            return [episode]
        case EpisodesGenerated(episodes=episodes):
            return episodes
        case RewardComputed(episodes=summaries) | DataGenerated(episodes=summaries):
            return [summary.episode for summary in summaries]
    return []


def check_end(group: ActiveGroup, summaries: Summaries) -> None:
    """Check that these members can end now. A server may claim any policy_version; the learner masks unknown ones."""
    for summary in summaries:
        state = group.ledger.state(group.number, summary.episode.episode)
        demand(state in PLAYED, f"{summary.episode} is {state}, so it cannot end")


def check_whole(group: ActiveGroup, message: DataGenerated) -> None:
    """Check that a completed group has enough members, and tokens if it is trained."""
    if errors_of(message.episodes):
        return
    needed = group.size - group.redundancy
    demand(len(message.episodes) >= needed, f"a group of {needed} episodes has only {len(message.episodes)}")
    has_tokens = message.ref is not None or group.kind == "evaluation"
    demand(has_tokens, f"group {group.number} is complete without tokens")


def check_summaries(summaries: Summaries) -> None:
    check_episodes([summary.episode for summary in summaries])
    for summary in summaries:
        check_summary(summary)


def check_summary(summary: EpisodeSummary) -> None:
    check_counts([summary.num_turns, summary.prompt_tokens, summary.response_tokens])
    in_order = NO_VERSION <= summary.version_min <= summary.version_max <= MAX_VERSION
    demand(in_order, f"its versions are {summary.version_min} to {summary.version_max}")
    for seconds in (summary.seconds, summary.env_s, summary.reward_s):
        demand(0 <= seconds <= MAX_SECONDS, f"it took {seconds} s")
    demand(len(summary.metrics) <= MOST_METRICS, f"it has {len(summary.metrics)} metrics")
    for name, value in summary.metrics.items():
        demand(len(name) <= MAX_METRIC_NAME and abs(value) <= MOST, f"its metric {name[:MAX_METRIC_NAME]} is {value}")


def check_episodes(episodes: Sequence[EpisodeId]) -> None:
    """Check that these are different members of one attempt at a group."""
    demand(bool(episodes), "it names no episode")
    demand(len({episode.group_attempt for episode in episodes}) == 1, "its episodes are not of one group")
    demand(len({episode.episode for episode in episodes}) == len(episodes), "it names an episode twice")


def check_counts(counts: Iterable[int]) -> None:
    for count in counts:
        demand(0 <= count < MOST, f"a count is {count}")


def demand(holds: bool, violation: str) -> None:
    """Raise `ProtocolViolation` with this text unless the condition holds."""
    if not holds:
        raise ProtocolViolation(violation)
