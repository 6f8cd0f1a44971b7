"""A collector that takes traces by OTLP over HTTP, as Jaeger, Phoenix and Langfuse do."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


class Span(NamedTuple):
    """A span as a collector sees it. Times are in seconds since the epoch."""

    name: str
    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    kind: int
    start: float
    end: float
    attributes: dict[str, Any]
    is_error: bool
    message: str
    resource: dict[str, Any]


class Collector(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.status = 200
        """What requests are answered with."""
        self.delayed = threading.Event()
        """Requests wait for this event before they are answered."""
        self.delayed.set()
        self.spans: list[Span] = []
        self.headers: list[dict[str, str]] = []
        self.changed = threading.Condition()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def wait_for(self, number: int, *, name: str = "", limit_s: float = 60.0) -> list[Span]:
        """Wait for so many spans with names that begin with `name`, and return them."""

        def found() -> list[Span]:
            return [span for span in self.spans if span.name.startswith(name)]

        with self.changed:
            assert self.changed.wait_for(lambda: len(found()) >= number, limit_s), f"{len(found())} of {number} spans"
            return found()


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        assert self.path == "/v1/traces" and self.headers["content-type"] == "application/x-protobuf"
        self.server.delayed.wait(60.0)
        if self.server.status == 200:
            with self.server.changed:
                self.server.headers.append({name.lower(): value for name, value in self.headers.items()})
                self.server.spans += decoded(body)
                self.server.changed.notify_all()
        answer = ExportTraceServiceResponse().SerializeToString()
        self.send_response(self.server.status)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


def decoded(body: bytes) -> list[Span]:
    """Return the spans of a request."""
    return [
        Span(
            name=span.name,
            trace_id=span.trace_id,
            span_id=span.span_id,
            parent_id=span.parent_span_id,
            kind=span.kind,
            start=span.start_time_unix_nano / 1e9,
            end=span.end_time_unix_nano / 1e9,
            attributes=values(span.attributes),
            is_error=span.status.code == 2,
            message=span.status.message,
            resource=values(of_resource.resource.attributes),
        )
        for of_resource in ExportTraceServiceRequest.FromString(body).resource_spans
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]


def values(attributes: Any) -> dict[str, Any]:
    return {each.key: value(each.value) for each in attributes}


def value(of: Any) -> Any:
    kind = of.WhichOneof("value")
    return [value(each) for each in of.array_value.values] if kind == "array_value" else getattr(of, kind)


@contextmanager
def collecting(port: int = 0) -> Iterator[Collector]:
    """A collector at this port; 0 takes a free one."""
    with Collector(port) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.delayed.set()
            server.shutdown()
            thread.join()
