"""Seeds that are equal on every machine."""

from __future__ import annotations

import hashlib


def stable_seed(*parts: object) -> int:
    """Return a 63-bit seed from any printable parts. It is equal on every machine and Python version."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def nth_seed(seed: int, number: int) -> int:
    """Return the 63-bit seed `number` of the family of `seed`. Seeds of a family share no stream.

    It is a step of SplitMix64 (Steele et al. 2014).
    """
    mixed = (seed + (number + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) >> 1
