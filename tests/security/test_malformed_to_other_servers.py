"""Thousands of requests that no client should send, at the servers of a run beside the rollout servers: the file
service, an episode's endpoint, and the Atropos port. Each is refused, and good requests are answered afterwards."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import pytest
from fake_ports import leased
from malformed_requests import HEADERS, METHODS, WRONG, Malformed, broken, malformed
from scripted_policy import ScriptedPolicy
from test_atropos import REGISTRATION, Api, api, group
from yarl import URL

from penstock.compat.gateway import AgentGateway
from penstock.config import Config, TinyModelConfig
from penstock.envs.manager import EnvManager
from penstock.model.chat import ChatTokenizer
from penstock.model.tiny import write_tiny_model
from penstock.ports.environment import Endpoint
from penstock.rollout.app import ApiKeys, openapi
from penstock.runtime.file_service import link, serving_files
from penstock.runtime.http_server import bind, listening, url_of
from penstock.samples import Trajectory
from penstock.types import EpisodeId, Sampling, SegmentGrant, Task

pytestmark = [pytest.mark.integration, pytest.mark.long]

LEGAL_HERE = (b"REFUSE", b'"prompt_token_ids": [64]', b'"max_tokens": 1000', b'"max_new_tokens": 1000')
"""What only another template or vocabulary refuses; and an episode gives as many tokens as it has left."""
COUNT, CONNECTIONS, SECRET = 2_000, 8, "the secret of the run"
__all__ = ["api"]


async def statuses(url: str, requests: Sequence[Malformed]) -> list[tuple[int, Malformed]]:
    """Send the requests, over a few connections. Return the status of each answer."""
    left, got = iter(requests), list[tuple[int, Malformed]]()
    connector = aiohttp.TCPConnector(force_close=True)  # the server closes after some refusals
    async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=30)) as session:

        async def send() -> None:
            for each in left:
                address = URL(f"{url}{each.path}", encoded=True)
                async with session.request(each.method, address, data=each.body, headers=each.headers) as reply:
                    await reply.read()
                    got.append((reply.status, each))

        async with asyncio.TaskGroup() as senders:
            for _ in range(CONNECTIONS):
                senders.create_task(send())
    return got


def check(got: list[tuple[int, Malformed]]) -> None:
    assert len(got) == COUNT
    odd = [f"{status}: {each}"[:400] for status, each in got if not 400 <= status < 500]
    assert not odd, "\n".join([f"{len(odd)} of {COUNT}", *odd[:10]])


def file_requests(draw: random.Random) -> Iterator[Malformed]:
    """Right tokens of wrong paths, and wrong tokens of right ones; never both right."""
    wrong = [
        "",
        "pool",
        "pool/",
        "pool/\0",
        "pool/" + "x" * 5000,
        "pool/../secret",
        "pool//../../secret",
        "/etc/passwd",
    ]
    wrong += ["pool/x/y", "pool/\udcff".encode("utf-8", "replace").decode(), "weights/x", "pool/é\u202e\n"]
    ranges = ["bytes=9-1", "bytes=-", "bytes=a-b", "bytes=0-1,5-9" * 200, "lines=1-2", "bytes=" + "9" * 300 + "-", "\t"]
    for _ in range(COUNT):
        path = draw.choice(wrong) if draw.random() < 0.7 else "pool/x"
        whole = link("", path, SECRET)
        if path == "pool/x":
            token = draw.choice(["", "0" * 64, "%C3%A9", "%ff", "%00", "a" * 10_000, "&token=", whole[-63:]])
            whole = f"/{quote(path)}?token={token}"
        headers = draw.choice(HEADERS) | {"Range": draw.choice(ranges)}
        body = draw.choice([b"", b"{", draw.randbytes(1000)])
        yield Malformed("file", draw.choice([*METHODS, "HEAD"]), whole, body, headers)


async def test_the_file_service(tmp_path: Path) -> None:
    (tmp_path / "pool").mkdir()
    (tmp_path / "pool" / "x").write_text("a record")
    (tmp_path / "secret").write_text("no")
    async with serving_files([tmp_path], address="127.0.0.1", secret=SECRET) as url:
        check(await statuses(url, list(file_requests(random.Random(0)))))
        async with aiohttp.ClientSession() as session:
            for given, status in (("bytes=2-7", 206), ("bytes=20-30", 416)):
                async with session.get(link(url, "pool/x", SECRET), headers={"Range": given}) as reply:
                    assert reply.status == status, await reply.text()
                    assert status != 206 or await reply.text() == "record"


def pushes(draw: random.Random) -> Iterator[Malformed]:
    for _ in range(COUNT):
        path = draw.choice(["/register-env", "/scored_data", "/scored_data_list", "/register", "/nowhere"])
        headers = draw.choice(HEADERS) if draw.random() < 0.2 else {}
        if draw.random() < 0.5 or path in ("/register", "/nowhere"):
            _, body = broken(draw, path)
            if path == "/scored_data_list" and body.strip() == b"[]":
                body = b"[[]]"
        else:
            name, wrong = draw.choice([("group_size", "array")] if path == "/register-env" else FIELDS)
            whole: Any = (REGISTRATION if path == "/register-env" else group()) | {name: draw.choice(WRONG[wrong])}
            body = json.dumps([whole] if path == "/scored_data_list" else whole).encode()
        yield Malformed("push", "POST", path, body, headers)


FIELDS = [(name, kind) for name in ("tokens", "masks", "scores") for kind in ("string", "number", "boolean", "object")]


async def test_the_atropos_port(api: Api) -> None:
    check(await statuses(api.url, list(pushes(random.Random(0)))))
    assert (await api.ask("POST", "/register-env", REGISTRATION))[0] == 200
    await api.lease()
    assert (await api.push(1.0))[0] == 200
    await asyncio.gather(*api.leases)
    assert api.rewards == [1.0, 0.0]


class Always:
    """Grants at once."""

    async def request(self, so_far: Trajectory, *, unfinished: bool, num_tokens: int) -> SegmentGrant:
        return SegmentGrant(episode=so_far.episode, max_tokens=8)

    def generated(self, episode: EpisodeId, *, num_tokens: int) -> None:
        """Do nothing."""


async def test_the_endpoint_of_an_episode(tmp_path: Path) -> None:
    write_tiny_model(tmp_path, TinyModelConfig(), 512)
    chat = ChatTokenizer.load(tmp_path)
    gateway, listener = AgentGateway(chat, model_name="tiny"), bind("127.0.0.1", 0)
    gateway.url = url_of("127.0.0.1", listener)
    got: list[tuple[int, Malformed]] = []

    class Agent:
        blocking = False

        def __init__(self, task: Task) -> None:
            pass

        async def play(self, llm: Endpoint, seed: int) -> float:
            app = gateway._sessions[llm.api_key].app
            routes = [route for here in app._exact.values() for route in here] + [route for _, route in app._below]
            schema = openapi(routes, ApiKeys())
            odd = malformed(schema, 2 * COUNT, 0, vocab_size=chat.vocab_size, max_context=96)
            refused = (each for each in odd if not any(legal in each.body for legal in LEGAL_HERE))
            got.extend(await statuses(llm.base_url.removesuffix("/v1"), [*islice(refused, COUNT)]))
            body = {"messages": [{"role": "user", "content": "a"}]}
            where = f"{llm.base_url}/chat/completions"
            async with aiohttp.ClientSession() as session, session.post(where, json=body) as reply:
                assert reply.status == 200, await reply.text()
            return 1.0

    settings = Config.model_validate({"env": {"max_turns": 4, "max_new_tokens": 8}, "model": {"max_context": 96}})
    job, ended = (
        leased(range(1), max_tokens=8, sampling=Sampling(max_new_tokens=8), deadline_s=120.0),
        list[Trajectory](),
    )
    async with listening(gateway, listener):
        policy = ScriptedPolicy([[*chat.encode("b"), chat.eos_ids[0]]])
        make: Any = Agent
        manager = EnvManager(settings, make=make, policy=policy, grants=Always(), chat=chat, gateway=gateway)
        await manager.play(job, lambda trajectory, _: ended.append(trajectory))
    assert ended[0].error is None, ended[0].error
    check(got)
    assert ended[0].reward == 1.0 and len(ended[0].turns) == 1
