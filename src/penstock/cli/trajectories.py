"""`penstock trajectories`: show trajectories of a run as text, from the pool and from the kept samples.

The pool deletes tokens that checkpoints cover; a few of these trajectories remain in `trajectories/`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

import msgspec
from rich.console import Group, RenderableType
from rich.text import Text

from penstock.cli.refusal import Refused, refusing
from penstock.config import Column, DumpConfig, load_config
from penstock.config.trajectory_dump import KEPT_TOKENS
from penstock.observe import jsonl
from penstock.observe.tables import clock, number, open_console
from penstock.observe.visible_text import visible, visible_json
from penstock.ports.group_records import GroupRecord
from penstock.processes.dumping import TRAJECTORIES
from penstock.processes.layout import chat_of
from penstock.store.dumps.columns import Row
from penstock.store.dumps.trajectory_rows import RowMaker
from penstock.store.dumps.writer import SAMPLES
from penstock.store.index import read_groups
from penstock.store.payload_files import PayloadReader
from penstock.supervisor.known_runs import name_of

Order = Literal["newest", "best", "worst"]
FEW = 3
"""Number of trajectories shown by default."""
COLUMNS = [*DumpConfig().columns, Column(name="error", type="string")]
CONVERSATIONS = ("messages", "branches")
"""Columns with messages, as JSON."""
ROLES = {"user": "cyan", "assistant": "green"}
INDENT = 12
"""Spaces in front of a message; its first line has the role there."""


@dataclass(frozen=True, slots=True)
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


@refusing
def trajectories(run_dir: Path, *, group: int | None, order: Order, limit: int | None, as_json: bool) -> int:
    """Show trajectories and return the exit code."""
    chosen = choose(run_dir, group=group, order=order, limit=limit)
    rows = [{**row, **{name: msgspec.json.decode(row.get(name) or "null") for name in CONVERSATIONS}} for row in chosen]
    if as_json:
        print(visible_json(msgspec.json.encode(rows).decode()))
        return 0
    console = open_console()
    for row in rows:
        console.print(render(row))
    return 0


def choose(run_dir: Path, *, group: int | None, order: Order, limit: int | None) -> list[Row]:
    """Return the rows to show: all of a group, or a few. Raises `Refused`."""
    known = {(found.group, found.episode): found for found in [*in_samples(run_dir), *in_pool(run_dir)]}
    wanted = [found for found in known.values() if group is None or found.group == group]
    if not wanted:
        of_group = "" if group is None else f" of group {group}"
        raise Refused(
            f"run {run_dir.name} has no trajectories{of_group} to show: no group is complete yet, or checkpoints cover "
            f"them and their tokens are deleted; `penstock status {name_of(run_dir)}` shows the progress"
        )
    if group is None:
        limit = limit or FEW
    return [found.read() for found in sorted(wanted, key=ORDERS[order])[:limit]]


def in_pool(run_dir: Path) -> Iterator[Found]:
    """Yield the trajectories in the pool that still have their tokens."""
    pool = run_dir / "pool"
    if not (pool / "index").is_dir():
        return
    config, reader = load_config(run_dir / "config.yaml"), PayloadReader(pool)
    chat = chat_of(config, run_dir)
    maker = RowMaker(config, chat, columns=COLUMNS)

    def read(record: GroupRecord, member: int) -> Row:
        assert record.ref is not None
        return maker.rows(record, reader.read(record.ref), {})[member]

    files = {path.name for path in pool.glob("*.seg")}
    groups = list(read_groups(run_dir, setting="penstock show"))
    for record in (group for group in groups if group.ref is not None and group.ref.file in files):
        for member, summary in enumerate(record.episodes):
            yield Found(record.group, summary.episode.episode, summary.reward, partial(read, record, member))


def in_samples(run_dir: Path) -> Iterator[Found]:
    """Yield the trajectories that were kept as samples."""
    for path in sorted((run_dir / TRAJECTORIES).glob(SAMPLES)):
        for row in jsonl.read(path):
            match row:  # others are damaged
                case {"group": int(group), "episode": int(episode), "reward": int() | float() as reward}:
                    yield Found(group, episode, reward, partial(_without_tokens, row))


def _without_tokens(row: Row) -> Row:
    return {name: value for name, value in row.items() if name != KEPT_TOKENS}


def render(row: Row) -> RenderableType:
    """Return a heading and the conversation."""
    versions = sorted({row["policy_version_min"], row["policy_version_max"]} - {None})
    ended = row["status"] + (f" ({row['stop_reason']})" if row["stop_reason"] else "")
    version = f"version {'-'.join(map(str, versions)) or 'unknown'}"
    turns = f"{row['num_turns']} turns" if row["num_turns"] != 1 else "1 turn"
    counted = row["prompt_tokens"] is not None
    tokens = f"{row['prompt_tokens']} + {row['response_tokens']} tokens" if counted else f"by {row['model']}"
    facts = [ended, *([version] if counted else []), turns, tokens, clock(row["seconds"]), row["task_id"]]
    reward = (f"reward {number(row['reward'])}", "bold")
    lines = [Text.assemble((row["trajectory"], "bold"), "  ", reward, (f"  {'  '.join(facts)}", "dim"))]
    branches = row["branches"] or [row["messages"]]
    for place, messages in enumerate(branches):
        shared = [_num_shared(messages, earlier) for earlier in branches[:place]]
        known = max(shared, default=0)
        if len(branches) > 1:
            after = f", after {known} messages of branch {shared.index(known) + 1}" if known else ""
            lines.append(Text(f"  branch {place + 1} of {len(branches)}{after}", "dim"))
        lines += map(_line, messages[known:])
    if row.get("error"):
        lines.append(Text(f"  {visible(row['error'])}", "red"))
    return Group(*lines, "")


def _num_shared(messages: Sequence[Mapping[str, str]], others: Sequence[Mapping[str, str]]) -> int:
    """Return the number of messages with which both conversations begin."""
    same = (mine == theirs for mine, theirs in zip(messages, others, strict=False))
    return sum(takewhile(bool, same))


def _line(message: Mapping[str, Any]) -> Text:
    role, content = message["role"], message.get("content") or ""
    parts = [content if isinstance(content, str) else msgspec.json.encode(content).decode()]
    parts += (f"{call['function']['name']} {call['function']['arguments']}" for call in message.get("tool_calls", ()))
    content = visible("\n".join(filter(None, parts))).rstrip("\n").replace("\n", "\n" + " " * INDENT)
    return Text.assemble((f"  {role:<{INDENT - 2}}", ROLES.get(role, "dim")), content)
