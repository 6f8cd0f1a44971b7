"""SGLang's control API: server information, pauses, cache flushes and weight updates.

`rollout/server.py` has the routes that Penstock's own API and SGLang's have in common. This server answers where SGLang
fails an assertion, hangs or answers late. `/health_generate` answers at once while paused. A bracket that is left open
closes by itself. A failed update leaves the old weights in place.

Buckets of weights, from a group, by handle or in shared memory, are staged while the server still uses the old weights.
Inside a bracket (`/begin_weight_update` ... `/end_weight_update`) all of them take effect at its end, and missing
weights stay unchanged. Without a bracket they take effect as soon as all weights of the model have arrived.

Clients may label every bucket, only the last one, or none. Unlabelled weights get the next policy_version, so that no
two sets of weights share a number. `/update_weight_version` may give them a higher one later. A version never
decreases. While the update of one sender is open, buckets of other senders are refused.
"""

from __future__ import annotations

import asyncio
import re
import secrets
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

import penstock
from penstock.deadline import Stalled, deadline, warn_if_stalled
from penstock.rollout.bodies import Outcome
from penstock.rollout.client import ASLEEP, UNKNOWN
from penstock.rollout.http import HANDLE_FORMAT, Refused, Route, answer, answer_error, error_object, read_body
from penstock.rollout.request import GenerateRequest, SamplingParams
from penstock.rollout.runner import EngineRunner
from penstock.rollout.update import CommittedWeights, StagedWeights, Tensors, WeightsUpdate
from penstock.types import NO_VERSION, RECEIVE_S, WeightsHandle
from penstock.weights.collective import DEFAULT_GROUP, GroupName, Groups, GroupTensors, Rendezvous

CONTROL_TIMEOUT_S = 60.0
"""Time limit for the engine to end its step."""
MAX_FLUSH_WAIT_S = 3600.0
PROBE_TIMEOUT_S = 20.0
"""Time limit for the token of a health probe."""
MAX_ROWS = 1000
LABEL = re.compile(r"-?[0-9]{1,20}")
"""Form of a weight_version."""
MAX_SHOWN = 64
"""Number of characters of a wrong value that an error repeats."""
MAX_JOINS = 16
"""Maximum number of groups that the server joins at the same time. Further joins wait."""

Seconds = Annotated[float, Meta(ge=0, le=MAX_FLUSH_WAIT_S)]


class PauseBody(Struct, kw_only=True):
    """The request of `/pause_generation`."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class BeginBody(Struct, kw_only=True):
    """The request of `/begin_weight_update`."""

    selector: Literal["target", "draft", "all"] = "all"


class WeightsBody(Struct, kw_only=True):
    """Fields of all requests that bring weights."""

    weight_version: str | int | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True


class FromDiskBody(WeightsBody, kw_only=True):
    """The request of `/update_weights_from_disk`."""

    model_path: str
    load_format: str | None = None


class FromTensorBody(WeightsBody, kw_only=True):
    """The request of `/update_weights_from_tensor`: Penstock's handle of a file, or SGLang's serialized handles."""

    handle: WeightsHandle | None = None
    serialized_named_tensors: list[str] | None = None
    """Pickled handles of shared memory in base64, one text for each tensor-parallel rank of the server."""
    load_format: str | None = None


class GroupBody(Struct, kw_only=True):
    """The request of `/destroy_weights_update_group`."""

    group_name: GroupName = DEFAULT_GROUP


class InitGroupBody(Rendezvous, kw_only=True):
    """The request of `/init_weights_update_group`. This server is rank `rank_offset`; rank 0 broadcasts."""

    rank_offset: int


class FromDistributedBody(GroupTensors, kw_only=True):
    """The request of `/update_weights_from_distributed`: one bucket, broadcast while this call is in flight. It has the
    fields of `WeightsBody` too."""

    weight_version: str | int | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True


class VersionBody(Struct, kw_only=True):
    """The request of `/update_weight_version`."""

    new_version: str | int
    abort_all_requests: bool = True


class WeightsByNameBody(Struct, kw_only=True):
    """The request of `/get_weights_by_name`."""

    name: str
    truncate_size: Annotated[int, Meta(ge=0, le=MAX_ROWS)] = 100


class SGLang:
    """The endpoints of SGLang's control API."""

    def __init__(
        self,
        runner: EngineRunner,
        update: WeightsUpdate,
        groups: Groups,
        *,
        describe: Callable[[Path, int], WeightsHandle],
        read_payload: Callable[[Sequence[str], str | None], Tensors],
        model_path: str,
        model_name: str,
    ) -> None:
        """`describe`: returns the handle of a model directory under a policy_version. `read_payload`: returns the
        tensors of `serialized_named_tensors` and `load_format`. Both are called in a thread."""
        self._runner, self._update, self._groups = runner, update, groups
        self._describe, self._read_payload = describe, read_payload
        self._model_path, self._model_name = model_path, model_name
        self._bracket: StagedWeights | None = None
        self._withdrawn = ""
        """The label under which the last weights were withdrawn."""
        # A join holds its thread until all ranks have come or time is up, so joins do not use the shared threads.
        self._joining = ThreadPoolExecutor(MAX_JOINS, thread_name_prefix="join")

    def close(self) -> None:
        """Leave all groups, at the end of the server. Ranks that wait for this server get an error."""
        self._joining.shutdown(wait=False, cancel_futures=True)
        self._groups.close()

    def routes(self) -> list[Route]:
        change = partial(Route, methods=["POST"], reply=Outcome, error=dict[str, Any], refuse=_refuse)
        return [
            Route("/model_info", ["GET"], self.model_info, "generation", reply=dict[str, Any]),
            Route("/get_model_info", ["GET"], self.model_info, "generation", reply=dict[str, Any]),
            Route("/server_info", ["GET"], self.server_info, "generation", reply=dict[str, Any]),
            Route("/get_server_info", ["GET"], self.server_info, "generation", reply=dict[str, Any]),
            Route("/health_generate", ["GET"], self.health_generate, "generation", reply=None),
            Route("/flush_cache", ["GET", "POST"], self.flush_cache, reply=None, query={"timeout": Seconds}),
            Route("/pause_generation", ["POST"], self.pause, body=PauseBody, reply=dict[str, str]),
            Route("/continue_generation", ["POST"], self.continue_generation, reply=dict[str, str]),
            change("/begin_weight_update", endpoint=self.begin, body=BeginBody),
            change("/end_weight_update", endpoint=self.end),
            change("/update_weights_from_disk", endpoint=self.update_from_disk, body=FromDiskBody),
            change("/update_weights_from_tensor", endpoint=self.update_from_tensor, body=FromTensorBody),
            change("/init_weights_update_group", endpoint=self.init_group, body=InitGroupBody),
            change("/destroy_weights_update_group", endpoint=self.destroy_group, body=GroupBody),
            change("/update_weights_from_distributed", endpoint=self.update_from_distributed, body=FromDistributedBody),
            change("/update_weight_version", endpoint=self.update_version, body=VersionBody),
            Route("/get_weights_by_name", ["GET", "POST"], self.weights_by_name, body=WeightsByNameBody, reply=list),
        ]

    async def model_info(self, request: Request) -> Response:
        version = self._runner.policy_version
        config = self._runner.engine.model.config
        return answer(
            {
                "model_path": self._model_path,
                "served_model_name": self._model_name,
                "tokenizer_path": self._model_path,
                "is_generation": True,
                "preferred_sampling_params": None,
                "weight_version": str(version) if version != NO_VERSION else self._withdrawn,
                "load_format": "auto",
                "model_type": config.model_type,
                "architectures": config.architectures or [type(self._runner.engine.model).__name__],
                "has_image_understanding": False,
                "has_audio_understanding": False,
            }
        )

    async def server_info(self, request: Request) -> Response:
        engine = self._runner.engine
        return answer(
            {
                "model_path": self._model_path,
                "served_model_name": self._model_name,
                "version": f"penstock {penstock.__version__}",
                "tp_size": 1,
                "dp_size": 1,
                "max_running_requests": engine.num_slots,
                "max_total_num_tokens": engine.num_slots * engine.max_context,
                "context_length": engine.max_context,
                "enable_memory_saver": True,
                "internal_states": [
                    {"num_running": engine.num_active, "num_waiting": engine.num_waiting, "paused": engine.paused}
                ],
            }
        )

    async def health_generate(self, request: Request) -> Response:
        """Check that the server generates one token in a bounded time. A paused server counts as healthy without this
        check."""
        if self._runner.error is not None:
            return answer(error_object(str(self._runner.error)), 503)
        if self._runner.policy_version == NO_VERSION:
            raise Refused(503, "no weights have been loaded yet")
        if not self._alive_without_a_probe():
            rid, params = f"health-{secrets.token_hex(8)}", SamplingParams(temperature=0.0)
            probe = GenerateRequest(rid=rid, prompt_ids=[0], params=params, max_new_tokens=(1,), seeds=(0,))
            generated = self._runner.engine.num_generated_tokens
            try:
                async with deadline(PROBE_TIMEOUT_S, waiter="server", resource="a probe's token", holder="the engine"):
                    await self._runner.generate(probe)
            except Stalled:
                if self._runner.engine.num_generated_tokens == generated and not self._alive_without_a_probe():
                    raise Refused(503, f"no token in {PROBE_TIMEOUT_S:g} s") from None
        return PlainTextResponse("")

    def _alive_without_a_probe(self) -> bool:
        engine = self._runner.engine
        return engine.paused or bool(engine.released) or not engine.admitting

    async def flush_cache(self, request: Request) -> Response:
        """Wait until no request runs, for at most `timeout` seconds. There is no cache to flush, because the server
        keeps no prefix after its request."""
        timeout = request.query_params.get("timeout", "0")
        try:
            seconds = msgspec.convert(timeout, Seconds, strict=False)
        except msgspec.ValidationError:
            message = f"timeout must be between 0 and {MAX_FLUSH_WAIT_S:g} seconds, not {timeout!r}"
            raise ValueError(message) from None
        if not await self._runner.drained(seconds):
            engine = self._runner.engine
            running = f"{engine.num_active} samples run and {engine.num_waiting} wait"
            return PlainTextResponse(f"Flush cache failed: {running}.\n", 400)
        return PlainTextResponse("Cache flushed.\n")

    async def pause(self, request: Request) -> Response:
        body = await read_body(request, PauseBody)
        async with deadline(CONTROL_TIMEOUT_S, waiter="server", resource="a pause", holder="the engine"):
            await self._runner.pause(body.mode)
        return answer({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: Request) -> Response:
        async with deadline(CONTROL_TIMEOUT_S, waiter="server", resource="the end of a pause", holder="the engine"):
            await self._runner.continue_generation()
        return answer({"message": "Generation continued successfully.", "status": "ok"})

    async def begin(self, request: Request) -> Response:
        """Open a bracket. Clients that never send one are unaffected. A bracket that is left open closes by itself, and
        ends the pause it was opened under."""
        await read_body(request, BeginBody)
        if self._update.is_open(self._bracket):
            return _outcome(False, "a weight update has already begun: end it, or drop it with /weights/abort")
        self._bracket = await self._update.open()
        return _outcome(True, "begun")

    async def end(self, request: Request) -> Response:
        """Close the bracket and serve its weights. Weights that did not arrive in it stay unchanged. If anything is
        wrong, the whole update is refused. In both cases the bracket is closed."""
        bracket, self._bracket = self._bracket, None
        if bracket is None or not self._update.is_open(bracket):
            return _outcome(False, "no weight update has begun, or it was left open too long, or another replaced it")
        kept = len(self._update.missing(bracket))
        served = await self._update.finish(bracket)
        if served is None:
            return _outcome(True, "ended")
        rest = f"; {kept} weights did not arrive and stay unchanged" if kept else ""
        return _outcome(True, _serving(served) + rest)

    async def update_from_disk(self, request: Request) -> Response:
        """Load a whole model directory and serve it at once. If anything is wrong with it, the old weights stay."""
        body = await read_body(request, FromDiskBody)
        if self._update.is_open(self._bracket):
            raise ValueError("a weight update has begun: end it before weights come from disk")
        version = self._version(body.weight_version)
        async with deadline(RECEIVE_S, waiter="server", resource=body.model_path, holder="its storage"):
            handle = await asyncio.to_thread(self._read_directory, Path(body.model_path), version)
        served = await self._serve(handle, abort=body.abort_all_requests)
        self._model_path = body.model_path
        return served

    def _read_directory(self, path: Path, version: int) -> WeightsHandle:
        try:
            return self._describe(path, version)
        except OSError as error:
            raise ValueError(f"cannot read the weights: {error}") from error

    async def update_from_tensor(self, request: Request) -> Response:
        """Serve the weights of a handle, or one bucket of tensors in shared memory of another process.

        Buckets of this kind count as those of one sender. A refused one leaves the served weights as they are."""
        body = await read_body(request, FromTensorBody)
        if (body.handle is None) == (body.serialized_named_tensors is None):
            raise ValueError(
                f"give one of `serialized_named_tensors` and `handle`; for the second one, {HANDLE_FORMAT}"
            )
        if body.handle is None:
            return await self._add_bucket(self._read_tensors(body), body, sender=None)
        try:
            if body.weight_version is not None and self._version(body.weight_version) != body.handle.policy_version:
                raise ValueError(f"weight_version {body.weight_version} is not the handle's policy_version")
            if not self._update.is_open(self._bracket):
                return await self._serve(body.handle, abort=body.abort_all_requests)
            await self._update.begin(body.handle, bracket=self._bracket)
            if body.abort_all_requests:
                self._runner.abort_all()
            return _outcome(True, f"staged weight_version {body.handle.policy_version}")
        except ValueError as error:
            self._update.spoil(None, str(error))
            raise

    async def _serve(self, handle: WeightsHandle, *, abort: bool) -> Response:
        await self._update.begin(handle)
        if abort:
            self._runner.abort_all()
        # Another client may have staged or served other weights meanwhile; the fingerprint makes sure of these ones.
        served = await self._update.commit(handle.policy_version, fingerprint=handle.fingerprint)
        return answer({"success": True, "message": _serving(served), "num_paused_requests": 0})

    async def init_group(self, request: Request) -> Response:
        """Join a group, and answer once all ranks have joined. Weights that an earlier group of this name staged are
        dropped, and so is an empty bracket."""
        body = await read_body(request, InitGroupBody)
        with _warn_if_group_stalls(body.group_name, "all ranks"):
            await asyncio.get_running_loop().run_in_executor(self._joining, self._groups.join, body, body.rank_offset)
        await self._update.drop(body.group_name)
        return _outcome(True, f"joined group {body.group_name} as rank {body.rank_offset} of {body.world_size}")

    async def destroy_group(self, request: Request) -> Response:
        """Leave a group. Weights that it staged and that are not served are dropped."""
        body = await read_body(request, GroupBody)
        with _warn_if_group_stalls(body.group_name, "the end of what is under way"):
            await asyncio.to_thread(self._groups.leave, body.group_name)
        await self._update.drop(body.group_name)
        return _outcome(True, f"left group {body.group_name}")

    async def update_from_distributed(self, request: Request) -> Response:
        """Receive one bucket of weights from a group. The bucket is checked only after it is received, so that a bad
        bucket does not bring the ranks out of step."""
        body = await read_body(request, FromDistributedBody)
        with _warn_if_group_stalls(body.group_name, "a bucket of weights"):
            receiving = asyncio.to_thread(self._groups.receive, body)
            return await self._add_bucket(receiving, body, sender=body.group_name)

    async def _read_tensors(self, body: FromTensorBody) -> Tensors:
        texts = body.serialized_named_tensors or []
        async with deadline(RECEIVE_S, waiter="server", resource="serialized tensors", holder="a thread"):
            return await asyncio.to_thread(self._read_payload, texts, body.load_format)

    async def _add_bucket(
        self, receiving: Awaitable[Tensors], body: WeightsBody | FromDistributedBody, *, sender: str | None
    ) -> Response:
        """Stage the tensors of a bucket, and serve the update if it is complete."""
        try:
            received = await receiving
            version = None if body.weight_version is None else self._version(body.weight_version)
            staged = await self._update.add(received, sender=sender, policy_version=version)
            if body.abort_all_requests:
                self._runner.abort_all()
            missing = len(self._update.missing(staged))
            if staged.bracketed or missing:
                return _outcome(True, f"staged; {missing} weights have not arrived yet")
            served = await self._update.finish(staged)
        except ValueError as error:
            self._update.spoil(sender, str(error))
            raise
        return _outcome(True, "nothing to serve" if served is None else _serving(served))

    async def update_version(self, request: Request) -> Response:
        """Set the version of the latest weights: of the open bracket if there is one, else of the served weights. The
        labels `unknown` and `asleep` withdraw the served and staged weights: no request is served until new weights
        arrive."""
        body = await read_body(request, VersionBody)
        if body.new_version in (UNKNOWN, ASLEEP):
            await self._update.forget()
            self._withdrawn = str(body.new_version)
            return answer({"success": True, "message": "the weights are withdrawn", "new_version": self._withdrawn})
        version = self._version(body.new_version)
        await self._update.rename(version)
        if body.abort_all_requests:
            self._runner.abort_all()
        return answer({"success": True, "message": f"weight_version is {version}", "new_version": str(version)})

    def _version(self, label: str | int | None) -> int:
        """Return a label as a policy_version; without a label, the next one. SGLang allows any text. A policy_version
        is a number that never decreases, so ValueError for other text."""
        if label is None:
            return self._runner.policy_version + 1
        if isinstance(label, str) and not LABEL.fullmatch(label):
            raise ValueError(f"weight_version must be a whole number, not {label[:MAX_SHOWN]!r}")
        return int(label)

    async def weights_by_name(self, request: Request) -> Response:
        """Return the first rows of a parameter, to verify an update."""
        body = await read_body(request, WeightsByNameBody)
        if body.name not in self._runner.engine.parameters():
            raise Refused(400, f"the model has no parameter {body.name!r}")
        async with deadline(CONTROL_TIMEOUT_S, waiter="server", resource="a parameter", holder="the engine"):
            rows = await self._runner.first_rows(body.name, body.truncate_size)
            return answer(await asyncio.to_thread(lambda: rows.float().cpu().tolist()))


def _warn_if_group_stalls(group: str, resource: str) -> AbstractContextManager[None]:
    """Return a context that reports a long wait for a group. It sets no limit: the group has its own, which may be
    long."""
    return warn_if_stalled(CONTROL_TIMEOUT_S, waiter="server", resource=resource, holder=f"the ranks of group {group}")


def _outcome(success: bool, message: str) -> Response:
    return answer(Outcome(success=success, message=message), 200 if success else 400)


def _refuse(error: Exception) -> Response:
    """Return a ValueError as an `Outcome`, and any other error in the usual format."""
    return _outcome(False, str(error)) if isinstance(error, ValueError) else answer_error(error)


def _serving(served: CommittedWeights) -> str:
    return f"serving weight_version {served.policy_version}"
