"""The trainer process: executes one bus message at a time, by calls to the ranks that hold the models. Only published
weights and the files of a checkpoint are written beside later messages.

An actor with a single rank runs in this process, on its own thread. All other ranks are processes of the run, possibly
on other nodes: see `trainer_roles` and `rank.py`. If a rank is lost, the trainer ends. The supervisor restarts all of
them together.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal

from transformers.utils.logging import disable_progress_bar

from penstock.config import Config, ConfigError, load_config
from penstock.config.secret_settings import resolved
from penstock.control import messages
from penstock.control.bus import Peer
from penstock.control.messages import AnyMessage
from penstock.control.rank_channel import RankChannels
from penstock.data.sources import TaskStream, held_out_tasks, open_tasks
from penstock.deadline import first, warn_if_stalled
from penstock.envs.demonstrations import demonstrations
from penstock.envs.registry import maker_by_tag, managers_of, resolve
from penstock.groups.backend import Backend
from penstock.groups.errors import RemoteError
from penstock.groups.fused import Roles, place
from penstock.groups.local import LocalBackend
from penstock.groups.remote import RemoteBackend
from penstock.groups.role import Role
from penstock.model.chat import ChatTokenizer
from penstock.model.files import vocab_size
from penstock.model.load_policy import resolve_device
from penstock.observe.log_lines import Paced, pairs
from penstock.ports.episode_manager import EpisodeManager
from penstock.ports.observer import BusySpan
from penstock.ports.training import TrainerState, WeightsNotSent
from penstock.processes.bus_client import Member, Telemetry, membership
from penstock.processes.devices import devices_in_use
from penstock.processes.layout import model_dir, places, rank_name, rank_names, takes_turns, without_keys
from penstock.processes.pool_access import payloads_of
from penstock.processes.trainer_rank import LOOPBACK, Actor, CriticRank, ReferenceRank, TrainerRank
from penstock.runtime.file_service import WEIGHTS
from penstock.runtime.interfaces import use_interface_of
from penstock.supervisor.child import Child
from penstock.supervisor.procfs import boot_id
from penstock.ticks import heard_by, tick
from penstock.trainer.actor_critic import ActorCritic
from penstock.trainer.checkpoint import Unfinished, latest
from penstock.trainer.prepare import prepare
from penstock.trainer.warm_start import warm_start
from penstock.types import GroupRef, LearnerState, Task, WeightsHandle
from penstock.version_history import VersionHistory
from penstock.weights.broadcast import Offers
from penstock.weights.live_weights import LiveWeights
from penstock.weights.publication import KEPT_VERSIONS, Watch, await_handle, handle_in
from penstock.weights.receiver import linked
from penstock.weights.sender import Sender
from penstock.weights.shared_memory import file_in

logger = logging.getLogger(__name__)

FIND_SHARE = 0.75
"""Share of the ready timeout in which all ranks must connect. The supervisor may have to start ranks again on another
node."""
STALL_WARNING_S = 300.0
"""Seconds that one message may take before a stall is reported. The sender has its own deadline."""

BEGINNING = "beginning"
"""Folder of the run's directory that holds the policy while the critic and the reference load it to begin with."""

COMPUTED = (messages.Begin, messages.Restore, messages.Accumulate, messages.Step)
"""Messages that need the ranks' devices.

Where rollout servers take turns on the devices, the ranks release them with every published version. A checkpoint needs
no device: it is made from copies in memory.
"""

LOGGED = ("loss", "entropy", "grad_norm", "staleness_mean", "samples", "tokens", "busy_s")
"""Metrics of a step that its log line shows."""

SAVING = "SaveCheckpoint"
"""What the trainer does while it waits for files alone."""
LOOK_EVERY_S = 0.05
"""Seconds between two looks whether all ranks have written their files."""

Kind = Literal["train", "step", "checkpoint", "warm_start", "restore"]
WORKERS: Mapping[str, type[TrainerRank]] = {"actor": Actor, "critic": CriticRank, "reference": ReferenceRank}

Start = Callable[[Mapping[str, Role], Sequence[int]], Backend]
"""Returns the workers of the given roles, in the trainer's processes with the given numbers."""


class TrainerProcess(Member):
    """Executes trainer messages in order; the event loop stays free for heartbeats."""

    def __init__(self, config: Config, child: Child) -> None:
        self._config, self._child = config, child
        self._model_dir = model_dir(config, child.run_dir)
        self._takes_turns = takes_turns(config)
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._payloads = payloads_of(child)
        self._controllers_host = ""
        self._spans: deque[BusySpan] = deque()  # the worker thread appends, the event loop removes
        self._busy_s = self._busy_since_step_s = 0.0
        self._progress, self._doing = 0, ""
        self._begun = False
        """Whether the learner holds the state of this run. Before that its state is meaningless."""
        self._num_steps = 0
        self._history = VersionHistory()
        self._step_log, self._published_log = Paced(logger), Paced(logger)
        self._vocab_size = vocab_size(self._model_dir)
        self._latest: LearnerState | None = None
        self._trained: list[int] = []
        self._accumulated: list[int] = []
        self._published: dict[int, tuple[float, Path]] = {}
        """(begin in seconds since the epoch, folder) by version, of the newest ones."""
        self._unfinished: Unfinished | None = None
        self._saving: asyncio.Task[None] | None = None
        """The end of the latest checkpoint. It waits for the files that the ranks write, and then completes it."""
        self._live = LiveWeights() if config.rollout.direct_weights else None
        self._offers, self._sender = self._ways_to_servers()
        self._channels = RankChannels(child.runtime_dir, rank_names(config), host=child.address)
        try:
            self._ranks = self._thread.submit(self._start_ranks).result()
        except BaseException:
            self._channels.close()
            raise

    def _ways_to_servers(self) -> tuple[Offers | None, Sender | None]:
        """Return the broadcasts to processes of the run, if there are other machines, and those to foreign engines, if
        these may get any. Raises `ConfigError` if direct weights have no device here."""
        address, is_direct = self._child.address, self._config.rollout.direct_weights
        if address is None and not is_direct:
            return None, None
        # With several ranks this process computes nothing, and has no device of its own.
        device = resolve_device(self._config.model.device if self._config.num_ranks == 1 else "cpu")
        if is_direct and device.type != "cuda":
            raise ConfigError(
                f"rollout.direct_weights needs a CUDA device, but the trainer computes on {device}: set it to false"
            )
        if address is None:
            return None, Sender(LOOPBACK, device=device, live=self._live)
        use_interface_of(address)
        return Offers(address), Sender(address, device=device, live=self._live)

    def _link(self, handle: WeightsHandle) -> WeightsHandle:
        """Add what other machines need to get the file, if there are any and they do not read it in a folder that they
        all share."""
        if not self._child.host or self._config.shares_weights_folder:
            return handle
        handle = linked(handle, service=self._child.host, secret=self._child.nonce, machine=boot_id())
        if self._offers is None or self._config.broadcasts_to_engines:
            return handle
        try:
            return self._offers.add(handle)
        except (OSError, RuntimeError) as error:
            logger.warning("policy_version %d is not broadcast to other machines: %s", handle.policy_version, error)
            return handle

    def _start_ranks(self) -> ActorCritic:
        start_s, channels = self._config.supervisor.ready_timeout_s, self._channels

        def start(together: Mapping[str, Role], numbers: Sequence[int]) -> Backend:
            connections = [channels.channels[rank_name(number)] for number in numbers]
            return RemoteBackend(together, connections, start_s=start_s)

        channels.await_ranks(waiter=self._child.name, seconds=FIND_SHARE * start_s)
        is_shared = self._config.shares_weights_folder and self._child.address is not None
        weights_dir = (self._child.run_dir if is_shared else self._child.runtime_dir) / WEIGHTS
        with plainly():
            roles = trainer_roles(
                self._config, start, model_dir=self._model_dir, weights_dir=weights_dir, live=self._live
            )
        return ActorCritic(roles, self._config.trainer)

    async def welcomed(self, _: Peer, welcome: messages.Welcome) -> None:
        """Store the address of the controller's host, which has the pool."""
        self._controllers_host = welcome.host

    async def handle(self, _: str, message: AnyMessage) -> AnyMessage | None:
        match message:
            case messages.Accumulate(groups=groups):
                await self._payloads.fetch([group.ref for group in groups], host=self._controllers_host)
            case messages.FinishCheckpoint() if self._saving is None:
                return messages.HoldsNothing()
            case messages.FinishCheckpoint():
                await self._finish_saving()
                return None
            case messages.FinishPublish(policy_version=version) if version not in self._published:
                return messages.HoldsNothing()
            case messages.FinishPublish(policy_version=version):
                return messages.Published(handle=self._link(await self._complete_publication(version)))
            case messages.OpenGroup(policy_version=version) if version not in self._published:
                return messages.HoldsNothing()
            case messages.OpenGroup() | messages.SendWeights() | messages.LendBucket() | messages.CloseGroup() if (
                self._sender is not None
            ):
                try:
                    return await self._send(self._sender, message)
                except WeightsNotSent as error:
                    return messages.NotSent(reason=str(error))
            case messages.SaveCheckpoint() | messages.AskSaved() | messages.Restore():
                await self._finish_saving()
        resource = f"the end of {type(message).__name__}"
        with warn_if_stalled(STALL_WARNING_S, waiter=self._child.name, resource=resource, holder="its working thread"):
            reply = await asyncio.get_running_loop().run_in_executor(self._thread, self._execute, message)
        if isinstance(message, messages.SaveCheckpoint) and reply is None:
            self._saving = asyncio.create_task(self._complete(message))
        return reply

    async def _send(self, sender: Sender, message: AnyMessage) -> AnyMessage | None:
        """Act on a group in which a server of another engine gets weights. Raises `WeightsNotSent`."""
        resource, holder = f"the end of {type(message).__name__}", "a server that takes weights"
        with warn_if_stalled(STALL_WARNING_S, waiter=self._child.name, resource=resource, holder=holder):
            match message:
                case messages.OpenGroup(server=server, policy_version=version, world_size=world_size, way=way):
                    path, open_group = file_in(self._published[version][1]), partial(sender.open, way=way)
                    opened = await asyncio.to_thread(open_group, server, path, version, world_size=world_size)
                    return messages.GroupOpened(group=opened)
                case messages.SendWeights(group=group):
                    with heard_by(self._ticked):
                        await asyncio.wrap_future(sender.send(group))
                case messages.LendBucket(group=group, number=number):
                    return messages.BucketLent(payload=await asyncio.to_thread(sender.lend, group, number))
                case messages.CloseGroup(group=group):
                    await asyncio.to_thread(sender.close_group, group)
        return None

    async def _finish_saving(self) -> None:
        """Wait until the latest checkpoint is complete. Raises its error."""
        if self._saving is not None:
            with self._watch_disk():
                await asyncio.shield(self._saving)

    async def _complete(self, message: messages.SaveCheckpoint) -> None:
        """Complete the checkpoint that `message` has begun."""
        start, unfinished, keep = time.time(), self._unfinished, self._config.trainer.keep_checkpoints
        assert unfinished is not None
        try:
            with heard_by(self._ticked), self._watch_disk():
                ask = partial(asyncio.get_running_loop().run_in_executor, self._thread, self._are_written)
                while not await ask():  # noqa: ASYNC110 - only a call to all ranks tells
                    await asyncio.sleep(LOOK_EVERY_S)
                complete = partial(unfinished.complete, model_dir=self._model_dir, keep=keep, best=message.best)
                await asyncio.to_thread(complete)
        except BaseException:
            unfinished.discard()
            raise
        logger.info("saved the checkpoint %s in %.3f s, beside training", message.directory, time.time() - start)

    async def _complete_publication(self, version: int) -> WeightsHandle:
        """Wait until the weights of a version are complete, and return their handle. Raises `NotPublished`."""
        begun, folder = self._published[version]
        watch = Watch(folder, waiter=self._child.name)
        with heard_by(self._ticked):
            while (handle := handle_in(folder)) is None:  # noqa: ASYNC110 - ranks in other processes write it
                await asyncio.sleep(watch.look())
        end = time.time()
        span = BusySpan(process=self._child.name, kind="publish", start=begun, end=end, policy_version=version)
        self._spans.append(span)
        self._published_log.info(
            f"published the weights of policy_version {version}: {handle.num_bytes:,} bytes in {end - begun:.3f} s"
        )
        return handle

    def _watch_disk(self) -> AbstractContextManager[None]:
        """Report if the files of a checkpoint take long."""
        return warn_if_stalled(
            STALL_WARNING_S, waiter=self._child.name, resource="the files of a checkpoint", holder="the disk"
        )

    def _are_written(self) -> bool:
        with plainly():
            return self._ranks.is_written()

    def _execute(self, message: AnyMessage) -> AnyMessage | None:
        self._doing = type(message).__name__
        try:
            with plainly(), heard_by(self._ticked):
                return self._act(message)
        finally:
            self._progress, self._doing = self._progress + 1, ""

    def _ticked(self) -> None:
        self._progress += 1

    def _act(self, message: AnyMessage) -> AnyMessage | None:
        if isinstance(message, COMPUTED):
            self._ranks.resume()
        match message:
            case messages.AskState():
                state = TrainerState(
                    begun=self._begun,
                    step=self._num_steps,
                    learner=self._latest,
                    trained=self._trained,
                    accumulated=self._accumulated,
                )
                return messages.HeldState(state=state)
            case messages.AskSaved(directory=directory):
                return messages.FoundSaved(saved=latest(Path(directory)))
            case messages.Restore():
                self._restore(message)
            case messages.Begin(policy_version=policy_version, history=history):
                self._ranks.policy_version, self._history = policy_version, history
                metrics = self._warm_start()
                self._ranks.begin(policy_version, self._child.run_dir / BEGINNING)
                self._begun = True
                return messages.Metrics(metrics=metrics)
            case _ if not self._begun:
                return messages.HoldsNothing()
            case messages.Accumulate(groups=groups):
                return messages.Metrics(metrics=self._accumulate(groups))
            case messages.Step():
                return self._step()
            case messages.Publish():
                begun = time.time()
                folder, version = self._ranks.publish(), self._ranks.policy_version
                published = {**self._published, version: (begun, folder)}
                self._published = {kept: published[kept] for kept in sorted(published)[-KEPT_VERSIONS:]}
                if self._takes_turns:
                    await_handle(folder, waiter=self._child.name)
                    self._ranks.release()
                return messages.Publishing(policy_version=version)
            case messages.SaveCheckpoint(directory=directory, state=saved):
                with self._span("checkpoint"):
                    step, version = int(saved["step"]), self._ranks.policy_version
                    self._unfinished = Unfinished(Path(directory).parent, step, policy_version=version, extra=saved)
                    self._ranks.write(self._unfinished.path)
        return None

    def _restore(self, point: messages.Restore) -> None:
        self._num_steps, self._history = point.step, point.history
        with self._span("restore") as start:
            self._ranks.read(Path(point.directory), point.policy_version)
            self._begun = True
        seconds = time.time() - start
        logger.info("goes back to %s, now policy_version %d, in %.3f s", point.directory, point.policy_version, seconds)

    def _accumulate(self, groups: list[GroupRef]) -> dict[str, float]:
        with self._span("train"):
            # Read the whole group, even members too old to train: they count in its mean, and the learner masks them.
            samples = [sample for group in groups for sample in self._payloads.read(group.ref)]
            config = self._config
            batch, skipped = prepare(
                samples,
                settings=config.trainer.advantages,
                for_critic=config.trainer.critic is not None,
                renumbered=lambda versions: self._history.renumbered(versions, self._ranks.policy_version),
                max_context=config.model.max_context,
                vocab_size=self._vocab_size,
            )
            sums = self._ranks.accumulate(batch)
        self._payloads.drop(group.ref for group in groups)
        self._accumulated += [group.group for group in groups]
        self._busy_s += sums["busy_s"]
        self._busy_since_step_s += sums["busy_s"]
        return sums | {f"skipped_{reason}": float(count) for reason, count in skipped.items()}

    def _step(self) -> messages.LearnerStateUpdate:
        with self._span("step"):
            state = self._ranks.step()
        busy_s = state.metrics["busy_s"]
        self._busy_s += busy_s - self._busy_since_step_s
        self._busy_since_step_s = 0.0
        self._num_steps += 1
        figures = {name: state.metrics[name] for name in LOGGED if name in state.metrics}
        figures["tokens_per_busy_s"] = state.metrics.get("tokens", 0.0) / max(busy_s, 1e-9)
        self._step_log.info(f"step {self._num_steps}: policy_version={state.policy_version} {pairs(figures)}")
        self._latest, self._trained, self._accumulated = state, self._accumulated, []
        return messages.LearnerStateUpdate(state=state)

    def _warm_start(self) -> dict[str, float]:
        settings = self._config.model.warm_start
        if not settings.steps:
            return {}
        with self._span("warm_start"):
            imitate, examples = self._ranks.imitate, self._demonstrations
            steps, batch_size, learning_rate = settings.steps, settings.batch_size, settings.learning_rate
            return warm_start(imitate, examples, steps=steps, batch_size=batch_size, learning_rate=learning_rate)

    def _demonstrations(self) -> Iterator[tuple[list[int], list[int]]]:
        config, environments = self._config, self._config.environments
        managers = managers_of(config, {name: resolve(name) for name in environments.names})

        def manager(task: Task) -> EpisodeManager | None:
            settings = environments.of_task(task)
            if settings.manager is None:
                return None
            return managers[settings.manager](**resolved(settings.manager_options, "env.manager_options"))

        source = open_tasks(config, seed=config.seed + 1)
        for example in demonstrations(
            TaskStream(source, held_out=held_out_tasks(config)).next,
            make=maker_by_tag(config),
            max_turns=lambda task: environments.of_task(task).max_turns,
            chat=ChatTokenizer.load(self._model_dir, tool_format=config.model.tool_format),
            seed=config.seed,
            noise=config.model.warm_start.noise,
            max_context=config.model.max_context,
            manager=manager,
        ):
            tick()
            yield example

    @contextmanager
    def _span(self, kind: Kind) -> Iterator[float]:
        """Record a span for the length of the body, and yield its start in seconds since the epoch."""
        start = time.time()
        yield start
        version, name = self._ranks.policy_version, self._child.name
        self._spans.append(BusySpan(process=name, kind=kind, start=start, end=time.time(), policy_version=version))

    def telemetry(self) -> Telemetry:
        spans = [self._spans.popleft() for _ in range(len(self._spans))]
        doing = self._doing or ("" if self._saving is None or self._saving.done() else SAVING)
        return Telemetry(progress=self._progress, doing=doing, busy_s=self._busy_s, spans=spans)

    def close(self) -> None:
        """Close the ranks and their connections. Published weights stay, because servers may not have read them yet.
        They are removed with the runtime directory."""
        if self._offers is not None:
            self._offers.close()
        if self._sender is not None:
            self._sender.close()
        self._thread.shutdown(wait=True)
        self._ranks.close()
        self._channels.close()


def trainer_roles(
    config: Config, start: Start, *, model_dir: Path, weights_dir: Path, live: LiveWeights | None = None
) -> Roles:
    """Return all roles of the trainer, placed as configured, with their ranks connected.

    `start`: starts roles in separate processes. `model_dir`: directory of the policy. `weights_dir`: where the weights
    are published. `live`: lends the weights of an actor in this process.

    Roles that share a place share its processes, one for each rank. The processes on the trainer's machine come first.
    """
    together_in = places(config)
    init: dict[str, dict[str, Any]] = {"actor": {"model_dir": model_dir, "weights_dir": weights_dir, "live": live}}
    roles = {
        name: Role(WORKERS[name], {"config": without_keys(config), "place": number} | init.get(name, {}))
        for number, together in enumerate(together_in.values())
        for name in together
    }
    num_ranks, names = config.num_ranks, list(together_in)

    def begin(name: str, together: Mapping[str, Role]) -> Backend:
        if name == "actor" and num_ranks == 1:
            return LocalBackend(together)
        number = names.index(name) * num_ranks
        return start(together, range(number, number + num_ranks))

    placed = place(roles, together_in, begin)
    try:
        if num_ranks > 1:
            for name, *_ in together_in.values():
                group: Any = getattr(placed, name)
                group.join(group.open_rendezvous())
    except BaseException:
        placed.close()
        raise
    return placed


@contextmanager
def plainly() -> Iterator[None]:
    """Raise the original error of a rank instead of `RemoteError`: the error decides how this process ends."""
    try:
        yield
    except RemoteError as error:
        if error.__cause__ is None:
            raise
        if error.__cause__.__traceback__ is None:  # the traceback was lost between the processes
            error.__cause__.add_note(f"in {error.role}.{error.method} on rank {error.rank}:\n{error.remote_traceback}")
        raise error.__cause__ from None


async def serve(child: Child) -> None:
    config = load_config(child.run_dir / "config.yaml")
    disable_progress_bar()  # each checkpoint would write a progress bar into the log
    stop, settings = child.stop_event(), config.trainer
    child.log_start(
        model=config.model.path,
        device=config.model.device,
        objective=settings.objective.name,
        learning_rate=settings.learning_rate,
        ranks=config.num_ranks,
        steps=settings.steps,
        groups_per_step=settings.groups_per_step,
    )
    process = await made(config, child, stop)
    try:
        async with membership(child, config, role="trainer", member=process):
            child.report_ready(devices=devices_in_use())
            await stop.wait()
    finally:
        process.close()


async def made(config: Config, child: Child, stop: asyncio.Event) -> TrainerProcess:
    """Return the trainer with all its ranks. If a stop comes first, end the process at once: it has nothing to save."""
    making = asyncio.ensure_future(asyncio.to_thread(TrainerProcess, config, child))
    with warn_if_stalled(STALL_WARNING_S, waiter=child.name, resource="its ranks", holder="the models that they load"):
        await first(stop.wait(), asyncio.wait([making]))
    if not making.done():
        child.leave()
    return making.result()
