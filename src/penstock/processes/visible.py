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

from penstock.config import Config, ConfigError
from penstock.processes.layout import are_together, takes_turns, trainer_nodes

VARIABLES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}
"""By kind of device, as torch calls it."""
PARALLEL = re.compile(r"--(tensor|pipeline|data)-parallel-size|--?([tpd])p|--([tpd])p-size")
"""What vLLM and SGLang call the numbers of parts that a server is cut into, each on a device."""
WITHIN = "--enable-dp-attention"
"""Of SGLang: the parts by data lie on the devices of the parts by tensor."""
LIST_S = 10.0
"""For the driver to list its devices: it may have to load first."""


def of_server(config: Config, number: int, seen: Sequence[str], *, needed: int = 1) -> str | None:
    """Those of the devices `seen` that are for server `number`, as the variable's value; None if there are not more
    than the `needed` ones. Once all are taken it goes on with the first ones."""
    if len(seen) <= needed:
        return None
    first = _num_before(config, number) + number * needed
    return ",".join(seen[(first + index) % len(seen)] for index in range(needed))


def _num_before(config: Config, number: int) -> int:
    """Devices of its machine that are the trainer's alone."""
    has_trainer = config.has_trainer and are_together(config, f"rollout-{number}", "trainer-0")
    return len(trainer_nodes(config)[0].numbers) if has_trainer and not takes_turns(config) else 0


def named(variable: str) -> list[str] | None:
    """Devices that whoever started this process, a user or a cluster, wants it to see; None if nobody said."""
    value = os.environ.get(variable)
    return value.split(",") if value is not None else None


def of_foreign_server(config: Config, number: int) -> dict[str, str]:
    """What its environment is to say; nothing if a device was chosen, or none can be counted. Raises `ConfigError`: it
    would take what the trainer, or another one, has, and most of its memory."""
    variable = VARIABLES.get("cuda" if config.model.device == "auto" else config.model.device)
    if variable is None:
        return {}
    seen = named(variable)
    if seen is None:
        seen = [str(index) for index in range(_num_listed())] if variable == VARIABLES["cuda"] else []
    needed, before = num_devices(config.rollout.args), _num_before(config, number)
    chosen = of_server(config, number, seen, needed=needed)
    if chosen is not None and before + (number + 1) * needed > len(seen):
        raise ConfigError(
            f"rollout-{number}: there are {len(seen)} devices, the trainer has {before} of them, and each of "
            f"rollout.servers ({config.rollout.servers}) needs {needed}: lower rollout.servers, or what rollout.args "
            f"say of parallelism, or give them a pool of the cluster"
        )
    return {} if chosen is None else {variable: chosen}


def num_devices(words: Sequence[str]) -> int:
    """Of a foreign engine with this command line. A value that is no number is for the engine to refuse."""
    sizes: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], ""], strict=False):
        option, _, value = word.replace("_", "-").partition("=")
        if match := PARALLEL.fullmatch(option):
            kind = next(filter(None, match.groups()))[0]
            sizes[kind] = value or following
    if WITHIN in words:
        sizes.pop("d", None)
    return math.prod(int(size) for size in sizes.values() if size.isdigit() and size != "0")


def _num_listed() -> int:
    """CUDA devices of this machine, as far as its driver tells."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=LIST_S)
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
