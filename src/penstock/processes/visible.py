"""The devices of its machine that a rollout server sees, if it does not need all of them.

The trainer's processes use the first devices and the servers the next ones, or the same ones if both take turns. An
environment variable limits which devices a process sees; the device driver reads it once. Never imports torch;
`penstock.processes.devices` does.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

from penstock.config import Config, ConfigError
from penstock.ports.process_launcher import Device
from penstock.processes.layout import are_together, takes_turns, trainer_nodes
from penstock.types import DirectWeights

VARIABLES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""Environment variable for each device type, as torch names it."""
PARALLEL = re.compile(r"--(tensor|pipeline|data)-parallel-size|--?([tpd])p|--([tpd])p-size")
"""Options of vLLM and SGLang that set into how many parts a server is divided, with one device for each part."""
WITHIN = "--enable-dp-attention"
"""SGLang option: data-parallel parts share the devices of the tensor-parallel parts."""
LIST_S = 10.0
"""Limit of the wait for the driver to list its devices: it may have to load first."""


def of_server(config: Config, number: int, seen: Sequence[str], *, needed: int = 1) -> str | None:
    """Return the variable's value for server `number`: its share of the devices in `seen`. None if there are no more
    than `needed`.

    After the last device the assignment continues with the first ones.
    """
    if len(seen) <= needed:
        return None
    first = _num_before(config, number) + number * needed
    return ",".join(seen[(first + index) % len(seen)] for index in range(needed))


def _num_before(config: Config, number: int) -> int:
    """Return the number of devices on the server's machine that only the trainer uses."""
    has_trainer = config.has_trainer and are_together(config, f"rollout-{number}", "trainer-0")
    return len(trainer_nodes(config)[0].numbers) if has_trainer and not takes_turns(config) else 0


def named(variable: str) -> list[str] | None:
    """Return the devices to which the environment (set by a user or a cluster) limits this process; None if it sets no
    limit."""
    value = os.environ.get(variable)
    return value.split(",") if value is not None else None


def of_foreign_server(config: Config, number: int) -> dict[str, str]:
    """Return the device variable for a foreign server's environment. Empty if the configuration names a device, or if
    there are no more devices than the server needs.

    Raises `ConfigError` if there are too few devices. The server would otherwise use a device of the trainer or of
    another server, and take most of its memory.
    """
    variable, seen = _seen(config)
    if variable is None:
        return {}
    needed, before = num_devices(config.rollout.args), _num_before(config, number)
    chosen = of_server(config, number, seen, needed=needed)
    if chosen is not None and before + (number + 1) * needed > len(seen):
        raise ConfigError(
            f"rollout-{number}: there are {len(seen)} devices, the trainer has {before} of them, and each of "
            f"rollout.servers ({config.rollout.servers}) needs {needed}: lower rollout.servers or the parallelism in "
            f"rollout.args, or give the servers a pool of the cluster"
        )
    return {} if chosen is None else {variable: chosen}


def has_accelerator(config: Config) -> bool:
    """Return whether the servers compute on an accelerator, as far as this process can tell without torch."""
    kind = config.model.device
    return kind != "cpu" and (kind != "auto" or _num_listed() > 0)


def shares_device(config: Config, number: int) -> bool:
    """Return whether server `number` uses devices of the trainer or of another server at the same time, because there
    are too few. Devices of a cluster are not shared out."""
    if not config.has_trainer or config.rollout.urls or takes_turns(config) or config.cluster.address:
        return False
    is_there = are_together(config, f"rollout-{number}", "trainer-0")
    needed = num_devices(config.rollout.args)
    return is_there and 0 < len(_seen(config)[1]) < _num_before(config, number) + (number + 1) * needed


def direct_way(config: Config) -> DirectWeights | None:
    """Return how the servers get weights from the trainer's device; None if they get them in files or, as SGLang may,
    by broadcasts. A foreign engine shares a device with the trainer only if there is no other one, so all servers get
    them alike."""
    if not config.sends_directly:
        return None
    if shares_device(config, 0):
        return "memory"
    return "nccl" if config.rollout.engine == "vllm" else None


def _seen(config: Config) -> tuple[str | None, list[str]]:
    """Return the variable for devices of the configured kind, and the devices of this process. (None, []) if the
    configuration names a device."""
    variable = VARIABLES.get("cuda" if config.model.device == "auto" else config.model.device)
    if variable is None:
        return None, []
    seen = named(variable)
    if seen is None:
        seen = [str(index) for index in range(_num_listed())] if variable == VARIABLES["cuda"] else []
    return variable, seen


def num_devices(words: Sequence[str]) -> int:
    """Return the number of devices that a foreign engine with this command line needs. The engine itself rejects
    invalid numbers."""
    sizes: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=False):
        option, _, value = word.replace("_", "-").partition("=")
        if match := PARALLEL.fullmatch(option):
            kind = next(filter(None, match.groups()))[0]
            sizes[kind] = value or following
    if WITHIN in words:
        sizes.pop("d", None)
    return math.prod(int(size) for size in sizes.values() if size.isdigit() and size != "0")


SHARES = {"vllm": ("--gpu-memory-utilization", 0.92), "sglang": ("--mem-fraction-static", 0.8)}
"""The option of each engine for the part of a device's memory that it takes, and about what it takes without."""


def share_in(engine: str, words: Sequence[str]) -> float | None:
    """Return the part of a device's memory that a command line gives to a foreign engine; None if it gives none. The
    engine itself rejects invalid numbers."""
    wanted, found = SHARES[engine][0], None
    for word, following in zip(words, [*words[1:], ""], strict=False):
        option, _, value = word.partition("=")
        if option.replace("_", "-") == wanted:
            with suppress(ValueError):
                found = float(value or following)
    return found


def devices_of(environment: Mapping[str, str], words: Sequence[str]) -> list[str]:
    """Return the devices that a foreign engine uses with this environment and this command line."""
    needed, seen = num_devices(words), environment.get(VARIABLES["cuda"])
    return seen.split(",")[:needed] if seen else [str(number) for number in range(needed)]


def free_share(devices: Sequence[str]) -> float | None:
    """Return the part of their memory that is free on all of these devices. None if the driver does not tell."""
    words = ["nvidia-smi", "--query-gpu=memory.free,memory.total", "--format=csv,noheader,nounits"]
    try:
        words += ["-i", ",".join(devices)]
        listed = subprocess.run(words, capture_output=True, text=True, timeout=LIST_S)
        free = [line.split(",") for line in listed.stdout.splitlines()]
        return min((float(some) / float(whole) for some, whole in free), default=None)
    except (OSError, ValueError, ZeroDivisionError, subprocess.TimeoutExpired):
        return None


def listed(devices: Sequence[str]) -> list[Device] | None:
    """Return these CUDA devices as their driver describes them; None if it does not tell."""
    words = ["nvidia-smi", "--query-gpu=name,memory.used,memory.total", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run([*words, "-i", ",".join(devices)], capture_output=True, text=True, timeout=LIST_S)
        rows = [line.rsplit(",", 2) for line in answer.stdout.splitlines()]
        return [
            Device(name=name, number=number, used_bytes=int(used) << 20, total_bytes=int(total) << 20)
            for number, (name, used, total) in zip(devices, rows, strict=True)
        ]
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


def _num_listed() -> int:
    """Return the number of CUDA devices that the driver of this machine lists; 0 if it does not answer."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=LIST_S)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
