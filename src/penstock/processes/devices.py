"""Which device a process of the trainer, or a rollout server with our own engine, computes on where it sees several.

The trainer's processes have the first ones and servers the next, or the same ones where both take turns.
"""

from __future__ import annotations

import os

import torch

from penstock.config import Config
from penstock.model.load import resolve_device
from penstock.processes.layout import num_trainer_processes, trainer_nodes

VISIBLE = "CUDA_VISIBLE_DEVICES"


def device_of(number: int, config: Config) -> torch.device:
    """Of the trainer's process `number`: its own, unless one was chosen."""
    device = resolve_device(config.model.device)
    if device.type == "cpu" or device != torch.device(device.type) or num_trainer_processes(config) == 1:
        return device
    own = torch.device(device.type, number % torch.accelerator.device_count())
    torch.accelerator.set_device_index(own)
    return own


def take_one(config: Config, number: int) -> None:
    """Leave this process, server `number`, one CUDA device, unless one was chosen. Its engine computes on a thread of
    its own, to which no chosen index would reach. Comes before anything touches a device."""
    if config.model.device not in ("auto", "cuda"):
        return
    named = os.environ.get(VISIBLE)
    seen = named.split(",") if named is not None else [str(index) for index in range(torch.cuda.device_count())]
    in_turns = config.scheduler.mode == "colocated"
    first = len(trainer_nodes(config)[0].numbers) if config.has_trainer and not in_turns else 0
    if len(seen) > 1:
        os.environ[VISIBLE] = seen[(first + number) % len(seen)]
