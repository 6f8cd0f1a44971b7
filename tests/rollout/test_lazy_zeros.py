"""Keys and values in main memory take space where they were written to, and give it back."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
import pytest
import torch
from tiny_policy import MAX_CONTEXT, make_model, make_request, run

from penstock.rollout import slot_memory, slots
from penstock.rollout.lazy_zeros import LazyZeros
from penstock.rollout.slot_engine import SlotEngine
from penstock.rollout.slot_memory import SlotMemory


def resident_bytes(tensor: torch.Tensor) -> int:
    """Memory that the system has provided for the pages of a tensor, which begins with a page. A page that was only
    read counts too."""
    pages = (ctypes.c_ubyte * -(-tensor.nbytes // mmap.PAGESIZE))()
    libc = ctypes.CDLL(None, use_errno=True)
    told = libc.mincore(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), pages)
    assert told == 0, os.strerror(ctypes.get_errno())
    return mmap.PAGESIZE * sum(page & 1 for page in pages)


def test_only_written_pages_take_memory_until_they_are_given_back() -> None:
    zeros = LazyZeros((64, mmap.PAGESIZE), torch.uint8)
    assert resident_bytes(zeros.tensor) == 0
    zeros.tensor[10:20] = 7
    assert resident_bytes(zeros.tensor) == 10 * mmap.PAGESIZE
    zeros.give_back(zeros.tensor[12:18].flatten()[1:])
    assert resident_bytes(zeros.tensor) == 5 * mmap.PAGESIZE, "of a page that is needed in part nothing is given back"
    assert (
        zeros.tensor[12].all()
        and not zeros.tensor[3].any()
        and not zeros.tensor[13:18].any()
        and zeros.tensor[18:20].all()
    )


def test_a_tensor_may_be_larger_than_the_memory_and_empty() -> None:
    assert LazyZeros((2**44,), torch.uint8).tensor[-1] == 0
    assert LazyZeros((0, 3), torch.bfloat16).tensor.shape == (0, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slots_of_a_long_context_take_what_their_sequences_need(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    monkeypatch.setattr(slots, "KEPT_BYTES", 0)
    monkeypatch.setattr(slots, "TRIM_BYTES", 0)
    monkeypatch.setattr(slot_memory, "TRIM_STEPS", 1)
    model = make_model().to(dtype)
    engine = SlotEngine(model, num_slots=8, max_context=MAX_CONTEXT, policy_version=0, num_cached=0)
    assert isinstance(engine._memory, SlotMemory)
    cache = engine._memory.cache
    others = resident_bytes(cache._keys)  # the system may describe neighbouring mappings as one
    requests = [make_request(str(n), [5, 6], max_new_tokens=8 * n, seeds=(n,)) for n in range(1, 11)]
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        engine.step()
        assert 0 < resident_bytes(cache._keys) - others <= engine.num_reserved_bytes
    run(engine, make_request("last", [5, 6], max_new_tokens=3))
    assert engine.num_reserved_bytes <= 2 * 2 * 2 * mmap.PAGESIZE, "one page for each head, as one slot is in use"
    assert resident_bytes(cache._keys) - others <= engine.num_reserved_bytes
    assert np.count_nonzero(cache._written) == 1


def test_failed_aborted_and_retracted_rows_leave_no_memory_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slots, "KEPT_BYTES", 0)
    monkeypatch.setattr(slots, "TRIM_BYTES", 0)
    monkeypatch.setattr(slot_memory, "TRIM_STEPS", 1)
    engine = SlotEngine(make_model(), num_slots=8, max_context=MAX_CONTEXT, policy_version=0, num_cached=0)
    assert isinstance(engine._memory, SlotMemory)
    cache = engine._memory.cache
    others = resident_bytes(cache._keys)
    for number, length in enumerate((50, 3, 20, 4)):
        engine.submit(make_request(str(number), [5] * length, max_new_tokens=9))
    engine.step()
    engine.abort(["1", "3"])
    assert resident_bytes(cache._keys) - others <= engine.num_reserved_bytes
    engine.retract()
    engine.step()
    cache.erase([0, 1])
    engine.step()
    assert resident_bytes(cache._keys) - others <= engine.num_reserved_bytes
    engine.abort_all()
    run(engine, make_request("last", [5, 6], max_new_tokens=3))
    assert resident_bytes(cache._keys) - others <= 2 * 2 * 2 * mmap.PAGESIZE
