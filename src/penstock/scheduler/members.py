"""Reports of workers about single members of a group: grant requests, generated answers, early ends."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from penstock.scheduler.active_group import ActiveGroup
from penstock.scheduler.active_groups import ActiveGroups
from penstock.scheduler.dispatcher import Dispatcher
from penstock.types import EpisodeState, GroupAttempt, PayloadRef, Summaries

FailGroup = Callable[[ActiveGroup, str, bool], object]
"""Ends the current attempt of a group with an error. The flag: another attempt would fail in the same way."""


class MemberReports:
    """Handler of member reports. It frees grants so that other members can run, and ignores reports about earlier
    attempts."""

    def __init__(
        self, groups: ActiveGroups, dispatcher: Dispatcher, fail_group: FailGroup, wake: Callable[[], None]
    ) -> None:
        """`wake` wakes the dispatch loop."""
        self._groups, self._dispatcher = groups, dispatcher
        self._fail_group, self._wake, self._log_decision = fail_group, wake, groups.log_decision

    def request_grant(
        self, attempt: GroupAttempt, member: int, *, unfinished: bool, num_tokens: int, saved: PayloadRef | None = None
    ) -> None:
        """Queue a member that used up its grant. `saved` is the location of its new tokens if the pool holds them."""
        if (group := self._groups.find_attempt(attempt)) is None:
            return
        self._dispatcher.capacity.return_grants(group, [member])
        group.num_tokens = {**group.num_tokens, member: num_tokens}
        group.keep_tokens(member, saved)
        if unfinished:
            group.move_members([member], EpisodeState.UNFINISHED)
            inputs = {"group": group.number, "episode": member, "tokens": num_tokens, "saved": saved is not None}
            self._log_decision("segment", f"cut after {num_tokens} tokens: goes on with its next grant", inputs)
        self._dispatcher.grant_requests.append(group.episode_id(member))
        self._wake()

    def finish_generation(self, attempt: GroupAttempt, members: Iterable[int], probe_tokens: int) -> None:
        """Return the grants of `members`, so that other episodes generate while the rewards are computed.

        If `members` are the probe of the group, its other members may run now. The probe took `probe_tokens`.
        """
        if (group := self._groups.find_attempt(attempt)) is None:
            return
        leased = group.members(EpisodeState.LEASED)
        generated = [member for member in members if member in leased]
        self._dispatcher.capacity.return_grants(group, generated)
        group.move_members(generated, EpisodeState.REWARDING)
        if generated:
            self._dispatcher.enqueue_rest(group, probe_tokens)
        self._wake()

    def end_members(self, attempt: GroupAttempt, summaries: Summaries, saved: Sequence[PayloadRef | None]) -> None:
        """Record members that ended before their group was complete. The worker keeps their tokens."""
        if (group := self._groups.find_attempt(attempt)) is None:
            return
        members = [summary.episode.episode for summary in summaries]
        self._dispatcher.capacity.return_grants(group, members)
        errors = errors_of(summaries)
        for member, ref, summary in zip(members, saved, summaries, strict=True):
            if member not in errors:
                group.keep_tokens(member, ref, summary)
        if group.can_spare(errors):
            rewarded = group.members(EpisodeState.REWARDING)
            group.mark_ready(set(members).difference(errors))
            group.broken = group.broken.union(errors)
            for member, error in errors.items():
                inputs = {"group": group.number, "episode": member}
                self._log_decision("surplus", f"the group does without: {error}", inputs)
            if not rewarded:  # otherwise `finish_generation` already queued the rest
                self._dispatcher.enqueue_rest(group, summaries[0].response_tokens)
        else:
            self._fail_group(group, next(iter(errors.values())), is_final(summaries))
        self._wake()


def is_final(summaries: Summaries) -> bool:
    """Return whether an episode would fail in the same way again."""
    return any(summary.is_final for summary in summaries if summary.status == "failed")


def errors_of(summaries: Summaries) -> dict[int, str]:
    """Return the errors of failed and aborted episodes, by member."""
    failed = [summary for summary in summaries if summary.status in ("failed", "aborted")]
    return {summary.episode.episode: summary.error or "no reason given" for summary in failed}
