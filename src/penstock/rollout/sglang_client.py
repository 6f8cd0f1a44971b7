"""The client of an SGLang server. Torch-free.

It is tested against Penstock's own server, which has the same protocol. It is not yet verified against SGLang itself,
which needs a GPU. Every sample is a separate prompt in one batch, because SGLang has one limit and one seed per prompt.

A server on the trainer's machine reads new weights from their file. One on another machine gets them by broadcast
(`sglang_group.py`). On the trainer's device, with `direct_weights`, it copies them from the trainer's memory. With
`drain`, and of adapters, it reads a file too (`EngineClient`): SGLang takes buckets while it is paused, and `drain`
does not pause it.

Where the trainer takes turns with the server on a device, SGLang needs --enable-memory-saver, and torch-memory-saver.
It dies if it has to release memory while a request runs, or to resume memory that it has not released. It does not
tell what it has released, so the label of its weights does (`ASLEEP`), also to the next controller. If the updates are
adapters, it also needs --enable-weights-cpu-backup: it then keeps a copy of its weights in main memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from msgspec import Struct

from penstock.deadline import Stalled
from penstock.rollout import bodies
from penstock.rollout.client import (
    ANSWER_S,
    ASLEEP,
    COMMIT_S,
    CONFLICT,
    PROBE_S,
    RESUME_S,
    UNKNOWN,
    sampling_body,
)
from penstock.rollout.engine_client import EngineClient
from penstock.rollout.served_adapters import span_of
from penstock.rollout.session import HttpSession, RolloutError
from penstock.rollout.sglang_group import SGLangGroup, SGLangMemoryGroup
from penstock.samples import Segment
from penstock.types import Sampling, SegmentGrant, UpdateMode, WeightsHandle

PAUSES: dict[UpdateMode, str] = {"in_place": "in_place", "retract": "abort"}
"""Pause mode of SGLang for each update mode.

SGLang's own `retract` would keep prompts that the old weights computed: SGLang refuses to flush while requests wait."""
RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"
IDLE_S = 30.0
"""Limit in seconds of the wait until the engine has dropped its ended requests."""


class ServerInfo(Struct):
    """The reply of `/server_info`. None in releases that do not tell."""

    enable_memory_saver: bool | None = None


class SGLangClient(EngineClient):
    """The client of one SGLang server."""

    label_path = "/model_info"
    routing_remedy = "start it with --enable-return-routed-experts"

    def __init__(self, url: str, session: HttpSession, *, update_mode: UpdateMode | None = None) -> None:
        super().__init__(url, session, update_mode=update_mode)
        self._is_mixed = False
        """Whether the server may have weights of two versions under the label of one."""

    async def _generate(
        self,
        prompt_ids: Sequence[int],
        grants: Sequence[SegmentGrant],
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        adapter: str | None,
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
        if adapter is not None:
            body.lora_path = [adapter for _ in grants]
        kind, most = list[bodies.SampledReply], self._answer_bytes(len(prompt_ids), grants, sampling)
        replies = await self._session.call(
            "POST", self.url, "/generate", body, kind, timeout_s=ANSWER_S, max_bytes=most
        )
        if adapter is not None:
            for reply in replies:
                reply.meta_info.weight_versions = span_of(adapter, len(reply.output_ids))
        return self._segments(replies, len(prompt_ids), grants, sampling)

    async def alive(self) -> None:
        """Call `/model_info`, because SGLang's `/health` generates tokens and fails while paused."""
        await self._session.send("GET", self.url, self.label_path, timeout_s=PROBE_S)

    async def check(self) -> None:
        """Check that the server answers `/model_info`, and that it can release memory if it has to. Other missing
        features show at the first update."""
        await self._label()
        if not self.takes_turns:
            return
        info = await self._session.call("GET", self.url, "/server_info", None, ServerInfo)
        if info.enable_memory_saver is False:
            raise RolloutError(
                self.url,
                "cannot give its memory to the trainer, as scheduler.mode colocated needs: start it with "
                "--enable-memory-saver, or use another scheduler.mode",
                400,
            )

    async def label_weights(self, label: str) -> None:
        body = {"new_version": label, "abort_all_requests": False}
        await self._post("/update_weight_version", body, timeout_s=RESUME_S)

    async def release(self) -> None:
        if await self.is_asleep():
            return
        await self._post("/pause_generation", {"mode": "abort"}, timeout_s=COMMIT_S["retract"])
        try:
            await self._await_idle()
            await self.label_weights(ASLEEP)
            try:
                await self._post(RELEASE, {})
            except RolloutError:
                await self.label_weights(UNKNOWN)
                raise
        except RolloutError:
            await self._continue()
            raise

    async def _await_idle(self) -> None:
        """Wait until the engine has dropped its ended requests, so that it may release memory."""
        try:
            await self._post(f"/flush_cache?timeout={IDLE_S:g}", timeout_s=COMMIT_S["retract"])
        except RolloutError as error:
            if error.status != 400:
                raise
            raise RolloutError(self.url, f"was not idle within {IDLE_S:g} s: {error.message}", 503) from error

    async def begin_weights(self, handle: WeightsHandle) -> None:
        """Join the group in which the weights come, if they come by broadcast. A server that has them needs none."""
        await self._leave_group()
        if self._is_lent(handle) and await self._try_group(SGLangMemoryGroup, handle):
            return
        if not handle.url or self._is_fetched(handle):
            await super().begin_weights(handle)
        elif not self._is_elsewhere(handle):
            self.transport = "file"
        elif not await self._has(handle):
            await self._open_group(SGLangGroup, handle)

    def _is_fetched(self, handle: WeightsHandle) -> bool:
        return super()._is_fetched(handle) and (self.update_mode == "drain" or handle.adapters is not None)

    def _is_lent(self, handle: WeightsHandle) -> bool:
        """Return whether the server copies these weights from the memory of its device. It takes them while it is
        paused."""
        return self.direct_weights == "memory" and self.update_mode != "drain" and handle.adapters is None

    def _is_elsewhere(self, handle: WeightsHandle) -> bool:
        """Return whether the server cannot open the file of these weights, because it is on another machine."""
        return bool(handle.url) and urlsplit(handle.url).hostname != urlsplit(self.url).hostname

    async def _has(self, handle: WeightsHandle) -> bool:
        return (await self._label()).weight_version == str(handle.policy_version)

    async def _replace_weights(self, handle: WeightsHandle) -> None:
        """Make the server load weights: from their directory, or from the group that `begin_weights` joined.

        SGLang rolls back a failed update from a directory, and this needs no bracket. A broadcast that fails leaves the
        label `UNKNOWN`. Without a pause, SGLang waits until no request runs; this is `drain`."""
        pause = PAUSES.get(self.update_mode)
        self._is_mixed = False
        try:
            if pause is not None:
                await self._post("/pause_generation", {"mode": pause})
            await self._load(handle, flush=self.update_mode != "in_place")
        finally:
            if pause is not None and not self._is_mixed:  # else it stays paused until a later update mends it
                await self._continue()

    async def _wake_with(self, handle: WeightsHandle) -> None:
        await self._post(RESUME, {"tags": ["weights"]})
        try:
            await self._load(handle, flush=False)  # the cache is empty
            await self._post(RESUME, {"tags": ["kv_cache", "cuda_graph"]})
        except BaseException:
            with suppress(RolloutError, Stalled):
                await self.label_weights(ASLEEP)
                await self._post(RELEASE, {"tags": ["weights"]})
            raise
        await self._continue()

    async def _load(self, handle: WeightsHandle, *, flush: bool) -> None:
        if handle.adapters is not None:
            await self._load_adapters(handle)
        elif self._group is not None or self._is_elsewhere(handle):
            await self._load_group(handle, flush=flush)
        else:
            await self._load_file(handle, flush=flush)

    async def _load_group(self, handle: WeightsHandle, *, flush: bool) -> None:
        group = self._group
        if group is None:
            if not await self._has(handle):
                raise RolloutError(self.url, "has joined no group for these weights", CONFLICT)
            return
        try:
            await self._take(group, handle, flush=flush)
        except BaseException:
            if group.has_sent:
                self._is_mixed = True
                with suppress(RolloutError, Stalled):
                    await self.label_weights(UNKNOWN)
                    self._is_mixed = False
            raise

    async def _load_file(self, handle: WeightsHandle, *, flush: bool) -> None:
        body = {
            "model_path": str(Path(handle.path).parent),
            "weight_version": str(handle.policy_version),
            "flush_cache": flush,
            "load_format": "auto",  # the server's own format may be `dummy`, for random initial weights
        }
        path, seconds = "/update_weights_from_disk", COMMIT_S[self.update_mode]
        outcome = await self._session.call("POST", self.url, path, body, bodies.Outcome, timeout_s=seconds)
        if not outcome.success:
            raise RolloutError(self.url, f"did not load the weights: {outcome.message}", 400)

    async def _end_running(self) -> None:
        await self._post("/pause_generation", {"mode": PAUSES["retract"]})

    async def _continue(self) -> None:
        await self._post("/continue_generation", {}, timeout_s=RESUME_S)
