"""The table of groups follows the index, and says why groups were dropped."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from run_with_groups import MARKUP, ShownRun

from penstock.dashboard.groups import BadQuery, UnknownGroup
from penstock.dashboard.opened_run import OpenedRun, Requests
from penstock.types import EpisodeState


def numbers(shown: OpenedRun, **query: Any) -> list[int]:
    return [row["group"] for row in shown.groups.page(**query)["groups"]]


@pytest.fixture
def shown(tmp_path: Path) -> OpenedRun:
    with ShownRun(tmp_path / "run") as run:
        run.play(0, [0.0, 1.0])
        run.end(0, EpisodeState.TRAINED, trained_in=1)
        run.play(1, [1.0, 1.0])
        run.end(1, EpisodeState.FILTERED)
        run.decide("filter", "all rewards are 1", group=1, dropped_by="zero_variance")
        run.decide("filter", "kept", group=0)
        run.play(2, [-1.0, 2.0])
        run.admit(3)
        run.decide("retry", f"RuntimeError: {MARKUP}", group=3, attempt=0)
        run.decide("retry", f"given up after 2 attempts: RuntimeError: {MARKUP}", group=3)
        run.end(3, EpisodeState.FAILED)
        run.admit(4)
        return run.shown()


def test_the_table_of_groups(shown: OpenedRun) -> None:
    page = shown.groups.page()
    assert [(row["group"], row["status"]) for row in page["groups"]] == [
        (4, "pending"),
        (3, "failed"),
        (2, "ready"),
        (1, "filtered"),
        (0, "trained"),
    ]
    assert (page["total"], page["tags"], page["indexed"], page["warnings"]) == (5, ["Game"], 1.0, [])
    assert page["counts"] == {"pending": 1, "ready": 1, "trained": 1, "filtered": 1, "failed": 1}
    row = page["groups"][-1]
    assert (row["task_id"], row["tag"], row["step"], row["rewards"]) == ("t/0", "Game", 1, [0.0, 1.0])
    assert (row["reward_mean"], row["reward_std"], row["turns_mean"]) == (0.5, 0.5, 2)
    assert (row["policy_version_min"], row["policy_version_max"], row["has_tokens"]) == (3, 4, True)
    assert row["reason"] is None and page["groups"][3]["reason"] == "all rewards are 1"
    failed = page["groups"][1]
    assert (failed["num_failed"], failed["rewards"], failed["reward_mean"]) == (2, [], None)
    assert failed["reason"] == f"given up after 2 attempts: RuntimeError: {MARKUP}"


def test_orders_filters_and_pages(shown: OpenedRun) -> None:
    assert numbers(shown, sort="oldest") == [0, 1, 2, 3, 4]
    assert numbers(shown, sort="best") == [2, 1, 0] and numbers(shown, sort="worst") == [2, 0, 1]
    assert numbers(shown, sort="spread") == [2, 0, 1]
    assert numbers(shown, status="filtered") == [1] and numbers(shown, tag="Game", sort="oldest") == [0, 1, 2]
    assert numbers(shown, text="ALL REWARDS") == [1] and numbers(shown, text="t/2") == [2]
    assert numbers(shown, text="4") == [4] and numbers(shown, text="<script>") == [3]
    assert numbers(shown, offset=1, limit=2) == [3, 2] and numbers(shown, offset=9) == []
    assert numbers(shown, tag="other") == []
    for query in ({"sort": "random"}, {"status": "lost"}, {"limit": 0}, {"limit": 10**6}, {"offset": -1}):
        with pytest.raises(BadQuery):
            shown.groups.page(**query)


def test_one_member_decides_whether_a_group_is_among_the_best_or_worst(tmp_path: Path) -> None:
    with ShownRun(tmp_path / "run") as run:
        for group, rewards in enumerate([[0.4, 0.4], [0.0, 1.0], [0.3, 0.9], [0.5, 0.5]]):
            run.play(group, rewards)
    shown = run.shown()
    assert numbers(shown, sort="best") == [1, 2, 3, 0] and numbers(shown, sort="worst") == [1, 2, 0, 3]


def test_a_group_and_its_members(shown: OpenedRun) -> None:
    found = shown.groups.group(2)
    assert [(each["episode"], each["reward"], each["num_turns"]) for each in found["members"]] == [
        (0, -1.0, 2),
        (1, 2.0, 2),
    ]
    assert all(each["has_text"] and each["has_tokens"] for each in found["members"])
    assert shown.groups.group(3)["members"] == []
    with pytest.raises(UnknownGroup, match="no record of group 77: groups of held-out tasks"):
        shown.groups.group(77)


def test_the_table_follows_a_live_run(tmp_path: Path) -> None:
    with ShownRun(tmp_path / "run") as run:
        run.admit(0, 1)
    shown = run.shown()
    assert numbers(shown) == [1, 0]
    with run.go_on():
        run.play(0)
        run.end(0, EpisodeState.TRAINED, trained_in=1)
        run.admit(2)
    assert [(row["group"], row["status"]) for row in shown.groups.page(sort="oldest")["groups"]] == [
        (0, "trained"),
        (1, "pending"),
        (2, "pending"),
    ]
    with run.go_on():
        run.play(1)
        run.end(1, EpisodeState.DISCARDED_STALE)
        run.decide("staleness", "2 episodes too old to train", group=1)
    row = shown.groups.page(status="discarded")["groups"][0]
    assert (row["group"], row["reason"]) == (1, "2 episodes too old to train")


def test_a_rewind_changes_groups_that_had_ended(tmp_path: Path) -> None:
    with ShownRun(tmp_path / "run") as run:
        for group in range(3):
            run.play(group)
            run.end(group, EpisodeState.TRAINED, trained_in=group + 1)
    shown = run.shown()
    assert shown.groups.page()["counts"] == {"trained": 3}
    with run.go_on():
        run.pool.revive_groups([2])
        run.pool.raise_version(4, weights_of=2)
    assert shown.groups.page()["counts"] == {"ready": 1, "trained": 2}
    with run.go_on():
        run.end(2, EpisodeState.TRAINED, trained_in=5)
    assert [row["step"] for row in shown.groups.page(sort="oldest")["groups"]] == [1, 2, 3]


def test_an_index_at_the_place_of_another_is_read_from_its_beginning(tmp_path: Path) -> None:
    with ShownRun(tmp_path / "run") as run:
        run.play(5)
    shown = run.shown()
    assert numbers(shown) == [5]
    (run.run_dir / "pool" / "index").rename(tmp_path / "away")
    with run.go_on():
        run.admit(1, 2)
    assert numbers(shown) == [2, 1]


def test_a_damaged_index_leaves_the_kept_samples(tmp_path: Path) -> None:
    with ShownRun(tmp_path / "run") as run:
        run.play(7)
        run.keep(7, 3)
    (run.run_dir / "pool" / "index" / "data.mdb").write_bytes(b"no index")
    shown = run.shown()
    page = shown.groups.page()
    assert [(row["group"], row["status"], row["rewards"]) for row in page["groups"]] == [(7, "collected", [0.0, 1.0])]
    assert "cannot be read" in page["warnings"][0]
    assert shown.trajectories.episode(7, 1)["messages"][1]["content"] == "ab"


def test_a_run_without_groups(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    page = OpenedRun(tmp_path / "run", Requests()).groups.page()
    assert (page["groups"], page["total"]) == ([], 0) and "no pool/index" in page["warnings"][0]


def test_damaged_decisions_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "timeline.jsonl"
    good = '{"kind": "decision", "decider": "filter", "time": 1.0, "reason": "all rewards are 1", "group": 5}\n'
    path.write_bytes(
        b'\xff\xfe{"kind"\n' + b'{"kind": "decision", "decider": "filter", "group": "x"}\n' + good.encode()
    )
    run = OpenedRun(tmp_path, Requests())

    def reason_of(group: int) -> str | None:
        run.catch_up(run.timeline)
        return run.timeline.drops.of_group(group).reason

    assert reason_of(5) == "all rewards are 1" and run.timeline.indexed == 1
    with path.open("a") as file:
        file.write(good.replace("5", "6").rstrip("\n"))
    assert reason_of(6) is None, "the last line is not complete"
    with path.open("a") as file:
        file.write("\n")
    assert reason_of(6) == "all rewards are 1"
    path.write_text(good.replace("5", "8"))
    assert (reason_of(8), reason_of(5)) == ("all rewards are 1", None)
    run.close()


def test_groups_need_no_timeline(tmp_path: Path) -> None:
    with ShownRun(tmp_path / "run") as run:
        run.play(0)
    (run.run_dir / "timeline.jsonl").mkdir()
    assert numbers(run.shown()) == [0]


@given(st.lists(st.sampled_from(["admit", "trained", "filtered"]), min_size=1, max_size=12), st.data())
def test_the_table_has_what_the_index_has(tmp_path_factory: pytest.TempPathFactory, ends: list[str], data: Any) -> None:
    """However the reader's looks and the writer's changes alternate."""
    run_dir = tmp_path_factory.mktemp("run") / time.strftime("%H%M%S")
    with ShownRun(run_dir) as run:
        run.admit(*range(len(ends)))
    shown = run.shown()
    for group in data.draw(st.permutations(range(len(ends)))):
        if data.draw(st.booleans()):
            shown.groups.page()
        with run.go_on():
            if ends[group] != "admit":
                run.end(group, EpisodeState(ends[group]), trained_in=1 if ends[group] == "trained" else None)
    page = shown.groups.page(sort="oldest")
    assert [row["status"] for row in page["groups"]] == ["pending" if end == "admit" else end for end in ends]
