"""A server without a key answers no other host name and no page of another origin, on any route."""

from __future__ import annotations

import asyncio

import pytest
from letters import Letters
from pydantic import ValidationError
from tiny_policy import serve

from penstock.compat.openai import OpenAI
from penstock.config import Config
from penstock.config.loopback import is_loopback
from penstock.rollout.app import ApiKeys, names_loopback
from penstock.rollout.http import Surface
from penstock.rollout.runner import EngineRunner

OWN = ["127.0.0.1", "127.0.0.1:8000", "127.9.8.7:1", "localhost", "LOCALHOST:8000", "[::1]", "[::1]:8000"]
FOREIGN = [
    *(
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "evil.example:127.0.0.1",
    ),
    *("0.0.0.0", "10.0.0.1:8000", "[::]", "[::2]:1", "localhost:x", "", ":8000", "127.0.0.1@evil.example", "127.1"),
    *("localhost.", "2130706433", "127.0.0.1:80:80", "[::1", "::ffff:10.0.0.1"),
    *("[::1%eth0]", "[::1%25eth0]:8000", "::1%", "[::1]x", "a]b"),
]
PAGES: list[dict[str, str]] = [
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1:1"},
    {"Origin": "http://localhost"},
    {"Origin": ""},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "nonsense"},
    {"Host": "evil.example"},
]


@pytest.mark.parametrize("host", OWN)
def test_a_loopback_host_is_this_machine(host: str) -> None:
    assert names_loopback(host.encode())


@pytest.mark.parametrize("host", FOREIGN)
def test_any_other_host_is_not(host: str) -> None:
    assert not names_loopback(host.encode())


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.8.7", "::1", "localhost", "LOCALHOST"])
def test_an_address_of_this_machine_alone_needs_no_key(host: str) -> None:
    assert is_loopback(host)
    Config.model_validate({"rollout": {"host": host}, "observe": {"metrics_host": host, "metrics_port": 9100}})


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "localhost.", "[::1]", "127.1", "", "gateway"])
def test_any_other_address_needs_one(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ValidationError, match="reachable from outside"):
        Config.model_validate({"rollout": {"host": host}})


async def ask(url: str, method: str, path: str, headers: list[tuple[str, str]]) -> tuple[int, str]:
    """Send a request with exactly these headers. Return status and body."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers)
    writer.write(f"{method} {path} HTTP/1.1\r\n{lines}Connection: close\r\nContent-Length: 2\r\n\r\n{{}}".encode())
    answer = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    head, _, body = answer.decode().partition("\r\n\r\n")
    return int(head.split()[1]), body


ROUTES = [
    *(("GET", path) for path in ("/health", "/ready", "/metrics", "/openapi.json", "/v1/models", "/nowhere")),
    *(("POST", path) for path in ("/generate", "/abort_request", "/v1/completions", "/v1/chat/completions", "/claim")),
    *(("POST", path) for path in ("/weights/forget", "/release_memory_occupation")),
    *(("OPTIONS", path) for path in ("/generate", "/weights/forget")),
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: ",".join(map(": ".join, page.items())))
async def test_every_route_of_a_server_without_a_key_refuses_a_page(runner: EngineRunner, page: dict[str, str]) -> None:
    surfaces: list[Surface] = [OpenAI(runner, Letters(), model_name="tiny")]
    async with serve(runner, tokenizer=Letters(), foreign=surfaces) as url:
        headers = list(({"Host": url.removeprefix("http://")} | page).items())
        for method, path in ROUTES:
            status, body = await ask(url, method, path, headers)
            assert status == 403 and "PENSTOCK_API_KEY" in body, (method, path, status, body)
        assert (await ask(url, "GET", "/health", headers[:0]))[0] in (400, 403)
        doubled = [("Host", url.removeprefix("http://")), ("Host", "evil.example")]
        assert (await ask(url, "GET", "/health", doubled))[0] in (400, 403)


async def test_pages_of_the_server_itself_and_programs_are_answered(runner: EngineRunner) -> None:
    async with serve(runner) as url:
        host = ("Host", url.removeprefix("http://"))
        for more in ([], [("Origin", url)], [("Sec-Fetch-Site", "same-origin")], [("Sec-Fetch-Site", "none")]):
            assert (await ask(url, "GET", "/health", [host, *more]))[0] == 200


async def test_a_server_with_a_key_may_have_any_name(runner: EngineRunner) -> None:
    async with serve(runner, keys=ApiKeys(generation="secret")) as url:
        named = [("Host", "rollout.example"), ("Authorization", "Bearer secret"), ("Origin", "https://page.example")]
        assert (await ask(url, "GET", "/ready", named))[0] == 200
        assert (await ask(url, "GET", "/ready", named[:1]))[0] == 401
        for malformed in ("[::1%eth0]", "[::1", "a]b", "[]", "a:b:c"):  # no route reads it
            headers = [("Host", malformed), *named[1:2]]
            assert (await ask(url, "GET", "/nowhere?a=b", headers))[0] == 404
    async with serve(runner, keys=ApiKeys(admin="secret")) as url:  # it generates without a key
        assert (await ask(url, "POST", "/generate", [("Host", "rollout.example")]))[0] == 403
