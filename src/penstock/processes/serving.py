"""What a rollout server consists of, whoever starts it: a run, or somebody by hand."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from penstock.compat.openai import OpenAI
from penstock.compat.sglang import SGLang
from penstock.config import Config
from penstock.model.chat import ChatTokenizer
from penstock.model.load import load_policy, resolve_device, resolve_dtype
from penstock.rollout.app import App
from penstock.rollout.engine import SlotEngine
from penstock.rollout.keys import Keys
from penstock.rollout.runner import EngineRunner
from penstock.rollout.server import Identity, create_app
from penstock.rollout.update import WeightsUpdate
from penstock.types import NO_VERSION
from penstock.weights.shared_memory import describe, fingerprint, layout, receive


def make_engine(config: Config, directory: Path, *, weights: bool) -> SlotEngine:
    """The engine around the model in `directory`; with its `weights` it serves them as policy_version 0."""
    device = resolve_device(config.model.device)
    dtype = resolve_dtype(config.model.dtype, device)
    return SlotEngine(
        load_policy(directory, dtype=dtype, device=device, weights=weights),
        num_slots=config.rollout.slots,
        max_context=config.model.max_context,
        policy_version=0 if weights else NO_VERSION,
    )


def make_app(runner: EngineRunner, config: Config, directory: Path, *, identity: Identity, model_name: str) -> App:
    """Our own paths, SGLang's and OpenAI's in front of one engine."""
    tokenizer, expected = ChatTokenizer.load(directory), layout(runner.engine.parameters())

    update = WeightsUpdate(runner, lambda handle: receive(handle, expected), fingerprint)
    sglang = SGLang(
        runner,
        update,
        describe=lambda path, version: describe(path, expected, policy_version=version),
        model_path=str(directory),
        model_name=model_name,
    )
    app = create_app(
        runner,
        identity=identity,
        update=update,
        tokenizer=tokenizer,
        keys=Keys(generation=config.rollout.api_key, admin=config.rollout.admin_api_key),
        foreign=[OpenAI(runner, tokenizer, model_name=model_name), sglang],
    )
    gc.collect()
    gc.freeze()  # what is there now stays: no collection need look through the model's objects while answers are made
    return app


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; OSError if the port is taken."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def url_of(host: str, listener: socket.socket) -> str:
    """Where clients find it."""
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


class HttpServer(uvicorn.Server):
    """Leaves signals to the process."""

    def __init__(self, app: App) -> None:
        super().__init__(
            uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1)
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
