"""What a rollout server consists of, whoever starts it: a run, or somebody by hand."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from penstock.compat.openai import OpenAI
from penstock.compat.sglang import SGLang
from penstock.config import Config
from penstock.model.chat import ChatTokenizer
from penstock.model.compute import Beside
from penstock.model.files import read_json_if_present
from penstock.model.load import load_policy, resolve_device, resolve_dtype
from penstock.rollout.app import App
from penstock.rollout.claim import Claim
from penstock.rollout.engine import SlotEngine
from penstock.rollout.keys import Keys
from penstock.rollout.runner import EngineRunner
from penstock.rollout.server import Identity, create_app
from penstock.rollout.update import Chunk, Receive, ReceiveChunk, Tensors, WeightsUpdate, refuse_chunks
from penstock.supervisor.procfs import boot_id
from penstock.trainer.checkpoint import STATE
from penstock.types import NO_VERSION, GroupTensors, WeightsHandle
from penstock.weights.collective import Groups
from penstock.weights.device_memory import take
from penstock.weights.parts import Receiver
from penstock.weights.shared_memory import describe, fingerprint, layout
from penstock.weights.tensors import max_chunk_bytes

Weights = Literal["published", "stored", "random"]
"""Whose an engine serves: a trainer's, once they come; those in the model's directory; those that a seed makes."""


def make_engine(config: Config, directory: Path, *, weights: Weights) -> SlotEngine:
    """The engine around the model in `directory`. Stored weights are served under the policy_version that they had as a
    checkpoint, or 0; random ones are the same for the same `seed`."""
    device = resolve_device(config.model.device)
    dtype = resolve_dtype(config.model.dtype, device)
    stored = read_json_if_present(directory, STATE) if weights == "stored" else {}
    return SlotEngine(
        load_policy(directory, dtype=dtype, device=device, weights=weights == "stored", seed=config.seed),
        num_slots=config.rollout.slots,
        max_context=config.model.max_context,
        policy_version=NO_VERSION if weights == "published" else stored.get("policy_version", 0),
    )


def make_update(runner: EngineRunner, receive: Receive, receive_chunk: ReceiveChunk = refuse_chunks) -> WeightsUpdate:
    """Weights of a handle are copied to the engine's device when they come, beside what it generates: the pause of a
    commit is a copy within the device."""
    device = runner.engine.model.device
    beside = Beside(device)

    def receive_there(handle: WeightsHandle) -> Tensors:
        named = receive(handle)
        with beside():
            return {name: tensor.to(device) for name, tensor in named.items()}

    def fingerprint_of(tensors: Tensors) -> str:
        with beside():
            return fingerprint(tensors)

    return WeightsUpdate(runner, receive_there, fingerprint_of, receive_chunk)


@contextmanager
def application(
    runner: EngineRunner,
    config: Config,
    directory: Path,
    *,
    identity: Identity,
    model_name: str,
    scratch: Path,
    neighbours: Callable[[], Iterable[Path]] = tuple,
    claim: Claim | None = None,
) -> Iterator[App]:
    """Our own paths, SGLang's and OpenAI's in front of one engine. At the end it leaves the groups it was joined to.
    `scratch`: for weights that come from another machine. `neighbours`: where all of the run on this one have them."""
    tokenizer, expected = ChatTokenizer.load(directory), layout(runner.engine.parameters())
    device, max_bytes = runner.engine.model.device, max_chunk_bytes(expected)
    groups = Groups(device=device, max_bytes=max_bytes)

    def receive_chunk(chunk: Chunk) -> Tensors:
        if isinstance(chunk, GroupTensors):
            return groups.receive(chunk)
        return take(chunk, device=device, max_bytes=max_bytes)

    key = config.rollout.control_key
    receive = Receiver(expected, machine=boot_id(), directory=scratch, neighbours=neighbours, key=key)
    update = make_update(runner, receive, receive_chunk)
    sglang = SGLang(
        runner,
        update,
        groups,
        describe=lambda path, version: describe(path, expected, policy_version=version),
        model_path=str(directory),
        model_name=model_name,
    )
    app = create_app(
        runner,
        identity=identity,
        update=update,
        tokenizer=tokenizer,
        keys=Keys.of(config.rollout),
        claim=claim,
        foreign=[OpenAI(runner, tokenizer, model_name=model_name), sglang],
    )
    gc.collect()
    gc.freeze()  # what is there now stays: no collection need look through the model's objects while answers are made
    try:
        yield app
    finally:
        sglang.close()
