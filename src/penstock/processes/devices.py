"""The cores of a process that computes, and its device if it sees several.

`penstock.processes.visible` decides which devices belong to which process.
"""

from __future__ import annotations

import os

import torch

from penstock.config import Config
from penstock.model.load_policy import resolve_device
from penstock.ports.process_launcher import Device
from penstock.processes.layout import num_trainer_processes
from penstock.processes.visible import VARIABLES, named, of_server


def num_usable_cpus() -> int:
    """Return the number of cores that this process may run on; all cores of the machine if the platform does not
    tell."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_threads(config: Config, configured: int, *, num_sharing: int = 1) -> int:
    """Return the number of torch threads of a process.

    This is `configured`, except in colocated mode. There generation and training take turns on all cores, and the
    `num_sharing` processes that compute at the same time divide the cores.
    """
    return max(num_usable_cpus() // num_sharing, 1) if config.scheduler.mode == "colocated" else configured


def device_of(number: int, config: Config) -> torch.device:
    """Return the device of trainer process `number`: one of its own, unless the configuration names a device."""
    device = resolve_device(config.model.device)
    if device.type == "cpu" or device != torch.device(device.type) or num_trainer_processes(config) == 1:
        return device
    own = torch.device(device.type, number % torch.accelerator.device_count())
    torch.accelerator.set_device_index(own)
    return own


def devices_in_use() -> list[Device] | None:
    """Return the accelerators on which this process has memory; empty if there are none. None if their driver does not
    tell."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return []
    variable, module = VARIABLES.get(accelerator.type), torch.get_device_module(accelerator)
    if variable is None:
        return None
    if not module.is_initialized():
        return []
    names, found = named(variable), list[Device]()
    for index in range(module.device_count()):
        if module.memory_reserved(index):
            free, total = module.mem_get_info(index)
            number = str(index) if names is None else names[index]
            name = module.get_device_name(index)
            found.append(Device(name=name, number=number, used_bytes=total - free, total_bytes=total))
    return found


def take_one(config: Config, number: int) -> None:
    """Restrict this process, rollout server `number`, to one device, unless the configuration names a device.

    The engine computes on its own thread, which a device index set here would not reach. So this sets the environment
    variable instead. Call it before any code touches a device: a loaded driver does not read the variable again. For
    the same reason this function does not check whether a device exists.
    """
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
