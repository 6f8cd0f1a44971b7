"""The client of an SGLang server. Torch-free.

It is tested against Penstock's own server, which has the same protocol. It is not yet verified against SGLang itself,
which needs a GPU. Every sample is a separate prompt in one batch, because SGLang has one limit and one seed per prompt.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.rollout import bodies
from penstock.rollout.client import (
    ANSWER_S,
    COMMIT_S,
    PROBE_S,
    RESUME_S,
    ServerClient,
    sampling_body,
)
from penstock.rollout.session import RolloutError
from penstock.samples import Segment
from penstock.types import Sampling, SegmentGrant, UpdateMode, WeightsHandle

PAUSES: dict[UpdateMode, str] = {"in_place": "in_place", "retract": "abort"}
"""Pause mode of SGLang for each update mode.

SGLang's own `retract` would keep prompts that the old weights computed: SGLang refuses to flush while requests wait."""


class SGLangClient(ServerClient):
    """The client of one SGLang server."""

    label_path = "/model_info"
    routing_remedy = "start it with --enable-return-routed-experts"

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        start = self._routed_from(sampling)
        body = bodies.GenerateBody(
            input_ids=[list(prompt_ids) for _ in grants],
            sampling_params=[
                sampling_body(sampling, max_new_tokens=grant.max_tokens, sampling_seed=seed)
                for grant, seed in zip(grants, seeds, strict=True)
            ],
            return_logprob=True,
            return_routed_experts=start is not None,
            routed_experts_start_len=start or 0,
        )
        kind, most = list[bodies.SampledReply], self._answer_bytes(len(prompt_ids), grants, sampling)
        replies = await self._session.call(
            "POST", self.url, "/generate", body, kind, timeout_s=ANSWER_S, max_bytes=most
        )
        return self._segments(replies, len(prompt_ids), grants, sampling)

    async def alive(self) -> None:
        """Call `/model_info`, because SGLang's `/health` generates tokens and fails while paused."""
        await self._session.send("GET", self.url, self.label_path, timeout_s=PROBE_S)

    async def check(self) -> None:
        """Check that the server answers `/model_info`. Other missing features show at the first update."""
        await self._label()

    async def label_weights(self, label: str) -> None:
        await self._post("/update_weight_version", {"new_version": label, "abort_all_requests": False})

    async def commit_weights(self, handle: WeightsHandle) -> None:
        """Make the server load weights from the directory.

        This is the only kind of update that SGLang rolls back if it fails, and it needs no bracket. Without a pause,
        SGLang waits until no request runs; this is `drain`."""
        body = {
            "model_path": str(Path(handle.path).parent),
            "weight_version": str(handle.policy_version),
            "flush_cache": self.update_mode != "in_place",
            "load_format": "auto",  # the server's own format may be `dummy`, for random initial weights
        }
        pause = PAUSES.get(self.update_mode)
        try:
            if pause is not None:
                await self._post("/pause_generation", {"mode": pause})
            path, seconds = "/update_weights_from_disk", COMMIT_S[self.update_mode]
            outcome = await self._session.call("POST", self.url, path, body, bodies.Outcome, timeout_s=seconds)
        finally:
            if pause is not None:
                await self._post("/continue_generation", {}, timeout_s=RESUME_S)
        if not outcome.success:
            raise RolloutError(self.url, f"did not load the weights: {outcome.message}", 400)
