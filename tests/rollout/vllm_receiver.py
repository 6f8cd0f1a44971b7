"""vLLM's own receiving end, without a device: its routes, its worker's brackets, its transfer engine and its layerwise
reload around a small model. Gloo is in the place of NCCL and a mapped file in that of a device's memory, and there are
no streams. It runs in `.venv-vllm`, and prints its port."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import uvicorn
from fastapi import FastAPI
from torch import Tensor, distributed
from torch.distributed import PrefixStore, TCPStore, distributed_c10d
from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngineFactory, nccl_common, packed_tensor
from vllm.entrypoints.rl.online.api_router import router
from vllm.model_executor.model_loader.reload import record_metadata_for_reloading
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.worker import gpu_worker


class GlooCommunicator:
    """A rank that joins with an id, which says where, and then adds up one number, as vLLM's communicator does."""

    def __init__(self, unique_id: bytes, rank: int, world_size: int, device: object) -> None:
        host, port, name = unique_id.rstrip(b"\0").decode().split()
        store = PrefixStore(name, TCPStore(host, int(port), world_size, is_master=False))
        group_name = distributed_c10d.GroupName(name)
        self._group: Any
        self._group, _ = distributed_c10d._new_process_group_helper(
            world_size, rank, [], "gloo", store, group_name=group_name, timeout=timedelta(seconds=60)
        )
        distributed_c10d._world.pg_group_ranks[self._group] = {each: each for each in range(world_size)}
        self._group.allreduce([torch.zeros(1)]).wait()

    def broadcast(self, tensor: Tensor, src: int, stream: object = None) -> None:
        options = distributed.BroadcastOptions()
        options.rootRank = src
        self._group.broadcast([tensor], options).wait()

    def destroy(self) -> None:
        distributed.destroy_process_group(self._group)


class Model(torch.nn.Module):
    """A model of layers with one weight each."""

    def __init__(self, form: dict[str, tuple[list[int], str]]) -> None:
        super().__init__()
        for name, (shape, dtype) in form.items():
            *path, last = name.split(".")
            layer: torch.nn.Module = self
            for each in path:
                if not hasattr(layer, each):
                    layer.add_module(each, torch.nn.Module())
                layer = getattr(layer, each)
            layer.register_parameter(last, torch.nn.Parameter(torch.zeros(shape, dtype=getattr(torch, dtype)), False))

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        own = dict(self.named_parameters())
        for name, weight in weights:
            getattr(own[name], "weight_loader", default_weight_loader)(own[name], weight)


class Engine:
    """vLLM's asynchronous engine, as far as its routes need it."""

    init_weight_transfer_engine = AsyncLLM.init_weight_transfer_engine
    shutdown_weight_transfer_engine = AsyncLLM.shutdown_weight_transfer_engine
    start_weight_update = AsyncLLM.start_weight_update
    update_weights = AsyncLLM.update_weights
    finish_weight_update = AsyncLLM.finish_weight_update

    def __init__(self, worker: Any) -> None:
        self.worker, self.label, self.is_paused = worker, "0", False
        self.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(world_size_across_dp=1))

    async def collective_rpc(self, method: str, kwargs: dict[str, Any] | None = None) -> None:
        await asyncio.to_thread(getattr(self.worker, method), **(kwargs or {}))

    async def update_weight_version(self, new_version: str) -> None:
        self.label = new_version

    async def get_weight_version(self) -> str:
        return self.label

    async def pause_generation(self, **_: object) -> None:
        self.is_paused = True

    async def resume_generation(self) -> None:
        self.is_paused = False


def mapped(*arguments: Any) -> Tensor:
    """Return the memory of a handle, which is the path of a file: torch's `rebuild_cuda_tensor` has these arguments."""
    path, num_bytes = arguments[7:9]
    return torch.from_file(path.decode(), shared=True, size=num_bytes, dtype=torch.uint8)


def worker_of(model: Model, backend: str) -> Any:
    """Return vLLM's worker without its device and its runner."""
    parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
    config: Any = SimpleNamespace(parallel_config=parallel, model_config=SimpleNamespace(dtype=torch.bfloat16))
    worker: Any = gpu_worker.Worker.__new__(gpu_worker.Worker)
    worker.vllm_config, worker.rank = config, 0
    worker.model_runner = SimpleNamespace(reset_lora_state=lambda: None)
    worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=backend), config, torch.device("cpu", 0), model
    )
    worker._weight_update_active = worker._weight_update_is_draft = False
    return worker


def main() -> None:
    nccl_common.uid_init_process_group = GlooCommunicator
    gpu_worker.set_current_vllm_config = lambda _: nullcontext()
    stream = SimpleNamespace(synchronize=lambda: None)
    packed_tensor._get_streams = lambda _, num_buffers: (stream,) * num_buffers
    torch.cuda.stream = lambda _: nullcontext()
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.synchronize = lambda: None
    torch.multiprocessing.reductions.rebuild_cuda_tensor = mapped
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid="GPU-of-both")
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    backend, form = sys.argv[1:]
    model = Model(json.loads(form))
    record_metadata_for_reloading(model)
    engine, app = Engine(worker_of(model, backend)), FastAPI()
    app.include_router(router)
    app.state.engine_client = engine

    @app.get("/health")
    def health() -> dict[str, str]:
        return {}

    @app.get("/held")
    def held() -> dict[str, Any]:
        """What the test looks at."""
        named = {name: weight.double().flatten().tolist() for name, weight in model.named_parameters()}
        return {"weights": named, "label": engine.label, "paused": engine.is_paused}

    with socket.create_server(("127.0.0.1", 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="warning")).run([listener])


main()
