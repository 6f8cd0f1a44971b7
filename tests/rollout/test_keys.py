"""Who may call what."""

from __future__ import annotations

import aiohttp
import pytest
from tiny_policy import make_handle, serve

from penstock.rollout.app import ApiKeys, key_of
from penstock.rollout.client import RolloutClient
from penstock.rollout.runner import EngineRunner
from penstock.rollout.servers import Servers
from penstock.rollout.session import HttpSession, RolloutError
from penstock.types import EpisodeId, Sampling, SegmentGrant

CONTROL = [("/weights/abort", {}), ("/release_memory_occupation", {}), ("/abort_request", {"abort_all": True})]
PLAY = [("/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}), ("/abort_request", {"rid": "a"})]


@pytest.mark.parametrize(
    ("keys", "key", "plays", "controls"),
    [
        (ApiKeys(), None, True, True),
        (ApiKeys(generation="play"), None, False, False),
        (ApiKeys(generation="play"), "play", True, True),
        (ApiKeys(generation="play", admin="rule"), "play", True, False),
        (ApiKeys(generation="play", admin="rule"), "rule", True, True),
        (ApiKeys(generation="play", admin="rule"), "schluessel-\xfc", False, False),
        (ApiKeys(admin="rule"), None, True, False),
        (ApiKeys(admin="rule"), "rule", True, True),
    ],
)
async def test_the_admin_key_controls_and_either_generates(
    runner: EngineRunner, keys: ApiKeys, key: str | None, plays: bool, controls: bool
) -> None:
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    async with serve(runner, keys=keys) as url, aiohttp.ClientSession(url, headers=headers) as session:
        for calls, may in ((PLAY, plays), (CONTROL, controls)):
            for path, body in calls:
                async with session.post(path, json=body) as response:
                    assert response.status == (200 if may else 401), path
                    assert may or "API key" in (await response.json())["error"]["message"]
        for path, status in (("/health", 200), ("/nowhere", 404 if plays else 401)):
            async with session.get(path) as response:
                assert response.status == status


async def test_a_worker_generates_and_the_controller_updates(runner: EngineRunner) -> None:
    async with serve(runner, keys=ApiKeys(generation="play", admin="rule")) as url:
        session, controller = HttpSession(api_key="play"), Servers([url], api_key="rule")
        worker = RolloutClient(url, session)
        sampling = Sampling(temperature=0.0)
        grant = SegmentGrant(episode=EpisodeId("tag", 0, 0, 0), max_tokens=2)
        assert len((await worker.generate([5], [grant], sampling, [1]))[0].token_ids) <= 2
        with pytest.raises(RolloutError, match="admin API key"):
            await worker.begin_weights(make_handle(1))
        await controller.update_weights(make_handle(1))
        assert runner.policy_version == 1
        await session.close()
        await controller.close()


@pytest.mark.parametrize(
    ("header", "key"), [("Bearer a", "a"), ("bearer a", "a"), ("BEARER  a ", "a"), ("Basic a", ""), ("a", ""), ("", "")]
)
def test_the_scheme_is_read_in_any_case(header: str, key: str) -> None:
    assert key_of({"authorization": header}) == key


def test_the_key_may_come_as_anthropics_clients_send_it() -> None:
    assert key_of({"x-api-key": " a "}) == "a"
    assert key_of({"authorization": "Bearer b", "x-api-key": "a"}) == "b"


def test_keys_do_not_show() -> None:
    assert "play" not in repr(ApiKeys(generation="play", admin="rule"))
