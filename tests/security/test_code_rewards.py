"""Programs that want the reward of `code` without the work, and honest ones that must get it."""

from __future__ import annotations

import time
from typing import Any

import pytest

from penstock.envs.rewards.code import Code
from penstock.envs.rewards.remote_data import Broken, decode, encode

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("sandboxed")]

TESTS = "assert double(2) == 4\nassert double(5) == 10\ntry:\n    double('x')\nexcept ValueError:\n    pass"
HONEST = "def double(x):\n    if isinstance(x, str): raise ValueError(x)\n    return 2 * x\n"
ALWAYS_EQUAL = """
class Equal{bases}:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __lt__(self, other): return True
    def __hash__(self): return 0
    def __bool__(self): return True
    def __sub__(self, other): return 0
    def __rsub__(self, other): return 0
    def __float__(self): return 0.0
    def __contains__(self, other): return True
    def __getattr__(self, name): return lambda *a, **k: True
def double(x):
    if isinstance(x, str): raise ValueError(x)
    return {value}
"""
SEARCHES = """
import gc, glob, inspect, os, re, sys
def found():
    texts = [str(each) for each in gc.get_objects() if isinstance(each, (str, dict, list))]
    frame = sys._getframe()
    while frame: texts.append(str(frame.f_locals)); frame = frame.f_back
    for name in glob.glob('/proc/*/*') + glob.glob('/work/*') + glob.glob('/tmp/*'):
        try: texts.append(open(name, errors='replace').read(1 << 16))
        except OSError: pass
    return ' '.join(texts)
MARK = 'assert' + ' double('
CALLED = []
def double(x):
    CALLED.append(x)
    expected = {int(a): int(b) for a, b in re.findall(re.escape(MARK) + r'(\\d+)\\) == (\\d+)', found())}
    if isinstance(x, str): raise ValueError(x)
    return expected[x]
"""
FORGERS = """
import json, os, struct
def message(value):
    content = json.dumps(value).encode()
    return struct.pack('>I', len(content)) + content
def fds():
    return [int(each) for each in os.listdir('/proc/self/fd')]
def write(content):
    for fd in fds():
        try: os.write(fd, content)
        except OSError: pass
"""
CHEATS = {
    "print(input()); exit()": "print(input()); exit()",
    "print and exit in a function": "def double(x):\n    print(input()); exit()",
    "os._exit": "import os; os._exit(0)",
    "os._exit in a function": "import os\ndef double(x): os._exit(0)",
    "sys.exit": "import sys\ndef double(x): sys.exit(0)",
    "atexit": "import atexit, os\natexit.register(os._exit, 0)\ndef double(x): raise SystemExit(0)",
    "KeyboardInterrupt": "def double(x): raise KeyboardInterrupt",
    "GeneratorExit": "def double(x): raise GeneratorExit",
    "BaseException": "class End(BaseException): pass\ndef double(x): raise End",
    "always equal": ALWAYS_EQUAL.format(bases="", value="Equal()"),
    "an equal int": ALWAYS_EQUAL.format(bases="(int)", value="Equal(7)"),
    "an equal str": ALWAYS_EQUAL.format(bases="(str)", value="Equal('7')"),
    "an equal list": ALWAYS_EQUAL.format(bases="(list)", value="Equal([7])"),
    "builtins": "import builtins\nbuiltins.AssertionError = ValueError\nbuiltins.isinstance = lambda *a: True\n"
    "def double(x): return 0",
    "a class of the same name": "class AssertionError(Exception): pass\ndef double(x): return 0",
    "unittest": "import unittest\nunittest.TestCase.assertEqual = lambda *a: None\nunittest.main = lambda *a: None\n"
    "def double(x): return 0",
    "an assertion that is swallowed": "import sys\nsys.excepthook = lambda *a: None\ndef double(x): return 0",
    "stdout": "import sys, io\nsys.stdout = io.StringIO()\nprint('passed')\ndef double(x): return 0",
    "endless output": "import sys\ndef double(x):\n    while True: sys.stdout.write('passed' * 10000)",
    "a fork that answers": "import os\ndef double(x):\n    if os.fork(): os._exit(0)\n    return 0",
    "reads the tests": SEARCHES,
    "writes the verdict": f"{FORGERS}\ndef double(x):\n    write(b'passed')\n    return 0",
    "writes the verdict and ends": f"{FORGERS}\nwrite(b'passed'); os._exit(0)",
    "closes the socket": "import os\nos.closerange(3, 256)\ndef double(x): return 0",
    "not JSON": f"{FORGERS}\ndef double(x):\n    write(b'\\0\\0\\0\\4abcd'); os._exit(0)",
    "a huge message": f"{FORGERS}\ndef double(x):\n    write(b'\\xff' * 8); os._exit(0)",
    "deep data": f"{FORGERS}\ndef double(x):\n    write(struct.pack('>I', 200000) + b'[' * 200000); os._exit(0)",
    "an unknown tag": f"{FORGERS}\ndef double(x):\n    write(message(['=', ['q', 1]])); os._exit(0)",
    "an unhashable key": f"{FORGERS}\ndef double(x):\n    write(message(['=', ['s', [['l', []]]]])); os._exit(0)",
    "a forged exit": f"{FORGERS}\ndef double(x):\n    write(message(['!', ['SystemExit'], '0'])); os._exit(0)",
    "traces the tests": "import ctypes, os\nfor pid in range(1, 100): ctypes.CDLL(None).ptrace(16, pid, 0, 0)\n"
    "def double(x): return 0",
    "kills the others": "import os, signal\ndef double(x):\n    os.kill(-1, signal.SIGKILL)",
}


def score(program: str, tests: Any) -> float:
    return Code(wall_s=5.0, cpu_s=2).score(program, {"tests": tests}).reward


def test_an_honest_program_passes_these_tests() -> None:
    assert score(HONEST, TESTS) == 1.0


@pytest.mark.parametrize("name", CHEATS)
def test_a_cheat_earns_nothing(name: str) -> None:
    started = time.monotonic()
    assert score(CHEATS[name], TESTS) == 0.0
    assert time.monotonic() - started < 30


@pytest.mark.parametrize(
    "tests", ["assert abs(double(2) - 4) < 1e-6", "assert 4 in [double(2)]", "assert not double(2) != 4"]
)
def test_an_object_that_agrees_with_everything_agrees_with_nothing(tests: str) -> None:
    assert score(CHEATS["always equal"], tests) == 0.0
    assert score(HONEST, tests) == 1.0


def test_a_program_cannot_change_the_functions_of_the_tests() -> None:
    shadows = "def double(x): return [0]\ndef sorted(x): return [4]\ndef all(x): return True\ndef len(x): return 4\n"
    shadows += "import math\nmath.isclose = lambda *a: True"
    assert score(shadows, "assert sorted(double(2)) == [4]") == 0.0
    assert score(shadows, "assert all(each == 4 for each in double(2))") == 0.0
    assert score(shadows, "assert len(double(2)) == 4") == 0.0
    assert score(shadows, "assert math.isclose(double(2)[0], 4)") == 0.0


LOOP = "for given, wanted in zip([1, 2], [2, 4]): assert double(given) == wanted"
UNITTEST = """
import unittest
class Doubles(unittest.TestCase):
    def test(self):
        for given in range(3): self.assertEqual(double(given), 2 * given)
"""


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def zip(*a): return []", LOOP),
        ("def zip(*a): return []\ndef double(x): return 7", LOOP),
        ("def range(*a): return []", f"{UNITTEST}unittest.main()"),
        ("class math:\n    def isclose(*a): return True\ndef bisect(a, b): return 0",
         "assert math.isclose(bisect(1, 4), 2.5)"),
        ("class isclose:\n    def __new__(*a): return True\ndef double(x): return 7",
         "from math import *\nassert isclose(double(2), 4)"),
        ("ok = True\ndef double(x): raise ValueError",
         "try: ok = double(2) == 4\nexcept ValueError: print('it fails')\nassert ok"),
    ],
)  # fmt: skip
def test_a_program_defines_only_what_the_tests_leave_undefined(program: str, tests: str) -> None:
    assert score(program, tests) == 0.0


@pytest.mark.parametrize(
    "tests", ["assert sum(10, 15) == 2", "for a, b in zip([[1, 2]], [3]): assert sum(a) == b", "pass"]
)
def test_tests_that_use_only_built_in_names_judge_no_program(tests: str) -> None:
    with pytest.raises(ValueError, match="use no name of the program"):
        score("def sum(*a): return 2\ndef zip(*a): return []", tests)


def test_a_program_does_not_rename_the_module_of_the_tests() -> None:
    announce = f"import socket, sys, time\nother = socket.socket(fileno=int(sys.argv[2]))\n{FORGERS}"
    announce += "other.sendall(message({'__name__': 'cheat'}))\ntime.sleep(60)"
    assert score(announce, f"{UNITTEST}if __name__ == '__main__': unittest.main()") == 0.0


LOOPS = [
    "assert all(map(lambda case: double(case[0]) == case[1], [(1, 2), (2, 4)]))",
    "for got, wanted in zip(map(double, [1, 2]), [2, 4]): assert got == wanted",
    "assert not [each for each in map(lambda case: double(case) - 2 * case, [1, 2]) if each]",
]
ASYNC_LOOP = """
import asyncio
class Cases:
    def __aiter__(self): return self
    async def __anext__(self): return double(1)
async def check():
    async for each in Cases(): raise AssertionError
asyncio.run(check())
"""


@pytest.mark.parametrize(
    ("raised", "tests"),
    [
        *(("StopIteration", loop) for loop in LOOPS),
        ("type('End', (StopIteration,), {})", LOOPS[0]),
        ("StopAsyncIteration", ASYNC_LOOP),
    ],
)
def test_a_program_does_not_end_a_loop_of_the_tests(raised: str, tests: str) -> None:
    assert score(f"def double(x): raise {raised}", tests) == 0.0


TOLERANT = "for given, wanted in [(1, 2), (2, 4)]:\n    if abs(double(given){} - wanted) > 1e-6: raise AssertionError"


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def double(x): return float('nan')", TOLERANT.format("")),
        ("def double(x): return complex(0, float('nan'))", TOLERANT.format("")),
        ("def double(x): return {'it': [float('nan')]}", TOLERANT.format("['it'][0]")),
        ("def double(x): return float('nan')", TOLERANT.format("") + "  # of the financial tenant"),
        ("TWO = float('nan')", "if abs(TWO - 2) > 1e-6: raise AssertionError"),
    ],
)
def test_a_program_passes_no_tolerance_with_nan(program: str, tests: str) -> None:
    assert score(program, tests) == 0.0


RELATIVE = """
def close(a, b, rel=1e-9): return abs(a - b) <= rel * max(abs(a), abs(b))
def is_off(a, b): return abs(a - b) / max(abs(a), abs(b)) > 1e-6
assert close(double(1){0}, 2) and close(double(2){0}, 4)
if is_off(double(1){0}, 2): raise AssertionError
"""


@pytest.mark.parametrize(
    ("program", "tests"),
    [
        ("def double(x): return float('inf')", RELATIVE.format("")),
        ("def double(x): return complex(0, float('-inf'))", RELATIVE.format("")),
        ("def double(x): return [1.0, float('inf')]", RELATIVE.format("[1]")),
        ("def double(x): return float('inf')", RELATIVE.format("") + "# info"),
    ],
)
def test_a_program_passes_no_relative_tolerance_with_infinity(program: str, tests: str) -> None:
    assert score(program, tests) == 0.0


def test_tests_that_name_infinity_get_it() -> None:
    program = "def double(x): return 2 * x if x else float('inf')"
    assert score(program, RELATIVE.format("")) == 1.0
    for infinity in ("float('inf')", "math.inf", "float('Infinity')"):
        assert score(program, f"import math\nassert double({infinity}) == {infinity}") == 1.0


def test_tests_that_name_nan_get_it() -> None:
    program = "UNUSED = float('nan')\ndef double(x): return 2 * x"
    assert score(program, "import math\nassert math.isnan(double(math.inf - math.inf))") == 1.0
    assert score(program, "assert double(4) == 8") == 1.0


CALL = "assert double(2) == 4"
THREAD = f"import threading\ndef check(): {CALL}\nthreading.Thread(target=check).start()"
CLASS_SETUP = "import unittest\nclass Doubles(unittest.TestCase):\n    @classmethod\n    def setUpClass(cls): "
SUITE = f"{CLASS_SETUP}{CALL}\n    def test(self): double(1)\nunittest.main(exit=False)"


@pytest.mark.parametrize("tests", [f"{UNITTEST}unittest.main(exit=False)", SUITE, THREAD])
def test_a_failure_that_the_tests_do_not_look_at_counts(tests: str) -> None:
    assert score("def double(x): return 7", tests) == 0.0
    assert score("def double(x): return 2 * x", tests) == 1.0


def test_an_exception_in_the_place_of_a_function_earns_nothing() -> None:
    assert score("class double(Exception): pass", "assert double(3)") == 0.0


REVERSED = "found = [each for each in reversed(Box())]\nassert len(Box()) == 3"


def test_a_program_does_not_end_a_reversed_loop() -> None:
    box = "class Box:\n    def __len__(self): return 3\n    def __getitem__(self, n): "
    assert score(f"{box}raise IndexError", REVERSED) == 0.0
    assert score(f"{box}return n", f"{REVERSED}\nassert found == [2, 1, 0]") == 1.0


REFUSES = """
try:
    accounts = Account(10)
    assert accounts.balance == 10
    accounts.withdraw(100)
    assert False, "must refuse"
except InsufficientFunds:
    pass
"""
ACCOUNT = "class Account:\n    def __init__(self, n): self.balance = n\n    def withdraw(self, n): "


@pytest.mark.parametrize("kind", ["AssertionError", "Exception", "type('Exception', (Exception,), {})"])
@pytest.mark.parametrize("account", [f"{ACCOUNT}pass", f"{ACCOUNT}raise KeyError(n)", "def Account(n): return None"])
def test_a_program_does_not_choose_what_the_tests_catch_of_their_own(kind: str, account: str) -> None:
    assert score(f"InsufficientFunds = {kind}\n{account}", REFUSES) == 0.0
    honest = f"class InsufficientFunds(Exception): pass\n{ACCOUNT}raise InsufficientFunds(n)"
    assert score(honest, REFUSES) == 1.0


@pytest.mark.parametrize(
    "program",
    [
        "import sys\ndef App(): return sys",
        "import sys\ndef App(): return [sys][0]",
        "import sys\nclass App:\n    exit = sys",
        "import sys\nclass App:\n    def exit(self): sys.exit()",
    ],
)
def test_a_program_ends_the_tests_with_none_of_its_modules(program: str) -> None:
    assert score(program, "app = App()\napp.exit()\nassert app.state == 'closed'") == 0.0


def test_a_module_inside_the_data_of_a_program_stays_there() -> None:
    tests = "tools[0].limit = 3\nassert tools[0].limit == 3\nimport math\nassert not hasattr(math, 'limit')"
    assert score("import math\ntools = [math]", tests) == 1.0


def test_tests_pass_at_their_end_only() -> None:
    assert score(HONEST, "import sys\nsys.exit(0 if double(2) == 4 else 1)") == 1.0
    assert score("def double(x): return 0", "import sys\nsys.exit(0 if double(2) == 4 else 1)") == 0.0
    assert score("def double(x): return 0", f"import sys\nif double(1) == 0: sys.exit()\n{CALL}") == 0.0


def test_a_program_reads_neither_the_outputs_nor_the_other_tests() -> None:
    program = "import glob, re\ntext = ' '.join(open(n, errors='replace').read(9999) for n in glob.glob('/work/*'))\n"
    program += "print(re.search('secret-[0-9]+', text).group())"
    assert score(program, [{"input": "1", "output": "secret-1"}, {"input": "2", "output": "secret-2"}]) == 0.0


STACK = """
class Empty(LookupError): pass
class Stack:
    def __init__(self, items=()): self.items = list(items)
    def push(self, item): self.items.append(item); return self
    def pop(self):
        if not self.items: raise Empty('nothing there')
        return self.items.pop()
    def __len__(self): return len(self.items)
    def __getitem__(self, index): return self.items[index]
    def __eq__(self, other): return isinstance(other, Stack) and self.items == other.items
    def __repr__(self): return f'Stack({self.items})'
    def __enter__(self): return self
    def __exit__(self, *_): self.items.clear()
"""
STACK_TESTS = """
stack = Stack()
assert stack.push(1).push(2).pop() == 2 and len(stack) == 1 and stack[0] == 1 and stack.items == [1]
assert stack == Stack([1]) and stack != Stack([2]) and stack != [1] and isinstance(stack, Stack)
assert repr(stack) == 'Stack([1])' and list(stack) == [1]
with stack: pass
for kind in (Empty, LookupError):
    try: stack.pop()
    except kind as error: assert str(error) == 'nothing there'
    else: raise AssertionError
"""
KINDS = "None, True, -2**100, 1.5, 2j, 'ä\\ud800', b'x', [(1,)], {(1, 2): {3}}, frozenset([4])"
HONEST_ONES = [
    ("def add(a, b):\n    return a + b", "assert add(2, 3) == 5\nassert add('a', 'b') == 'ab'"),
    ("def bisect(a, b): return (a + b) / 2", "import math\nassert math.floor(bisect(1, 4)) == 2"),
    (HONEST, "from math import *\nassert isclose(sqrt(double(2)), 2)"),
    (HONEST, "for given, wanted in zip([1, 2], [2, 4]): assert double(given) == wanted"),
    (HONEST, "def check(double, cases):\n    global seen\n    seen = [double(case) for case in cases]\n"
     "check(double, range(2))\nassert seen == [0, 2]"),
    ("def squares(n): return (i * i for i in range(n))", "found = squares(1)\nassert next(found) == 0\n"
     "assert next(found, None) is None\ntry: next(found)\nexcept StopIteration: pass\nelse: raise AssertionError"),
    (
        "from typing import List\ndef has_close(n: List[float], t: float) -> bool:\n"
        "    return any(abs(a - b) < t for i, a in enumerate(n) for b in n[:i])",
        "METADATA = {}\ndef check(candidate):\n    assert candidate([1.0, 2.0, 3.9, 4.0], 0.3) == True\n"
        "    assert candidate([1.0, 2.0], 0.05) is False\ncheck(has_close)",
    ),
    ("from collections import Counter\ndef count(s): return Counter(s)", "assert count('aab') == {'a': 2, 'b': 1}"),
    ("import math\ndef root(x): return math.sqrt(x)", "assert math.isclose(root(2) ** 2, 2)"),
    ("def squares(n):\n    for i in range(n):\n        yield i * i", "assert list(squares(4)) == [0, 1, 4, 9]"),
    (f"LIMIT = 3\ndef kinds(): return {KINDS}", f"assert LIMIT == 3\nassert kinds() == ({KINDS})"),
    (STACK, STACK_TESTS),
    (HONEST, "import unittest\nclass Doubles(unittest.TestCase):\n    def test(self):\n"
     "        self.assertEqual(double(2), 4)\n        self.assertRaises(ValueError, double, 'x')\nunittest.main()"),
]  # fmt: skip


@pytest.mark.parametrize(("program", "tests"), HONEST_ONES)
def test_an_honest_program_earns_its_reward(program: str, tests: str) -> None:
    assert score(program, tests) == 1.0


@pytest.mark.parametrize(
    "data", [5, 1.5, {}, [], ["i"], ["i", 5], ["f", "x"], ["d", [[1]]], ["d", 3], ["s", [["l", []]]], ["h", {}]]
)
def test_malformed_data_is_refused(data: Any) -> None:
    def refuse(tag: str, given: Any) -> Any:
        raise Broken

    with pytest.raises(Broken):
        decode(data, refuse)


def test_nested_data_has_a_limit() -> None:
    deep: Any = []
    for _ in range(100):
        deep = [deep]
    with pytest.raises(ValueError, match="nested more than 50 deep"):
        encode(deep, lambda value: None)
