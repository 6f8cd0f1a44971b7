"""What a process left in its runtime directory is read as its own only."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from stand_in_run import spec

from penstock.ports.process_launcher import Beat, Report
from penstock.supervisor.launcher import LocalProcess


def process(runtime_dir: Path, *, name: str = "env-0", pid: int = 7) -> LocalProcess:
    popen: Any = SimpleNamespace(pid=pid)
    return LocalProcess(
        spec=spec(name, "steady"),
        popen=popen,
        identity=None,
        num_oom_kills=0,
        runtime_dir=runtime_dir,
        nonce="this run",
    )


async def test_a_beat_is_its_own_process_s(tmp_path: Path) -> None:
    (tmp_path / "heartbeats").mkdir()
    path = tmp_path / "heartbeats" / "env-0.json"
    beat = {"pid": 7, "time": 1.5, "progress": 3, "doing": "Step"}
    path.write_bytes(json.dumps(beat).encode().ljust(256))
    assert (await process(tmp_path).look()).beat == Beat(time=1.5, progress=3, doing="Step")
    assert (await process(tmp_path, pid=8).look()).beat is None
    assert (await process(tmp_path, name="env-1").look()).beat is None
    path.write_bytes(b'{"pid": 7, "ti')
    assert (await process(tmp_path).look()).beat is None


async def test_a_predecessor_s_last_words_are_not_its_successor_s(tmp_path: Path) -> None:
    (tmp_path / "errors").mkdir()
    (tmp_path / "errors" / "env-0.json").write_text('{"time": 1.0, "pid": 7, "message": "it broke"}')
    assert (await process(tmp_path).look()).report == Report(time=1.0, message="it broke")
    assert (await process(tmp_path, pid=8).look()).report is None
    assert (await process(tmp_path, name="env-1").look()).report is None


async def test_a_restarted_process_is_starting_until_it_reports_ready_itself(tmp_path: Path) -> None:
    def report(pid: int, nonce: str = "this run") -> None:
        (tmp_path / "ready" / "env-0.json").write_text(json.dumps({"pid": pid, "nonce": nonce}))

    async def missing(pid: int) -> str | None:
        return await process(tmp_path, pid=pid).probe()

    (tmp_path / "ready").mkdir()
    assert await missing(7) == "it is still starting"
    report(7)
    assert await missing(7) is None
    assert await missing(8) == "it is still starting", "its dead predecessor was ready, it is not yet"
    report(8, nonce="another run")
    assert await missing(8) == "it is still starting"
    report(8)
    assert await missing(8) is None
