"""Which devices of its machine a rollout server sees, where it does not need them all.

The trainer's processes there have the first ones and servers the next, or the same ones where both take turns. What a
process sees is said in its environment, in a variable that the devices' driver reads once. Never imports torch: see
`penstock.processes.devices` for who does.
"""

from __future__ import annotations

import math
import os
import re
import subprocess
from collections.abc import Sequence

from penstock.config import Config
from penstock.processes.layout import trainer_nodes

VARIABLES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""By kind of device, as torch calls it."""
PARALLEL = re.compile(r"--(tensor|pipeline|data)-parallel-size|--?[tpd]p|--[tpd]p-size")
"""What vLLM and SGLang call the numbers of parts that a server is cut into, each on a device."""
LIST_S = 10.0
"""For the driver to list its devices: it may have to load first."""


def of_server(config: Config, number: int, seen: Sequence[str], *, needed: int = 1) -> str | None:
    """Those of the devices `seen` that are for server `number`, as the variable's value; None if there are not more
    than the `needed` ones. Once all are taken it goes on with the first ones."""
    if len(seen) <= needed:
        return None
    in_turns = config.scheduler.mode == "colocated"
    first = len(trainer_nodes(config)[0].numbers) if config.has_trainer and not in_turns else 0
    first += number * needed
    return ",".join(seen[(first + index) % len(seen)] for index in range(needed))


def named(variable: str) -> list[str] | None:
    """Devices that whoever started this process, a user or a cluster, wants it to see; None if nobody said."""
    value = os.environ.get(variable)
    return value.split(",") if value is not None else None


def of_foreign_server(config: Config, number: int) -> dict[str, str]:
    """What its environment is to say; nothing if a device was chosen, or none can be counted."""
    variable = VARIABLES.get("cuda" if config.model.device == "auto" else config.model.device)
    if variable is None:
        return {}
    seen = named(variable)
    if seen is None:
        seen = [str(index) for index in range(_num_listed())] if variable == VARIABLES["cuda"] else []
    chosen = of_server(config, number, seen, needed=num_devices(config.rollout.args))
    return {} if chosen is None else {variable: chosen}


def num_devices(words: Sequence[str]) -> int:
    """Of a foreign engine with this command line. A value that is no number is for the engine to refuse."""
    sizes: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=False):
        option, _, value = word.replace("_", "-").partition("=")
        if PARALLEL.fullmatch(option):
            sizes[option.lstrip("-")[0]] = value or following
    return math.prod(int(size) for size in sizes.values() if size.isdigit() and size != "0")


def _num_listed() -> int:
    """CUDA devices of this machine, as far as its driver tells."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=LIST_S)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
