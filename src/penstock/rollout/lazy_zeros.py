"""Zeros in main memory that take space only where they were written to."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from math import prod

import torch

NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
"""Lets a mapping be larger than the memory."""


class LazyZeros:
    """A CPU tensor of zeros. The system provides a page of memory when it is first written to."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        self._mapping = mmap.mmap(-1, max(prod(shape) * dtype.itemsize, dtype.itemsize), flags=flags)
        self._mapping.madvise(mmap.MADV_NOHUGEPAGE)  # a huge page would be provided whole for its first byte
        self.tensor = torch.frombuffer(self._mapping, dtype=dtype)[: prod(shape)].view(*shape)

    def give_back(self, part: torch.Tensor) -> None:
        """Return the whole pages of a contiguous view of the tensor to the system. They become zeros."""
        start = part.data_ptr() - self.tensor.data_ptr()
        assert part.is_contiguous() and 0 <= start <= self.tensor.nbytes - part.nbytes
        first, end = -(-start // mmap.PAGESIZE), (start + part.nbytes) // mmap.PAGESIZE
        if end > first:
            self._mapping.madvise(mmap.MADV_DONTNEED, first * mmap.PAGESIZE, (end - first) * mmap.PAGESIZE)
