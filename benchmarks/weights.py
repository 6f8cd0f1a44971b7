"""What a weights update costs generation, and whether every token says which weights made it.

`tiny_pause_ms`: a server process generates for several clients, one of which streams; the tiny policy's weights are
updated over HTTP again and again. The version spans of the streamed answer say which token was the first of new
weights; generation stood still for as long as that token came later than others do (than the median distance). Seen
from the client, so it holds whatever the server, the socket and the client add.

`one_gb_pause_vs_copy`: in one process, so that both are measured alike: the engine's own clock, from the end of the
last step under the old weights (1 GB of float32) to the beginning of the first under the new, over the time a plain
copy of 1 GB of tensors takes with the same threads, in turns.

`publish_gb_per_s_vs_copy`: a copy of the same tensors to new memory, over all phases of an update together: to write
and verify the file (`publish_s`), to map and verify it (`begin_s`), to load it (`commit_s`). `learner_stall_share*` and
`peak_extra_bytes_ratio_*`, with ranks on one machine and on several: see `publishing_ranks.py`.

`collective_gb_per_s`, `file_gb_per_s`: 1 GB to two processes that take themselves to be on other machines, until both
have verified it, by a broadcast and by HTTP.

`updates_in_a_row`, for each transport: a server process is updated as fast as it answers while 256 requests are always
in flight. Its policy is made so that the greedy token is a function of the weights alone, which tells what made a
token, whatever its version span says.

With `--device cuda` only the second is taken, of a policy of real size in bfloat16: `pause_s` against a copy of the
same bytes within the device, and how long it takes until the weights have come there (`begin_s`), against a copy of as
many bytes from pinned memory.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from itertools import pairwise
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import aiohttp
import msgspec
import torch
from hardware import accelerator_name, real_policy, seconds
from publishing_ranks import peak_extra_bytes_ratio, stall_share
from report import Benchmark, arguments, publish
from rollout_http import server

from penstock.config import TinyModelConfig
from penstock.model.load_policy import load_policy
from penstock.model.tiny import write_tiny_model
from penstock.ports.observer import BusySpan
from penstock.processes.slot_server import make_update
from penstock.rollout.bodies import GenerateBody, GenerateReply, SamplingBody, decode, encode
from penstock.rollout.client import RolloutClient
from penstock.rollout.request import GenerateRequest, SamplingParams
from penstock.rollout.runner import EngineRunner
from penstock.rollout.session import HttpSession
from penstock.rollout.slot_engine import SlotEngine
from penstock.runtime.file_service import WEIGHTS, serving_files
from penstock.types import WeightsHandle, WeightsTransport
from penstock.weights import receiver as receiver_module
from penstock.weights import shared_memory
from penstock.weights.broadcast import Offers
from penstock.weights.publication import WeightsPublisher
from penstock.weights.receiver import Receiver, linked

MAX_CONTEXT, LONG_CONTEXT = 512, 16384
RANKS = (2, 4)
TRANSPORTS: tuple[WeightsTransport, ...] = ("shared_memory", "collective", "file")
"""Those by which our server gets weights."""
BENCHMARK = Benchmark(
    name="weights",
    measures=["weights", "rollout"],
    figures=[
        *("tiny_pause_ms", "tiny_pause_worst_ms", "tiny_pause_updates"),
        *("one_gb_bytes", "one_gb_pause_s", "one_gb_copy_s", "one_gb_pause_vs_copy"),
        *("publish_gb_per_s_vs_copy", "publish_s", "begin_s", "commit_s", "learner_stall_share"),
        *(f"peak_extra_bytes_ratio_{count}_ranks" for count in RANKS),
        f"learner_stall_share_{RANKS[0]}_machines",
        *(f"peak_extra_bytes_ratio_{count}_machines" for count in RANKS),
        *("collective_gb_per_s", "file_gb_per_s", "collective_vs_file"),
        *(
            f"{transport}_updates_in_a_row{figure}"
            for transport in TRANSPORTS
            for figure in ("", "_per_s", "_answers", "_tokens", "_versions_seen", "_lost", "_misversioned")
        ),
    ],
    on_accelerator=[
        f"qwen3_0_6b_{figure}"
        for figure in (
            *("bytes", "pause_s", "copy_s", "new_copy_s", "publish_s", "begin_s", "commit_s", "pinned_copy_s"),
            *("pause_vs_copy", "begin_vs_pinned_copy"),
        )
    ],
)
SHARED_MEMORY = Path("/dev/shm")
HOST, SECRET = "127.0.0.1", "benchmark"
JOIN_S, MACHINES = 20.0, 2
PROMPT = [5, 6, 7, 8]
GENERATED_S = 60.0
"""How long the first token of new weights may take."""
CLIENTS, STREAM_TOKENS, TOKENS_BETWEEN = 8, 400, 12
ONE_GB = TinyModelConfig(hidden_size=1792, intermediate_size=4864, num_layers=7, num_heads=14, num_kv_heads=7)
REQUESTS, FEW_REQUESTS, TOKENS, UPDATES = 256, 32, 96, 200

Tensors = Mapping[str, torch.Tensor]


def body(tokens: int, *, stream: bool = False) -> bytes:
    sampling = SamplingBody(max_new_tokens=tokens, ignore_eos=True, temperature=0.0)
    return encode(GenerateBody(input_ids=[*PROMPT], sampling_params=sampling, return_text=False, stream=stream))


async def ask(session: aiohttp.ClientSession, tokens: int) -> GenerateReply:
    async with session.post("/generate", data=body(tokens)) as response:
        return decode(await response.read(), GenerateReply)


@contextmanager
def published() -> Iterator[WeightsPublisher]:
    """A publisher whose files go with it."""
    with TemporaryDirectory(dir=SHARED_MEMORY) as directory:
        yield WeightsPublisher(Path(directory) / WEIGHTS, recycles=True)


def publish_next(publisher: WeightsPublisher, named: Tensors, policy_version: int) -> WeightsHandle:
    with publisher.open(shared_memory.layout(named), policy_version) as opened:
        return opened.write_whole(named.items(), policy_version)


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[tuple[aiohttp.ClientSession, RolloutClient]]:
    calls = HttpSession()
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        try:
            yield session, RolloutClient(url, calls)
        finally:
            await calls.close()


async def update(client: RolloutClient, handle: WeightsHandle) -> None:
    await client.begin_weights(handle)
    await client.commit_weights(handle)


async def tiny_pauses(url: str, tensors: Tensors, streams: int) -> list[float]:
    """Seconds, one per update that fell into a stream."""
    pauses: list[float] = []
    version = 0
    with published() as publisher:
        async with connected(url) as (session, client):

            async def others() -> None:
                while True:
                    await ask(session, STREAM_TOKENS)

            playing = [asyncio.create_task(others()) for _ in range(CLIENTS - 1)]
            for _ in range(streams):
                arrived: list[float] = []
                handle = publish_next(publisher, tensors, version + 1)
                updating: asyncio.Task[None] | None = None
                updated_at = 0
                async with session.post("/generate", data=body(STREAM_TOKENS, stream=True)) as response:
                    async for line in response.content:
                        if not line.startswith(b"data: {"):
                            continue
                        reply = decode(line[6:], GenerateReply)
                        now = time.perf_counter()
                        arrived += [now] * (len(reply.output_ids) - len(arrived))
                        if (updating is None or updating.done()) and len(arrived) >= updated_at + TOKENS_BETWEEN:
                            if updating is not None:
                                await updating
                                handle = publish_next(publisher, tensors, version + 1)
                            version, updated_at = version + 1, len(arrived)
                            updating = asyncio.create_task(update(client, handle))
                if updating is not None:
                    await updating
                gaps = [later - earlier for earlier, later in pairwise(arrived)]
                starts = [span.start for span in reply.meta_info.weight_versions[1:]]
                pauses += [gaps[start - 1] - median(gaps) for start in starts]
            for task in playing:
                task.cancel()
            await asyncio.gather(*playing, return_exceptions=True)
    return pauses


async def one_gb(directory: Path, rounds: int) -> dict[str, float]:
    write_tiny_model(directory, ONE_GB, MAX_CONTEXT)
    model = load_policy(directory, weights=False, seed=0)
    engine = SlotEngine(model, num_slots=4, max_context=MAX_CONTEXT, policy_version=0)
    found = await whole_updates(engine, rounds)
    return {
        "one_gb_bytes": found["bytes"],
        "one_gb_pause_s": found["pause_s"],
        "one_gb_copy_s": found["copy_s"],
        "one_gb_pause_vs_copy": found["pause_s"] / found["copy_s"],
        "publish_gb_per_s_vs_copy": found["new_copy_s"] / (found["publish_s"] + found["begin_s"] + found["commit_s"]),
        **{name: found[name] for name in ("publish_s", "begin_s", "commit_s")},
    }


async def whole_updates(engine: SlotEngine, rounds: int) -> dict[str, float]:
    """Medians over the rounds, and a plain copy of the same tensors on the same device after each."""
    device = engine.model.device
    runner = EngineRunner(engine, process="rollout-0")
    expected = shared_memory.layout(engine.parameters())
    transaction = make_update(runner, lambda handle: shared_memory.receive(handle, expected))
    source = {name: parameter.detach().clone() for name, parameter in engine.parameters().items()}
    target = {name: torch.empty_like(tensor).fill_(0) for name, tensor in source.items()}
    num_bytes = sum(tensor.nbytes for tensor in source.values())
    runner.start()
    pauses, copies, phases = list[float](), list[float](), list[list[float]]()
    new_copies = list[float]()

    def copy() -> None:
        for name, tensor in source.items():
            target[name].copy_(tensor)

    with published() as publisher:
        for version in range(1, rounds + 2):
            request = GenerateRequest(
                rid=f"r{version}",
                prompt_ids=PROMPT,
                params=SamplingParams(temperature=0.0, ignore_eos=True),
                max_new_tokens=(engine.max_context - len(PROMPT),),
                seeds=(0,),
            )
            times = [time.perf_counter()]
            handle = await asyncio.to_thread(publish_next, publisher, source, version)
            times.append(time.perf_counter())
            running = asyncio.create_task(runner.generate(request))
            await transaction.begin(handle)
            times.append(time.perf_counter())
            runner.meter.drain()
            await transaction.commit(version)
            times.append(time.perf_counter())
            spans = await generated(runner, until=version)
            runner.abort(request.rid)
            await running
            before = max(span.end for span in spans if span.policy_version < version)
            after = min(span.start for span in spans if span.policy_version == version)
            copy_s = wall_s(copy, device)
            if version > 1:  # the first round warms up
                pauses.append(after - before)
                copies.append(copy_s)
                new_copies.append(wall_s(lambda: [tensor.clone() for tensor in source.values()], device))
                phases.append([end - start for start, end in pairwise(times)])
    await runner.stop()
    publish_s, begin_s, commit_s = (median(phase) for phase in zip(*phases, strict=True))
    return {
        "bytes": float(num_bytes),
        "pause_s": median(pauses),
        "copy_s": median(copies),
        "new_copy_s": median(new_copies),
        "publish_s": publish_s,
        "begin_s": begin_s,
        "commit_s": commit_s,
    }


async def generated(runner: EngineRunner, *, until: int) -> list[BusySpan]:
    """Return the spans of generation, to the first one of a version."""
    spans: list[BusySpan] = []
    async with asyncio.timeout(GENERATED_S):
        while not any(span.policy_version == until for span in spans):
            spans += [span for span in runner.meter.drain() if span.kind == "generate"]
            await asyncio.sleep(0.001)
    return spans


def wall_s(work: Callable[[], object], device: torch.device) -> float:
    if device.type != "cpu":
        return seconds(work, device)
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


async def on_device(device: torch.device, rounds: int) -> dict[str, float]:
    """Updates of a policy of real size."""
    model = real_policy(device=device, dtype=torch.bfloat16)
    engine = SlotEngine(model, num_slots=4, max_context=LONG_CONTEXT, policy_version=0)
    found = await whole_updates(engine, rounds)
    pinned = torch.empty(int(found["bytes"]), dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(pinned, device=device)
    pinned_s = median(seconds(lambda: there.copy_(pinned), device) for _ in range(rounds))
    ratios = {"pause_vs_copy": found["pause_s"] / found["copy_s"], "begin_vs_pinned_copy": found["begin_s"] / pinned_s}
    return found | {"pinned_copy_s": pinned_s} | ratios


def telling(tensors: Tensors, version: int, vocab_size: int) -> dict[str, torch.Tensor]:
    """Weights under which the greedy token is `version`, modulo the vocabulary, whatever came before: every embedding
    is the same, nothing is added to it, and one row of the head agrees with it."""
    told = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    for name in told:
        if "norm" in name or name == "model.embed_tokens.weight":
            told[name].fill_(1.0)
    told["lm_head.weight"][version % vocab_size] = 1.0
    return told


@asynccontextmanager
async def placed(
    publisher: WeightsPublisher, transport: WeightsTransport
) -> AsyncIterator[Callable[..., WeightsHandle]]:
    """Yield what publishes tensors as a version for servers that get them by this transport. For the two between
    machines, its file seems to be on another one."""
    offers = Offers(HOST)
    async with serving_files([publisher.directory.parent], address=HOST, secret=SECRET) as service:

        def publish_there(named: Tensors, version: int) -> WeightsHandle:
            handle = publish_next(publisher, named, version)
            if transport == "shared_memory":
                return handle
            far = linked(handle, service=service, secret=SECRET, machine="another")
            return offers.add(far) if transport == "collective" else far

        try:
            yield publish_there
        finally:
            offers.close()


def receive_all(connection: Connection, shapes: Mapping[str, tuple[int, ...]], directory: str) -> None:
    """Receive one handle after another, and tell the seconds each took."""
    torch.set_num_threads(1)
    expected = {name: (shape, torch.float32) for name, shape in shapes.items()}
    receiver_module.FILES = Path(f"{directory}.files")
    receiver_module.FILES.symlink_to("files of another machine " + directory)
    receiver = Receiver(expected, machine=directory, directory=Path(directory))
    connection.send(0.0)
    while (handle := connection.recv()) is not None:
        start = time.perf_counter()
        receiver(handle)
        assert receiver.transport == ("collective" if handle.meeting else "file")
        connection.send(time.perf_counter() - start)


async def between_machines(size: TinyModelConfig, rounds: int) -> dict[str, float]:
    with TemporaryDirectory() as directory:
        write_tiny_model(Path(directory), size, MAX_CONTEXT)
        tensors = dict(load_policy(Path(directory), weights=False, seed=0).named_parameters())
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    speeds: dict[WeightsTransport, list[float]] = {"collective": [], "file": []}
    pipes = [Pipe() for _ in range(MACHINES)]
    with published() as publisher, TemporaryDirectory(dir=SHARED_MEMORY) as received:
        processes = [
            get_context("spawn").Process(target=receive_all, args=(theirs, shapes, f"{received}/{n}"), daemon=True)
            for n, (_, theirs) in enumerate(pipes)
        ]
        for process in processes:
            process.start()

        async def told() -> float:
            """Seconds until the last one has it."""
            seconds: list[float] = await asyncio.gather(*(asyncio.to_thread(ours.recv) for ours, _ in pipes))
            return max(seconds)

        await told()
        version = 0
        for _ in range(rounds):
            for transport, found in speeds.items():
                version += 1
                async with placed(publisher, transport) as publish_there:
                    handle = publish_there(tensors, version)
                    for ours, _ in pipes:
                        ours.send(handle)
                    found.append(num_bytes / await told() / 1e9)
        for (ours, _), process in zip(pipes, processes, strict=True):
            ours.send(None)
            process.join(JOIN_S)
    return {
        **{f"{transport}_gb_per_s": median(found) for transport, found in speeds.items()},
        "collective_vs_file": median(fast / slow for fast, slow in zip(*speeds.values(), strict=True)),
    }


async def in_a_row(
    url: str, tensors: Tensors, vocab_size: int, updates: int, transport: WeightsTransport, *, num_requests: int
) -> dict[str, float]:
    lost = misversioned = num_tokens = num_answers = 0
    seen: set[int] = set()
    over = False

    def judge(reply: GenerateReply) -> None:
        nonlocal lost, misversioned, num_tokens, num_answers
        ids, meta = reply.output_ids, reply.meta_info
        lost += len(ids) != TOKENS
        versions = [int(span.version) for span in meta.weight_versions for _ in range(span.start, span.end)]
        truths = [version % vocab_size for version in versions]
        misversioned += abs(len(truths) - len(ids)) + sum(a != b for a, b in zip(truths, ids, strict=False))
        num_tokens, num_answers = num_tokens + len(ids), num_answers + 1
        seen.update(versions)

    with published() as publisher:
        async with connected(url) as (session, client), placed(publisher, transport) as publish_there:
            await client.forget_weights()
            await update(client, publish_there(telling(tensors, 1, vocab_size), 1))

            async def play() -> None:
                nonlocal lost
                while not over:
                    try:
                        judge(await ask(session, TOKENS))
                    except (aiohttp.ClientError, msgspec.DecodeError):  # a failed request is what is counted
                        lost += 1

            async with asyncio.TaskGroup() as tasks:
                for _ in range(num_requests):
                    tasks.create_task(play())
                start = time.perf_counter()
                for version in range(2, updates + 2):
                    await update(client, publish_there(telling(tensors, version, vocab_size), version))
                    if client.transport != transport:
                        raise SystemExit(f"policy_version {version} came by {client.transport}, not by {transport}")
                seconds = time.perf_counter() - start
                over = True
    found = {
        "": updates,
        "_per_s": updates / seconds,
        "_answers": num_answers,
        "_tokens": num_tokens,
        "_versions_seen": len(seen),
        "_lost": lost,
        "_misversioned": misversioned,
    }
    return {f"{transport}_updates_in_a_row{figure}": value for figure, value in found.items()}


def write_model(directory: Path, *, tied: bool) -> dict[str, torch.Tensor]:
    """The tiny policy with weights; returns them."""
    write_tiny_model(directory, TinyModelConfig(), MAX_CONTEXT)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
    model = load_policy(directory, weights=False, seed=0)
    model.save_pretrained(directory)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def main() -> None:
    options = arguments(__doc__ or "", device="DEVICE")
    device = torch.device(options.device or "cpu")
    figures: dict[str, float] = {}
    if device.type != "cpu":
        found = asyncio.run(on_device(device, 2 if options.quick else 7))
        figures = {f"qwen3_0_6b_{name}": value for name, value in found.items()}
        publish(BENCHMARK, figures, options.json, accelerator=accelerator_name(device))
        return
    with TemporaryDirectory() as directory:
        tensors = write_model(Path(directory), tied=True)
        with server(Path(directory), CLIENTS) as url:
            pauses = asyncio.run(tiny_pauses(url, tensors, 2 if options.quick else 8))
    figures["tiny_pause_ms"] = median(pauses) * 1000
    figures["tiny_pause_worst_ms"] = max(pauses) * 1000
    figures["tiny_pause_updates"] = len(pauses)
    with TemporaryDirectory() as directory:
        figures |= asyncio.run(one_gb(Path(directory), 2 if options.quick else 7))
    size = TinyModelConfig() if options.quick else ONE_GB
    figures["learner_stall_share"] = stall_share(size, 1 if options.quick else 3)
    rounds = 1 if options.quick else 3
    figures[f"learner_stall_share_{RANKS[0]}_machines"] = stall_share(size, rounds, num_ranks=RANKS[0])
    for count in RANKS:
        figures[f"peak_extra_bytes_ratio_{count}_ranks"] = peak_extra_bytes_ratio(size, count)
        figures[f"peak_extra_bytes_ratio_{count}_machines"] = peak_extra_bytes_ratio(size, count, on_machines=True)
    figures |= asyncio.run(between_machines(size, 2 if options.quick else 5))
    with TemporaryDirectory() as directory:
        tensors = write_model(Path(directory), tied=False)
        vocab_size = len(tensors["lm_head.weight"])
        count, requests = (20, FEW_REQUESTS) if options.quick else (UPDATES, REQUESTS)
        with server(Path(directory), requests) as url:
            for transport in TRANSPORTS:
                updates = in_a_row(url, tensors, vocab_size, count, transport, num_requests=requests)
                figures |= asyncio.run(updates)
    publish(BENCHMARK, figures, options.json)


if __name__ == "__main__":
    main()
