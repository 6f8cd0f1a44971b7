"""An answer with a number that no action can be is an unparsable action, and no failure of the environment."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete, MultiBinary, MultiDiscrete

from penstock.envs.spaces import Actions

HUGE = ["9" * 20, "9" * 400, "9" * 5000, "1e30", "1e300", "1e999", "-1e999"]


@pytest.mark.parametrize("number", HUGE, ids=lambda number: number[:6] + str(len(number)))
@pytest.mark.parametrize(
    "space",
    [
        Discrete(4),
        MultiDiscrete([3, 3]),
        MultiDiscrete([3, 3], dtype=np.int8),
        MultiBinary(2),
        Box(-1, 1, (2,)),
        Box(0, 255, (2,), np.uint8),
        Box(-5, 5, (2,), np.int64),
    ],
    ids=str,
)
def test_a_huge_number_is_no_action(space: gymnasium.Space[Any], number: str) -> None:
    with pytest.raises(ValueError, match="an action is"):
        Actions(space).read(f"{number} {number}")


@pytest.mark.parametrize("number", ["9" * 400, "1e300", "1e999", "-1e999"], ids=lambda number: number[:6])
def test_an_infinite_number_is_no_action_of_a_space_without_bounds(number: str) -> None:
    actions = Actions(Box(-np.inf, np.inf, (2,)))
    with pytest.raises(ValueError, match="an action is"):
        actions.read(f"{number} 1")
    assert actions.read("30 1").tolist() == [30.0, 1.0]
