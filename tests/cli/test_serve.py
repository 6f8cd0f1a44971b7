"""`penstock serve` as a process of its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import aiohttp
import msgspec
import openai
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "weights"))

from free_port import free_port
from trainer_end import Broadcast, announce, buckets

from penstock.cli.serve import hint
from penstock.config import TinyModelConfig
from penstock.model.load_policy import load_policy
from penstock.model.tiny import write_tiny_model
from penstock.weights.collective import Rendezvous
from penstock.weights.shared_memory import fingerprint

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_tiny_model(directory, TinyModelConfig(num_layers=1, hidden_size=32), max_context=64)
    load_policy(directory, weights=False, seed=0).save_pretrained(directory)
    return directory


def command(model: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "penstock.cli.main", "serve", "--model", str(model), *words]


def announced(named: dict[str, torch.Tensor]) -> dict[str, Any]:
    """As SGLang's route takes it."""
    told = announce(named, "g")
    return {"group_name": "g", "names": told.names, "dtypes": told.dtypes, "shapes": told.shapes}


@contextmanager
def served(
    model: Path, *words: str, environment: dict[str, str] | None = None, log: TextIO | None = None
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its URL."""
    given = {**os.environ, **(environment or {})}
    words = ("--port", "0", *words)
    with subprocess.Popen(command(model, *words), stdout=subprocess.PIPE, stderr=log, text=True, env=given) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            yield process, line.split(" at ")[1].split()[0]
        finally:
            process.kill()


def test_a_model_directory_is_served_until_a_signal(model: Path) -> None:
    with served(model, "--name", "speller") as (process, url):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any", timeout=120) as client:
            assert client.models.list().data[0].id == "speller"
            done = client.chat.completions.create(
                model="speller", messages=[{"role": "user", "content": "hello"}], max_tokens=5, temperature=0
            )
            assert done.choices[0].message.content is not None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0


@pytest.mark.long
async def test_whoever_waits_when_it_is_ended_is_told_so(model: Path, tmp_path: Path) -> None:
    sampling, message = {"max_new_tokens": 40, "ignore_eos": True}, "the server is shutting down"
    chat = {"model": "any", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 20}
    told = {"input_ids": [5], "sampling_params": sampling}
    waiting = {"/generate": told, "/v1/chat/completions": chat}
    streams = {"/generate": told | {"stream": True}, "/v1/chat/completions": chat | {"stream": True}}
    with (tmp_path / "log").open("w") as log, served(model, log=log) as (process, url):
        async with aiohttp.ClientSession(url) as session:

            async def post(path: str, given: object) -> tuple[int, str]:
                async with session.post(path, json=given) as response:
                    return response.status, await response.text()

            await post("/pause_generation", {"mode": "in_place"})
            posts = [asyncio.create_task(post(*each)) for each in (*waiting.items(), *streams.items())]
            draining = asyncio.create_task(post("/flush_cache?timeout=60", {}))
            while '"num_waiting":4' not in (await (await session.get("/server_info")).text()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            process.send_signal(signal.SIGTERM)
            answers = await asyncio.wait_for(asyncio.gather(*posts), 120)
            assert [status for status, _ in answers] == [503, 503, 200, 200]
            assert all(f'"message":"{message}"' in text for _, text in answers)
            await asyncio.wait_for(draining, 120)
            assert await asyncio.to_thread(process.wait, 120) == 0
    assert "Traceback" not in (tmp_path / "log").read_text()


@pytest.mark.long
async def test_a_trainer_broadcasts_weights_to_it_in_buckets(model: Path) -> None:
    policy = load_policy(model, weights=False, seed=1)
    named = {name: parameter.detach() for name, parameter in policy.named_parameters()}
    place = Rendezvous(
        group_name="g", master_address="127.0.0.1", master_port=free_port(), world_size=2, backend="gloo"
    )
    with served(model) as (process, url):
        async with aiohttp.ClientSession(url) as session:

            async def post(path: str, given: object) -> tuple[int, Any]:
                async with session.post(path, json=given) as response:
                    return response.status, await response.json()

            joining = asyncio.create_task(asyncio.to_thread(Broadcast, place))
            given = msgspec.to_builtins(place) | {"rank_offset": 1}
            assert (await post("/init_weights_update_group", given))[0] == 200
            broadcast = await joining
            path, version = "/update_weights_from_distributed", {"weight_version": 1}
            flat = {"load_format": "flattened_bucket", **version}
            for bucket in buckets(named, 10_000):
                sending = asyncio.create_task(asyncio.to_thread(broadcast.send, bucket))
                status, reply = await post(path, {**announced(bucket), **flat})
                assert (status, await sending) == (200, None), reply
            assert len(list(buckets(named, 10_000))) > 2 and reply["message"] == "serving weight_version 1"
            told = fingerprint(named)
            status, reply = await post("/weights/commit", {"policy_version": 1, "fingerprint": told})
            assert (status, reply["fingerprint"]) == (200, told)
            never_sent = asyncio.create_task(post(path, announced(named)))
            async with session.get("/health") as response:
                assert response.status == 200
            process.send_signal(signal.SIGINT)
            assert await asyncio.to_thread(process.wait, 120) == 0, "it leaves the group, whatever it waits for there"
            await asyncio.gather(never_sent, return_exceptions=True)
    broadcast.close()


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--host", "0.0.0.0"], 2, "PENSTOCK_API_KEY"),
        (["rollout.slts=3"], 2, "did you mean rollout.slots?"),
        (["rollout.engine=vllm"], 2, "penstock serve does not read rollout.engine: it reads model.device"),
        pytest.param(["model.max_context=100000"], 1, "exceeds the 64 positions", marks=pytest.mark.long),
    ],
)
def test_what_cannot_be_served_is_one_clear_error(model: Path, words: list[str], code: int, message: str) -> None:
    result = subprocess.run(command(model, "--port", "0", *words), capture_output=True, text=True, timeout=180)
    assert result.returncode == code
    assert message in result.stderr and "Traceback" not in result.stderr


@pytest.mark.long
def test_a_directory_without_a_model_and_a_taken_port_are_named(model: Path, tmp_path: Path) -> None:
    result = subprocess.run(command(tmp_path, "--port", "0"), capture_output=True, text=True, timeout=180)
    assert (result.returncode, str(tmp_path) in result.stderr, "Traceback" in result.stderr) == (1, True, False)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = subprocess.run(command(model, "--port", port), capture_output=True, text=True, timeout=180)
    assert (result.returncode, f"cannot listen on 127.0.0.1:{port}" in result.stderr) == (1, True)


def test_whoever_names_a_run_is_shown_its_newest_checkpoint(tmp_path: Path) -> None:
    for step in (9, 10, 1):
        (tmp_path / "checkpoints" / f"step_{step}").mkdir(parents=True)
    assert hint(tmp_path) == f"; did you mean {tmp_path / 'checkpoints' / 'step_10'}?"
    assert (hint(tmp_path / "checkpoints"), "serve one of its checkpoints" in hint(Path("tiny"))) == ("", True)


@pytest.mark.long
def test_a_checkpoint_is_served_under_its_own_version(model: Path, tmp_path: Path) -> None:
    checkpoint = tmp_path / "step_3"
    shutil.copytree(model, checkpoint)
    (checkpoint / "state.json").write_text('{"step": 3, "policy_version": 7, "extra": {}}')
    with served(checkpoint) as (_, url):
        assert '"policy_version":7' in urllib.request.urlopen(f"{url}/ready", timeout=120).read().decode()


@pytest.mark.long
def test_a_model_that_cannot_be_read_is_not_blamed_on_the_port(model: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(model, broken)
    weights = broken / "model.safetensors"
    weights.unlink()
    weights.mkdir()
    result = subprocess.run(command(broken, "--port", "0"), capture_output=True, text=True, timeout=180)
    assert (result.returncode, "Traceback" in result.stderr, "cannot listen" in result.stderr) == (1, False, False)
    assert str(broken) in result.stderr


@pytest.mark.long
def test_each_key_opens_what_it_is_for(model: Path) -> None:
    keys = {"PENSTOCK_API_KEY": "play", "PENSTOCK_ADMIN_API_KEY": "rule"}
    with served(model, environment=keys) as (_, url):

        def status(path: str, key: str, body: bytes | None = None) -> int:
            request = urllib.request.Request(url + path, body, {"Authorization": f"Bearer {key}"})
            try:
                return int(urllib.request.urlopen(request, timeout=120).status)
            except urllib.error.HTTPError as error:
                return error.code

        assert [status("/v1/models", key) for key in ("play", "rule", "none")] == [200, 200, 401]
        assert [status("/flush_cache", key) for key in ("play", "rule")] == [401, 200]
        assert [status("/pause_generation", key, b"{}") for key in ("play", "rule")] == [401, 200]
        assert [status("/metrics", key) for key in ("play", "none")] == [200, 401]
