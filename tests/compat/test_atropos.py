"""The trajectory API, asked as atroposlib 0.4.0 asks it: GETs with bodies, gzip, retries; on a real socket."""

from __future__ import annotations

import asyncio
import gzip
import json
import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from fake_ports import leased

from penstock.compat import atropos_api
from penstock.compat.atropos_api import OVER, Atropos
from penstock.compat.pushed_groups import ProvenanceMatch, read_group
from penstock.config import Config
from penstock.envs.pushed_group_exchange import Exchange, ScoredEpisode
from penstock.rollout.app import ApiKeys, App
from penstock.runtime.http_server import bind, listening, url_of
from penstock.samples import Segment, Trajectory, Turn, VersionSpan
from penstock.types import Sampling

CONFIG = Config.model_validate(
    {
        "env": {"group_size": 2, "max_new_tokens": 8},
        "model": {"max_context": 32},
        "trainer": {"steps": 9, "groups_per_step": 4, "checkpoint_every": 2},
    }
)
REGISTRATION = {"max_token_length": 64, "desired_name": "letters", "weight": 1.0, "group_size": 2}


class Versioned:
    """Everything was said by the version that is served."""

    version = 3

    @property
    def newest(self) -> int:
        return self.version

    def oldest_since(self, start_s: float) -> int:
        return 0

    def match(self, document: object, *, oldest_version: int) -> ProvenanceMatch:
        data = read_group(document, CONFIG, vocab_size=99)
        said = [
            Segment(token_ids=[9], logprobs=[-0.1], spans=[VersionSpan(self.version, 0, 1)], finish_reason="stop")
            for _ in data.scores
        ]
        episodes = [
            ScoredEpisode(turns=[Turn(observation_ids=[1], segments=[segment])], reward=score, status="completed")
            for segment, score in zip(said, data.scores, strict=True)
        ]
        return ProvenanceMatch(episodes, 0, 0)


class Api:
    """A run's side and an environment's."""

    def __init__(self, directory: Path) -> None:
        self.versions, self.ended, self.leases = Versioned(), list[Trajectory](), list[asyncio.Task[None]]()
        self.exchange = Exchange(max_staleness=1, newest=lambda: self.versions.version, holder=lambda: "")
        self.surface = Atropos(
            self.exchange,
            self.versions,
            self.versions,
            CONFIG,
            "r",
            directory,
        )
        self.url = ""

    async def lease(self) -> None:
        work = leased(range(2), max_tokens=8, sampling=Sampling(), deadline_s=5.0, env_seed=1)
        self.leases.append(asyncio.create_task(self.exchange.play(work, lambda ended, text: self.ended.append(ended))))
        await asyncio.sleep(0)

    async def ask(self, method: str, path: str, body: Any = None, **how: Any) -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, f"{self.url}{path}", json=body, **how) as reply,
        ):
            return reply.status, await reply.json()

    async def push(self, score: float, *, path: str = "/scored_data") -> tuple[int, Any]:
        return await self.ask("POST", path, group(score))

    @property
    def rewards(self) -> list[float]:
        return [trajectory.reward for trajectory in self.ended]


def group(score: float = 1.0, **changes: Any) -> dict[str, Any]:
    return {"tokens": [[1, 9], [1, 9]], "masks": [[-100, 9]] * 2, "scores": [score, 0.0], "env_id": 0} | changes


async def until(condition: Callable[[], bool]) -> None:
    """It comes to pass while requests travel."""
    async with asyncio.timeout(60.0):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@pytest.fixture
async def api(tmp_path: Path) -> AsyncIterator[Api]:
    api = Api(tmp_path)
    listener = bind("127.0.0.1", 0)
    api.url = url_of("127.0.0.1", listener)
    async with listening(App(api.surface.routes(), ApiKeys()), listener):
        yield api
    for lease in api.leases:
        lease.cancel()
    await asyncio.gather(*api.leases, return_exceptions=True)


async def test_an_environment_that_comes_early_waits_and_then_begins(api: Api) -> None:
    assert await api.ask("GET", "/wandb_info") == (200, {"group": "r", "project": "penstock"})
    assert await api.ask("GET", "/info") == (200, {"batch_size": 8, "max_token_len": 32})
    assert await api.ask("POST", "/register-env", REGISTRATION) == (200, {"status": "wait for trainer to start"})
    await api.lease()
    status, told = await api.ask("POST", "/register-env", REGISTRATION)
    assert status == 200 and told.pop("checkpoint_dir")
    assert told == {
        "status": "success",
        "env_id": 0,
        "wandb_name": "letters_0",
        "starting_step": 2,
        "checkpoint_interval": 2,
        "num_steps": 9,
    }


PAGES = [{"Origin": "https://evil.example"}, {"Sec-Fetch-Site": "same-site"}, {"Host": "evil.example"}]


@pytest.mark.parametrize("page", PAGES)
async def test_no_web_page_pushes_a_group_or_ends_an_environment(api: Api, page: dict[str, str]) -> None:
    for method, path in (("POST", "/scored_data"), ("POST", "/disconnect-env"), ("GET", "/status")):
        status, told = await api.ask(method, path, group(), headers=page)
        assert status == 403 and told["status"] == "error", (path, status, told)
    assert api.exchange.num_offers == 0


async def test_the_latest_group_is_shown_without_what_cannot_be_sent(api: Api) -> None:
    assert (await api.ask("GET", "/latest_example"))[1]["tokens"] == []
    await api.lease()
    await api.ask("POST", "/register-env", REGISTRATION)
    await api.ask("POST", "/scored_data", group(messages=["a", "\ud800"]))
    status, shown = await api.ask("GET", "/latest_example")
    assert (status, shown["tokens"], shown["messages"]) == (200, [[1, 9], [1, 9]], [])


@pytest.mark.parametrize("how", [{"body": {"env_id": 0}}, {"params": {"env_id": "0"}}], ids=["body", "query"])
async def test_how_things_are(api: Api, how: dict[str, Any]) -> None:
    await api.lease()
    await api.ask("POST", "/register-env", REGISTRATION)
    expected = {
        "current_step": 3,
        "queue_size": 0,
        "unallocated_fraction": 1.0,
        "self_queue_size": 0,
        "max_group_size": 2,
        "env_weight": 1.0,
    }
    assert await api.ask("GET", "/status-env", **how) == (200, expected)
    assert await api.ask("GET", "/status") == (200, {"current_step": 3, "queue_size": 0})
    api.surface.is_over = True
    assert (await api.ask("GET", "/status-env", **how))[1]["current_step"] == OVER


async def test_two_environments_share_the_policy_by_their_weights(api: Api) -> None:
    await api.lease()
    await api.ask("POST", "/register-env", REGISTRATION)
    second = REGISTRATION | {"weight": 3.0, "min_batch_allocation": 0.25}
    assert (await api.ask("POST", "/register-env", second))[1]["wandb_name"] == "letters_1"
    shares = [(await api.ask("GET", "/status-env", {"env_id": number}))[1] for number in (0, 1)]
    assert [share["env_weight"] for share in shares] == [0.25, 0.75]
    assert {share["unallocated_fraction"] for share in shares} == {0.75}
    assert await api.ask("POST", "/disconnect-env", {"env_id": 1}) == (200, {"status": "success"})
    assert (await api.ask("GET", "/status-env", {"env_id": 0}))[1]["env_weight"] == 1.0
    assert (await api.ask("POST", "/disconnect-env", {"env_id": 7}))[1]["status"] == "failure"


async def test_who_is_started_anew_gets_its_number_and_name_back(
    api: Api, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await api.lease()
    for _ in range(2):
        await api.ask("POST", "/register-env", REGISTRATION)
    monkeypatch.setattr(atropos_api, "SILENT_S", -1.0)
    assert (await api.ask("POST", "/register-env", REGISTRATION))[1]["wandb_name"] == "letters_0"
    again = Api(tmp_path)
    assert again.surface.holder().startswith("no Atropos environment: start one")
    assert [each.name for each in again.surface._registry._environments] == ["letters_0", "letters_1"]


async def test_a_status_asked_by_one_that_nobody_knows_is_no_error(api: Api) -> None:
    assert (await api.ask("GET", "/status-env", {"env_id": 12}))[0] == 200


async def test_a_push_is_answered_when_a_lease_has_taken_it(api: Api) -> None:
    pushing = [asyncio.create_task(api.push(score)) for score in (1.0, 2.0)]
    await until(lambda: api.exchange.num_offers == 2)
    assert (await api.ask("GET", "/status"))[1]["queue_size"] == 2 and not any(task.done() for task in pushing)
    await api.lease()
    done, _ = await asyncio.wait(pushing, return_when=asyncio.FIRST_COMPLETED, timeout=60.0)
    assert [task.result() for task in done] == [(200, {"status": "received"})]
    assert len(api.rewards) == 2 and api.exchange.num_offers == 1
    await api.lease()
    await asyncio.gather(*pushing)
    assert sorted(api.rewards) == [0.0, 0.0, 1.0, 2.0]
    assert (await api.ask("GET", "/latest_example"))[1]["scores"][1] == 0.0


async def test_a_zipped_push_is_read(api: Api) -> None:
    await api.lease()
    async with (
        aiohttp.ClientSession() as session,
        session.post(
            f"{api.url}/scored_data",
            data=gzip.compress(json.dumps(group()).encode()),
            headers={"Content-Encoding": "gzip", "Content-Type": "application/json"},
        ) as reply,
    ):
        assert (reply.status, await reply.json()) == (200, {"status": "received"})
    assert api.rewards == [1.0, 0.0]


async def test_a_push_that_was_broken_off_stands_in_line_and_is_not_doubled_by_a_retry(api: Api) -> None:
    broken = asyncio.create_task(api.push(1.0))
    await until(lambda: api.exchange.num_offers == 1)
    broken.cancel()
    await until(lambda: len(api.surface._pushes) == 1)
    again = asyncio.create_task(api.push(1.0))
    await until(lambda: not api.surface._pushes)
    assert api.exchange.num_offers == 1
    await api.lease()
    assert await again == (200, {"status": "received"})
    other = asyncio.create_task(api.push(1.0))  # the same data again, from a client that saw the first push
    await api.lease()
    assert (await other)[0] == 200 and len(api.rewards) == 4


async def test_who_waits_for_too_long_is_asked_to_try_again(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atropos_api, "HOLD_S", 0.01)
    status, told = await api.push(1.0)
    assert status == 503 and "stays in the queue" in told["message"]
    await api.lease()
    assert await api.push(1.0) == (200, {"status": "received"})
    assert api.rewards == [1.0, 0.0]


async def test_a_line_that_is_too_long_takes_no_more(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atropos_api, "HOLD_S", 0.01)
    monkeypatch.setattr(atropos_api, "MAX_OFFERS", 1)
    await api.push(1.0)
    status, told = await api.push(2.0)
    assert status == 503 and "the trainer is slower" in told["message"] and api.exchange.num_offers == 1


async def test_what_grew_too_old_in_line_is_acknowledged_and_counted(api: Api) -> None:
    pushing = asyncio.create_task(api.push(1.0))
    await until(lambda: api.exchange.num_offers == 1)
    api.versions.version = 9
    await api.lease()
    assert await pushing == (200, {"status": "received"})
    assert api.exchange.counts["stale"] == 1 and api.rewards == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores": [math.nan, 0.0]}, r"letters_0 pushed a group that cannot be trained: scores[0] is nan"),
        ({"tokens": [[1, 9]] * 3}, "tokens holds 3 sequences"),
        ({"masks": [[-100], [-100, 9]]}, "masks[0] has 1 values"),
    ],
)
async def test_what_cannot_be_trained_is_one_clear_error(api: Api, changes: dict[str, Any], message: str) -> None:
    await api.lease()
    await api.ask("POST", "/register-env", REGISTRATION)
    status, told = await api.ask("POST", "/scored_data", group(**changes))
    assert status == 422 and message in told["message"]
    assert {trajectory.error for trajectory in api.ended} == {told["message"]}
    assert api.exchange.counts["refused"] == 1


async def test_bad_groups_of_one_harm_no_other(api: Api) -> None:
    """A client that did not register pushes beside an environment that plays, whether that asks for its status or only
    pushes."""
    await api.lease()
    await api.ask("POST", "/register-env", REGISTRATION)
    await api.ask("GET", "/status-env", {"env_id": 0})
    bad = [{"scores": []}] * 40
    assert (await api.ask("POST", "/scored_data_list", bad))[0] == 422
    assert (await api.ask("POST", "/scored_data_list", [document | {"env_id": 7} for document in bad]))[0] == 422
    assert not api.ended and api.exchange.counts["refused"] == 80
    assert await api.ask("POST", "/scored_data", group(1.0, env_id=0)) == (200, {"status": "received"})
    assert api.rewards == [1.0, 0.0] and not any(trajectory.error for trajectory in api.ended)


async def test_bad_groups_fail_no_lease_while_good_ones_come(api: Api) -> None:
    """Also those of the only environment, and of a client that did not register."""
    await api.lease()
    await api.ask("POST", "/register-env", REGISTRATION)
    assert await api.ask("POST", "/scored_data", group(1.0, env_id=0)) == (200, {"status": "received"})
    await api.lease()
    for number in (0, 7, None):
        assert (await api.ask("POST", "/scored_data", {"env_id": number}))[0] == 422
    assert not any(trajectory.error for trajectory in api.ended)


async def test_the_groups_of_a_list_have_nothing_to_do_with_each_other(api: Api) -> None:
    await api.lease()
    await api.lease()
    groups = [group(1.0), group(math.inf), group(2.0)]
    pushing = asyncio.create_task(api.ask("POST", "/scored_data_list", groups))
    await api.lease()
    status, told = await pushing
    assert status == 200 and told["groups_processed"] == 2 and "scores[0] is inf" in told["refused"][0]
    assert (await api.ask("POST", "/scored_data_list", [group(math.nan)]))[0] == 422


async def test_another_group_size_is_told_before_anything_is_played(api: Api) -> None:
    await api.lease()
    status, told = await api.ask("POST", "/register-env", REGISTRATION | {"group_size": 4})
    assert status == 200 and "start it with --env.group_size 2" in told["status"]


async def test_no_other_trainer_registers_here(api: Api) -> None:
    for method, path in (("POST", "/register"), ("GET", "/batch"), ("GET", "/reset_data")):
        status, told = await api.ask(method, path)
        assert status == 409 and "no other trainer can register" in told["message"]


@pytest.mark.parametrize(
    "change",
    [
        {"max_token_length": 10**400},
        {"max_token_length": 2**70},
        {"group_size": 10**400},
        {"weight": math.inf},
        {"weight": math.nan},
        {"weight": -1.0},
        {"min_batch_allocation": math.nan},
        {"desired_name": "\ud800"},
        {"desired_name": "x" * 201},
    ],
    ids=lambda change: "-".join(f"{name}-{str(value)[:5]!a}" for name, value in change.items()),
)
async def test_a_registration_that_is_refused_harms_no_other(api: Api, change: dict[str, Any]) -> None:
    await api.lease()
    assert (await api.ask("POST", "/register-env", REGISTRATION))[0] == 200
    status, told = await api.ask("POST", "/register-env", REGISTRATION | change)
    assert status == 422 and told["status"] == "error"
    assert (await api.ask("POST", "/register-env", REGISTRATION))[1]["wandb_name"] == "letters_1"
    for number in (0, 1, 2):
        assert (await api.ask("GET", "/status-env", {"env_id": number}))[0] == 200


async def test_what_cannot_be_written_down_is_not_registered(tmp_path: Path) -> None:
    registry = atropos_api.Registry(tmp_path / "environments.json")
    registration = atropos_api.Registration(group_size=2, desired_name="good")
    registration.desired_name = "\ud800"
    with pytest.raises(ValueError, match="surrogates"):
        registry.register(registration)
    assert registry.register(atropos_api.Registration(group_size=2))[1].name == "env_0"


async def test_a_list_without_end_is_refused_as_a_whole(api: Api, capfd: pytest.CaptureFixture[str]) -> None:
    status, told = await api.ask("POST", "/scored_data_list", [0] * (atropos_api.MAX_OFFERS + 1))
    assert status == 413 and "push at most" in told["message"]
    assert api.exchange.counts["refused"] == 0 and not capfd.readouterr().err


async def test_the_groups_of_a_list_are_refused_in_one_line(api: Api, capfd: pytest.CaptureFixture[str]) -> None:
    status, _ = await api.ask("POST", "/scored_data_list", [0, 1, 2])
    assert status == 422 and api.exchange.counts["refused"] == 3
    lines = capfd.readouterr().err.splitlines()
    assert len(lines) == 1 and lines[0].endswith("(and 2 more)"), lines
