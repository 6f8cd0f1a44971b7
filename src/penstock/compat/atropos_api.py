"""Trajectory API for unmodified Atropos environments (atroposlib 0.4.0).

An environment registers, polls the status ten times a second, plays its own items through its configured inference
endpoint, and pushes scored groups. The run itself is the trainer: no other trainer can register.

The run answers a push when a lease has taken the group. So an environment with all its workers busy waits, and does not
play groups that would be too stale. Until then the group stays in the queue, even if its sender has left; a sender that
repeats the push finds the same group there. Steps are policy_versions: they may skip numbers, but never go back.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import sys
import zlib
from collections import OrderedDict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from penstock.compat.pushed_groups import Provenance, parse
from penstock.config import Config
from penstock.envs.pushed_group_exchange import Exchange, Offer
from penstock.observe.visible_text import visible
from penstock.rollout.http import Refused, Route, answer, read_bytes, status_of, unless_disconnected
from penstock.rollout.recording_proxy import ServedVersions

T = TypeVar("T")

MAX_BODY_BYTES = 256 * 2**20
"""Maximum number of bytes of a push, after decompression."""
CHECKED = ("tokens", "masks", "scores")
"""Fields of a group with checked values."""
MAX_OFFERS = 256
"""Maximum number of groups in the queue. Further pushes are refused with 503, so that their senders retry."""
HOLD_S = 240.0
"""Seconds after which a push is answered even if no lease has taken the group. Clients give up after 300 s."""
UNTRAINABLE = 422
"""HTTP status for a group that cannot be trained."""
REMEMBERED_PUSHES = 1024
"""Maximum number of groups kept for a repeated push."""
SILENT_S = 5.0
"""Seconds without a request after which an environment counts as gone. Environments poll ten times a second; a silent
one may have been restarted."""
LEAST_WEIGHT = 0.01
"""Lower bound of the weight reported to an environment."""
OVER = 2**31
"""The step number that makes every environment end."""

Size = Annotated[int, Meta(ge=-1, le=2**31)]
Amount = Annotated[float, Meta(ge=0.0, le=2**31)]
"""A finite number. Sums and products of many such numbers stay finite."""
Name = Annotated[str, Meta(max_length=200)]


class Registration(Struct):
    """The request with which an environment registers."""

    group_size: Size
    max_token_length: Size = -1
    desired_name: Name | None = None
    weight: Amount = 1.0
    min_batch_allocation: Amount | None = None

    def __post_init__(self) -> None:
        """Raise ValueError if the name cannot be encoded."""
        (self.desired_name or "").encode()


class EnvironmentNumber(Struct):
    """A request that carries only the environment's number."""

    env_id: int = -1


class Environment(Struct, kw_only=True):
    """A registered environment. It keeps its number and name when it restarts."""

    name: str
    desired_name: str
    weight: float = 1.0
    max_token_length: int = 0
    min_batch_allocation: float | None = None


class Atropos:
    """The endpoints of the trajectory API."""

    def __init__(
        self,
        exchange: Exchange,
        provenance: Provenance,
        served: ServedVersions,
        config: Config,
        run_id: str,
        directory: Path,
    ) -> None:
        """`served`: the policy_versions of the answers so far. `directory`: the run's directory."""
        self._exchange, self._provenance, self._served = exchange, provenance, served
        self._config, self._run_id, self._directory = config, run_id, directory
        self._group_size = config.env.group_size
        self._registry = Registry(directory / "atropos_environments.json")
        self._pushes: OrderedDict[bytes, Offer] = OrderedDict()
        """Groups that senders may push again, because they left or were answered 503. Keyed by a hash of the body."""
        self._latest: Any = None
        """The last accepted group, as pushed."""
        self.is_over = False
        """Whether the run needs no more groups, so that environments are told to end."""

    def routes(self) -> list[Route]:
        table = [
            ("GET", "/", self._hello),
            ("GET", "/wandb_info", self._wandb_info),
            ("GET", "/info", self._info),
            ("GET", "/status", self._status),
            ("GET", "/status-env", self._status_env),
            ("GET", "/latest_example", self._latest_example),
            ("POST", "/register-env", self._register),
            ("POST", "/disconnect-env", self._disconnect),
            ("POST", "/scored_data", self._scored_data),
            ("POST", "/scored_data_list", self._scored_data_list),
            ("POST", "/register", self._refuse_trainer),
            ("GET", "/batch", self._refuse_trainer),
            ("GET", "/reset_data", self._refuse_trainer),
        ]
        return [Route(path, [method], endpoint, "generation", refuse=_refuse) for method, path, endpoint in table]

    @property
    def is_visited(self) -> bool:
        """Whether any environment is connected."""
        return bool(self._registry.connected())

    def holder(self) -> str:
        """Return the connected environments in words, for the report of a lease that waits for a group."""
        names = [f"the environment {each.name}" for each in self._registry.connected()]
        no_environment = "no Atropos environment: start one (python YOUR_ENV.py serve --env.rollout_server_url URL)"
        return ", ".join(names) or no_environment

    async def _hello(self, request: Request) -> Response:
        return answer({"message": "AtroposLib API"})

    async def _refuse_trainer(self, request: Request) -> Response:
        raise Refused(409, f"run {self._run_id} trains the groups pushed here: no other trainer can register")

    async def _wandb_info(self, request: Request) -> Response:
        return answer({"group": self._run_id, "project": "penstock"})

    async def _info(self, request: Request) -> Response:
        batch_size = self._config.trainer.groups_per_step * self._group_size
        return answer({"batch_size": batch_size, "max_token_len": self._config.model.max_context})

    async def _status(self, request: Request) -> Response:
        return answer({"current_step": self._step, "queue_size": self._exchange.num_offers})

    async def _latest_example(self, request: Request) -> Response:
        return _example(self._latest)

    async def _register(self, request: Request) -> Response:
        """Register an environment and return its number and name, once the run trains."""
        registration = _convert(parse(await read_bytes(request)), Registration)
        if registration.group_size != self._group_size:
            reason = (
                f"its group_size is {registration.group_size}, and env.group_size of the run is "
                f"{self._group_size}: start it with --env.group_size {self._group_size}"
            )
            _log(f"environment {registration.desired_name or 'unnamed'}: {reason}")
            return answer({"status": reason})
        if not self._exchange.has_begun:
            return answer({"status": "wait for trainer to start"})
        number, environment = self._registry.register(registration)
        every = self._config.trainer.checkpoint_every
        return answer(
            {
                "status": "success",
                "env_id": number,
                "wandb_name": environment.name,
                "checkpoint_dir": str(self._directory),
                "starting_step": self._step // every * every,  # it may have its own checkpoint of this step
                "checkpoint_interval": every,
                "num_steps": self._config.trainer.steps,
            }
        )

    async def _disconnect(self, request: Request) -> Response:
        if self._registry.disconnect(await _env_id(request)):
            return answer({"status": "success"})
        return answer({"status": "failure", "error": "there is no such environment"})

    async def _status_env(self, request: Request) -> Response:
        """Return the step, queue sizes and weight by which an environment paces itself."""
        environment = self._registry.poll(await _env_id(request))
        connected = self._registry.connected()
        context = sum(max(each.max_token_length, 1) * each.weight for each in connected)
        own = max(environment.max_token_length, 1) * environment.weight
        taken = sum(each.min_batch_allocation or 0.0 for each in connected)
        return answer(
            {
                "current_step": OVER if self.is_over else self._step,
                "queue_size": self._exchange.num_offers,
                "unallocated_fraction": max(1.0 - taken, 0.0),
                "self_queue_size": self._exchange.num_offers_of(environment.name),
                "max_group_size": self._group_size,
                "env_weight": max(LEAST_WEIGHT, own / context if context > 0 else 1.0),
            }
        )

    async def _scored_data(self, request: Request) -> Response:
        """Push a group. The answer comes when a lease has taken the group or the run has rejected it as too stale."""
        body = await _read_group_body(request)
        for refusal in await unless_disconnected(request.receive, self._push_all([(parse(body), body)])):
            raise refusal
        return answer({"status": "received"})

    async def _scored_data_list(self, request: Request) -> Response:
        """Push several independent groups. The reply lists the errors of refused groups; it is an error only if all
        groups fail."""
        documents = parse(await _read_group_body(request))
        if not isinstance(documents, list) or not documents:
            raise Refused(422, "the body is not a list of groups")
        if len(documents) > MAX_OFFERS:
            raise Refused(413, f"the list has {len(documents)} groups: push at most {MAX_OFFERS} at once")
        pushes = [(document, json.dumps(document).encode()) for document in documents]
        refused = await unless_disconnected(request.receive, self._push_all(pushes))
        if len(refused) == len(documents):
            raise refused[0]
        num_taken = len(documents) - len(refused)
        return answer({"status": "received", "groups_processed": num_taken, "refused": list(map(str, refused))})

    async def _push_all(self, pushes: list[tuple[Any, bytes]]) -> list[BaseException]:
        """Push independent groups, and return the errors of refused ones. One log line reports groups that cannot be
        trained."""
        outcomes = await asyncio.gather(*(self._push(*each) for each in pushes), return_exceptions=True)
        refused = [outcome for outcome in outcomes if outcome is not None]
        untrainable = [error for error in refused if isinstance(error, Refused) and error.status == UNTRAINABLE]
        if untrainable:
            others = f" (and {len(untrainable) - 1} more)" if len(untrainable) > 1 else ""
            _log(f"{untrainable[0]}{others}")
        return refused

    async def _push(self, document: object, body: bytes) -> None:
        """Offer a group and wait until a lease has taken it. Raises `Refused` for a group that cannot be trained, or
        that no lease takes in time. `body`: the group's bytes, which identify it when its sender repeats the push."""
        key = hashlib.blake2b(body, digest_size=16).digest()
        offer = self._pushes.pop(key, None) or self._offer(document)
        try:
            await asyncio.wait([offer.outcome], timeout=HOLD_S)
        except asyncio.CancelledError:  # the sender left, and may push the group again
            self._keep(key, offer)
            raise
        if not offer.outcome.done():
            self._keep(key, offer)
            message = f"no lease took this group within {HOLD_S:g} s, and it stays in the queue: push it again"
            raise Refused(503, message)
        if rejection := offer.outcome.result():  # stale, not invalid: the sender gets no error
            _log(f"rejected a group of {offer.source}: {rejection}")

    def _keep(self, key: bytes, offer: Offer) -> None:
        self._pushes[key] = offer
        if len(self._pushes) > REMEMBERED_PUSHES:
            self._pushes.popitem(last=False)

    def _offer(self, document: object) -> Offer:
        if self._exchange.num_offers >= MAX_OFFERS:
            raise Refused(503, f"the queue is full with {MAX_OFFERS} groups: the trainer is slower than environments")
        source = self._registry.name_of(document.get("env_id") if isinstance(document, dict) else None)
        try:
            oldest = self._served.oldest_since(_now() - self._config.env.episode_timeout_s)
            match = self._provenance.match(document, oldest_version=oldest)
        except ValueError as error:
            reason = f"{source} pushed a group that cannot be trained: {error}"
            self._exchange.refuse(reason, is_only=self._registry.is_only(source))
            raise Refused(UNTRAINABLE, reason) from None
        if match.num_unknown:
            self._exchange.counts["inexact"] += 1
            _log(
                f"{source} pushed a group with {match.num_unknown} answers that the policy did not recently give here: "
                "request answers at this address (base_url URL/v1), and push their tokens unchanged"
            )
        self._exchange.counts["retokenised"] += match.num_left_out > 0
        offer = Offer(episodes=match.episodes, source=source)
        self._latest = document
        self._registry.heard_from(source)
        self._exchange.offer(offer)
        return offer

    @property
    def _step(self) -> int:
        return max(self._served.newest, 0)


def _example(document: dict[str, Any] | None) -> Response:
    """Return a pushed group. If it cannot be sent (half a surrogate pair cannot), its unchecked fields are empty."""
    names = ("tokens", "masks", "scores", "advantages", "ref_logprobs", "messages", "images")
    example = {name: [] for name in names} | (document or {})
    try:
        return answer(example)
    except (ValueError, TypeError, RecursionError):
        return answer({name: example[name] if name in CHECKED else [] for name in names})


class Registry:
    """All registered environments by number. A file keeps them over restarts of the run."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._environments: list[Environment] = []
        if file.is_file():
            self._environments = msgspec.json.decode(file.read_bytes(), type=list[Environment])
        self._polled_at: dict[str, float] = {}
        """Time of the last request of each connected environment, by name."""

    def register(self, registration: Registration) -> tuple[int, Environment]:
        """Return number and record of an environment: those of a silent one with the same desired name, else new
        ones."""
        desired = registration.desired_name or "env"
        alike = [each for each in self._environments if each.desired_name == desired]
        connected = self.connected()
        silent = next((each for each in alike if each not in connected), None)
        environment = Environment(
            name=silent.name if silent else f"{desired}_{len(alike)}",
            desired_name=desired,
            weight=registration.weight,
            max_token_length=registration.max_token_length,
            min_batch_allocation=registration.min_batch_allocation,
        )
        number = self._environments.index(silent) if silent else len(self._environments)
        environments = [*self._environments[:number], environment, *self._environments[number + 1 :]]
        self._file.write_bytes(msgspec.json.encode(environments))  # first: what cannot be encoded is not kept
        self._environments = environments
        self._polled_at[environment.name] = _now()
        return number, environment

    def poll(self, number: int) -> Environment:
        """Record that an environment is connected, and return it. An unknown number gets a placeholder: the environment
        may have registered before a restart of the run."""
        environment = self._get(number)
        if environment is None:
            return Environment(name=f"environment {number}", desired_name="")
        self._polled_at[environment.name] = _now()
        return environment

    def disconnect(self, number: int) -> bool:
        """Return whether there is an environment of this number, which no longer counts as connected."""
        environment = self._get(number)
        if environment is not None:
            self._polled_at.pop(environment.name, None)
        return environment is not None

    def connected(self) -> list[Environment]:
        since = _now() - SILENT_S
        return [each for each in self._environments if self._polled_at.get(each.name, -math.inf) >= since]

    def is_only(self, name: str) -> bool:
        """Return whether `name` has registered, and no other environment is connected."""
        is_registered = any(each.name == name for each in self._environments)
        return is_registered and all(each.name == name for each in self.connected())

    def heard_from(self, name: str) -> None:
        """Record that an environment has pushed a group that can be trained."""
        self._polled_at[name] = _now()

    def name_of(self, number: object) -> str:
        environment = self._get(number) if isinstance(number, int) else None
        return environment.name if environment else "an environment that did not register"

    def _get(self, number: int) -> Environment | None:
        return self._environments[number] if 0 <= number < len(self._environments) else None


def _now() -> float:
    return asyncio.get_running_loop().time()


async def _env_id(request: Request) -> int:
    """Return the environment's number from the query or from the body, which a GET may also have; -1 if there is
    none."""
    if "env_id" in request.query_params:
        return int(request.query_params["env_id"])
    body = await read_bytes(request)
    return _convert(parse(body), EnvironmentNumber).env_id if body else -1


async def _read_group_body(request: Request) -> bytes:
    """Return the body of a push, decompressed."""
    body = await read_bytes(request, max_bytes=MAX_BODY_BYTES)
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
    print(visible(f"atropos: {message}"), file=sys.stderr, flush=True)


def _refuse(error: Exception) -> Response:
    return answer({"status": "error", "message": str(error)}, status_of(error))
