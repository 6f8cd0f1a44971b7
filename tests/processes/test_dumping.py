"""What a run dumps is known to be possible before it plays."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config, ConfigError
from penstock.data.sources import TaskStream
from penstock.processes.dumping import open_dumps
from penstock.processes.layout import prepare
from penstock.store.dumps.writer import Dump, Samples, Tell
from penstock.store.experience_pool import ExperiencePool
from penstock.types import Task


class OneTask:
    def task(self, index: int) -> Task | None:
        return Task(task_id="it", tag="train", index=0, payload={"level": "high"}) if index == 0 else None


def dumps(run_dir: Path, pipeline: str, tell: Tell = lambda *_, **__: None, **sections: Any) -> list[Dump | Samples]:
    config = Config.model_validate({"pipeline": pipeline, **sections})
    prepare(config, run_dir)
    pool = ExperiencePool(run_dir / "pool")
    try:
        return open_dumps(config, run_dir, pool, TaskStream(OneTask()), tell, model_name="m")
    finally:
        pool.close()


def test_a_run_that_only_plays_dumps_into_its_own_folder(tmp_path: Path) -> None:
    (dump,) = dumps(tmp_path, "rollout")
    assert isinstance(dump, Dump) and dump._rendering.target.where == str(tmp_path / "trajectories")


def test_training_keeps_samples_and_dumps_where_it_is_told(tmp_path: Path) -> None:
    elsewhere = {"url": str(tmp_path / "table")}
    assert [type(dump) for dump in dumps(tmp_path, "train")] == [Samples]
    assert [type(dump) for dump in dumps(tmp_path, "train", dump=elsewhere)] == [Dump, Samples]
    assert dumps(tmp_path, "train", observe={"trajectories": 0}) == []


def test_a_store_out_of_reach_ends_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    unwritable = {"url": str(tmp_path / "file" / "x")}
    assert [type(dump) for dump in dumps(tmp_path, "train", dump=unwritable)] == [Dump, Samples]
    monkeypatch.setitem(sys.modules, "s3fs", None)
    told: list[str] = []
    sections = {"tell": lambda event, reason: told.append(f"{event}: {reason}"), "dump": {"url": "s3://bucket/x"}}
    assert [type(dump) for dump in dumps(tmp_path, "train", **sections)] == [Samples]
    assert len(told) == 1 and "alarm: nothing is dumped until `penstock resume`: dump.url s3://" in told[0]
    with pytest.raises(ConfigError, match="needs s3fs"):
        dumps(tmp_path, "rollout", **sections)


def test_a_task_that_does_not_fit_its_column_is_known_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"column level is of type bigint, and 'high' is none \(in task it\)"):
        dumps(tmp_path, "rollout", dump={"columns": [["level", "bigint"]]})
