"""Clients of rollout servers over HTTP; torch-free. Nothing is retried here: a failed call is one clear error.

`RolloutClient` speaks to one server, `Servers` to all of a run over one shared session. Cancelling a `generate`
closes its connection, which makes the server abort the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Sequence
from typing import TypeVar

import aiohttp
import msgspec

from penstock.deadline import deadline
from penstock.rollout import wire
from penstock.types import FinishReason, Sampling, Segment, SegmentGrant, VersionSpan, WeightsHandle

T = TypeVar("T")


class RolloutError(RuntimeError):
    """A call to a rollout server failed. `status` is None if there was no answer."""

    self_explanatory = True

    def __init__(self, url: str, message: str, status: int | None = None) -> None:
        self.url, self.status = url, status
        super().__init__(f"rollout server {url}: {message}")


class HttpSession:
    """One aiohttp session for any number of servers, opened on first use; every call has a deadline."""

    def __init__(self, *, api_key: str | None = None, timeout_s: float = 120.0) -> None:
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def call(self, method: str, url: str, path: str, body: object, reply: type[T]) -> T:
        """One round trip. Raises RolloutError, or Stalled when the time is up."""
        data = None if body is None else wire.encode(body)
        async with deadline(self._timeout_s, waiter="rollout client", resource=f"{method} {path}", holder=url):
            try:
                async with self._open().request(method, url + path, data=data) as response:
                    answer = await response.read()
            except (aiohttp.ClientError, OSError) as error:
                raise RolloutError(url, f"{method} {path} got no answer: {error or type(error).__name__}") from error
        if response.status != 200:
            raise RolloutError(url, f"{method} {path} answered {response.status}: {_message(answer)}", response.status)
        try:
            return wire.decode(answer, reply)
        except msgspec.DecodeError as error:
            raise RolloutError(url, f"{method} {path} answered with something else: {error}", 200) from error

    async def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # Shorter than uvicorn's 5 s, so that no request is sent into a connection the server is closing.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
                timeout=aiohttp.ClientTimeout(total=None),
                headers=self._headers,
            )
        return self._session


class RolloutClient:
    """`ports.PolicyClient` for one server, and that server's side of a weights transaction."""

    def __init__(
        self, url: str, *, api_key: str | None = None, timeout_s: float = 120.0, session: HttpSession | None = None
    ) -> None:
        self.url = url.rstrip("/")
        self._session = session or HttpSession(api_key=api_key, timeout_s=timeout_s)

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        """One segment per grant, all from one request."""
        limits = [grant.max_tokens for grant in grants]
        body = wire.GenerateBody(
            input_ids=list(prompt_ids),
            sampling_params=wire.SamplingBody(
                n=len(grants),
                max_new_tokens=limits[0] if len(set(limits)) == 1 else limits,
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k or -1,
                sampling_seed=list(seeds),
            ),
            return_logprob=True,
            return_text=False,
        )
        if len(grants) == 1:
            replies = [await self._session.call("POST", self.url, "/generate", body, wire.GenerateReply)]
        else:
            replies = await self._session.call("POST", self.url, "/generate", body, list[wire.GenerateReply])
        if len(replies) != len(grants):
            raise RolloutError(self.url, f"{len(replies)} samples came back instead of {len(grants)}", 200)
        segments = [_segment(reply) for reply in replies]
        if any(len(segment.logprobs) != len(segment.token_ids) for segment in segments):
            raise RolloutError(
                self.url,
                "tokens came back without their log-probabilities, and nothing else can say how likely the policy that "
                "sampled them found them: the server must honour return_logprob",
                200,
            )
        return segments

    async def ready(self) -> wire.Ready:
        """Who answers and what it serves; RolloutError with status 503 before the first weights."""
        return await self._session.call("GET", self.url, "/ready", None, wire.Ready)

    async def begin_weights(self, handle: WeightsHandle) -> None:
        """Let the server map and verify `handle`."""
        reply = await self._session.call("POST", self.url, "/weights/begin", handle, wire.WeightsReply)
        self._check_echo(handle, reply)

    async def commit_weights(self, handle: WeightsHandle) -> None:
        """Let the server serve what `begin_weights` staged."""
        body = wire.CommitBody(policy_version=handle.policy_version)
        reply = await self._session.call("POST", self.url, "/weights/commit", body, wire.WeightsReply)
        self._check_echo(handle, reply)

    async def abort_weights(self) -> None:
        """Let the server forget what is staged."""
        await self._session.call("POST", self.url, "/weights/abort", {}, dict)

    async def release(self) -> None:
        """Let the server end running requests with what they have, later ones with nothing, and free its memory."""
        await self._session.call("POST", self.url, "/release_memory_occupation", wire.MemoryBody(), wire.MemoryReply)

    async def resume(self) -> None:
        """Let the server take its generation memory back."""
        await self._session.call("POST", self.url, "/resume_memory_occupation", wire.MemoryBody(), wire.MemoryReply)

    async def close(self) -> None:
        """Close the session."""
        await self._session.close()

    def _check_echo(self, handle: WeightsHandle, reply: wire.WeightsReply) -> None:
        expected = (handle.policy_version, handle.fingerprint)
        if (reply.policy_version, reply.fingerprint) != expected:
            raise RolloutError(
                self.url,
                f"holds policy_version {reply.policy_version} with fingerprint {reply.fingerprint}, "
                f"not {handle.policy_version} with {handle.fingerprint}",
                200,
            )


class Servers:
    """All rollout servers of a run: `ports.PolicyClient` by least load and `ports.RolloutServers`."""

    def __init__(self, urls: Sequence[str], *, api_key: str | None = None, timeout_s: float = 120.0) -> None:
        if not urls:
            raise ValueError("no rollout servers given")
        self._session = HttpSession(api_key=api_key, timeout_s=timeout_s)
        self._clients = [RolloutClient(url, session=self._session) for url in urls]
        self._load = dict.fromkeys(self._clients, 0)

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        """On the server with the fewest of our samples in flight."""
        client = min(self._clients, key=self._load.__getitem__)
        self._load[client] += len(grants)
        try:
            return await client.generate(prompt_ids, grants, sampling, seeds)
        finally:
            self._load[client] -= len(grants)

    async def update_weights(self, handle: WeightsHandle) -> None:
        """Stage everywhere, then commit everywhere. If staging fails anywhere, no server changes."""
        try:
            await _settle(client.begin_weights(handle) for client in self._clients)
        except (RolloutError, TimeoutError):
            await asyncio.gather(*(client.abort_weights() for client in self._clients), return_exceptions=True)
            raise
        await _settle(client.commit_weights(handle) for client in self._clients)

    async def release(self) -> None:
        """Every server gives way to the trainer."""
        await _settle(client.release() for client in self._clients)

    async def resume(self) -> None:
        """Every server generates again."""
        await _settle(client.resume() for client in self._clients)

    async def close(self) -> None:
        """Close the session."""
        await self._session.close()


async def _settle(calls: Iterable[Awaitable[None]]) -> None:
    """Wait for all of them, then raise the first failure: no call is left running behind an error."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome


def _segment(reply: wire.GenerateReply) -> Segment:
    meta = reply.meta_info
    reason: FinishReason
    match meta.finish_reason:
        case wire.Stop():
            reason = "stop"
        case wire.Length():
            reason = "length"
        case wire.Abort():
            reason = "abort"
    return Segment(
        token_ids=reply.output_ids,
        logprobs=[logprob for logprob, _, _ in meta.output_token_logprobs or () if logprob is not None],
        spans=[VersionSpan(int(span.version), span.start, span.end) for span in meta.weight_versions],
        finish_reason=reason,
    )


def _message(answer: bytes) -> str:
    """The error message inside a reply, whatever its shape."""
    try:
        error = msgspec.json.decode(answer)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, KeyError, TypeError):
        return answer[:200].decode(errors="replace")
