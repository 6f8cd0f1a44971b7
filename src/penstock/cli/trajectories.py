"""`penstock trajectories`: what a run played, as people read it: from the pool, and from the samples that outlive it.

The pool lets go of tokens that checkpoints cover; a few of the trajectories then still lie in `trajectories/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from penstock.cli.console import open_console
from penstock.cli.refusal import refuse
from penstock.cli.runs import name_of
from penstock.config import Column, ConfigError, DumpConfig, load_config
from penstock.model.chat import ChatTokenizer
from penstock.model.files import ModelError
from penstock.observe import jsonl
from penstock.observe.progress import clock, number
from penstock.ports import GroupRecord
from penstock.processes.dumping import TRAJECTORIES
from penstock.processes.layout import model_dir
from penstock.store.dumps.columns import DumpError, Row
from penstock.store.dumps.dump import SAMPLES
from penstock.store.dumps.rows import RowMaker
from penstock.store.index import PoolIndex, PoolUnreadable
from penstock.store.payload import PayloadError, PayloadReader

Order = Literal["newest", "best", "worst"]
FEW = 3
"""Shown, unless somebody asks for more."""
COLUMNS = [*DumpConfig().columns, Column(name="error", type="string")]
ROLES = {"user": "cyan", "assistant": "green"}


class NothingToShow(RuntimeError):
    """The message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A trajectory that can be shown."""

    group: int
    episode: int
    reward: float
    read: Callable[[], Row]


ORDERS: dict[Order, Callable[[Found], Any]] = {
    "newest": lambda found: (-found.group, found.episode),
    "best": lambda found: (-found.reward, -found.group, found.episode),
    "worst": lambda found: (found.reward, -found.group, found.episode),
}


def trajectories(run_dir: Path, *, group: int | None, order: Order, limit: int | None, as_json: bool) -> int:
    """Returns the exit code."""
    try:
        rows = [readable(row) for row in choose(run_dir, group=group, order=order, limit=limit)]
    except (NothingToShow, ConfigError, ModelError, PoolUnreadable, PayloadError, DumpError) as error:
        return refuse(error, 1)
    if as_json:
        print(msgspec.json.encode(rows).decode())
        return 0
    console = open_console()
    for row in rows:
        console.print(render(row))
    return 0


def choose(run_dir: Path, *, group: int | None, order: Order, limit: int | None) -> list[Row]:
    """The rows to show: all of a group, or a few. Raises `NothingToShow`."""
    known = {(found.group, found.episode): found for found in [*in_samples(run_dir), *in_pool(run_dir)]}
    wanted = [found for found in known.values() if group is None or found.group == group]
    if not wanted:
        what = "" if group is None else f" of group {group}"
        raise NothingToShow(
            f"run {run_dir.name} has no trajectories{what} to show: none is whole yet, or checkpoints cover them and "
            f"their tokens are gone; `penstock status {name_of(run_dir)}` tells how far it is"
        )
    if limit is None:
        limit = FEW if group is None else len(wanted)
    return [found.read() for found in sorted(wanted, key=ORDERS[order])[:limit]]


def in_pool(run_dir: Path) -> Iterator[Found]:
    """What was played and still has its tokens."""
    pool = run_dir / "pool"
    if not (pool / "index").is_dir():
        return
    config, reader = load_config(run_dir / "config.yaml"), PayloadReader(pool)
    maker = RowMaker(config, ChatTokenizer.load(model_dir(config, run_dir)), columns=COLUMNS)

    def read(record: GroupRecord, member: int) -> Row:
        assert record.ref is not None
        return maker.rows(record, reader.read(record.ref), {})[member]

    files = {path.name for path in pool.glob("*.seg")}
    index = PoolIndex(pool, readonly=True)
    try:
        played = [record for record in index if record.ref is not None and record.ref.file in files]
    finally:
        index.close()
    for record in played:
        for member, summary in enumerate(record.episodes):
            episode = summary.episode.episode
            yield Found(group=record.group, episode=episode, reward=summary.reward, read=partial(read, record, member))


def in_samples(run_dir: Path) -> Iterator[Found]:
    """What was kept to be read."""
    for path in sorted((run_dir / TRAJECTORIES).glob(SAMPLES)):
        for row in jsonl.read(path):
            yield Found(group=row["group"], episode=row["episode"], reward=row["reward"], read=partial(dict, row))


def readable(row: Row) -> Row:
    """With its messages as messages, not as text."""
    return {**row, "messages": msgspec.json.decode(row["messages"])}


def render(row: Row) -> RenderableType:
    """A heading, then the conversation."""
    versions = sorted({row["policy_version_min"], row["policy_version_max"]} - {None})
    ended = row["status"] + (f" ({row['stop_reason']})" if row["stop_reason"] else "")
    facts = [
        ended,
        f"version {'-'.join(map(str, versions)) or 'unknown'}",
        f"{row['num_turns']} turns" if row["num_turns"] != 1 else "1 turn",
        f"{row['prompt_tokens']} + {row['response_tokens']} tokens",
        clock(row["seconds"]),
        row["task_id"],
    ]
    reward = (f"reward {number(row['reward'])}", "bold")
    lines = [Text.assemble((row["trajectory"], "bold"), "  ", reward, (f"  {'  '.join(facts)}", "dim"))]
    for message in row["messages"]:
        role = message["role"]
        lines.append(Text.assemble((f"  {role:<10}", ROLES.get(role, "dim")), _indented(message["content"])))
    if row.get("error"):
        lines.append(Text(f"  {row['error']}", "red"))
    return Group(*lines, "")


def _indented(content: str) -> str:
    """Below its first line, too."""
    return content.rstrip("\n").replace("\n", "\n" + " " * 12)
