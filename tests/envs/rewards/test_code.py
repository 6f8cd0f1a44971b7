"""Programs that policies wrote, run for real: right, wrong, endless, greedy, and those that multiply."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.envs import sandbox
from penstock.envs.rewards.code import Code, program_of
from penstock.envs.rewards.reward import RewardResult

pytestmark = pytest.mark.integration

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
        ("this is no program", "assert True", 0.0),
        ("while True: pass", "assert True", 0.0),
        ("import time; time.sleep(60)", "assert True", 0.0),
        ("held = 'x' * (1 << 30)", "assert True", 0.0),
        ("open('big', 'wb').write(bytes(64 << 20))", "assert True", 0.0),
    ],
)
def test_what_a_program_earns(answer: str, tests: Any, reward: float) -> None:
    started = time.monotonic()
    result = Code(wall_s=2.0, cpu_s=1, memory_mb=256).score(answer, {"tests": tests})
    assert result.reward == reward
    assert time.monotonic() - started < 10


def test_a_part_of_the_tests_may_count() -> None:
    result = Code(partial=True).score("print(4)", {"tests": PAIRS})
    assert result == RewardResult(reward=0.5, parts={"tests_passed": 0.5})


def test_tests_that_are_none_are_named() -> None:
    with pytest.raises(ValueError, match="the task has no 'tests'"):
        Code().score(DOUBLE, {"question": "?"})
    with pytest.raises(ValueError, match="tests is neither Python nor a list"):
        Code().score(DOUBLE, {"tests": 4})


def test_whatever_a_program_starts_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some of it in sessions of its own; and nothing is left on the disk."""
    if not sandbox.has_namespaces():
        pytest.skip("this machine permits no namespaces")
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path))
    seconds = f"36{os.getpid()}"
    program = (
        "import subprocess\n"
        f"for _ in range(10): subprocess.Popen(['sleep', '{seconds}'], start_new_session=True)\n"
        "raise SystemExit(1)"
    )
    assert Code().score(program, {"tests": "assert True"}).reward == 0.0
    assert not [each for each in psutil.process_iter(["cmdline"]) if seconds in (each.info["cmdline"] or [])]
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(os.getuid() == 0, reason="the kernel does not limit root's processes")
def test_a_fork_bomb_meets_its_limit() -> None:
    started = time.monotonic()
    bomb = "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass"
    assert Code(wall_s=2.0, max_processes=16).score(bomb, {"tests": "assert True"}).reward == 0.0
    assert time.monotonic() - started < 10
