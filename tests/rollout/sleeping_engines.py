"""Stand-ins for vLLM and SGLang that release and resume their memory. Each refuses what the real engine refuses, and
dies where the real engine dies. Its weights are the text of a file."""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from aiohttp import web
from aiohttp.test_utils import TestServer

from penstock.rollout.client import ServerClient
from penstock.rollout.servers import Servers
from penstock.samples import Segment
from penstock.types import EpisodeId, Sampling, SegmentGrant, WeightsHandle

DUMMY, GARBAGE = "dummy", "garbage"
"""What weights are before the first update, and where memory was mapped without being filled."""


class Running:
    """A request that the engine has accepted."""

    def __init__(self, max_tokens: int, adapter: str | None) -> None:
        self.max_tokens, self.adapter = max_tokens, adapter
        self.sampled_by: list[tuple[str, str]] = []
        """(label, contents) of the weights that sampled each token."""
        self.ended = asyncio.get_running_loop().create_future()


class SleepingEngine(ABC):
    """The memory, the requests and the routes that both engines have. `step` samples a token for every request."""

    memory: tuple[str, ...]
    option: str
    """What the engine has to be started with for its memory to be released."""

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.weights, self.label = DUMMY, "default"
        self.kept: str | None = None
        """The copy of released weights in main memory."""
        self.adapters: dict[str, str] = {}
        """Contents by name."""
        self.released: set[str] = set()
        self.paused = False
        self.running: list[Running] = []
        self.death = ""
        """Why the engine is dead."""
        self.metrics = ""
        self.calls: list[str] = []
        """Every call that changes something."""
        self.failing: Callable[[str], bool] = lambda path: False
        """Whether a call is answered 500 before anything happens."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")

    def restart(self) -> None:
        """Another process listens at the same port, with dummy weights."""
        self.end_all()
        self.weights, self.label, self.released, self.paused, self.death = DUMMY, "default", set(), False, ""
        self.kept, self.adapters = None, {}

    def step(self) -> None:
        """Sample a token for every request, as the real engine does by itself."""
        if self.paused or not self.running or self.death:
            return
        if self.released:
            return self.die("a request was computed in released memory")
        for request in list(self.running):
            sampler = (self.label, self.weights)
            if request.adapter is not None:
                sampler = (request.adapter, f"{self.adapters[request.adapter]} on {self.weights}")
            request.sampled_by.append(sampler)
            if len(request.sampled_by) == request.max_tokens:
                self.end(request, "length")

    def end(self, request: Running, reason: str) -> None:
        self.running.remove(request)
        request.ended.set_result(reason)

    def end_all(self) -> None:
        for request in list(self.running):
            self.end(request, "abort")

    def die(self, reason: str) -> None:
        self.death = reason
        self.end_all()

    def load(self, path: str) -> bool:
        """Read weights; on failure the memory holds a part of them."""
        if "weights" in self.released:
            self.die("weights were written to released memory")
            return False
        try:
            self.weights = (Path(path) / "model.safetensors").read_text()
        except OSError:
            self.weights = GARBAGE
            return False
        return True

    def release(self, parts: Iterable[str], *, keeps_weights: bool) -> None:
        self.released |= set(parts)
        if "weights" in parts:
            self.kept = self.weights if keeps_weights else None

    def map(self, part: str) -> None:
        self.released.discard(part)
        if part == "weights":
            self.weights = GARBAGE if self.kept is None else self.kept

    def load_adapter(self, body: dict[str, Any]) -> Any:
        """Read an adapter, into the memory that the engine has beside its weights."""
        name, path = body["lora_name"], Path(body["lora_path"]) / "adapter_model.safetensors"
        assert body.keys() == {"lora_name", "lora_path"} and name not in self.adapters
        if "weights" in self.released:
            self.die("adapters were written to released memory")
        elif not path.exists():
            raise web.HTTPBadRequest
        else:
            self.adapters[name] = path.read_text()
        return {}

    def unload_adapter(self, body: dict[str, Any]) -> Any:
        if any(request.adapter == body["lora_name"] for request in self.running):
            self.die("an adapter was unloaded while a request used it")
        del self.adapters[body["lora_name"]]
        return {}

    def models(self) -> Any:
        return {"data": [{"id": each} for each in ("given", *self.adapters)]}

    async def generate(self, max_tokens: int, adapter: str | None = None) -> tuple[list[tuple[str, str]], str]:
        if adapter is not None and adapter not in self.adapters:
            raise web.HTTPNotFound
        request = Running(max_tokens, adapter)
        self.running.append(request)
        reason: str = await request.ended
        return request.sampled_by, reason

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if self.death or self.failing(request.path):
            return web.json_response({"error": self.death or "bad times"}, status=500)
        body = await request.json() if request.can_read_body else {}
        if request.path == "/metrics":
            return web.Response(text=self.metrics)
        found = await self.answer(request, body)
        if self.death:
            return web.json_response({"error": self.death}, status=500)
        return web.json_response({"error": "no such route"}, status=404) if found is None else web.json_response(found)

    def note(self, request: web.Request, body: dict[str, Any], *names: str) -> None:
        shown = " ".join(str(body[name]) for name in names if name in body)
        self.calls.append(f"{request.path_qs} {shown}".strip())

    @abstractmethod
    async def answer(self, request: web.Request, body: dict[str, Any]) -> Any:
        """Return the reply to a request; None if there is no such route."""


class SleepingVllm(SleepingEngine):
    """vLLM 0.32: `entrypoints/serve/dev`, `v1/engine/core.py` and `v1/executor/abstract.py`."""

    memory = ("weights", "kv_cache")
    option = "--enable-sleep-mode"
    device = "cuda"

    async def answer(self, request: web.Request, body: dict[str, Any]) -> Any:
        query = request.query
        match request.path:
            case "/health":
                return {}
            case "/weight_info":
                return {"weight_version": self.label}
            case "/v1/models":
                return self.models()
            case "/server_info":
                settings = {"enable_sleep_mode": self.enabled}
                return {"vllm_config": {"model_config": settings, "device_config": {"device": self.device}}}
            case "/inference/v1/generate":
                return await self._generate(body)
        self.note(request, body, "method", "new_version", "lora_name")
        match request.path:
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/pause":
                self._pause(query.get("mode", "abort"))
            case "/resume":
                self.paused = False
            case "/sleep":
                self._pause(query.get("mode", "abort"))
                if "weights" not in self.released:  # without the option, nothing is freed, and it says nothing
                    assert query["level"] in ("1", "2")
                    self.release(self.memory, keeps_weights=query["level"] == "1")
            case "/wake_up":
                tags = query.getall("tags")
                if all(tag in self.released for tag in tags):
                    for tag in tags:
                        self.map(tag)
                if not self.released:
                    self.paused = False
                return {"status": "sleeping" if self.released else "awake", "tags": tags}
            case "/collective_rpc":
                if body["method"] == "reload_weights" and not self.load(body["kwargs"]["weights_path"]):
                    raise web.HTTPInternalServerError
            case "/v1/load_lora_adapter":
                return self.load_adapter(body)
            case "/v1/unload_lora_adapter":
                return self.unload_adapter(body)
            case _:
                return None
        return {}

    def _pause(self, mode: str) -> None:
        self.paused = True
        if mode == "abort":  # also requests that wait
            self.end_all()

    async def _generate(self, body: dict[str, Any]) -> Any:
        if not body:
            raise web.HTTPBadRequest
        tokens, reason = await self.generate(body["sampling_params"]["max_tokens"], body.get("model"))
        versions = [
            {"version": label, "start": position, "end": position + 1} for position, (label, _) in enumerate(tokens)
        ]
        choice = {"index": 0, "finish_reason": reason, "token_ids": [5] * len(tokens), "weight_versions": versions}
        return {"choices": [choice | {"logprobs": {"content": [{"logprob": -1.0}] * len(tokens)}}]}


class SleepingSGLang(SleepingEngine):
    """SGLang 0.5.23: `managers/tokenizer_manager.py` and `managers/scheduler_components/weight_updater.py`."""

    memory = ("kv_cache", "weights", "cuda_graph")
    option = "--enable-memory-saver"

    def __init__(self, *, enabled: bool = True) -> None:
        super().__init__(enabled=enabled)
        self.backs_up = False
        """Whether it was started with --enable-weights-cpu-backup."""
        self._continued = asyncio.Event()
        self._continued.set()

    def restart(self) -> None:
        super().restart()
        self._continued.set()

    async def answer(self, request: web.Request, body: dict[str, Any]) -> Any:
        match request.path:
            case "/model_info":
                return {"weight_version": self.label}
            case "/v1/models":
                return self.models()
            case "/server_info":
                return {"enable_memory_saver": self.enabled}
            case "/generate":
                return await self._generate(body)
        self.note(request, body, "mode", "tags", "new_version", "weight_version", "flush_cache", "lora_name")
        match request.path:
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/pause_generation":
                self._continued.clear()
                self.paused = body["mode"] != "abort"
                if body["mode"] == "abort":
                    self.end_all()
            case "/continue_generation":
                self.paused = False
                self._continued.set()
            case "/flush_cache":
                if self.running:
                    raise web.HTTPBadRequest
            case "/release_memory_occupation":
                self._release(body.get("tags") or self.memory)
            case "/resume_memory_occupation":
                self._resume(body.get("tags") or self.memory)
            case "/update_weights_from_disk":
                return self._update(body)
            case "/load_lora_adapter":
                return self.load_adapter(body)
            case "/unload_lora_adapter":
                return self.unload_adapter(body)
            case _:
                return None
        return {}

    def _release(self, tags: tuple[str, ...]) -> None:
        if self.running:
            self.die("release_memory_occupation should be called only when server is idle")
        elif self.released & set(tags):
            self.die("cannot pause an allocation that is not active")
        else:
            self.release(tags, keeps_weights=self.backs_up)

    def _resume(self, tags: tuple[str, ...]) -> None:
        if not set(tags) <= self.released:
            self.die("KeyError: the tag is not among the released ones")
        for tag in tags:
            self.map(tag)

    def _update(self, body: dict[str, Any]) -> Any:
        before = self.weights
        if not self.load(body["model_path"]):
            self.weights = before  # it rolls back, to what was there
            raise web.HTTPBadRequest(text='{"success": false, "message": "no such file"}')
        self.label = body["weight_version"]
        return {"success": True, "message": "loaded"}

    async def _generate(self, body: dict[str, Any]) -> Any:
        await self._continued.wait()
        limits = [params["max_new_tokens"] for params in body["sampling_params"]]
        adapters = body.get("lora_path") or [None] * len(limits)
        answers = await asyncio.gather(*(self.generate(*each) for each in zip(limits, adapters, strict=True)))
        return [self._reply(tokens, reason) for tokens, reason in answers]

    def _reply(self, tokens: list[tuple[str, str]], reason: str) -> dict[str, Any]:
        versions = [
            {"version": label, "start": position, "end": position + 1} for position, (label, _) in enumerate(tokens)
        ]
        ended = {"type": reason, "length": len(tokens)} if reason == "length" else {"type": reason, "message": "ended"}
        meta = {"id": "0", "finish_reason": ended, "prompt_tokens": 1, "completion_tokens": len(tokens)}
        scored = [[-1.0, 5, None] for _ in tokens]
        return {
            "text": "",
            "output_ids": [5] * len(tokens),
            "meta_info": meta | {"output_token_logprobs": scored, "weight_versions": versions},
        }


ENGINES: dict[str, type[SleepingEngine]] = {"vllm": SleepingVllm, "sglang": SleepingSGLang}


E = TypeVar("E", bound=SleepingEngine)


@asynccontextmanager
async def started(engine: E) -> AsyncIterator[E]:
    """Serve until the end of the block."""
    await engine.server.start_server()
    yield engine
    engine.end_all()
    await engine.server.close()


NOTHING = Segment(token_ids=[], logprobs=[], spans=[], finish_reason="abort")


def lose(handle: WeightsHandle) -> None:
    Path(handle.path).unlink()


def grant(episode: int, max_tokens: int) -> SegmentGrant:
    return SegmentGrant(episode=EpisodeId("tag", 0, episode, 0), max_tokens=max_tokens)


async def ask(target: ServerClient | Servers, episode: int = 0, max_tokens: int = 4) -> Segment:
    (segment,) = await target.generate([3], [grant(episode, max_tokens)], Sampling(), [1])
    return segment


async def answered(engine: SleepingEngine, call: asyncio.Task[Segment]) -> Segment:
    async with asyncio.timeout(60):
        while not call.done():
            engine.step()
            await asyncio.sleep(0)
    return call.result()


def rarely(chance: random.Random) -> Callable[[str], bool]:
    """One call in ten fails."""
    return lambda path: chance.random() < 0.1
