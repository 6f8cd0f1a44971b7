"""An environment worker: plays leased groups, appends their tokens to its own pool files, sends references."""

from __future__ import annotations

import asyncio
from pathlib import Path

from penstock.config import Config, load_config
from penstock.control.bus import CONTROLLER, Peer
from penstock.control.messages import AnyMessage, Cancel, DataGenerated, Grant, GrantRequest, NewTask, TaskRequest
from penstock.envs.manager import EnvManager
from penstock.envs.registry import environment_maker
from penstock.model.chat import ChatTokenizer
from penstock.ports import Work
from penstock.processes.layout import model_dir
from penstock.processes.member import Telemetry, membership
from penstock.rollout.client import Servers
from penstock.store.payload import PayloadWriter
from penstock.supervisor.child import Child
from penstock.types import EpisodeId, SegmentGrant


class Worker:
    """Turns bus messages into played groups. A bad environment never ends the process; a defect in here does."""

    def __init__(self, config: Config, name: str, pool: Path, tasks: asyncio.TaskGroup) -> None:
        self._config, self._name = config, name
        self._writer = PayloadWriter(pool, name)
        self._grants: dict[EpisodeId, asyncio.Future[SegmentGrant]] = {}
        self._playing: dict[int, asyncio.Task[None]] = {}
        """Groups that can still be cancelled."""
        self._unfinished: set[asyncio.Task[None]] = set()
        """Groups being played or reported."""
        self._tasks = tasks
        self.manager: EnvManager | None = None
        self.peer: Peer | None = None
        self.num_played = 0

    async def handle(self, _: str, message: AnyMessage) -> AnyMessage | None:
        match message:
            case NewTask(work=work):
                group = work.leases[0].episode.group
                task = self._tasks.create_task(self._play(group, work), name=f"group-{group}")
                self._playing[group] = task
                self._unfinished.add(task)
                task.add_done_callback(self._unfinished.discard)
            case Grant(grant=grant):
                waiting = self._grants.get(grant.episode)
                if waiting is not None and not waiting.done():
                    waiting.set_result(grant)
            case Cancel(groups=groups):
                for group in groups:
                    if group in self._playing:
                        self._playing[group].cancel()
        return None

    async def request(self, episode: EpisodeId, *, unfinished: bool) -> SegmentGrant:
        """`Grants` of the EnvManager."""
        grant: asyncio.Future[SegmentGrant] = asyncio.get_running_loop().create_future()
        self._grants[episode] = grant
        try:
            await self.ask(GrantRequest(worker=self._name, episode=episode, unfinished=unfinished))
            return await grant
        finally:
            del self._grants[episode]

    async def _play(self, group: int, work: Work) -> None:
        assert self.manager is not None
        try:
            played = await self.manager.play(work)
            samples = [trajectory.flatten() for trajectory, _ in played]
            whole = all(trajectory.status != "failed" for trajectory, _ in played)
            ref = self._writer.append(samples) if whole and not work.keep_text else None
            summaries = [trajectory.summary(text=text if work.keep_text else None) for trajectory, text in played]
        finally:
            del self._playing[group]  # before the controller hears of it: a next attempt may follow at once
        self.num_played += len(played)
        await self.ask(DataGenerated(worker=self._name, group=group, ref=ref, episodes=summaries))

    def telemetry(self) -> Telemetry:
        return Telemetry(progress=self.num_played, counters={"episodes": self.num_played})

    def close(self) -> None:
        """Give up what is being played or reported."""
        for task in self._unfinished:
            task.cancel()
        self._writer.close()

    async def ask(self, message: AnyMessage) -> None:
        """Tell the controller, and wait until it has acted."""
        assert self.peer is not None
        await self.peer.request(CONTROLLER, message, timeout_s=self._config.rollout.request_timeout_s)


async def serve(child: Child) -> None:
    config = load_config(child.run_dir / "config.yaml")
    stop = child.stop_event()
    make = environment_maker(config.env)
    chat = ChatTokenizer.load(model_dir(config, child.run_dir))
    async with asyncio.TaskGroup() as tasks:
        worker = Worker(config, child.name, child.run_dir / "pool", tasks)
        async with membership(child, config, role="env", handler=worker.handle, telemetry=worker.telemetry) as (
            peer,
            welcome,
        ):
            worker.peer = peer
            servers = Servers(
                welcome.server_urls, api_key=config.rollout.api_key, timeout_s=config.rollout.request_timeout_s
            )
            worker.manager = EnvManager(config, make=make, policy=servers, grants=worker, chat=chat)
            await worker.ask(TaskRequest(worker=child.name, capacity=config.max_running))
            child.report_ready()
            await stop.wait()
            worker.close()
            await servers.close()
