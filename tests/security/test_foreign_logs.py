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
