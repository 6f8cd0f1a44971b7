"""The decorator `remote_method`, which marks a worker's method for calls on the whole group.

The mark says how arguments are split, where the method runs, and how results are collected. `group.py` makes the calls,
over a backend. An argument without a declaration is open: a caller may wrap it in an intent, else it is broadcast.
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
from penstock.groups.modes import Custom, Execute, Mode, Plan, SplitArguments

Method = TypeVar("Method", bound=Callable[..., Any])
Arguments = Mapping[str, Any]
"""Arguments of a call by name."""
Masks = Sequence[npt.NDArray[np.bool_]]
"""The mask of padding in each part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteMethod:
    """The declaration that `remote_method` made for a method."""

    name: str
    signature: inspect.Signature
    intents: Mapping[str, Intent]
    collect: Collect
    over: Over
    execute: Execute
    blocking: bool
    timeout: float | None
    custom_split: SplitArguments | None
    is_direct: bool
    """The method is called on one worker, not on the group."""

    def bind(self, arguments: Sequence[Any], keywords: Arguments) -> dict[str, Any]:
        """Return the given arguments by name. Raises `CallRefused` if they do not fit the signature."""
        try:
            bound = self.signature.bind(None, *arguments, **keywords)
        except TypeError as error:
            raise CallRefused(f"{self.name}: {error}") from None
        return dict(list(bound.arguments.items())[1:])

    def split(self, given: Arguments, num_parts: int) -> tuple[Sequence[Arguments], Masks | None]:
        """Return the arguments of each part, and the masks of padding if there is any. Raises `CallRefused`."""
        intents = {name: self._intent_of(name, value) for name, value in given.items()}
        values = {name: value.value if isinstance(value, Intent) else value for name, value in given.items()}
        try:
            if self.custom_split is not None:
                custom = self.custom_split(values, num_parts)
                if len(custom) != num_parts:
                    raise ValueError(f"its split made {len(custom)} parts, expected {num_parts}")
                return custom, None
            self._check_sharded({name: i for name, i in intents.items() if isinstance(i, Shard)}, values)
            parts = {name: intent.split(name, values[name], num_parts) for name, intent in intents.items()}
        except ValueError as error:
            raise CallRefused(f"{self.name}: {error}") from None
        arguments = [{name: part[i] for name, part in parts.items()} for i in range(num_parts)]
        return arguments, masks_of([(values[name], part) for name, part in parts.items()])

    def join(self, results: list[Any], padding: Masks | None) -> Any:
        """Combine the results of all parts into one, without rows of padding. Raises `ResultRefused`."""
        try:
            if padding is not None:
                rows = self.collect is concat
                results = [without_padding(*each, is_rows=rows) for each in zip(results, padding, strict=True)]
            return self.collect(results)
        except ResultRefused as error:
            raise ResultRefused(f"{self.name}: {error}") from None

    def _intent_of(self, name: str, value: Any) -> Intent:
        """Return the intent of an argument, by its declaration or by the call. Raises `CallRefused`."""
        declared = self.intents.get(name)
        if not isinstance(value, Intent):
            return declared or Broadcast()
        kind = type(value).__name__
        if declared is not None:
            raise CallRefused(
                f"{self.name}: {name} is declared as {type(declared).__name__}, expected a plain value, given {kind}"
            )
        if value.value is DECLARED:
            raise CallRefused(f"{self.name}: {name} is a {kind} without a value, expected {kind}(value)")
        if self.execute is Execute.RANK_ZERO and not isinstance(value, Broadcast):
            raise CallRefused(f"{self.name} runs on rank zero alone, expected a plain value for {name}, given {kind}")
        return value

    def _check_sharded(self, sharded: Mapping[str, Shard], values: Arguments) -> None:
        """Check that all sharded arguments are cut in the same way, so that their rows match. Raises ValueError."""
        uneven = {name: intent.uneven for name, intent in sharded.items()}
        if len(set(uneven.values())) > 1:
            raise ValueError(f"arguments are sharded together, expected one `uneven`, given {uneven}")
        sizes = {name: len(values[name]) for name in sharded if isinstance(values[name], Batch)}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"arguments are sharded together, expected as many samples in each, given {sizes}")


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
    """Mark a method as remote, by a mode or by single settings.

    `dispatch`: intents by argument. `collect`: how results are combined, by default `each`. `over`: see `Over`. A call
    that is not `blocking` returns a `CallFuture`. `timeout`: seconds after which an unanswered call raises
    `CallTimedOut`. Raises TypeError for a declaration that can never work.
    """
    if mode is not None and (dispatch is not None or collect is not None or over != "ranks"):
        raise TypeError(f"{mode} says how to dispatch and collect: leave out dispatch, collect and over")
    plan: Plan | Custom = mode.value if isinstance(mode, Mode) else (mode or Plan(None, collect or each, over))

    def mark(method: Method) -> Method:
        if inspect.iscoroutinefunction(method) or inspect.isasyncgenfunction(method):
            raise TypeError(
                f"{method.__qualname__} is `async def`, and a worker has no event loop: make the remote method a plain "
                "one, which may call asyncio.run()"
            )
        signature = inspect.signature(method)
        arguments = list(signature.parameters)[1:]
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY) for p in signature.parameters.values()):
            raise TypeError(f"{method.__qualname__}: no *args, **kwargs or positional-only arguments in remote methods")
        if isinstance(plan, Plan) and plan.first_intent is not None and not arguments:
            raise TypeError(f"{method.__qualname__} has no first argument, which {mode} needs")
        declared = RemoteMethod(
            name=method.__name__,
            signature=signature,
            intents=plan.intents(arguments) if isinstance(plan, Plan) and dispatch is None else dict(dispatch or {}),
            collect=first if execute is Execute.RANK_ZERO else plan.collect,
            over=plan.over,
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


def _check(method: RemoteMethod, arguments: Sequence[str], *, given: Collect | None) -> None:
    """Check a declaration. Raises TypeError if it can never work."""
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
    """Return the remote methods of a class by name."""
    members = inspect.getmembers(worker_cls, inspect.isfunction)
    return {name: f.__remote_method__ for name, f in members if hasattr(f, "__remote_method__")}
