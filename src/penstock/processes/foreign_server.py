"""The keeper of a rollout server that is not ours, or that somebody else started.

Starts it if it has to, waits until it answers, speaks for it on the bus, and ends when it ends. Never imports torch.
"""

from __future__ import annotations

import asyncio
import os
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from penstock.config import Config
from penstock.deadline import Stalled, deadline
from penstock.processes.gate import gate
from penstock.processes.layout import model_dir
from penstock.processes.listening import bind, host_of, number_of, port_of, url_of
from penstock.processes.member import Telemetry, ask_nothing, first, membership
from penstock.processes.visible import of_foreign_server
from penstock.rollout.keys import Keys
from penstock.rollout.servers import CONFLICT, ServerClient, connect
from penstock.rollout.session import HttpSession, RolloutError
from penstock.supervisor.child import Child
from penstock.types import BusySpan

ASK_EVERY_S = 0.5
LEASE_S = 8.0
"""For which a server that runs already is this run's, once it has said so; renewed while it lives."""
PATIENCE_S = 12.0
"""For a server that runs already to answer, and for a dead run's claim on it to end."""

LOOPBACK = "127.0.0.1"
MODULES = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}

VLLM_ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",  # pause, resume, weights
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else it takes the first cores for itself, and the trainer needs some
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


UNTIED = '{"tie_word_embeddings": false}'
"""On the CPU vLLM 0.32 packs tied output weights once, and an update does not reach them. We send them by name."""


class Meters(NamedTuple):
    """Names in an engine's `/metrics`."""

    tokens: str
    running: str


METERS = {
    "penstock": Meters("penstock_generation_tokens", "penstock_num_requests_running"),
    "vllm": Meters("vllm:generation_tokens", "vllm:num_requests_running"),
    "sglang": Meters("sglang:generation_tokens", "sglang:num_running_reqs"),
}


async def serve(child: Child, config: Config) -> None:
    stop = child.stop_event()
    session = HttpSession(api_key=config.rollout.control_key, timeout_s=config.rollout.request_timeout_s)
    try:
        async with (
            engine_of(child, config) as (engine, process),
            reached(engine, child, config) as url,
        ):
            client = connect(config.rollout.engine, url, session)
            claim = Claiming(client, child.run_id, child.nonce)
            await answering(config, claim, process)
            watch = Watch(child.name, config, url, session)
            async with (
                claim.renewed(),
                watching(watch),
                membership(child, config, role="rollout", handler=ask_nothing, telemetry=watch.telemetry, url=url),
            ):
                child.report_ready(url)
                await first(stop.wait(), *([process.wait()] if process is not None else []))
    finally:
        await session.close()
    if not stop.is_set():
        assert process is not None
        child.fail(f"{config.rollout.engine} ended with exit code {process.returncode}; its last words are above")


@asynccontextmanager
async def engine_of(child: Child, config: Config) -> AsyncIterator[tuple[str, Process | None]]:
    """Where the server is, and its process if it is ours to end, which writes to this process's log. One that we start
    listens for this machine only: it guards its control paths with no key."""
    if config.rollout.urls:
        yield config.rollout.urls[number_of(child)].rstrip("/"), None
        return
    port = free_port() if has_gate(child, config) else port_of(child, config) or free_port()
    surroundings = environment(config, number_of(child))
    process = await asyncio.create_subprocess_exec(*command(child, config, port), env=surroundings)
    try:
        yield url_of(LOOPBACK, port), process
    finally:
        if process.returncode is None:
            process.terminate()
        try:
            async with deadline(config.supervisor.grace_s, waiter=child.name, resource="its end", holder="the engine"):
                await process.wait()
        except Stalled:
            process.kill()


@asynccontextmanager
async def reached(engine: str, child: Child, config: Config) -> AsyncIterator[str]:
    """Where others find it."""
    if not has_gate(child, config):
        yield engine
        return
    host, port = host_of(child, config), port_of(child, config)
    async with gate(engine, host=host, port=port, keys=Keys.of(config.rollout)) as url:
        yield url


def has_gate(child: Child, config: Config) -> bool:
    """One that we start has, where it is reached from other machines or keys differ."""
    rollout = config.rollout
    others = child.address is not None or rollout.host != LOOPBACK
    return not rollout.urls and (others or bool(rollout.admin_api_key))


def command(child: Child, config: Config, port: int) -> list[str]:
    """Of the engine's own server. The weights come from the trainer: what it begins with does not matter."""
    rollout, model = config.rollout, str(model_dir(config, child.run_dir))
    words = [rollout.python or sys.executable, "-m", MODULES[rollout.engine]]
    words += ["--host", LOOPBACK, "--port", str(port), "--served-model-name", config.model.path]
    words += ["--dtype", config.model.dtype, "--load-format", "dummy"]
    if rollout.engine == "vllm":
        words += ["--model", model, "--max-model-len", str(config.model.max_context)]
        words += ["--max-num-seqs", str(rollout.slots), "--enable-scale-out"]
        words += ["--logprobs-mode", "processed_logprobs", "--uvicorn-log-level", "warning"]
        words += ["--hf-overrides", UNTIED]
    else:
        words += ["--model-path", model, "--context-length", str(config.model.max_context)]
        words += ["--max-running-requests", str(rollout.slots), "--enable-metrics"]
    return [*words, *rollout.args]


def environment(config: Config, number: int) -> dict[str, str]:
    """Ours, what the engine needs where it is not set, its devices, and the key, which no command line shows."""
    wanted = VLLM_ENVIRONMENT | {"OMP_NUM_THREADS": str(config.rollout.torch_threads)} | os.environ
    return (
        wanted
        | of_foreign_server(config, number)
        | ({"VLLM_API_KEY": config.rollout.api_key} if config.rollout.api_key else {})
    )


def free_port() -> int:
    """One that nobody listens on now: foreign engines do not say which port the system chose for them."""
    with bind(LOOPBACK, 0) as listener:
        port: int = listener.getsockname()[1]
        return port


class Claiming:
    """The server is this run's: for a lease at a time, and until it is given up."""

    def __init__(self, client: ServerClient, run_id: str, nonce: str) -> None:
        self.client, self._run = client, (run_id, nonce)

    async def take(self) -> None:
        """RolloutError with status 409 while it is another run's."""
        await self.client.claim(*self._run, lease_s=LEASE_S)

    @asynccontextmanager
    async def renewed(self) -> AsyncIterator[None]:
        """For the length of the body. Raises if another run has taken it; that it answers is the clients' concern."""

        async def renew() -> None:
            while True:
                await asyncio.sleep(LEASE_S / 4)
                try:
                    await self.take()
                except (RolloutError, Stalled) as error:
                    if isinstance(error, RolloutError) and error.status == CONFLICT:
                        raise

        async with asyncio.TaskGroup() as tasks:
            renewing = tasks.create_task(renew())
            try:
                yield
            finally:
                renewing.cancel()
                with suppress(RolloutError, Stalled):
                    await self.client.claim(*self._run, lease_s=0.0)


async def answering(config: Config, claim: Claiming, process: Process | None) -> None:
    """Until it does, and is this run's. RolloutError as soon as no waiting mends what is wrong, or its time is up."""
    url, engine = claim.client.url, config.rollout.engine
    seconds = config.supervisor.ready_timeout_s
    limit = time.monotonic() + (min(PATIENCE_S, seconds) if config.rollout.urls else seconds)
    while True:
        try:
            await claim.client.alive()
            await claim.client.check()
            return await claim.take()
        except (RolloutError, Stalled) as error:
            if process is not None and process.returncode is not None:
                raise RolloutError(
                    url, f"{engine} ended with exit code {process.returncode} before it answered"
                ) from None
            status = error.status if isinstance(error, RolloutError) else None
            if (status is not None and status < 500 and status != CONFLICT) or time.monotonic() > limit:
                message = error.message if isinstance(error, RolloutError) else str(error)
                raise RolloutError(url, f"{message}{remedy(status, engine)}", status) from None
        await asyncio.sleep(ASK_EVERY_S)


def remedy(status: int | None, engine: str) -> str:
    """What helps against an answer with this status, or against none."""
    match status:
        case None:
            return "; start it first, or correct rollout.urls"
        case 401 | 403:
            return "; set PENSTOCK_API_KEY, and PENSTOCK_ADMIN_API_KEY if control has a key of its own there"
        case 200 | 404 | 405:
            return f"; it is no server that rollout.engine {engine} can use: correct rollout.urls or rollout.engine"
        case _:
            return ""


class Watch:
    """Reads the engine's own meters. It counts as busy while it says that something runs."""

    def __init__(self, name: str, config: Config, url: str, session: HttpSession) -> None:
        self._name, self._meters = name, METERS[config.rollout.engine]
        self._url, self._session = url, session
        self._tokens, self._running, self._busy_s = 0, 0, 0.0
        self._seen_at = time.time()
        self._spans: list[BusySpan] = []

    async def look(self) -> None:
        """Once. An engine that does not answer is the clients' concern."""
        try:
            text = (await self._session.send("GET", self._url, "/metrics", timeout_s=ASK_EVERY_S * 4)).decode()
            families = {family.name: family for family in text_string_to_metric_families(text)}
        except (RolloutError, Stalled, ValueError):
            return
        self._tokens, running = (
            int(sum(sample.value for sample in families[name].samples if not sample.name.endswith("_created")))
            if name in families
            else 0
            for name in self._meters
        )
        now = time.time()
        if self._running and running:
            self._busy_s += now - self._seen_at
            self._spans.append(BusySpan(process=self._name, kind="generate", start=self._seen_at, end=now))
        self._seen_at, self._running = now, running

    def telemetry(self) -> Telemetry:
        spans, self._spans = self._spans, []
        return Telemetry(
            progress=self._tokens,
            doing="generation" if self._running else "",
            busy_s=self._busy_s,
            counters={"tokens": self._tokens, "active": self._running},
            spans=spans,
        )


@asynccontextmanager
async def watching(watch: Watch) -> AsyncIterator[None]:
    """Looks now and then for the length of the body."""

    async def look() -> None:
        while True:
            await watch.look()
            await asyncio.sleep(ASK_EVERY_S)

    async with asyncio.TaskGroup() as tasks:
        looking = tasks.create_task(look())
        yield
        looking.cancel()
