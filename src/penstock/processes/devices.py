"""Which device a process of the trainer, or a rollout server with our own engine, computes on where it sees several.

See `penstock.processes.visible` for whose are which.
"""

from __future__ import annotations

import os

import torch

from penstock.config import Config
from penstock.model.load import resolve_device
from penstock.processes.layout import num_trainer_processes
from penstock.processes.visible import VARIABLES, named, of_server


def device_of(number: int, config: Config) -> torch.device:
    """Of the trainer's process `number`: its own, unless one was chosen."""
    device = resolve_device(config.model.device)
    if device.type == "cpu" or device != torch.device(device.type) or num_trainer_processes(config) == 1:
        return device
    own = torch.device(device.type, number % torch.accelerator.device_count())
    torch.accelerator.set_device_index(own)
    return own


def take_one(config: Config, number: int) -> None:
    """Leave this process, server `number`, one device, unless one was chosen. Its engine computes on a thread of its
    own, to which no chosen index would reach. Comes before anything touches a device, and so does not ask whether there
    is one: a driver that has begun does not read the variable any more."""
    kind = config.model.device
    if kind == "auto":
        accelerator = torch.accelerator.current_accelerator()
        kind = accelerator.type if accelerator is not None else "cpu"
    if (variable := VARIABLES.get(kind)) is None:
        return
    seen = named(variable)
    if seen is None:
        seen = [str(index) for index in range(torch.get_device_module(kind).device_count())]
    if (chosen := of_server(config, number, seen)) is not None:
        os.environ[variable] = chosen
