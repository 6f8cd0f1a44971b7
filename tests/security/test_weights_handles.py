"""A handle of weights cannot make a server read, write or ask for anything but this model's published weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from published import publish
from starlette.types import Receive, Scope, Send

from penstock.ports.inference import WeightsOutOfReach
from penstock.runtime.http_server import bind, listening, url_of
from penstock.types import WeightsHandle
from penstock.weights import receiver as receiver_module
from penstock.weights.receiver import Receiver
from penstock.weights.shared_memory import WeightsMismatch, layout

NAMED = {"embed": torch.arange(6.0).reshape(2, 3)}


@pytest.fixture
def handle(tmp_path: Path) -> WeightsHandle:
    return publish(NAMED, directory=tmp_path / "run" / "weights", policy_version=1)


def receiver(tmp_path: Path, **settings: Any) -> Receiver:
    return Receiver(layout(NAMED), machine="here", directory=tmp_path / "received", **settings)


@pytest.mark.parametrize(
    "change",
    [
        *({"fingerprint": each} for each in ("", "../../evil", "a" * 31, "A" * 32, "a" * 32 + "\n", "/" * 32)),
        *({"machine": each} for each in ("../x", "a" * 65, "a b")),
        *({"url": each} for each in ("file:///etc/passwd", "ftp://host/x", "//host/x", "http://", "unix:/run/x")),
        *({"url": each} for each in ("http://key@host/x", "http://user:key@host/x", "HTTP:host", "javascript:1")),
        *({"url": "http://127.0.0.1:1/x", "num_bytes": each} for each in (-1, 0, 2**20, 2**62)),
    ],
)
def test_a_handle_of_another_form_is_refused(handle: WeightsHandle, tmp_path: Path, change: dict[str, Any]) -> None:
    with pytest.raises(WeightsMismatch):
        receiver(tmp_path)(replace(handle, **change))
    assert not list(tmp_path.glob("*evil*")) and not list(tmp_path.glob("received/*"))


def test_a_server_of_a_run_reads_only_where_the_run_publishes(handle: WeightsHandle, tmp_path: Path) -> None:
    of_run = receiver(tmp_path, published=lambda: [tmp_path / "run" / "weights"])
    assert of_run(handle)["embed"].equal(NAMED["embed"])
    outside = publish(NAMED, directory=tmp_path / "other", policy_version=1)
    crooked = replace(handle, path=f"{tmp_path}/run/weights/../../other/1/model.safetensors")
    (tmp_path / "run" / "weights" / "link").symlink_to(tmp_path / "other")
    linked = replace(handle, path=f"{tmp_path}/run/weights/link/1/model.safetensors")
    for each in (outside, crooked, linked, replace(handle, path="/etc/shadow")):
        with pytest.raises(WeightsMismatch, match="is not where this run publishes weights"):
            of_run(each)
    assert receiver(tmp_path)(outside)["embed"].equal(NAMED["embed"]), "a server without a run reads any weights"


@asynccontextmanager
async def sending(answer: Any) -> AsyncIterator[str]:
    with bind("127.0.0.1", 0) as listener:
        async with listening(answer, listener):
            yield url_of("127.0.0.1", listener)


async def test_a_redirect_is_not_followed(
    handle: WeightsHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "MAX_SILENCE_S", 0.2)
    asked: list[str] = []

    async def redirect(scope: Scope, receive: Receive, send: Send) -> None:
        asked.append(scope["path"])
        headers = [(b"location", b"/elsewhere"), (b"content-length", b"0")]
        await send({"type": "http.response.start", "status": 307, "headers": headers})
        await send({"type": "http.response.body"})

    async with sending(redirect) as url:
        with pytest.raises(WeightsOutOfReach):
            await asyncio.to_thread(receiver(tmp_path), replace(handle, machine="there", url=f"{url}/weights"))
    assert asked and set(asked) == {"/weights"}


async def test_no_more_than_announced_is_read(
    handle: WeightsHandle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "MAX_SILENCE_S", 0.2)

    async def flood(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 206, "headers": []})
        for _ in range(100):
            await send({"type": "http.response.body", "body": b"x" * 2**16, "more_body": True})
        await send({"type": "http.response.body"})

    async with sending(flood) as url:
        with pytest.raises(WeightsOutOfReach):
            await asyncio.to_thread(receiver(tmp_path), replace(handle, machine="there", url=url))
    assert not list((tmp_path / "received").iterdir())
