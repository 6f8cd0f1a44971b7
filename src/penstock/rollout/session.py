"""Calls to rollout servers over HTTP, whatever protocol they speak; torch-free. Nothing is retried here: a failed call
is one clear error."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypeVar

import aiohttp
import msgspec

from penstock.deadline import deadline
from penstock.rollout import wire

T = TypeVar("T")


class RolloutError(RuntimeError):
    """A call to a rollout server failed. `status` is None if there was no answer."""

    self_explanatory = True

    def __init__(self, url: str, message: str, status: int | None = None) -> None:
        self.url, self.message, self.status = url, message, status
        super().__init__(f"rollout server {url}: {message}")


class HttpSession:
    """One aiohttp session for any number of servers, opened on first use; every call has a deadline."""

    def __init__(self, *, api_key: str | None = None, timeout_s: float = 120.0) -> None:
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._timeout_s = timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def call(
        self, method: str, url: str, path: str, body: object, reply: type[T], *, timeout_s: float | None = None
    ) -> T:
        """One round trip. Raises RolloutError, or Stalled when the time is up."""
        answer = await self._round_trip(method, url, path, body, timeout_s)
        try:
            return wire.decode(answer, reply)
        except msgspec.DecodeError as error:
            raise RolloutError(url, f"{method} {path} answered with something else: {error}", 200) from error

    async def send(
        self, method: str, url: str, path: str, body: object = None, *, timeout_s: float | None = None
    ) -> bytes:
        """One round trip, whatever the answer is. Raises like `call`."""
        return await self._round_trip(method, url, path, body, timeout_s)

    async def _round_trip(self, method: str, url: str, path: str, body: object, timeout_s: float | None) -> bytes:
        data = None if body is None else wire.encode(body)
        seconds = timeout_s or self._timeout_s
        async with deadline(seconds, waiter="rollout client", resource=f"{method} {path}", holder=url):
            try:
                async with self._open().request(method, url + path, data=data) as response:
                    answer = await response.read()
            except (aiohttp.ClientError, OSError) as error:
                raise RolloutError(url, f"{method} {path} got no answer: {_reason(error)}") from error
        if response.status != 200:
            raise RolloutError(url, f"{method} {path} answered {response.status}: {_message(answer)}", response.status)
        return answer

    async def close(self) -> None:
        """Close the connections; a later call opens new ones."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = open_session(self._headers)
        return self._session


def open_session(headers: Mapping[str, str]) -> aiohttp.ClientSession:
    """With as many connections as are needed, and without deadlines of its own."""
    return aiohttp.ClientSession(
        # Shorter than uvicorn's 5 s, so that no request is sent into a connection the server is closing.
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4.0),
        timeout=aiohttp.ClientTimeout(total=None),
        headers=headers,
    )


def _reason(error: Exception) -> str:
    """What the system says of a connection that failed; else what the error does."""
    number = getattr(error, "errno", None)
    return os.strerror(number) if number is not None and number > 0 else str(error) or type(error).__name__


def _message(answer: bytes) -> str:
    """The error message inside a reply, whatever its shape."""
    try:
        body: Any = msgspec.json.decode(answer)
        error = body.get("error", body)
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, KeyError, TypeError, AttributeError):
        text = answer[:200].decode(errors="replace").lstrip()
        return "a web page" if text.startswith("<") else text
