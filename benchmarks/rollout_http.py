"""The rollout server against the slot engine in process and against vLLM, and how full thinking environments keep it.

The server is `penstock serve` in a process of its own; the engine alone is the same engine in this process; both with
one torch thread, same policy, prompts, lengths, sampling. They take turns, a round at a time; a ratio is the median
over the rounds, each against the engine alone right before and right after it, since other load on the machine comes
and goes; time is wall time, since two processes are compared with one. vLLM (`--vllm PYTHON`, the interpreter of an
environment that has it) serves the same model with one thread, compiled as it is by default. It takes and returns
tokens. There are two loads: many prompts with one answer each (`vs_vllm_cpu`), and episodes of eight turns
(`turns_vs_vllm_cpu`). In an episode each prompt begins with the prompt before, and both servers reuse what they have
computed.

Thinking environments play one episode after another. Each prompt is the prompt before, its answer and an observation,
until the context is full. Before each turn an environment waits for a random time. The server itself tells the share of
busy slots. `think_time_reused_share` is the share of prompt tokens that the server did not compute again.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from math import log, nan
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory, TemporaryFile
from urllib.request import urlopen

import aiohttp
import torch
from engine import ANSWER_TOKENS, EPISODES, OBSERVATION_TOKENS, TURNS, make_prompts, run_slots
from prometheus_client.parser import text_string_to_metric_families as metrics_in
from report import Benchmark, arguments, publish

from penstock.config import TinyModelConfig
from penstock.model.load_policy import load_policy
from penstock.model.tiny import write_tiny_model
from penstock.rollout.bodies import GenerateBody, GenerateReply, SamplingBody, decode, encode
from penstock.rollout.slot_engine import SlotEngine

VLLM = ("vs_vllm_cpu", "vllm_tokens_per_s", "turns_vs_vllm_cpu", "turns_vllm_tokens_per_s")
BENCHMARK = Benchmark(
    name="rollout_http",
    measures=["rollout", "model"],
    figures=["http_vs_inprocess", "http_tokens_per_s", *VLLM, "fill_with_think_time", "think_time_reused_share"],
)
MAX_CONTEXT, LONG_CONTEXT = 512, 1024
VLLM_READY_S = 400.0
"""It compiles."""
CLIENTS, TOKENS = 256, 64
SLOTS, THINK_S, THINK_TOKENS = 64, 0.2, 64
ENVIRONMENTS = 2 * SLOTS
"""As many as a run lets play by default (`scheduler.max_running`)."""
OBSERVED = (10, 100)
"""Fewest and most tokens of an observation."""
WATCH_S, SETTLE_S, POLL_S = 20.0, 3.0, 0.05
VOCABULARY = 100
"""Prompts are of the first tokens."""


@contextmanager
def server(model: Path, slots: int, context: int = MAX_CONTEXT) -> Iterator[str]:
    """The URL of a server of its own."""
    words = ["--port", "0", f"rollout.slots={slots}", f"model.max_context={context}", "rollout.torch_threads=1"]
    command = [sys.executable, "-m", "penstock.cli.main", "serve", "--model", str(model), *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().split(" at ")[1].split()[0]
        finally:
            process.terminate()


@contextmanager
def vllm_server(python: str, model: Path, context: int) -> Iterator[str]:
    """The URL of vLLM's own server, once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    words = ["--model", str(model), "--served-model-name", "m", "--port", str(port), "--dtype", "float32"]
    words += ["--max-model-len", str(context), "--max-num-seqs", str(CLIENTS), "--enable-scale-out"]
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
VLLM_PATH = "/inference/v1/generate"


async def ask(session: aiohttp.ClientSession, given: bytes, path: str = "/generate") -> bytes:
    async with session.post(path, data=given, headers=JSON) as response:
        assert response.status == 200, await response.text()
        return await response.read()


async def our_answer(session: aiohttp.ClientSession, prompt: Sequence[int], tokens: int, seed: int) -> list[int]:
    return decode(await ask(session, body(prompt, tokens, seed)), GenerateReply).output_ids


async def vllm_answer(session: aiohttp.ClientSession, prompt: Sequence[int], tokens: int, seed: int) -> list[int]:
    given = await ask(session, vllm_body(prompt, tokens), VLLM_PATH)
    return [*json.loads(given)["choices"][0]["token_ids"]]


Answer = Callable[[aiohttp.ClientSession, Sequence[int], int, int], Coroutine[None, None, list[int]]]
"""Asks for so many tokens after a prompt, with a seed."""


async def play_turns(url: str, answer: Answer, seed: int) -> float:
    """Seconds for many episodes at once. The observations of a seed are the same for everybody."""

    async def episode(number: int) -> None:
        draw, history = random.Random(f"{seed} {number}"), list[int]()
        for turn in range(TURNS):
            history += draw.choices(range(VOCABULARY), k=OBSERVATION_TOKENS)
            history += await answer(session, history, ANSWER_TOKENS, turn)

    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        start = time.perf_counter()
        await asyncio.gather(*map(episode, range(EPISODES)))
        return time.perf_counter() - start


async def all_at_once(url: str, bodies: Sequence[bytes], path: str = "/generate") -> float:
    """Seconds until every client has its answer."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as session:
        start = time.perf_counter()
        await asyncio.gather(*(ask(session, given, path) for given in bodies))
        return time.perf_counter() - start


async def fill_with_think_time(url: str, watch_s: float) -> dict[str, float]:
    """Mean share of slots busy, once things have settled."""

    async def environment(number: int) -> None:
        draw, history = random.Random(number), list[int]()
        while True:
            observation = draw.choices(range(VOCABULARY), k=draw.randint(*OBSERVED))
            length = min(max(int(draw.lognormvariate(log(THINK_TOKENS), 0.5)), 8), 256)
            if len(history) + len(observation) + length > LONG_CONTEXT:
                history = []
            history += observation
            await asyncio.sleep(draw.expovariate(1 / THINK_S))
            history += await our_answer(session, history, length, draw.getrandbits(31))

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
        async with session.get("/metrics") as response:
            counted = {each.name: each.value for family in metrics_in(await response.text()) for each in family.samples}
    computed, reused = (counted[f"penstock_prompt_tokens{name}_total"] for name in ("", "_reused"))
    return {"fill_with_think_time": fmean(shares), "think_time_reused_share": reused / (computed + reused)}


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
    prompts = make_prompts(CLIENTS, VOCABULARY)
    ours = [body(prompt, TOKENS, seed) for seed, prompt in enumerate(prompts)]
    theirs = [vllm_body(prompt, TOKENS) for prompt in prompts]
    found, turns = list[tuple[float, float]](), list[tuple[float, float]]()
    with server(model, CLIENTS, LONG_CONTEXT) as our_url, vllm_server(python, model, LONG_CONTEXT) as their_url:
        for number in range(rounds + 1):  # the first round warms up
            mine = asyncio.run(all_at_once(our_url, ours))
            found.append((mine, asyncio.run(all_at_once(their_url, theirs, VLLM_PATH))))
            mine = asyncio.run(play_turns(our_url, our_answer, number))
            turns.append((mine, asyncio.run(play_turns(their_url, vllm_answer, number))))
    return {
        "vs_vllm_cpu": median(other / mine for mine, other in found[1:]),
        "vllm_tokens_per_s": CLIENTS * TOKENS / median(other for _, other in found[1:]),
        "turns_vs_vllm_cpu": median(other / mine for mine, other in turns[1:]),
        "turns_vllm_tokens_per_s": EPISODES * TURNS * ANSWER_TOKENS / median(other for _, other in turns[1:]),
    }


def main() -> None:
    options = arguments(__doc__ or "", vllm="PYTHON")
    torch.set_num_threads(1)
    with TemporaryDirectory() as directory:
        model = Path(directory)
        write_tiny_model(model, TinyModelConfig(), LONG_CONTEXT)
        load_policy(model, weights=False, seed=0).save_pretrained(model)
        figures = compare(model, 5 if options.quick else 15)
        rounds = 3 if options.quick else 7
        figures |= compare_vllm(model, options.vllm, rounds) if options.vllm else dict.fromkeys(VLLM, nan)
        with server(model, SLOTS, LONG_CONTEXT) as url:
            watch_s = WATCH_S / 4 if options.quick else WATCH_S
            figures |= asyncio.run(fill_with_think_time(url, watch_s))
    publish(BENCHMARK, figures, options.json)


if __name__ == "__main__":
    main()
