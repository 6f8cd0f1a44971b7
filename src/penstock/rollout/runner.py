"""Runs the slot engine in a thread of its own and lets asyncio code await its results.

Everything that touches the engine is a command executed between two steps by the engine's thread; an idle thread
blocks on the command queue. Results of a step reach the event loop in one call. If a step raises, the engine is
dead: every pending request fails with that error, and so does every later one.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Literal, TypeVar

import torch

from penstock.deadline import patient
from penstock.model.compute import compute_seconds
from penstock.rollout.busy import BusyMeter
from penstock.rollout.costs import StepCosts
from penstock.rollout.durations import Durations
from penstock.rollout.engine import Finished, SlotEngine
from penstock.rollout.failures import Conflict, EngineDead, GenerationFailed, Stopped
from penstock.rollout.generator import Increment, OnTokens, Scored
from penstock.rollout.request import GenerateRequest
from penstock.rollout.rows import Sequence as Sample
from penstock.types import BusySpan, Segment, UpdateMode, VersionSpan

PauseMode = Literal["abort", "in_place", "retract"]

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 30.0
"""For a step to end; a thread stuck in the device longer than that is left behind."""

PATIENCE_S = 600.0
"""With the engine, before it is worth a report: a long answer, or all that run when one drains, takes its time."""

T = TypeVar("T")
Command = Callable[[], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A request someone waits for."""

    request: GenerateRequest
    result: asyncio.Future[list[Segment]]
    on_tokens: OnTokens | None
    asked_at: float
    """On the performance counter."""


class EngineRunner:
    """Owns the engine's thread. All methods but `drain_spans` belong to the event loop that called `start`."""

    def __init__(self, engine: SlotEngine, *, process: str) -> None:
        self.engine = engine
        self.error: BaseException | None = None
        self.failed = asyncio.Event()
        """The engine's thread ended, and nobody had asked it to."""
        self.costs = StepCosts()
        self.latencies, self.first_tokens = Durations(), Durations()
        """From a request to its whole answer, and to its first token."""
        self.num_prompt_tokens = self.num_weight_updates = self.num_aborted = 0
        """Prompt tokens computed, weights loaded, requests that were ended early: so far."""
        self.num_pauses = 0
        """How often a pause was asked for: tells one from the next."""
        self._meter = BusyMeter(process, partial(compute_seconds, engine.model.device))
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._requests: dict[str, Pending] = {}
        self._actions: set[asyncio.Future[None]] = set()
        self._followed: dict[str, tuple[GenerateRequest, list[int]]] = {}
        """Requests whose growth somebody follows, and the tokens told of each sample. The engine's thread's own."""
        self._when_drained: list[tuple[Command, asyncio.Future[None]]] = []
        """For when nothing runs any more; until then nobody is admitted. The engine's thread's own."""
        self._scores: deque[tuple[Iterator[None], asyncio.Future[None]]] = deque()
        """Prompts to be scored, a part of one of them after every step. The engine's thread's own."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop

    @property
    def policy_version(self) -> int:
        """NO_VERSION until weights have been loaded."""
        return self.engine.policy_version

    @property
    def busy_s(self) -> float:
        """Seconds of useful model compute so far."""
        return self._meter.busy_s

    @property
    def num_generated_tokens(self) -> int:
        """Since the engine was built."""
        return self.engine.num_generated_tokens

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer."""
        return self.engine.max_context

    def check(self, request: GenerateRequest) -> None:
        """Raise ValueError if the request cannot be served."""
        self.engine.check(request)

    def check_prompt(self, prompt_ids: list[int]) -> None:
        """Raise ValueError for a prompt that cannot be computed."""
        self.engine.check_prompt(prompt_ids)

    def drain_spans(self) -> list[BusySpan]:
        """Busy intervals since the last call."""
        return self._meter.drain()

    def start(self) -> None:
        """Start the engine's thread; results go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its current step; pending calls and later ones fail with Stopped."""
        self._commands.put(self._request_stop)
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)
        self._end(Stopped("the server is shutting down"))

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> list[Segment]:
        """One segment per seed; while the engine is released, empty ones at once. ValueError for a bad request;
        cancelling this call aborts the request. `on_tokens` hears of every token before this returns."""
        self._check_alive()
        self.engine.check(request)
        if request.rid in self._requests:
            raise ValueError(f"request {request.rid} is already being served")
        pending = Pending(
            request=request, result=self._loop.create_future(), on_tokens=on_tokens, asked_at=time.perf_counter()
        )
        self._requests[request.rid] = pending

        def submit() -> None:
            if on_tokens is not None:
                self._followed[request.rid] = (request, [0] * len(request.seeds))
            self._post_one(self.engine.submit(request))

        self._commands.put(submit)
        try:
            with patient(PATIENCE_S, waiter=f"request {request.rid}", resource="its answer", holder="the engine"):
                segments = await pending.result
            self.latencies.add(time.perf_counter() - pending.asked_at)
            return segments
        except asyncio.CancelledError:
            self.abort(request.rid)
            raise
        finally:
            self._requests.pop(request.rid, None)

    def serves(self, rid: str) -> bool:
        """Whether somebody waits for this request."""
        return rid in self._requests

    def abort(self, rid: str) -> bool:
        """End a request early: its `generate` returns what there is. False if there is no such request."""
        if rid not in self._requests:
            return False
        self._commands.put(lambda: self._post_one(self.engine.abort(rid)))
        return True

    def abort_all(self, prefix: str = "") -> int:
        """End all requests early whose ids begin so; returns how many there were."""
        return sum(self.abort(rid) for rid in list(self._requests) if rid.startswith(prefix))

    async def load_weights(
        self, tensors: Mapping[str, torch.Tensor], policy_version: int, *, mode: UpdateMode = "in_place"
    ) -> None:
        """Replace the weights between two steps. ValueError, with nothing changed, if they do not fit. `in_place`:
        running samples go on with their keys and values; `retract`: these are computed again; `drain`: running samples
        end first, and nobody joins them until then."""

        def load() -> None:
            with self._meter.measure("update_weights", policy_version):
                self.engine.load_weights(tensors, policy_version)
                self.num_weight_updates += 1
                if mode == "retract":
                    self.engine.retract()

        await self._between_steps(load, drained=mode == "drain")

    async def stop_draining(self) -> None:
        """Whatever waits until nothing runs is refused with `Conflict`, and has not happened; samples join again."""

        def stop() -> None:
            for _, done in self._when_drained:
                refusal = Conflict("given up while running answers were to end first: nothing has changed")
                self._loop.call_soon_threadsafe(_resolve, done, None, refusal)
            self._when_drained = []

        await self._between_steps(stop)

    async def forget_weights(self) -> None:
        """End every request with what it has; later ones are refused until the next weights, of whatever version."""

        def forget() -> None:
            self._post(self.engine.forget_weights())
            while self._scores:
                _, done = self._scores.popleft()
                self._loop.call_soon_threadsafe(_resolve, done, None, ValueError("the weights have been taken away"))

        await self._between_steps(forget)

    async def rename_weights(self, policy_version: int) -> None:
        """What is held is `policy_version`. ValueError if that is older than what it was called so far."""
        await self._between_steps(partial(self.engine.rename_weights, policy_version))

    async def first_rows(self, name: str, count: int) -> torch.Tensor:
        """A copy of the first rows of a parameter, as it is between two steps. KeyError if there is none."""
        parameter = self.engine.parameters()[name].detach()
        found: list[torch.Tensor] = []
        await self._between_steps(lambda: found.append((parameter[:count] if parameter.ndim else parameter).clone()))
        return found[0]

    async def drained(self, timeout_s: float) -> bool:
        """Whether every request of now has ended, at the latest after so long."""
        results = [pending.result for pending in self._requests.values()]
        if results:
            await asyncio.wait(results, timeout=timeout_s)
        return all(result.done() for result in results)

    async def score(self, prompt_ids: list[int]) -> Scored:
        """Log-probability of every token of a prompt but the first. ValueError for a bad prompt."""
        self.engine.check_prompt(prompt_ids)
        self._check_alive()
        done: asyncio.Future[None] = self._loop.create_future()
        self._actions.add(done)
        found, versions = list[float](), list[int]()

        def parts() -> Iterator[None]:
            for part in self.engine.scoring(prompt_ids):
                found.extend(part)
                versions.append(self.engine.policy_version)
                yield

        self._commands.put(lambda: self._scores.append((parts(), done)))
        try:
            with patient(PATIENCE_S, waiter="a prompt", resource="its score", holder="the engine"):
                await done
        finally:
            self._actions.discard(done)
        return Scored(found, (versions[0], versions[-1]) if versions else ())

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating between two steps; what comes later waits. `abort` ends all requests with what they have,
        `in_place` keeps their keys and values, `retract` has them computed again later."""
        self.num_pauses += 1

        def pause() -> None:
            if mode == "abort":
                self._post(self.engine.abort_all())
            elif mode == "retract":
                self.engine.retract()
            self.engine.paused = True

        await self._between_steps(pause)

    async def go_on(self) -> None:
        """End a pause."""

        def go_on() -> None:
            self.engine.paused = False

        await self._between_steps(go_on)

    async def release(self) -> None:
        """Free the generation memory. Running requests return what they have first, later ones nothing."""
        await self._between_steps(lambda: self._post(self.engine.release()))

    async def resume(self) -> None:
        """Take the generation memory back."""
        await self._between_steps(self.engine.resume)

    async def _between_steps(self, action: Command, *, drained: bool = False) -> None:
        """Let the engine's thread act, `drained` once nothing runs. A ValueError of `action` is raised here, any other
        error ends the engine."""
        self._check_alive()
        done: asyncio.Future[None] = self._loop.create_future()
        self._actions.add(done)
        act = partial(self._act, action, done)
        self._commands.put(partial(self._put_off, act, done) if drained else act)
        try:
            with patient(PATIENCE_S, waiter="server", resource="a moment between two steps", holder="the engine"):
                await done
        finally:
            self._actions.discard(done)

    def _put_off(self, act: Command, done: asyncio.Future[None]) -> None:
        self._when_drained.append((act, done))

    def _act(self, action: Command, done: asyncio.Future[None]) -> None:
        if done.done():
            return  # whoever asked for it gave up, and was told that nothing happened
        refusal = None
        try:
            action()
        except ValueError as error:
            refusal = error
        self._loop.call_soon_threadsafe(_resolve, done, None, refusal)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._execute_commands()
                if self.engine.has_work:
                    self._post(self._step())
                if self._scores:
                    self._score_a_part()
        except BaseException as error:  # the boundary of the thread: logged, and handed to everyone who waits
            logger.exception("the engine failed")
            self._loop.call_soon_threadsafe(self._fail, error)

    def _score_a_part(self) -> None:
        """Of the prompt that has waited longest, unless nobody waits for it any more."""
        parts, done = self._scores[0]
        try:
            if not done.done():
                next(parts)
                return
        except StopIteration:
            self._loop.call_soon_threadsafe(_resolve, done, None, None)
        self._scores.popleft()

    def _step(self) -> list[Finished]:
        engine, busy_s = self.engine, self._meter.busy_s
        with self._meter.measure("generate", engine.policy_version):
            finished = engine.step()
        if self._followed:
            self._tell_growth(finished)
        if engine.num_prefilled:
            self.num_prompt_tokens += engine.num_prefilled
            now = time.perf_counter()
            for rid in engine.begun:
                if (pending := self._requests.get(rid)) is not None:
                    self.first_tokens.add(now - pending.asked_at)
        self.costs.add(
            decoded=engine.num_decoded,
            context=engine.num_context,
            prefilled=engine.num_prefilled,
            seconds=self._meter.busy_s - busy_s,
        )
        return finished

    def _tell_growth(self, finished: list[Finished]) -> None:
        ended = {each.request.rid: each for each in finished}
        for rid, (request, told) in self._followed.items():
            parts: Sequence[Segment | Sample] = ended[rid].segments if rid in ended else self.engine.sequences(rid)
            grown = []
            for index, part in enumerate(parts):
                if len(part.token_ids) > told[index]:
                    new = slice(told[index], None)
                    tops = None if part.top_logprobs is None else part.top_logprobs[new]
                    spans = [VersionSpan(self.engine.policy_version, 0, len(part.token_ids) - told[index])]
                    grown.append(Increment(index, part.token_ids[new], part.logprobs[new], spans, tops))
                    told[index] = len(part.token_ids)
            if grown:
                self._loop.call_soon_threadsafe(self._deliver_growth, request, grown)

    def _deliver_growth(self, request: GenerateRequest, grown: list[Increment]) -> None:
        pending = self._requests.get(request.rid)
        if pending is not None and pending.request is request and pending.on_tokens is not None:
            pending.on_tokens(grown)

    def _execute_commands(self) -> None:
        """All that are there; waits for one if the engine has nothing to do."""
        if not self.engine.has_work and not self._scores:
            self._commands.get()()
        while not self._stopping:
            try:
                command = self._commands.get_nowait()
            except Empty:
                break
            command()
        # Whoever gave up waiting no longer holds anything back.
        self._when_drained = [(act, done) for act, done in self._when_drained if not done.done()]
        if self._when_drained and not self.engine.num_started:
            for act, _ in self._when_drained:
                act()
            self._when_drained = []
        self.engine.admitting = not self._when_drained

    def _request_stop(self) -> None:
        self._stopping = True

    def _post_one(self, finished: Finished | None) -> None:
        self._post([finished] if finished else [])

    def _post(self, finished: list[Finished]) -> None:
        for each in finished:
            self._followed.pop(each.request.rid, None)
            self.num_aborted += any(segment.finish_reason == "abort" for segment in each.segments)
        if finished:
            self._loop.call_soon_threadsafe(self._deliver, finished)

    def _deliver(self, finished: list[Finished]) -> None:
        for each in finished:
            pending = self._requests.get(each.request.rid)
            # A rid is free as soon as its owner gave up, so an old result may meet the rid's next request.
            if pending is not None and pending.request is each.request:
                _resolve(pending.result, each.segments, GenerationFailed(each.error) if each.error else None)

    def _fail(self, error: BaseException) -> None:
        self._end(error)
        self.failed.set()

    def _end(self, error: BaseException) -> None:
        """Fail whoever waits and whoever comes."""
        self.error = self.error or error
        for pending in self._requests.values():
            _resolve(pending.result, [], self._dead())
        for action in self._actions:
            _resolve(action, None, self._dead())

    def _check_alive(self) -> None:
        if self.error is not None:
            raise self._dead()

    def _dead(self) -> EngineDead:
        if isinstance(self.error, Stopped):
            return Stopped(str(self.error))
        dead = EngineDead(f"the engine is dead: {self.error}")
        dead.__cause__ = self.error
        return dead


def _resolve(future: asyncio.Future[T], result: T, error: Exception | None) -> None:
    """Settle a future unless its owner has given up."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
