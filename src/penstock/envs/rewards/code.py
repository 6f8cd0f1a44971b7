"""A reward for programs: the task's tests, run in a sandbox."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.envs import sandbox
from penstock.envs.rewards.reward import RewardResult, field_of
from penstock.envs.sandbox import Limits, Outcome

FENCED = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)```", re.DOTALL)
PROGRAM = "program.py"


class Code:
    """Runs the last fenced block of Python in the answer, or the whole answer, against the task's tests.

    Tests are Python code appended to the program (for example asserts), or a list of `{"input": ..., "output": ...}`
    with the program's input and its expected output. The tests are not secure against cheating: they run beside the
    program, and a program that tries to deceive them may succeed.
    """

    timeout_reward = 0.0

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
        `penstock.envs.sandbox`)."""
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
        """Return whether the program and its tests run to the end. The proof: the last line prints a random word from
        standard input, which neither of them contains."""
        word = secrets.token_hex(16)
        ran = self._run(f"{program}\n\n{tests}\n\nprint(input())\n", stdin=word)
        return ran.returncode == 0 and ran.stdout.rstrip().endswith(word)

    def _passed(self, program: str, tests: Any) -> list[bool]:
        if not isinstance(tests, list) or not tests or not all(isinstance(test, dict) for test in tests):
            raise ValueError(f"{self._tests_key} is neither Python nor a list of input and output: {str(tests)[:80]}")
        return [self._prints(program, str(field_of(t, "input")), str(field_of(t, "output"))) for t in tests]

    def _prints(self, program: str, given: str, expected: str) -> bool:
        ran = self._run(program, stdin=given)
        return ran.returncode == 0 and _lines(ran.stdout) == _lines(expected)

    def _run(self, program: str, *, stdin: str) -> Outcome:
        with sandbox.scratch() as directory:
            (Path(directory) / PROGRAM).write_text(program)
            return sandbox.run(sandbox.python(PROGRAM), cwd=Path(directory), stdin=stdin, limits=self._limits)


def program_of(answer: str) -> str:
    """Return the last fenced block of Python in the answer, or the whole answer if there is none."""
    blocks: list[str] = FENCED.findall(answer)
    return blocks[-1] if blocks else answer


def _lines(text: str) -> list[str]:
    """Return the lines of a text, without trailing spaces and without empty lines at the end."""
    return [line.rstrip() for line in text.rstrip().splitlines()]
