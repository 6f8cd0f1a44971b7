"""The process that manages a foreign rollout server: one with another engine, or one that the user started.

It starts the server if necessary, waits until the server answers, represents it on the bus, and ends when the server
ends. Never imports torch.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import sys
import time
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.parse import quote

import aiohttp
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import Response

from penstock.config import Config, ConfigError
from penstock.config.secret_settings import VARIABLES
from penstock.deadline import Stalled, alongside, deadline, first, warn_if_stalled
from penstock.model.files import ModelError, routing
from penstock.observe.log_lines import Paced
from penstock.ports.observer import BusySpan
from penstock.ports.process_launcher import Device
from penstock.processes.bus_client import Member, Telemetry, membership
from penstock.processes.layout import host_of, model_dir, server_number, takes_turns
from penstock.processes.own_port import OwnPortConnector
from penstock.processes.plan_request import PLAN_S, memory_plan
from penstock.processes.visible import (
    LIST_S,
    SHARES,
    devices_of,
    direct_way,
    free_share,
    has_accelerator,
    listed,
    of_foreign_server,
    share_in,
    shares_device,
)
from penstock.processes.weights_fetcher import WeightsFetcher
from penstock.rollout.app import ApiKeys, App
from penstock.rollout.claim import Claim
from penstock.rollout.client import CONFLICT, ServerClient
from penstock.rollout.http import Refused, Route, read_bytes, unless_disconnected
from penstock.rollout.served_adapters import HELD
from penstock.rollout.servers import connect
from penstock.rollout.session import KEEP_ALIVE_S, HttpSession, RolloutError, open_session
from penstock.rollout.vllm_client import transfer_words
from penstock.runtime.http_server import bind, listening, url_of
from penstock.supervisor.child import Child
from penstock.supervisor.run_journal import read_state
from penstock.supervisor.states import RunState
from penstock.trainer.checkpoint import stored_version

logger = logging.getLogger(__name__)

ASK_EVERY_S = 0.5
ROOM_EVERY_S = 2.0
"""Seconds between two questions for the free memory of a device."""
WAIT_SHARE = 0.9
"""Share of the ready timeout in which a device must have room for an engine."""
LEASE_S = 8.0
"""Length of a run's claim on an already running server. The run renews the claim while it lives."""
CLAIM_TIMEOUT_S = 12.0
"""Limit of the wait for an already running server to answer, and for a dead run's claim on it to expire."""

LOOPBACK = "127.0.0.1"
Place = int | Path
"""Where an engine that we start listens: a loopback port, or a Unix socket."""
Prepare = Callable[[str, Process | None], Awaitable[None]]
MODULES = {"vllm": "vllm.entrypoints.openai.api_server", "sglang": "sglang.launch_server"}

VLLM_ENVIRONMENT = {
    "PYTHONSAFEPATH": "1",  # the engine and its processes import no file of the working directory
    "VLLM_SERVER_DEV_MODE": "1",  # enables the routes for pause, resume and weights
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # otherwise vLLM binds to the first cores, which the trainer needs too
    "VLLM_CPU_KVCACHE_SPACE": "1",
}


UNTIED = '{"tie_word_embeddings": false}'
"""On the CPU, vLLM 0.32 packs tied output weights once, and a weight update does not reach them. So the model is loaded
untied, and we send these weights by name."""


VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""The ranks for which vLLM has room for adapters. It takes smaller ones too."""

METERS = {
    "penstock": ("penstock_generation_tokens", "penstock_num_requests_running"),
    "vllm": ("vllm:generation_tokens", "vllm:num_requests_running"),
    "sglang": ("sglang:generation_tokens", "sglang:num_running_reqs"),
}
"""Metric names in each engine's `/metrics`: the tokens generated so far, and the running requests."""

MAX_LINE = 1024
"""Most characters of a line of metrics that is read. The parser's time grows with the square of a line's length."""
MOST_LINES = 64
"""Most lines about the metrics that are read."""
MAX_COUNT = 2**53
"""An engine's count is below this. A float holds every such whole number."""

HEALTH = {"vllm": "/health", "sglang": "/model_info"}
"""The path of each engine that clients without a key may ask through the proxy. It generates no tokens. SGLang's own
`/health` does."""

OPEN = ("/generate", "/model_info", "/inference/v1/generate", "/weight_info", "/metrics")
"""Routes of all engines that need the generation key only. All other routes, except `/health`, are control."""
STALL_WARNING_S = 300.0
"""Seconds without an answer before a stall is reported. The client has its own deadline."""
UNREACHED = 502
MAX_BODY_BYTES = 1 << 28
"""The limit is large because a group's request repeats a long prompt once for each sample."""


async def serve(child: Child, config: Config) -> None:
    stop = child.stop_event()
    child.log_start(engine=config.rollout.engine, urls=", ".join(config.rollout.urls))
    rollout = config.rollout
    secret = child.secret("claim")
    session = HttpSession(api_key=rollout.control_key, claim=secret, timeout_s=rollout.request_timeout_s)
    keeps, gives, is_only = config.uses_given_weights, config.gives_devices, len(rollout.urls) < 2
    adapters, direct = config.engine_serves_adapters, direct_way(config)

    def claim_on(url: str) -> ServerClaim:
        client = connect(
            rollout.engine,
            url,
            session,
            keeps_weights=keeps,
            takes_turns=gives,
            serves_adapters=adapters,
            direct_weights=direct,
        )
        return ServerClaim(client, child.run_id, secret, is_only=is_only, is_shared=keeps)

    async def prepare(url: str, process: Process | None) -> None:
        claim = claim_on(url)
        if rollout.urls and is_running(child):
            logger.info("joins the run again; clients use the server at %s once it answers", url)
            return
        await await_server(config, claim, process)
        if gives and claim.client.sleeps:  # the trainer, which may start next, may need all the memory
            await claim.client.release()
        if not (config.has_trainer or rollout.urls):
            await claim.client.label_weights(str(stored_version(model_dir(config, child.run_dir))))

    try:
        async with engine_of(child, config, prepare) as (url, process):
            claim = claim_on(url)
            metrics = EngineMetrics(child.name, config, claim.client, session)
            async with (
                claim.renewed(),
                alongside(metrics.keep_reading()),
                membership(child, config, role="rollout", member=metrics, url=url),
            ):
                child.report_ready(url, devices=await engine_devices(child, config))
                await first(stop.wait(), *([process.wait()] if process is not None else []))
    finally:
        await session.close()
    if not stop.is_set():
        assert process is not None
        child.fail(f"{config.rollout.engine} ended with exit code {process.returncode}; its last output is above")


@asynccontextmanager
async def engine_of(child: Child, config: Config, prepare: Prepare) -> AsyncIterator[tuple[str, Process | None]]:
    """Start the engine if necessary, and end it after the body. Yield its URL for other processes, and its process if
    we started it. Before other processes reach it, `prepare` is awaited, with a URL and the process.

    An engine that we start writes to this process's log. It checks no claim on its control routes, so an auth proxy is
    in front of it. vLLM listens on a socket in the private runtime directory. SGLang listens on a loopback port, and
    asks for a key that only this process knows.
    """
    if config.rollout.urls:
        given = config.rollout.urls[server_number(child)].rstrip("/")
        await prepare(given, None)
        yield given, None
        return
    place: Place = free_port()
    if config.rollout.engine == "vllm":
        place = child.runtime_dir / f"{child.name}.sock"
        place.unlink(missing_ok=True)  # a killed engine leaves it
    host, port, keys = host_of(child, config), child.port, ApiKeys.of(config.rollout)
    own_key = secrets.token_hex(32) if config.rollout.engine == "sglang" else config.rollout.api_key
    variables = environment(config, server_number(child))
    words = command(child, config, place, own_key, memory=await memory_words(child, config))
    if takes_turns(config) and has_accelerator(config):
        await await_room(child, config, variables)
    process = await asyncio.create_subprocess_exec(*words, env=variables)
    fetcher = WeightsFetcher(child, model_dir(config, child.run_dir))
    try:
        claim = Claim(child.run_id, child.secret("claim"))
        proxy = partial(auth_proxy, place, own_key, HEALTH[config.rollout.engine], keys=keys, claim=claim)
        async with proxy(host=LOOPBACK, port=0) as url:
            await prepare(url, process)
        async with proxy(host=host, port=port, own_routes=fetcher.routes()) as url:
            yield url, process
    finally:
        await fetcher.close()
        if process.returncode is None:
            process.terminate()
        try:
            async with deadline(config.supervisor.grace_s, waiter=child.name, resource="its end", holder="the engine"):
                await process.wait()
        except Stalled:
            process.kill()


async def memory_words(child: Child, config: Config) -> list[str]:
    """Return the words with which the engine takes the memory that the trainer of its device leaves; none if it shares
    no device. Raises `ConfigError` if both do not fit."""
    if not shares_device(config, server_number(child)) or share_in(config.rollout.engine, config.rollout.args):
        return []
    async with deadline(PLAN_S + ASK_EVERY_S, waiter=child.name, resource="the memory plan", holder="its process"):
        try:
            plan = await asyncio.to_thread(memory_plan, config)
        except ModelError as error:
            option = SHARES[config.rollout.engine][0]
            raise ConfigError(f"{error}: set {option} in rollout.args, since both use one device") from error
    words: list[str] = plan["engine_words"]
    if not plan["fits"]:
        needs = ", ".join(f"{need['who']} {need['total'] / 2**30:.1f}" for need in plan["needs"])
        raise ConfigError(
            f"rollout.engine {config.rollout.engine} shares the device of the trainer, and both need at least "
            f"{plan['largest'] / 2**30:.1f} GiB of its {plan['capacity'] / 2**30:.1f} GiB ({needs}): use "
            "scheduler.mode colocated, another device, or what `penstock plan` names"
        )
    logger.info("shares the device of the trainer: %s", " ".join(words))
    return words


async def await_room(child: Child, config: Config, variables: Mapping[str, str]) -> None:
    """Wait until the engine's devices have the memory that it takes. After the death of an engine, the trainer may
    have it until the end of its step. Raises Stalled in time for the supervisor's own limit."""
    engine, words = config.rollout.engine, config.rollout.args
    share, devices = share_in(engine, words) or SHARES[engine][1], devices_of(variables, words)
    limit, resource = WAIT_SHARE * config.supervisor.ready_timeout_s, f"{share:.0%} of the memory of its device"
    log = Paced(logger)
    async with deadline(limit, waiter=child.name, resource=resource, holder="the trainer, or another process"):
        while (free := await asyncio.to_thread(free_share, devices)) is not None and free < share:
            log.info(f"waits for {resource}; {free:.0%} are free")
            await asyncio.sleep(ROOM_EVERY_S)


async def engine_devices(child: Child, config: Config) -> list[Device] | None:
    """Return the devices of an engine that the run has started, and their memory. None for one that ran already, and
    where the driver does not tell."""
    if config.rollout.urls:
        return None

    def look() -> list[Device] | None:
        if not has_accelerator(config):
            return []
        return listed(devices_of(environment(config, server_number(child)), config.rollout.args))

    try:
        async with deadline(3 * LIST_S, waiter=child.name, resource="the names of its devices", holder="their driver"):
            return await asyncio.to_thread(look)
    except (Stalled, ConfigError, OSError) as error:  # the engine works without
        logger.info("the devices are not known: %s", error)
        return None


@asynccontextmanager
async def auth_proxy(
    place: Place,
    own_key: str | None,
    health_path: str,
    *,
    host: str,
    port: int,
    keys: ApiKeys,
    claim: Claim,
    own_routes: Sequence[Route] = (),
) -> AsyncIterator[str]:
    """Run a proxy that requires an API key, and for control the claim, for the length of the body. Yield the URL of the
    proxy.

    It stands in front of an engine, at `place`, that checks no claim. It forwards each request with the right key to
    the engine, with the engine's `own_key`, and returns the engine's answer. `/health` of the proxy needs no key, and
    returns only the status of the engine's answer at `health_path`. `own_routes`: more routes of the proxy itself.
    """
    engine = url_of(LOOPBACK, place) if isinstance(place, int) else "http://engine"

    async def forward(request: Request) -> Response:
        body = b"" if request.method == "GET" else await read_bytes(request, max_bytes=MAX_BODY_BYTES)
        work = _answer(session, engine, request.scope["path"], request, body)
        return await unless_disconnected(request.receive, work)

    async def health(request: Request) -> Response:
        asked = Request({**request.scope, "query_string": b""})
        answer = await unless_disconnected(request.receive, _answer(session, engine, health_path, asked, b""))
        return Response(status_code=answer.status_code)

    # A public route has no POST, because it must not keep a body (`App`).
    routes = [Route("/health", ["GET"], health, "public"), *own_routes]
    routes += [Route(path, ["GET", "POST"], forward, "generation") for path in OPEN]
    routes.append(Route("/{path}", ["GET", "POST", "PUT", "DELETE"], forward))
    with bind(host, port, held=True) as listener:
        async with _session(place, own_key) as session, listening(App(routes, keys, claim), listener):
            yield url_of(host, listener)


def _session(place: Place, own_key: str | None) -> aiohttp.ClientSession:
    """Return the session that reaches the engine."""
    own = {"Authorization": f"Bearer {own_key}"} if own_key else {}
    if isinstance(place, int):
        return open_session(own, OwnPortConnector(LOOPBACK, place))
    return open_session(own, aiohttp.UnixConnector(str(place), limit=0, keepalive_timeout=KEEP_ALIVE_S))


async def _answer(session: aiohttp.ClientSession, engine: str, path: str, request: Request, body: bytes) -> Response:
    """Return the engine's answer at `path`, the one for which the key was checked."""
    path, query = quote(path), request.scope["query_string"].decode()
    headers = {"Content-Type": request.headers.get("content-type", "application/json")}
    url = f"{engine}{path}{'?' if query else ''}{query}"
    with warn_if_stalled(STALL_WARNING_S, waiter="the auth proxy", resource=path, holder=engine):
        try:
            async with session.request(
                request.method, url, data=body, headers=headers, allow_redirects=False
            ) as answer:
                if not 200 <= answer.status < 600:
                    raise Refused(UNREACHED, f"the engine behind this proxy answers with status {answer.status}")
                kind = answer.headers.get("content-type")
                return Response(await answer.read(), answer.status, media_type=kind)
        except aiohttp.ClientError as error:
            raise Refused(UNREACHED, f"the engine behind this proxy does not answer: {error}") from None


def command(
    child: Child, config: Config, place: Place, own_key: str | None, *, memory: Sequence[str] = ()
) -> list[str]:
    """Return the command line of the engine's server. If a trainer sends the weights, it starts with dummy ones.
    `memory`: words for its share of a device. The user's words come last, and win. SGLang reads its key from a file,
    because other users see a command line."""
    rollout, model = config.rollout, str(model_dir(config, child.run_dir))
    words = [rollout.python or sys.executable, "-m", MODULES[rollout.engine]]
    words += ["--host", LOOPBACK, "--port", str(place)] if isinstance(place, int) else ["--uds", str(place)]
    words += ["--served-model-name", config.model.path]
    gets_weights = config.has_trainer and not config.engine_serves_adapters
    words += ["--dtype", config.model.dtype, *(["--load-format", "dummy"] if gets_weights else [])]
    if rollout.engine == "vllm":
        words += ["--model", model, "--max-model-len", str(config.model.max_context)]
        words += ["--max-num-seqs", str(rollout.slots), "--enable-scale-out"]
        words += ["--logprobs-mode", "processed_logprobs", "--uvicorn-log-level", "warning"]
        words += ["--hf-overrides", UNTIED] if gets_weights else []
        words += ["--enable-sleep-mode"] if config.gives_devices and has_accelerator(config) else []
        way = direct_way(config)
        words += transfer_words(way) if way is not None else []
    else:
        words += ["--model-path", model, "--context-length", str(config.model.max_context)]
        words += ["--max-running-requests", str(rollout.slots), "--enable-metrics"]
        words += ["--config", str(_key_file(child, own_key))]
        words += ["--enable-memory-saver"] if config.gives_devices else []
        words += ["--enable-weights-cpu-backup"] if config.gives_devices and config.engine_serves_adapters else []
    if config.replays_routers and routing(Path(model)) is not None:
        words.append("--enable-return-routed-experts")
    return [*words, *_for_adapters(config), *memory, *rollout.args]


def _for_adapters(config: Config) -> list[str]:
    """Return the options with which the engine serves the policy's adapters, if it does."""
    lora = config.trainer.lora
    if lora is None or not config.engine_serves_adapters:
        return []
    if config.rollout.engine == "vllm":
        rank = next((rank for rank in VLLM_RANKS if rank >= lora.rank), lora.rank)
        return ["--enable-lora", "--max-lora-rank", str(rank), "--max-loras", str(HELD), "--max-cpu-loras", str(HELD)]
    is_all = lora.targets == "all-linear"
    targets = ["all"] if is_all else sorted({name.rpartition(".")[2] for name in lora.targets})
    numbers = ["--max-lora-rank", str(lora.rank), "--max-loras-per-batch", str(HELD), "--max-loaded-loras", str(HELD)]
    return ["--enable-lora", *numbers, "--lora-target-modules", *targets]


def _key_file(child: Child, own_key: str | None) -> Path:
    """Write SGLang's settings file, with its key. Only this user can read it."""
    path = child.runtime_dir / f"{child.name}.yaml"
    path.touch(mode=0o600)
    path.write_text(f"api-key: {own_key}\n")
    return path


def environment(config: Config, number: int) -> dict[str, str]:
    """Return the engine's environment: ours, defaults for the engine, its devices, and the API key.

    The key is passed here because a command line is visible to other users.
    """
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES.values()}
    updating = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"} if config.engine_serves_adapters else {}
    is_vllm = config.rollout.engine == "vllm"
    # vLLM gets handles of memory as a pickle. Its socket is private to this user.
    handles = {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1"} if is_vllm and direct_way(config) == "memory" else {}
    wanted = VLLM_ENVIRONMENT | updating | handles | {"OMP_NUM_THREADS": str(config.rollout.torch_threads)} | inherited
    api_key = {"VLLM_API_KEY": config.rollout.api_key} if config.rollout.api_key else {}
    return wanted | of_foreign_server(config, number) | api_key


def is_running(child: Child) -> bool:
    """Return whether the run has already been running, so that this process replaces one that ended. If its server does
    not answer, the clients of the server know this already, and notice themselves when it answers again."""
    return (read_state(child.run_dir) or {}).get("status") == RunState.RUNNING


def free_port() -> int:
    """Return an unused port. Foreign engines do not report a port that the system chooses for them."""
    with bind(LOOPBACK, 0) as listener:
        port: int = listener.getsockname()[1]
        return port


class ServerClaim:
    """A claim of this run on the server. Each lease lasts `LEASE_S` seconds; the run renews it, and releases it at the
    end."""

    def __init__(
        self, client: ServerClient, run_id: str, nonce: str, *, is_only: bool = True, is_shared: bool = False
    ) -> None:
        """`is_only`: the run has no other server, so it ends if another run takes this one. `is_shared`: the run
        changes nothing on the server, and claims nothing."""
        self.client, self._run, self._is_only, self._is_shared = client, (run_id, nonce), is_only, is_shared

    async def take(self) -> None:
        """Claim the server. Raises `RolloutError` with status 409 while another run holds the claim."""
        if not self._is_shared:
            await self.client.claim(*self._run, lease_s=LEASE_S)

    @asynccontextmanager
    async def renewed(self) -> AsyncIterator[None]:
        """Renew the claim for the length of the body, then release it.

        Raises `RolloutError` if another run has taken the only server. Other failures are ignored: the server's clients
        notice them, and use its other servers.
        """
        log = Paced(logger)

        async def renew() -> None:
            while True:
                await asyncio.sleep(LEASE_S / 4)
                try:
                    await self.take()
                except (RolloutError, Stalled) as error:
                    if not isinstance(error, RolloutError) or error.status != CONFLICT:
                        continue
                    if self._is_only:
                        raise
                    log.info(f"the run goes on without this server: {error}")

        try:
            async with alongside(renew()):
                yield
        finally:
            with suppress(RolloutError, Stalled):
                if not self._is_shared:
                    await self.client.claim(*self._run, lease_s=0.0)


async def await_server(config: Config, claim: ServerClaim, process: Process | None) -> None:
    """Wait until the server answers and this run has claimed it.

    Raises `RolloutError` as soon as waiting cannot help, or after the time limit.
    """
    url, engine = claim.client.url, config.rollout.engine
    seconds = config.supervisor.ready_timeout_s
    limit = time.monotonic() + (min(CLAIM_TIMEOUT_S, seconds) if config.rollout.urls else seconds)
    while True:
        try:
            await claim.client.alive()
            await claim.client.check()
            return await claim.take()
        except (RolloutError, Stalled) as error:
            if process is not None and process.returncode is not None:
                raise RolloutError(url, f"{engine} exited with code {process.returncode} before answering") from None
            status = error.status if isinstance(error, RolloutError) else None
            if (status is not None and status < 500 and status != CONFLICT) or time.monotonic() > limit:
                message = error.message if isinstance(error, RolloutError) else str(error)
                raise RolloutError(url, f"{message}{remedy(status, engine)}", status) from None
        await asyncio.sleep(ASK_EVERY_S)


def remedy(status: int | None, engine: str) -> str:
    """Return advice for an answer with this status; None means that there was no answer."""
    match status:
        case None:
            return "; start it first, or correct rollout.urls"
        case 401 | 403:
            return "; set PENSTOCK_API_KEY, and PENSTOCK_ADMIN_API_KEY if that server has a separate key for control"
        case 200 | 404 | 405:
            return f"; this server does not fit rollout.engine {engine}: correct rollout.urls or rollout.engine"
        case _:
            return ""


def _lines_about(names: tuple[str, ...], text: str) -> str:
    """Return the lines about these metrics. Raises ValueError if one is too long, or if there are too many."""
    lines = [line for line in text.split("\n") if line.removeprefix("# TYPE ").startswith(names)]
    if len(lines) > MOST_LINES or any(len(line) > MAX_LINE for line in lines):
        raise ValueError("the metrics have long or many lines")
    return "\n".join([*lines, ""])


def _total(family: Metric) -> float:
    return sum(sample.value for sample in family.samples if not sample.name.endswith("_created"))


def _count(value: float) -> int:
    """Return a metric as a whole number. Raises ValueError if it is negative, too large, or NaN."""
    if not 0 <= value < MAX_COUNT:
        raise ValueError(f"{value} is no count")
    return int(value)


class EngineMetrics(Member):
    """Reads the engine's own metrics. The engine counts as busy while it reports running requests. One that the run
    has started is restarted if it then makes no progress; a server of others cannot be."""

    def __init__(self, name: str, config: Config, client: ServerClient, session: HttpSession) -> None:
        self._name, self._meters = name, METERS[config.rollout.engine]
        self._client, self._session, self._is_ours = client, session, not config.rollout.urls
        self._tokens, self._running, self._busy_s = 0, 0, 0.0
        self._seen_at = time.time()
        self._spans: list[BusySpan] = []

    async def keep_reading(self) -> None:
        """Read the metrics every `ASK_EVERY_S` seconds."""
        while True:
            await self._read()
            await asyncio.sleep(ASK_EVERY_S)

    async def _read(self) -> None:
        """Read the metrics once. An engine that does not answer is ignored: its clients notice that. Malformed metrics
        are ignored too."""
        try:
            url = self._client.url
            text = (await self._session.send("GET", url, "/metrics", timeout_s=ASK_EVERY_S * 4)).decode()
            families = text_string_to_metric_families(_lines_about(self._meters, text))
            totals = {family.name: _total(family) for family in families}
            known = dict(zip(self._meters, (self._tokens, 0), strict=True)) | totals
            self._tokens, running = [_count(known[name]) for name in self._meters]
            if running and self._client.takes_turns and await self._client.is_asleep():
                running = 0  # an engine does not count requests that end as it falls asleep
        except Exception:  # the parser raises whatever its text leads to
            self._running = 0
            return
        now = time.time()
        if self._running and running:
            self._busy_s += now - self._seen_at
            self._spans.append(BusySpan(process=self._name, kind="generate", start=self._seen_at, end=now))
        self._seen_at, self._running = now, running

    def telemetry(self) -> Telemetry:
        spans, self._spans = self._spans, []
        counters = {"tokens": self._tokens, "active": self._running}
        doing = "generation" if self._running and self._is_ours else ""
        return Telemetry(progress=self._tokens, doing=doing, busy_s=self._busy_s, counters=counters, spans=spans)
