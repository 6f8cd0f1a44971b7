"""Embeddings of texts: the built-in n-grams, or a function of the user with checked results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.config import ConfigError
from penstock.config.imports import import_named
from penstock.scheduler.length.features import excerpt

Embedding = Callable[[Sequence[str]], npt.NDArray[np.float32]]
"""A function from n texts to unit vectors, [n, d]."""

KEY = "scheduler.length.embedding"

DIMENSIONS = 128
SHIFT = np.uint32(32 - 8)  # keeps 8 bits: a dimension and a sign
MIX = tuple(map(np.uint32, (2654435761, 2246822519, 3266489917, 668265263, 374761393)))  # odd, without a pattern


def embedding(name: str) -> Embedding:
    """Return the embedding `ngrams` or `package.module:function`. Raises `ConfigError` if the import fails."""
    if name == "ngrams":
        return ngrams
    if ":" not in name:
        raise ConfigError(f"unknown {KEY} {name!r}: it is ngrams, or package.module:function")
    function = import_named(KEY, name, wanted="a function from a list of texts to an array [n, d]")
    if not callable(function):
        raise ConfigError(f"{KEY} {name!r} is not a function")
    return _checked(name, function)


def _checked(name: str, function: Callable[[list[str]], Any]) -> Embedding:
    def embed(texts: Sequence[str]) -> npt.NDArray[np.float32]:
        vectors = np.asarray(function(list(texts)), dtype=np.float32)
        if vectors.ndim != 2 or len(vectors) != len(texts) or not np.isfinite(vectors).all():
            raise ConfigError(
                f"{KEY} {name!r} made an array of shape {vectors.shape} from {len(texts)} texts; "
                f"it must be ({len(texts)}, d), of finite numbers"
            )
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        unit: npt.NDArray[np.float32] = np.divide(vectors, norms, out=np.zeros_like(vectors), where=norms > 0)
        return unit

    return embed


def ngrams(texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """Return one unit vector of hashed character n-grams per text, [n, DIMENSIONS]. Any language; no vocabulary."""
    return np.array([_vector(text) for text in texts], dtype=np.float32).reshape(len(texts), DIMENSIONS)


def _vector(text: str) -> npt.NDArray[np.float64]:
    """Return the unit vector of a text; zero if all counts cancel out.

    Counts have signs, so that n-grams that share a dimension cancel out on average. Square roots of the counts let
    variety weigh more than repetition.
    """
    hashed = _hashes(np.frombuffer(excerpt(text).encode("utf-32-le", "surrogatepass"), dtype=np.uint32))
    bins = np.bincount(hashed >> SHIFT, minlength=2 * DIMENSIONS)
    counts = bins[::2] - bins[1::2]
    sizes = np.abs(counts)
    vector: npt.NDArray[np.float64] = np.copysign(np.sqrt(sizes / max(1, sizes.sum())), counts)
    return vector


def _hashes(codes: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Return a hash of each 3-gram and of each 5-gram of characters."""
    if len(codes) < 3:
        codes = np.pad(codes, (0, 3 - len(codes)))
    threes = codes[:-2] * MIX[0] + codes[1:-1] * MIX[1] + codes[2:] * MIX[2]
    threes ^= threes >> np.uint32(15)
    fives = threes[:-2] * MIX[3] + threes[2:] * MIX[4]
    hashed = np.concatenate([threes * MIX[1], fives])
    hashed ^= hashed >> np.uint32(13)
    return hashed * MIX[2]
