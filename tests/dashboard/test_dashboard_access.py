"""Attacks: foreign names in Host, foreign origins, posts without the key, and other machines."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path

import aiohttp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from shown_run import KEY, RUN, Client, dashboard_of, make_run

from penstock.dashboard import web_app
from penstock.dashboard.access import Access, NoAccess, with_key
from penstock.dashboard.serving import address_to_open, listener_of


async def answer_to(dashboard: Client, method: str, path: str, body: str | None = None, **headers: str) -> int:
    """Return the status of a request with exactly these headers."""
    async with aiohttp.request(method, f"{dashboard.url}{path}", headers=headers, data=body) as answer:
        if answer.status >= 400 and "json" in answer.headers["Content-Type"]:
            assert (await answer.json())["error"]["message"]
        return answer.status


async def test_a_name_that_is_not_ours_gets_nothing(tmp_path: Path) -> None:
    make_run(tmp_path)
    async with dashboard_of(tmp_path) as dashboard:
        port = dashboard.url.rpartition(":")[2]
        for host in ("evil.com", "evil.com:80", "127.0.0.1.evil.com", "localhost.evil.com", "127.0.0.2", "", "[::2]"):
            for path in ("/", "/api/runs", f"/api/runs/{RUN}/live"):
                assert await answer_to(dashboard, "GET", path, Host=host) == 403, host
        for host in (f"localhost:{port}", f"127.0.0.1:{port}", "localhost:9999", "[::1]:1", "LOCALHOST"):
            assert await answer_to(dashboard, "GET", "/api/runs", Host=host) == 200, host


async def test_a_page_of_another_origin_gets_nothing(tmp_path: Path) -> None:
    make_run(tmp_path)
    async with dashboard_of(tmp_path) as dashboard:
        for origin in ("http://evil.com", "null", "http://localhost:1", dashboard.url.replace("http:", "https:")):
            assert await answer_to(dashboard, "GET", "/api/runs", Origin=origin) == 403, origin
        assert await answer_to(dashboard, "GET", "/api/runs", Origin=dashboard.url) == 200
        assert await answer_to(dashboard, "GET", "/api/runs", **{"Sec-Fetch-Site": "cross-site"}) == 403
        assert await answer_to(dashboard, "GET", "/api/runs", **{"Sec-Fetch-Site": "same-site"}) == 403
        assert await answer_to(dashboard, "GET", "/api/runs", **{"Sec-Fetch-Site": "same-origin"}) == 200


async def test_a_link_on_another_page_opens_the_dashboard(tmp_path: Path) -> None:
    make_run(tmp_path)
    followed = {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate", "Sec-Fetch-Dest": "document"}
    async with dashboard_of(tmp_path) as dashboard:
        assert await answer_to(dashboard, "GET", "/", **followed) == 200
        assert await answer_to(dashboard, "GET", "/", **{**followed, "Sec-Fetch-Dest": "iframe"}) == 403
        assert await answer_to(dashboard, "GET", "/api/runs", **followed) == 403
        assert await answer_to(dashboard, "POST", f"/api/runs/{RUN}/stop", **followed) == 403


async def test_a_stop_needs_key_origin_and_confirmation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[Path] = []

    async def stop(run_dir: Path, running: set[asyncio.Task[None]]) -> str | None:
        stopped.append(run_dir)
        return None

    monkeypatch.setattr(web_app, "stop_run", stop)
    run_dir = make_run(tmp_path, status="running")
    path, body = f"/api/runs/{RUN}/stop", json.dumps({"confirm": RUN})
    async with dashboard_of(tmp_path) as dashboard:
        keyed, ours = f"{path}?key={KEY}", {"Origin": dashboard.url}
        assert await answer_to(dashboard, "POST", path, body) == 403
        assert await answer_to(dashboard, "POST", path, body, **ours) == 403
        assert await answer_to(dashboard, "POST", keyed, body) == 403
        assert await answer_to(dashboard, "POST", keyed, body, Origin="http://evil.com") == 403
        assert await answer_to(dashboard, "POST", f"{path}?key=wrong", body, **ours) == 403
        assert await answer_to(dashboard, "GET", keyed, **ours) == 404
        for wrong in ("", "{}", '{"confirm": "other"}', "[", json.dumps({"confirm": RUN, "x": "y" * 9999})):
            assert await answer_to(dashboard, "POST", keyed, wrong, **ours) in (400, 413)
        assert stopped == []
        assert await answer_to(dashboard, "POST", keyed, body, **ours) == 202
        assert await answer_to(dashboard, "POST", f"/api/runs/nobody/stop?key={KEY}", body, **ours) == 404
    assert stopped == [run_dir]


@pytest.mark.parametrize("status", ["completed", "stopped", "failed"])
async def test_a_run_that_has_ended_is_not_stopped(tmp_path: Path, status: str) -> None:
    make_run(tmp_path, status=status)
    async with dashboard_of(tmp_path) as dashboard:
        url, ours = f"{dashboard.url}/api/runs/{RUN}/stop?key={KEY}", {"Origin": dashboard.url}
        async with dashboard.session.post(url, data=json.dumps({"confirm": RUN}), headers=ours) as answer:
            assert answer.status == 409
            assert (await answer.json())["error"]["message"] == f"run {RUN} has ended already: {status}"


async def test_a_stop_of_a_run_that_is_lost_says_what_the_command_says(tmp_path: Path) -> None:
    lost = make_run(tmp_path, "20260921-130000-bbbb", status="running", supervisor={"pid": 1})
    async with dashboard_of(tmp_path) as dashboard:
        body, ours = json.dumps({"confirm": lost.name}), {"Origin": dashboard.url}
        url = f"{dashboard.url}/api/runs/{lost.name}/stop?key={KEY}"
        async with dashboard.session.post(url, data=body, headers=ours) as answer:
            assert answer.status == 409, await answer.text()
            assert "supervisor" in (await answer.json())["error"]["message"]


async def test_other_machines_need_the_key_which_becomes_a_cookie(tmp_path: Path) -> None:
    make_run(tmp_path)
    async with dashboard_of(tmp_path, host="0.0.0.0") as dashboard:
        for path in ("/", "/api/runs", f"/api/runs/{RUN}/live", "/?key=", "/?key=wrong", f"/?key={KEY}x"):
            assert await answer_to(dashboard, "GET", path) == 403, path
        async with dashboard.session.get(f"{dashboard.url}/?key={KEY}", allow_redirects=False) as answer:
            assert answer.status == 303 and answer.headers["Location"] == "/"
            cookie = answer.headers["Set-Cookie"]
            assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and KEY not in cookie
        assert (await dashboard.get("runs"))["may_control"] is True


async def test_other_machines_may_know_the_server_by_any_name(tmp_path: Path) -> None:
    make_run(tmp_path)
    async with dashboard_of(tmp_path, host="0.0.0.0") as dashboard:
        for host in ("gateway.example:8080", "GATEWAY", "203.0.113.7:80", "[2001:db8::7]:80"):
            foreign, ours = {"Origin": "http://evil.com"}, {"Origin": f"http://{host}"}
            assert await answer_to(dashboard, "GET", f"/api/runs?key={KEY}", Host=host) == 200
            assert await answer_to(dashboard, "GET", "/api/runs", Host=host) == 403, "a page that rebinds its name"
            assert await answer_to(dashboard, "GET", f"/api/runs?key={KEY}", Host=host, **ours) == 200
            assert await answer_to(dashboard, "GET", f"/api/runs?key={KEY}", Host=host, **foreign) == 403
        for host in ("", ":80", "gateway:http"):
            assert await answer_to(dashboard, "GET", f"/api/runs?key={KEY}", Host=host) == 403


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "localhost"])
def test_the_printed_address_can_be_opened(host: str) -> None:
    with listener_of(host, 0) as listener:
        name = socket.gethostname() if host == "0.0.0.0" else "127.0.0.1"
        assert address_to_open(host, listener) == f"http://{name}:{listener.getsockname()[1]}"


async def test_reading_on_loopback_needs_no_key_and_gives_no_control(tmp_path: Path) -> None:
    async with dashboard_of(tmp_path) as dashboard:
        assert (await dashboard.get("runs"))["may_control"] is False
        async with dashboard.session.get(f"{dashboard.url}/?key={KEY}") as answer:
            assert answer.status == 200
        assert (await dashboard.get("runs"))["may_control"] is True


ACCESS = Access.of("127.0.0.1", "127.0.0.1", 8730, KEY)


@given(st.lists(st.tuples(st.sampled_from(["host", "origin", "cookie", "sec-fetch-site"]), st.binary(max_size=40))))
def test_whatever_the_headers_are_the_answer_is_yes_or_no(headers: list[tuple[str, bytes]]) -> None:
    scope = {
        "type": "http",
        "query_string": b"",
        "headers": [(name.encode(), value.replace(b"\0", b"")) for name, value in headers],
    }
    try:
        verdict = ACCESS.check(scope, controls=False)
    except NoAccess:
        return
    assert verdict == "open" and sum(name == "host" for name, _ in headers) == 1


def test_the_address_to_open_has_the_key() -> None:
    assert with_key("http://127.0.0.1:8730", ACCESS) == f"http://127.0.0.1:8730/?key={KEY}"
    assert KEY not in repr(ACCESS)
