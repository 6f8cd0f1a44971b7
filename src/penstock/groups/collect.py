"""Functions that combine the results of a call into one. They take the list of results, in the order of parts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce as fold
from itertools import compress
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.groups.batch import PADDING, Batch, join
from penstock.groups.errors import ResultRefused

Collect = Callable[[list[Any]], Any]


def each(results: list[Any]) -> list[Any]:
    """Return all results, by part."""
    return results


def first(results: list[Any]) -> Any:
    """Return the result of the first part (rank zero)."""
    return results[0]


def concat(results: list[Any]) -> Any:
    """Join batches, arrays or lists in rank order. Raises `ResultRefused`."""
    kinds = {type(result) for result in results}
    if len(kinds) > 1:
        raise ResultRefused(f"ranks returned {sorted(kind.__name__ for kind in kinds)}, which do not join")
    if isinstance(results[0], list | tuple):
        return [value for result in results for value in result]
    try:
        if isinstance(results[0], Batch):
            return Batch.concat(results)
        if getattr(results[0], "shape", ()):
            return join(results)
    except (ValueError, TypeError, RuntimeError) as error:  # errors of numpy and torch
        raise ResultRefused(f"the results of the ranks do not join: {error}") from error
    raise ResultRefused(f"ranks returned {kinds.pop().__name__}, expected batches, arrays or lists to join")


def reduce(combine: Callable[[Any, Any], Any]) -> Collect:
    """Return a function that folds the results with `combine` in rank order."""
    return lambda results: fold(combine, results)


def add(left: Mapping[str, float], right: Mapping[str, float]) -> dict[str, float]:
    """Add two mappings of counts, key by key. For use with `reduce`."""
    return {key: left.get(key, 0.0) + right.get(key, 0.0) for key in (*left, *(k for k in right if k not in left))}


def without_padding(result: Any, is_padding: npt.NDArray[np.bool_], *, is_rows: bool) -> Any:
    """Remove the rows of padding from the result that a worker returned for a padded part.

    A `Batch` with the column `is_padding` marks these rows itself. For other results the rows of the part's mask are
    removed. Lists and arrays have rows only if `is_rows`. A result without rows is about the whole rank and stays
    as it is. Raises `ResultRefused` if the result has another number of rows than the part.
    """
    if isinstance(result, Batch) and PADDING in result.columns:
        return result.unpad()
    is_list = isinstance(result, list | tuple)
    has_rows = isinstance(result, Batch) or (is_rows and (is_list or bool(getattr(result, "shape", ()))))
    if not has_rows or not is_padding.any():
        return result
    if len(result) != len(is_padding):
        raise ResultRefused(
            f"a part of {len(is_padding)} samples, {is_padding.sum()} of them padding, became {len(result)}: "
            f"return a Batch that carries {PADDING!r} along, or declare Shard(uneven='refuse' or 'allow')"
        )
    if is_list:
        return type(result)(compress(result, ~is_padding))
    wanted = np.flatnonzero(~is_padding)
    return result.select(wanted) if isinstance(result, Batch) else result[wanted]


def masks_of(arguments: Sequence[tuple[Any, Sequence[Any]]]) -> list[npt.NDArray[np.bool_]] | None:
    """Return the mask of the padding that the cut added to each part; None if it added none. `arguments`: (argument,
    its parts)."""
    for whole, parts in arguments:
        if isinstance(whole, Batch) and PADDING not in whole.columns and PADDING in getattr(parts[0], "columns", ()):
            return [part.is_padding for part in parts]
    return None
