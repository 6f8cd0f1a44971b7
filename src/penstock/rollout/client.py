"""The clients of rollout servers: the base class for any engine, and the client of a Penstock server. Torch-free.

Cancelling `generate` closes its connection. The server then aborts the request."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy.typing as npt
from msgspec import Struct

from penstock.deadline import Stalled
from penstock.ports.training import WeightsSender
from penstock.rollout import bodies
from penstock.rollout.request import MAX_TOKEN
from penstock.rollout.session import HttpSession, RolloutError
from penstock.routed_experts import Routing, compact, from_wire
from penstock.runtime.http_client import short
from penstock.samples import Segment, VersionSpan
from penstock.types import (
    MAX_VERSION,
    NO_VERSION,
    DirectWeights,
    FinishReason,
    Sampling,
    SegmentGrant,
    UpdateMode,
    WeightsHandle,
    WeightsTransport,
)

logger = logging.getLogger(__name__)

UNKNOWN = "unknown"
"""Label of weights that no policy_version describes: another run's, or those of a half-finished update."""
ASLEEP = "asleep"
"""Label of an engine that has given away the memory of its weights and its KV memory. It serves again after a weights
update."""

CONFLICT = 409
"""Status of a commit of weights that are not staged, and of a claim on a server that another run holds."""
NO_ROUTE = (403, 404, 405)
"""Statuses of a server that lacks a route."""
MIN_LOGPROB, MAX_LOGPROB = -1e4, 1e-3
"""Log-probabilities are at most zero, up to rounding, and those of sampled tokens are not tiny."""
BYTES_OF_ANSWER, BYTES_PER_TOKEN = 1 << 20, 256
"""Bounds of an answer's size."""
BYTES_PER_EXPERT = 6
"""Bound of the size of an expert's number, in base64."""
PROBE_S = 2.0
"""Timeout for a call that needs no work from the server."""
ANSWER_S = 6 * 3600.0
"""Timeout for a generated answer. The caller has its own deadline and watches the server meanwhile."""
BEGIN_SLACK_S = 30.0
COMMIT_S: dict[UpdateMode, float] = {"in_place": 90.0, "retract": 90.0, "drain": 1860.0}
"""Staging (with this slack) and committing weights have timeouts a little longer than the server's own deadlines."""
RESUME_S = 10.0
"""Timeout for continuing generation after a pause."""

FINISH_REASONS: dict[type, FinishReason] = {bodies.Stop: "stop", bodies.Length: "length", bodies.Abort: "abort"}


class ListedModel(Struct):
    """A model of `/v1/models`. Adapters are models too."""

    id: str


class ListedModels(Struct):
    """The reply of `/v1/models`."""

    data: list[ListedModel]


class Claimed(NamedTuple):
    """What a server says that it serves. None: it does not say."""

    url: str
    model: str | None
    weights: str | None
    """Its label of the weights."""


class ServedLabel(Struct):
    """The label of the served weights, as SGLang and vLLM report it."""

    weight_version: str


class ServerClient(ABC):
    """The client of one server."""

    update_mode: UpdateMode = "retract"
    """How a commit treats running samples.

    `retract` ends them with their tokens so far. The caller continues from these tokens, so the new weights compute all
    keys and values."""
    transport: WeightsTransport = "file"
    """How the latest weights came to the server."""
    label_path: str
    """Path of the route that reports the label of the served weights."""
    keeps_weights = False
    """Whether the server is used with the weights that it has. A label that is not a policy_version, or none at all,
    then means that the version is not known (`NO_VERSION`)."""
    serves_adapters = False
    """Whether the policy's versions are adapters, and requests must name one. The server started with the weights to
    which they belong."""
    routing: Routing | None = None
    """What the policy's routers record. None: it has no experts, or their record is not wanted."""
    seeded = False
    """Whether an engine that decodes more slowly with seeds gets one for each sample. Other engines always get them."""
    takes_turns = False
    """Whether the run takes the server's device for training (`release`), again and again."""
    sleeps = False
    """Whether `release` takes the memory of the weights too. Then only an update makes the server serve again."""
    sender: WeightsSender | None = None
    """The trainer that broadcasts weights to the server; None in processes that send it none."""
    direct_weights: DirectWeights | None = None
    """How vLLM and SGLang get weights from the trainer's device, and not from a file, if they do."""
    routing_remedy = "this server does not record them"
    """How to make a server return experts."""
    _told = False
    """Whether the log says that the server returns no experts."""
    _width: int | None = None
    """Experts of a token in the server's replies, once there was one."""

    def __init__(self, url: str, session: HttpSession, *, update_mode: UpdateMode | None = None) -> None:
        self.url, self._session = url, session
        self.update_mode = update_mode or self.update_mode

    @abstractmethod
    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        """Return one segment per grant."""

    @abstractmethod
    async def check(self) -> None:
        """Check that the server can be used. Raises RolloutError that names the missing feature."""

    async def alive(self) -> None:
        """Raise RolloutError or Stalled unless the server answers within seconds."""
        await self._session.send("GET", self.url, "/health", timeout_s=PROBE_S)

    async def served_version(self) -> int:
        """Return the served policy_version within seconds. Raises RolloutError or Stalled unless the server can
        generate with published weights, or with its own ones if it keeps them."""
        try:
            label = (await self._label()).weight_version
        except RolloutError as error:
            if not self.keeps_weights or error.status not in NO_ROUTE:
                raise
            await self.alive()
            return NO_VERSION
        return self._version(label)

    async def claimed(self) -> Claimed:
        """Return what the server says that it serves."""
        model = label = None
        with suppress(RolloutError, Stalled):
            path = "/v1/models"
            listed = await self._session.call("GET", self.url, path, None, ListedModels, timeout_s=PROBE_S)
            model = short(", ".join(each.id for each in listed.data)) or None
        with suppress(RolloutError, Stalled):
            label = short((await self._label()).weight_version) or None
        return Claimed(self.url, model, label)

    async def label_weights(self, label: str) -> None:
        """Set the label of the served weights."""
        await self._post("/update_weight_version", {"new_version": label})

    async def _label(self) -> ServedLabel:
        return await self._session.call("GET", self.url, self.label_path, None, ServedLabel, timeout_s=PROBE_S)

    async def claim(self, run_id: str, nonce: str, *, lease_s: float) -> None:  # noqa: B027
        """Claim the server for a run; `lease_s` 0 releases it. Raises RolloutError 409 if another run holds it.

        Only Penstock servers store claims. A second run on another engine shows up as policy_versions that this run has
        not published."""

    async def forget_weights(self) -> None:
        """Reset version numbers, because a run takes over a server that another run may have used."""
        await self.label_weights(UNKNOWN)

    async def is_asleep(self) -> bool:
        """Return whether the server has given the memory of its weights to the trainer. It is alive, and generates
        nothing."""
        return False

    @abstractmethod
    async def begin_weights(self, handle: WeightsHandle) -> None:
        """Stage and verify weights. The served weights do not change."""

    @abstractmethod
    async def commit_weights(self, handle: WeightsHandle) -> None:
        """Serve the weights that `begin_weights` staged."""

    @abstractmethod
    async def abort_weights(self) -> None:
        """Drop the staged weights."""

    @abstractmethod
    async def release(self) -> None:
        """Free the generation memory. Running requests end with their tokens so far, later requests without tokens.

        It may be called again while the memory is free."""

    @abstractmethod
    async def resume(self) -> None:
        """Allocate the generation memory again, if a weights update has not done so. Raises RolloutError with status
        503 if the server has no weights."""

    async def _post(self, path: str, body: object = None, *, timeout_s: float | None = None) -> None:
        await self._session.send("POST", self.url, path, body, timeout_s=timeout_s)

    def _routed_from(self, sampling: Sampling) -> int | None:
        """Return the position from which on the server is asked for experts, or None."""
        return sampling.routed_from if self.routing is not None else None

    def _answer_bytes(self, num_prompt: int, grants: Sequence[SegmentGrant], sampling: Sampling) -> int:
        """Return the most bytes that the answers to these grants may have."""
        most = BYTES_OF_ANSWER + BYTES_PER_TOKEN * sum(grant.max_tokens for grant in grants)
        if self._routed_from(sampling) is None or self.routing is None:
            return most
        num_tokens = sum(num_prompt + grant.max_tokens for grant in grants)
        return most + BYTES_PER_EXPERT * self.routing.width * num_tokens

    def _with_experts(
        self, segment: Segment, num_prompt: int, sampling: Sampling, read: Callable[[int], npt.NDArray[Any]] | None
    ) -> Segment:
        """Return a segment with the experts that were asked for. `read`: returns the numbers of those of so many
        tokens, [n, width], and possibly of earlier ones; None if the server has returned none."""
        start = self._routed_from(sampling)
        if start is None or self.routing is None or not segment.token_ids:
            return segment
        num_tokens = num_prompt + len(segment.token_ids) - 1 - start
        if num_tokens <= 0:
            return segment
        reason = self.routing_remedy
        if read is not None:
            try:
                experts = read(num_tokens)[-num_tokens:]
            except ValueError as error:
                reason = f"its reply has {error}"
            else:
                width = experts.shape[1]
                fits = 0 < width <= self.routing.width and width % self.routing.num_chosen == 0
                if len(experts) == num_tokens and fits and self._width in (None, width):
                    self._width = width
                    return replace(segment, experts=compact(experts, self.routing.num_experts))
                reason = f"its reply has experts of the form {experts.shape}"
        if not self._told:
            self._told = True
            logger.warning(
                "%s returns no experts of its tokens (%s): the learner's routers choose their own "
                "(trainer.router_replay)",
                *(self.url, reason),
            )
        return segment

    def _segments(
        self,
        replies: Sequence[bodies.SampledReply],
        num_prompt: int,
        grants: Sequence[SegmentGrant],
        sampling: Sampling,
    ) -> list[Segment]:
        if len(replies) != len(grants):
            raise RolloutError(self.url, f"returned {len(replies)} samples instead of {len(grants)}", 200)
        segments = []
        for reply, grant in zip(replies, grants, strict=True):
            meta = reply.meta_info
            scored = meta.output_token_logprobs or ()
            logprobs = [math.nan if logprob is None else logprob for logprob, _, _ in scored]
            if scored and [token for _, token, _ in scored] != reply.output_ids:
                raise RolloutError(self.url, "returned log-probabilities of other tokens than it sampled", 200)
            if meta.finish_reason is None:
                raise RolloutError(self.url, "returned an answer that is not finished", 200)
            reason = FINISH_REASONS[type(meta.finish_reason)]
            segment = self._segment(grant, reply.output_ids, logprobs, meta.weight_versions or (), reason)
            read = None
            if (text := meta.routed_experts) is not None:
                read = partial(from_wire, text, dtype=meta.routed_experts_dtype or "int32")
            segments.append(self._with_experts(segment, num_prompt, sampling, read))
        return segments

    def _segment(
        self,
        grant: SegmentGrant,
        token_ids: list[int],
        logprobs: list[float],
        labelled: Sequence[bodies.WeightSpan],
        reason: FinishReason,
    ) -> Segment:
        """Return a segment. Raises RolloutError if a token lacks its log-probability or its policy_version, or if there
        are more tokens than granted."""
        if len(token_ids) > grant.max_tokens:
            message = f"returned {len(token_ids)} tokens, more than the {grant.max_tokens} that it was asked for"
            raise RolloutError(self.url, message, 200)
        if not all(0 <= token < MAX_TOKEN for token in token_ids):
            raise RolloutError(self.url, "returned numbers that are no tokens", 200)
        if not all(MIN_LOGPROB <= logprob <= MAX_LOGPROB for logprob in logprobs):
            message = f"returned numbers above zero, below {MIN_LOGPROB:g}, or none, as log-probabilities"
            raise RolloutError(self.url, message, 200)
        if self.keeps_weights and not labelled:
            labelled = [bodies.WeightSpan(version="", start=0, end=len(token_ids))]
        spans = [
            VersionSpan(self._version(span.version), span.start, span.end)
            for span in labelled
            if span.end > span.start  # others have no tokens
        ]
        if len(logprobs) != len(token_ids):
            message = "returned tokens without log-probabilities: use an engine that honours return_logprob"
            raise RolloutError(self.url, message, 200)
        bounds = [0, *(span.end for span in spans)]
        if [*(span.start for span in spans), len(token_ids)] != bounds or sorted(bounds) != bounds:
            raise RolloutError(
                self.url,
                f"returned {len(token_ids)} tokens with {len(spans)} version spans, beginning with {spans[:4]}, which "
                "do not cover them; the "
                "correction for stale data needs the policy_version of every token: try a newer release of the engine",
                200,
            )
        return Segment(token_ids=token_ids, logprobs=logprobs, spans=spans, finish_reason=reason)

    def _version(self, label: str) -> int:
        """Return an engine's weights label as a policy_version.

        Raises RolloutError with status 503 for any other label. Engines have their own label before the first update.
        The label is `UNKNOWN` after an update that failed."""
        is_version = label.isdecimal() and len(label) <= len(str(MAX_VERSION)) and int(label) <= MAX_VERSION
        if not is_version and self.keeps_weights:
            return NO_VERSION
        if not is_version:
            raise RolloutError(
                self.url, f"serves weights with the label {label[:99]!r}, which no trainer published", 503
            )
        return int(label)


class RolloutClient(ServerClient):
    """The client of a Penstock server. One request generates the samples of all grants."""

    update_mode = "in_place"

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        limits = [grant.max_tokens for grant in grants]
        limit = limits[0] if len(set(limits)) == 1 else limits
        params = sampling_body(sampling, n=len(grants), max_new_tokens=limit, sampling_seed=list(seeds))
        start = self._routed_from(sampling)
        body = bodies.GenerateBody(
            input_ids=list(prompt_ids),
            sampling_params=params,
            return_logprob=True,
            return_text=False,
            return_routed_experts=start is not None,
            routed_experts_start_len=start or 0,
            compact_routed_experts=start is not None,
        )
        kind = bodies.SampledReply | list[bodies.SampledReply]
        reply: Any = await self._session.call(
            "POST",
            self.url,
            "/generate",
            body,
            kind,  # type: ignore[arg-type]
            timeout_s=ANSWER_S,
            max_bytes=self._answer_bytes(len(prompt_ids), grants, sampling),
        )
        return self._segments(reply if isinstance(reply, list) else [reply], len(prompt_ids), grants, sampling)

    async def check(self) -> None:
        try:
            await self.ready()
        except RolloutError as error:
            if error.status != 503:  # 503: a Penstock server that is not ready yet
                raise

    async def ready(self) -> bodies.Ready:
        """Return the server's identity and state. Raises RolloutError with status 503 unless it is serving."""
        return await self._session.call("GET", self.url, "/ready", None, bodies.Ready, timeout_s=PROBE_S)

    async def served_version(self) -> int:
        return (await self.ready()).policy_version

    async def _label(self) -> ServedLabel:
        return ServedLabel(str(await self.served_version()))

    async def claim(self, run_id: str, nonce: str, *, lease_s: float) -> None:
        await self._post("/claim", bodies.ClaimBody(run_id=run_id, nonce=nonce, lease_s=lease_s), timeout_s=PROBE_S)

    async def forget_weights(self) -> None:
        await self._post("/weights/forget", {})

    async def begin_weights(self, handle: WeightsHandle) -> None:
        await self._change_weights("begin", handle, handle, timeout_s=handle.receive_limit_s + BEGIN_SLACK_S)

    async def commit_weights(self, handle: WeightsHandle) -> None:
        body = bodies.CommitBody(policy_version=handle.policy_version, mode=self.update_mode)
        await self._change_weights("commit", body, handle, timeout_s=COMMIT_S[self.update_mode])

    async def _change_weights(self, step: str, body: object, handle: WeightsHandle, *, timeout_s: float) -> None:
        """Raise RolloutError unless the server answers that it now holds exactly these weights."""
        path = f"/weights/{step}"
        reply = await self._session.call("POST", self.url, path, body, bodies.WeightsReply, timeout_s=timeout_s)
        if (reply.policy_version, reply.fingerprint) != (handle.policy_version, handle.fingerprint):
            held = f"policy_version {reply.policy_version} with fingerprint {reply.fingerprint}"
            message = f"holds {held}, not {handle.policy_version} with {handle.fingerprint}"
            raise RolloutError(self.url, message, 200)
        self.transport = reply.transport

    async def abort_weights(self) -> None:
        await self._post("/weights/abort", {})

    async def release(self) -> None:
        await self._post("/release_memory_occupation", {"tags": ["kv_cache"]})

    async def resume(self) -> None:
        await self._post("/resume_memory_occupation", {})


def sampling_body(given: Sampling, **own: Any) -> bodies.SamplingBody:
    """Return `sampling_params` with the values of a run, and values of `own`."""
    return bodies.SamplingBody(temperature=given.temperature, top_p=given.top_p, top_k=given.top_k or -1, **own)
