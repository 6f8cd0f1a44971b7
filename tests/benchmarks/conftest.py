"""The benchmarks, for their tests: their modules are found last, so that no test's helper is mistaken for one."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
