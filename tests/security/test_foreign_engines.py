"""An engine that a run starts is reached only through the proxy that asks for the keys of the run."""

from __future__ import annotations

import sys
from pathlib import Path

import aiohttp
import psutil
import pytest
from tiny_policy import until

from penstock.config import Config
from penstock.processes.foreign_server import engine_of
from penstock.supervisor.child import Child

ENGINE = f"""#!{sys.executable}
import socketserver, sys
from http.server import BaseHTTPRequestHandler

class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def address_string(self):
        return "the proxy"

socketserver.UnixStreamServer(sys.argv[sys.argv.index("--uds") + 1], Answer).serve_forever()
"""
"""It takes vLLM's arguments, and listens as vLLM does."""


@pytest.fixture
def child(tmp_path: Path) -> Child:
    (tmp_path / "rollout-0.sock").touch()  # as an engine that was killed leaves it
    return Child(name="rollout-0", run_dir=tmp_path, runtime_dir=tmp_path, run_id="run", nonce="nonce")


async def test_vllm_listens_on_no_port_that_other_users_reach(child: Child, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(ENGINE)
    python.chmod(0o700)
    settings = {"engine": "vllm", "python": str(python), "api_key": "play", "admin_api_key": "rule"}
    async with engine_of(child, Config.model_validate({"rollout": settings})) as (url, process):
        assert process is not None
        path = tmp_path / "rollout-0.sock"
        await until(path.is_socket)
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer play"}) as session:
            async with session.get(f"{url}/weight_info") as answer:
                assert answer.status == 200
            async with session.get(f"{url}/pause") as answer:
                assert answer.status == 401
        async with aiohttp.ClientSession() as session, session.post(f"{url}/health", data=bytes(100_000)) as answer:
            assert answer.status in (401, 405), "without a key, the proxy takes no body"
        assert psutil.Process(process.pid).net_connections("inet") == []
