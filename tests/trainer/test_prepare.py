import dataclasses

import numpy as np
import pytest
from made_samples import EPISODES, make_sample

from penstock.config import AdvantagesConfig
from penstock.samples import Sample
from penstock.trainer.prepare import LARGEST_REWARD, prepare

GOOD = make_sample(0, prompt=[5, 6], response=[7, 8], reward=1.0)


def changed(**fields: object) -> Sample:
    return dataclasses.replace(GOOD, **{"episode": next(EPISODES), **fields})


@pytest.mark.parametrize(
    ("sample", "reason"),
    [
        (changed(reward=float("nan")), "nonfinite_reward"),
        (changed(reward=float("inf")), "nonfinite_reward"),
        (changed(reward=1e308), "huge_reward"),
        (changed(reward=-2e12), "huge_reward"),
        (changed(logprobs=np.zeros(3, np.float32)), "mismatched_lengths"),
        (changed(loss_mask=np.zeros(4, np.uint8)), "empty"),
        (changed(loss_mask=np.ones(4, np.uint8)), "no_prompt"),
        (changed(logprobs=np.full(4, np.nan, np.float32)), "nonfinite_logprob"),
        (changed(versions=np.full(4, -1, np.int32)), "unknown_version"),
        (make_sample(0, prompt=[], response=[], reward=1.0), "empty"),
        (make_sample(0, prompt=[5, 6], response=[7] * 9, reward=1.0), "too_long"),
        (make_sample(0, prompt=[5, 6], response=[7, 12], reward=1.0), "unknown_token"),
        (make_sample(0, prompt=[5, 6], response=[7, -1], reward=1.0), "unknown_token"),
    ],
)
def test_what_cannot_be_trained_is_counted_and_left_out(sample: Sample, reason: str) -> None:
    batch, skipped = prepare(
        [GOOD, sample, changed(reward=0.0)], settings=AdvantagesConfig(normalize=False), max_context=10, vocab_size=12
    )
    assert skipped == {reason: 1}
    assert batch["advantages"].tolist() == [0.5, -0.5]  # the bad one takes no part in the mean


def test_nothing_left_is_an_empty_batch() -> None:
    batch, skipped = prepare([changed(reward=float("nan"))])
    assert len(batch) == 0 and skipped == {"nonfinite_reward": 1}


def test_turns_share_the_advantage_of_their_episode() -> None:
    """However many there are: the mean is that of the episodes."""
    talkative = [make_sample(0, prompt=[5] * turn, response=[7], reward=1.0, episode=0) for turn in (1, 3, 5)]
    terse = make_sample(0, prompt=[5], response=[7], reward=0.0, episode=1)
    batch, _ = prepare([*talkative, terse], settings=AdvantagesConfig(normalize=False))
    assert batch["advantages"].tolist() == [0.5, 0.5, 0.5, -0.5]


@pytest.mark.parametrize("normalize", [False, True])
def test_advantages_of_the_largest_rewards_are_finite(normalize: bool) -> None:
    batch, skipped = prepare(
        [changed(reward=LARGEST_REWARD), changed(reward=-LARGEST_REWARD)],
        settings=AdvantagesConfig(normalize=normalize),
    )
    assert not skipped and np.isfinite(batch["advantages"] ** 2).all()
