"""A small repository with a mistake in it, a shell to repair it with, and its tests as the judge."""

from __future__ import annotations

import json
import operator
import random
from typing import Any

from penstock.sandbox import Limits, open_box, python
from penstock.types import Task

LIMITS = Limits(wall_s=5.0, cpu_s=1, memory_bytes=256 << 20, max_processes=16, file_bytes=1 << 16)
OPERATORS = {"add": "+", "sub": "-", "mul": "*"}
RIGHT = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
TESTS = """
import json, runpy, sys
calls = json.load(sys.stdin)
functions = runpy.run_path("ops.py")
print(json.dumps([functions[name](a, b) for name, a, b in calls]))
"""
LONGEST_REPORT = 60
"""Characters that the policy sees of what a command and the tests say."""


class Repair:
    """`ops.py` has three functions, one of which computes something else than its name says. Every action is a command
    for the shell, in the directory of the repository; after each of them the tests are run. Reward 1 when they pass;
    after `max_commands` it is over.

    The repository is the work directory of a sandbox, and nothing else of this machine is in it. The tests call the
    functions there with numbers that are drawn after the command, and the environment compares the results outside: so
    only functions that compute the right results pass.
    """

    blocking = True
    needs_sandbox = True

    def __init__(self, task: Task, *, max_commands: int = 3) -> None:
        self._max_commands, self._num_commands = max_commands, 0
        self._box = open_box(limits=LIMITS)

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        draw = random.Random(seed)
        self._broken = draw.choice(list(OPERATORS))
        self._wrong = draw.choice([sign for sign in OPERATORS.values() if sign != OPERATORS[self._broken]])
        signs = OPERATORS | {self._broken: self._wrong}
        source = "".join(f"def {name}(a, b): return a {sign} b\n" for name, sign in signs.items())
        self._box.write("ops.py", source)
        return f"{self._broken}: a {self._wrong} b", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._num_commands += 1
        command = self._box.run(["sh", "-c", action])
        said = f"{command.stdout}{command.stderr}".strip()
        passed, report = self._test()
        observation = "ok" if passed else f"{said}\n{report}".strip()[:LONGEST_REPORT]
        terminated = passed or self._num_commands >= self._max_commands
        return observation, float(passed), terminated, False, {"expected": self._repair}

    def close(self) -> None:
        """End the sandbox. Nothing of the repository is left."""
        self._box.close()

    def demonstrate(self) -> str:
        """Put the right sign into the line of the function."""
        return self._repair

    @property
    def _repair(self) -> str:
        return f"sed -i /{self._broken}/s/{self._wrong}/{OPERATORS[self._broken]}/ ops.py"

    def _test(self) -> tuple[bool, str]:
        """Return whether all functions compute what their names say, and the first that does not."""
        draw = random.SystemRandom()
        calls = [(name, draw.randint(4, 999), draw.randint(2, 999)) for name in OPERATORS]
        outcome = self._box.run(python("-S", "-c", TESTS), stdin=json.dumps(calls))
        try:
            found = json.loads(outcome.stdout)
            for (name, a, b), result in zip(calls, found, strict=True):
                if result != RIGHT[name](a, b):
                    return False, f"{name}({a},{b}) is {result}, not {RIGHT[name](a, b)}"
        except (ValueError, TypeError, RecursionError):  # what it prints is the policy's
            report = "too slow" if outcome.exceeded else outcome.stderr.strip().rpartition("\n")[2]
            return False, report or "the tests did not come to their end"
        return True, ""
