"""Numbers of a run, read back with the trackers' own readers."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.observe.recorder import Recorder
from penstock.observe.trackers import open_trackers
from penstock.types import LearnerState


def record(run_dir: Path, *names: str) -> None:
    recorder = Recorder(run_dir, open_trackers(names, run_dir, {"seed": 3}))
    for step in (1, 2):
        learner = LearnerState(policy_version=step, entropy=1.0 / step, metrics={"loss": 0.5 * step})
        recorder.stepped(step, learner, {"trained": 8 * step}, {"oldest_wait_s": None})
    recorder.close()


def test_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import RecordWriter  # noqa: F401 - its format is read below

    record(tmp_path, "tensorboard")
    (file,) = (tmp_path / "tensorboard").iterdir()
    data, found, place = file.read_bytes(), {}, 0
    while place < len(data):
        length = int.from_bytes(data[place : place + 8], "little")
        event = Event.FromString(data[place + 12 : place + 12 + length])
        found.update({(value.tag, event.step): value.simple_value for value in event.summary.value})
        place += 12 + length + 4
    assert found["loss", 2] == 1.0 and found["entropy", 1] == 1.0
    assert not any(tag == "oldest_wait_s" for tag, _ in found), "what is not known is not drawn"


@pytest.mark.long
@pytest.mark.integration
def test_weights_and_biases_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    record(tmp_path, "wandb")
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    data = file.read_bytes()
    assert b"loss" in data and b"policy_version" in data
