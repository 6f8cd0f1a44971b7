"""Logs without lines and malformed marks, as another user or a program of the policy could leave them."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.logs import TAIL_BYTES, Log
from penstock.supervisor.procfs import identify
from penstock.supervisor.runtime import Mark


def test_only_the_end_of_a_log_is_read(tmp_path: Path) -> None:
    path = tmp_path / "env-0.log"
    path.touch()
    os.truncate(path, 1 << 25)
    log = Log(path)
    assert log.last(10) == [] and len(log._unfinished) == TAIL_BYTES
    with path.open("ab") as file:
        file.write(b"\nlast\n")
    assert list(log.new_lines(0.0))[-1] == "last"


@pytest.mark.parametrize("field", ["run_dir", "runtime_dir", "nonce"])
@pytest.mark.parametrize("value", [["/"], None, 1, {"a": 1}, "a\0b", "\ud800"])
def test_a_mark_holds_plain_names(field: str, value: Any) -> None:
    own = identify(os.getpid())
    assert own
    mark = Mark(run_dir="/run", runtime_dir="/runtime", nonce="n", supervisor=own)
    assert Mark.loads(mark.dumps()) == mark
    assert Mark.loads(json.dumps({**dataclasses.asdict(mark), field: value})) is None


def test_a_log_that_grows_is_read_from_its_end(tmp_path: Path) -> None:
    path = tmp_path / "env-0.log"
    path.write_text("first\n")
    log = Log(path)
    assert log.last(10) == ["first"]
    os.truncate(path, 4 * TAIL_BYTES)
    assert list(log.new_lines(0.0)) == [] and len(log._unfinished) == TAIL_BYTES
    os.truncate(path, 5 * TAIL_BYTES)
    assert list(log.new_lines(0.0)) == [] and len(log._unfinished) == TAIL_BYTES, "an endless line is not collected"
    path.rename(tmp_path / "env-0.log.1")
    os.truncate(tmp_path / "env-0.log.1", 9 * TAIL_BYTES)
    path.write_text("\nlast\n")
    *_, last = log.new_lines(0.0)
    assert last == "last"
