"""The trial of the kernel that reads keys and values in blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_policy import make_model, plain_flash

from penstock.rollout import cuda_graphs
from penstock.rollout.cuda_graphs import Reach
from penstock.rollout.slots import LayerSlots


def without_tables(query: torch.Tensor, blocks: LayerSlots, reach: Reach, scaling: float) -> torch.Tensor:
    """A kernel that reads the first blocks, whatever the tables say."""
    first = torch.arange(reach.tables.shape[1], dtype=torch.int32).expand_as(reach.tables)
    return plain_flash(query, blocks, reach._replace(tables=first), scaling)


def without_support(query: torch.Tensor, blocks: LayerSlots, reach: Reach, scaling: float) -> torch.Tensor:
    raise RuntimeError("this build has no such kernel\nat a place")


@pytest.mark.parametrize(
    ("kernel", "told"),
    [(plain_flash, ""), (without_tables, "values that are off by"), (without_support, "has no such kernel")],
)
def test_a_trial_shows_whether_the_kernel_reads_tables(
    kernel: Any, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cuda_graphs, "flash", kernel)
    assert cuda_graphs.finds_blocks(make_model()) == (not told)
    assert told in caplog.text and bool(told) == bool(caplog.text)
