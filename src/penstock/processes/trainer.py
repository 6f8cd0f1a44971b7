"""The trainer: a learner group behind the bus, one message at a time, on a thread of its own."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from penstock.config import Config, load_config
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
)
from penstock.data.sources import TaskStream, held_out_tasks, open_tasks
from penstock.deadline import patient
from penstock.envs.demonstrations import demonstrations
from penstock.envs.registry import maker_by_tag
from penstock.groups.local import LocalGroup
from penstock.model.chat import ChatTokenizer
from penstock.model.load import load_policy, resolve_device, resolve_dtype, with_tied_names
from penstock.ports import TrainerState
from penstock.processes.cores import num_threads, num_usable_cpus
from penstock.processes.layout import model_dir
from penstock.processes.member import Telemetry, membership
from penstock.scheduler.segments import max_trained_tokens
from penstock.store.payload import PayloadReader
from penstock.supervisor.child import Child
from penstock.trainer import checkpoint
from penstock.trainer.learner import Learner
from penstock.trainer.prepare import prepare
from penstock.trainer.warm_start import warm_start
from penstock.types import BusySpan, GroupRef, LearnerState
from penstock.weights.shared_memory import WeightsPublisher

PATIENCE_S = 300.0
"""With one message, before it is worth a report: whoever sent it has a deadline."""

Kind = Literal["train", "step", "publish", "checkpoint", "warm_start", "restore"]


class TrainerProcess:
    """Executes trainer messages in order; the event loop stays free for heartbeats."""

    def __init__(self, config: Config, child: Child) -> None:
        self._config, self._name, self._run_dir = config, child.name, child.run_dir
        self._model_dir = model_dir(config, child.run_dir)
        self._thread = ThreadPoolExecutor(max_workers=1, initializer=self._set_threads)
        device = resolve_device(config.model.device)
        self._dtype = resolve_dtype(config.model.dtype, device)
        self._model = load_policy(self._model_dir, device=device, weights=config.model.path != "tiny", seed=config.seed)
        self._reader = PayloadReader(child.run_dir / "pool")
        self._publisher = WeightsPublisher(child.runtime_dir / "weights")
        self._spans: deque[BusySpan] = deque()  # the worker thread appends, the event loop takes
        self._busy_s = self._busy_since_step_s = 0.0
        self._progress, self._doing = 0, ""
        self._begun = False
        """The learner holds what the run is at; until then it may be anything."""
        self._num_steps = self._first_version = 0
        self._latest: LearnerState | None = None
        self._trained: list[int] = []
        self._accumulated: list[int] = []

    def _set_threads(self) -> None:
        torch.set_num_threads(num_threads(self._config, self._config.trainer.torch_threads))

    @cached_property
    def _group(self) -> Any:
        """Made after the warm start, which trains the whole model and leaves no optimizer state behind."""
        return LocalGroup(
            Learner,
            model=self._model,
            config=self._config.trainer,
            max_staleness=self._config.scheduler.max_staleness,
            policy_version=self._first_version,
            temperature=self._config.env.temperature,
            max_tokens=max_trained_tokens(self._config),
            whole_step=self._config.trainer.groups_per_step * self._config.env.group_size,
            compute_dtype=self._dtype,
            measure_noise=self._config.scheduler.trigger.feedback.signal == "noise_scale",
        )

    @property
    def _learner(self) -> Learner:
        learner: Learner = self._group.workers[0]
        return learner

    async def handle(self, _: str, message: AnyMessage) -> AnyMessage | None:
        what = f"the end of {type(message).__name__}"
        with patient(PATIENCE_S, waiter=self._name, resource=what, holder="its working thread"):
            return await asyncio.get_running_loop().run_in_executor(self._thread, self._execute, message)

    def _execute(self, message: AnyMessage) -> AnyMessage | None:
        self._doing = type(message).__name__
        try:
            return self._act(message)
        finally:
            self._progress, self._doing = self._progress + 1, ""

    def _act(self, message: AnyMessage) -> AnyMessage | None:
        match message:
            case AskState():
                return HeldState(state=self._state())
            case AskSaved(directory=directory):
                return FoundSaved(saved=checkpoint.saved_in(Path(directory)))
            case Restore():
                self._restore(message)
            case Begin(policy_version=policy_version):
                self._first_version = policy_version
                metrics = self._warm_start()
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
                    return Published(handle=self._publisher.publish(self._served(), self._learner.policy_version))
            case SaveCheckpoint(directory=directory, state=state):
                with self._span("checkpoint"):
                    target = Path(directory)
                    checkpoint.save(
                        target.parent,
                        int(state["step"]),
                        self._learner,
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
            self._learner.read(Path(point.directory))
            self._learner.policy_version = point.policy_version
        self._begun = True

    def _accumulate(self, groups: list[GroupRef]) -> dict[str, float]:
        with self._span("train"):
            # The whole group, members too old to train included: they count in its mean, the learner masks them.
            samples = [sample for group in groups for sample in self._reader.read(group.ref)]
            batch, skipped = prepare(
                samples,
                normalize=self._config.trainer.normalize_advantages,
                max_context=self._config.model.max_context,
            )
            sums: dict[str, float] = dict(self._group.accumulate(batch))
        self._accumulated += [group.group for group in groups]
        self._busy_s += sums["busy_s"]
        self._busy_since_step_s += sums["busy_s"]
        return sums | {f"skipped_{reason}": float(count) for reason, count in skipped.items()}

    def _step(self) -> LearnerStateUpdate:
        with self._span("step"):
            state: LearnerState = self._group.step()
        self._busy_s += state.metrics["busy_s"] - self._busy_since_step_s
        self._busy_since_step_s = 0.0
        self._num_steps += 1
        self._latest, self._trained, self._accumulated = state, self._accumulated, []
        return LearnerStateUpdate(state=state)

    def _served(self) -> dict[str, Tensor]:
        """The weights as servers load them."""
        named = {name: tensor.to(self._dtype) for name, tensor in self._learner.named_weights().items()}
        return with_tied_names(self._model, named) if self._config.rollout.engine == "vllm" else named

    def _warm_start(self) -> dict[str, float]:
        settings = self._config.model.warm_start
        if not settings.steps:
            return {}
        torch.set_num_threads(max(torch.get_num_threads(), num_usable_cpus()))
        with self._span("warm_start"):
            result = warm_start(
                self._model,
                self._demonstrations(),
                steps=settings.steps,
                batch_size=settings.batch_size,
                learning_rate=settings.learning_rate,
            )
        self._set_threads()
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
        version = self._learner.policy_version
        self._spans.append(
            BusySpan(process=self._name, kind=kind, start=start, end=time.time(), policy_version=version)
        )

    def telemetry(self) -> Telemetry:
        spans = [self._spans.popleft() for _ in range(len(self._spans))]
        return Telemetry(progress=self._progress, doing=self._doing, busy_s=self._busy_s, spans=spans)

    def close(self) -> None:
        """What it has published stays, for servers that have not read it yet: it goes with the runtime directory."""
        self._thread.shutdown(wait=True)


async def serve(child: Child) -> None:
    config = load_config(child.run_dir / "config.yaml")
    stop = child.stop_event()
    torch.set_num_threads(num_threads(config, config.trainer.torch_threads))
    process = TrainerProcess(config, child)
    try:
        async with membership(child, config, role="trainer", handler=process.handle, telemetry=process.telemetry):
            child.report_ready()
            await stop.wait()
    finally:
        process.close()
