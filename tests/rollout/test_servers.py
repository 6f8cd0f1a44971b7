"""All servers of a run as one: load, affinity, the transaction over them, and what happens when one is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from functools import partial

import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from tiny_policy import make_engine, make_handle, print_of, serve, weights

from penstock.ports.training import TrainerLost
from penstock.rollout import client as client_module
from penstock.rollout import servers as servers_module
from penstock.rollout.client import RolloutClient
from penstock.rollout.runner import EngineRunner
from penstock.rollout.servers import Servers
from penstock.rollout.session import HttpSession, RolloutError
from penstock.rollout.update import WeightsUpdate
from penstock.types import NO_VERSION, EpisodeId, Sampling, SegmentGrant
from penstock.weights.shared_memory import fingerprint

GRANT = SegmentGrant(episode=EpisodeId("tag", 0, 0, 0), max_tokens=4)


@pytest.fixture
async def other() -> AsyncIterator[EngineRunner]:
    """A second server's engine, which already serves policy_version 5."""
    runner = EngineRunner(make_engine(policy_version=5), process="rollout-1")
    runner.start()
    yield runner
    await runner.stop()


class Line:
    """A connection to a server that can be cut: what is under way then, and whatever comes, gets no answer."""

    def __init__(self, url: str) -> None:
        self._url, self._session = url, ClientSession()
        self.cut, self.asked = False, asyncio.Event()
        self.silent = False
        """Whatever comes waits for the end."""
        self.hanging: str | None = None
        """What comes at paths that begin so waits for the end."""
        self.num_begun = 0
        """Number of requests to stage weights."""
        self.failing: tuple[str, int] | None = None
        """What comes at paths that begin so is answered with this status."""
        self.on_commit: Callable[[], object] = lambda: None
        """Called when a commit has come, before it is passed on."""
        self._end = asyncio.Event()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self.server = TestServer(app)

    async def _pass_on(self, request: web.Request) -> web.Response:
        self.asked.set()
        if self.silent or (self.hanging is not None and request.path.startswith(self.hanging)):
            await self._end.wait()
        self.num_begun += request.path == "/weights/begin"
        if request.path == "/weights/commit":
            self.on_commit()
        if self.failing is not None and request.path.startswith(self.failing[0]):
            return web.Response(status=self.failing[1], text="bad times")
        if not self.cut:
            async with self._session.request(
                request.method, self._url + request.path, data=await request.read()
            ) as reply:
                body = await reply.read()
            if not self.cut:
                return web.Response(status=reply.status, body=body, content_type="application/json")
        assert request.transport is not None
        request.transport.close()
        return web.Response()

    def lead_to(self, url: str) -> None:
        """Another process listens at the same port."""
        self._url = url

    def break_off(self) -> None:
        """The server dies."""
        self.cut = True

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")

    async def close(self) -> None:
        self._end.set()
        await self._session.close()
        await self.server.close()


@pytest.fixture
async def line(url: str) -> AsyncIterator[Line]:
    """To the server that serves policy_version 0."""
    line = Line(url)
    await line.server.start_server()
    yield line
    await line.close()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lost servers are asked again soon."""
    monkeypatch.setattr(servers_module, "RETRY_S", 0.0)
    monkeypatch.setattr(servers_module, "POLL_S", 0.01)


@pytest.fixture
def wary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who is silent is soon asked whether he lives."""
    monkeypatch.setattr(servers_module, "SILENCE_S", 0.05)
    monkeypatch.setattr(client_module, "PROBE_S", 0.5)


def grant(episode: int, *, max_tokens: int = 4) -> SegmentGrant:
    return SegmentGrant(episode=EpisodeId("tag", episode, 0, 0), max_tokens=max_tokens)


async def served_by(servers: Servers, episode: int) -> int:
    """The version of the server that answers."""
    (segment,) = await servers.generate([5], [grant(episode)], Sampling(temperature=0.0), [1])
    return segment.spans[0].policy_version


async def test_what_a_lost_server_was_generating_is_asked_of_another(line: Line, other: EngineRunner) -> None:
    lost: list[str] = []
    async with serve(other) as second:
        servers = Servers([line.url, second], lost=lambda url, why: lost.append(url))
        running = [
            asyncio.create_task(servers.generate([5], [grant(n, max_tokens=60)], Sampling(), [n])) for n in range(8)
        ]
        await line.asked.wait()
        line.cut = True
        answers = [segments[0] for segments in await asyncio.gather(*running)]
        assert await served_by(servers, 9) == 5
        await servers.close()
    assert {segment.spans[0].policy_version for segment in answers} == {5}
    assert all(len(segment.token_ids) == len(segment.logprobs) > 0 for segment in answers)
    assert lost == [line.url]


@pytest.mark.usefixtures("wary")
async def test_a_server_that_hangs_is_found_out(line: Line, other: EngineRunner) -> None:
    lost: list[str] = []
    async with serve(other) as second:
        servers = Servers([line.url, second], lost=lambda url, why: lost.append(why))
        line.silent = True
        assert await served_by(servers, 0) == 5
        await servers.close()
    (why,) = lost
    assert "has not answered" in why and line.url in why


async def test_a_living_server_that_leaves_requests_waiting_gets_a_single_one(
    line: Line, other: EngineRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers_module, "IDLE_S", 0.0)
    told: list[str] = []
    async with serve(other) as second:
        servers = Servers([line.url, second], lost=lambda url, why: told.append(why))
        line.hanging = "/generate"
        waiting = {asyncio.create_task(served_by(servers, number)) for number in range(8)}
        served: list[int] = []
        while len(waiting) > 4:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            served += [task.result() for task in done]
        for task in waiting:  # their deadline
            task.cancel()
        await asyncio.wait(waiting)
        assert served == [5] * 4
        assert [await served_by(servers, number) for number in range(8, 16)] == [5] * 8
        (why,) = told
        assert why.endswith("did not answer before the request's deadline, while other servers generate")
        (idle,) = [server for server in servers._servers if server.client.url == line.url]
        idle.idle.retry_at, idle.lost_at = 0.0, None
        line.hanging = None
        found = await asyncio.gather(*(served_by(servers, number) for number in range(16, 20)))
        assert sorted(found) == [0, 5, 5, 5], "one request shows whether it generates again"
        assert sorted(await asyncio.gather(*(served_by(servers, number) for number in range(20, 24)))) == [0, 0, 5, 5]
        await servers.close()


async def test_a_server_that_aborts_every_request_is_not_asked_for_ever(
    line: Line, other: EngineRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers_module, "IDLE_S", 0.0)
    session, told = HttpSession(), list[str]()
    await RolloutClient(line.url, session).release()  # the run does not learn of it
    async with serve(other) as second:
        servers = Servers([line.url, second], lost=lambda url, why: told.append(why))
        (segment,) = await servers.generate([5], [grant(0)], Sampling(), [1])
        assert segment.finish_reason == "abort" and segment.token_ids == []
        (idle,) = [server for server in servers._servers if server.client.url == line.url]
        idle.load = 1000  # the other one is the least loaded
        assert await served_by(servers, 1) == 5
        idle.load = 0
        assert [await served_by(servers, number) for number in range(2, 8)] == [5] * 6
        (why,) = told
        assert why.endswith("aborts every request, while other servers generate")
        await servers.close()
    await session.close()


async def test_a_server_that_fails_to_change_its_memory_is_asked_less_and_less_often(
    line: Line, other: EngineRunner
) -> None:
    async with serve(other) as second:
        servers = Servers([line.url, second])
        asked = []
        line.failing = "/release_memory", 500
        for _ in range(8):
            line.asked.clear()
            await servers.release()
            asked.append(line.asked.is_set())
        await servers.close()
    assert asked == [True, False, True, False, False, False, True, False]


async def test_a_server_that_is_back_is_used_again(
    line: Line, other: EngineRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(other) as second:
        servers = Servers([line.url, second])
        line.cut = True
        assert await served_by(servers, 0) == 5
        line.cut = False
        assert await served_by(servers, 1) == 5  # not asked again so soon
        monkeypatch.setattr(servers_module, "RETRY_S", 0.0)
        assert await served_by(servers, 2) == 0
        await servers.close()


async def test_servers_that_live_and_fail_are_not_waited_for(line: Line, other: EngineRunner, hurried: None) -> None:
    async with serve(other) as second:
        servers = Servers([second, line.url])
        await other.stop()
        line.failing = "/generate", 500
        with pytest.raises(RolloutError, match=f"{line.url}.*answered 500: bad times"):
            await served_by(servers, 0)
        line.failing = None
        assert await served_by(servers, 1) == 0
        await servers.close()


@pytest.mark.parametrize("status", [500, 502, 503])
async def test_servers_that_fail_for_a_while_are_waited_for(line: Line, hurried: None, status: int) -> None:
    servers = Servers([line.url])
    line.failing = "", status
    waiting = [asyncio.create_task(served_by(servers, number)) for number in range(4)]
    for _ in range(3):
        line.asked.clear()
        await line.asked.wait()
    assert not any(task.done() for task in waiting)
    line.failing = None
    assert await asyncio.gather(*waiting) == [0] * 4
    await servers.close()


async def test_while_all_are_lost_a_call_waits_for_the_first_that_is_back(line: Line, hurried: None) -> None:
    servers = Servers([line.url])
    line.cut = True
    waiting = asyncio.create_task(served_by(servers, 0))
    await line.asked.wait()
    line.asked.clear()
    await line.asked.wait()  # it has been looked for again
    assert not waiting.done()
    line.cut = False
    assert await waiting == 0
    await servers.close()


async def test_a_bad_request_is_no_servers_fault(line: Line, other: EngineRunner) -> None:
    lost: list[str] = []
    async with serve(other) as second:
        servers = Servers([line.url, second], lost=lambda url, why: lost.append(url))
        with pytest.raises(RolloutError, match="answered 400: token id 999"):
            await servers.generate([999], [GRANT], Sampling(), [1])
        await servers.close()
    assert lost == []


async def test_an_episode_stays_on_its_server(runner: EngineRunner, other: EngineRunner) -> None:
    async with serve(runner) as first, serve(other) as second:
        servers = Servers([first, second])
        homes = dict(enumerate(await asyncio.gather(*(served_by(servers, episode) for episode in range(4)))))
        assert set(homes.values()) == {0, 5}
        for episode, version in homes.items():
            assert await served_by(servers, episode) == version
        await servers.close()


async def test_an_update_leaves_a_lost_server_behind_until_it_is_back(line: Line, other: EngineRunner) -> None:
    runner_version = RolloutClient(line.url, session := HttpSession())
    async with serve(other) as second:
        servers = Servers([line.url, second])
        line.cut = True
        await servers.update_weights(make_handle(6))
        line.cut = False
        assert (await runner_version.served_version(), other.policy_version) == (0, 6)
        await servers.update_weights(make_handle(7))
        assert (await runner_version.served_version(), other.policy_version) == (7, 7)
        await servers.close()
    await session.close()


async def test_a_server_that_cannot_get_at_the_weights_is_left_behind(
    line: Line, other: EngineRunner, hurried: None
) -> None:
    """It serves what it has, and gets the next ones."""
    async with serve(other) as second:
        servers = Servers([line.url, second], lost=lambda url, why: lost.append(why))
        lost: list[str] = []
        line.failing = ("/weights/begin", 424)
        await servers.update_weights(make_handle(6))
        assert other.policy_version == 6
        assert len(lost) == 1
        assert "answered 424" in lost[0]
        line.failing = None
        await servers.update_weights(make_handle(7))
        assert {await served_by(servers, episode) for episode in range(8)} == {7}
        await servers.close()


async def test_a_server_that_is_away_may_still_get_at_the_weights(
    line: Line, other: EngineRunner, hurried: None
) -> None:
    """The other one cannot. The trainer is not lost before the one that is away has come back and was asked."""
    async with serve(other) as second:
        away = Line(second)
        await away.server.start_server()
        servers = Servers([line.url, away.url])
        away.cut, line.failing = True, ("/weights/begin", 424)
        await servers.forget_weights()  # which the one that is away does not hear: it is lost
        updating = asyncio.create_task(servers.update_weights(make_handle(6)))
        while line.num_begun < 2:  # noqa: ASYNC110 - the server has no event for it
            await asyncio.sleep(0.01)
        assert not updating.done()
        away.cut = False
        await updating
        assert other.policy_version == 6
        await servers.close()
        await away.close()


async def test_weights_that_no_server_can_get_at_are_lost(line: Line) -> None:
    servers = Servers([line.url])
    line.failing = ("/weights/begin", 424)
    with pytest.raises(TrainerLost, match=f"{line.url}: POST /weights/begin answered 424"):
        await servers.update_weights(make_handle(6))
    await servers.close()


async def test_an_update_that_finds_no_server_ends_with_what_the_last_one_said(
    line: Line, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers_module, "RECOVERY_S", 0.0)
    servers = Servers([line.url])
    line.cut = True
    with pytest.raises(RolloutError, match=f"{line.url}: POST /weights/begin got no answer"):
        await servers.update_weights(make_handle(8))
    await servers.close()


async def test_what_a_server_was_generating_is_asked_of_its_successor_elsewhere(
    line: Line, other: EngineRunner, hurried: None
) -> None:
    async with serve(other) as successor:
        servers = Servers([line.url])
        running = [
            asyncio.create_task(servers.generate([5], [grant(n, max_tokens=60)], Sampling(), [n])) for n in range(8)
        ]
        await line.asked.wait()
        line.cut = True
        servers.set_urls([successor])
        answers = [segments[0] for segments in await asyncio.gather(*running)]
        await servers.close()
    assert {segment.spans[0].policy_version for segment in answers} == {5}


@pytest.mark.usefixtures("wary")
async def test_so_is_what_one_is_asked_that_hangs_and_was_replaced(
    line: Line, other: EngineRunner, hurried: None
) -> None:
    async with serve(other) as successor:
        servers = Servers([line.url])
        line.silent = True
        waiting = asyncio.create_task(served_by(servers, 0))
        await line.asked.wait()
        servers.set_urls([successor])
        assert await waiting == 5
        await servers.close()


async def test_an_update_in_which_the_only_server_dies_goes_to_its_successor(
    line: Line, other: EngineRunner, hurried: None
) -> None:
    async with serve(other) as successor:
        servers = Servers([line.url])
        line.on_commit = line.break_off
        updating = asyncio.create_task(servers.update_weights(make_handle(6)))
        while not line.cut:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        servers.set_urls([successor])
        await asyncio.gather(updating, servers.bring_up(successor))
        assert (other.policy_version, await served_by(servers, 0)) == (6, 6)
        await servers.close()


async def test_an_update_in_which_one_of_two_dies_reaches_it_when_it_is_brought_up(
    line: Line, runner: EngineRunner, other: EngineRunner
) -> None:
    async with serve(other) as second:
        servers = Servers([line.url, second])
        line.on_commit = line.break_off
        await servers.update_weights(make_handle(6))
        assert (runner.policy_version, other.policy_version) == (0, 6)
        line.cut, line.on_commit = False, lambda: None
        await servers.bring_up(line.url)
        assert runner.policy_version == 6
        await servers.close()


@pytest.mark.usefixtures("wary")
async def test_an_update_does_not_wait_for_a_server_that_hangs(line: Line, other: EngineRunner) -> None:
    lost: list[str] = []
    async with serve(other) as second:
        servers = Servers([line.url, second], lost=lambda url, why: lost.append(why))
        line.silent = True
        await servers.update_weights(make_handle(6))
        assert other.policy_version == 6
        with pytest.raises(RolloutError, match=f"{line.url}: has not answered"):
            await servers.bring_up(line.url)
        await servers.close()
    assert len(lost) == 1 and "has not answered" in lost[0]


async def test_a_server_started_anew_between_begin_and_commit_gets_both_again(line: Line, other: EngineRunner) -> None:
    async with serve(other) as successor:
        servers = Servers([line.url])
        line.on_commit = partial(line.lead_to, successor)
        await servers.update_weights(make_handle(6))
        assert other.policy_version == 6
        await servers.close()


async def test_a_server_that_was_replaced_meanwhile_is_not_brought_up(line: Line) -> None:
    servers = Servers([line.url])
    with pytest.raises(RolloutError, match="replaced"):
        await servers.bring_up("http://127.0.0.1:9")
    await servers.close()


async def test_a_lost_server_neither_gives_way_nor_takes_memory_back(line: Line) -> None:
    lost: list[str] = []
    servers = Servers([line.url], lost=lambda url, why: lost.append(why))
    line.cut = True
    await servers.release()
    await servers.resume()
    await servers.close()
    assert len(lost) == 1 and "got no answer" in lost[0]


async def test_an_update_reaches_every_server(runner: EngineRunner, other: EngineRunner) -> None:
    async with serve(runner) as first, serve(other) as second:
        servers = Servers([first, second])
        await servers.update_weights(make_handle(6))
        await servers.update_weights(make_handle(6))
        await servers.close()
    assert (runner.policy_version, other.policy_version) == (6, 6)


@pytest.mark.parametrize("status", [200, 302])
async def test_a_server_that_answers_nonsense_is_left_behind(line: Line, other: EngineRunner, status: int) -> None:
    lost: list[str] = []
    async with serve(other) as second:
        servers = Servers([line.url, second], lost=lambda url, why: lost.append(url))
        line.failing = "", status
        assert await served_by(servers, 0) == 5
        await servers.update_weights(make_handle(6))
        assert (other.policy_version, await served_by(servers, 1)) == (6, 6)
        await servers.close()
    assert line.url in lost


async def test_nonsense_of_every_server_is_told_at_once(line: Line) -> None:
    servers = Servers([line.url])
    line.failing = "", 200
    with pytest.raises(RolloutError, match="unexpected body"):
        await servers.update_weights(make_handle(1))
    line.failing = "/generate", 200
    with pytest.raises(RolloutError, match="unexpected body"):
        await served_by(servers, 0)
    await servers.close()


async def test_a_reply_without_an_end_is_not_read_to_the_end(line: Line) -> None:
    session = HttpSession()
    line.failing = "", 200
    with pytest.raises(RolloutError, match="returned more than 8 bytes"):
        await session.send("GET", line.url, "/health", max_bytes=8)
    await session.close()


async def test_a_server_that_refuses_weights_that_another_takes_is_left_behind(
    runner: EngineRunner, other: EngineRunner, hurried: None
) -> None:
    lost: list[tuple[str, str]] = []
    async with serve(runner) as first, serve(other) as second:
        servers = Servers([first, second], lost=lambda url, why: lost.append((url, why)))
        await servers.update_weights(make_handle(3))
        ((url, why),) = lost
        assert url == second and "not newer than the served 5" in why
        assert [await served_by(servers, episode) for episode in range(4)] == [3] * 4
        await servers.update_weights(make_handle(6))
        assert (runner.policy_version, other.policy_version) == (6, 6)
        await servers.close()


async def test_a_server_that_refuses_a_request_that_another_answers_is_lost(line: Line, other: EngineRunner) -> None:
    lost: list[str] = []
    async with serve(other) as second:
        servers = Servers([line.url, second], lost=lambda url, why: lost.append(url))
        line.failing = "/generate", 400
        assert [await served_by(servers, episode) for episode in range(4)] == [5] * 4
        await servers.close()
    assert lost == [line.url]


async def test_servers_that_refuse_a_request_are_lost_if_a_third_answers(line: Line, other: EngineRunner) -> None:
    lost: list[str] = []
    again = Line(line.url)
    await again.server.start_server()
    async with serve(other) as second:
        servers = Servers([line.url, again.url, second], lost=lambda url, why: lost.append(url))
        line.failing = again.failing = "/generate", 400
        assert [await served_by(servers, episode) for episode in range(4)] == [5] * 4
        await servers.close()
    assert sorted(lost) == sorted([line.url, again.url])
    await again.close()


async def test_a_refusal_does_not_end_an_update_while_another_server_is_away(
    line: Line, other: EngineRunner, hurried: None
) -> None:
    async with serve(other) as second:
        away = Line(second)
        await away.server.start_server()
        servers = Servers([line.url, away.url])
        line.failing, away.cut = ("/weights", 401), True
        updating = asyncio.create_task(servers.update_weights(make_handle(6)))
        for _ in range(2):
            line.asked.clear()
            await line.asked.wait()
        assert not updating.done()
        away.cut = False
        await updating
        assert other.policy_version == 6
        await servers.close()
        await away.close()


async def test_a_server_that_fails_update_after_update_is_asked_less_and_less(line: Line, other: EngineRunner) -> None:
    asked: list[int] = []
    async with serve(other) as second:
        servers = Servers([line.url, second])
        line.failing = "/weights/begin", 500
        for version in range(6, 26):
            line.asked.clear()
            before = line.num_begun
            await servers.update_weights(make_handle(version))
            asked += [version] * (line.num_begun - before)
        await servers.close()
    assert [version - 6 for version in asked] == [0, 1, 3, 7, 15]


async def test_numbers_are_reset_on_the_servers_that_answer(line: Line, other: EngineRunner) -> None:
    lost: list[str] = []
    async with serve(other) as second:
        servers = Servers([line.url, second], lost=lambda url, why: lost.append(url))
        line.failing = "/weights/forget", 500
        await servers.forget_weights()
        assert (lost, other.policy_version) == ([line.url], NO_VERSION)
        await servers.close()


async def test_an_update_that_every_server_refuses_changes_none(runner: EngineRunner, other: EngineRunner) -> None:
    async with serve(runner) as first, serve(other) as second:
        servers = Servers([first, second])
        await servers.update_weights(make_handle(6))
        with pytest.raises(RolloutError, match=r"409.*not newer than the served 6"):
            await servers.update_weights(make_handle(3))
        session = HttpSession()
        with pytest.raises(RolloutError, match="nothing is staged"):
            await RolloutClient(first, session).commit_weights(make_handle(3))
        await session.close()
        await servers.close()
    assert (runner.policy_version, other.policy_version) == (6, 6)


async def test_a_server_that_holds_other_weights_than_announced_is_noticed(runner: EngineRunner) -> None:
    update = WeightsUpdate(runner, lambda handle: weights(3), fingerprint)
    async with serve(runner, update=update) as url:
        servers = Servers([url])
        with pytest.raises(RolloutError, match=f"{url}.*{print_of('3')}, not 1 with {print_of('1')}"):
            await servers.update_weights(make_handle(1))
        await servers.close()


async def test_requests_go_to_the_server_with_the_least_load(runner: EngineRunner, other: EngineRunner) -> None:
    async with serve(runner) as first, serve(other) as second:
        servers = Servers([first, second])
        sampling = Sampling(temperature=0.0)
        answers = await asyncio.gather(*(servers.generate([5], [GRANT] * 2, sampling, [1, 2]) for _ in range(10)))
        await servers.close()
    versions = [segments[0].spans[0].policy_version for segments in answers]
    assert (versions.count(0), versions.count(5)) == (5, 5)


async def test_a_run_takes_over_servers_that_another_one_used(other: EngineRunner) -> None:
    session = HttpSession()
    async with serve(other) as url:
        servers = Servers([url])
        await servers.forget_weights()
        with pytest.raises(RolloutError, match="503"):
            await RolloutClient(url, session).served_version()
        await servers.update_weights(make_handle(0))
        assert await served_by(servers, 0) == 0
        await servers.close()
    await session.close()
