"""The part of one SGLang server in a broadcast of weights: the calls that make it join the trainer's group, take one
bucket after the other, and leave. Torch-free: the trainer broadcasts.

Releases from June 2026 on take buckets only in a bracket, earlier ones have none. SGLang copies each bucket over its
weights as it arrives. So the server must be paused, and a failure leaves it with weights of no known version.
"""

from __future__ import annotations

from contextlib import suppress

from msgspec import Struct

from penstock.deadline import Stalled, deadline
from penstock.ports.training import SendingGroup, TrainerLost, WeightsNotSent, WeightsSender
from penstock.rollout import bodies
from penstock.rollout.generator import all_of
from penstock.rollout.session import HttpSession, RolloutError

JOIN_S = 120.0
"""Time limit until trainer and server have joined."""
BUCKET_S = 90.0
"""Time limit of one bucket, a little longer than the trainer's own."""
BRACKET_S = 90.0
"""Time limit of what a server does with all weights, at the beginning and the end of a bracket."""
LEAVE_S = 5.0
"""Time limit for leaving the group, which a dead server or trainer does not answer."""
SEND_S = 3600.0
"""Time limit of all buckets. Each of them has its own."""
UNREACHABLE_WEIGHTS = 424
"""Status of an update with weights that the server cannot get from where they are."""
NO_BRACKET = (404, 405)
BEGIN, END = "/begin_weight_update", "/end_weight_update"


class ServerSizes(Struct):
    """The sizes of an SGLang server, in its reply of `/server_info`."""

    tp_size: int = 1
    pp_size: int = 1
    dp_size: int = 1
    enable_dp_attention: bool = False


class WeightsGroup:
    """A group of the trainer and one server, for one version."""

    def __init__(self, url: str, session: HttpSession, sender: WeightsSender, opened: SendingGroup) -> None:
        self._url, self._session, self._sender, self._opened = url, session, sender, opened
        self.has_sent = False
        """Whether the server may have weights of a bucket."""

    @classmethod
    async def open(cls, url: str, session: HttpSession, sender: WeightsSender, policy_version: int) -> WeightsGroup:
        """Return the group when the server has joined it. The server generates meanwhile."""
        sizes = await session.call("GET", url, "/server_info", None, ServerSizes)
        if sizes.pp_size > 1 or (sizes.dp_size > 1 and not sizes.enable_dp_attention):
            raise RolloutError(
                url,
                "takes no weights by broadcast, because it has several pipeline stages or replicas: start it with "
                "tensor parallelism alone, and more servers instead of replicas; or set rollout.update_mode to drain, "
                "so that it reads them in the run's directory",
                400,
            )
        try:
            opened = await sender.open_group(url, policy_version, world_size=1 + sizes.tp_size)
        except (TrainerLost, WeightsNotSent) as error:
            raise _not_sent(url, error) from error
        group = cls(url, session, sender, opened)
        try:
            await group._change(
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
        except BaseException:
            await group.leave()
            raise
        return group

    async def take(self, label: str, *, flush: bool) -> None:
        """Make the paused server take all buckets, under a label. `flush`: also empty its cache."""
        has_bracket = await self._begin()
        try:
            await all_of([self._send(), self._take_buckets(label, flush=flush)])
            if has_bracket:
                await self._change(END, {}, timeout_s=BRACKET_S)
        except BaseException:
            if has_bracket:
                with suppress(RolloutError, Stalled):
                    await self._change(END, {}, timeout_s=LEAVE_S)
            raise

    async def leave(self) -> None:
        """End the group on both sides."""
        await all_of([self._close(), self._destroy()])

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

    async def _send(self) -> None:
        name = self._opened.name
        try:
            async with deadline(SEND_S, waiter="rollout client", resource=f"group {name}", holder="the trainer"):
                await self._sender.send_weights(name)
        except (TrainerLost, WeightsNotSent) as error:
            raise _not_sent(self._url, error) from error

    async def _take_buckets(self, label: str, *, flush: bool) -> None:
        buckets = self._opened.buckets
        for number, bucket in enumerate(buckets, 1):
            is_last = number == len(buckets)
            self.has_sent = True
            await self._change(
                "/update_weights_from_distributed",
                {
                    "names": bucket.names,
                    "dtypes": bucket.dtypes,
                    "shapes": bucket.shapes,
                    "group_name": self._opened.name,
                    "load_format": "flattened_bucket",
                    "flush_cache": flush and is_last,
                    "weight_version": label if is_last else None,
                },
                timeout_s=BUCKET_S,
            )

    async def _close(self) -> None:
        name = self._opened.name
        with suppress(TrainerLost, Stalled):
            async with deadline(LEAVE_S, waiter="rollout client", resource=f"group {name}", holder="the trainer"):
                await self._sender.close_group(name)

    async def _destroy(self) -> None:
        with suppress(RolloutError, Stalled):
            body = {"group_name": self._opened.name}
            await self._change("/destroy_weights_update_group", body, timeout_s=LEAVE_S)

    async def _change(self, path: str, body: object, *, timeout_s: float) -> None:
        outcome = await self._session.call("POST", self._url, path, body, bodies.Outcome, timeout_s=timeout_s)
        if not outcome.success:
            raise RolloutError(self._url, f"refused {path}: {outcome.message}", 400)


def _not_sent(url: str, error: TrainerLost | WeightsNotSent) -> RolloutError:
    return RolloutError(url, str(error), UNREACHABLE_WEIGHTS if isinstance(error, TrainerLost) else None)
