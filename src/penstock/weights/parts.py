"""Published weights on another machine: their file comes over HTTP in parts, is verified like any other, and mapped.

Whether it is another machine is told by the boot ids of sender and receiver. Blocking; a receiver has threads for this.
"""

from __future__ import annotations

import http.client
import os
import secrets
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from penstock.ports import WeightsOutOfReach
from penstock.types import WeightsHandle
from penstock.weights.shared_memory import Layout, receive

PART_BYTES = 32 << 20
PART_S = 30.0
"""For a part, or a piece of one, to come."""
PATIENCE_S = 15.0
"""With a sender that does not answer, since the last part came."""
PAUSE_S = 0.5
GONE = 404
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""The machines of a run reach each other without a proxy."""


class Receiver:
    """Maps the weights of a handle, whichever machine they lie on."""

    def __init__(self, expected: Layout, *, machine: str, directory: Path, key: str | None = None) -> None:
        """`expected`: of the model. `machine`: boot id of this one. `directory`: for what comes, until it is mapped.
        `key`: what opens the sender."""
        self._expected, self._machine, self._directory, self._key = expected, machine, directory, key

    def __call__(self, handle: WeightsHandle) -> dict[str, Tensor]:
        """Raises `WeightsMismatch`, or `WeightsOutOfReach`."""
        if not handle.url or (handle.machine == self._machine and Path(handle.path).exists()):
            return receive(handle, self._expected)
        path = self._fetch(handle)
        try:
            return receive(replace(handle, path=str(path)), self._expected)
        finally:
            path.unlink()

    def _fetch(self, handle: WeightsHandle) -> Path:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._directory / f"{handle.policy_version}-{secrets.token_hex(4)}.safetensors"
        try:
            with os.fdopen(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                for part in self._parts(handle):
                    file.write(part)
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        return path

    def _parts(self, handle: WeightsHandle) -> Iterator[bytes]:
        """Each is asked for until it has come."""
        start, limit = 0, time.monotonic() + PATIENCE_S
        while start < handle.num_bytes:
            end = min(start + PART_BYTES, handle.num_bytes)
            try:
                part = self._part(handle.url, start, end)
            except (OSError, http.client.HTTPException) as error:
                is_gone = isinstance(error, urllib.error.HTTPError) and error.code == GONE
                if is_gone or time.monotonic() > limit:
                    raise WeightsOutOfReach(
                        f"policy_version {handle.policy_version} cannot be had from {handle.url}: {error}"
                    ) from error
                time.sleep(PAUSE_S)
                continue
            yield part
            start, limit = end, time.monotonic() + PATIENCE_S

    def _part(self, url: str, start: int, end: int) -> bytes:
        headers = {"Range": f"bytes={start}-{end - 1}"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        with DIRECTLY.open(urllib.request.Request(url, headers=headers), timeout=PART_S) as response:
            part: bytes = response.read()
        if len(part) != end - start:
            raise http.client.IncompleteRead(part, end - start - len(part))
        return part
