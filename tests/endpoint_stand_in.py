"""A real HTTP server that speaks as an endpoint of the OpenAI API does: it wants a key, and answers chat requests."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

KEY = "the-right-key"
Reply = Callable[[dict[str, Any]], "Answer"]


class Answer(NamedTuple):
    """A status, the body and further headers."""

    status: int
    body: Any
    headers: tuple[tuple[str, str], ...] = ()


def said(content: str | None, *, finish: str = "stop", calls: list[tuple[str, str]] | None = None) -> Answer:
    """An answer, perhaps with calls of tools (name, arguments)."""
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if calls:
        message["tool_calls"] = [
            {"id": f"c{n}", "type": "function", "function": {"name": name, "arguments": arguments}}
            for n, (name, arguments) in enumerate(calls)
        ]
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return Answer(200, {"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 3}})


def error(status: int, message: str, *headers: tuple[str, str]) -> Answer:
    return Answer(status, {"error": {"message": message}}, headers)


class Endpoint(ThreadingHTTPServer):
    daemon_threads = True
    reply: Reply

    def __init__(self, reply: Reply) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.reply = reply
        self.asked: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.lock = threading.Lock()
        self.num_open = self.most_open = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Endpoint
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(self._refusal() or Answer(200, {"object": "list", "data": [{"id": "teacher"}]}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            self.server.asked.append(body)
            self.server.times.append(time.monotonic())
            self.server.num_open += 1
            self.server.most_open = max(self.server.most_open, self.server.num_open)
        try:
            answer = self._refusal() or self.server.reply(body)
        finally:
            with self.server.lock:
                self.server.num_open -= 1
        self._send(answer)

    def _refusal(self) -> Answer | None:
        is_known = self.headers["authorization"] == f"Bearer {KEY}"
        return None if is_known else error(401, "Incorrect API key provided")

    def _send(self, answer: Answer) -> None:
        data = json.dumps(answer.body).encode()
        self.send_response(answer.status)
        for name, value in (("content-type", "application/json"), ("content-length", str(len(data))), *answer.headers):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@contextmanager
def serving(reply: Reply) -> Iterator[Endpoint]:
    """An endpoint that answers each chat request with `reply(body)`."""
    with Endpoint(reply) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
