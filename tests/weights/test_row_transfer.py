"""Rows of ranks on other machines come to the file as if their ranks had written them."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from queue import Queue
from tempfile import TemporaryDirectory

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from published import publish
from test_publication import rows_of, weights
from torch import Tensor

from penstock.weights import publication, row_transfer
from penstock.weights.publication import NotPublished, Publication, WeightsPublisher, await_handle
from penstock.weights.row_transfer import RowsCopy, receive_rows, send_failure
from penstock.weights.shared_memory import layout

TRANSFER_S = 60.0


class Line:
    """Takes tensors from one rank to another: the next one when the last one was taken."""

    def __init__(self) -> None:
        self._sent: Queue[Tensor] = Queue(maxsize=1)

    def send(self, tensor: Tensor) -> None:
        self._sent.put(tensor.clone(), timeout=TRANSFER_S)

    def receive(self, tensor: Tensor) -> None:
        sent = self._sent.get(timeout=TRANSFER_S)
        assert sent.shape == tensor.shape and sent.dtype == tensor.dtype
        tensor.copy_(sent)


def copied(named: Mapping[str, Tensor], shard: int, num_shards: int) -> RowsCopy:
    far, copy = Publication(Path("on another machine"), layout(named)), RowsCopy()
    for name, tensor in named.items():
        for start, data in far.pieces(name, *rows_of(tensor, shard, num_shards)):
            copy.add(start, data)
    return copy


@settings(max_examples=50, deadline=None)
@given(
    named=weights(), far=st.lists(st.booleans(), min_size=1, max_size=4), sizes=st.sampled_from([(8, 7), (24, 2**20)])
)
def test_the_file_is_that_of_ranks_on_one_machine(
    named: dict[str, Tensor], far: list[bool], sizes: tuple[int, int]
) -> None:
    with TemporaryDirectory() as there, pytest.MonkeyPatch.context() as patched:
        directory = Path(there)
        patched.setattr(publication, "PIECE_BYTES", sizes[0])
        patched.setattr(row_transfer, "BUCKET_BYTES", sizes[1])
        expected = publish(named, directory=directory / "one machine", policy_version=3)
        folder = WeightsPublisher(directory / "several machines").open(layout(named), 3).folder
        lines, senders = dict[int, Line](), list[threading.Thread]()
        for shard, is_far in enumerate(far):
            if is_far:
                lines[shard], copy = Line(), copied(named, shard, len(far))
                senders.append(threading.Thread(target=copy.send, args=(lines[shard].send,)))
                senders[-1].start()
                continue
            with Publication(folder, layout(named)) as near:
                for name, tensor in named.items():
                    near.write(name, *rows_of(tensor, shard, len(far)))
                near.written(shard)
        with Publication(folder, layout(named)) as first:
            receive_rows(first, {shard: line.receive for shard, line in lines.items()})
            handle = first.finish(3, len(far))
        for sender in senders:
            sender.join(TRANSFER_S)
        assert handle is not None and handle.fingerprint == expected.fingerprint
        assert Path(handle.path).read_bytes() == Path(expected.path).read_bytes()


def test_a_copy_that_was_sent_is_gone(tmp_path: Path) -> None:
    named, line = {"w": torch.ones(4)}, Line()
    copy = copied(named, 0, 1)
    sender = threading.Thread(target=copy.send, args=(line.send,))
    sender.start()
    with WeightsPublisher(tmp_path / "weights").open(layout(named), 1) as first:
        receive_rows(first, {0: line.receive})
    sender.join(TRANSFER_S)
    with pytest.raises(ValueError, match="closed file"):
        copy.add(0, memoryview(b"more"))


def test_a_rank_that_has_no_room_for_its_copy_ends_the_publication(tmp_path: Path) -> None:
    named, line = {"w": torch.ones(4)}, Line()
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    raised: list[object] = []

    def fail() -> None:
        try:
            send_failure(line.send, full)
        except OSError as error:
            raised.append(error)

    sender = threading.Thread(target=fail)
    sender.start()
    opened = WeightsPublisher(tmp_path).open(layout(named), 1)
    with pytest.raises(NotPublished, match=r"rank 2 could not copy its rows: OSError: .*No space left"), opened:
        receive_rows(opened, {2: line.receive})
    sender.join(TRANSFER_S)
    assert raised == [full], "the rank itself has the error too"
    with pytest.raises(NotPublished, match="rank 2 could not copy its rows"):
        await_handle(opened.folder, waiter="the test")
