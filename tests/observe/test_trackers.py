"""Trackers, read back with their libraries' own readers: a run that is killed and continued is one run there."""

from __future__ import annotations

import json
import logging
import sqlite3
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from penstock.observe import jsonl, overview, trackers
from penstock.observe.tracker_libraries import Tracking
from penstock.observe.tracker_process import Advance, Open, Reply
from penstock.observe.trackers import ANSWERER, Trackers
from penstock.runtime import frames
from penstock.runtime.child_process import ChildProcess

CONFIG = {"seed": 3, "trainer": {"steps": 9}}
IDENTITY = {"project": "sums", "name": "first", "id": "first-0123abcd"}

LIMIT_S = 60.0
LOG_BLOCK = 32_768
Points = dict[str, list[tuple[int, float]]]


def line(step: int, version: int, **facts: Any) -> dict[str, Any]:
    return {"step": step, "policy_version": version, "time": 1e9 + version, "reward": step / 10, "loss": None} | facts


def evaluated(version: int, reward: float) -> dict[str, Any]:
    facts = {"tasks": 4, "pass_at": {"1": 0.5, "8": 0.75}, "tags": {}}
    return {
        "time": 1e9 + version + 0.5,
        "event": "evaluation",
        "when": "step",
        "step": version,
        "reward": reward,
        **facts,
    }


def write(run_dir: Path, *lines: dict[str, Any], events: tuple[dict[str, Any], ...] = ()) -> None:
    for each in lines:
        jsonl.append(run_dir / "metrics.jsonl", each)
    for event in events:
        jsonl.append(run_dir / "events.jsonl", event)


def opened(run_dir: Path, *names: str) -> Trackers:
    return Trackers(names, run_dir, identity=IDENTITY, uploads=False, axis="policy_version", config=CONFIG)


def track_and_die(run_dir: Path, name: str) -> None:
    """Give the tracker what is there, and kill its process."""
    child = ChildProcess(ANSWERER)
    tracking = Tracking(tracker=name, run_dir=str(run_dir), uploads=False, config=CONFIG, **IDENTITY)
    reply, requests = Reply(), [Open(tracking=tracking, axis="policy_version"), Advance(), Advance()]
    for request in requests:
        frames.send(child.pipe, [msgspec.msgpack.encode(request)])
        reply = msgspec.msgpack.decode(frames.receive(child.pipe)[0], type=Reply)
        assert reply.error == ""
    assert not reply.is_behind
    child.kill()
    child.wait()
    child.pipe.close()


def two_lives(run_dir: Path, name: str) -> None:
    """Track a run whose controller is killed, and whose trainer goes back to step 2."""
    write(run_dir, line(1, 1), line(2, 2), line(3, 3), events=(evaluated(0, 0.25),))
    track_and_die(run_dir, name)
    write(run_dir, line(3, 5), line(4, 6), events=(evaluated(6, 0.5),))
    opened(run_dir, name).close()


EXPECTED: Points = {
    "reward/mean": [(1, 0.1), (2, 0.2), (3, 0.3), (5, 0.3), (6, 0.4)],
    "progress/step": [(1, 1), (2, 2), (3, 3), (5, 3), (6, 4)],
    "evaluation/reward": [(0, 0.25), (6, 0.5)],
    "evaluation/pass_at_8": [(0, 0.75), (6, 0.75)],
}
"""The steps after the rewind follow under the versions that they made; no version occurs twice."""


def of_tensorboard(run_dir: Path) -> Points:
    from tensorboardX.proto.event_pb2 import Event

    found: Points = defaultdict(list)
    for file in sorted((run_dir / "tensorboard").iterdir(), key=lambda file: file.stat().st_mtime_ns):
        data, place = file.read_bytes(), 0
        while place < len(data):
            length = int.from_bytes(data[place : place + 8], "little")
            event = Event.FromString(data[place + 12 : place + 12 + length])
            for value in event.summary.value:
                found[value.tag].append((event.step, value.simple_value))
            place += 12 + length + 4
    return found


def logged(data: bytes, *, place: int = 7) -> Iterator[bytes]:
    """Yield the records of a file in LevelDB's log format: checksum, length, kind, and a part of a record."""
    record = b""
    while len(data) - place >= 7:
        if (left := LOG_BLOCK - place % LOG_BLOCK) < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield record
            record = b""


def of_wandb(run_dir: Path) -> Points:
    """Read the offline runs in the order in which `wandb sync` joins them: those with one id are one run."""
    from wandb.proto.wandb_internal_pb2 import Record

    found: Points = defaultdict(list)
    for file in sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb")):
        for data in logged(file.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("run"):
                assert (record.run.run_id, record.run.project) == (IDENTITY["id"], IDENTITY["project"])
            if record.HasField("history"):
                items = {item.key or "/".join(item.nested_key): item.value_json for item in record.history.item}
                x = int(items.pop("_step", record.history.step.num))
                for name, value in items.items():
                    if not name.startswith("_"):
                        found[name].append((x, json.loads(value)))
    return found


def of_trackio(run_dir: Path) -> Points:
    found: Points = defaultdict(list)
    with sqlite3.connect(run_dir / "trackio" / f"{IDENTITY['project']}.db") as database:
        runs = database.execute("select distinct run_name from metrics group by run_id").fetchall()
        assert runs == [(IDENTITY["id"],)]
        for x, numbers in database.execute("select step, metrics from metrics order by id"):
            for name, value in json.loads(numbers).items():
                found[name].append((x, value))
    return found


def of_mlflow(run_dir: Path) -> Points:
    from mlflow.tracking import MlflowClient

    client = MlflowClient((run_dir / "mlflow").as_uri())
    experiment = client.get_experiment_by_name(IDENTITY["project"])
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == (IDENTITY["name"], "FINISHED")
    assert run.data.params == {"seed": "3", "trainer.steps": "9"}
    names = list(run.data.metrics)
    return {name: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)] for name in names}


def of_swanlab(run_dir: Path) -> Points:
    """Read the offline runs, which `swanlab sync --id` joins."""
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    found: Points = defaultdict(list)
    for file in sorted((run_dir / "swanlab").glob("run-*/run-*.swanlab")):
        for data in logged(file.read_bytes()):
            record = Record.FromString(data)
            if record.HasField("start"):
                assert (record.start.id, record.start.project) == (IDENTITY["id"], IDENTITY["project"])
            if record.HasField("scalar"):
                found[record.scalar.key].append((record.scalar.step, record.scalar.value.number))
    return found


READERS = {
    "tensorboard": of_tensorboard,
    "wandb": of_wandb,
    "trackio": of_trackio,
    "mlflow": of_mlflow,
    "swanlab": of_swanlab,
}


def close_to(found: list[tuple[int, float]], wanted: list[tuple[int, float]]) -> bool:
    """Return whether both have the same points. A point that was added before and after a death counts once."""
    return [(x, pytest.approx(value)) for x, value in wanted] == sorted(set(found))


@pytest.mark.integration
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("tensorboard", "tensorboardX"),
        ("wandb", "wandb"),
        ("trackio", "trackio"),
        ("mlflow", "mlflow"),
        ("swanlab", "swanlab"),
    ],
)
def test_a_run_that_was_killed_and_continued_is_one_run_of_the_tracker(
    tmp_path: Path, name: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(package)
    two_lives(tmp_path, name)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # to read what was written
    found = READERS[name](tmp_path)
    for series, wanted in EXPECTED.items():
        assert close_to(found[series], wanted), (series, found[series])
    assert "learner/loss" not in found, "an unknown number is not drawn"
    assert len(found) < 40


@pytest.mark.integration
@pytest.mark.long
def test_the_best_and_the_worst_trajectory_of_a_sample_are_traces(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    write(tmp_path, line(1, 1))
    for episode, reward in enumerate((0.5, 0.0, 1.0)):
        messages = json.dumps([{"role": "user", "content": "1+1"}, {"role": "assistant", "content": f"{reward}"}])
        row = {"reward": reward, "episode": episode, "messages": messages, "branches": None}
        (tmp_path / "trajectories").mkdir(exist_ok=True)
        jsonl.append(tmp_path / "trajectories" / "step_000001.jsonl", row)
    for _ in range(2):
        opened(tmp_path, "trackio").close()
    with sqlite3.connect(tmp_path / "trackio" / "sums.db") as database:
        found = database.execute("select step, messages, metadata from traces order by rowid").fetchall()
    assert [(x, json.loads(text)[1]["content"]) for x, text, _ in found] == [(1, "1.0"), (1, "0.0")]
    assert json.loads(found[0][2])["episode"] == 2


FAULTY = """
import pathlib, time
HERE = pathlib.Path(__file__).parent
def init(**settings):
    times = len(list(HERE.glob("opened-*")))
    (HERE / f"opened-{times}").touch()
    if times < FAILS:
        raise ConnectionError("no route to the service")
    if HANGS:
        time.sleep(1000)
    return Run()
class Run:
    def log(self, numbers, step):
        with (HERE / "points").open("a") as file:
            file.write(f"{step} ")
def finish():
    (HERE / "points").open("a").write("end")
"""
"""In the place of a library."""


def in_place_of_swanlab(folder: Path, monkeypatch: pytest.MonkeyPatch, *, fails: int = 0, hangs: bool = False) -> None:
    folder.mkdir()
    (folder / "swanlab.py").write_text(FAULTY.replace("FAILS", str(fails)).replace("HANGS", str(hangs)))
    monkeypatch.syspath_prepend(folder)


@pytest.mark.integration
def test_a_tracker_that_fails_is_reported_once_and_gets_all_points_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_place_of_swanlab(tmp_path / "library", monkeypatch, fails=2)
    monkeypatch.setattr(trackers, "RETRY_S", 0.01)
    caplog.set_level(logging.INFO)
    write(tmp_path, line(1, 1), line(2, 2))
    tracked = opened(tmp_path, "swanlab")
    third = tmp_path / "library" / "opened-2"
    give_up = time.monotonic() + LIMIT_S
    while not third.exists():
        assert time.monotonic() < give_up
        time.sleep(0.01)
    write(tmp_path, line(3, 3))
    tracked.close()
    assert (tmp_path / "library" / "points").read_text() == "1 2 3 end"
    first, again = [record.message for record in caplog.records if record.name == trackers.__name__]
    assert "swanlab: ConnectionError: no route to the service" in first and "check its server" in first
    assert again == "observe.trackers swanlab: works again"


@pytest.mark.integration
def test_a_tracker_that_hangs_does_not_keep_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    in_place_of_swanlab(tmp_path / "library", monkeypatch, hangs=True)
    monkeypatch.setattr(trackers, "END_S", 0.1)
    write(tmp_path, line(1, 1))
    before = psutil.Process().children()
    opened(tmp_path, "swanlab").close()
    assert [record.message for record in caplog.records if record.name == trackers.__name__] == [
        "swanlab did not take the last points in time: metrics.jsonl has them"
    ]
    assert set(psutil.Process().children()) <= set(before)


def test_steps_that_go_back_have_no_rate() -> None:
    before = {**line(9, 9), "tokens_generated_total": 10.0, "wall_s": 1.0, "trainer_busy_s": 1.0, "num_trainers": 1}
    after = {**line(7, 11), "tokens_generated_total": 30.0, "wall_s": 3.0, "trainer_busy_s": 2.0, "num_trainers": 1}
    found = overview.point(after, before)
    assert found["throughput/generated_tokens_per_s"] == 10.0 and found["balance/trainer_busy_share"] == 0.5
    assert "throughput/steps_per_s" not in found and "learner/loss" not in found
