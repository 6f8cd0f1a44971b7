"""Runs the slot engine in its own thread and lets asyncio code await its results.

Every access that changes the engine is a command. The engine's thread executes commands between two steps, and blocks
on the command queue when idle. The results of a step reach the event loop in one call.

Work for one request that raises fails that request (`GenerationFailed`). Work for the whole batch that raises ends the
engine: all pending and all later requests fail with that error.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from queue import Empty, SimpleQueue
from typing import Literal, TypeVar

import torch
from prometheus_client import Histogram

from penstock.deadline import warn_if_stalled
from penstock.model.compute import compute_seconds
from penstock.rollout.busy_meter import BusyMeter
from penstock.rollout.costs import StepCosts
from penstock.rollout.generator import (
    Conflict,
    EngineDead,
    GenerationFailed,
    Increment,
    OnTokens,
    Overloaded,
    PromptScores,
    ScoredToken,
    Stopped,
)
from penstock.rollout.request import GenerateRequest
from penstock.rollout.slot_engine import ALL_MEMORY, Finished, MemoryTag, SlotEngine
from penstock.rollout.slot_rows import SlotSequence
from penstock.samples import Segment, VersionSpan
from penstock.types import UpdateMode

PauseMode = Literal["abort", "in_place", "retract"]

logger = logging.getLogger(__name__)

STOP_TIMEOUT_S = 30.0
"""Time limit for a step to end. A thread that is stuck in the device for longer is abandoned."""

STALL_WARNING_S = 600.0
"""Wait for the engine before a stall is reported. It is long, because long answers and drains take time."""

MAX_OPEN_SAMPLES = 2**15
"""Maximum number of samples that run and wait."""
MIN_OPEN_TOKENS = 2**22
"""Least bound of the prompt tokens of all requests that run and wait; large engines have four times their context."""

DURATIONS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0)
"""Bounds of the buckets of the histograms of durations."""

T = TypeVar("T")
Command = Callable[[], object]
Done = asyncio.Future[None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A pending request."""

    request: GenerateRequest
    result: asyncio.Future[list[Segment]]
    on_tokens: OnTokens | None
    requested_at: float
    """Time of the request, in seconds of `time.perf_counter`."""


class EngineRunner:
    """Owns the engine's thread. All methods belong to the event loop that called `start`."""

    def __init__(self, engine: SlotEngine, *, process: str) -> None:
        self.engine = engine
        self.max_context = engine.max_context
        self.check_prompt = engine.check_prompt
        self.error: BaseException | None = None
        self.failed = asyncio.Event()
        """Set when the engine's thread ended with an error."""
        self.costs = StepCosts()
        self.latencies = _histogram("e2e_request_latency_seconds", "Seconds from a request to its whole answer.")
        self.first_tokens = _histogram("time_to_first_token_seconds", "Seconds from a request to its first token.")
        self.num_prompt_tokens = self.num_reused_tokens = self.num_weight_updates = self.num_aborted = 0
        """Counts so far: prompt tokens computed, prompt tokens reused, weights loaded, requests ended early."""
        self.num_pauses = 0
        """Number of pauses so far. It identifies the current pause."""
        self.meter = BusyMeter(process, partial(compute_seconds, engine.model.device))
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._requests: dict[str, Pending] = {}
        self._num_open_samples = self._num_open_tokens = 0
        """Samples and prompt tokens of all requests and scores that run and wait."""
        self._max_open_tokens = max(MIN_OPEN_TOKENS, 4 * engine.num_slots * engine.max_context)
        self._actions: set[Done] = set()
        self._followed: dict[str, tuple[Pending, list[int]]] = {}
        """Streamed requests, and the number of tokens reported per sample. Only the engine's thread uses it."""
        self._when_drained: list[tuple[Command, Done]] = []
        """Commands that wait until no sample runs; until then, none is admitted. Only the engine's thread uses it."""
        self._scores: deque[tuple[Iterator[None], Done]] = deque()
        """Prompts to score. After every step, a part of one prompt is scored. Only the engine's thread uses it."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop: asyncio.AbstractEventLoop

    @property
    def policy_version(self) -> int:
        """The policy_version of the served weights; NO_VERSION until weights have been loaded."""
        return self.engine.policy_version

    def start(self) -> None:
        """Start the engine's thread. Results go to the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End the thread after its current step. Pending calls and later calls fail with Stopped."""
        self._commands.put(partial(setattr, self, "_stopping", True))
        await asyncio.to_thread(self._thread.join, STOP_TIMEOUT_S)
        self._end(Stopped("the server is shutting down"))

    def check(self, request: GenerateRequest) -> None:
        """Raise ValueError if the request cannot be served, and Overloaded if it cannot be served now."""
        self.engine.check(request)
        self._check_room(len(request.seeds), len(request.prompt_ids))

    def _check_room(self, num_samples: int, num_tokens: int) -> None:
        samples, tokens = self._num_open_samples + num_samples, self._num_open_tokens + num_tokens
        if samples > MAX_OPEN_SAMPLES or tokens > self._max_open_tokens:
            raise Overloaded(
                f"this server has {self._num_open_samples} samples with {self._num_open_tokens} prompt tokens, and "
                f"takes at most {MAX_OPEN_SAMPLES} with {self._max_open_tokens}: ask again later"
            )

    @contextmanager
    def _counted(self, num_samples: int, num_tokens: int) -> Iterator[None]:
        """Count samples and prompt tokens as open during the body. Raises Overloaded if there are too many."""
        self._check_room(num_samples, num_tokens)
        self._num_open_samples += num_samples
        self._num_open_tokens += num_tokens
        try:
            yield
        finally:
            self._num_open_samples -= num_samples
            self._num_open_tokens -= num_tokens

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> list[Segment]:
        """Return one segment per seed. While the engine is released, the segments are empty and return at once.

        Raises ValueError for a bad request. Cancelling this call aborts the request. `on_tokens` receives every token
        before this call returns."""
        self._check_alive()
        self.engine.check(request)
        if request.rid in self._requests:
            raise ValueError(f"request {request.rid} is already being served")
        result: asyncio.Future[list[Segment]] = self._loop.create_future()
        pending = Pending(request=request, result=result, on_tokens=on_tokens, requested_at=time.perf_counter())
        self._requests[request.rid] = pending

        def submit() -> None:
            if on_tokens is not None:
                self._followed[request.rid] = (pending, [0] * len(request.seeds))
            self._post(self.engine.submit(request))

        try:
            waiter = f"request {request.rid}"
            with (
                self._counted(len(request.seeds), len(request.prompt_ids)),
                warn_if_stalled(STALL_WARNING_S, waiter=waiter, resource="its answer", holder="the engine"),
            ):
                self._commands.put(submit)
                segments = await result
            self.latencies.observe(time.perf_counter() - pending.requested_at)
            return segments
        except asyncio.CancelledError:
            self.abort(request.rid)
            raise
        finally:
            self._requests.pop(request.rid, None)

    def serves(self, rid: str) -> bool:
        """Return whether a request with this id is pending."""
        return rid in self._requests

    def abort(self, rid: str) -> bool:
        """End a request early: its `generate` returns the tokens so far. Return False if there is no such request."""
        if rid not in self._requests:
            return False
        self._commands.put(lambda: self._post(self.engine.abort([rid])))
        return True

    def abort_all(self, prefix: str = "") -> int:
        """End all requests early that have this id prefix. Return their number."""
        return sum(self.abort(rid) for rid in list(self._requests) if rid.startswith(prefix))

    async def load_weights(
        self, tensors: Mapping[str, torch.Tensor], policy_version: int, *, mode: UpdateMode = "in_place"
    ) -> float:
        """Replace the weights between two steps. Return the seconds that generation paused.

        `in_place`: running samples continue with their keys and values. `retract`: their keys and values are computed
        again. `drain`: running samples end first, and no sample starts until then. Raises ValueError, with nothing
        changed, if the weights do not fit the model."""

        pause_s = 0.0

        def load() -> None:
            nonlocal pause_s
            start = time.perf_counter()
            with self.meter.measure("update_weights", policy_version):
                self.engine.load_weights(tensors, policy_version)
                self.num_weight_updates += 1
                if mode == "retract":
                    self.engine.retract()
            pause_s = time.perf_counter() - start

        await self._between_steps(load, drained=mode == "drain")
        return pause_s

    async def stop_draining(self) -> None:
        """Refuse all waiting drain commands with `Conflict`. They change nothing, and samples are admitted again."""

        def stop() -> None:
            for _, done in self._when_drained:
                self._settle(done, Conflict("another call stopped the wait for running answers; nothing has changed"))
            self._when_drained = []

        await self._between_steps(stop)

    async def forget_weights(self) -> None:
        """End every request with its tokens so far. Until the next weights, of any version, later requests end at once.
        Pending scores fail with ValueError."""

        def forget() -> None:
            self._post(self.engine.forget_weights())
            self._end_scores("the weights were withdrawn before the prompt was scored")

        await self._between_steps(forget)

    def _end_scores(self, why: str) -> None:
        while self._scores:
            _, done = self._scores.popleft()
            self._settle(done, ValueError(why))

    async def rename_weights(self, policy_version: int) -> None:
        """Name the current weights `policy_version`. Raises ValueError if it is older than their present version."""
        await self._between_steps(partial(self.engine.rename_weights, policy_version))

    async def first_rows(self, name: str, count: int) -> torch.Tensor:
        """Copy the first rows of a parameter between two steps. Raises KeyError if the parameter does not exist."""
        parameter = self.engine.parameters()[name].detach()
        found: list[torch.Tensor] = []
        await self._between_steps(lambda: found.append((parameter[:count] if parameter.ndim else parameter).clone()))
        return found[0]

    async def drained(self, timeout_s: float) -> bool:
        """Wait until all current requests have ended, at most `timeout_s`. Return whether they have."""
        results = [pending.result for pending in self._requests.values()]
        if results:
            await asyncio.wait(results, timeout=timeout_s)
        return all(result.done() for result in results)

    async def score(self, prompt_ids: list[int], *, num_top: int = 0) -> PromptScores:
        """Return the log-probability of every prompt token except the first, and the `num_top` likeliest tokens at each
        place. Raises ValueError for a bad prompt."""
        self.check_prompt(prompt_ids)
        found, versions = list[ScoredToken](), list[int]()

        if "weights" in self.engine.released:
            raise Conflict("the weights are released, so no prompt can be scored: call /resume_memory_occupation first")

        def parts() -> Iterator[None]:
            for part in self.engine.scoring(prompt_ids, num_top=num_top):
                found.extend(part)
                versions.append(self.engine.policy_version)
                yield

        with self._counted(1, len(prompt_ids)):
            await self._execute(lambda done: self._scores.append((parts(), done)), "the score of a prompt")
        return PromptScores(found, (versions[0], versions[-1]) if versions else ())

    async def pause(self, mode: PauseMode) -> None:
        """Stop generating between two steps. Later requests wait.

        `abort` ends all requests with their tokens so far. `in_place` keeps their keys and values. `retract` computes
        their keys and values again later."""
        self.num_pauses += 1

        def pause() -> None:
            if mode == "abort":
                self._post(self.engine.abort_all())
            elif mode == "retract":
                self.engine.retract()
            self.engine.paused = True

        await self._between_steps(pause)

    async def continue_generation(self) -> None:
        """End a pause."""
        await self._between_steps(partial(setattr, self.engine, "paused", False))

    async def release(self, tags: Collection[MemoryTag] = ALL_MEMORY) -> None:
        """Free the memory of `tags`. Running requests first return their tokens so far; later requests return none.
        With the weights, pending scores fail with ValueError."""

        def release() -> None:
            self._post(self.engine.release(tags))
            if "weights" in tags:
                self._end_scores("the weights were released before the prompt was scored")

        await self._between_steps(release)

    async def resume(self, tags: Collection[MemoryTag] = ALL_MEMORY) -> None:
        """Allocate the memory of `tags` again, as far as it is released."""
        await self._between_steps(partial(self.engine.resume, tags))

    async def _between_steps(self, action: Command, *, drained: bool = False) -> None:
        """Run `action` in the engine's thread between two steps; with `drained`, once no sample runs. A ValueError of
        `action` is raised here. Any other error ends the engine."""

        def execute(done: Done) -> None:
            if drained:
                self._when_drained.append((action, done))
            else:
                self._act(action, done)

        await self._execute(execute, "a moment between two steps")

    async def _execute(self, command: Callable[[Done], None], resource: str) -> None:
        """Pass `command` to the engine's thread, and wait until the thread settles the future that the command gets."""
        self._check_alive()
        done: Done = self._loop.create_future()
        self._actions.add(done)
        self._commands.put(partial(command, done))
        try:
            with warn_if_stalled(STALL_WARNING_S, waiter="server", resource=resource, holder="the engine"):
                await done
        finally:
            self._actions.discard(done)

    def _act(self, action: Command, done: Done) -> None:
        if done.done():
            return  # the caller was cancelled, and reported that nothing changed
        try:
            action()
        except ValueError as error:
            self._settle(done, error)
        else:
            self._settle(done)

    def _settle(self, done: Done, error: Exception | None = None) -> None:
        """Resolve the future of a command from the engine's thread."""
        self._loop.call_soon_threadsafe(_resolve, done, None, error)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._execute_commands()
                if self.engine.has_work:
                    self._post(self._step())
                if self._scores:
                    self._score_a_part()
        except BaseException as error:  # the thread's boundary: logged, and raised in all waiting calls
            logger.exception("the engine failed")
            self._loop.call_soon_threadsafe(self._fail, error)

    def _score_a_part(self) -> None:
        """Score a part of the prompt that has waited longest. Drop the prompt if its call was cancelled."""
        parts, done = self._scores[0]
        try:
            if not done.done():
                next(parts)
                return
        except StopIteration:
            self._settle(done)
        except BaseException as error:  # of this prompt alone; a broken device shows at the next step
            logger.exception("a prompt could not be scored")
            self._settle(done, GenerationFailed(f"the prompt cannot be scored: {error!r}"))
        self._scores.popleft()

    def _step(self) -> list[Finished]:
        engine, busy_s = self.engine, self.meter.busy_s
        with self.meter.measure("generate", engine.policy_version):
            finished = engine.step()
        if self._followed:
            self._report_growth(finished)
        if engine.num_prefilled:
            self.num_prompt_tokens += engine.num_prefilled
            self.num_reused_tokens += engine.num_reused
            now = time.perf_counter()
            for rid in engine.begun:
                if (pending := self._requests.get(rid)) is not None:
                    self.first_tokens.observe(now - pending.requested_at)
        decoded, prefilled, seconds = engine.num_decoded, engine.num_prefilled, self.meter.busy_s - busy_s
        self.costs.add(decoded=decoded, context=engine.num_context, prefilled=prefilled, seconds=seconds)
        return finished

    def _report_growth(self, finished: list[Finished]) -> None:
        done = {each.request.rid: each for each in finished}
        for rid, (pending, reported) in self._followed.items():
            parts: Sequence[Segment | SlotSequence] = done[rid].segments if rid in done else self.engine.sequences(rid)
            grown = []
            for index, part in enumerate(parts):
                num_tokens, new = len(part.token_ids), slice(reported[index], None)
                if num_tokens > reported[index]:
                    tops = None if part.top_logprobs is None else part.top_logprobs[new]
                    spans = [VersionSpan(self.engine.policy_version, 0, num_tokens - reported[index])]
                    grown.append(Increment(index, part.token_ids[new], part.logprobs[new], spans, tops))
                    reported[index] = num_tokens
            if grown:
                self._loop.call_soon_threadsafe(self._deliver_growth, pending, grown)

    def _deliver_growth(self, pending: Pending, grown: list[Increment]) -> None:
        if self._requests.get(pending.request.rid) is pending and pending.on_tokens is not None:
            pending.on_tokens(grown)

    def _execute_commands(self) -> None:
        """Execute all queued commands. Wait for one if the engine has no work."""
        if not self.engine.has_work and not self._scores:
            self._commands.get()()
        while not self._stopping:
            try:
                command = self._commands.get_nowait()
            except Empty:
                break
            command()
        # A drain command that its caller gave up no longer blocks admission.
        self._when_drained = [(action, done) for action, done in self._when_drained if not done.done()]
        if self._when_drained and not self.engine.num_started:
            for action, done in self._when_drained:
                self._act(action, done)
            self._when_drained = []
        self.engine.admitting = not self._when_drained

    def _post(self, finished: list[Finished]) -> None:
        for each in finished:
            self._followed.pop(each.request.rid, None)
            self.num_aborted += any(segment.finish_reason == "abort" for segment in each.segments)
        if finished:
            self._loop.call_soon_threadsafe(self._deliver, finished)

    def _deliver(self, finished: list[Finished]) -> None:
        for each in finished:
            pending = self._requests.get(each.request.rid)
            # A request id is free once its caller gave up, so an old result may meet a new request with this id.
            if pending is not None and pending.request is each.request:
                _resolve(pending.result, each.segments, GenerationFailed(each.error) if each.error else None)

    def _fail(self, error: BaseException) -> None:
        self._end(error)
        self.failed.set()

    def _end(self, error: BaseException) -> None:
        """Fail all pending calls and all later calls."""
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
        dead = EngineDead(f"the engine has failed: {self.error}")
        dead.__cause__ = self.error
        return dead


def _histogram(name: str, text: str) -> Histogram:
    return Histogram(f"penstock_{name}", text, buckets=DURATIONS_S, registry=None)


def _resolve(future: asyncio.Future[T], result: T, error: Exception | None) -> None:
    """Set the result or error of a future, unless it is already done."""
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
