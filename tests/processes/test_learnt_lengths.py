"""A run that learns from an earlier one what answers take."""

from pathlib import Path

import pytest
from fake_ports import NumberedTasks, played

from penstock.config import ConfigError
from penstock.ports.group_records import GroupRecord
from penstock.processes.controller import played_before
from penstock.store.index import PoolIndex
from penstock.types import EpisodeId


def write_pool(run_dir: Path, lengths: dict[int, list[int]], *, name: str = "train/{}") -> None:
    index = PoolIndex(run_dir / "pool")
    for group, (task, tokens) in enumerate(lengths.items()):
        episodes = [
            played(EpisodeId("train", group, member, 0), reward=0.0, response_tokens=length)
            for member, length in enumerate(tokens)
        ]
        task_id = name.format(task)
        index.put([GroupRecord(group=group, task_id=task_id, task_index=task, admitted_at=0.0, episodes=episodes)])
    index.close()


def test_the_latest_groups_with_their_tasks(tmp_path: Path) -> None:
    write_pool(tmp_path, {3: [5, 6], 9: [7, 8], 4: [1, 2]})
    found = played_before(tmp_path, NumberedTasks("train"), max_groups=2)
    assert [(task.index, lengths) for task, lengths in found] == [(9, [7, 8]), (4, [1, 2])]


def test_groups_without_a_played_episode_are_left_out(tmp_path: Path) -> None:
    write_pool(tmp_path, {3: [5, 6], 9: [7, 8], 4: [], 5: []})
    assert [lengths for _, lengths in played_before(tmp_path, NumberedTasks("train"), max_groups=2)] == [[5, 6], [7, 8]]


def test_groups_of_other_data_are_left_out(tmp_path: Path) -> None:
    write_pool(tmp_path, {3: [5]}, name="elsewhere/{}")
    assert played_before(tmp_path, NumberedTasks("train"), max_groups=9) == []
    write_pool(tmp_path / "long", {3: [5], 30: [6]})
    assert len(played_before(tmp_path / "long", NumberedTasks("train", size=10), max_groups=9)) == 1


def test_what_is_no_run_is_refused_and_left_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"learn_from: .* is not the directory of a run"):
        played_before(tmp_path, NumberedTasks("train"), max_groups=9)
    assert list(tmp_path.iterdir()) == []
