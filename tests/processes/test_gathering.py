"""How records get into the controller's pool, and what becomes of groups whose records do not."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.config import Config
from penstock.control.messages import AnyMessage, DataGenerated, EpisodesEnded, GrantRequest, Hello
from penstock.observe import jsonl
from penstock.observe.recorder import Recorder
from penstock.ports import PayloadsLost
from penstock.processes.controller import Controller
from penstock.processes.gathering import PATIENCE_S, Gathering, HostUnreachable
from penstock.simulator.clock import run_virtual
from penstock.simulator.parts import played
from penstock.store.payloads import SharedPayloads
from penstock.supervisor.child import Child
from penstock.types import EpisodeId, PayloadRef

REF = PayloadRef(file="env-0-00000.seg", offset=0, length=8, crc32=0)
EPISODE = EpisodeId("train", 3, 0, 1)


class Far(SharedPayloads):
    """Hosts that answer or do not."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.gone: set[str] = set()
        self.fetched: list[str] = []

    async def fetch(self, refs: Sequence[PayloadRef], *, host: str) -> None:
        if host in self.gone:
            raise PayloadsLost(f"host {host} is gone, and {refs[0].file} with it")
        self.fetched.append(host)


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    recorder = Recorder(tmp_path)
    yield recorder
    recorder.close()


def test_a_host_that_fails_for_long_ends_the_run(tmp_path: Path, recorder: Recorder) -> None:
    """A while is forgiven, and what other hosts do does not count."""
    far = Far(tmp_path)

    async def main() -> None:
        gathering = Gathering(far, recorder)

        async def gather(host: str) -> str:
            return await gathering.gather([REF], worker="env-0", host=host)

        far.gone = {"a"}
        for _ in range(3):
            assert await gather("a") == "host a is gone, and env-0-00000.seg with it"
            assert await gather("b") == ""
            await asyncio.sleep(PATIENCE_S / 4)
        far.gone = set()
        assert await gather("a") == ""
        far.gone = {"a"}
        for _ in range(3):
            assert await gather("a")
            await asyncio.sleep(PATIENCE_S / 2.5)
        with pytest.raises(HostUnreachable, match="nothing that is played on host a has come for 300 s: host a is"):
            await gather("a")

    run_virtual(main())
    told = [event for event in jsonl.read(tmp_path / "events.jsonl") if event["event"] == "payloads_unfetched"]
    assert [event["host"] for event in told] == ["a"] * 7


@dataclass
class Noting:
    """A scheduler that only notes what it is told."""

    calls: list[tuple[Any, ...]] = field(default_factory=list)

    def task_of(self, *what: Any) -> None:
        self.calls.append(("played", *what))

    def tokens_lost(self, group: int, attempt: int, reason: str) -> None:
        self.calls.append(("lost", group, attempt))

    def ended(self, group: int, episodes: Any, saved: Any) -> None:
        self.calls.append(("ended", group, saved))

    def request_grant(self, episode: EpisodeId, **what: Any) -> None:
        self.calls.append(("grant", what["saved"]))


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize(
    ("message", "expected", "expected_if_gone"),
    [
        (
            DataGenerated(worker="env-0", group=3, ref=REF, episodes=[played(EPISODE, reward=1.0)]),
            ("played", 3, 1),
            ("lost", 3, 1),
        ),
        (
            EpisodesEnded(worker="env-0", group=3, episodes=[played(EPISODE, reward=1.0)], saved=[REF]),
            ("ended", 3, [REF]),
            ("ended", 3, [None]),
        ),
        (
            GrantRequest(worker="env-0", episode=EPISODE, unfinished=True, num_tokens=8, saved=REF),
            ("grant", REF),
            ("grant", REF),
        ),
    ],
    ids=["a group", "a saved episode", "a cut one"],
)
async def test_what_the_scheduler_hears(
    tmp_path: Path,
    recorder: Recorder,
    message: AnyMessage,
    expected: tuple[Any, ...],
    expected_if_gone: tuple[Any, ...],
    is_gone: bool,
) -> None:
    """A whole group whose tokens are lost is reissued; a saved one counts as not saved; a cut one is found out when it
    is to go on."""
    child = Child(name="controller", run_dir=tmp_path, runtime_dir=tmp_path, run_id="run", nonce="n")
    controller, scheduler, far = Controller(Config(), child, recorder), Noting(), Far(tmp_path)
    controller._gathering = Gathering(far, recorder)
    far.gone = {"node"} if is_gone else set()
    controller._welcome(Hello(role="env", name="env-0", nonce="n", pid=1, host="node"))
    controller.system = SimpleNamespace(scheduler=scheduler, settle=lambda: None)  # type: ignore[assignment]
    await controller.handle("env-0", message)
    assert scheduler.calls == [expected_if_gone if is_gone else expected]
    assert far.fetched == ([] if is_gone else ["node"])
    controller.close()
    controller.bus.close()
