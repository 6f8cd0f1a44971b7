"""A reward for programs: the task's tests, run in a sandbox."""

from __future__ import annotations

import re
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import ModuleType
from typing import Any

from penstock.envs.rewards import remote_data, remote_program, remote_tests
from penstock.envs.rewards.remote_data import Broken, receive, send
from penstock.envs.rewards.remote_program import PROGRAM
from penstock.envs.rewards.reward import RewardResult, field_of
from penstock.sandbox import Box, Limits, Outcome, Program, open_box, python, run

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
END_S = 10.0
"""Time limit for a killed program to end."""


def _source_of(side: ModuleType) -> str:
    """Return the source of a side with that of the messages, because a sandbox does not have our packages."""
    name, shared, own = remote_data.__name__, *(Path(str(each.__file__)).read_text() for each in (remote_data, side))
    load = f"import sys, types; module = sys.modules[{name!r}] = types.ModuleType({name!r})"
    return f"{load}; exec({shared!r}, vars(module)); exec({own!r})"


PROGRAM_SIDE, TESTS_SIDE = _source_of(remote_program), _source_of(remote_tests)


class Code:
    """Runs the last fenced block of Python in the answer, or the whole answer, against the task's tests.

    Tests are Python code (for example asserts) that calls the program's functions and classes, or a list of
    `{"input": ..., "output": ...}` with the program's input and its expected output. A program runs in a sandbox that
    has neither the tests nor the expected output. Python tests run in a second sandbox and call the program from there
    (`remote_tests`, `remote_program`).
    """

    timeout_reward = 0.0
    part_names: tuple[str, ...] = ("tests_passed",)
    confined = False

    def __init__(
        self,
        *,
        tests_key: str = "tests",
        partial: bool = False,
        wall_s: float = 10.0,
        cpu_s: int = 5,
        memory_mb: int = 512,
        max_processes: int = 32,
        file_mb: int = 16,
    ) -> None:
        """`tests_key`: key of the tests in the task's payload. `partial`: the reward is the share of passed tests,
        instead of 1 if all pass and 0 otherwise. The limits apply to every run of the program (see
        `penstock.sandbox`)."""
        self._tests_key, self._partial = tests_key, partial
        memory_bytes, file_bytes = memory_mb << 20, file_mb << 20
        self._limits = Limits(
            wall_s=wall_s, cpu_s=cpu_s, memory_bytes=memory_bytes, max_processes=max_processes, file_bytes=file_bytes
        )

    def score(self, answer: str, payload: Mapping[str, Any]) -> RewardResult:
        program, tests = program_of(answer), field_of(payload, self._tests_key)
        passed = [self._holds(program, tests)] if isinstance(tests, str) else self._passed(program, tests)
        share = sum(passed) / len(passed)
        return RewardResult(reward=share if self._partial else float(share == 1.0), parts={"tests_passed": share})

    def _holds(self, program: str, tests: str) -> bool:
        """Return whether the tests pass. Raises ValueError if they cannot judge a program. They and the program run in
        two sandboxes with a socket between them. Only the sandbox of the tests has the socket `verdict`."""
        verdict, control = socket.socketpair()
        with verdict, ExitStack() as held:
            pipe, other = (held.enter_context(each) for each in socket.socketpair())
            boxes = [held.enter_context(open_box(limits=self._limits)) for _ in range(2)]
            boxes[0].write(PROGRAM, program.encode(errors="replace"))
            with control:
                programs = [
                    _start(boxes[0], PROGRAM_SIDE, self._limits, other),
                    _start(boxes[1], TESTS_SIDE, self._limits, pipe, control),
                ]
            pipe.close()  # then each side sees the end of the other
            other.close()
            verdict.settimeout(self._limits.wall_s)
            try:
                send(verdict, tests)
                fault = receive(verdict)
            except (Broken, OSError):
                return False
            finally:
                for each in programs:
                    each.kill()
                have_ended = [_has_ended(each) for each in programs]
        if not all(have_ended):
            return False
        if fault:
            raise ValueError(f"the tests of the task ({self._tests_key}) {fault}")
        return True

    def _passed(self, program: str, tests: Any) -> list[bool]:
        if not isinstance(tests, list) or not tests or not all(isinstance(test, dict) for test in tests):
            raise ValueError(f"{self._tests_key} is neither Python nor a list of input and output: {str(tests)[:80]}")
        return [self._prints(program, str(field_of(t, "input")), str(field_of(t, "output"))) for t in tests]

    def _prints(self, program: str, given: str, expected: str) -> bool:
        ran = self._run(program, stdin=given)
        return ran.returncode == 0 and _lines(ran.stdout) == _lines(expected)

    def _run(self, program: str, *, stdin: str) -> Outcome:
        return run(python(PROGRAM), files={PROGRAM: program}, stdin=stdin, limits=self._limits)


def _start(box: Box, source: str, limits: Limits, *sockets: socket.socket) -> Program:
    numbers = [each.fileno() for each in sockets]
    return box.start(python("-c", source, *map(str, (limits.cpu_s, *numbers))), pass_fds=numbers)


def _has_ended(program: Program) -> bool:
    """Return whether a program that was killed has ended. The end of its box ends it at last."""
    try:
        program.wait(END_S)
    except TimeoutError:
        return False
    return True


def program_of(answer: str) -> str:
    """Return the last fenced block of Python in the answer, or the whole answer if there is none."""
    blocks: list[str] = FENCED.findall(answer)
    return blocks[-1] if blocks else answer


def _lines(text: str) -> list[str]:
    """Return the lines of a text, without trailing spaces and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
