"""The endpoint of agents in one environment worker on one core: the cost of a request, and whether each has its answer.

The worker is the very process of a run, alone on its core. 256 agents play at any time, outside of it, as HTTP clients:
their episodes have tools, answers that call them, some of them streamed, and turns that branch off. The engine takes 50
ms for an answer, and no two of its answers are alike. One request in ten is left before its answer and sent again, and
one in twenty is sent again although it was answered, with the header of the official SDKs.

`overhead_ms_per_request` is the worker's processor time over the requests that it has answered. `lost_requests` got no
answer, or an error. `doubled_answers` are answers beyond one for each question that was asked: sampled twice, or given
to two. `tool_parse_us` is the time to read an answer of 500 tokens that calls tools, in the slowest of the formats.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import secrets
import statistics
import string
import time
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aiohttp
import uvloop
import yaml
from aiohttp import web
from environments import CORE, GROUP_SIZE, READY, START_S, TIMEOUT_S, Controller, cpu_of, reply_of, worker_process
from report import Benchmark, arguments, publish

from penstock.config import Config
from penstock.control.bus import Bus
from penstock.control.remote_workers import RemoteWorkers
from penstock.model.answer_format import FORMATS, AnswerFormat
from penstock.model.chat import ChatTokenizer
from penstock.ports.environment import Endpoint
from penstock.processes.layout import model_dir, prepare
from penstock.runtime.http_server import bind, url_of
from penstock.supervisor.child import Child
from penstock.types import Task

BENCHMARK = Benchmark(
    name="agent_endpoint",
    measures=["envs", "compat", "model/answer_format.py", "model/chat.py", "rollout"],
    figures=["overhead_ms_per_request", "requests_per_s", "lost_requests", "doubled_answers", "tool_parse_us"],
)
AGENTS, TURNS = 256, 8
ANSWER_S = 0.05
LEFT, REPEATED = 0.1, 0.05
"""Shares of requests that are left before their answer, and that are sent again after it."""
WATCH_S = 20.0
MAX_TOKENS = 96
PARSED_TOKENS, CHARACTERS_PER_TOKEN = 500, 4
LOOK = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Return the number under a word.",
        "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
    },
}
AGAIN = {"x-stainless-retry-count": "1"}


class Outside:
    """An agent that plays in the process of the benchmark: `desk` is its address."""

    session: aiohttp.ClientSession | None = None

    def __init__(self, task: Task, *, desk: str) -> None:
        self._desk = desk

    async def play(self, llm: Endpoint, seed: int) -> float:
        if Outside.session is None:
            Outside.session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        play = {"base_url": llm.base_url, "seed": seed}
        async with Outside.session.post(self._desk, json=play) as reply:
            return float(await reply.text())


class Engine:
    """Answers each request after `ANSWER_S` with a call of the tool. No two calls have the same argument."""

    def __init__(self, chat: ChatTokenizer) -> None:
        self._chat, self._numbers = chat, itertools.count()
        self.num_samples = 0

    async def generate(self, request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(ANSWER_S)
        self.num_samples += 1
        call = json.dumps({"name": "look", "arguments": {"key": word(next(self._numbers))}})
        tokens = [*self._chat.encode_answer(f"<tool_call>\n{call}\n</tool_call>"), self._chat.eos_ids[0]]
        return web.Response(body=reply_of(tokens), content_type="application/json")

    async def ready(self, request: web.Request) -> web.Response:
        return web.Response(body=READY, content_type="application/json")


def word(number: int) -> str:
    """A number in letters."""
    letters = ""
    while number or not letters:
        number, place = divmod(number, 26)
        letters += string.ascii_lowercase[place]
    return letters


@dataclass(slots=True)
class Desk:
    """Where agents play."""

    session: aiohttp.ClientSession
    num_sent: int = 0
    """Requests that were answered."""
    num_asked: int = 0
    """Questions, each of which should have one answer."""
    lost: list[str] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)
    """What each question was answered with."""

    async def play(self, request: web.Request) -> web.Response:
        """Play an episode: a conversation that grows, a turn that branches off it, and a question asked twice."""
        given = await request.json()
        url, rng = f"{given['base_url']}/chat/completions", random.Random(given["seed"])
        messages: list[Any] = [
            {"role": "user", "content": f"look at {word(rng.getrandbits(40))}, and go on from there"}
        ]
        try:
            for turn in range(TURNS - 2):
                answer = await self._ask(url, messages, rng, stream=turn % 3 == 0)
                (call,) = answer["tool_calls"]
                result = {"role": "tool", "tool_call_id": call["id"], "content": str(rng.randrange(100))}
                messages += [{"role": "assistant", "content": None, "tool_calls": [call]}, result]
            for _ in range(2):
                await self._ask(url, [*messages[:3], {"role": "user", "content": "another way?"}], rng, stream=False)
        except (aiohttp.ClientError, LookupError, ValueError, TimeoutError) as error:
            self.lost.append(f"{type(error).__name__}: {error}")
        return web.Response(text="1.0")

    async def _ask(self, url: str, messages: list[Any], rng: random.Random, *, stream: bool) -> dict[str, Any]:
        self.num_asked += 1
        headers: dict[str, str] = {}
        if rng.random() < LEFT:
            try:
                async with asyncio.timeout(rng.uniform(0.2, 1.0) * ANSWER_S):
                    answer = await self._send(url, messages, {}, stream=stream)
                    self.heard.append(answer["tool_calls"][0]["function"]["arguments"])
                    return answer
            except TimeoutError:
                headers = AGAIN
        answer = await self._send(url, messages, headers, stream=stream)
        said = answer["tool_calls"][0]["function"]["arguments"]
        self.heard.append(said)
        if rng.random() < REPEATED:
            again = await self._send(url, messages, AGAIN, stream=not stream)
            if (other := again["tool_calls"][0]["function"]["arguments"]) != said:
                self.heard.append(other)
        return answer

    async def _send(self, url: str, messages: list[Any], headers: dict[str, str], *, stream: bool) -> dict[str, Any]:
        body = {"model": "tiny", "messages": messages, "tools": [LOOK], "stream": stream, "return_token_ids": False}
        async with self.session.post(url, json=body, headers=headers) as reply:
            text = await reply.text()
            if reply.status != 200:
                raise ValueError(f"{reply.status}: {text[:200]}")
        self.num_sent += 1
        if not stream:
            return dict(json.loads(text)["choices"][0]["message"])
        events = [json.loads(line.removeprefix("data: ")) for line in text.split("\n\n") if line.startswith("data: {")]
        calls = [call for event in events for call in event["choices"][0]["delta"].get("tool_calls", ())]
        return {"tool_calls": [{name: value for name, value in call.items() if name != "index"} for call in calls]}


async def serving(routes: dict[str, Any]) -> tuple[web.AppRunner, str]:
    """Serve POST and GET routes on a port of their own."""
    app = web.Application()
    for path, handler in routes.items():
        app.router.add_route("*", path, handler)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    listener = bind("127.0.0.1", 0)
    await web.SockSite(runner, listener).start()
    return runner, url_of("127.0.0.1", listener)


async def play_and_watch(
    run_dir: Path, runtime_dir: Path, settings: dict[str, Any], watch_s: float
) -> dict[str, float]:
    """What a request costs, and what became of all of them."""
    config = Config.model_validate(settings)
    prepare(config, run_dir)
    chat = ChatTokenizer.load(model_dir(config, run_dir))
    engine = Engine(chat)
    engine_runner, engine_url = await serving({"/ready": engine.ready, "/generate": engine.generate})
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        desk = Desk(session)
        desk_runner, desk_url = await serving({"/": desk.play})
        settings["env"]["options"] = {"desk": f"{desk_url}/"}
        (run_dir / "config.yaml").write_text(yaml.safe_dump(settings))
        nonce, controller = secrets.token_hex(8), Controller(url=engine_url, num_episodes=AGENTS, max_tokens=MAX_TOKENS)
        child = Child(name="controller", run_dir=run_dir, runtime_dir=runtime_dir, run_id="benchmark", nonce=nonce)
        bus = Bus(str(runtime_dir), controller.handle, nonce=child.secret("greeting"))
        async with asyncio.TaskGroup() as tasks:
            controller.workers = RemoteWorkers(bus, tasks, timeout_s=TIMEOUT_S)
            receiving = tasks.create_task(bus.run())
            with worker_process(run_dir, runtime_dir, nonce) as worker:
                async with asyncio.timeout(START_S):
                    while desk.num_sent < AGENTS:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
                began, sent, cpu_s = time.monotonic(), desk.num_sent, cpu_of(worker)
                await asyncio.sleep(watch_s)
                seconds, sent, cpu_s = time.monotonic() - began, desk.num_sent - sent, cpu_of(worker) - cpu_s
                controller.is_over = True
                async with asyncio.timeout(START_S):
                    while controller.num_open:  # noqa: ASYNC110
                        await asyncio.sleep(0.1)
            receiving.cancel()
            controller.workers.close()
        bus.close()
        await desk_runner.cleanup()
    await engine_runner.cleanup()
    num_answered = desk.num_asked - len(desk.lost)
    for reason in sorted(set(desk.lost))[:3]:
        print(f"lost: {reason}")
    return {
        "overhead_ms_per_request": 1000 * cpu_s / sent,
        "requests_per_s": sent / seconds,
        "lost_requests": len(desk.lost),
        "doubled_answers": engine.num_samples - num_answered + len(desk.heard) - len(set(desk.heard)),
    }


def tool_parse_us(rounds: int) -> float:
    """The slowest format's time for an answer that ends with a call, after text that might be one."""
    call = {"name": "look", "arguments": {"key": "x"}}
    tagged = "<function=look>\n<parameter=key>\nx\n</parameter>\n</function>"
    inside = {
        "qwen3_coder": tagged,
        "glm": "look\n<arg_key>key</arg_key>\n<arg_value>x</arg_value>",
        "deepseek": "look<\uff5ctool\u2581sep\uff5c>" + json.dumps(call["arguments"]),
    }
    slowest = 0.0
    for tools in FORMATS:
        text = inside.get(tools.name, json.dumps(call))
        if tools.name == "llama3":
            filled = {**call, "arguments": {"key": "y" * (PARSED_TOKENS * CHARACTERS_PER_TOKEN)}}
            answer = json.dumps(filled)
        else:
            thought = "I look, as <tool> or [TOOL] or {x}: " * 60
            answer = thought[: PARSED_TOKENS * CHARACTERS_PER_TOKEN] + f"{tools.opening}{text}{tools.closing}"
        form, times = AnswerFormat(tools, True), []
        for _ in range(rounds):
            began = time.perf_counter()
            found = form.read(answer, [LOOK])
            times.append(time.perf_counter() - began)
            assert len(found.calls) == 1, (tools.name, found.fault)
        slowest = max(slowest, statistics.median(times))
    return 1e6 * slowest


def main() -> None:
    options = arguments(__doc__ or "")
    others = os.sched_getaffinity(0) - {CORE}
    os.sched_setaffinity(0, others or {CORE})
    settings: dict[str, Any] = {
        "env": {
            "name": f"{__file__}:Outside",
            "group_size": GROUP_SIZE,
            "max_turns": TURNS,
            "max_new_tokens": MAX_TOKENS,
        },
        "data": {"source": "seeds"},
        "model": {"max_context": 4096},
        "scheduler": {"max_running": AGENTS},
    }
    with TemporaryDirectory() as run_dir, TemporaryDirectory(dir="/dev/shm") as runtime_dir:
        watch_s = WATCH_S / 4 if options.quick else WATCH_S
        figures: dict[str, float] = uvloop.run(play_and_watch(Path(run_dir), Path(runtime_dir), settings, watch_s))
    figures["tool_parse_us"] = tool_parse_us(200 if options.quick else 2000)
    publish(BENCHMARK, figures, options.json)


if __name__ == "__main__":
    main()
