"""What turns texts into vectors: the built-in n-grams, or a function of the user's, checked at the boundary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.config import ConfigError
from penstock.config.imports import import_named
from penstock.scheduler.length import ngrams

Embedding = Callable[[Sequence[str]], npt.NDArray[np.float32]]
"""Texts to unit vectors, [n, d]."""

KEY = "scheduler.length.embedding"


def embedding(name: str) -> Embedding:
    """`ngrams`, or `package.module:function`. Raises `ConfigError`, whatever goes wrong in the user's module."""
    if name == "ngrams":
        return ngrams.embed
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
