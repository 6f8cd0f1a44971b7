"""What the measurement of speculation computes."""

from __future__ import annotations

import pytest
import torch
from hardware import tiny_policy
from speculation import CONTEXT, Answer, after_match, earlier, forward, n_gram, num_steps, running_engine, verify


@pytest.mark.parametrize(
    ("latest", "known", "near", "found"),
    [
        ([1, 2], [9, 1, 2, 3, 4, 5], 0, [3, 4, 5]),
        ([1, 2], [1, 2, 3, 3, 1, 2, 4, 4, 4], 9, [4, 4, 4]),
        ([7, 2], [5, 2, 3], 0, [3, 3, 3]),
        ([1, 2, 1, 2], [1, 2, 1, 2], 4, [1, 2, 1]),
        ([1], [2, 3], 0, []),
    ],
)
def test_a_draft_follows_the_longest_match(latest: list[int], known: list[int], near: int, found: list[int]) -> None:
    assert after_match(latest, known, 3, near=near) == found


def test_a_step_yields_the_accepted_tokens_and_one_more() -> None:
    answer = Answer([1, 2, 3, 4], [1, 2, 3, 4, 9, 9], [1, 2, 3, 5])
    assert num_steps(answer, lambda answer, so_far, k: [], 2) == 6
    assert num_steps(answer, n_gram, 3) == 3, "1 and then 2 3 4 9; the last 9 ends"
    assert num_steps(answer, earlier, 2) == 4, "1 2 3 and then one at a time"


@torch.inference_mode()
def test_a_step_with_drafts_computes_what_a_plain_step_does() -> None:
    engine = running_engine(tiny_policy(512), 2)
    plain = forward(engine, 0)
    positions = engine._rows.positions[:2].tolist()
    assert positions == [CONTEXT] * 2
    verify(engine, 3)
    with_drafts = forward(engine, 3)
    assert with_drafts.shape[0] == 8
    torch.testing.assert_close(with_drafts[::4], plain, atol=1e-4, rtol=1e-4)
