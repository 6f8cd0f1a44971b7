"""Mark a worker's method for calls on the whole group: how its arguments are split, where it runs, how results return.

The decorator only marks; `group.py` does the calling, over a backend. An argument that nothing is declared for is open:
whoever calls may wrap it in an intent, else it is broadcast.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from penstock.groups.batch import Batch
from penstock.groups.collect import Collect, concat, each, first, masks_of, without_padding
from penstock.groups.errors import CallRefused, ResultRefused
from penstock.groups.intent import DECLARED, Broadcast, Intent, PerRank, Shard
from penstock.groups.mesh import Over
from penstock.groups.modes import PLANS, Custom, Execute, Mode

Method = TypeVar("Method", bound=Callable[..., Any])
Masks = Sequence[npt.NDArray[np.bool_]]


@dataclass(frozen=True, slots=True)
class Split:
    """The arguments of one call, by part."""

    arguments: Sequence[Mapping[str, Any]]
    padding: Masks | None
    """What of each part fills it up; None if nothing does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteMethod:
    """What `remote_method` declared."""

    name: str
    signature: inspect.Signature
    intents: Mapping[str, Intent]
    collect: Collect
    over: Over
    execute: Execute
    blocking: bool
    timeout: float | None
    custom_split: Callable[[Mapping[str, Any], int], Sequence[Mapping[str, Any]]] | None
    is_direct: bool
    """Called on one worker, not on the group."""

    def bind(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments that are given, by name."""
        try:
            bound = self.signature.bind(None, *arguments, **keywords)
        except TypeError as error:
            raise CallRefused(f"{self.name}: {error}") from None
        return dict(list(bound.arguments.items())[1:])

    def split(self, given: Mapping[str, Any], num_parts: int) -> Split:
        """Cut the arguments into parts. Raises `CallRefused`."""
        chosen = {name: self._intent_of(name, value) for name, value in given.items()}
        values = {name: value for name, (_, value) in chosen.items()}
        if self.custom_split is not None:
            return Split(self._split_by_custom(values, num_parts), None)
        intents = {name: intent for name, (intent, _) in chosen.items()}
        self._check_sharded(intents, values)
        parts = {name: self._split_argument(name, intent, values[name], num_parts) for name, intent in intents.items()}
        arguments = [{name: part[i] for name, part in parts.items()} for i in range(num_parts)]
        return Split(arguments, masks_of([(values[name], part) for name, part in parts.items()]))

    def join(self, results: list[Any], padding: Masks | None) -> Any:
        """One result of those of all parts, without what stems from padding. Raises `ResultRefused`."""
        try:
            if padding is not None:
                rows = self.collect is concat
                results = [without_padding(*each, is_rows=rows) for each in zip(results, padding, strict=True)]
            return self.collect(results)
        except ResultRefused as error:
            raise ResultRefused(f"{self.name}: {error}") from None

    def _intent_of(self, name: str, value: Any) -> tuple[Intent, Any]:
        declared = self.intents.get(name)
        if not isinstance(value, Intent):
            return declared or Broadcast(), value
        kind = type(value).__name__
        if declared is not None:
            raise CallRefused(
                f"{self.name}: {name} is declared as {type(declared).__name__}, expected a plain value, given {kind}"
            )
        if value.value is DECLARED:
            raise CallRefused(f"{self.name}: {name} is a {kind} of nothing, expected {kind}(value)")
        if self.execute is Execute.RANK_ZERO and not isinstance(value, Broadcast):
            raise CallRefused(f"{self.name} runs on rank zero alone, expected {name} plain, given {kind}")
        return value, value.value

    def _check_sharded(self, intents: Mapping[str, Intent], values: Mapping[str, Any]) -> None:
        """All sharded arguments are cut alike, so that their rows go together."""
        sharded = {name: intent for name, intent in intents.items() if isinstance(intent, Shard)}
        if len({intent.uneven for intent in sharded.values()}) > 1:
            given = {name: intent.uneven for name, intent in sharded.items()}
            raise CallRefused(f"{self.name}: arguments are sharded together, expected one `uneven`, given {given}")
        sizes = {name: len(values[name]) for name in sharded if isinstance(values[name], Batch)}
        if len(set(sizes.values())) > 1:
            raise CallRefused(
                f"{self.name}: arguments are sharded together, expected as many samples in each, given {sizes}"
            )

    def _split_argument(self, name: str, intent: Intent, value: Any, num_parts: int) -> Sequence[Any]:
        try:
            return intent.split(value, num_parts)
        except ValueError as error:
            raise CallRefused(f"{self.name}: {name} {error}") from None

    def _split_by_custom(self, values: Mapping[str, Any], num_parts: int) -> Sequence[Mapping[str, Any]]:
        assert self.custom_split is not None
        try:
            parts = self.custom_split(values, num_parts)
        except ValueError as error:
            raise CallRefused(f"{self.name}: {error}") from None
        if len(parts) != num_parts:
            raise CallRefused(f"{self.name}: its split made {len(parts)} parts, expected {num_parts}")
        return parts


def remote_method(
    mode: Mode | Custom | None = None,
    *,
    dispatch: Mapping[str, Intent] | None = None,
    collect: Collect | None = None,
    over: Over = "ranks",
    execute: Execute = Execute.ALL,
    blocking: bool = True,
    timeout: float | None = None,
) -> Callable[[Method], Method]:
    """Mark a method, by a mode or in detail.

    `dispatch`: intents by argument. `collect`: `each` if nothing is said. `over`: see `Over`. A call that is not
    `blocking` returns a `CallFuture`. `timeout`: seconds after which an unanswered call raises `CallTimedOut`.
    """
    if mode is not None and (dispatch is not None or collect is not None or over != "ranks"):
        raise TypeError(f"{mode} says how to dispatch and collect: nothing else may")

    def mark(method: Method) -> Method:
        signature = inspect.signature(method)
        arguments = list(signature.parameters)[1:]
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY) for p in signature.parameters.values()):
            raise TypeError(f"{method.__qualname__}: a remote method names all its arguments")
        plan = PLANS[mode] if isinstance(mode, Mode) else None
        if plan is not None and plan.first_intent is not None and not arguments:
            raise TypeError(f"{method.__qualname__} has no first argument, which {mode} needs")
        declared = RemoteMethod(
            name=method.__name__,
            signature=signature,
            intents=plan.intents(arguments) if plan is not None else dict(dispatch or {}),
            collect=_collect(mode, collect, execute),
            over=plan.over if plan is not None else mode.over if isinstance(mode, Custom) else over,
            execute=execute,
            blocking=blocking,
            timeout=timeout,
            custom_split=mode.split if isinstance(mode, Custom) else None,
            is_direct=mode is Mode.DIRECT_ROLLOUT_METHOD,
        )
        _check(declared, arguments, given=collect)
        method.__remote_method__ = declared  # type: ignore[attr-defined]
        return method

    return mark


def _collect(mode: Mode | Custom | None, collect: Collect | None, execute: Execute) -> Collect:
    if execute is Execute.RANK_ZERO:
        return first
    if mode is None:
        return collect or each
    return mode.collect if isinstance(mode, Custom) else PLANS[mode].collect


def _check(method: RemoteMethod, arguments: Sequence[str], *, given: Collect | None) -> None:
    """Raises TypeError for what can never work."""
    if unknown := method.intents.keys() - set(arguments):
        raise TypeError(f"{method.name} has no argument {min(unknown)!r} to dispatch")
    for name, intent in method.intents.items():
        if intent.value is not DECLARED:
            raise TypeError(f"{method.name}: {name} is declared with a value, which only a call has")
    if method.execute is Execute.ALL:
        return
    if given not in (None, first):
        raise TypeError(f"{method.name} runs on rank zero alone: there is one result, and nothing to collect")
    if cut := [name for name, intent in method.intents.items() if isinstance(intent, Shard | PerRank)]:
        raise TypeError(f"{method.name} runs on rank zero alone: {cut[0]} cannot be sharded or per rank")
    if method.over != "ranks" or method.custom_split is not None or method.is_direct:
        raise TypeError(f"{method.name} runs on rank zero alone: its mode needs all ranks")


def remote_methods(worker_cls: type) -> dict[str, RemoteMethod]:
    """The marked methods of a class by name."""
    members = inspect.getmembers(worker_cls, inspect.isfunction)
    return {name: f.__remote_method__ for name, f in members if hasattr(f, "__remote_method__")}
