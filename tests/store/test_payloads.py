"""Records that other processes wrote: on the same machine, or on another, behind real sockets and a host that reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from test_payload import assert_same, sample

from penstock.ports import Payloads, PayloadsLost
from penstock.store import payloads
from penstock.store.payload import PayloadError, PayloadWriter
from penstock.store.payloads import FetchedPayloads, PassingWriter, SharedPayloads, answering, read_records
from penstock.types import PayloadRef, Sample


@dataclass
class Machines:
    """Two of them: `worker` writes on one; on the other, `controller` asks its host."""

    there: Path
    here: Path
    asked: list[tuple[str, int]] = field(default_factory=list)
    """Host and number of records of every transfer."""
    spoils: bool = False
    """The transfer."""

    async def get(self, host: str, refs: Sequence[PayloadRef]) -> list[bytes]:
        self.asked.append((host, len(refs)))
        if host != "far":
            raise PayloadsLost(f"there is no host {host}")
        records = read_records([self.there], refs, host=host)
        return [record[::-1] for record in records] if self.spoils else records


@asynccontextmanager
async def machines(tmp_path: Path) -> AsyncIterator[Machines]:
    both = Machines(tmp_path / "there", tmp_path / "here")
    for directory in (both.there, both.here):
        directory.mkdir()
    async with answering(both.here, both.get):
        yield both


def written(directory: Path, groups: Sequence[Sequence[Sample]], **settings: int) -> list[PayloadRef]:
    """As a worker does."""
    writer = PayloadWriter(directory, "env-0", **settings)
    refs = [writer.append(group) for group in groups]
    writer.close()
    return refs


def fetched(both: Machines, name: str = "controller") -> FetchedPayloads:
    return FetchedPayloads(both.here / name, runtime_dir=both.here, name=name)


@pytest.mark.parametrize("far", [False, True])
async def test_what_was_fetched_can_be_read(tmp_path: Path, far: bool) -> None:
    async with AsyncExitStack() as stack:
        both = await stack.enter_async_context(machines(tmp_path))
        groups = [[sample(20, group=g, episode=e, seed=10 * g + e) for e in range(3)] for g in range(12)]
        refs = written(both.there, groups, max_file_bytes=2000)
        assert len({ref.file for ref in refs}) > 1
        there: Payloads = fetched(both) if far else SharedPayloads(both.there)
        stack.callback(there.close)
        for some in (refs[3:5], refs[::-1], refs):
            await there.fetch(some, host="far")
        for group, ref in zip(groups, refs, strict=True):
            for before, after in zip(group, there.read(ref), strict=True):
                assert_same(before, after)
        there.drop(refs)
        assert both.asked == ([("far", 2), ("far", 10)] if far else []), "what is here is not asked for"


async def test_what_is_dropped_is_gone_here_only_and_can_be_fetched_anew(tmp_path: Path) -> None:
    async with machines(tmp_path) as both:
        (ref,) = written(both.there, [[before := sample(20)]])
        here = fetched(both)
        for _ in range(2):
            await here.fetch([ref], host="far")
            (after,) = here.read(ref)
            here.drop([ref])
            assert list((both.here / "controller").iterdir()) == []
            assert_same(before, after)
        with pytest.raises(PayloadError):
            here.read(ref)
        here.close()


async def test_many_ask_at_once(tmp_path: Path) -> None:
    async with machines(tmp_path) as both:
        refs = written(both.there, [[sample(20, seed=seed)] for seed in range(20)])
        here = fetched(both)
        await asyncio.gather(*(here.fetch([ref], host="far") for ref in refs))
        for seed, ref in enumerate(refs):
            assert_same(here.read(ref)[0], sample(20, seed=seed))
        here.close()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("an unknown host", "there is no host near"),
        ("a removed file", r"host far has no whole record of env-0-00000\.seg at offset 0"),
        ("a damaged record", r"host far has no whole record of env-0-00000\.seg at offset 0"),
        ("a damaged transfer", r"env-0-00000\.seg of host far came damaged at offset 0"),
        ("no directory", r"No such file or directory"),
        ("nobody listens", r"waited 0\.2 s for records of env-0-00000\.seg on host far, held by the host beside it"),
    ],
)
async def test_what_cannot_be_had_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, message: str
) -> None:
    async with machines(tmp_path) as both:
        (ref,) = (whole,) = written(both.there, [[sample(20)]])
        here = fetched(both)
        match what:
            case "a removed file":
                (both.there / ref.file).unlink()
            case "a damaged record":
                ref = msgspec.structs.replace(ref, crc32=ref.crc32 + 1)
            case "a damaged transfer":
                both.spoils = True
            case "no directory":
                (both.here / "controller").rmdir()
            case "nobody listens":
                monkeypatch.setattr(payloads, "ASK_S", 0.2)
                here.close()
                here = FetchedPayloads(tmp_path / "elsewhere", runtime_dir=tmp_path / "elsewhere", name="controller")
        with pytest.raises(PayloadsLost, match=message):
            await here.fetch([ref], host="near" if what == "an unknown host" else "far")
        here.close()
        if what == "an unknown host":
            other = fetched(both, "trainer-0")
            await other.fetch([whole], host="far")
            other.close()


@pytest.mark.parametrize("order", [1, -1])
def test_a_file_goes_once_all_in_it_is_released(tmp_path: Path, order: int) -> None:
    writer = PassingWriter(tmp_path / "pool", "env-0", max_file_bytes=1000)
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
        writer = PassingWriter(tmp_path, worker)
        names.append(writer.append([sample(3)]).file)
        writer.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names[1:])
    assert len(set(names)) == 3
