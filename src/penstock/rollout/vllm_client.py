"""The client of a vLLM server with its reinforcement-learning endpoints. Torch-free.

The server needs VLLM_SERVER_DEV_MODE=1 and --enable-scale-out. The client was tested with vLLM 0.32, which reports for
every token the weights that sampled it.

`/inference/v1/generate` takes and returns tokens. Its log-probabilities are those of the sampling distribution only
with `--logprobs-mode processed_logprobs`. The default mode ignores the temperature.

Where the trainer takes turns with the server on a device, the server also needs --enable-sleep-mode. It then sleeps at
level 2: it discards its weights, because every sleep ends with an update. If the updates are adapters, it sleeps at
level 1, and keeps its weights in main memory. An update wakes the memory of the weights, loads them or the adapters,
and only then wakes the KV memory, with which vLLM schedules requests again. Calls that wake or put to sleep
what is so already do nothing.

With `direct_weights`, vLLM gets the weights in its own weight transfer (`vllm_group.py`). If that cannot begin before
the pause, it reads a file.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from penstock.deadline import Stalled
from penstock.rollout import bodies
from penstock.rollout.client import ANSWER_S, ASLEEP, COMMIT_S, RESUME_S
from penstock.rollout.engine_client import EngineClient
from penstock.rollout.generator import all_of
from penstock.rollout.served_adapters import span_of
from penstock.rollout.session import HttpSession, RolloutError
from penstock.rollout.vllm_group import VllmGroup, VllmMemoryGroup
from penstock.routed_experts import from_npy
from penstock.runtime.http_client import short
from penstock.samples import Segment
from penstock.seeding import stable_seed
from penstock.types import DirectWeights, Sampling, SegmentGrant, UpdateMode, WeightsHandle

GENERATE = "/inference/v1/generate"
PAUSES: dict[UpdateMode, str] = {
    "in_place": "/pause?mode=keep&clear_cache=false",  # otherwise vLLM computes running requests again
    "retract": "/pause?mode=abort",
    "drain": "/pause?mode=wait",
}
BACKENDS: dict[DirectWeights, str] = {"nccl": "nccl", "memory": "ipc"}
"""vLLM's own weight transfers in which the trainer sends."""
SLEEP, DISCARD, KEEP = "/sleep?level={}&mode=abort", 2, 1
"""Path that makes vLLM sleep, and its levels: without its weights, or with a copy of them in main memory."""
WAKE = "/wake_up?tags="
RELOAD_S = 900.0
"""Timeout for loading the weights of a large model."""
INFO_S = 60.0
"""Timeout for vLLM's description of itself, for which it runs programs."""


def transfer_words(way: DirectWeights) -> list[str]:
    """Return the words with which vLLM has this weight transfer."""
    return ["--weight-transfer-config", f'{{"backend": "{BACKENDS[way]}"}}']


class Logprob(Struct):
    """The log-probability of one token."""

    logprob: float


class Logprobs(Struct):
    """The log-probabilities of one sample."""

    content: list[Logprob] | None = None


class Choice(Struct, kw_only=True):
    """One sample. `weight_versions` is None in vLLM releases that do not report versions."""

    index: int
    finish_reason: Literal["stop", "length", "abort"]
    token_ids: list[int]
    logprobs: Logprobs | None = None
    weight_versions: list[bodies.WeightSpan] | None = None
    routed_experts: str | None = None
    """Of all tokens but the last one, with `--enable-return-routed-experts`."""


class Generated(Struct):
    """The reply of `/inference/v1/generate`."""

    choices: list[Choice]
    model: str | None = None
    """The model or adapter that computed the samples. None in vLLM releases that do not say."""


class ModelSettings(Struct):
    """vLLM's settings of its model. None in releases that do not tell."""

    enable_sleep_mode: bool | None = None


class DeviceSettings(Struct):
    """vLLM's settings of its device."""

    device: str | None = None


class TransferSettings(Struct):
    """vLLM's settings of its own weight transfer."""

    backend: str


class VllmSettings(Struct):
    """vLLM's settings."""

    model_config: ModelSettings = msgspec.field(default_factory=ModelSettings)
    device_config: DeviceSettings = msgspec.field(default_factory=DeviceSettings)
    weight_transfer_config: TransferSettings | None = None


class ServerInfo(Struct):
    """The reply of `/server_info?config_format=json`."""

    vllm_config: VllmSettings = msgspec.field(default_factory=VllmSettings)


class VllmClient(EngineClient):
    """The client of one vLLM server."""

    update_mode = "in_place"
    label_path = "/weight_info"
    adapters_prefix = "/v1"
    routing_remedy = "start it with --enable-return-routed-experts"

    def __init__(self, url: str, session: HttpSession, *, update_mode: UpdateMode | None = None) -> None:
        super().__init__(url, session, update_mode=update_mode)
        self._salt = ""
        """The policy_version of the last answer, sent as `cache_salt`.

        So vLLM does not reuse prompts that other weights cached. Requests between an update and the first answer
        with the new version are an exception."""
        self._returns_experts = False
        """Whether an answer had experts. Then the server also knows the setting that leaves out earlier ones."""

    async def _generate(
        self,
        prompt_ids: Sequence[int],
        grants: Sequence[SegmentGrant],
        sampling: Sampling,
        seeds: Sequence[int],
        *,
        adapter: str | None,
    ) -> list[Segment]:
        """Return one segment per grant. Each grant is a separate request, because vLLM has one limit per request.

        With a seed, vLLM draws each row of a batch by itself, which slows its decode steps. So it gets none unless the
        client is `seeded`. vLLM restarts its random numbers with each request, so the client mixes the seed with the
        position."""
        pairs = zip(grants, seeds, strict=True)
        return await all_of(self._sample(prompt_ids, grant, sampling, seed, adapter) for grant, seed in pairs)

    async def _sample(
        self, prompt_ids: Sequence[int], grant: SegmentGrant, sampling: Sampling, seed: int, adapter: str | None
    ) -> Segment:
        body: dict[str, Any] = {
            "token_ids": list(prompt_ids),
            "sampling_params": {
                "max_tokens": grant.max_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": sampling.top_k or -1,
                "logprobs": 0,
                "detokenize": False,
            },
        }
        if self.seeded:
            body["sampling_params"]["seed"] = stable_seed(seed, len(prompt_ids))
        if adapter is not None:
            body["model"] = adapter  # vLLM reuses prompts of the same adapter only
        elif self._salt:
            body["cache_salt"] = self._salt
        if self._returns_experts and (start := self._routed_from(sampling)):
            body["sampling_params"]["routed_experts_prompt_start"] = start
        most = self._answer_bytes(len(prompt_ids), [grant], sampling)
        reply = await self._session.call(
            "POST", self.url, GENERATE, body, Generated, timeout_s=ANSWER_S, max_bytes=most
        )
        if len(reply.choices) != 1:
            raise RolloutError(self.url, f"returned {len(reply.choices)} samples instead of 1", 200)
        (choice,) = reply.choices
        spans = [span for span in choice.weight_versions or () if span.end > span.start]
        if adapter is not None:
            if reply.model not in (None, adapter):
                raise RolloutError(self.url, f"computed a sample with {reply.model!r} instead of {adapter!r}", 200)
            spans = span_of(adapter, len(choice.token_ids))
        logprobs = [each.logprob for each in choice.logprobs.content or ()] if choice.logprobs else []
        segment = self._segment(grant, choice.token_ids, logprobs, spans, choice.finish_reason)
        if spans:
            self._salt = spans[-1].version
        text = choice.routed_experts
        self._returns_experts |= text is not None
        read = None if text is None else partial(from_npy, text)
        return self._with_experts(segment, len(prompt_ids), sampling, read)

    async def check(self) -> None:
        """Check that the server has the needed endpoints. Raises RolloutError that names the missing start option."""
        needed: list[tuple[str, str, object, str]] = [
            ("GET", "/weight_info", None, "VLLM_SERVER_DEV_MODE=1 in its environment"),
            ("POST", GENERATE, {}, "--enable-scale-out"),
        ]
        needed = needed[1:] if self.keeps_weights else needed
        if self.serves_adapters:
            remedy = "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 in its environment, and --enable-lora"
            needed.append(("POST", "/v1/load_lora_adapter", {}, remedy))
        for method, path, body, remedy in needed:
            try:
                await self._session.send(method, self.url, path, body)
            except RolloutError as error:  # an empty request is refused too, but with another status
                if error.status in (403, 404):
                    raise RolloutError(self.url, f"has no route {path}: start it with {remedy}", 400) from error
        if self.takes_turns:
            self._check_sleep_mode(await self._settings())
        if self.direct_weights is not None:
            self._check_transfer(await self._settings(), self.direct_weights)

    async def _settings(self) -> VllmSettings:
        path = "/server_info?config_format=json"
        return (await self._session.call("GET", self.url, path, None, ServerInfo, timeout_s=INFO_S)).vllm_config

    def _check_sleep_mode(self, settings: VllmSettings) -> None:
        """Check that sleep frees the device. Without the option, vLLM answers as if it did. On a CPU it frees nothing,
        and the option is refused."""
        if settings.model_config.enable_sleep_mode is False and settings.device_config.device != "cpu":
            raise RolloutError(
                self.url,
                "cannot give its memory to the trainer, as scheduler.mode colocated needs: start it with "
                "--enable-sleep-mode, or use another scheduler.mode",
                400,
            )

    def _check_transfer(self, settings: VllmSettings, way: DirectWeights) -> None:
        """Check that the server has the weight transfer in which the trainer can send."""
        found = settings.weight_transfer_config
        if found is None or found.backend != BACKENDS[way]:
            has = "no weight transfer of its own" if found is None else f"weight transfer {short(found.backend)!r}"
            raise RolloutError(
                self.url,
                f"has {has}, and rollout.direct_weights needs {BACKENDS[way]!r}: start it with "
                f"{' '.join(transfer_words(way))}, or set rollout.direct_weights to false",
                400,
            )

    async def begin_weights(self, handle: WeightsHandle) -> None:
        """Join the group in which the weights come, if they come directly; else bring their file. If there is no file
        for this server, the group alone is left."""
        await self._leave_group()
        way = self.direct_weights
        kind = VllmMemoryGroup if way == "memory" else VllmGroup
        if way is not None and await self._try_group(kind, handle):
            return
        try:
            await super().begin_weights(handle)
        except (RolloutError, Stalled):
            if way is None:
                raise
            await self._open_group(kind, handle)

    async def release(self) -> None:
        await self._post(PAUSES["retract"])
        await self.label_weights(ASLEEP)  # after the last token of the weights before
        level = KEEP if self.serves_adapters else DISCARD
        await self._post(SLEEP.format(level))  # it also ends requests that came since the pause

    async def _replace_weights(self, handle: WeightsHandle) -> None:
        """Pause, make every worker load the weights, set the version label, and continue. A failure in between leaves
        the label `UNKNOWN`, so no later sample counts as one of a known version. A server with layers that cannot
        compute stays paused until a later update mends it."""
        try:
            await self._post(PAUSES[self.update_mode], timeout_s=COMMIT_S[self.update_mode])
            await self.forget_weights()
            await self._load(handle)
        finally:
            if self._group is None or not self._group.is_torn:
                await self._continue()

    async def _end_running(self) -> None:
        await self._post(PAUSES["retract"], timeout_s=COMMIT_S["retract"])

    async def _continue(self) -> None:
        await self._post("/resume", timeout_s=RESUME_S)

    async def _wake_with(self, handle: WeightsHandle) -> None:
        try:
            await self._post(f"{WAKE}weights")
            await self._load(handle)
            await self._post(f"{WAKE}kv_cache")
        except BaseException:
            with suppress(RolloutError, Stalled):
                await self.release()
            raise

    async def _load(self, handle: WeightsHandle) -> None:
        if handle.adapters is not None:
            return await self._load_adapters(handle)
        if self._group is not None:
            return await self._take(self._group, handle, flush=False)
        # A server that started with random weights would otherwise "read" random ones again.
        await self._rpc("update_config", args=[{"load_config": {"load_format": "safetensors"}}])
        await self._rpc("reload_weights", kwargs={"weights_path": str(Path(handle.path).parent)})
        await self.label_weights(str(handle.policy_version))

    async def _rpc(self, method: str, **arguments: Any) -> None:
        await self._post("/collective_rpc", {"method": method, **arguments}, timeout_s=RELOAD_S)
