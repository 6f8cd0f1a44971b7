"""The client of an SGLang server; torch-free. Tested against our own server, which speaks the same protocol; not yet
verified against SGLang itself, which needs a GPU.

Every sample is a prompt of its own in one batch: SGLang has one limit and one seed per prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import Struct

from penstock.rollout import wire
from penstock.rollout.client import ANSWER_S, COMMIT_S, PROBE_S, read_segment, read_version
from penstock.rollout.foreign import RESUME_S, UNKNOWN, ForeignClient
from penstock.rollout.session import RolloutError
from penstock.types import Sampling, Segment, SegmentGrant, UpdateMode, WeightsHandle

PAUSES: dict[UpdateMode, str] = {"in_place": "in_place", "retract": "abort"}
"""SGLang's own `retract` would keep prompts that the old weights computed: it refuses to flush while answers wait."""


class ModelInfo(Struct):
    """The part of `/model_info` that matters here."""

    weight_version: str


class Outcome(Struct):
    """The reply of an update."""

    success: bool
    message: str


class SGLangClient(ForeignClient):
    """One server."""

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        """One segment per grant, all from one request."""
        body = wire.GenerateBody(
            input_ids=[list(prompt_ids) for _ in grants],
            sampling_params=[
                wire.SamplingBody(
                    max_new_tokens=grant.max_tokens,
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k or -1,
                    sampling_seed=seed,
                )
                for grant, seed in zip(grants, seeds, strict=True)
            ],
            return_logprob=True,
        )
        replies = await self._session.call(
            "POST", self.url, "/generate", body, list[wire.GenerateReply], timeout_s=ANSWER_S
        )
        if len(replies) != len(grants):
            raise RolloutError(self.url, f"{len(replies)} samples came back instead of {len(grants)}", 200)
        return [read_segment(self.url, reply) for reply in replies]

    async def served_version(self) -> int:
        info = await self._session.call("GET", self.url, "/model_info", None, ModelInfo, timeout_s=PROBE_S)
        return read_version(self.url, info.weight_version)

    async def alive(self) -> None:
        """`/model_info`: SGLang's `/health` generates, and fails while paused."""
        await self._session.send("GET", self.url, "/model_info", timeout_s=PROBE_S)

    async def check(self) -> None:
        """It answers `/model_info`; what else it can do shows at the first update."""
        await self._session.call("GET", self.url, "/model_info", None, ModelInfo)

    async def forget_weights(self) -> None:
        body = {"new_version": UNKNOWN, "abort_all_requests": False}
        await self._session.send("POST", self.url, "/update_weight_version", body)

    async def commit_weights(self, handle: WeightsHandle) -> None:
        """From the directory, which needs no bracket and is the one update SGLang takes back if it fails. Without a
        pause it waits until nothing runs, which is `drain`."""
        body = {
            "model_path": str(Path(handle.path).parent),
            "weight_version": str(handle.policy_version),
            "flush_cache": self._update_mode != "in_place",
            "load_format": "auto",  # its own may be that of the random weights it began with
        }
        seconds = COMMIT_S[self._update_mode]
        pause = PAUSES.get(self._update_mode)
        try:
            if pause is not None:
                await self._session.send("POST", self.url, "/pause_generation", {"mode": pause})
            outcome = await self._session.call(
                "POST", self.url, "/update_weights_from_disk", body, Outcome, timeout_s=seconds
            )
        finally:
            if pause is not None:
                await self._session.send("POST", self.url, "/continue_generation", {}, timeout_s=RESUME_S)
        if not outcome.success:
            raise RolloutError(self.url, f"refused the weights: {outcome.message}", 400)
