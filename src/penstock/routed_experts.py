"""The record of a router: the experts that computed each token of a mixture-of-experts model.

A record is an array [num_tokens, width]. A row has the experts of one token, layer by layer, k of each layer with
experts. Its type is the smallest that holds their numbers, and its largest value marks what is `unknown`: the learner's
router then chooses. Engine and learner compute with different rounding, so near-ties of a router fall differently, and
the log-probabilities of the two differ by more than rounding. A learner that repeats the recorded choices avoids this
(R3, arXiv 2510.11370).
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Record = npt.NDArray[Any]
"""[num_tokens, width], uint8 or uint16."""

HEADERS: dict[tuple[int, int], Callable[[io.BytesIO], Any]] = {
    (1, 0): np.lib.format.read_array_header_1_0,
    (2, 0): np.lib.format.read_array_header_2_0,
}
"""Readers of the headers of numpy files, by version."""
WIRE_DTYPES = ("int32", "uint16", "uint8")
"""Types of the numbers on the wire. SGLang sends int32 unless its reply names another one."""


class Routing(NamedTuple):
    """What a model's record looks like."""

    num_experts: int
    """Of a layer."""
    num_layers: int
    """All layers of the model, of which some may have no experts."""
    num_chosen: int
    """Experts that compute a token in a layer."""

    @property
    def width(self) -> int:
        """Return the most entries of a row."""
        return self.num_layers * self.num_chosen


def dtype_of(num_experts: int) -> np.dtype[Any]:
    """Return the type of a record."""
    return np.dtype(np.uint8 if num_experts <= np.iinfo(np.uint8).max else np.uint16)


def unknown(dtype: np.dtype[Any]) -> int:
    """Return the entry of what is not known."""
    return int(np.iinfo(dtype).max)


def compact(values: npt.NDArray[Any], num_experts: int) -> Record:
    """Return numbers of experts as a record. Numbers that no expert has become `unknown`."""
    dtype = dtype_of(num_experts)
    return np.where((values >= 0) & (values < num_experts), values, unknown(dtype)).astype(dtype)


def assembled(length: int, pieces: Sequence[tuple[int, Record]]) -> Record | None:
    """Return the record of `length` tokens, or None without pieces.

    `pieces`: (end, record): its last row is that of the token before `end`. Of a token with several rows the first one
    counts: the pass that computed it first has sampled what follows. Pieces of another width than the first are left
    out.
    """
    if not pieces:
        return None
    _, first = pieces[0]
    found = np.full((length, first.shape[1]), unknown(first.dtype), dtype=first.dtype)
    is_known = np.zeros(length, dtype=np.bool_)
    for end, rows in pieces:
        if rows.shape[1:] == first.shape[1:] and rows.dtype == first.dtype:
            start = end - len(rows)
            places = np.arange(max(start, 0), min(end, length))
            places = places[~is_known[places]]
            found[places] = rows[places - start]
            is_known[places] = True
    return found


def joined(lengths: Sequence[int], records: Sequence[Record | None]) -> Record | None:
    """Return the record of consecutive segments with these numbers of tokens: see `Segment.experts`."""
    ends = [end - 1 for end in accumulate(lengths)]
    pieces = [(end, record) for end, record in zip(ends, records, strict=True) if record is not None]
    before = max((len(record) - end for end, record in pieces), default=0)
    return assembled(ends[-1] + before, [(end + before, record) for end, record in pieces]) if pieces else None


def to_wire(record: Record, *, compacted: bool) -> str:
    """Return a record in base64: as int32, SGLang's form, or `compacted` as it is."""
    return base64.b64encode((record if compacted else record.astype(np.int32)).tobytes()).decode()


def from_wire(text: str, num_rows: int, *, dtype: str) -> npt.NDArray[Any]:
    """Return the numbers of experts, [num_rows, width]. Raises ValueError for anything else."""
    if dtype not in WIRE_DTYPES:
        raise ValueError(f"experts of the type {dtype[:20]!r}")
    values = np.frombuffer(_decoded(text), dtype=dtype)
    if num_rows <= 0 or not len(values) or len(values) % num_rows:
        raise ValueError(f"{len(values)} experts for {num_rows} tokens")
    return values.reshape(num_rows, -1)


def from_npy(text: str, num_rows: int) -> npt.NDArray[Any]:
    """Return the numbers of experts, [num_tokens, width], of a numpy file in base64: vLLM's form. It may have more than
    `num_rows` tokens, the last ones of which are wanted. Raises ValueError for anything else."""
    raw = _decoded(text)
    file = io.BytesIO(raw)
    try:  # numpy would make room for what a header promises
        read_header = HEADERS[np.lib.format.read_magic(file)]
        shape, by_columns, dtype = read_header(file)
    except (EOFError, KeyError) as error:
        raise ValueError(f"experts of no known form: {error}") from None
    size, start = prod(shape), file.tell()
    if len(shape) != 3 or by_columns or dtype.kind not in "iu" or size * dtype.itemsize != len(raw) - start:
        raise ValueError(f"experts of the form {shape}, {dtype}, in {len(raw) - start} bytes")
    if not size or shape[0] < num_rows:
        raise ValueError(f"experts of {shape[0]} tokens, and not of {num_rows}")
    return np.frombuffer(raw, dtype, offset=start).reshape(shape[0], -1)


def _decoded(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(str(error)) from None
