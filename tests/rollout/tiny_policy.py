"""A random tiny policy, an engine driven to the end, and a rollout server on a real socket."""

from __future__ import annotations

import asyncio
import functools
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
import uvicorn
from transformers import DynamicCache, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from penstock.rollout import cuda_graphs, shared_blocks, slot_engine
from penstock.rollout.app import ApiKeys
from penstock.rollout.http import Surface
from penstock.rollout.request import GenerateRequest, SamplingParams
from penstock.rollout.runner import EngineRunner
from penstock.rollout.server import Identity, create_app
from penstock.rollout.slot_engine import Finished, SlotEngine
from penstock.rollout.slots import LayerSlots
from penstock.rollout.text import Tokenizer
from penstock.rollout.update import WeightsUpdate
from penstock.samples import Segment
from penstock.types import WeightsHandle
from penstock.weights.shared_memory import fingerprint

VOCAB_SIZE = 64
MAX_CONTEXT = 96
EOS = 1
HELD_AFTER = 8
CPU = torch.device("cpu")

_initializing = threading.Lock()
"""Servers receive weights in threads, and the random state is everybody's."""


def make_model(seed: int = 0) -> PreTrainedModel:
    """Small, with wide initial weights so that its distributions are far from uniform."""
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=48,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_CONTEXT,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
    )
    with _initializing:
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(config).eval()


def make_engine(
    seed: int = 0,
    *,
    num_slots: int = 4,
    policy_version: int = 0,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
    num_tokens: int | None = None,
    num_cached: int | None = None,
) -> SlotEngine:
    return SlotEngine(
        make_model(seed).to(device, dtype),
        num_slots=num_slots,
        max_context=MAX_CONTEXT,
        policy_version=policy_version,
        num_tokens=num_tokens,
        num_cached=num_cached,
    )


def plain_flash(query: torch.Tensor, blocks: LayerSlots, reach: cuda_graphs.Reach, scaling: float) -> torch.Tensor:
    """What FlashAttention's kernel computes, sequence by sequence."""
    out = torch.zeros_like(query)
    for row, (start, end) in enumerate(pairwise(reach.query_starts.tolist())):
        length, num_queries = int(reach.key_lengths[row]), end - start
        if not num_queries or not length:
            continue
        keys, values = (each[reach.tables[row].long()].transpose(0, 1).flatten(1, 2)[:, :length] for each in blocks)
        seen = torch.ones(num_queries, length, dtype=torch.bool).tril(length - num_queries)
        found = F.scaled_dot_product_attention(
            query[start:end].transpose(0, 1), keys, values, seen, scale=scaling, enable_gqa=True
        )
        out[start:end] = found.transpose(0, 1)
    return out


@contextmanager
def sharing_blocks(block_tokens: int) -> Iterator[None]:
    """Let engines on the CPU use the tables of an accelerator, with attention and steps in plain operations."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_engine, "has_flash", lambda model: True)
        patch.setattr(shared_blocks, "FLASH_BLOCK_TOKENS", block_tokens)
        patch.setattr(cuda_graphs, "flash", plain_flash)
        patch.setattr(cuda_graphs.CudaGraphs, "_record", cuda_graphs.CudaGraphs._compute)
        yield


def make_request(
    rid: str,
    prompt_ids: list[int],
    *,
    max_new_tokens: int | tuple[int, ...] = 8,
    seeds: tuple[int, ...] = (0,),
    params: SamplingParams | None = None,
) -> GenerateRequest:
    """A request that by default runs to its length."""
    limits = (max_new_tokens,) * len(seeds) if isinstance(max_new_tokens, int) else max_new_tokens
    params = params or SamplingParams(ignore_eos=True)
    return GenerateRequest(rid=rid, prompt_ids=prompt_ids, params=params, max_new_tokens=limits, seeds=seeds)


def generate_greedily(model: PreTrainedModel, prompt: list[int], max_new_tokens: int) -> list[int]:
    """What Transformers' own `generate` answers."""
    ids = torch.tensor([prompt])
    output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=max_new_tokens)
    return output[0, len(prompt) :].tolist()


def run(engine: SlotEngine, *requests: GenerateRequest) -> dict[str, list[Segment]]:
    """Serve all requests to the end."""
    for request in requests:
        engine.submit(request)
    finished: list[Finished] = []
    while engine.has_work:
        finished += engine.step()
    assert all(result.error is None for result in finished)
    return {result.request.rid: result.segments for result in finished}


def score(engine: SlotEngine, prompt: list[int]) -> list[float]:
    """The log-probability of every token but the first."""
    return [token.logprob for part in engine.scoring(prompt) for token in part]


def weights(seed: int) -> dict[str, torch.Tensor]:
    """The weights of `make_model(seed)`."""
    return {name: parameter.detach() for name, parameter in reference_model(seed).named_parameters()}


reference_model = functools.cache(make_model)
"""Never to be changed."""


def reference_logprobs(
    prompt: list[int], tokens: list[int], *, temperature: float = 1.0, seeds: Sequence[tuple[int, int]] = ((0, 0),)
) -> list[float]:
    """Token by token with a cache that is kept while the weights change; `seeds` are (first token, weights' seed)."""
    models = {start: reference_model(seed) for start, seed in seeds}
    cache, model, inputs, logprobs = DynamicCache(), models[0], prompt, []
    for position, token in enumerate(tokens):
        model = models.get(position, model)
        with torch.inference_mode():
            logits = model(torch.tensor([inputs]), past_key_values=cache, use_cache=True).logits[0, -1]
        logprobs.append(torch.log_softmax(logits / temperature, -1)[token].item())
        inputs = [token]
    return logprobs


def receive_seed(handle: WeightsHandle) -> Mapping[str, torch.Tensor]:
    """Stands for the weights box: the path of a handle names the seed of a random model."""
    if not handle.path.isdigit():
        raise FileNotFoundError(handle.path)
    return weights(int(handle.path))


def print_of(path: str) -> str:
    """The fingerprint a publisher would give the weights that `receive_seed` finds there."""
    return fingerprint(weights(int(path))) if path.isdigit() else "none"


def make_handle(policy_version: int, *, path: str = "1") -> WeightsHandle:
    return WeightsHandle(policy_version=policy_version, path=path, num_bytes=1, fingerprint=print_of(path))


class Held:
    """Replaces the `step` of an engine. After more than `HELD_AFTER` tokens the engine generates nothing until the test
    sets `let_go`. Requests are still admitted while no other one is active."""

    def __init__(self, engine: SlotEngine) -> None:
        self._engine, self._step = engine, engine.step
        self.let_go = threading.Event()

    def __call__(self) -> list[Finished]:
        is_free = not self._engine.num_active or self._engine.num_generated_tokens <= HELD_AFTER
        return self._step() if is_free or self.let_go.wait(0.001) else []


async def until(condition: Callable[[], object]) -> None:
    """The engine's thread announces nothing but results, so its progress is watched."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


@asynccontextmanager
async def serve(
    runner: EngineRunner,
    *,
    update: WeightsUpdate | None = None,
    keys: ApiKeys | None = None,
    tokenizer: Tokenizer | None = None,
    foreign: Sequence[Surface] = (),
) -> AsyncIterator[str]:
    """The URL of a server around `runner`."""
    app = create_app(
        runner,
        identity=Identity(run_id="run", nonce="abc"),
        update=update or WeightsUpdate(runner, receive_seed, fingerprint),
        tokenizer=tokenizer,
        keys=keys,
        foreign=foreign,
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving
