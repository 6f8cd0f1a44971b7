"""The trainer: behind the bus, one message at a time, the driver of the ranks that hold the models.

A rank that is the only one lives in this process, on a thread of its own; several are processes of theirs, on other
nodes too: see `places.py` and `ranks.py`. A rank that is lost ends the trainer: whoever restarts it begins with all of
them anew.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from penstock.config import Config, load_config
from penstock.control.bus import Peer
from penstock.control.messages import (
    Accumulate,
    Accumulated,
    AnyMessage,
    AskSaved,
    AskState,
    Begin,
    Begun,
    FoundSaved,
    HeldState,
    HoldsNothing,
    LearnerStateUpdate,
    Publish,
    Published,
    Restore,
    SaveCheckpoint,
    Step,
    Welcome,
)
from penstock.data.sources import TaskStream, held_out_tasks, open_tasks
from penstock.deadline import patient
from penstock.envs.demonstrations import demonstrations
from penstock.envs.registry import maker_by_tag
from penstock.groups.errors import RemoteError
from penstock.model.chat import ChatTokenizer
from penstock.ports import TrainerState
from penstock.processes.layout import model_dir, takes_turns
from penstock.processes.member import Telemetry, membership
from penstock.processes.places import trainer_roles
from penstock.processes.pool import payloads_of
from penstock.processes.publishing import Publications, publishing
from penstock.processes.ranks import connected_ranks
from penstock.supervisor.child import Child
from penstock.trainer import checkpoint
from penstock.trainer.actor_critic import ActorCritic
from penstock.trainer.prepare import prepare
from penstock.trainer.warm_start import warm_start
from penstock.types import BusySpan, GroupRef, LearnerState

PATIENCE_S = 300.0
"""With one message, before it is worth a report: whoever sent it has a deadline."""

BEGINNING = "beginning"
"""Of the run's directory: the policy, while it is handed to the roles that begin as it."""

COMPUTED = (Begin, Restore, Accumulate, Step)
"""Messages that the ranks' devices are needed for. Where servers take turns on them, they are given up with every
version that is published; a checkpoint is made of what waits in memory."""

Kind = Literal["train", "step", "publish", "checkpoint", "warm_start", "restore"]


class TrainerProcess:
    """Executes trainer messages in order; the event loop stays free for heartbeats."""

    def __init__(self, config: Config, child: Child) -> None:
        self._config, self._name, self._run_dir = config, child.name, child.run_dir
        self._model_dir = model_dir(config, child.run_dir)
        self._takes_turns = takes_turns(config)
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._payloads = payloads_of(child)
        self._controllers_host = ""
        self._spans: deque[BusySpan] = deque()  # the worker thread appends, the event loop takes
        self._busy_s = self._busy_since_step_s = 0.0
        self._progress, self._doing = 0, ""
        self._begun = False
        """The learner holds what the run is at; until then it may be anything."""
        self._num_steps = 0
        self._latest: LearnerState | None = None
        self._trained: list[int] = []
        self._accumulated: list[int] = []
        self._ranks = self._thread.submit(self._start_ranks, child).result()
        self.published: Publications | None = None
        """What other machines can have of it."""

    def _start_ranks(self, child: Child) -> ActorCritic:
        with plainly():
            roles = trainer_roles(
                self._config,
                model_dir=self._model_dir,
                weights_dir=weights_dir(child, self._config),
                elsewhere=connected_ranks(child, self._config),
            )
        return ActorCritic(roles, self._config.trainer)

    async def welcomed(self, _: Peer, welcome: Welcome) -> None:
        """The controller says where its pool is."""
        self._controllers_host = welcome.host

    async def handle(self, _: str, message: AnyMessage) -> AnyMessage | None:
        if isinstance(message, Accumulate):
            await self._payloads.fetch([group.ref for group in message.groups], host=self._controllers_host)
        what = f"the end of {type(message).__name__}"
        with patient(PATIENCE_S, waiter=self._name, resource=what, holder="its working thread"):
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._execute, message)

    def _execute(self, message: AnyMessage) -> AnyMessage | None:
        self._doing = type(message).__name__
        try:
            with plainly():
                return self._act(message)
        finally:
            self._progress, self._doing = self._progress + 1, ""

    def _act(self, message: AnyMessage) -> AnyMessage | None:
        if isinstance(message, COMPUTED):
            self._ranks.resume()
        match message:
            case AskState():
                return HeldState(state=self._state())
            case AskSaved(directory=directory):
                return FoundSaved(saved=checkpoint.saved_in(Path(directory)))
            case Restore():
                self._restore(message)
            case Begin(policy_version=policy_version):
                self._ranks.policy_version = policy_version
                metrics = self._warm_start()
                self._ranks.begin(policy_version, self._run_dir / BEGINNING)
                self._begun = True
                return Begun(metrics=metrics)
            case _ if not self._begun:
                return HoldsNothing()
            case Accumulate(groups=groups):
                return Accumulated(metrics=self._accumulate(groups))
            case Step():
                return self._step()
            case Publish():
                with self._span("publish"):
                    handle = self._ranks.publish()
                    if self._takes_turns:
                        self._ranks.release()
                return Published(handle=handle if self.published is None else self.published.tell(handle))
            case SaveCheckpoint(directory=directory, state=state):
                with self._span("checkpoint"):
                    target = Path(directory)
                    checkpoint.save(
                        target.parent,
                        int(state["step"]),
                        self._ranks,
                        state,
                        model_dir=self._model_dir,
                        keep=self._config.trainer.keep_checkpoints,
                    )
        return None

    def _state(self) -> TrainerState:
        return TrainerState(
            begun=self._begun,
            step=self._num_steps,
            learner=self._latest,
            trained=self._trained,
            accumulated=self._accumulated,
        )

    def _restore(self, point: Restore) -> None:
        self._num_steps = point.step
        with self._span("restore"):
            self._ranks.read(Path(point.directory), point.policy_version)
            self._begun = True

    def _accumulate(self, groups: list[GroupRef]) -> dict[str, float]:
        with self._span("train"):
            # The whole group, members too old to train included: they count in its mean, the learner masks them.
            samples = [sample for group in groups for sample in self._payloads.read(group.ref)]
            batch, skipped = prepare(
                samples,
                normalize=self._config.trainer.normalize_advantages,
                max_context=self._config.model.max_context,
            )
            sums = self._ranks.accumulate(batch)
        self._payloads.drop(group.ref for group in groups)
        self._accumulated += [group.group for group in groups]
        self._busy_s += sums["busy_s"]
        self._busy_since_step_s += sums["busy_s"]
        return sums | {f"skipped_{reason}": float(count) for reason, count in skipped.items()}

    def _step(self) -> LearnerStateUpdate:
        with self._span("step"):
            state = self._ranks.step()
        self._busy_s += state.metrics["busy_s"] - self._busy_since_step_s
        self._busy_since_step_s = 0.0
        self._num_steps += 1
        self._latest, self._trained, self._accumulated = state, self._accumulated, []
        return LearnerStateUpdate(state=state)

    def _warm_start(self) -> dict[str, float]:
        settings = self._config.model.warm_start
        if not settings.steps:
            return {}
        with self._span("warm_start"):
            result = warm_start(
                self._ranks.imitate,
                self._demonstrations(),
                steps=settings.steps,
                batch_size=settings.batch_size,
                learning_rate=settings.learning_rate,
            )
        return {"steps": settings.steps, "seconds": result.seconds, "loss": result.loss}

    def _demonstrations(self) -> Iterator[tuple[list[int], list[int]]]:
        config, environments = self._config, self._config.environments
        source = open_tasks(config, seed=config.seed + 1)
        for example in demonstrations(
            TaskStream(source, held_out=held_out_tasks(config)),
            make=maker_by_tag(config),
            max_turns=lambda task: environments.of_task(task).max_turns,
            chat=ChatTokenizer.load(self._model_dir),
            seed=config.seed,
        ):
            self._progress += 1
            yield example

    @contextmanager
    def _span(self, kind: Kind) -> Iterator[None]:
        start = time.time()
        yield
        end, version = time.time(), self._ranks.policy_version
        self._spans.append(BusySpan(process=self._name, kind=kind, start=start, end=end, policy_version=version))

    def telemetry(self) -> Telemetry:
        spans = [self._spans.popleft() for _ in range(len(self._spans))]
        return Telemetry(progress=self._progress, doing=self._doing, busy_s=self._busy_s, spans=spans)

    def close(self) -> None:
        """What it has published stays, for servers that have not read it yet: it goes with the runtime directory."""
        self._thread.shutdown(wait=True)
        self._ranks.close()
        self._payloads.close()


@contextmanager
def plainly() -> Iterator[None]:
    """What a rank raised is raised here as it was: how this process ends depends on it."""
    try:
        yield
    except RemoteError as error:
        if error.__cause__ is None:
            raise
        if error.__cause__.__traceback__ is None:  # it was left on the way
            error.__cause__.add_note(f"in {error.role}.{error.method} on rank {error.rank}:\n{error.remote_traceback}")
        raise error.__cause__ from None


async def serve(child: Child) -> None:
    config = load_config(child.run_dir / "config.yaml")
    stop = child.stop_event()
    process = await made(config, child, stop)
    listens = child.address if config.rollout.engine == "penstock" else None
    try:
        async with (
            publishing(weights_dir(child, config), listens, config.rollout.control_key) as process.published,
            membership(
                child,
                config,
                role="trainer",
                handler=process.handle,
                telemetry=process.telemetry,
                welcomed=process.welcomed,
            ),
        ):
            child.report_ready()
            await stop.wait()
    finally:
        process.close()


async def made(config: Config, child: Child, stop: asyncio.Event) -> TrainerProcess:
    """With all its ranks. Who is stopped before has nothing to save, and does not wait for them."""
    making, stopping = (
        asyncio.ensure_future(asyncio.to_thread(TrainerProcess, config, child)),
        asyncio.ensure_future(stop.wait()),
    )
    with patient(PATIENCE_S, waiter=child.name, resource="its ranks", holder="what they load"):
        await asyncio.wait([making, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not making.done():
        child.leave()
    stopping.cancel()
    return making.result()


def weights_dir(child: Child, config: Config) -> Path:
    """In memory; but engines of others, on other machines, read files themselves, and all see the run's directory."""
    foreign = config.rollout.engine != "penstock"
    return (child.run_dir if foreign and child.address is not None else child.runtime_dir) / "weights"
