"""A small repository with a mistake in it, a shell to repair it with, and its tests as the judge."""

from __future__ import annotations

import random
import secrets
from pathlib import Path
from typing import Any

from penstock.envs.sandbox import Limits, python, run, scratch
from penstock.types import Task

LIMITS = Limits(wall_s=20.0, cpu_s=1, memory_bytes=256 << 20, max_processes=16, file_bytes=1 << 16)
OPERATORS = {"add": "+", "sub": "-", "mul": "*"}
TESTS = """
import runpy, sys
verdict = sys.stdin.readline()
functions = runpy.run_path("ops.py")
for name, a, b, expected in (("add", 6, 3, 9), ("sub", 6, 3, 3), ("mul", 6, 3, 18)):
    found = functions[name](a, b)
    if found != expected:
        sys.exit(f"{name}({a},{b}) is {found}, not {expected}")
print(verdict)
"""
LONGEST_REPORT = 60
"""Characters that the policy sees of what a command and the tests say."""


class Repair:
    """`ops.py` has three functions, one of which computes something else than its name says. Every action is a command
    for the shell, in the directory of the repository; after each of them the tests are run. Reward 1 when they pass;
    after `max_commands` it is over.

    The tests are the environment's own: nothing that is done to the repository changes them, and only they know the
    word that says they have passed.
    """

    blocking = True

    def __init__(self, task: Task, *, max_commands: int = 3) -> None:
        self._max_commands, self._num_commands = max_commands, 0
        self._directory = scratch()
        self._root = Path(self._directory.name)

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        draw = random.Random(seed)
        self._broken = draw.choice(list(OPERATORS))
        self._wrong = draw.choice([sign for sign in OPERATORS.values() if sign != OPERATORS[self._broken]])
        signs = OPERATORS | {self._broken: self._wrong}
        source = "".join(f"def {name}(a, b): return a {sign} b\n" for name, sign in signs.items())
        (self._root / "ops.py").write_text(source)
        return f"{self._broken}: a {self._wrong} b", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._num_commands += 1
        command = run(["sh", "-c", action], cwd=self._root, limits=LIMITS)
        said = f"{command.stdout}{command.stderr}".strip()
        passed, report = self._test()
        observation = "ok" if passed else f"{said}\n{report}".strip()[:LONGEST_REPORT]
        terminated = passed or self._num_commands >= self._max_commands
        return observation, float(passed), terminated, False, {"expected": self._repair}

    def close(self) -> None:
        """Nothing of the repository is left."""
        self._directory.cleanup()

    def demonstrate(self) -> str:
        """Put the right sign into the line of the function."""
        return self._repair

    @property
    def _repair(self) -> str:
        return f"sed -i /{self._broken}/s/{self._wrong}/{OPERATORS[self._broken]}/ ops.py"

    def _test(self) -> tuple[bool, str]:
        """Whether they pass, and what they say if not."""
        verdict = secrets.token_hex(8)
        outcome = run(python("-S", "-c", TESTS), cwd=self._root, stdin=verdict, limits=LIMITS)
        passed = outcome.stdout.strip().endswith(verdict)
        report = "too slow" if outcome.exceeded else outcome.stderr.strip().rpartition("\n")[2]
        return passed, report or "the tests did not come to their end"
