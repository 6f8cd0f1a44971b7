"""vLLM's calls in its own weight transfer, with the backends `nccl` and `ipc`. Torch-free.

Checked against vLLM 0.32 (`entrypoints/rl/online/api_router.py`, `v1/worker/gpu_worker.py`,
`distributed/weight_transfer`). With `nccl` its workers join an NCCL communicator. They get its id in the call.
A worker computes nothing while it waits for the other ranks, and waits without a limit. In a bracket, a layer without
its new weights cannot compute. The end of the bracket gives such layers their old ones.
"""

from __future__ import annotations

from base64 import b64encode
from contextlib import suppress
from math import prod

from msgspec import Struct

from penstock.deadline import Stalled
from penstock.ports.training import SendingGroup, SendingWay, TensorBucket
from penstock.rollout.session import HttpSession, RolloutError
from penstock.rollout.weights_group import BRACKET_S, BUCKET_S, JOIN_S, LEAVE_S, MemoryGroup, WeightsGroup

START, FINISH = "/start_weight_update", "/finish_weight_update"
ITEM_BYTES = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}


class WorldSize(Struct):
    """The reply of `/get_world_size`: the workers of all replicas."""

    world_size: int


class VllmGroup(WeightsGroup):
    """A group of the trainer and one vLLM server."""

    way: SendingWay = "communicator"

    @classmethod
    async def _num_ranks(cls, url: str, session: HttpSession) -> int:
        return (await session.call("GET", url, "/get_world_size", None, WorldSize)).world_size

    async def _join(self, opened: SendingGroup) -> None:
        largest = max(sum(map(_num_bytes, bucket.dtypes, bucket.shapes)) for bucket in opened.buckets)
        init_info = {
            "nccl_unique_id_b64": b64encode(opened.communicator).decode(),
            "rank_offset": 1,
            "world_size": opened.world_size,
            "packed": True,
            "packed_buffer_size_bytes": largest,  # so that one call takes one broadcast
            "packed_num_buffers": 1,
        }
        await self._post("/init_weight_transfer_engine", {"init_info": init_info}, timeout_s=JOIN_S)

    async def take(self, label: str, *, flush: bool) -> None:
        try:
            await self._start()
            await self._transfer(label, flush=flush)
            await self._post(FINISH, {"weight_version": label}, timeout_s=BRACKET_S)
        except BaseException:
            await self._end_bracket()
            raise

    async def _start(self) -> None:
        """Open a bracket. One that a dead controller left open is ended."""
        try:
            await self._post(START, None, timeout_s=BRACKET_S)
        except RolloutError as error:
            if error.status is None:
                raise
            await self._post(FINISH, None, timeout_s=BRACKET_S)
            await self._post(START, None, timeout_s=BRACKET_S)

    async def _end_bracket(self) -> None:
        """End a bracket that failed. vLLM forgets one in which it could not take a bucket, so that another one has to
        give its layers weights."""
        self.is_torn = True
        with suppress(RolloutError, Stalled):
            try:
                await self._post(FINISH, None, timeout_s=LEAVE_S)
            except RolloutError:
                await self._post(START, None, timeout_s=LEAVE_S)
                await self._post(FINISH, None, timeout_s=LEAVE_S)
            self.is_torn = False

    async def _take_bucket(self, bucket: TensorBucket, payload: str, *, last: bool, label: str, flush: bool) -> None:
        update_info = {"names": bucket.names, "dtype_names": bucket.dtypes, "shapes": bucket.shapes}
        await self._post("/update_weights", {"update_info": update_info}, timeout_s=BUCKET_S)

    async def _destroy(self) -> None:
        with suppress(RolloutError, Stalled):
            await self._post("/shutdown_weight_transfer_engine", None, timeout_s=LEAVE_S)

    async def _post(self, path: str, body: object, *, timeout_s: float) -> None:
        await self._session.send("POST", self._url, path, body, timeout_s=timeout_s)


class VllmMemoryGroup(MemoryGroup, VllmGroup):
    """vLLM's transfer with the backend `ipc`: its worker copies buckets from the trainer's memory on its own device."""

    way = "vllm_memory"

    async def _join(self, opened: SendingGroup) -> None:
        await super()._join(opened)
        await self._post("/init_weight_transfer_engine", {"init_info": {"packed": True}}, timeout_s=JOIN_S)

    async def _take_bucket(self, bucket: TensorBucket, payload: str, *, last: bool, label: str, flush: bool) -> None:
        update_info = {
            "names": bucket.names,
            "dtype_names": bucket.dtypes,
            "shapes": bucket.shapes,
            "ipc_handles_pickled": payload,
            "tensor_sizes": list(map(_num_bytes, bucket.dtypes, bucket.shapes)),
        }
        await self._post("/update_weights", {"update_info": update_info}, timeout_s=BUCKET_S)


def _num_bytes(dtype: str, shape: list[int]) -> int:
    return ITEM_BYTES[dtype] * prod(shape)
