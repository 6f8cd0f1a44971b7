"""A stand-in for vLLM 0.32 with its own weight transfer, which checks every message and its order.

It receives over gloo in the place of NCCL, and from mapped files in the place of a device's memory. Each tensor is a
layer, which cannot compute within a bracket until it has its new weights.
"""

from __future__ import annotations

import asyncio
import pickle
from base64 import b64decode
from collections.abc import Callable, Mapping
from datetime import timedelta
from itertools import count
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from safetensors.torch import load_file
from torch import Tensor, distributed
from torch._C._distributed_c10d import PrefixStore, TCPStore

from penstock.weights import lent_memory
from penstock.weights.collective import DTYPES
from penstock.weights.lent_memory import LentMemory

ID_BYTES, DEVICE = 128, "GPU-of-both"
WAIT_S = 20.0
INIT_KEYS = {
    *("nccl_unique_id_b64", "rank_offset", "world_size"),
    *("packed", "packed_buffer_size_bytes", "packed_num_buffers"),
}


def gloo_id(store: TCPStore, group_name: str, *, is_over: Callable[[], bool]) -> bytes:
    """Return an id from which `TransferringVllm` knows where to join a gloo group: `communicator_id` in tests."""
    return f"{store.host} {store.port} {group_name}".encode().ljust(ID_BYTES, b"\0")


def lend_files(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Let the sender lend mapped files and not memory of a device. The handle is then the path of the file."""
    numbers, paths = count(), dict[int, Path]()

    def new(memory: LentMemory, num_bytes: int) -> Tensor:
        path = directory / f"lent-{next(numbers)}"
        buffer = torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
        paths[buffer.data_ptr()] = path
        return buffer

    def exported(buffer: Tensor) -> dict[str, tuple[Any, ...]]:
        shape = (Tensor, buffer.size(), buffer.stride(), 0, torch.storage.TypedStorage, buffer.dtype)
        handle = (0, str(paths[buffer.data_ptr()]).encode(), buffer.nbytes, 0, False, b"counters", 0, b"event", True)
        return {DEVICE: shape + handle}

    monkeypatch.setattr(LentMemory, "_new", new)
    monkeypatch.setattr(lent_memory, "exported", exported)


def opened(payload: str) -> Tensor:
    """Return the buffer of such a handle."""
    handles = pickle.loads(b64decode(payload, validate=True))
    assert handles.keys() == {DEVICE}
    *_, path, num_bytes, start, _, _, _, _, _ = handles[DEVICE]
    assert len(handles[DEVICE]) == 15 and start == 0
    return torch.from_file(path.decode(), shared=True, size=num_bytes, dtype=torch.uint8)


class Worker:
    """A rank that joins over gloo, and then adds up one number, as vLLM's communicator does. Unlike `Group` it may be
    in the process of the sender: it registers no name."""

    def __init__(self, host: str, port: int, group_name: str, rank: int, world_size: int) -> None:
        limit = timedelta(seconds=WAIT_S)
        store: Any = TCPStore(host, port, world_size, is_master=False, timeout=limit)
        for prefix in (group_name, f"{group_name}/", "cpu/"):
            store = PrefixStore(prefix, store)
        self._group: Any = distributed.ProcessGroupGloo(store, rank, world_size, limit)
        self._group.allreduce([torch.zeros(1)]).wait()

    def take(self, tensor: Tensor) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        self._group.broadcast([tensor], options).wait()


class TransferringVllm:
    """The routes of one server. A message that vLLM would refuse, or that is not what the model needs, is answered with
    an error and is in `refused`."""

    def __init__(self, weights: Mapping[str, Tensor], *, num_workers: int = 1, backend: str | None = "nccl") -> None:
        self.weights = dict(weights)
        self.label, self.backend = "0", backend
        self.calls: list[str] = []
        """Paths of the calls that change something, in their order."""
        self.refused: list[str] = []
        self.on_call: Callable[[str], object] = lambda path: None
        self.unanswered: set[str] = set()
        """Paths of calls that take effect, although the client gets no answer."""
        self.is_paused = self.is_dead = False
        self._num_workers = num_workers
        self._workers: list[Worker] = []
        self._buffer_bytes = 0
        self._is_ready, self._handle = False, ""
        """With `ipc`: whether it is initialized, and the handle of this transfer's buffer."""
        self._session: dict[str, Tensor] | None = None
        """What came in the open bracket. vLLM forgets a bracket in which a bucket fails, and leaves the layers as they
        are."""
        self.bare: set[str] = set()
        """Layers that cannot compute."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")

    def check_at_rest(self) -> None:
        assert not (self.is_paused or self._workers or self.bare or self._session is not None), self.calls

    def leave(self) -> None:
        self._workers = []

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.can_read_body else None
        if request.method == "POST" and request.path != "/inference/v1/generate":
            self.calls.append(request.path)
        try:
            self.on_call(request.path)
            if self.is_dead:
                assert request.transport is not None
                request.transport.close()
                return web.Response()
            done = await self._act(request, body)
            if request.path in self.unanswered:
                self.unanswered.remove(request.path)
                assert request.transport is not None
                request.transport.close()
            return web.json_response(done)
        except (AssertionError, RuntimeError) as error:
            self.refused.append(f"{request.path}: {error}")
            return web.json_response({"error": {"message": str(error)}}, status=500)

    async def _act(self, request: web.Request, body: Any) -> Any:
        match request.path:
            case "/health":
                return {}
            case "/weight_info":
                return {"weight_version": self.label}
            case "/server_info":
                transfer = None if self.backend is None else {"backend": self.backend}
                return {"vllm_config": {"weight_transfer_config": transfer}}
            case "/get_world_size":
                return {"world_size": self._num_workers}
            case "/update_weight_version":
                self.label = body["new_version"]
            case "/pause":
                self.is_paused = True
            case "/resume":
                assert not self.bare, "requests would be computed with layers without weights"
                self.is_paused = False
            case "/collective_rpc":
                if body["method"] == "reload_weights":
                    self.weights = load_file(Path(body["kwargs"]["weights_path"]) / "model.safetensors")
                    self.bare = set()
            case "/init_weight_transfer_engine":
                await self._init(body)
            case "/start_weight_update":
                assert body is None and self._session is None, "a weight update is already active"
                assert self.is_paused, "layers lose their weights while requests run"
                self._session, self.bare = {}, set(self.weights)
            case "/update_weights":
                await self._update(body)
            case "/finish_weight_update":
                self._finish(body)
            case "/shutdown_weight_transfer_engine":
                assert self._session is None, "cannot release a trainer connection during a weight update"
                self.leave()
                self._is_ready = False
            case _:
                raise web.HTTPNotFound
        return {}

    async def _init(self, body: Any) -> None:
        assert body.keys() == {"init_info"}
        info = body["init_info"]
        if self.backend == "ipc":
            assert info == {"packed": True}
            self._is_ready, self._handle = True, ""
            return
        assert info.keys() == INIT_KEYS
        unique_id = b64decode(info["nccl_unique_id_b64"], validate=True)
        assert len(unique_id) == ID_BYTES
        assert (info["rank_offset"], info["world_size"], info["packed"]) == (1, 1 + self._num_workers, True)
        assert info["packed_num_buffers"] == 1
        self._buffer_bytes = info["packed_buffer_size_bytes"]
        host, port, name = unique_id.rstrip(b"\0").decode().split()
        ranks, store = range(info["rank_offset"], info["world_size"]), (host, int(port), name)
        joining = (asyncio.to_thread(Worker, *store, rank, info["world_size"]) for rank in ranks)
        self._workers = await asyncio.gather(*joining)

    async def _update(self, body: Any) -> None:
        assert self._session is not None, "start_weight_update must be called before update_weights"
        try:
            assert body.keys() == {"update_info"}
            info = dict(body["update_info"])
            payload, given = info.pop("ipc_handles_pickled", None), info.pop("tensor_sizes", None)
            assert info.keys() == {"names", "dtype_names", "shapes"}
            names, dtypes, shapes = info.values()
            assert len(names) == len(dtypes) == len(shapes) and not set(names) & self._session.keys()
            for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
                assert (DTYPES[dtype], torch.Size(shape)) == (self.weights[name].dtype, self.weights[name].shape), name
            sizes = [DTYPES[dtype].itemsize * prod(shape) for dtype, shape in zip(dtypes, shapes, strict=True)]
            packed = self._copied(payload, given, sizes) if self.backend == "ipc" else await self._broadcast(sizes)
            for name, dtype, shape, part in zip(names, dtypes, shapes, packed.split(sizes), strict=True):
                self._session[name] = part.view(DTYPES[dtype]).view(shape)
                self.weights[name] = self._session[name]
                self.bare.discard(name)
        except BaseException:
            self._session = None
            raise

    async def _broadcast(self, sizes: list[int]) -> Tensor:
        assert sum(sizes) <= self._buffer_bytes, "vLLM would expect several broadcasts"
        assert self._workers, "NCCL weight transfer not initialized"
        packed = [torch.empty(sum(sizes), dtype=torch.uint8) for _ in self._workers]
        pairs = zip(self._workers, packed, strict=True)
        await asyncio.gather(*(asyncio.to_thread(worker.take, each) for worker, each in pairs))
        assert all(torch.equal(each, packed[0]) for each in packed)
        return packed[0]

    def _copied(self, payload: str, given: list[int], sizes: list[int]) -> Tensor:
        assert self._is_ready and given == sizes
        assert self._handle in ("", payload), "it counts one user of the buffer, for all buckets"
        self._handle = payload
        return opened(payload)[: sum(sizes)].clone()

    def _finish(self, body: Any) -> None:
        assert self._session is not None, "finish_weight_update called without a matching start_weight_update"
        received, self._session, self.bare = self._session, None, set()
        if body is not None:
            assert body.keys() == {"weight_version"} and received.keys() == self.weights.keys()
            self.label = body["weight_version"]

    async def close(self) -> None:
        self.leave()
        await self.server.close()
