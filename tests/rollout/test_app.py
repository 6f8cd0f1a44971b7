"""Routes, methods, and unexpected errors."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response

from penstock.rollout.app import ApiKeys, App
from penstock.rollout.http import Route, answer


async def rest(request: Request) -> Response:
    return answer(request.path_params["rest"])


async def defect(request: Request) -> Response:
    raise KeyError("what only we should see")


@pytest.fixture
def app() -> App:
    routes = [Route("/under/{name}", ["GET"], rest), Route("/defect", ["GET"], defect), Route("/both", ["PUT"], rest)]
    return App([*routes, Route("/both", ["POST"], rest)], ApiKeys())


async def call(app: App, path: str, method: str = "GET") -> tuple[int, dict[bytes, bytes], Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {
        "type": "http",
        "path": path,
        "method": method,
        "headers": [(b"host", b"127.0.0.1")],
        "query_string": b"",
        "scheme": "http",
    }
    try:
        await app({**scope, "server": ("here", 80)}, receive, send)
    finally:
        call.body = msgspec.json.decode(sent[1]["body"])  # type: ignore[attr-defined]
    return sent[0]["status"], dict(sent[0]["headers"]), msgspec.json.decode(sent[1]["body"])


async def test_a_route_stands_for_what_lies_below_it(app: App) -> None:
    assert (await call(app, "/under/a/b"))[::2] == (200, "a/b")
    assert (await call(app, "/under/a", "HEAD"))[0] == 200
    assert (await call(app, "/under"))[::2] == (
        404,
        {"error": {"message": "the path /under does not exist on this server"}},
    )


async def test_methods_of_all_routes_of_a_path_are_told(app: App) -> None:
    assert [(await call(app, "/both", method))[0] for method in ("PUT", "POST")] == [200, 200]
    status, headers, _ = await call(app, "/both", "DELETE")
    assert (status, headers[b"allow"]) == (405, b"PUT, POST")


async def test_a_defect_is_told_without_details_and_left_to_the_log(app: App) -> None:
    with pytest.raises(KeyError, match="only we"):
        await call(app, "/defect")
    assert call.body == {"error": {"message": "internal error"}}  # type: ignore[attr-defined]
    assert app.responses == {("/defect", 500): 1}
