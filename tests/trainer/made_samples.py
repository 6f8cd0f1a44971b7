"""Samples made by hand."""

import itertools
from dataclasses import replace

import numpy as np

from penstock.samples import Sample

EPISODES = itertools.count()
"""Unless a test says otherwise, every sample is an episode of its own."""
VOCABULARY = 101


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


def with_drawn_experts(samples: list[Sample]) -> list[Sample]:
    """As if recorded: two of eight experts in each of two layers, with gaps."""
    draw, made = np.random.default_rng(8), []
    for sample in samples:
        order = [draw.permuted(np.tile(np.arange(8), (len(sample.token_ids), 1)), axis=1) for _ in range(2)]
        experts = np.concatenate([each[:, :2] for each in order], axis=1).astype(np.uint8)
        experts[3], experts[-1] = 255, 255
        made.append(replace(sample, experts=experts))
    return made


def five_groups() -> list[Sample]:
    """Of four with one prompt each, lengths and rewards drawn at random; one sample has two turns."""
    draw = np.random.default_rng(7)
    made = []
    for group in range(5):
        prompt = draw.integers(5, VOCABULARY, draw.integers(20, 40)).tolist()
        for episode in range(4):
            response = draw.integers(5, VOCABULARY, draw.integers(1, 9)).tolist()
            reward, logprob = float(draw.random()), float(draw.uniform(-5.2, -4.0))
            made.append(
                make_sample(group, prompt=prompt, response=response, reward=reward, episode=episode, logprob=logprob)
            )
    made[3].loss_mask[-2:-1] = 0  # an observation between two sampled stretches
    made[3].versions[-2:-1] = -1
    return made
