"""SGLang's control surface, beside what `rollout/server.py` shares with it: what a server is, pauses, flushes, weights.

Where SGLang asserts, hangs or answers late, this answers: `/health_generate` at once while paused, brackets that close
themselves, updates that leave the old weights if anything is wrong with the new ones.

Buckets of weights, from a group or by handle, are staged while the old weights serve. Inside a bracket all of them take
effect at `/end_weight_update`, and what did not come stays as it is; without one, as soon as every weight of the model
has come. Clients may label every bucket, the last one, or none: new weights then get the next number, so that no two
sets of weights share one, and `/update_weight_version` may give them a higher one later. A label never goes back. While
one sender's update is open, buckets of others are refused.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
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
from penstock.deadline import Stalled, deadline, patient
from penstock.rollout.foreign import UNKNOWN
from penstock.rollout.http import HANDLE_FORMAT, Refused, Route, answer, error_object, read_body
from penstock.rollout.request import GenerateRequest, SamplingParams
from penstock.rollout.runner import EngineRunner
from penstock.rollout.staged import Served, Staged
from penstock.rollout.update import RECEIVE_TIMEOUT_S, WeightsUpdate
from penstock.types import NO_VERSION, GroupTensors, WeightsHandle
from penstock.weights.collective import GroupPlace, Groups

CONTROL_TIMEOUT_S = 60.0
"""For the engine to end its step."""
MAX_FLUSH_WAIT_S = 3600.0
PROBE_TIMEOUT_S = 20.0
MAX_ROWS = 1000
MAX_JOINS = 16
"""Groups that are being joined at the same time; others wait for their turn."""

Seconds = Annotated[float, Meta(ge=0, le=MAX_FLUSH_WAIT_S)]


class Outcome(Struct, kw_only=True):
    """What came of a call that changes the server's state."""

    success: bool
    message: str


class PauseBody(Struct, kw_only=True):
    """The request of `/pause_generation`."""

    mode: Literal["abort", "retract", "in_place"] = "abort"


class BeginBody(Struct, kw_only=True):
    """The request of `/begin_weight_update`."""

    selector: Literal["target", "draft", "all"] = "all"


class FromDiskBody(Struct, kw_only=True):
    """The request of `/update_weights_from_disk`."""

    model_path: str
    weight_version: str | int | None = None
    abort_all_requests: bool = False
    load_format: str | None = None
    flush_cache: bool = True


class FromTensorBody(Struct, kw_only=True):
    """The request of `/update_weights_from_tensor`: our handle; SGLang's own pickled tensors are refused."""

    handle: WeightsHandle | None = None
    serialized_named_tensors: Any = None
    weight_version: str | int | None = None
    abort_all_requests: bool = False
    flush_cache: bool = True


class InitGroupBody(Struct, kw_only=True):
    """The request of `/init_weights_update_group`. This server is rank `rank_offset`; rank 0 broadcasts."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class DestroyGroupBody(Struct, kw_only=True):
    """The request of `/destroy_weights_update_group`."""

    group_name: str = "weight_update_group"


class FromDistributedBody(Struct, kw_only=True):
    """The request of `/update_weights_from_distributed`: one bucket, broadcast while this call is in flight."""

    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    abort_all_requests: bool = False
    weight_version: str | int | None = None
    load_format: Literal["flattened_bucket"] | None = None


class VersionBody(Struct, kw_only=True):
    """The request of `/update_weight_version`."""

    new_version: str | int
    abort_all_requests: bool = True


class WeightsByNameBody(Struct, kw_only=True):
    """The request of `/get_weights_by_name`."""

    name: str
    truncate_size: int = 100


class SGLang:
    """The endpoints."""

    def __init__(
        self,
        runner: EngineRunner,
        update: WeightsUpdate,
        groups: Groups,
        *,
        describe: Callable[[Path, int], WeightsHandle],
        model_path: str,
        model_name: str,
    ) -> None:
        """`describe` makes the handle of a model directory, to be served under a policy_version; in a thread."""
        self._runner, self._update, self._groups, self._describe = runner, update, groups, describe
        self._model_path, self._model_name = model_path, model_name
        self._bracket: Staged | None = None
        # A rank that waits for others holds a thread until it gives up: not one that everything else needs.
        self._joining = ThreadPoolExecutor(MAX_JOINS, thread_name_prefix="join")

    def close(self) -> None:
        """Leave all groups, for the end of the server: whoever waits for it is told."""
        self._joining.shutdown(wait=False, cancel_futures=True)
        self._groups.close()

    def routes(self) -> list[Route]:
        change = partial(Route, methods=["POST"], reply=Outcome, error=dict[str, Any])
        return [
            Route("/model_info", ["GET"], self.model_info, "generation", reply=dict[str, Any]),
            Route("/get_model_info", ["GET"], self.model_info, "generation", reply=dict[str, Any]),
            Route("/server_info", ["GET"], self.server_info, "generation", reply=dict[str, Any]),
            Route("/get_server_info", ["GET"], self.server_info, "generation", reply=dict[str, Any]),
            Route("/health_generate", ["GET"], self.health_generate, "generation", reply=None),
            Route("/flush_cache", ["GET", "POST"], self.flush_cache, reply=None, query={"timeout": Seconds}),
            Route("/pause_generation", ["POST"], self.pause, body=PauseBody, reply=dict[str, str]),
            Route("/continue_generation", ["POST"], self.go_on, reply=dict[str, str]),
            change("/begin_weight_update", endpoint=self.begin, body=BeginBody),
            change("/end_weight_update", endpoint=self.end),
            change("/update_weights_from_disk", endpoint=self.update_from_disk, body=FromDiskBody),
            change("/update_weights_from_tensor", endpoint=self.update_from_tensor, body=FromTensorBody),
            change("/init_weights_update_group", endpoint=self.init_group, body=InitGroupBody),
            change("/destroy_weights_update_group", endpoint=self.destroy_group, body=DestroyGroupBody),
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
                "weight_version": str(version) if version != NO_VERSION else "",
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
                "internal_states": [
                    {"num_running": engine.num_active, "num_waiting": engine.num_waiting, "paused": engine.paused}
                ],
            }
        )

    async def health_generate(self, request: Request) -> Response:
        """One token, in a bounded time; while paused nothing can be generated, and nothing is wrong."""
        if self._runner.error is not None:
            return answer(error_object(str(self._runner.error)), 503)
        if self._runner.policy_version == NO_VERSION:
            raise Refused(503, "no weights have been loaded yet")
        if not self._alive_without_a_probe():
            probe = GenerateRequest(
                rid=f"health-{secrets.token_hex(8)}",
                prompt_ids=[0],
                params=SamplingParams(temperature=0.0),
                max_new_tokens=(1,),
                seeds=(0,),
            )
            generated = self._runner.num_generated_tokens
            try:
                async with deadline(PROBE_TIMEOUT_S, waiter="server", resource="a probe's token", holder="the engine"):
                    await self._runner.generate(probe)
            except Stalled:
                if self._runner.num_generated_tokens == generated and not self._alive_without_a_probe():
                    raise Refused(503, f"no token in {PROBE_TIMEOUT_S:g} s") from None
        return PlainTextResponse("")

    def _alive_without_a_probe(self) -> bool:
        engine = self._runner.engine
        return engine.paused or engine.released or not engine.admitting

    async def flush_cache(self, request: Request) -> Response:
        """No prefix outlives its request here: there is nothing to flush, but the promise that nothing runs."""
        seconds = _seconds(request.query_params.get("timeout", "0"))
        if not await self._runner.drained(seconds):
            engine = self._runner.engine
            return PlainTextResponse(
                f"Flush cache failed: {engine.num_active} samples run and {engine.num_waiting} wait.\n", 400
            )
        return PlainTextResponse("Cache flushed.\n")

    async def pause(self, request: Request) -> Response:
        body = await read_body(request, PauseBody)
        async with deadline(CONTROL_TIMEOUT_S, waiter="server", resource="a pause", holder="the engine"):
            await self._runner.pause(body.mode)
        return answer({"message": "Generation paused successfully.", "status": "ok"})

    async def go_on(self, request: Request) -> Response:
        async with deadline(CONTROL_TIMEOUT_S, waiter="server", resource="the end of a pause", holder="the engine"):
            await self._runner.go_on()
        return answer({"message": "Generation continued successfully.", "status": "ok"})

    async def begin(self, request: Request) -> Response:
        """Opens a bracket. Clients that know none need none; one that is left open closes itself, and ends the pause
        it was opened under."""
        await read_body(request, BeginBody)
        if self._update.is_open(self._bracket):
            return _outcome(False, "a weight update has already begun: end it, or drop it with /weights/abort")
        self._bracket = await self._update.open()
        return _outcome(True, "begun")

    async def end(self, request: Request) -> Response:
        """Serves what came inside the bracket, and of the other weights what is served already; or refuses it as a
        whole. Either way the bracket is closed."""
        bracket, self._bracket = self._bracket, None
        if bracket is None or not self._update.is_open(bracket):
            return _outcome(False, "no weight update has begun, or it was left open too long, or another replaced it")
        kept = len(self._update.missing(bracket))
        try:
            served = await self._update.finish(bracket)
        except ValueError as error:
            return _outcome(False, str(error))
        if served is None:
            return _outcome(True, "ended")
        return _outcome(
            True, _serving(served) + (f"; {kept} weights did not come and stay as they were" if kept else "")
        )

    async def update_from_disk(self, request: Request) -> Response:
        """A whole model directory, served at once; if anything about it is wrong, the old weights go on serving."""
        body = await read_body(request, FromDiskBody)
        try:
            if self._update.is_open(self._bracket):
                raise ValueError("a weight update has begun: end it before weights come from disk")
            version = self._version(body.weight_version)
            async with deadline(RECEIVE_TIMEOUT_S, waiter="server", resource=body.model_path, holder="its storage"):
                handle = await asyncio.to_thread(self._read_directory, Path(body.model_path), version)
            return await self._serve(handle, abort=body.abort_all_requests)
        except ValueError as error:
            return _outcome(False, str(error))

    def _read_directory(self, path: Path, version: int) -> WeightsHandle:
        try:
            return self._describe(path, version)
        except OSError as error:
            raise ValueError(f"cannot read the weights: {error}") from error

    async def update_from_tensor(self, request: Request) -> Response:
        body = await read_body(request, FromTensorBody)
        if body.handle is None:
            raise Refused(400, f"`handle` is missing; {HANDLE_FORMAT}")
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
            return _outcome(False, str(error))

    async def _serve(self, handle: WeightsHandle, *, abort: bool) -> Response:
        await self._update.begin(handle)
        if abort:
            self._runner.abort_all()
        # Somebody else may have begun or served something in between: not what this call would answer for.
        served = await self._update.commit(handle.policy_version, fingerprint=handle.fingerprint)
        return answer({"success": True, "message": _serving(served), "num_paused_requests": 0})

    async def init_group(self, request: Request) -> Response:
        """Answered once every rank is there. What an earlier group of this name has left behind is forgotten, and so is
        a bracket into which nobody has sent anything."""
        body = await read_body(request, InitGroupBody)
        place = GroupPlace(
            name=body.group_name,
            address=body.master_address,
            port=body.master_port,
            world_size=body.world_size,
            backend=body.backend,
        )
        try:
            with _group_patience(body.group_name, "all ranks"):
                loop = asyncio.get_running_loop()
                await loop.run_in_executor(self._joining, self._groups.join, place, body.rank_offset)
        except ValueError as error:
            return _outcome(False, str(error))
        await self._update.drop(body.group_name)
        return _outcome(True, f"joined group {body.group_name} as rank {body.rank_offset} of {body.world_size}")

    async def destroy_group(self, request: Request) -> Response:
        """What the group has sent and nobody has served is forgotten."""
        body = await read_body(request, DestroyGroupBody)
        try:
            with _group_patience(body.group_name, "the end of what is under way"):
                await asyncio.to_thread(self._groups.leave, body.group_name)
        except ValueError as error:
            return _outcome(False, str(error))
        await self._update.drop(body.group_name)
        return _outcome(True, f"left group {body.group_name}")

    async def update_from_distributed(self, request: Request) -> Response:
        """Received first and judged then, so that the ranks stay in step whatever is wrong with the bucket."""
        body = await read_body(request, FromDistributedBody)
        announced = GroupTensors(
            group_name=body.group_name,
            names=body.names,
            dtypes=body.dtypes,
            shapes=body.shapes,
            flat=body.load_format == "flattened_bucket",
        )
        try:
            with _group_patience(body.group_name, "a bucket of weights"):
                received = await asyncio.to_thread(self._groups.receive, announced)
            version = None if body.weight_version is None else self._version(body.weight_version)
            staged = await self._update.add(received, sender=body.group_name, policy_version=version)
            if body.abort_all_requests:
                self._runner.abort_all()
            missing = len(self._update.missing(staged))
            if staged.bracketed or missing:
                return _outcome(True, f"staged; {missing} weights have not come yet")
            served = await self._update.finish(staged)
        except ValueError as error:
            self._update.spoil(body.group_name, str(error))
            return _outcome(False, str(error))
        return _outcome(True, "nothing to serve" if served is None else _serving(served))

    async def update_version(self, request: Request) -> Response:
        """What came last is this version: what is served, or inside a bracket, what it will serve. A version that its
        client does not know is none: nothing is served then until the next weights."""
        body = await read_body(request, VersionBody)
        if body.new_version == UNKNOWN:
            await self._update.forget()
            return answer({"success": True, "message": "the weights count no more", "new_version": UNKNOWN})
        try:
            version = self._version(body.new_version)
            await self._update.rename(version)
        except ValueError as error:
            return _outcome(False, str(error))
        if body.abort_all_requests:
            self._runner.abort_all()
        return answer({"success": True, "message": f"weight_version is {version}", "new_version": str(version)})

    def _version(self, label: str | int | None) -> int:
        """SGLang's labels are any text; a policy_version is a number that only grows."""
        if label is None:
            return self._runner.policy_version + 1
        try:
            return int(label)
        except ValueError:
            raise ValueError(f"weight_version must be a whole number, not {label!r}") from None

    async def weights_by_name(self, request: Request) -> Response:
        """The first rows of a parameter, to verify an update with."""
        body = await read_body(request, WeightsByNameBody)
        if not 0 <= body.truncate_size <= MAX_ROWS:
            raise ValueError(f"truncate_size must be between 0 and {MAX_ROWS}, not {body.truncate_size}")
        if body.name not in self._runner.engine.parameters():
            raise Refused(400, f"the model has no parameter {body.name!r}")
        async with deadline(CONTROL_TIMEOUT_S, waiter="server", resource="a parameter", holder="the engine"):
            rows = await self._runner.first_rows(body.name, body.truncate_size)
            return answer(await asyncio.to_thread(lambda: rows.float().cpu().tolist()))


def _group_patience(group: str, resource: str) -> AbstractContextManager[None]:
    """The group has time limits of its own, which may be long."""
    return patient(CONTROL_TIMEOUT_S, waiter="server", resource=resource, holder=f"the ranks of group {group}")


def _outcome(success: bool, message: str) -> Response:
    return answer(Outcome(success=success, message=message), 200 if success else 400)


def _serving(served: Served) -> str:
    return f"serving weight_version {served.policy_version}"


def _seconds(text: str) -> float:
    try:
        seconds: float = msgspec.convert(text, Seconds, strict=False)
        return seconds
    except msgspec.ValidationError:
        raise ValueError(f"timeout must be between 0 and {MAX_FLUSH_WAIT_S:g} seconds, not {text!r}") from None
