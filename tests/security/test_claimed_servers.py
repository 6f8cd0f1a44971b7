"""A claimed server is controlled by the holder of the claim alone, and versions do not jump."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch
from letters import Letters
from tiny_policy import receive_seed

from penstock.compat.sglang import SGLang
from penstock.rollout.app import ApiKeys
from penstock.rollout.claim import CLAIM, Claim
from penstock.rollout.runner import EngineRunner
from penstock.rollout.server import Identity, create_app
from penstock.rollout.update import MAX_JUMP, WeightsUpdate
from penstock.runtime.http_server import listening
from penstock.supervisor.child import Child
from penstock.weights.collective import Groups
from penstock.weights.shared_memory import describe, fingerprint, layout
from penstock.weights.tensor_payload import read_tensors

LAST_VERSION = {"new_version": "2147483647"}
CONTROL: list[tuple[str, dict[str, Any]]] = [
    ("/update_weight_version", LAST_VERSION),
    ("/update_weight_version", {"new_version": "unknown"}),
    ("/weights/forget", {}),
    ("/weights/abort", {}),
    ("/weights/begin", {"policy_version": 5, "path": "1", "num_bytes": 1, "fingerprint": "x"}),
    ("/weights/commit", {"policy_version": 5}),
    ("/update_weights_from_disk", {"model_path": "/nowhere"}),
    ("/begin_weight_update", {}),
    ("/end_weight_update", {}),
    ("/init_weights_update_group", {"master_address": "x", "master_port": 1, "rank_offset": 1, "world_size": 2}),
    ("/pause_generation", {}),
    ("/continue_generation", {}),
    ("/release_memory_occupation", {}),
    ("/resume_memory_occupation", {}),
    ("/abort_request", {"abort_all": True}),
    ("/abort_request", {"rid_prefix": "0"}),
]


@asynccontextmanager
async def server(runner: EngineRunner, claim: Claim, keys: ApiKeys) -> AsyncIterator[str]:
    update = WeightsUpdate(runner, receive_seed, fingerprint)
    expected = layout(runner.engine.parameters())
    sglang = SGLang(
        runner,
        update,
        Groups(device=torch.device("cpu"), max_bytes=2**20),
        describe=lambda path, version: describe(path, expected, policy_version=version),
        read_payload=partial(read_tensors, max_bytes=2**20, device=torch.device("cpu")),
        model_path="tiny",
        model_name="tiny",
    )
    identity = Identity(run_id="run", nonce="abc")
    app = create_app(
        runner, identity=identity, update=update, tokenizer=Letters(), keys=keys, claim=claim, foreign=[sglang]
    )
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with listening(app, listener):
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    sglang.close()


async def status(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> tuple[int, str]:
    async with session.post(path, json=body) as response:
        return response.status, await response.text()


@pytest.mark.parametrize("nonce", [None, "", "wrong"])
async def test_no_route_controls_a_server_of_a_run_without_its_claim(runner: EngineRunner, nonce: str | None) -> None:
    headers = {"Authorization": "Bearer rule"} | ({} if nonce is None else {CLAIM: nonce})
    async with (
        server(runner, Claim("first", "secret"), ApiKeys(generation="play", admin="rule")) as url,
        aiohttp.ClientSession(url, headers=headers) as session,
    ):
        for path, body in CONTROL:
            given, text = await status(session, path, body)
            assert given in (400, 409) and "run first uses this server" in text, (path, given, text)
            assert "secret" not in text
        body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
        assert (await status(session, "/generate", body))[0] == 200
    assert runner.policy_version == 0 and not runner.engine.paused


async def test_the_holder_of_the_claim_controls_and_others_do_once_it_ends(runner: EngineRunner) -> None:
    async with (
        server(runner, Claim(), ApiKeys()) as url,
        aiohttp.ClientSession(url) as stranger,
        aiohttp.ClientSession(url, headers={CLAIM: "a"}) as holder,
    ):
        assert (await status(stranger, "/pause_generation", {}))[0] == 200, "an unclaimed server takes SGLang's clients"
        claim = {"run_id": "first", "nonce": "a", "lease_s": 60}
        assert (await status(holder, "/claim", claim))[0] == 200
        assert (await status(stranger, "/continue_generation", {}))[0] == 409
        assert (await status(stranger, "/claim", claim | {"nonce": "b", "lease_s": 0}))[0] == 409
        assert (await status(holder, "/continue_generation", {}))[0] == 200
        assert (await status(holder, "/claim", claim | {"lease_s": 0}))[0] == 200
        assert (await status(stranger, "/update_weight_version", {"new_version": "1"}))[0] == 200


@pytest.mark.parametrize(
    "everything", [{"abort_all": True}, {"rid_prefix": "a"}, {"rid_prefix": "a", "abort_all": True}]
)
async def test_the_generation_key_ends_no_requests_of_others(runner: EngineRunner, everything: dict[str, Any]) -> None:
    async with (
        server(runner, Claim("first", "secret"), ApiKeys(generation="play", admin="rule")) as url,
        aiohttp.ClientSession(url, headers={"Authorization": "Bearer play"}) as player,
        aiohttp.ClientSession(url, headers={"Authorization": "Bearer rule", CLAIM: "secret"}) as holder,
    ):
        given, text = await status(player, "/abort_request", everything)
        assert given == 401 and "admin" in text
        assert (await status(player, "/abort_request", {"rid": "a"}))[0] == 200, "one request that it knows"
        assert (await status(holder, "/abort_request", everything))[0] == 200


async def test_the_ids_of_requests_cannot_be_guessed(runner: EngineRunner) -> None:
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}
    async with server(runner, Claim(), ApiKeys()) as url, aiohttp.ClientSession(url) as session:
        rids = [json.loads((await status(session, "/generate", body))[1])["meta_info"]["id"] for _ in range(2)]
    assert len({rid[:8] for rid in rids}) == 2 and min(map(len, rids)) >= 24


def test_what_servers_see_of_a_run_reveals_no_other_secret(tmp_path: Path) -> None:
    child = Child(name="rollout-0", run_dir=tmp_path, runtime_dir=tmp_path, run_id="run", nonce="nonce")
    shown = [child.secret("identity"), child.secret("claim"), child.secret("greeting")]
    assert len({*shown, child.nonce}) == 4 and not any(child.nonce in each for each in shown)


@pytest.mark.parametrize("version", ["2147483647", 2147483647, str(MAX_JUMP + 1), "1" * 20, "9" * 5000, "-1", "x" * 99])
async def test_no_version_ends_the_numbers(runner: EngineRunner, version: str | int) -> None:
    async with server(runner, Claim(), ApiKeys()) as url, aiohttp.ClientSession(url) as session:
        given, text = await status(session, "/update_weight_version", {"new_version": version})
        assert given == 400 and "version" in text and len(text) < 400, (given, text)
        assert (await status(session, "/update_weight_version", {"new_version": "7"}))[0] == 200
    assert runner.policy_version == 7
