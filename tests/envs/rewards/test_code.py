"""Programs that policies wrote, run for real: right, wrong, endless, greedy, and those that multiply."""

from __future__ import annotations

import secrets
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.envs.rewards.code import Code, program_of
from penstock.envs.rewards.reward import RewardResult

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("sandboxed")]

DOUBLE = "Here you are:\n```python\nprint(2 * int(input()))\n```\nIt doubles."
PAIRS = [{"input": "2\n", "output": "4"}, {"input": "5", "output": "10\n"}]


def test_the_last_block_is_the_program() -> None:
    assert program_of("```python\na\n```\nor better\n```py\nb\n```") == "b\n"
    assert program_of("print(1)") == "print(1)"


@pytest.mark.parametrize(
    ("answer", "tests", "reward"),
    [
        (DOUBLE, PAIRS, 1.0),
        ("print(4)", PAIRS, 0.0),
        ("def double(x): return 2 * x", "assert double(2) == 4", 1.0),
        ("def double(x): return x", "assert double(2) == 4", 0.0),
        ("import sys; sys.exit(0)", "assert double(2) == 4", 0.0),
        ("done = True\nthis is no program", "assert done", 0.0),
        ("done = len('x' * (1 << 30))", "assert done", 0.0),
        ("done = open('big', 'wb').write(bytes(64 << 20))", "assert done", 0.0),
        ("done = len('x' * (1 << 20)) + open('big', 'wb').write(bytes(1 << 20))", "assert done", 1.0),
    ],
)
def test_what_a_program_earns(answer: str, tests: Any, reward: float) -> None:
    assert Code(memory_mb=256).score(answer, {"tests": tests}).reward == reward


@pytest.mark.parametrize("answer", ["done = True\nwhile True: pass", "import time; time.sleep(60); done = True"])
def test_a_program_without_an_end_earns_nothing(answer: str) -> None:
    started = time.monotonic()
    assert Code(wall_s=2.0, cpu_s=1).score(answer, {"tests": "assert done"}).reward == 0.0
    assert time.monotonic() - started < 10


def test_a_part_of_the_tests_may_count() -> None:
    result = Code(partial=True).score("print(4)", {"tests": PAIRS})
    assert result == RewardResult(reward=0.5, parts={"tests_passed": 0.5})


def test_tests_that_are_none_are_named() -> None:
    with pytest.raises(ValueError, match="the task has no 'tests'"):
        Code().score(DOUBLE, {"question": "?"})
    with pytest.raises(ValueError, match="tests is neither Python nor a list"):
        Code().score(DOUBLE, {"tests": 4})


CALL = "assert double(2) == 4"
UNITTEST = "import unittest\nclass Doubles(unittest.TestCase):\n    "


@pytest.mark.parametrize(
    "tests",
    [
        f"def test(): {CALL}\ndef test_again(given=2): {CALL}",
        f"class TestDouble:\n    def test(self): {CALL}",
        f"{UNITTEST}def test(self): self.assertEqual(double(2), 4)",
        "import unittest\nclass Doubles(unittest.IsolatedAsyncioTestCase):\n    async def test(self): " + CALL,
        f"from unittest import mock\n@mock.patch('os.getcwd')\ndef test(getcwd): {CALL}",
    ],
)
def test_tests_that_run_by_no_statement_run_all_the_same(tests: str) -> None:
    assert Code().score("def double(x): return 2 * x", {"tests": tests}).reward == 1.0
    assert Code().score("def double(x): return x", {"tests": tests}).reward == 0.0


def test_tests_that_run_by_a_statement_run_once() -> None:
    program = "calls = []\ndef count(): calls.append(1); return len(calls)"
    test = "def test(wanted): assert count() == wanted\ntest(1)"
    cases = f"{UNITTEST}def test(self): self.assertEqual(count(), 1)\nunittest.main()"
    for tests in (test, cases):
        assert Code().score(program, {"tests": tests}).reward == 1.0


@pytest.mark.parametrize(
    ("tests", "reason"),
    [
        (f"def check(): {CALL}", "never ask the program"),
        (f"def test(given): {CALL}", "do not run test, which takes arguments"),
        (f"async def test(): {CALL}", "do not run test, which is async"),
        (f"def setup_module(): pass\ndef test(): {CALL}", "define setup_module for test"),
    ],
)
@pytest.mark.parametrize("program", ["def double(x): return 2 * x", "double = 4"])
def test_tests_that_check_nothing_are_named(tests: str, reason: str, program: str) -> None:
    with pytest.raises(ValueError, match=f"the tests of the task \\(tests\\) {reason}"):
        Code().score(program, {"tests": tests})


def test_whatever_a_program_starts_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of it in sessions of its own; and nothing is left on the disk."""
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path))
    seconds = f"3600.{secrets.randbelow(10**9)}"
    program = (
        "import subprocess\ndone = True\n"
        f"for _ in range(10): subprocess.Popen(['sleep', '{seconds}'], start_new_session=True)\n"
        "raise SystemExit(1)"
    )
    assert Code().score(program, {"tests": "assert done"}).reward == 0.0
    assert not [each for each in psutil.process_iter(["cmdline"]) if seconds in (each.info["cmdline"] or [])]
    assert not list(tmp_path.iterdir())


def test_a_fork_bomb_meets_its_limit() -> None:
    started = time.monotonic()
    bomb = "import os\ndone = True\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert Code(wall_s=2.0, max_processes=16).score(bomb, {"tests": "assert done"}).reward == 0.0
    assert time.monotonic() - started < 10
