"""Samples made by hand."""

import itertools

import numpy as np

from penstock.types import Sample

EPISODES = itertools.count()
"""Unless a test says otherwise, every sample is an episode of its own."""


def make_sample(
    group: int,
    *,
    prompt: list[int],
    response: list[int],
    reward: float,
    episode: int | None = None,
    logprob: float = -4.6,
    versions: list[int] | None = None,
) -> Sample:
    """A single-turn sample; one behaviour log-probability for all its tokens."""
    mask = np.asarray([0] * len(prompt) + [1] * len(response), dtype=np.uint8)
    return Sample(
        group=group,
        episode=next(EPISODES) if episode is None else episode,
        reward=reward,
        truncated=False,
        token_ids=np.asarray(prompt + response, dtype=np.int32),
        loss_mask=mask,
        logprobs=np.where(mask, logprob, 0.0).astype(np.float32),
        versions=np.asarray([-1] * len(prompt) + (versions or [0] * len(response)), dtype=np.int32),
    )
