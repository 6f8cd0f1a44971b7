"""Makes the tiny policy, its server, the real runs of other folders, and the benchmarks' kills available here.

The benchmarks' modules are found last, as in the tests of the benchmarks."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("rollout", "compat", "training"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
