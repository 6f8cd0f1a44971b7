"""How records get into the controller's pool, and how groups end without their records."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_ports import played

from penstock.config import Config
from penstock.control.messages import AnyMessage, DataGenerated, GrantRequest, Hello, RewardComputed
from penstock.observe import jsonl
from penstock.observe.recorder import Recorder
from penstock.processes.controller import Controller
from penstock.processes.pool_access import MAX_FAILING_S, HostUnreachable, PayloadFetcher
from penstock.simulator.clock import run_virtual
from penstock.store.payload_files import PayloadReader
from penstock.store.remote_payloads import PayloadsLost
from penstock.supervisor.child import Child
from penstock.types import EpisodeId, GroupAttempt, PayloadRef

REF = PayloadRef(file="env-0-00000.seg", offset=0, length=8, checksum=0)
EPISODE = EpisodeId("train", 3, 0, 1)


class Far(PayloadReader):
    """Hosts that answer or do not."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.gone: set[str] = set()
        self.fetched: list[str] = []

    async def fetch(self, refs: Sequence[PayloadRef], *, host: str) -> None:
        if host in self.gone:
            raise PayloadsLost(f"host {host} is gone, and {refs[0].file} with it")
        self.fetched.append(host)

    async def verify(self, refs: Sequence[PayloadRef]) -> None:
        """The records are stand-ins."""


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[Recorder]:
    recorder = Recorder(tmp_path)
    yield recorder
    recorder.close()


def test_a_host_that_fails_for_long_ends_the_run(tmp_path: Path, recorder: Recorder) -> None:
    """A while is forgiven, and what other hosts do does not count."""
    far = Far(tmp_path)

    async def main() -> None:
        fetcher = PayloadFetcher(far, recorder)

        async def fetch(host: str) -> str:
            return await fetcher.fetch([REF], worker="env-0", host=host)

        far.gone = {"a"}
        for _ in range(3):
            assert await fetch("a") == "host a is gone, and env-0-00000.seg with it"
            assert await fetch("b") == ""
            await asyncio.sleep(MAX_FAILING_S / 4)
        far.gone = set()
        assert await fetch("a") == ""
        far.gone = {"a"}
        for _ in range(3):
            assert await fetch("a")
            await asyncio.sleep(MAX_FAILING_S / 2.5)
        with pytest.raises(HostUnreachable, match=r"host a has delivered no records for 300 s.*: host a is"):
            await fetch("a")

    run_virtual(main())
    told = [event for event in jsonl.read(tmp_path / "events.jsonl") if event["event"] == "payloads_unfetched"]
    assert [event["host"] for event in told] == ["a"] * 7


@dataclass
class Noting:
    """A scheduler that only notes what it is told. It knows no group, so no report is checked against one."""

    trained_version = policy_version = 0
    groups = SimpleNamespace(find_attempt=lambda attempt: None)

    calls: list[tuple[Any, ...]] = field(default_factory=list)

    @property
    def members(self) -> Noting:
        return self

    def task_of(self, attempt: GroupAttempt) -> None:
        self.calls.append(("played", *attempt))

    def reissue_group(self, attempt: GroupAttempt, reason: str) -> None:
        self.calls.append(("lost", *attempt))

    def end_members(self, attempt: GroupAttempt, episodes: Any, saved: Any) -> None:
        self.calls.append(("ended", attempt.group, saved))

    def request_grant(self, attempt: GroupAttempt, member: int, **what: Any) -> None:
        self.calls.append(("grant", what["saved"]))


@pytest.mark.parametrize("is_gone", [False, True])
@pytest.mark.parametrize(
    ("message", "expected", "expected_if_gone"),
    [
        (
            DataGenerated(group=3, ref=REF, episodes=[played(EPISODE, reward=1.0)]),
            ("played", 3, 1),
            ("lost", 3, 1),
        ),
        (
            RewardComputed(episodes=[played(EPISODE, reward=1.0)], saved=[REF]),
            ("ended", 3, [REF]),
            ("ended", 3, [None]),
        ),
        (
            GrantRequest(episode=EPISODE, unfinished=True, num_tokens=8, saved=REF),
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
    controller._fetcher = PayloadFetcher(far, recorder)
    far.gone = {"node"} if is_gone else set()
    controller._welcome(Hello(role="env", name="env-0", nonce="n", pid=1, host="node"))
    controller.system = SimpleNamespace(  # type: ignore[assignment]
        scheduler=scheduler,
        update_pool=lambda: None,
        pool=SimpleNamespace(highest_version=0),
        config=Config(),
    )
    await controller.handle("env-0", message)
    assert scheduler.calls == [expected_if_gone if is_gone else expected]
    assert far.fetched == ([] if is_gone else ["node"])
    controller.bus.close()
