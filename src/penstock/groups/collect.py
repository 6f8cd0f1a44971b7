"""How the results of a call become one: functions from the list of results, in the order of parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce as fold
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.groups.batch import PADDING, Batch, join
from penstock.groups.errors import ResultRefused

Collect = Callable[[list[Any]], Any]


def each(results: list[Any]) -> list[Any]:
    """All results, by rank."""
    return results


def first(results: list[Any]) -> Any:
    """The result of rank zero."""
    return results[0]


def concat(results: list[Any]) -> Any:
    """Batches, arrays or lists joined in rank order."""
    kinds = {type(result) for result in results}
    if len(kinds) > 1:
        raise ResultRefused(f"ranks returned {sorted(kind.__name__ for kind in kinds)}, which do not join")
    if isinstance(results[0], Batch):
        return Batch.concat(results)
    if isinstance(results[0], list | tuple):
        return [value for result in results for value in result]
    if getattr(results[0], "shape", ()):
        return join(results)
    raise ResultRefused(f"ranks returned {kinds.pop().__name__}, expected batches, arrays or lists to join")


def reduce(combine: Callable[[Any, Any], Any]) -> Collect:
    """Results folded with `combine` in rank order."""
    return lambda results: fold(combine, results)


def add(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    """Sum two mappings of counts; for `reduce`."""
    return {key: left.get(key, 0.0) + right.get(key, 0.0) for key in (*left, *(k for k in right if k not in left))}


def without_padding(result: Any, is_padding: npt.NDArray[np.bool_], *, is_rows: bool) -> Any:
    """What a worker made of a padded part, without the rows that it made of the padding.

    A `Batch` that carries the mark says itself which these are; else the rows are those of the part. Lists and arrays
    have rows only if `is_rows`; whatever has none belongs to the rank and stays.
    """
    if isinstance(result, Batch) and PADDING in result.columns:
        return result.unpad()
    if (not isinstance(result, Batch) and not (is_rows and _has_rows(result))) or not is_padding.any():
        return result
    if len(result) != len(is_padding):
        raise ResultRefused(
            f"a part of {len(is_padding)} samples, {is_padding.sum()} of them padding, became {len(result)}: "
            f"return a Batch that carries {PADDING!r} along, or declare Shard(uneven='refuse' or 'allow')"
        )
    return _only(result, ~is_padding)


def _has_rows(result: Any) -> bool:
    return isinstance(result, list | tuple) or bool(getattr(result, "shape", ()))


def _only(rows: Any, wanted: npt.NDArray[np.bool_]) -> Any:
    if isinstance(rows, Batch):
        return rows.select(wanted)
    if isinstance(rows, list | tuple):
        return type(rows)(row for row, is_wanted in zip(rows, wanted, strict=True) if is_wanted)
    return rows[np.flatnonzero(wanted)]


def masks_of(arguments: Sequence[tuple[Any, Sequence[Any]]]) -> list[npt.NDArray[np.bool_]] | None:
    """Of (argument, its parts): what of each part is padding that the cut added; None if it added none."""
    for whole, parts in arguments:
        if isinstance(whole, Batch) and PADDING not in whole.columns and PADDING in getattr(parts[0], "columns", ()):
            return [part.is_padding for part in parts]
    return None
