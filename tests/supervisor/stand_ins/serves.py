"""Answers GET /health over HTTP: 503 twice, then 200."""

import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

from penstock.supervisor.child import Child

answers = iter([503, 503])


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(next(answers, 200) if self.path == "/health" else 404)
        self.end_headers()


if __name__ == "__main__":
    child = Child.from_environment()
    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()

    async def serve() -> None:
        stop = child.stop_event()
        child.report_ready(url=f"http://127.0.0.1:{server.server_port}")
        await stop.wait()

    child.run(serve)
