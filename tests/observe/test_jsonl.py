from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from penstock.observe.jsonl import Follower, JsonLinesWriter, append, read, tail


def test_what_was_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    with closing(JsonLinesWriter(path)) as writer:
        writer.write({"a": 1})
        assert read(path) == [{"a": 1}]
        append(path, {"b": "ü"})
        writer.write({"c": [np.float32(0.5), np.int64(3)], "d": tmp_path})
    assert read(path) == [{"a": 1}, {"b": "ü"}, {"c": [0.5, 3], "d": str(tmp_path)}]


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert read(tmp_path / "none.jsonl") == []


def test_non_finite_numbers_become_null(tmp_path: Path) -> None:
    append(tmp_path / "a.jsonl", {"loss": float("nan"), "norms": [float("inf"), 1.0], "x": np.float32("nan")})
    assert read(tmp_path / "a.jsonl") == [{"loss": None, "norms": [None, 1.0], "x": None}]


def test_a_torn_line_costs_only_itself(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    append(path, {"a": 1})
    with path.open("a") as file:
        file.write('{"b": 2, "tor')
    assert read(path) == [{"a": 1}]
    append(path, {"c": 3})
    assert read(path) == [{"a": 1}, {"c": 3}]


def test_a_record_that_found_no_room_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, write = tmp_path / "a.jsonl", os.write
    with closing(JsonLinesWriter(path)) as writer:
        writer.write({"a": 1})
        with monkeypatch.context() as full, pytest.raises(OSError, match="No space left"):
            full.setattr(os, "write", lambda fd, data: write(fd, data[:3]))
            writer.write({"b": 2})
        writer.write({"c": 3})
    assert read(path) == [{"a": 1}, {"c": 3}]


def test_a_follower_sees_each_line_once_and_only_whole(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    follower = Follower(path)
    assert follower.read_new() == []
    with path.open("a") as file:
        file.write('{"a": 1}\n{"b"')
        file.flush()
        assert follower.read_new() == [{"a": 1}]
        file.write(": 2}\n")
    assert follower.read_new() == [{"b": 2}]
    assert follower.read_new() == []


def test_a_follower_of_the_last_bytes_skips_what_is_older(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"n": {number}}}\n' for number in range(5)))  # nine bytes each
    follower = Follower(path, last_bytes=27)
    assert follower.read_new() == [{"n": 2}, {"n": 3}, {"n": 4}]
    with path.open("a") as file:
        file.write('{"n": 5}\nno json\n{"n')
    assert follower.read_new() == [{"n": 5}] and follower.num_damaged == 1
    with path.open("a") as file:
        file.write('": 6}\n' + '{"n": 7}\n' * 10)
    assert follower.read_new() == [{"n": 7}] * 3
    assert follower.read_new() == [] and not follower.is_replaced()
    path.write_text('{"n": 8}\n')
    assert follower.is_replaced()


def test_what_is_no_json_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="set has no place"):
        append(tmp_path / "a.jsonl", {"a": {1, 2}})


def test_the_tail_has_the_last_whole_records(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    assert tail(path, 100) == []
    for number in range(5):
        append(path, {"n": number})  # nine bytes each
    assert tail(path, 27) == [{"n": 2}, {"n": 3}, {"n": 4}]
    assert tail(path, 26) == [{"n": 3}, {"n": 4}]
    assert len(tail(path, 1000)) == 5
    with path.open("a") as file:
        file.write('{"torn')
    assert tail(path, 17) == [{"n": 4}]
