"""What the tests do not depend on: how busy the machine is, and how they were started; and where they compute."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    import torch

# The same examples each time: a change is judged by what it changes. `--hypothesis-profile=search` looks for others.
settings.register_profile("unhurried", deadline=None, derandomize=True)
settings.register_profile("search", deadline=None)
settings.load_profile("unhurried")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell has what it runs in the background ignore it, and so would the runs that tests interrupt.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where a test computes: here and, if there is one, on a CUDA device."""
    import torch  # most tests need none

    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    return torch.device(request.param)
