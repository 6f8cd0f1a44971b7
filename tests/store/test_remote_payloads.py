"""Records that other processes wrote: on the same machine, or on another, behind a real file service."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from starlette.types import Receive, Scope, Send
from test_payload_files import assert_same, sample

from penstock.runtime import file_service
from penstock.runtime.file_service import FileService
from penstock.runtime.http_server import bind, listening, url_of
from penstock.samples import Sample
from penstock.store import remote_payloads
from penstock.store.payload_files import PayloadError, PayloadReader, PayloadWriter
from penstock.store.remote_payloads import FetchedPayloads, PayloadsLost, TemporaryPayloadWriter
from penstock.types import PayloadRef

SECRET = "rule"


@dataclass
class Machines:
    """Two of them: `worker` writes on one, which serves its files; `controller` reads them on the other."""

    there: Path
    here: Path
    url: str = ""
    asked: list[str] = field(default_factory=list)
    """Ranges that were asked for."""

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append(dict(scope["headers"])[b"range"].decode())
        await FileService([self.there.parent], SECRET)(scope, receive, send)


@asynccontextmanager
async def machines(tmp_path: Path) -> AsyncIterator[Machines]:
    both = Machines(tmp_path / "there" / "pool", tmp_path / "here")
    for directory in (both.there, both.here):
        directory.mkdir(parents=True)
    with bind("127.0.0.1", 0) as listener:
        both.url = url_of("127.0.0.1", listener)
        async with listening(both.serve, listener):
            yield both


def written(directory: Path, groups: Sequence[Sequence[Sample]], **settings: int) -> list[PayloadRef]:
    """As a worker does."""
    writer = PayloadWriter(directory, "env-0", **settings)
    refs = [writer.append(group) for group in groups]
    writer.close()
    return refs


def fetched(both: Machines, name: str = "controller") -> FetchedPayloads:
    return FetchedPayloads(both.here / name, secret=SECRET, name=name)


@pytest.mark.parametrize("far", [False, True])
async def test_what_was_fetched_can_be_read(tmp_path: Path, far: bool) -> None:
    async with AsyncExitStack() as stack:
        both = await stack.enter_async_context(machines(tmp_path))
        groups = [[sample(20, group=g, episode=e, seed=10 * g + e) for e in range(3)] for g in range(12)]
        refs = written(both.there, groups, max_file_bytes=2000)
        assert len({ref.file for ref in refs}) > 1
        there = fetched(both) if far else PayloadReader(both.there)
        for some in (refs[3:5], refs[::-1], refs):
            await there.fetch(some, host=both.url)
        for group, ref in zip(groups, refs, strict=True):
            for before, after in zip(group, there.read(ref), strict=True):
                assert_same(before, after)
        there.drop(refs)
        assert len(both.asked) == (len(refs) if far else 0), "what is here is not asked for"


async def test_what_is_dropped_is_gone_here_only_and_can_be_fetched_anew(tmp_path: Path) -> None:
    async with machines(tmp_path) as both:
        (ref,) = written(both.there, [[before := sample(20)]])
        here = fetched(both)
        for _ in range(2):
            await here.fetch([ref], host=both.url)
            (after,) = here.read(ref)
            here.drop([ref])
            assert list((both.here / "controller").iterdir()) == []
            assert_same(before, after)
        with pytest.raises(PayloadError):
            here.read(ref)


async def test_many_ask_at_once(tmp_path: Path) -> None:
    async with machines(tmp_path) as both:
        refs = written(both.there, [[sample(20, seed=seed)] for seed in range(20)])
        here = fetched(both)
        await asyncio.gather(*(here.fetch([ref], host=both.url) for ref in refs))
        for seed, ref in enumerate(refs):
            assert_same(here.read(ref)[0], sample(20, seed=seed))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        (
            "nobody listens",
            r"env-0-00000\.seg cannot be read from host http://127\.0\.0\.1:9 at offset 0: Cannot connect",
        ),
        ("a removed file", r"cannot be read from host http://127.* at offset 0: HTTP 404 Not Found"),
        ("a short file", r"cannot be read from host http://127.* at offset 0: the answer is not bytes 0 to"),
        ("another run", r"cannot be read from host http://127.* at offset 0: HTTP 403 Forbidden"),
        ("a damaged record", r"env-0-00000\.seg of host http://127.* arrived damaged at offset 0"),
        ("no directory", r"No such file or directory"),
        ("a host that hangs", r"controller waited 0\.2 s for records of env-0-00000\.seg, held by host http://127"),
    ],
)
async def test_what_cannot_be_had_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, message: str
) -> None:
    monkeypatch.setattr(remote_payloads, "MAX_SILENCE_S", 0.2)
    monkeypatch.setattr(file_service, "PAUSE_S", 0.01)
    async with machines(tmp_path) as both, AsyncExitStack() as closing:
        (ref,) = written(both.there, [[sample(20)]])
        here, host = fetched(both), both.url
        match what:
            case "nobody listens":
                host = "http://127.0.0.1:9"
            case "a removed file":
                (both.there / ref.file).unlink()
            case "a short file":
                os.truncate(both.there / ref.file, ref.length - 1)
            case "another run":
                here = FetchedPayloads(both.here / "controller", secret="another", name="controller")
            case "a damaged record":
                ref = msgspec.structs.replace(ref, checksum=ref.checksum ^ 1)
            case "no directory":
                (both.here / "controller").rmdir()
            case "a host that hangs":
                monkeypatch.setattr(remote_payloads, "FETCH_S", 0.2)
                silent = closing.enter_context(bind("127.0.0.1", 0))
                host = url_of("127.0.0.1", silent)
        with pytest.raises(PayloadsLost, match=message):
            await here.fetch([ref], host=host)


@pytest.mark.parametrize("order", [1, -1])
def test_a_file_goes_once_all_in_it_is_released(tmp_path: Path, order: int) -> None:
    writer = TemporaryPayloadWriter(tmp_path / "pool", "env-0", max_file_bytes=1000)
    refs = [writer.append([sample(20, seed=seed)]) for seed in range(12)]
    files = sorted({ref.file for ref in refs})
    assert len(files) > 2
    for ref in refs[::order]:
        assert (tmp_path / "pool" / ref.file).exists(), "nobody has read it yet"
        writer.release(ref)
    assert [path.name for path in (tmp_path / "pool").iterdir()] == files[-1:], "the one it writes to"
    writer.close()


def test_a_successor_removes_what_was_left_and_uses_names_of_its_own(tmp_path: Path) -> None:
    names = []
    for worker in ("env-1", "env-11", "env-1"):
        writer = TemporaryPayloadWriter(tmp_path, worker)
        names.append(writer.append([sample(3)]).file)
        writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])
    assert len(set(names)) == 3
