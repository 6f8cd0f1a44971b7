"""Which device a rollout server with our own engine computes on, where it sees several."""

from __future__ import annotations

import os

import torch

from penstock.config import Config

VISIBLE = "CUDA_VISIBLE_DEVICES"


def take_one(config: Config, number: int) -> None:
    """Leave this process, server `number`, one of several CUDA devices, unless one was chosen: the trainer's processes
    have the first ones and servers the next, or the same ones where both take turns. Comes before anything touches a
    device."""
    if config.model.device not in ("auto", "cuda"):
        return
    named = os.environ.get(VISIBLE)
    seen = named.split(",") if named is not None else [str(index) for index in range(torch.cuda.device_count())]
    in_turns = config.scheduler.mode == "colocated"
    first = config.num_trainer_processes if config.has_trainer and not in_turns else 0
    if len(seen) > 1:
        os.environ[VISIBLE] = seen[(first + number) % len(seen)]
