"""The trainer's side of weights on other machines: what it published, over HTTP, for whoever has the key to control."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from starlette.requests import Request
from starlette.responses import FileResponse, Response

from penstock.processes.listening import bind, listening, url_of
from penstock.rollout.app import App
from penstock.rollout.http import Refused, Route
from penstock.rollout.keys import Keys
from penstock.supervisor.procfs import boot_id
from penstock.types import WeightsHandle
from penstock.weights.shared_memory import published_file

PATH = "/weights/"


class Publications:
    """The files of a publisher."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.url = ""

    def routes(self) -> list[Route]:
        return [Route(PATH + "{version}", ["GET"], self.send, reply=None)]

    def tell(self, handle: WeightsHandle) -> WeightsHandle:
        """The handle, for other machines too."""
        return replace(handle, machine=boot_id(), url=f"{self.url}{PATH}{handle.policy_version}")

    async def send(self, request: Request) -> Response:
        """A whole file, or the range that is asked for."""
        version = request.path_params["rest"]
        if not version.isdecimal() or not (path := published_file(self._directory, int(version))).is_file():
            raise Refused(404, f"no weights of policy_version {version[:20]} are published here")
        return FileResponse(path)


@asynccontextmanager
async def publishing(directory: Path, address: str | None, key: str | None) -> AsyncIterator[Publications | None]:
    """Gives out what is published in `directory`, for the length of the body; None where all are on one machine.
    `key`: what opens it."""
    if address is None:
        yield None
        return
    published, listener = Publications(directory), bind(address, 0)
    published.url = url_of(address, listener)
    async with listening(App(published.routes(), Keys(admin=key)), listener):
        yield published
