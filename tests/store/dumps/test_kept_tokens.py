"""Training samples as JSON values, and back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from played_groups import Played, chat, config, trajectory

from penstock.config.trajectory_dump import KEPT_TOKENS
from penstock.samples import Credit, Sample
from penstock.store.dumps import trajectory_rows
from penstock.store.dumps.kept_tokens import kept, samples_of
from penstock.store.dumps.trajectory_rows import RowMaker
from penstock.store.payload_files import PayloadReader


def again(samples: list[Sample]) -> list[Sample]:
    data = msgspec.json.encode([kept(sample) for sample in samples])
    return samples_of({"group": 5, "episode": 1, "reward": 1.0, KEPT_TOKENS: msgspec.json.decode(data)})


@given(
    mask=st.lists(st.booleans(), max_size=12),
    versions=st.lists(st.integers(0, 3), min_size=12, max_size=12),
    logprobs=st.lists(st.floats(-30, 0, width=32), min_size=12, max_size=12),
)
def test_samples_come_back(mask: list[bool], versions: list[int], logprobs: list[float]) -> None:
    length = len(mask)
    sampled = np.asarray(mask, np.uint8)
    sample = replace(
        trajectory(5, 1).flatten(),
        turns=[],
        conversation=2,
        credit=Credit(0.5, "judge"),
        token_ids=np.arange(length, dtype=np.int32),
        loss_mask=sampled,
        logprobs=np.where(mask, logprobs[:length], 0).astype(np.float32),
        versions=np.where(mask, versions[:length], -1).astype(np.int32),
    )
    (found,) = again([sample])
    for name in ("token_ids", "loss_mask", "versions"):
        np.testing.assert_array_equal(getattr(found, name), getattr(sample, name), strict=True)
    np.testing.assert_allclose(found.logprobs, sample.logprobs, atol=1e-4)
    assert (found.credit, found.conversation, found.reward) == (sample.credit, 2, 1.0)


def test_turns_come_back() -> None:
    (sample,) = trajectory(5, 1).formulate("branches")
    (found,) = again([sample])
    assert list(found.turns) == list(sample.turns)


@pytest.mark.parametrize("bad", [float("nan"), float("-inf")])
def test_numbers_that_json_lacks(bad: float) -> None:
    (sample,) = trajectory(5, 1).formulate("branches")
    broken = replace(sample, logprobs=np.where(sample.loss_mask, bad, 0).astype(np.float32))
    (found,) = again([broken])
    assert np.isfinite(found.logprobs).all()


def test_a_group_keeps_a_bounded_number_of_tokens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config("train", columns=[["episode", "bigint"], [KEPT_TOKENS, "json"]])
    with Played(tmp_path) as played:
        played.play(5, size=4)
        (record,) = played.pool.get_whole_groups([5])
    assert record.ref is not None
    samples = PayloadReader(tmp_path).read(record.ref)
    monkeypatch.setattr(trajectory_rows, "MAX_GROUP_TOKENS", 2 * len(samples[0].token_ids) + 1)
    rows = RowMaker(settings, chat(), columns=settings.dump.columns).rows(record, samples, {})
    assert [row[KEPT_TOKENS] is not None for row in rows] == [True, True, False, False]
