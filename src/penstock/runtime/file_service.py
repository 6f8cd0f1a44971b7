"""Serve files of one machine to processes of the same run on other machines: published weights, records of the pool.

A machine serves the folders `POOL` and `WEIGHTS` over HTTP. A link carries a token, computed from its path and the
run's secret. The token opens this one file, and the secret itself is never sent. A reader requests a range of bytes and
requests missing bytes again. The reader knows the checksum and verifies the bytes. Torch-free.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing, suppress
from pathlib import Path
from typing import ClassVar
from urllib.parse import quote

import aiohttp
from starlette.requests import Request
from starlette.responses import FileResponse, PlainTextResponse
from starlette.types import Receive, Scope, Send

from penstock.deadline import deadline
from penstock.runtime.http_client import guarded, short
from penstock.runtime.http_server import bind, listening, url_of

POOL, WEIGHTS = "pool", "weights"
"""Folders of a runtime directory, or of the run directory."""
PART_BYTES, PIECE_BYTES = 32 << 20, 1 << 20
"""A reader requests a file in parts and receives each part in pieces."""
PIECE_S = 30.0
"""Time limit for one piece of a part to arrive."""
PAUSE_S = 0.5
"""Pause before a reader repeats a request."""
PARTIAL, FORBIDDEN, NOT_FOUND, RANGE_REFUSED = 206, 403, 404, 416
FINAL = (FORBIDDEN, NOT_FOUND, RANGE_REFUSED)
"""Statuses that a repeated request would not change."""


class FileUnavailable(OSError):
    """The bytes of a file cannot be read. The message gives the reason."""


class _Answer(FileResponse):
    chunk_size: ClassVar[int] = PIECE_BYTES  # type: ignore[misc]


class FileService:
    """ASGI application that serves files. The first of `places` that has a requested file provides it."""

    def __init__(self, places: Sequence[Path], secret: str) -> None:
        self._folders = [place / name for place in places for name in (POOL, WEIGHTS)]
        self._secret = secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        given, wanted = request.query_params.get("token", ""), _token(scope["path"], self._secret)
        if not hmac.compare_digest(given.encode(), wanted.encode()):
            return await PlainTextResponse("the token of this link is wrong", FORBIDDEN)(scope, receive, send)
        async with deadline(PIECE_S, waiter="file service", resource=scope["path"], holder="its disk"):
            path = await asyncio.to_thread(self._find, scope["path"])
        if path is None:
            return await PlainTextResponse("there is no such file", NOT_FOUND)(scope, receive, send)
        return await _Answer(path)(scope, receive, send)

    def _find(self, path: str) -> Path | None:
        for folder in self._folders:
            with suppress(ValueError, OSError):  # no file can have such a name
                found = (folder.parent / path.removeprefix("/")).resolve()
                if found.is_file() and found.is_relative_to(folder.resolve()):
                    return found
        return None


@asynccontextmanager
async def serving_files(places: Sequence[Path], *, address: str, secret: str) -> AsyncIterator[str]:
    """Serve the files of `places` while the `async with` body runs. Yield the URL of the service."""
    with bind(address, 0) as listener:
        async with listening(FileService(places, secret), listener):
            yield url_of(address, listener)


def link(service: str, path: str, secret: str) -> str:
    """Return the URL of the file `path`. The path begins with the name of its folder."""
    return f"{service}/{quote(path)}?token={_token('/' + path, secret)}"


def without_token(url: str) -> str:
    """Return the URL without its token, so that an error message may show it."""
    return url.partition("?")[0]


async def read_range(url: str, start: int, end: int, take: Callable[[bytes], object], *, max_silence_s: float) -> None:
    """Read bytes `start` to `end` of a file and pass each piece to `take`, in order. Missing bytes are requested again.

    Raises `FileUnavailable` if no bytes have arrived for `max_silence_s`, or if the service refuses the request."""
    now = asyncio.get_running_loop().time
    limit = now() + max_silence_s
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=max_silence_s, sock_read=PIECE_S)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=guarded(aiohttp.TCPConnector()), read_bufsize=PIECE_BYTES, auto_decompress=False
    ) as session:
        while start < end:
            try:
                async for piece in _part(session, url, start, min(start + PART_BYTES, end)):
                    take(piece)
                    start += len(piece)
                    limit = now() + max_silence_s
            except (aiohttp.ClientError, TimeoutError) as error:
                is_final = isinstance(error, aiohttp.ClientResponseError) and error.status in FINAL
                if is_final or now() > limit:
                    raise FileUnavailable(_say(error)) from error
                await asyncio.sleep(PAUSE_S)


async def _part(session: aiohttp.ClientSession, url: str, start: int, end: int) -> AsyncIterator[bytes]:
    """Yield the pieces as they arrive, and never more bytes than requested. aiohttp limits the wait for each piece, but
    interim answers may come without end before the first one."""
    wrong = aiohttp.ClientPayloadError(f"the answer is not bytes {start} to {end}")
    headers = {"Range": f"bytes={start}-{end - 1}", "Accept-Encoding": "identity"}
    async with deadline(PIECE_S, waiter="a reader", resource=without_token(url), holder="the file service"):
        answer = await session.get(url, headers=headers, allow_redirects=False)
    with closing(answer) as response:
        response.raise_for_status()
        is_encoded = "Content-Encoding" in response.headers
        if response.status != PARTIAL or response.content_length != end - start or is_encoded:
            raise wrong
        async for piece in response.content.iter_chunked(PIECE_BYTES):
            start += len(piece)
            if start > end:
                raise wrong
            yield piece


def _say(error: Exception) -> str:
    if isinstance(error, aiohttp.ClientResponseError):
        return short(f"HTTP {error.status} {error.message}")
    return short(str(error)) or type(error).__name__


def _token(path: str, secret: str) -> str:
    return hmac.new(secret.encode(), path.encode(), hashlib.sha256).hexdigest()
