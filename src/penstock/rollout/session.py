"""HTTP calls to rollout servers of any protocol. Torch-free.

This module retries nothing: a failed call raises one clear error."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from typing import Any, TypeVar

import aiohttp
import msgspec

from penstock.deadline import deadline, holding
from penstock.rollout import bodies
from penstock.rollout.claim import CLAIM
from penstock.runtime.http_client import guarded, short

T = TypeVar("T")

KEEP_ALIVE_S = 4.0
"""Shorter than the server's keep-alive (uvicorn's default: 5 s), so that no request meets a closing connection."""

MAX_REPLY_BYTES = 1 << 20
"""Limit of a reply. An answer with tokens has a limit of its own, by the number of tokens."""
MAX_ERROR_CHARS = 2000
"""Most characters of an error's message."""
MAX_ERROR_BYTES = 65_536
"""Most bytes that are read of a reply with an error."""
LARGE_BYTES = 262_144
"""Larger replies are decoded one at a time, and other tasks run between two of them."""
DECODE_S = 600.0
"""How long a large reply may wait until others are decoded."""


class RolloutError(RuntimeError):
    """A call to a rollout server failed. `status` is None if there was no answer."""

    self_explanatory = True

    def __init__(self, url: str, message: str, status: int | None = None, *, retry_after: str | None = None) -> None:
        """`retry_after`: the answer's header of this name."""
        self.url, self.message, self.status = url, short(message, MAX_ERROR_CHARS), status
        self.retry_after = retry_after
        super().__init__(f"rollout server {url}: {self.message}")


class HttpSession:
    """One aiohttp session for any number of servers. It opens on first use. Every call has a deadline. A redirect is an
    error, because the keys are for these servers alone."""

    def __init__(self, *, api_key: str | None = None, claim: str | None = None, timeout_s: float = 120.0) -> None:
        """`claim`: nonce of the run's claim on the servers, for requests that control them."""
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        if claim is not None:
            self._headers[CLAIM] = claim
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None
        self._decoding = asyncio.Lock()

    async def call(
        self,
        method: str,
        url: str,
        path: str,
        body: object,
        reply: type[T],
        *,
        timeout_s: float | None = None,
        max_bytes: int = MAX_REPLY_BYTES,
    ) -> T:
        """Send a request and return the decoded reply. Raises RolloutError, or Stalled at the deadline."""
        answer = await self.send(method, url, path, body, timeout_s=timeout_s, max_bytes=max_bytes)
        try:
            if len(answer) <= LARGE_BYTES:
                return bodies.decode(answer, reply)
            async with holding(
                self._decoding, DECODE_S, waiter="rollout client", resource="the decoder", holder="other large replies"
            ):
                await asyncio.sleep(0)
                return bodies.decode(answer, reply)
        except msgspec.DecodeError as error:
            raise RolloutError(url, f"{method} {path} returned an unexpected body: {error}", 200) from error

    async def send(
        self,
        method: str,
        url: str,
        path: str,
        body: object = None,
        *,
        timeout_s: float | None = None,
        max_bytes: int = MAX_REPLY_BYTES,
    ) -> bytes:
        """Send a request and return the raw reply. Raises the same errors as `call`."""
        data = None if body is None else bodies.encode(body)
        seconds = timeout_s or self._timeout_s
        self._session = self._session or open_session(self._headers)
        async with deadline(seconds, waiter="rollout client", resource=f"{method} {path}", holder=url):
            try:
                async with self._session.request(method, url + path, data=data, allow_redirects=False) as response:
                    is_error = response.status != 200
                    answer = await (_beginning(response) if is_error else _body(response, url, path, max_bytes))
            except (aiohttp.ClientError, OSError) as error:
                raise RolloutError(url, f"{method} {path} got no answer: {_reason(error)}") from error
        if response.status != 200:
            message, retry_after = f"{method} {path} answered {response.status}: {_message(answer)}", "Retry-After"
            raise RolloutError(url, message, response.status, retry_after=response.headers.get(retry_after))
        return answer

    async def close(self) -> None:
        """Close the connections. A later call opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def open_session(headers: Mapping[str, str], connector: aiohttp.BaseConnector | None = None) -> aiohttp.ClientSession:
    """Return a session with unlimited connections, unless `connector` limits them, and no timeout of its own."""
    connector = connector or aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
    return aiohttp.ClientSession(
        connector=guarded(connector),
        timeout=aiohttp.ClientTimeout(total=None),
        headers={"Accept-Encoding": "identity", **headers},
        cookie_jar=aiohttp.DummyCookieJar(),  # those of one server would go to another one of the same host
        auto_decompress=False,  # a small reply could become a large one
    )


async def _body(response: aiohttp.ClientResponse, url: str, path: str, max_bytes: int) -> bytes:
    """Return the body of a reply. Raises RolloutError if it has more than `max_bytes`."""
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > max_bytes:
            response.close()
            raise RolloutError(url, f"{path} returned more than {max_bytes} bytes", 200)
    return b"".join(parts)


async def _beginning(response: aiohttp.ClientResponse) -> bytes:
    """Return at most the first `MAX_ERROR_BYTES` of a reply, and end a connection that has more to read."""
    found = b""
    async for part in response.content.iter_any():
        found += part
        if len(found) > MAX_ERROR_BYTES:
            response.close()
            break
    return found[:MAX_ERROR_BYTES]


def _reason(error: Exception) -> str:
    """Return the system's message for the error number if there is one, otherwise the error's own message."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if number is not None and number > 0 else short(str(error)) or type(error).__name__


def _message(answer: bytes) -> str:
    """Return the error message inside a reply of any format, or its beginning."""
    try:
        body: Any = msgspec.json.decode(answer)
        error = body.get("error", body)
        text = str(error["message"] if isinstance(error, dict) else error)
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):  # DecodeError is a ValueError
        text = answer.decode(errors="replace").lstrip()
        text = "a web page" if text.startswith("<") else text
    return short(text)
