"""Who gets which files of a machine."""

from __future__ import annotations

import gzip
from pathlib import Path

import aiohttp
import pytest
from starlette.types import Receive, Scope, Send

from penstock.runtime.file_service import FileUnavailable, link, read_range, serving_files
from penstock.runtime.http_server import bind, listening, url_of

SECRET = "rule"


@pytest.fixture
def places(tmp_path: Path) -> list[Path]:
    for name, text in {"a/pool/x": "first", "b/pool/x": "second", "b/pool/y": "other", "a/secret": "no"}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "a/pool/out").symlink_to(tmp_path / "a/secret")
    return [tmp_path / "a", tmp_path / "b"]


async def got(url: str) -> tuple[int, str]:
    async with aiohttp.ClientSession() as session, session.get(url, headers={"Range": "bytes=1-3"}) as answer:
        return answer.status, await answer.text()


async def test_the_first_place_that_has_a_file_gives_it(places: list[Path]) -> None:
    async with serving_files(places, address="127.0.0.1", secret=SECRET) as url:
        assert await got(link(url, "pool/x", SECRET)) == (206, "irs")
        assert await got(link(url, "pool/y", SECRET)) == (206, "the")


@pytest.mark.parametrize(
    "path",
    ["secret", "pool", "pool/", "pool/../secret", "pool/%2e%2e/secret", "pool/out", "weights/3", "/etc/passwd", ""],
)
async def test_nothing_else_is_given(places: list[Path], path: str) -> None:
    async with serving_files(places, address="127.0.0.1", secret=SECRET) as url:
        status, text = await got(link(url, path, SECRET))
        assert status in (403, 404) and "no" not in text.split()[:1]


async def test_a_link_opens_one_file_only(places: list[Path]) -> None:
    async with serving_files(places, address="127.0.0.1", secret=SECRET) as url:
        mine = link(url, "pool/y", SECRET)
        for wrong in (mine.replace("/y?", "/x?"), mine.partition("?")[0], mine[:-1], link(url, "pool/y", "another")):
            status, _ = await got(wrong)
            assert status == 403


async def test_an_encoded_answer_is_refused_and_not_unpacked() -> None:
    body = gzip.compress(bytes(2**22))
    num_bytes = len(body)
    encodings: list[bytes] = []

    async def bomb(scope: Scope, receive: Receive, send: Send) -> None:
        encodings.append(dict(scope["headers"])[b"accept-encoding"])
        headers = [(b"content-length", b"%d" % num_bytes), (b"content-encoding", b"gzip")]
        await send({"type": "http.response.start", "status": 206, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    taken = bytearray()
    with bind("127.0.0.1", 0) as listener:
        async with listening(bomb, listener):
            url = url_of("127.0.0.1", listener)
            with pytest.raises(FileUnavailable, match="the answer is not bytes 0 to"):
                await read_range(url, 0, num_bytes, taken.extend, max_silence_s=0.0)
    assert not taken and set(encodings) == {b"identity"}


async def test_a_file_is_read_in_ranges(places: list[Path]) -> None:
    taken = bytearray()
    async with serving_files(places, address="127.0.0.1", secret=SECRET) as url:
        await read_range(link(url, "pool/y", SECRET), 1, 4, taken.extend, max_silence_s=5.0)
    assert taken == b"the"
