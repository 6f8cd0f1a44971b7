"""Whatever the sources write down of losses has a line for people."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.observe.notices import LONGEST, notice
from penstock.supervisor.run_journal import SUPERVISOR_KILLED

PROCESS = {"event": "process", "name": "env-0"}


@pytest.mark.parametrize(
    ("event", "told"),
    [
        (
            {**PROCESS, "state": "exited", "kind": "crashed", "reason": "killed by SIGKILL"},
            "env-0 ended: killed by SIG",
        ),
        ({**PROCESS, "state": "exited", "kind": "ok", "reason": "exit code 0"}, None),
        ({**PROCESS, "state": "exited", "kind": "killed_by_supervisor", "reason": "killed by supervisor"}, None),
        ({**PROCESS, "state": "exited", "kind": "lost", "reason": SUPERVISOR_KILLED}, None),
        (
            {"event": "state", "to": "failed", "actor": "janitor", "reason": SUPERVISOR_KILLED},
            "the supervisor was killed",
        ),
        (
            {"event": "state", "to": "failed", "actor": "resume", "reason": SUPERVISOR_KILLED},
            "the supervisor was killed",
        ),
        ({"event": "state", "to": "failed", "actor": "trainer-0", "reason": "it broke"}, None),
        ({**PROCESS, "state": "fatal"}, "env-0 is not started again"),
        ({**PROCESS, "state": "ready"}, None),
        ({"event": "payloads_lost", "groups": [1, 2]}, "the tokens of 2 groups are damaged"),
        ({"event": "rewound", "step": 4, "lost_steps": 2}, "the trainer went back to step 4: 2 steps"),
        ({"event": "adopted", "step": 4}, "another controller continues at step 4"),
        ({"event": "left", "name": "env-attached-7", "reason": "it said goodbye"}, "env-attached-7 is gone: it said"),
        ({"event": "joined", "name": "env-0"}, None),
    ],
)
def test_what_was_lost_is_told_and_what_is_as_it_should_be_is_not(event: dict[str, Any], told: str | None) -> None:
    line = notice(event)
    assert line is None if told is None else line is not None and line.startswith(told)


def test_a_long_one_is_cut() -> None:
    line = notice({"event": "alarm", "reason": "x" * 1000})
    assert line is not None and len(line) == LONGEST + 1
