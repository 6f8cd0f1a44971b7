"""What a run dumps is known to be possible before it plays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.config import Config, ConfigError
from penstock.data.sources import TaskStream
from penstock.processes.dumping import open_dumps
from penstock.processes.layout import prepare
from penstock.store.dumps.dump import Dump, Samples
from penstock.store.pool import ExperiencePool
from penstock.types import Task


class OneTask:
    def task(self, index: int) -> Task | None:
        return Task(task_id="it", tag="train", index=0, payload={"level": "high"}) if index == 0 else None


def dumps(run_dir: Path, pipeline: str, **sections: Any) -> list[Dump | Samples]:
    config = Config.model_validate({"pipeline": pipeline, **sections})
    prepare(config, run_dir)
    pool = ExperiencePool(run_dir / "pool")
    try:
        return open_dumps(config, run_dir, pool, TaskStream(OneTask()), lambda *_, **__: None)
    finally:
        pool.close()


def test_a_run_that_only_plays_dumps_into_its_own_folder(tmp_path: Path) -> None:
    assert [type(dump) for dump in dumps(tmp_path, "rollout")] == [Dump]
    assert (tmp_path / "trajectories").is_dir()


def test_training_keeps_samples_and_dumps_where_it_is_told(tmp_path: Path) -> None:
    elsewhere = {"url": str(tmp_path / "table")}
    assert [type(dump) for dump in dumps(tmp_path, "train")] == [Samples]
    assert [type(dump) for dump in dumps(tmp_path, "train", dump=elsewhere)] == [Dump, Samples]
    assert dumps(tmp_path, "train", observe={"trajectories": 0}) == []


def test_a_task_that_does_not_fit_its_column_is_known_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"column level is of type bigint, and 'high' is none \(in task it\)"):
        dumps(tmp_path, "rollout", dump={"columns": [["level", "bigint"]]})
