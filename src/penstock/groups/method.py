"""Mark a worker's method for calls on the whole group: how its arguments are split, where it runs, how results return.

The decorator only marks; a backend (`groups/local.py`) does the calling. What a call does to its arguments is declared
per argument and never guessed from lengths: a list that happens to be as long as the group is still broadcast.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce as fold
from typing import Any, Literal, TypeVar

from penstock.groups.batch import Batch

Method = TypeVar("Method", bound=Callable[..., Any])
Collect = Callable[[list[Any]], Any]
Execute = Literal["all", "rank_zero"]


@dataclass(frozen=True, slots=True)
class Rank:
    """Which worker of how many."""

    index: int
    size: int


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Every worker gets the whole argument."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Worker i of n gets the i-th of n runs of neighbouring samples of a `Batch`."""

    uneven: bool = False
    """Allow batches that n does not divide: lengths then differ by one. Only for methods whose result does not
    depend on the cut."""


@dataclass(frozen=True, slots=True)
class PerRank:
    """Worker i gets the i-th entry of a list or tuple that has one for each worker."""


Intent = Broadcast | Shard | PerRank


class CallRefused(ValueError):
    """The arguments do not fit what the method declares; nothing has run."""


def each(results: list[Any]) -> list[Any]:
    """All results, by rank."""
    return results


def first(results: list[Any]) -> Any:
    """The result of rank zero."""
    return results[0]


def concat(results: list[Any]) -> Any:
    """Batches (or lists) joined in rank order."""
    if isinstance(results[0], Batch):
        return Batch.concat(results)
    return [value for result in results for value in result]


def reduce(combine: Callable[[Any, Any], Any]) -> Collect:
    """Results folded with `combine` in rank order."""
    return lambda results: fold(combine, results)


def add(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    """Sum two mappings of counts; for `reduce`."""
    return {key: left.get(key, 0.0) + right.get(key, 0.0) for key in (*left, *(k for k in right if k not in left))}


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteMethod:
    """What `remote_method` declared."""

    name: str
    signature: inspect.Signature
    dispatch: Mapping[str, Intent]
    collect: Collect
    execute: Execute

    def split(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any], world_size: int) -> list[dict[str, Any]]:
        """Keyword arguments per rank. Raises `CallRefused` before anything runs."""
        try:
            bound = self.signature.bind(None, *arguments, **keywords)
        except TypeError as error:
            raise CallRefused(f"{self.name}: {error}") from None
        bound.apply_defaults()
        given = dict(list(bound.arguments.items())[1:])
        parts = {name: self._split_argument(name, value, world_size) for name, value in given.items()}
        return [{name: part[rank] for name, part in parts.items()} for rank in range(world_size)]

    def _split_argument(self, name: str, value: Any, world_size: int) -> Sequence[Any]:
        intent = self.dispatch.get(name, Broadcast())
        if isinstance(intent, Broadcast):
            return [value] * world_size
        if isinstance(intent, PerRank):
            return self._one_each(name, value, world_size)
        if not isinstance(value, Batch):
            raise CallRefused(f"{self.name}: {name} is sharded, expected a Batch, given {type(value).__name__}")
        if len(value) % world_size and not intent.uneven:
            raise CallRefused(
                f"{self.name}: {name} is sharded over {world_size} workers, expected a multiple of {world_size} "
                f"samples, given {len(value)}"
            )
        return value.chunk(world_size)

    def _one_each(self, name: str, value: Any, world_size: int) -> Sequence[Any]:
        if not isinstance(value, list | tuple):
            raise CallRefused(f"{self.name}: {name} is given per rank, expected a list, given {type(value).__name__}")
        if len(value) != world_size:
            raise CallRefused(
                f"{self.name}: {name} is given per rank, expected {world_size} entries, given {len(value)}"
            )
        return value


def remote_method(
    *, dispatch: Mapping[str, Intent] | None = None, collect: Collect = each, execute: Execute = "all"
) -> Callable[[Method], Method]:
    """Mark a method. Arguments that `dispatch` does not name are broadcast."""

    def mark(method: Method) -> Method:
        signature = inspect.signature(method)
        intents = dict(dispatch or {})
        if unknown := intents.keys() - signature.parameters.keys():
            raise TypeError(f"{method.__qualname__} has no argument {min(unknown)!r} to dispatch")
        if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD, p.POSITIONAL_ONLY) for p in signature.parameters.values()):
            raise TypeError(f"{method.__qualname__}: a remote method names all its arguments")
        if execute == "rank_zero" and any(isinstance(intent, Shard | PerRank) for intent in intents.values()):
            raise TypeError(f"{method.__qualname__} runs on rank zero alone: its arguments cannot be sharded")
        declared = RemoteMethod(
            name=method.__name__, signature=signature, dispatch=intents, collect=collect, execute=execute
        )
        method.__remote_method__ = declared  # type: ignore[attr-defined]
        return method

    return mark


def remote_methods(worker_cls: type) -> dict[str, RemoteMethod]:
    """The marked methods of a class by name."""
    members = inspect.getmembers(worker_cls, inspect.isfunction)
    return {name: f.__remote_method__ for name, f in members if hasattr(f, "__remote_method__")}
