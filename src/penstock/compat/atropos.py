"""The trajectory API that unmodified Atropos environments (atroposlib 0.4.0) are written against, as a run answers it.

An environment registers, asks ten times a second how things are, plays items of its own through whatever inference it
is configured with, and pushes scored groups. The run that answers here is the trainer: nobody else registers as one.
A push is answered when a lease has taken the group, so that an environment with as many workers as it may have busy
waits instead of playing what would be too old; until then the group stands in line, also if its sender has gone, and a
sender that tries again finds it there. Steps are policy_versions: they may jump, and never go back.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import sys
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from penstock.compat.scored_data import Limits, Traced, parse, read_group
from penstock.envs.scored import Exchange, Offer, TurnedAway
from penstock.rollout.http import Refused, Route, answer, read_bytes, status_of, unless_gone

T = TypeVar("T")

MAX_BODY_BYTES = 256 * 2**20
"""Of pushed groups, unpacked."""
MAX_OFFERS = 256
"""Groups that may stand in line; whoever brings another is asked to try again."""
HOLD_S = 240.0
"""Until a push is answered, taken or not: its client gives up after 300."""
REMEMBERED_PUSHES = 1024
SILENT_S = 5.0
"""An environment says something ten times a second; one that says nothing for so long may have been started anew."""
LEAST_WEIGHT = 0.01
OVER = 2**31
"""The step that ends every environment."""


class Tracer(Protocol):
    """Where pushed tokens came from."""

    def trace(self, data: Any, *, oldest_version: int) -> Traced: ...


class Registration(Struct):
    """An environment introduces itself."""

    group_size: int
    max_token_length: int = -1
    desired_name: str | None = None
    weight: float = 1.0
    min_batch_allocation: float | None = None


class WhichEnvironment(Struct):
    """Who asks."""

    env_id: int = -1


class Environment(Struct, kw_only=True):
    """One that has registered; it keeps number and name when it is started anew."""

    name: str
    desired_name: str
    weight: float = 1.0
    max_token_length: int = 0
    min_batch_allocation: float | None = None
    heard_at: float = -math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """What environments are told of the run."""

    run_id: str
    directory: Path
    num_steps: int
    groups_per_step: int
    checkpoint_every: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """Which weights are served."""

    newest: Callable[[], int]
    oldest_possible: Callable[[], int]
    """That an answer nobody remembers may come from."""


class Atropos:
    """The endpoints."""

    def __init__(
        self, exchange: Exchange, tracer: Tracer, versions: Versions, *, facts: RunFacts, limits: Limits
    ) -> None:
        self._exchange, self._tracer, self._versions = exchange, tracer, versions
        self._facts, self._limits = facts, limits
        self._known = Known(facts.directory / "atropos_environments.json")
        self._pushes: OrderedDict[bytes, Offer] = OrderedDict()
        """Groups whose senders have not heard what became of them."""
        self._latest: Any = None
        self.over = False
        """Nothing more is needed: environments are told to end."""

    def routes(self) -> list[Route]:
        route = partial(Route, access="generation", refuse=_refuse)
        get = {
            "/": self._hello,
            "/wandb_info": self._wandb_info,
            "/info": self._info,
            "/status": self._status,
            "/status-env": self._status_env,
            "/latest_example": self._latest_example,
        }
        post = {
            "/register-env": self._register,
            "/disconnect-env": self._disconnect,
            "/scored_data": self._scored_data,
            "/scored_data_list": self._scored_data_list,
        }
        trainers = {"/register": ["POST"], "/batch": ["GET"], "/reset_data": ["GET"]}
        return [
            *(route(path, ["GET"], endpoint) for path, endpoint in get.items()),
            *(route(path, ["POST"], endpoint) for path, endpoint in post.items()),
            *(route(path, methods, self._no_other_trainer) for path, methods in trainers.items()),
        ]

    @property
    def is_visited(self) -> bool:
        """Environments are there."""
        return bool(self._known.living(_now()))

    def holder(self) -> str:
        """Who should bring the next group, for whoever waits for one."""
        living = self._known.living(_now())
        if living:
            return ", ".join(f"the environment {each.name}" for each in living)
        return "nobody: no Atropos environment is connected (python YOUR_ENV.py serve --env.rollout_server_url URL)"

    async def _hello(self, request: Request) -> Response:
        return answer({"message": "AtroposLib API"})

    async def _no_other_trainer(self, request: Request) -> Response:
        raise Refused(409, f"run {self._facts.run_id} trains what environments push here: no trainer can register")

    async def _wandb_info(self, request: Request) -> Response:
        return answer({"group": self._facts.run_id, "project": "penstock"})

    async def _info(self, request: Request) -> Response:
        return answer({"batch_size": self._batch_size, "max_token_len": self._limits.max_context})

    async def _status(self, request: Request) -> Response:
        return answer({"current_step": self._step, "queue_size": self._exchange.num_offers})

    async def _latest_example(self, request: Request) -> Response:
        empty: dict[str, list[Any]] = {
            name: [] for name in ("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "images")
        }
        return answer(self._latest or empty)

    async def _register(self, request: Request) -> Response:
        """A number and a name, once the run trains."""
        asked = _convert(parse(await read_bytes(request)), Registration)
        if asked.group_size != self._limits.group_size:
            why = (
                f"its group_size is {asked.group_size}, and env.group_size of the run is {self._limits.group_size}: "
                f"start it with --env.group_size {self._limits.group_size}"
            )
            _log(f"environment {asked.desired_name or 'unnamed'}: {why}")
            return answer({"status": why})
        if not self._exchange.has_begun:
            return answer({"status": "wait for trainer to start"})
        number, environment = self._known.register(asked, now=_now())
        every = self._facts.checkpoint_every
        return answer(
            {
                "status": "success",
                "env_id": number,
                "wandb_name": environment.name,
                "checkpoint_dir": str(self._facts.directory),
                "starting_step": self._step // every * every,  # of which it may have a checkpoint of its own
                "checkpoint_interval": every,
                "num_steps": self._facts.num_steps,
            }
        )

    async def _disconnect(self, request: Request) -> Response:
        environment = self._known.get(await _env_id(request))
        if environment is None:
            return answer({"status": "failure", "error": "there is no such environment"})
        environment.heard_at = -math.inf
        return answer({"status": "success"})

    async def _status_env(self, request: Request) -> Response:
        """What it paces itself by."""
        number = await _env_id(request)
        environment = self._known.hear(number, now=_now())
        living = self._known.living(_now())
        context = sum(max(each.max_token_length, 1) * each.weight for each in living)
        own = max(environment.max_token_length, 1) * environment.weight
        taken = sum(each.min_batch_allocation or 0.0 for each in living)
        return answer(
            {
                "current_step": OVER if self.over else self._step,
                "queue_size": self._exchange.num_offers,
                "unallocated_fraction": max(1.0 - taken, 0.0),
                "self_queue_size": self._exchange.num_offers_of(environment.name),
                "max_group_size": self._limits.group_size,
                "env_weight": max(LEAST_WEIGHT, own / context if context > 0 else 1.0),
            }
        )

    async def _scored_data(self, request: Request) -> Response:
        """Answered when the group is taken, or turned away."""
        body = _unpacked(request, await read_bytes(request, max_bytes=MAX_BODY_BYTES))
        await unless_gone(request, self._push(parse(body), body))
        return answer({"status": "received"})

    async def _scored_data_list(self, request: Request) -> Response:
        """The groups of a list have nothing to do with each other: what is wrong with one is told beside the rest."""
        documents = parse(_unpacked(request, await read_bytes(request, max_bytes=MAX_BODY_BYTES)))
        if not isinstance(documents, list) or not documents:
            raise Refused(422, "the body is not a list of groups")
        outcomes = await unless_gone(request, self._push_all(documents))
        failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        if len(failures) == len(outcomes):
            raise failures[0]
        processed = len(outcomes) - len(failures)
        return answer(
            {"status": "received", "groups_processed": processed, "refused": [str(failure) for failure in failures]}
        )

    async def _push_all(self, documents: list[Any]) -> list[BaseException | None]:
        pushing = (self._push(document, json.dumps(document).encode()) for document in documents)
        return await asyncio.gather(*pushing, return_exceptions=True)

    async def _push(self, document: object, spelt: bytes) -> None:
        """Raises `Refused` for a group that cannot be trained, or that waits for too long. `spelt`: what the same group
        looks like when its sender tries again."""
        key = hashlib.blake2b(spelt, digest_size=16).digest()
        offer = self._pushes.pop(key, None) or self._offer(document)
        try:
            await asyncio.wait([offer.taken], timeout=HOLD_S)
        except asyncio.CancelledError:  # its sender left, and may try again
            self._keep(key, offer)
            raise
        if not offer.taken.done():
            self._keep(key, offer)
            raise Refused(503, f"no lease has taken this group within {HOLD_S:g} s; it stands in line")
        try:
            offer.taken.result()
        except TurnedAway as why:  # for the log of whoever sent it: nothing was wrong with it
            _log(f"a group of {offer.source} was turned away: {why}")

    def _keep(self, key: bytes, offer: Offer) -> None:
        self._pushes[key] = offer
        if len(self._pushes) > REMEMBERED_PUSHES:
            self._pushes.popitem(last=False)

    def _offer(self, document: object) -> Offer:
        if self._exchange.num_offers >= MAX_OFFERS:
            raise Refused(503, f"{MAX_OFFERS} groups stand in line already: the trainer is slower than environments")
        source = self._known.name_of(document.get("env_id") if isinstance(document, dict) else None)
        try:
            data = read_group(document, self._limits)
            traced = self._tracer.trace(data, oldest_version=self._versions.oldest_possible())
        except ValueError as error:
            why = f"{source} pushed a group that cannot be trained: {error}"
            _log(why)
            self._exchange.refuse(why)
            raise Refused(422, why) from None
        if traced.num_unknown:
            self._exchange.counts["inexact"] += 1
            _log(
                f"{source} pushed a group with {traced.num_unknown} answers that the policy did not give here lately: "
                "ask for them at this very address (base_url URL/v1), and push their tokens as they came"
            )
        self._exchange.counts["retokenised"] += traced.num_left_out > 0
        offer = Offer(episodes=traced.episodes, source=source)
        self._latest = document
        self._exchange.offer(offer)
        return offer

    @property
    def _batch_size(self) -> int:
        """In sequences."""
        return self._facts.groups_per_step * self._limits.group_size

    @property
    def _step(self) -> int:
        return max(self._versions.newest(), 0)


class Known:
    """Environments by number, also over restarts of whoever answers them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._all: list[Environment] = []
        if file.is_file():
            self._all = msgspec.json.decode(file.read_bytes(), type=list[Environment])

    def get(self, number: int) -> Environment | None:
        return self._all[number] if 0 <= number < len(self._all) else None

    def register(self, asked: Registration, *, now: float) -> tuple[int, Environment]:
        """The number of one that has the same name and is silent, or a new one."""
        desired = asked.desired_name or "env"
        alike = [each for each in self._all if each.desired_name == desired]
        environment = next((each for each in alike if now - each.heard_at > SILENT_S), None)
        if environment is None:
            environment = Environment(name=f"{desired}_{len(alike)}", desired_name=desired)
            self._all.append(environment)
        environment.weight, environment.max_token_length = asked.weight, asked.max_token_length
        environment.min_batch_allocation, environment.heard_at = asked.min_batch_allocation, now
        self._file.write_bytes(msgspec.json.encode([msgspec.structs.replace(each, heard_at=0.0) for each in self._all]))
        return next(number for number, each in enumerate(self._all) if each is environment), environment

    def hear(self, number: int, *, now: float) -> Environment:
        """It lives; one that was never heard of comes from before a restart."""
        environment = self.get(number) or Environment(name=f"environment {number}", desired_name="")
        environment.heard_at = now
        return environment

    def living(self, now: float) -> Sequence[Environment]:
        return [each for each in self._all if now - each.heard_at <= SILENT_S]

    def name_of(self, number: object) -> str:
        environment = self.get(number) if isinstance(number, int) else None
        return environment.name if environment else "an environment that did not register"


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _env_id(request: Request) -> int:
    """From the body, also of a GET, or from the query."""
    if "env_id" in request.query_params:
        return _convert({"env_id": int(request.query_params["env_id"])}, WhichEnvironment).env_id
    body = await read_bytes(request)
    return _convert(parse(body), WhichEnvironment).env_id if body else -1


def _unpacked(request: Request, body: bytes) -> bytes:
    if request.headers.get("content-encoding", "").lower() != "gzip":
        return body
    try:
        unpacked = zlib.decompressobj(wbits=16 + zlib.MAX_WBITS).decompress(body, MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise Refused(400, f"the body is not gzip: {error}") from None
    if len(unpacked) > MAX_BODY_BYTES:
        raise Refused(413, f"the unpacked body exceeds {MAX_BODY_BYTES} bytes")
    return unpacked


def _convert(document: object, kind: type[T]) -> T:
    try:
        return msgspec.convert(document, kind)
    except msgspec.ValidationError as error:
        raise Refused(422, str(error)) from None


def _log(message: str) -> None:
    print(f"atropos: {message}", file=sys.stderr, flush=True)


def _refuse(error: Exception) -> Response:
    return answer({"status": "error", "message": str(error)}, status_of(error))
