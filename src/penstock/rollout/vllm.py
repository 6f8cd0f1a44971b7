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

from penstock.rollout import wire
from penstock.rollout.client import ANSWER_S, COMMIT_S, PROBE_S, checked, read_version
from penstock.rollout.foreign import RESUME_S, UNKNOWN, ForeignClient
from penstock.rollout.session import HttpSession, RolloutError
from penstock.types import (
    FinishReason,
    Sampling,
    Segment,
    SegmentGrant,
    UpdateMode,
    VersionSpan,
    WeightsHandle,
    stable_seed,
)

GENERATE = "/inference/v1/generate"
PAUSES: dict[UpdateMode, str] = {
    "in_place": "/pause?mode=keep&clear_cache=false",  # else all that runs is computed anew
    "retract": "/pause?mode=abort",
    "drain": "/pause?mode=wait",
}
RELOAD_S = 900.0
"""For reading the weights of a large model."""


class Logprob(Struct):
    """Of one token."""

    logprob: float


class Logprobs(Struct):
    """Of one sample."""

    content: list[Logprob] | None = None


class Choice(Struct, kw_only=True):
    """One sample. `weight_versions` is None from releases that do not tell."""

    index: int
    finish_reason: Literal["stop", "length", "abort"]
    token_ids: list[int]
    logprobs: Logprobs | None = None
    weight_versions: list[wire.WeightSpan] | None = None


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
        """The version seen last. Prompts that other weights cached are not reused, but for those of requests between an
        update and the first answer that shows it."""

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        """One segment per grant. Each is a request of its own: vLLM has one limit and one seed per request, and starts
        its noise anew with each, so that the seed is mixed with the position."""
        try:
            async with asyncio.TaskGroup() as tasks:
                asked = [
                    tasks.create_task(
                        self._ask(prompt_ids, grant.max_tokens, sampling, stable_seed(seed, len(prompt_ids)))
                    )
                    for grant, seed in zip(grants, seeds, strict=True)
                ]
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in asked]

    async def _ask(self, prompt_ids: Sequence[int], limit: int, sampling: Sampling, seed: int) -> Segment:
        body: dict[str, Any] = {
            "token_ids": list(prompt_ids),
            "sampling_params": {
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
        reply = await self._session.call("POST", self.url, GENERATE, body, Generated, timeout_s=ANSWER_S)
        if len(reply.choices) != 1:
            raise RolloutError(self.url, f"{len(reply.choices)} samples came back instead of one", 200)
        segment = self._segment(reply.choices[0])
        if segment.spans:
            self._salt = str(segment.spans[-1].policy_version)
        return segment

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

    async def check(self) -> None:
        """Raises RolloutError that names what it was not started with."""
        needed: list[tuple[str, str, object, str]] = [
            ("GET", "/weight_info", None, "VLLM_SERVER_DEV_MODE=1 in its environment"),
            ("POST", GENERATE, {}, "--enable-scale-out"),
        ]
        for method, path, body, remedy in needed:
            try:
                await self._session.send(method, self.url, path, body)
            except RolloutError as error:  # an empty request is refused, but not like one that is not served
                if error.status in (403, 404):
                    raise RolloutError(self.url, f"does not serve {path}: start it with {remedy}", 400) from error

    async def forget_weights(self) -> None:
        await self._post("/update_weight_version", {"new_version": UNKNOWN})

    async def commit_weights(self, handle: WeightsHandle) -> None:
        """Pause, have every worker read the directory, label, go on. Whatever fails between leaves a label that is no
        version, so that nothing sampled from then on is taken for one."""
        try:
            await self._post(PAUSES[self._update_mode], timeout_s=COMMIT_S[self._update_mode])
            await self.forget_weights()
            # A server that started with random weights would otherwise "read" random ones again.
            await self._rpc("update_config", args=[{"load_config": {"load_format": "safetensors"}}])
            await self._rpc("reload_weights", kwargs={"weights_path": str(Path(handle.path).parent)})
            await self._post("/update_weight_version", {"new_version": str(handle.policy_version)})
        finally:
            await self._post("/resume", timeout_s=RESUME_S)

    async def _rpc(self, method: str, **arguments: Any) -> None:
        await self._post("/collective_rpc", {"method": method, **arguments}, timeout_s=RELOAD_S)

    async def _post(self, path: str, body: object = None, *, timeout_s: float | None = None) -> None:
        await self._session.send("POST", self.url, path, body, timeout_s=timeout_s)


def _spans(choice: Choice) -> list[wire.WeightSpan]:
    return [span for span in choice.weight_versions or () if span.end > span.start]
