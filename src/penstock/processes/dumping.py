"""The trajectories that a run writes for other programs and for people: the table at `dump.url`, and readable
samples."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.config import Column, Config, ConfigError, DumpConfig
from penstock.config.trajectory_dump import KEPT_TOKENS
from penstock.data.sources import TaskStream
from penstock.ports.group_records import GroupRecord
from penstock.processes.layout import chat_of
from penstock.store.dumps.columns import DumpError, converter
from penstock.store.dumps.targets import open_target
from penstock.store.dumps.trajectory_rows import RowMaker
from penstock.store.dumps.writer import Dump, Rendering, Samples, Tell
from penstock.store.experience_pool import ExperiencePool
from penstock.types import Task

TRAJECTORIES = "trajectories"
"""Folder of the run directory for trajectories."""


def open_dumps(
    config: Config, run_dir: Path, pool: ExperiencePool, tasks: TaskStream, tell: Tell, *, model_name: str
) -> list[Dump | Samples]:
    """Return the dumps of a run. Raises `ConfigError` if a run that only generates cannot open its dump.

    A run that trains goes on without a dump that cannot be opened, and records an alarm. `model_name`: the model that
    plays.
    """
    if config.pipeline == "eval":
        return []  # held-out tasks are not in the pool
    chat = chat_of(config, run_dir)

    if (first := tasks.at(0)) is not None:
        check_payload(config.dump, first)

    def payload(record: GroupRecord) -> Mapping[str, Any]:
        task = tasks.at(record.task_index) if config.dump.foreign_columns else None
        return task.payload if task is not None else {}

    def rendering(dump: DumpConfig, *, run_id: str = "") -> Rendering:
        maker = RowMaker(config, chat, columns=dump.columns, model_name=model_name)
        target = open_target(dump, run_id=run_id)
        return Rendering(pool=run_dir / "pool", maker=maker, target=target)

    dumps: list[Dump | Samples] = []
    if config.dump.url is not None or not config.has_trainer:
        own = config.dump.model_copy(update={"url": str(run_dir / TRAJECTORIES)})
        rows = config.dump.rows_per_shard
        try:
            wanted = rendering(config.dump, run_id=config.run_id or "") if config.dump.url else rendering(own)
            dumps.append(Dump(pool, wanted, payload=payload, rows_per_shard=rows, trains=config.has_trainer, tell=tell))
        except ConfigError as error:
            if not config.has_trainer:
                raise
            tell("alarm", reason=f"nothing is dumped until `penstock resume`: {error}")
    if config.has_trainer and config.observe.trajectories:
        directory = run_dir / TRAJECTORIES
        columns = [*DumpConfig().columns, Column(name=KEPT_TOKENS, type="json")]
        keep, sample = config.observe.trajectories, DumpConfig(url=str(directory), columns=columns)
        dumps.append(Samples(pool, rendering(sample), directory=directory, keep=keep, tell=tell))
    return dumps


def check_payload(dump: DumpConfig, task: Task) -> None:
    """Check that the values of the first task fit the types of its columns. Raises `ConfigError`."""
    for column in dump.columns:
        if column.name in dump.foreign_columns:
            try:
                converter(column)(task.payload.get(column.name))
            except DumpError as error:
                raise ConfigError(f"dump.columns: {error} (in task {task.task_id})") from None
