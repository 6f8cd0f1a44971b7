"""The memory that the processes of a run need on their devices, and which settings would fit if it is too much.

As a program it reads a configuration from its input, as JSON, and prints the plan as JSON: commands that start runs do
not import torch. `--memory BYTES` plans for devices with so much memory, instead of those of this machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from pydantic import ValidationError

from penstock.config import Config, ConfigError
from penstock.config.yaml_file import merged, parse_overrides
from penstock.model.files import ModelError, read_json
from penstock.model.load_policy import resolve_device, resolve_dtype
from penstock.model.tiny import write_tiny_model
from penstock.processes.layout import places, takes_turns
from penstock.processes.visible import SHARES, num_devices, share_in
from penstock.rollout.prefix_cache import CACHED_SHARE
from penstock.rollout.room import SHARE, bytes_of_token, heads
from penstock.rollout.shared_blocks import has_flash_form, supports_flash
from penstock.trainer.memory import Sizes, architecture_of, decided, learner_bytes, sizes, with_reserve

MOST_RANKS = 512
"""Largest number of ranks that is tried."""
LOGIT_COPIES = 3
"""Float32 tensors of a vocabulary's width that sampling makes for each slot."""
OFFLOAD = "trainer.offload="
ENGINE_CONTEXT = 2**30
"""Bytes of a device that a foreign engine takes beside the memory that its option limits: the context of its
libraries."""
STATIC = {"vllm": 1.0, "sglang": 0.85}
"""Part of an engine's memory that its option limits. SGLang's leaves out the memory of passes and of CUDA graphs."""


@dataclass(frozen=True, slots=True)
class Need:
    """The memory of some equal processes."""

    who: str
    count: int
    parts: dict[str, int]
    """Bytes of each process, by what they are for."""
    serves: bool = False
    """Whether it is a rollout server."""
    is_limit: bool = False
    """Whether each process keeps to this memory by itself, so that nothing comes on top of it."""

    @property
    def tensors(self) -> int:
        return sum(self.parts.values())

    @property
    def total(self) -> int:
        return self.tensors if self.is_limit else with_reserve(self.tensors)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The needs of a run, and whether they can be met."""

    device: str
    capacity: int
    """Bytes of one device; on a CPU of the machine."""
    needs: list[Need]
    largest: int
    """Bytes that the most burdened device has to hold."""
    tensors: int
    """The same without what is not sure to be needed."""
    engine_words: list[str] = field(default_factory=list)
    """Words for the command line of a foreign engine, so that it takes the memory that the trainer leaves of its
    device. Empty if it has a device of its own, or if `rollout.args` have such words."""
    remedies: list[str] = field(default_factory=list)
    """Words for the command line with which the run would fit. Empty if it fits, or if nothing was found that would."""

    @property
    def fits(self) -> bool:
        return self.largest <= self.capacity

    def plain(self) -> dict[str, Any]:
        """Return the plan as JSON values."""
        needs = [asdict(need) | {"total": need.total} for need in self.needs]
        return asdict(self) | {"needs": needs, "fits": self.fits}


class Planner:
    """Plans a run on devices of one kind."""

    def __init__(self, config: Config, model_dir: Path, device: torch.device, capacity: int, num_devices: int) -> None:
        """`capacity`: bytes of one device. `num_devices`: devices of this machine, for all processes; 0 if it is not
        known."""
        self._config, self._device, self._capacity = config, device, capacity
        self._num_devices, self._model_dir = num_devices, model_dir
        self._dtype = resolve_dtype(config.model.dtype, device)

    @cached_property
    def _architecture(self) -> Any:
        return architecture_of(self._model_dir)

    @cached_property
    def _sizes(self) -> Sizes:
        return sizes(self._architecture, self._config.trainer)

    def plan(self) -> Plan:
        """Return the plan, with what would fit if the configuration does not."""
        config, device = self._config, self._device
        needs = [*self._trainers(config), *self._servers(config)]
        plan = Plan(
            device=f"{device.type}, {self._capacity / 2**30:.1f} GiB"
            + (f", {self._num_devices} of them on this machine" if device.type != "cpu" and self._num_devices else ""),
            capacity=self._capacity,
            needs=needs,
            largest=self._largest(config, needs, lambda need: need.total),
            tensors=self._largest(config, needs, lambda need: need.tensors),
        )
        if plan.fits:
            return replace(plan, engine_words=self._engine_words(config, needs))
        return replace(plan, remedies=next((words for words in self._remedies() if self._fits(words)), []))

    def _fits(self, words: Sequence[str]) -> bool:
        try:
            config = changed(self._config, words)
            needs = [*self._trainers(config), *self._servers(config)]
        except (ValidationError, ConfigError):  # for example more ranks than a step has samples, or than heads
            return False
        return self._largest(config, needs, lambda need: need.total) <= self._capacity

    def _largest(self, config: Config, needs: Sequence[Need], size_of: Callable[[Need], int]) -> int:
        """Return the bytes on the most burdened device. All processes share a CPU. If there are fewer devices than
        processes, one of each kind may share a device, unless they take turns."""
        if self._device.type == "cpu" and config.cluster.address is None:
            return sum(need.count * size_of(need) for need in needs)
        if self._engine_shares(config):
            return sum(self._num_on_device(need) * size_of(need) for need in needs)
        sizes = [size_of(need) for need in needs]
        return sum(sizes) if self._shares(config) else max(sizes, default=0)

    def _engine_shares(self, config: Config) -> bool:
        """Return whether the servers have a foreign engine, and the trainer's devices at the same time."""
        rollout = config.rollout
        if rollout.engine == "penstock" or rollout.urls or config.pipeline != "train" or self._device.type == "cpu":
            return False
        is_one_machine = config.cluster.address is None and not takes_turns(config)
        return is_one_machine and 0 < self._num_devices <= num_devices(rollout.args)

    def _num_on_device(self, need: Need) -> int:
        """Return how many of these processes use one device that foreign engines share with the trainer: all servers,
        and the trainer's processes evenly."""
        return need.count if need.serves else -(-need.count // self._num_devices)

    def _engine_words(self, config: Config, needs: Sequence[Need]) -> list[str]:
        """Return the option with which each foreign engine takes an equal part of what the trainer leaves."""
        rollout = config.rollout
        if not self._engine_shares(config) or share_in(rollout.engine, rollout.args) is not None:
            return []
        trainers = [need for need in needs if not need.serves]
        left = self._capacity - sum(self._num_on_device(need) * need.total for need in trainers)
        part = (left / rollout.servers - ENGINE_CONTEXT) / self._capacity * STATIC[rollout.engine]
        return [SHARES[rollout.engine][0], f"{int(100 * part) / 100:.2f}"]

    def _trainers(self, config: Config) -> Iterator[Need]:
        if config.pipeline != "train":
            return
        for place, roles in places(config).items():
            on_accelerator = self._device.type != "cpu"
            known: dict[str, Any] = {"longest": config.model.max_context, "dtype": self._dtype, "roles": roles}
            capacity = self._capacity if on_accelerator else None
            trainer = decided(self._architecture, config.trainer, capacity=capacity, **known)
            found = learner_bytes(self._architecture, trainer, on_accelerator=on_accelerator, **known)
            ranks = config.trainer.ranks
            sharded = config.trainer.distributed.shards(ranks=ranks, num_parameters=self._sizes.all)
            tokens = max(trainer.pass_tokens, config.model.max_context)
            passing = f"a pass of {tokens:,} tokens"
            if (context := config.trainer.distributed.context_ranks) > 1:
                passing += f" on {context} ranks"
            if trainer.activation_checkpointing:
                passing += ", activations recomputed"
            parts = {
                "weights, gradients, moments" + (" (a shard)" if sharded else ""): found.states,
                "copies: " + ", ".join(_copies(config, roles, on_cpu=self._device.type == "cpu")): found.copies,
                "gathered layers": found.gathered,
                passing: found.one_pass,
                "the optimizer's step": max(found.optimizer_step - found.gathered - found.one_pass, 0),
                "a copy for a checkpoint": found.saved if found.is_in_main_memory else 0,
            }
            if place == "reference":  # nothing is kept for a backward pass
                parts[passing] = found.one_pass // self._sizes.num_layers
            yield Need(" and ".join(roles), ranks, {name: size for name, size in parts.items() if size})

    def _servers(self, config: Config) -> Iterator[Need]:
        rollout = config.rollout
        if self._engine_shares(config):
            yield self._foreign_server(config)
        if rollout.urls or rollout.engine != "penstock":
            return
        raw = read_json(self._model_dir, "config.json")
        of_token = bytes_of_token(raw, self._dtype.itemsize)
        vocab = int(self._architecture.get_text_config().vocab_size)
        slots, context = rollout.slots, config.model.max_context
        on_cpu = self._device.type == "cpu"
        cached = int(CACHED_SHARE * slots * context) if on_cpu else 0  # an accelerator caches what it has room for
        weights, in_slots = self._sizes.all * self._dtype.itemsize, slots * context
        held, spare, kept = in_slots, 0, f"keys and values: {slots} slots of {context:,} tokens"
        if of_token and not on_cpu and self._has_blocks(raw) and not self._shares(config):
            held = min(in_slots, int(SHARE * max(self._capacity - weights, 0)) // of_token)
            if held < context:
                held, kept = context, f"keys and values of one answer of {context:,} tokens"
                spare = int(context / SHARE) - context
            elif held < in_slots:
                kept = f"keys and values: {held:,} tokens, for up to {slots} answers"
        parts = {
            "weights": weights,
            kept: held * of_token,
            "as much for computing, which the engine keeps free": spare * of_token,
            f"prefix cache: {cached:,} tokens": cached * of_token,
            "sampling": slots * vocab * 4 * LOGIT_COPIES,
        }
        yield Need("rollout server", rollout.servers, {name: size for name, size in parts.items() if size}, serves=True)

    def _has_blocks(self, architecture: dict[str, Any]) -> bool:
        """Return whether our engine takes memory in blocks, as answers grow, and lets answers wait for it."""
        head_dim = heads(architecture)[1]
        if torch.cuda.is_available():
            return supports_flash(self._device, self._dtype, head_dim)
        return self._device.type == "cuda" and has_flash_form(self._dtype, head_dim)

    def _shares(self, config: Config) -> bool:
        """Return whether the trainer and our own servers use one accelerator at the same time."""
        rollout = config.rollout
        num_trainers = len(places(config)) * config.trainer.ranks if config.pipeline == "train" else 0
        num_servers = rollout.servers if rollout.engine == "penstock" and not rollout.urls else 0
        is_short = 0 < self._num_devices < num_trainers + num_servers
        return is_short and config.cluster.address is None and not takes_turns(config)

    def _foreign_server(self, config: Config) -> Need:
        """Return what each foreign engine takes of a device: what its command line says, or else the least with which
        it can generate one answer."""
        rollout, context = config.rollout, config.model.max_context
        given = share_in(rollout.engine, rollout.args)
        if given is not None:
            taken = int(given / STATIC[rollout.engine] * self._capacity)
            parts = {f"{SHARES[rollout.engine][0]} {given:g} in rollout.args": taken}
        else:
            divided = num_devices(rollout.args)
            of_token = bytes_of_token(read_json(self._model_dir, "config.json"), self._dtype.itemsize)
            parts = {
                "weights": self._sizes.all * self._dtype.itemsize // divided,
                f"keys and values of one answer of {context:,} tokens": context * of_token // divided,
            }
            parts["passes and CUDA graphs"] = int(sum(parts.values()) * (1 / STATIC[rollout.engine] - 1))
        parts = {name: size for name, size in parts.items() if size} | {"context of its libraries": ENGINE_CONTEXT}
        who, is_limit = f"rollout server ({rollout.engine})", given is not None
        return Need(who, rollout.servers, parts, serves=True, is_limit=is_limit)

    def _remedies(self) -> Iterator[list[str]]:
        """Yield settings that need less and less memory, as words for the command line."""
        config, words = self._config, list[str]()
        slots = config.rollout.slots
        for wanted in _halved(slots):
            yield [f"rollout.slots={wanted}"]
            if not self._server_is_too_large(config, wanted):
                words = [f"rollout.slots={wanted}"] if wanted != slots else []
                break
        if config.pipeline != "train":
            return
        trainer = config.trainer
        for step, is_one in (
            (
                f"trainer.tokens_per_microbatch={config.model.max_context}",
                trainer.pass_tokens > config.model.max_context,
            ),
            ("trainer.activation_checkpointing=true", not trainer.activation_checkpointing),
            ("trainer.distributed.shard_ranks=null", trainer.distributed.shard_ranks is not None),
            (f"{OFFLOAD}[activations]", "activations" not in trainer.offload),
        ):
            if is_one:
                words = [*words, step]
                yield words
        yield _with_all_offloaded(words)
        is_one_machine = config.cluster.address is None
        most_ranks = self._num_devices if is_one_machine and self._num_devices else MOST_RANKS
        ranks = max(config.trainer.ranks, 2)
        while ranks <= most_ranks:
            sharded = trainer.distributed.shards(ranks=ranks, num_parameters=self._sizes.all)
            strategy = [] if sharded else ["trainer.distributed.strategy=fsdp"]
            with_ranks = [*words, *strategy, f"trainer.ranks={ranks}"]
            yield with_ranks
            yield _with_all_offloaded(with_ranks)
            context = 2 * trainer.distributed.context_ranks
            while context <= ranks:
                yield [*with_ranks, f"trainer.distributed.context_ranks={context}"]
                context *= 2
            ranks *= 2
        if self._engine_shares(config):
            yield ["scheduler.mode=colocated", "scheduler.max_staleness=0"]
        if config.trainer.lora is None:  # last, because it trains something else
            yield [*words, "trainer.lora.rank=16"]

    def _server_is_too_large(self, config: Config, slots: int) -> bool:
        try:
            wanted = changed(config, [f"rollout.slots={slots}"])
        except (ValidationError, ConfigError):  # fewer slots than a group has episodes
            return False
        return any(need.total > self._capacity for need in self._servers(wanted))


def _with_all_offloaded(words: Sequence[str]) -> list[str]:
    return [*(word for word in words if not word.startswith(OFFLOAD)), f"{OFFLOAD}[activations,optimizer]"]


def _halved(slots: int) -> Iterator[int]:
    while slots >= 1:
        yield slots
        slots //= 2


def _copies(config: Config, roles: list[str], *, on_cpu: bool) -> Iterator[str]:
    if "reference" in roles:
        yield "reference"
    if "critic" in roles:
        yield "critic with its optimizer"
    if "actor" in roles and config.trainer.objective.proximal == "snapshot":
        yield "snapshot"
    if "actor" in roles and config.trainer.canaries.parity_every is not None and on_cpu:  # else in main memory
        yield "parity check"


def changed(config: Config, words: Sequence[str]) -> Config:
    """Return the configuration with settings as on the command line."""
    return Config.model_validate(merged(config.model_dump(), parse_overrides(words)))


def planned(config: Config, memory: int | None = None) -> Plan:
    """Return the plan of a run. `memory`: bytes of a device, if not those of this machine's. Raises `ConfigError` for a
    model that Transformers does not know."""
    device = resolve_device(config.model.device)
    if memory is not None and device.type == "cpu":  # planned here for another machine
        device = torch.device("cuda")
    on_cpu = device.type == "cpu"
    if memory is not None:
        capacity, num_devices = memory, 0
    elif on_cpu:
        capacity, num_devices = int(psutil.virtual_memory().total), 1
    else:
        module = torch.get_device_module(device)
        if not module.is_available():
            raise ConfigError(f"model.device {config.model.device}: torch finds no such device on this machine")
        capacity, num_devices = int(module.mem_get_info(0)[1]), int(module.device_count())
    with TemporaryDirectory() as directory:
        model_dir = Path(config.model.path)
        if config.model.path == "tiny":
            model_dir = Path(directory) / "tiny"
            write_tiny_model(model_dir, config.model.tiny, config.model.max_context)
        return Planner(config, model_dir, device, capacity, num_devices).plan()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--memory", type=int)
    options = parser.parse_args()
    config = Config.model_validate_json(sys.stdin.read())
    try:
        plan = planned(config, options.memory)
    except (ConfigError, ModelError) as error:
        print(error, file=sys.stderr)
        sys.exit(ConfigError.exit_code)
    json.dump(plan.plain(), sys.stdout)


if __name__ == "__main__":
    main()
