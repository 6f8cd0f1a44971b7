"""A trainer whose weights are the numbers of the groups it was trained on, step by step. Its checkpoints are real."""

from __future__ import annotations

import asyncio
import json
import time
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from injection import Injector, Phase, faulty

from penstock.config import Config, load_config
from penstock.control.messages import (
    Accumulate,
    AnyMessage,
    AskSaved,
    AskState,
    Begin,
    FinishCheckpoint,
    FinishPublish,
    FoundSaved,
    HeldState,
    HoldsNothing,
    LearnerStateUpdate,
    Metrics,
    Publish,
    Published,
    Publishing,
    Restore,
    SaveCheckpoint,
    Step,
)
from penstock.ports.training import TrainerState
from penstock.processes import bus_client
from penstock.processes.layout import model_dir
from penstock.store.payload_files import PayloadReader
from penstock.supervisor.child import Child
from penstock.trainer import checkpoint
from penstock.types import LearnerState, WeightsHandle

WEIGHTS = "weights.json"
FILLER = "optimizer.bin"
"""What a full disk has no room for."""
FILLER_BYTES = 1 << 16
STEP_S = 0.15
"""More than a heartbeat: the others have something to say, and perhaps to lose, in every step."""


class Weights:
    """Weights that a checkpoint saves."""

    def __init__(self, injector: Injector) -> None:
        self._injector = injector
        self.policy_version = 0
        self.holds: list[list[int]] = []
        """Groups of every step, in order."""

    def write(self, directory: Path, holds: str) -> None:
        """Write what the weights held when the checkpoint began."""
        (directory / WEIGHTS).write_text(holds)
        self._injector.moment(Phase.CHECKPOINTING)
        self._injector.moment(Phase.STOPPING)
        (directory / FILLER).write_bytes(bytes(FILLER_BYTES))

    def read(self, directory: Path) -> None:
        self.holds = json.loads((directory / WEIGHTS).read_text())


class TrainerProcess(bus_client.Member):
    """Executes messages in order on a thread of its own, as the real one does."""

    def __init__(self, config: Config, child: Child, injector: Injector) -> None:
        self._config, self._child, self._injector = config, child, injector
        self._thread, self._saver = ThreadPoolExecutor(max_workers=1), ThreadPoolExecutor(max_workers=1)
        self._saving: Future[None] | None = None
        self._writer = ThreadPoolExecutor(max_workers=1)
        self._publishing: dict[int, Future[WeightsHandle]] = {}
        self._pool = PayloadReader(child.run_dir / "pool")
        self._weights = Weights(injector)
        self._begun = False
        self._num_acts = self._num_steps = 0
        self._accumulated: list[int] = []
        self._learner: LearnerState | None = None

    def _save(self, unfinished: checkpoint.Unfinished, holds: str, best: int | None) -> None:
        self._weights.write(unfinished.path, holds)
        directory, keep = model_dir(self._config, self._child.run_dir), self._config.trainer.keep_checkpoints
        unfinished.complete(model_dir=directory, keep=keep, best=best)

    async def handle(self, _: str, message: AnyMessage) -> AnyMessage | None:
        if isinstance(message, FinishCheckpoint | AskSaved | SaveCheckpoint) and self._saving is not None:
            await asyncio.wrap_future(self._saving)
        if isinstance(message, FinishCheckpoint):
            return HoldsNothing() if self._saving is None else None
        if isinstance(message, FinishPublish):
            if (publishing := self._publishing.get(message.policy_version)) is None:
                return HoldsNothing()
            return Published(handle=await asyncio.wrap_future(publishing))
        reply = await asyncio.get_running_loop().run_in_executor(self._thread, self._act, message)
        self._num_acts += 1
        return reply

    def _act(self, message: AnyMessage) -> AnyMessage | None:
        match message:
            case AskState():
                return HeldState(state=self._state())
            case AskSaved(directory=directory):
                return FoundSaved(saved=checkpoint.latest(Path(directory)))
            case Begin(policy_version=policy_version):
                self._begun, self._weights.policy_version = True, policy_version
                return Metrics(metrics={})
            case Restore(directory=directory, step=step, policy_version=policy_version):
                self._weights.read(Path(directory))
                self._begun, self._weights.policy_version, self._num_steps = True, policy_version, step
            case _ if not self._begun:
                return HoldsNothing()
            case Accumulate(groups=groups):
                self._injector.await_end()
                self._injector.moment(Phase.RUNNING, nth=3)
                num_tokens = sum(len(s.token_ids) for group in groups for s in self._pool.read(group.ref))
                self._accumulated += [group.group for group in groups]
                return Metrics(metrics={"tokens": float(num_tokens)})
            case Step():
                return self._step()
            case Publish():
                version, learner = self._weights.policy_version, self._learner
                begun = self._writer.submit(self._publish, version, [*self._weights.holds], learner is not None)
                self._publishing[version] = begun
                return Publishing(policy_version=version)
            case SaveCheckpoint(directory=directory, state=state, best=best):
                step, version = int(state["step"]), self._weights.policy_version
                unfinished = checkpoint.Unfinished(Path(directory).parent, step, policy_version=version, extra=state)
                self._saving = self._saver.submit(self._save, unfinished, json.dumps(self._weights.holds), best)
        return None

    def _state(self) -> TrainerState:
        return TrainerState(
            begun=self._begun,
            step=self._num_steps,
            learner=self._learner,
            trained=self._weights.holds[-1] if self._learner else [],
            accumulated=self._accumulated,
        )

    def _step(self) -> LearnerStateUpdate:
        time.sleep(STEP_S)
        self._injector.ask_for_stop()
        weights = self._weights
        weights.holds.append(self._accumulated)
        self._accumulated = []
        weights.policy_version += 1
        self._num_steps += 1
        self._learner = LearnerState(policy_version=weights.policy_version, entropy=1.0)
        return LearnerStateUpdate(state=self._learner)

    def _publish(self, policy_version: int, holds: list[list[int]], has_learnt: bool) -> WeightsHandle:
        """Write weights beside training."""
        directory = self._child.runtime_dir / "weights"
        directory.mkdir(exist_ok=True)
        path = directory / f"{policy_version}.json"
        if has_learnt:
            self._injector.moment(Phase.PUBLISHING)
        path.write_bytes(json.dumps({"policy_version": policy_version, "holds": holds}).encode().ljust(FILLER_BYTES))
        fingerprint = f"{zlib.crc32(json.dumps(holds).encode()):08x}"
        return WeightsHandle(
            policy_version=policy_version, path=str(path), num_bytes=path.stat().st_size, fingerprint=fingerprint
        )

    def telemetry(self) -> bus_client.Telemetry:
        return bus_client.Telemetry(progress=self._num_acts)

    def close(self) -> None:
        self._thread.shutdown(wait=True)


async def serve(child: Child, injector: Injector) -> None:
    stop = child.stop_event()
    config = load_config(child.run_dir / "config.yaml")
    process = TrainerProcess(config, child, injector)
    try:
        async with bus_client.membership(child, config, role="trainer", member=process):
            child.report_ready()
            await stop.wait()
    finally:
        process.close()


if __name__ == "__main__":
    child, injector = Child.from_environment(), Injector.of_this_process()
    injector.moment(Phase.STARTING)
    bus_client.Peer = faulty(bus_client.Peer, injector)  # type: ignore[misc, assignment]
    child.run(lambda: serve(child, injector))
