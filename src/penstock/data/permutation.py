"""A shuffled order as a function: no list of it is kept, and it is the same on every machine and in every version."""

from __future__ import annotations

from penstock.types import nth_seed

ROUNDS = 4
"""Of a Feistel network: enough for an order that nobody attacks."""


def permuted(number: int, size: int, *, seed: int) -> int:
    """Where `number` (of 0..size-1) goes in the order of `seed`: a Feistel network over the next larger power of four,
    asked again until it answers within `size` (cycle walking; Black and Rogaway 2002)."""
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = number >> half, number & mask
        for round_number in range(ROUNDS):
            left, right = right, left ^ (nth_seed(seed + round_number, right) & mask)
        number = left << half | right
        if number < size:
            return number
