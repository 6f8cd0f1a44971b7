"""The indexes of metrics and timeline: kept beside the files, thrown away when a file is another one, partial at
first."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shown_run import BEGUN, decision, make_run, span, step_line, write_lines

from penstock.dashboard import growing_file, metrics_index, timeline_index
from penstock.dashboard.decision_pages import Filter, page
from penstock.dashboard.growing_file import GrowingFile
from penstock.dashboard.metrics_index import MetricsIndex
from penstock.dashboard.timeline_index import TimelineIndex
from penstock.dashboard.timeline_window import MOST_SPANS, shown_spans


def read_all(index: MetricsIndex | TimelineIndex) -> None:
    while index.update():
        pass


def steps_of(index: MetricsIndex) -> list[float]:
    found: list[float] = index.columns(["step"])["step"].tolist()
    return found


def test_a_second_reader_finds_what_the_first_has_read(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, num_steps=1000)
    first = MetricsIndex(run_dir)
    read_all(first)
    assert steps_of(first) == list(range(1, 1001))
    first.close()
    second = MetricsIndex(run_dir)
    assert steps_of(second)[:768] == list(range(1, 769))
    read_all(second)
    write_lines(run_dir / "metrics.jsonl", [step_line(step) for step in range(1001, 1400)])
    read_all(second)
    assert steps_of(second) == list(range(1, 1400)) and second.indexed == 1
    assert second.columns(["ledger/trained"])["ledger/trained"].tolist() == [8 * step for step in range(1, 1400)]
    second.close()


@pytest.mark.parametrize("damage", ["shorter", "another", "gone", "cut index", "foreign index", "garbled index"])
def test_an_index_of_another_file_is_thrown_away(tmp_path: Path, damage: str) -> None:
    run_dir = make_run(tmp_path, num_steps=1000)
    index = MetricsIndex(run_dir)
    read_all(index)
    index.close()
    metrics, blocks = run_dir / "metrics.jsonl", run_dir / ".dashboard" / "metrics.blocks"
    expected = list(range(1, 1001))
    if damage == "shorter":
        metrics.write_bytes(b"".join(metrics.read_bytes().splitlines(keepends=True)[:300]))
        expected = expected[:300]
    elif damage == "another":
        metrics.unlink()
        write_lines(metrics, [step_line(step, reward=0.5) for step in range(5, 700)])
        expected = list(range(5, 700))
    elif damage == "gone":
        metrics.unlink()
        expected = []
    elif damage == "cut index":
        os.truncate(blocks, blocks.stat().st_size - 100)
    elif damage == "foreign index":
        blocks.write_bytes(b"something else" * 1000)
    else:
        data = bytearray(blocks.read_bytes())
        data[len(data) // 3] ^= 0xFF
        data[-9000:] = b"\xff" * 9000
        blocks.write_bytes(data)
    again = MetricsIndex(run_dir)
    read_all(again)
    assert len(steps_of(again)) == len(expected)
    if damage != "garbled index":
        assert steps_of(again) == expected
    again.close()


def test_a_file_that_is_replaced_while_it_is_open_is_read_again(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, num_steps=600)
    index = MetricsIndex(run_dir)
    read_all(index)
    (run_dir / "metrics.jsonl").unlink()
    write_lines(run_dir / "metrics.jsonl", [step_line(step) for step in range(1, 900)])
    read_all(index)
    assert steps_of(index) == list(range(1, 900))
    index.close()


def test_a_file_system_that_writes_less_than_it_is_given_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, offset: write(fd, data[:1000], offset))
    run_dir = make_run(tmp_path, num_steps=600)
    index = MetricsIndex(run_dir)
    read_all(index)
    index.close()
    again = MetricsIndex(run_dir)
    assert steps_of(again) == list(range(1, 513))
    again.close()


def test_two_dashboards_and_a_directory_that_cannot_be_written_share_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = make_run(tmp_path, num_steps=600)
    first, second = MetricsIndex(run_dir), MetricsIndex(run_dir)
    read_all(first)
    read_all(second)
    assert steps_of(first) == steps_of(second) == list(range(1, 601))
    first.close()
    second.close()
    shutil.rmtree(run_dir / ".dashboard")
    uid = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: uid + 1)  # now the run is that of another user
    third = MetricsIndex(run_dir)
    read_all(third)
    assert steps_of(third) == list(range(1, 601)) and not (run_dir / ".dashboard").exists()
    third.close()


def test_a_link_in_place_of_the_index_is_not_followed(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, num_steps=600)
    target = tmp_path / "precious"
    target.write_text("untouched")
    (run_dir / ".dashboard").mkdir()
    (run_dir / ".dashboard" / "metrics.blocks").symlink_to(target)
    index = MetricsIndex(run_dir)
    read_all(index)
    assert len(steps_of(index)) == 600 and target.read_text() == "untouched"
    index.close()


def test_the_curve_of_a_large_run_is_known_before_all_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_index, "PIECE_BYTES", 4096)
    monkeypatch.setattr(metrics_index, "LAST_BYTES", 20_000)
    run_dir = make_run(tmp_path, num_steps=5000)
    index = MetricsIndex(run_dir)
    steps = steps_of(index)
    assert index.indexed < 0.1 and 300 < len(steps) < 600 and steps == sorted(set(steps))
    assert steps[-1] == 5000 and max(np.diff(steps)) < 50
    index.update()
    assert steps_of(index)[:10] == list(range(1, 11)) and steps_of(index)[-1] == 5000
    read_all(index)
    assert index.indexed == 1 and steps_of(index) == list(range(1, 5001))
    index.close()


def test_the_last_minute_of_a_large_timeline_is_known_before_all_of_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("PIECE_BYTES", 4096), ("BLOCK_BYTES", 8192), ("LAST_BYTES", 16_384)):
        monkeypatch.setattr(timeline_index, name, value)
    run_dir = make_run(tmp_path, num_steps=2000)
    index = TimelineIndex(run_dir)
    index.update()
    assert index.indexed < 0.1
    extent = index.extent
    assert extent is not None and extent[1] == BEGUN + 3999.7

    def spans_after(begin: float) -> int:
        return sum(int((part.end >= begin).sum()) for part in index.spans(begin, BEGUN + 4000))

    while index.indexed < 1:
        assert spans_after(BEGUN + 3980) == 20
        index.update()
    read_all(index)
    assert index.indexed == 1 and spans_after(BEGUN) == 4000 and spans_after(BEGUN + 3980) == 20
    assert index.deciders == {"admission": 2000, "dispatch": 2000, "tuning": 200}
    write_lines(run_dir / "timeline.jsonl", [span("rollout-1", "generate", BEGUN + 4001, BEGUN + 4002)])
    read_all(index)
    assert ("rollout-1", "generate") in index.lanes
    index.close()
    again = TimelineIndex(run_dir)
    read_all(again)
    assert again.deciders == index.deciders
    again.close()


DECISIONS = st.tuples(
    st.sampled_from(["filter", "retry", "staleness", "dispatch"]), st.integers(0, 5), st.integers(0, 3)
)


@given(st.lists(DECISIONS, max_size=60), st.integers(200, 2000), st.integers(0, 60))
def test_reasons_of_groups_are_those_of_the_file_however_it_is_read(
    tmp_path_factory: pytest.TempPathFactory, decisions: list[tuple[str, int, int]], block_bytes: int, asked_at: int
) -> None:
    run_dir = tmp_path_factory.mktemp("run")
    (run_dir / "timeline.jsonl").touch()
    reasons = ("kept", "all rewards are 1", "Too Old", "failed")
    expected: dict[int, tuple[str | None, int]] = {}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(timeline_index, "BLOCK_BYTES", block_bytes)
        index = TimelineIndex(run_dir)
        for place, (decider, group, number) in enumerate(decisions):
            write_lines(run_dir / "timeline.jsonl", [decision(decider, BEGUN, reasons[number], group=group)])
            if place == asked_at:
                read_all(index)
                index.drops.of_group(group)  # from here on, the table follows the file
            if decider != "dispatch" and number:
                num_failed = expected.get(group, (None, 0))[1] + (decider == "retry")
                expected[group] = (reasons[number], num_failed)
        check_reasons(index, expected)
        check_reasons(TimelineIndex(run_dir), expected)


def check_reasons(index: TimelineIndex, expected: dict[int, tuple[str | None, int]]) -> None:
    """Check what an index says about groups 0 to 5 once it has read all, and close it."""
    read_all(index)
    found = {group: index.drops.of_group(group) for group in range(6)}
    assert {group: (each.reason, each.num_failed) for group, each in found.items() if each.reason} == expected
    assert index.drops.with_reason("too") == {group for group, (why, _) in expected.items() if why == "Too Old"}
    index.close()


@pytest.mark.parametrize("unread", [True, False])
def test_pages_of_decisions_cross_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unread: bool) -> None:
    for name, value in (("PIECE_BYTES", 2048), ("BLOCK_BYTES", 4096)):
        monkeypatch.setattr(timeline_index, name, value)
    run_dir = make_run(tmp_path, num_steps=200)
    index = TimelineIndex(run_dir)
    for _ in range(10):
        index.update()
    if not unread:
        read_all(index)
    for wanted, number in (
        (Filter(), 420),
        (Filter(decider="tuning"), 20),
        (Filter(group=17), 2),
        (Filter(group=17, decider="dispatch"), 1),
        (Filter(text="Nothing BETTER"), 20),
        (Filter(text="letters/"), 200),
        (Filter(text="no such words"), 0),
    ):
        found, before = [], None
        while True:
            part = page(index, wanted, before=before, limit=7)
            found += part.decisions
            if (before := part.before) is None:
                break
        assert len(found) == number, wanted
        assert [line["time"] for line in found] == sorted((line["time"] for line in found), reverse=True)
    index.close()


@given(st.lists(st.binary(max_size=30).map(lambda line: line.replace(b"\n", b" ")), max_size=40), st.integers(1, 64))
def test_a_file_read_backwards_has_the_same_lines(lines: list[bytes], piece: int) -> None:
    with TemporaryDirectory() as directory:
        path = Path(directory, "lines")
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        file = GrowingFile(path)
        pieces = list(file.backwards(file.size, piece=piece))
        assert b"".join(data for _, data in reversed(pieces)) == path.read_bytes()
        assert all(path.read_bytes()[begin : begin + len(data)] == data for begin, data in pieces)
        assert all(begin == 0 or path.read_bytes()[begin - 1 : begin] == b"\n" for begin, _ in pieces)


def test_a_line_without_an_end_is_one_damaged_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growing_file, "LONGEST_LINE", 1 << 16)
    monkeypatch.setattr(metrics_index, "PIECE_BYTES", 1 << 12)
    run_dir = make_run(tmp_path, num_steps=3)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("x" * 100_000 + "\n" + json.dumps(step_line(4)) + "\n")
    index = MetricsIndex(run_dir)
    read_all(index)
    assert steps_of(index) == [1, 2, 3, 4] and len(index.warnings) == 1
    index.close()


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 3), st.integers(0, 2)), max_size=80),
    st.floats(0, 60),
    st.floats(1, 60),
    st.integers(8, 200),
)
def test_merged_spans_cover_what_they_merge(
    given_spans: list[tuple[float, float, int]], begin: float, seconds: float, width: int
) -> None:
    gathered = timeline_index.Gathered(0, 0)
    for start, length, lane in given_spans:
        line = timeline_index.TimelineLine("generate", f"rollout-{lane}", start, start + length, lane)
        gathered.add([line])
    end = begin + seconds
    found = shown_spans(lambda: [gathered.spans()], begin, end, width=width, num_lanes=3)
    inside = [each for each in given_spans if each[0] <= end and each[0] + each[1] >= begin]
    assert sum(each.num_merged for each in found) == len(inside) and len(found) <= 2 * MOST_SPANS
    for lane in range(3):
        mine = [each for each in found if each.lane[0] == f"rollout-{lane}"]
        for start, length, number in inside:
            if number == lane:
                assert any(each.start <= start and start + length <= each.end for each in mine)
    for each in found:
        assert each.start <= each.end and 0 <= each.busy_share <= 1
        assert each.num_merged == 1 or each.end - each.start <= 2 * seconds / width + 1e-6


def test_a_decision_with_an_odd_group_is_kept(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, num_steps=1)
    write_lines(run_dir / "timeline.jsonl", [decision("filter", BEGUN, "kept", group="all of them")])
    index = TimelineIndex(run_dir)
    read_all(index)
    assert page(index, Filter(decider="filter"), before=None, limit=9).decisions[0]["group"] == "all of them"
    index.close()
