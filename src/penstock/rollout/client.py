"""The client of one of our own rollout servers; torch-free. Cancelling a `generate` closes its connection, which makes
the server abort the request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from penstock.rollout import wire
from penstock.rollout.session import HttpSession, RolloutError
from penstock.types import (
    FinishReason,
    Sampling,
    Segment,
    SegmentGrant,
    UpdateMode,
    VersionSpan,
    WeightsHandle,
)

T = TypeVar("T")

PROBE_S = 2.0
"""For an answer that needs no work."""
ANSWER_S = 6 * 3600.0
"""For a generated one: whoever asks has a deadline of its own, and watches the server meanwhile."""
BEGIN_S = 330.0
COMMIT_S: dict[UpdateMode, float] = {"in_place": 90.0, "retract": 90.0, "drain": 1860.0}
"""A little longer than the server gives itself."""


class RolloutClient:
    """`ports.PolicyClient` for one server, and that server's side of a weights transaction."""

    def __init__(self, url: str, session: HttpSession, *, update_mode: UpdateMode = "in_place") -> None:
        """`update_mode`: what becomes of running answers when weights are committed."""
        self.url = url
        self._session, self._update_mode = session, update_mode

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        """One segment per grant, all from one request."""
        limits = [grant.max_tokens for grant in grants]
        body = wire.GenerateBody(
            input_ids=list(prompt_ids),
            sampling_params=wire.SamplingBody(
                n=len(grants),
                max_new_tokens=limits[0] if len(set(limits)) == 1 else limits,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k or -1,
                sampling_seed=list(seeds),
            ),
            return_logprob=True,
            return_text=False,
        )
        if len(grants) == 1:
            replies = [await self._generate(body, wire.GenerateReply)]
        else:
            replies = await self._generate(body, list[wire.GenerateReply])
        if len(replies) != len(grants):
            raise RolloutError(self.url, f"{len(replies)} samples came back instead of {len(grants)}", 200)
        return [read_segment(self.url, reply) for reply in replies]

    async def _generate(self, body: wire.GenerateBody, reply: type[T]) -> T:
        return await self._session.call("POST", self.url, "/generate", body, reply, timeout_s=ANSWER_S)

    async def check(self) -> None:
        """Raises RolloutError unless it is one of ours."""
        try:
            await self.ready()
        except RolloutError as error:
            if error.status != 503:  # else it has no weights yet
                raise

    async def ready(self) -> wire.Ready:
        """Who answers and what it serves; RolloutError with status 503 before the first weights."""
        return await self._session.call("GET", self.url, "/ready", None, wire.Ready, timeout_s=PROBE_S)

    async def served_version(self) -> int:
        return (await self.ready()).policy_version

    async def alive(self) -> None:
        await self._session.send("GET", self.url, "/health", timeout_s=PROBE_S)

    async def claim(self, run_id: str, nonce: str, *, lease_s: float) -> None:
        body = wire.ClaimBody(run_id=run_id, nonce=nonce, lease_s=lease_s)
        await self._session.send("POST", self.url, "/claim", body, timeout_s=PROBE_S)

    async def forget_weights(self) -> None:
        await self._session.send("POST", self.url, "/weights/forget", {})

    async def begin_weights(self, handle: WeightsHandle) -> None:
        """Let the server map and verify `handle`."""
        self._check_echo(handle, await self._weights("begin", handle, timeout_s=BEGIN_S))

    async def commit_weights(self, handle: WeightsHandle) -> None:
        """Let the server serve what `begin_weights` staged."""
        body = wire.CommitBody(policy_version=handle.policy_version, mode=self._update_mode)
        self._check_echo(handle, await self._weights("commit", body, timeout_s=COMMIT_S[self._update_mode]))

    async def _weights(self, step: str, body: object, *, timeout_s: float) -> wire.WeightsReply:
        path = f"/weights/{step}"
        return await self._session.call("POST", self.url, path, body, wire.WeightsReply, timeout_s=timeout_s)

    async def abort_weights(self) -> None:
        """Let the server forget what is staged."""
        await self._session.call("POST", self.url, "/weights/abort", {}, dict)

    async def release(self) -> None:
        """Let the server end running requests with what they have, later ones with nothing, and free its memory."""
        await self._session.call("POST", self.url, "/release_memory_occupation", wire.MemoryBody(), wire.MemoryReply)

    async def resume(self) -> None:
        """Let the server take its generation memory back."""
        await self._session.call("POST", self.url, "/resume_memory_occupation", wire.MemoryBody(), wire.MemoryReply)

    def _check_echo(self, handle: WeightsHandle, reply: wire.WeightsReply) -> None:
        expected = (handle.policy_version, handle.fingerprint)
        if (reply.policy_version, reply.fingerprint) != expected:
            raise RolloutError(
                self.url,
                f"holds policy_version {reply.policy_version} with fingerprint {reply.fingerprint}, "
                f"not {handle.policy_version} with {handle.fingerprint}",
                200,
            )


def read_segment(url: str, reply: wire.GenerateReply) -> Segment:
    """Raises RolloutError unless every token came with its log-probability and the version that sampled it."""
    meta = reply.meta_info
    reason: FinishReason
    match meta.finish_reason:
        case wire.Stop():
            reason = "stop"
        case wire.Length():
            reason = "length"
        case wire.Abort():
            reason = "abort"
    logprobs = [logprob for logprob, _, _ in meta.output_token_logprobs or () if logprob is not None]
    spans = [VersionSpan(read_version(url, span.version), span.start, span.end) for span in meta.weight_versions or ()]
    return checked(url, Segment(token_ids=reply.output_ids, logprobs=logprobs, spans=spans, finish_reason=reason))


def checked(url: str, segment: Segment) -> Segment:
    """The segment, if it says of every token how likely and which policy_version it was."""
    num_tokens = len(segment.token_ids)
    if len(segment.logprobs) != num_tokens:
        raise RolloutError(
            url,
            "tokens came back without their log-probabilities, and nothing else can say how likely the policy that "
            "sampled them found them: the server must honour return_logprob",
            200,
        )
    starts, ends = [span.start for span in segment.spans], [span.end for span in segment.spans]
    if [*starts, num_tokens] != [0, *ends]:
        raise RolloutError(
            url,
            f"{num_tokens} tokens came back with the version spans {segment.spans}: which weights sampled each of them "
            "is what a correction for stale data rests on; a newer release of the engine may tell",
            200,
        )
    return segment


def read_version(url: str, label: str) -> int:
    """A foreign label as a policy_version. RolloutError 503 if it is another one: the server's own, before the first
    update or after one that failed."""
    if not label.isdecimal():
        raise RolloutError(url, f"serves weights labelled {label!r}, which no trainer published", 503)
    return int(label)
