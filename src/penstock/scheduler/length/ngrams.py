"""Texts as unit vectors of hashed character n-grams: no model, no vocabulary, any language."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.scheduler.length.features import excerpt

DIMENSIONS = 128
SHIFT = np.uint32(32 - 8)  # leaves a dimension and a sign
MIX = tuple(map(np.uint32, (2654435761, 2246822519, 3266489917, 668265263, 374761393)))  # odd, without a pattern


def embed(texts: Sequence[str]) -> npt.NDArray[np.float32]:
    """One row per text, [n, DIMENSIONS]."""
    rows = np.empty((len(texts), DIMENSIONS), dtype=np.float32)
    for index, text in enumerate(texts):
        rows[index] = _vector(text)
    return rows


def _vector(text: str) -> npt.NDArray[np.float64]:
    """Signed counts, so that n-grams sharing a dimension cancel out on average; square roots, so that repetition counts
    less than variety. Zero if everything cancels out."""
    hashed = _hashes(np.frombuffer(excerpt(text).encode("utf-32-le", "surrogatepass"), dtype=np.uint32))
    bins = np.bincount(hashed >> SHIFT, minlength=2 * DIMENSIONS)
    counts = bins[::2] - bins[1::2]
    sizes = np.abs(counts)
    vector: npt.NDArray[np.float64] = np.copysign(np.sqrt(sizes / max(1, sizes.sum())), counts)
    return vector


def _hashes(codes: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """One for every three characters in a row, and one for every five."""
    if len(codes) < 3:
        codes = np.pad(codes, (0, 3 - len(codes)))
    threes = codes[:-2] * MIX[0] + codes[1:-1] * MIX[1] + codes[2:] * MIX[2]
    threes ^= threes >> np.uint32(15)
    fives = threes[:-2] * MIX[3] + threes[2:] * MIX[4]
    hashed = np.concatenate([threes * MIX[1], fives])
    hashed ^= hashed >> np.uint32(13)
    return hashed * MIX[2]
