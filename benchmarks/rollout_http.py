"""The rollout server against the slot engine in process and against vLLM, and how full thinking environments keep it.

The server is `penstock serve` in a process of its own; the engine alone is the same engine in this process; both with
one torch thread, same policy, prompts, lengths, sampling. They take turns, a round at a time; a ratio is the median
over the rounds, each against the engine alone right before and right after it, since other load on the machine comes
and goes; time is wall time, since two processes are compared with one. vLLM (`--vllm PYTHON`, the interpreter of an
environment that has it) serves the same model with one thread, compiled as it is by default, over its token-in,
token-out path. Thinking environments ask for one answer after another, with exponential pauses in between; the share of
busy slots is read from the server itself.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import nan
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory, TemporaryFile
from urllib.request import urlopen

import aiohttp
import numpy as np
import torch
from engine import make_prompts, run_slots
from report import Benchmark, arguments, publish

from penstock.config import TinyModelConfig
from penstock.model.load_policy import load_policy
from penstock.model.tiny import write_tiny_model
from penstock.rollout.bodies import GenerateBody, SamplingBody, encode
from penstock.rollout.slot_engine import SlotEngine

VLLM = ("vs_vllm_cpu", "vllm_tokens_per_s")
BENCHMARK = Benchmark(
    name="rollout_http",
    measures=["rollout", "model"],
    figures=["http_vs_inprocess", "http_tokens_per_s", *VLLM, "fill_with_think_time"],
)
MAX_CONTEXT = 512
VLLM_READY_S = 400.0
"""It compiles."""
CLIENTS, TOKENS = 256, 64
SLOTS, ENVIRONMENTS, THINK_S, THINK_TOKENS = 64, 256, 0.2, 64
WATCH_S, SETTLE_S, POLL_S = 20.0, 3.0, 0.05


@contextmanager
def server(model: Path, slots: int) -> Iterator[str]:
    """The URL of a server of its own."""
    words = ["--port", "0", f"rollout.slots={slots}", f"model.max_context={MAX_CONTEXT}", "rollout.torch_threads=1"]
    command = [sys.executable, "-m", "penstock.cli.main", "serve", "--model", str(model), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split(" at ")[1].split()[0]
        finally:
            process.terminate()


@contextmanager
def vllm_server(python: str, model: Path) -> Iterator[str]:
    """The URL of vLLM's own server, once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = ["--model", str(model), "--served-model-name", "m", "--port", str(port), "--dtype", "float32"]
    words += ["--max-model-len", str(MAX_CONTEXT), "--max-num-seqs", str(CLIENTS), "--enable-scale-out"]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", *words, "--uvicorn-log-level", "warning"]
    wanted = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    with TemporaryFile() as log, subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | wanted) as process:
        url, limit = f"http://127.0.0.1:{port}", time.monotonic() + VLLM_READY_S
        try:
            while not answers(f"{url}/health"):
                if process.poll() is not None or time.monotonic() > limit:
                    log.seek(0)
                    sys.exit(f"vLLM did not start:\n{log.read()[-2000:].decode(errors='replace')}")
                time.sleep(1.0)
            yield url
        finally:
            process.terminate()


def answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def body(prompt: Sequence[int], tokens: int, seed: int) -> bytes:
    sampling = SamplingBody(max_new_tokens=tokens, ignore_eos=True, sampling_seed=seed)
    return encode(
        GenerateBody(input_ids=list(prompt), sampling_params=sampling, return_logprob=True, return_text=False)
    )


def vllm_body(prompt: Sequence[int], tokens: int) -> bytes:
    """Without a seed of its own: on a CPU that ends vLLM's engine ("CPU Generator does not use offset")."""
    params = {"max_tokens": tokens, "ignore_eos": True, "logprobs": 0, "detokenize": False}
    return encode({"token_ids": list(prompt), "sampling_params": params})


JSON = {"Content-Type": "application/json"}


async def ask(session: aiohttp.ClientSession, given: bytes, path: str = "/generate") -> None:
    async with session.post(path, data=given, headers=JSON) as response:
        assert response.status == 200, await response.text()
        await response.read()


async def all_at_once(url: str, bodies: Sequence[bytes], path: str = "/generate") -> float:
    """Seconds until every client has its answer."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:
        start = time.perf_counter()
        await asyncio.gather(*(ask(session, given, path) for given in bodies))
        return time.perf_counter() - start


async def fill_with_think_time(url: str, bodies: Sequence[bytes], watch_s: float) -> float:
    """Mean share of slots busy, once things have settled."""

    async def environment(number: int) -> None:
        draw = random.Random(number)
        while True:
            await asyncio.sleep(draw.expovariate(1 / THINK_S))
            await ask(session, bodies[number])

    shares = []
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [asyncio.create_task(environment(number)) for number in range(ENVIRONMENTS)]
        start = time.monotonic()
        while (elapsed := time.monotonic() - start) < SETTLE_S + watch_s:
            await asyncio.sleep(POLL_S)
            async with session.get("/server_info") as response:
                busy = (await response.json())["internal_states"][0]["num_running"]
            if elapsed > SETTLE_S:
                shares.append(busy / SLOTS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return fmean(shares)


def compare(model: Path, rounds: int) -> dict[str, float]:
    """HTTP against the engine alone."""
    engine = SlotEngine(load_policy(model, weights=True), num_slots=CLIENTS, max_context=MAX_CONTEXT, policy_version=0)
    prompts = make_prompts(CLIENTS, engine.model.config.vocab_size)
    bodies = [body(prompt, TOKENS, seed) for seed, prompt in enumerate(prompts)]

    def alone() -> float:
        start = time.perf_counter()
        run_slots(engine, prompts, [TOKENS] * CLIENTS)
        return time.perf_counter() - start

    over_http, ratios = [], []
    with server(model, CLIENTS) as url:
        alone()
        asyncio.run(all_at_once(url, bodies))  # the first round warms up
        before = alone()
        for _ in range(rounds):
            over_http.append(asyncio.run(all_at_once(url, bodies)))
            after = alone()
            ratios.append((before + after) / 2 / over_http[-1])
            before = after
    return {
        "http_vs_inprocess": median(ratios),
        "http_tokens_per_s": CLIENTS * TOKENS / median(over_http),
    }


def compare_vllm(model: Path, python: str, rounds: int) -> dict[str, float]:
    """Our server against vLLM's, a round each in turn."""
    prompts = make_prompts(CLIENTS, 100)
    ours = [body(prompt, TOKENS, seed) for seed, prompt in enumerate(prompts)]
    theirs = [vllm_body(prompt, TOKENS) for prompt in prompts]
    found: list[tuple[float, float]] = []
    with server(model, CLIENTS) as our_url, vllm_server(python, model) as their_url:
        for _ in range(rounds + 1):  # the first round warms up
            mine = asyncio.run(all_at_once(our_url, ours))
            found.append((mine, asyncio.run(all_at_once(their_url, theirs, "/inference/v1/generate"))))
    return {
        "vs_vllm_cpu": median(other / mine for mine, other in found[1:]),
        "vllm_tokens_per_s": CLIENTS * TOKENS / median(other for _, other in found[1:]),
    }


def main() -> None:
    options = arguments(__doc__ or "", vllm="PYTHON")
    torch.set_num_threads(1)
    with TemporaryDirectory() as directory:
        model = Path(directory)
        write_tiny_model(model, TinyModelConfig(), MAX_CONTEXT)
        load_policy(model, weights=False, seed=0).save_pretrained(model)
        figures = compare(model, 5 if options.quick else 15)
        rounds = 3 if options.quick else 7
        figures |= compare_vllm(model, options.vllm, rounds) if options.vllm else dict.fromkeys(VLLM, nan)
        prompts = make_prompts(ENVIRONMENTS, 100)
        lengths = np.clip(np.random.default_rng(0).lognormal(np.log(THINK_TOKENS), 0.5, ENVIRONMENTS), 8, 256)
        bodies = [body(prompt, int(length), n) for n, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))]
        with server(model, SLOTS) as url:
            watch_s = WATCH_S / 4 if options.quick else WATCH_S
            figures["fill_with_think_time"] = asyncio.run(fill_with_think_time(url, bodies, watch_s))
    publish(BENCHMARK, figures, options.json)


if __name__ == "__main__":
    main()
