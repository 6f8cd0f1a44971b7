"""SGLang's calls when it gets weights from the trainer. Torch-free.

Releases from June 2026 on take buckets only in a bracket, earlier ones have none.
"""

from __future__ import annotations

from contextlib import suppress

from msgspec import Struct

from penstock.deadline import Stalled
from penstock.ports.training import SendingGroup, SendingWay, TensorBucket
from penstock.rollout import bodies
from penstock.rollout.session import HttpSession, RolloutError
from penstock.rollout.weights_group import BRACKET_S, BUCKET_S, JOIN_S, LEAVE_S, MemoryGroup, WeightsGroup

NO_BRACKET = (404, 405)
BEGIN, END = "/begin_weight_update", "/end_weight_update"


class ServerSizes(Struct):
    """The sizes of an SGLang server, in its reply of `/server_info`."""

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    enable_dp_attention: bool = False


class SGLangGroup(WeightsGroup):
    """A group of the trainer and one SGLang server."""

    way: SendingWay = "rendezvous"

    @classmethod
    async def _num_ranks(cls, url: str, session: HttpSession) -> int:
        sizes = await session.call("GET", url, "/server_info", None, ServerSizes)
        if sizes.pp_size > 1 or (sizes.dp_size > 1 and not sizes.enable_dp_attention):
            raise RolloutError(
                url,
                "takes no weights by broadcast, because it has several pipeline stages or replicas: start it with "
                "tensor parallelism alone, and more servers instead of replicas; or set rollout.update_mode to drain, "
                "so that it reads them in the run's directory",
                400,
            )
        return sizes.tp_size

    async def _join(self, opened: SendingGroup) -> None:
        await self._change(
            "/init_weights_update_group",
            {
                "master_address": opened.address,
                "master_port": opened.port,
                "rank_offset": 1,
                "world_size": opened.world_size,
                "group_name": opened.name,
                "backend": opened.backend,
            },
            timeout_s=JOIN_S,
        )

    async def take(self, label: str, *, flush: bool) -> None:
        has_bracket = await self._begin()
        try:
            await self._transfer(label, flush=flush)
            if has_bracket:
                await self._change(END, {}, timeout_s=BRACKET_S)
        except BaseException:
            if has_bracket:
                with suppress(RolloutError, Stalled):
                    await self._change(END, {}, timeout_s=LEAVE_S)
            raise

    async def _begin(self) -> bool:
        """Open a bracket, and return whether the server knows any. One that a dead controller left open is ended."""
        try:
            await self._change(BEGIN, {}, timeout_s=BRACKET_S)
        except RolloutError as error:
            if error.status in NO_BRACKET:
                return False
            self.has_sent = True  # perhaps by that controller
            if error.status != 400:
                raise
            with suppress(RolloutError):
                await self._change(END, {}, timeout_s=BRACKET_S)
            await self._change(BEGIN, {}, timeout_s=BRACKET_S)
        return True

    async def _take_bucket(self, bucket: TensorBucket, payload: str, *, last: bool, label: str, flush: bool) -> None:
        await self._change(
            "/update_weights_from_distributed",
            {
                "names": bucket.names,
                "dtypes": bucket.dtypes,
                "shapes": bucket.shapes,
                "group_name": self._opened.name,
                "load_format": "flattened_bucket",
                "flush_cache": flush and last,
                "weight_version": label if last else None,
            },
            timeout_s=BUCKET_S,
        )

    async def _destroy(self) -> None:
        with suppress(RolloutError, Stalled):
            body = {"group_name": self._opened.name}
            await self._change("/destroy_weights_update_group", body, timeout_s=LEAVE_S)

    async def _change(self, path: str, body: object, *, timeout_s: float) -> None:
        outcome = await self._session.call("POST", self._url, path, body, bodies.Outcome, timeout_s=timeout_s)
        if not outcome.success:
            raise RolloutError(self._url, f"refused {path}: {outcome.message}", 400)


class SGLangMemoryGroup(MemoryGroup, SGLangGroup):
    """SGLang's `/update_weights_from_tensor`: it copies tensors from the trainer's memory on its own device."""

    way = "sglang_memory"

    async def _destroy(self) -> None:
        """It has nothing to leave."""

    async def _take_bucket(self, bucket: TensorBucket, payload: str, *, last: bool, label: str, flush: bool) -> None:
        body = {
            "serialized_named_tensors": [payload],
            "load_format": None,
            "flush_cache": flush and last,
            "weight_version": label if last else None,
        }
        await self._change("/update_weights_from_tensor", body, timeout_s=BUCKET_S)
