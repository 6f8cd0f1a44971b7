"""The client of a vLLM server with its reinforcement-learning endpoints (VLLM_SERVER_DEV_MODE=1, --enable-scale-out);
torch-free. Tried with vLLM 0.32, which says of every token which weights sampled it.

Tokens in, tokens out: `/inference/v1/generate`. Log-probabilities are those of the sampling distribution only with
`--logprobs-mode processed_logprobs`; its default leaves the temperature out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from penstock.rollout.client import PROBE_S, checked, read_version
from penstock.rollout.foreign import ForeignClient
from penstock.rollout.session import HttpSession, RolloutError
from penstock.types import FinishReason, Sampling, Segment, SegmentGrant, UpdateMode, VersionSpan, WeightsHandle

PAUSES: dict[UpdateMode, str] = {"in_place": "keep", "retract": "abort", "drain": "wait"}
UNKNOWN = "unknown"
"""Label of weights that an update may have left half new."""


class Logprob(Struct):
    """Of one token."""

    logprob: float


class Logprobs(Struct):
    """Of one sample."""

    content: list[Logprob] | None = None


class Span(Struct):
    """Output tokens [start, end) were sampled by the weights with this label."""

    version: str
    start: int
    end: int


class Choice(Struct, kw_only=True):
    """One sample. `weight_versions` is None from releases that do not tell."""

    index: int
    finish_reason: Literal["stop", "length", "abort"]
    token_ids: list[int]
    logprobs: Logprobs | None = None
    weight_versions: list[Span] | None = None


class Generated(Struct):
    """The reply of `/inference/v1/generate`."""

    choices: list[Choice]


class WeightInfo(Struct):
    """The reply of `/weight_info`."""

    weight_version: str


class VllmClient(ForeignClient):
    """One server."""

    def __init__(self, url: str, session: HttpSession, *, update_mode: UpdateMode = "retract") -> None:
        super().__init__(url, session, update_mode=update_mode)
        self._salt = ""
        """The version seen last. Prompts cached by other weights are not reused."""

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        """One segment per grant; those with equal limits from one request, which seeds them from its first."""
        by_limit: dict[int, list[int]] = {}
        for index, grant in enumerate(grants):
            by_limit.setdefault(grant.max_tokens, []).append(index)
        parts = await asyncio.gather(
            *(
                self._ask(prompt_ids, limit, len(members), sampling, seeds[members[0]])
                for limit, members in by_limit.items()
            )
        )
        placed = zip(by_limit.values(), parts, strict=True)
        segments = {index: segment for members, part in placed for index, segment in zip(members, part, strict=True)}
        return [segments[index] for index in range(len(grants))]

    async def _ask(
        self, prompt_ids: Sequence[int], limit: int, num_samples: int, sampling: Sampling, seed: int
    ) -> list[Segment]:
        body: dict[str, Any] = {
            "token_ids": list(prompt_ids),
            "sampling_params": {
                "n": num_samples,
                "max_tokens": limit,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "seed": seed,
                "logprobs": 0,
                "detokenize": False,
            },
        }
        if self._salt:
            body["cache_salt"] = self._salt
        reply = await self._session.call("POST", self.url, "/inference/v1/generate", body, Generated)
        if len(reply.choices) != num_samples:
            raise RolloutError(self.url, f"{len(reply.choices)} samples came back instead of {num_samples}", 200)
        segments = [self._segment(choice) for choice in sorted(reply.choices, key=lambda choice: choice.index)]
        self._salt = next((str(segment.spans[-1].policy_version) for segment in segments if segment.spans), self._salt)
        return segments

    def _segment(self, choice: Choice) -> Segment:
        reason: FinishReason = choice.finish_reason
        logprobs = choice.logprobs.content if choice.logprobs else None
        spans = [VersionSpan(read_version(self.url, each.version), each.start, each.end) for each in _spans(choice)]
        segment = Segment(
            token_ids=choice.token_ids,
            logprobs=[each.logprob for each in logprobs or ()],
            spans=spans,
            finish_reason=reason,
        )
        return checked(self.url, segment)

    async def served_version(self) -> int:
        info = await self._session.call("GET", self.url, "/weight_info", None, WeightInfo, timeout_s=PROBE_S)
        return read_version(self.url, info.weight_version)

    async def alive(self) -> None:
        await self._session.send("GET", self.url, "/health", timeout_s=PROBE_S)

    async def commit_weights(self, handle: WeightsHandle) -> None:
        """Pause, have every worker read the directory, label, go on. Whatever fails between leaves a label that is no
        version, so that nothing sampled from then on is taken for one."""
        await self._post(f"/pause?mode={PAUSES[self._update_mode]}")
        try:
            await self._post("/update_weight_version", {"new_version": UNKNOWN})
            # A server that started with random weights would otherwise "read" random ones again.
            await self._rpc("update_config", args=[{"load_config": {"load_format": "safetensors"}}])
            await self._rpc("reload_weights", kwargs={"weights_path": str(Path(handle.path).parent)})
            await self._post("/update_weight_version", {"new_version": str(handle.policy_version)})
        finally:
            await self._post("/resume")

    async def _rpc(self, method: str, **arguments: Any) -> None:
        await self._post("/collective_rpc", {"method": method, **arguments})

    async def _post(self, path: str, body: object = None) -> None:
        await self._session.send("POST", self.url, path, body)


def _spans(choice: Choice) -> list[Span]:
    return [span for span in choice.weight_versions or () if span.end > span.start]
