"""The process that gets published weights to the machine of a foreign engine. It is a child of the engine's monitor.

A received file lies where our own servers of the machine find it. The engine reads a folder of its own, with a link to
that file and nothing else. Only the newest version is kept: the engine holds the older ones in its memory.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import msgspec

from penstock.model.low_rank import describe_adapters, names_of
from penstock.ports.inference import WeightsOutOfReach
from penstock.processes.weights_fetcher import FetchRequest, FetchResult
from penstock.rollout.bodies import FetchedWeights
from penstock.runtime.frames import Frames
from penstock.runtime.interfaces import use_interface_of
from penstock.types import WeightsHandle
from penstock.weights.receiver import Receiver
from penstock.weights.shared_memory import WeightsMismatch, file_in


class FetchAnswerer:
    """Gets one version after the other."""

    def __init__(self) -> None:
        self._decoder = msgspec.msgpack.Decoder(FetchRequest)
        self._receiver: Receiver | None = None
        self._runtime_dirs: list[str] = []

    def answer(self, request: Frames) -> Frames:
        asked = self._decoder.decode(request[0])
        try:
            result = FetchResult(fetched=self._fetch(asked))
        except WeightsMismatch as error:
            result = FetchResult(error=str(error), is_wrong=True)
        except (WeightsOutOfReach, OSError) as error:
            result = FetchResult(error=str(error))
        return [msgspec.msgpack.encode(result)]

    def _fetch(self, asked: FetchRequest) -> FetchedWeights:
        folders = Path(asked.engine_dir)
        folder = folders / f"{asked.handle.policy_version}-{asked.handle.fingerprint}"
        for left in folders.glob("*/"):
            if left != folder:
                shutil.rmtree(left, ignore_errors=True)
        receiver = self._receiver_of(asked)
        receiver(asked.handle)
        assert receiver.path is not None
        path = _linked(receiver.path, folder, asked.handle, base=asked.model)
        return FetchedWeights(path=str(path), transport=receiver.transport)

    def _receiver_of(self, asked: FetchRequest) -> Receiver:
        self._runtime_dirs = asked.received_dirs
        if self._receiver is None:
            if asked.address is not None:
                use_interface_of(asked.address)
            self._receiver = Receiver(
                None, machine=asked.machine, directory=Path(asked.directory), neighbours=self._neighbours
            )
        return self._receiver

    def _neighbours(self) -> Iterator[Path]:
        return (path for each in self._runtime_dirs for path in Path(each).glob("*"))


def _linked(path: Path, folder: Path, handle: WeightsHandle, *, base: str) -> Path:
    """Link a verified file into the folder that the engine reads. Return the path there."""
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    linked = file_in(folder, adapters=handle.adapters is not None)
    linked.unlink(missing_ok=True)  # a link to another file, which an earlier process may have left
    linked.hardlink_to(path)
    form = handle.adapters
    if form is not None:
        names = [name for target in form.targets for name in names_of(target)]
        describe_adapters(names, folder, rank=form.rank, alpha=form.alpha, base=base)
    return linked
