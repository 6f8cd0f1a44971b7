"""Policy versions as adapters of a server with another engine. Torch-free.

Each version is an adapter named `policy-VERSION`, on the weights with which the server started. A request names the
adapter with which it is computed to its end, so its version needs no word of the server. The label of the server's
weights says which version is served: new requests name it.

The server holds a few adapters. An older one is unloaded only after all running requests were ended, because no other
process knows which adapters they use. A request on its way may still name the version before, which stays loaded.
"""

from __future__ import annotations

import re
from pathlib import Path

from penstock.rollout.bodies import WeightSpan
from penstock.rollout.client import ListedModels
from penstock.rollout.session import HttpSession
from penstock.types import WeightsHandle

HELD = 8
"""Most adapters that a server holds. Every sixth update then ends the running requests, unless each does."""
LOAD_S = 300.0
"""Timeout for reading the file of adapters."""
PREFIX = "policy-"
NAME = re.compile(rf"{PREFIX}(\d{{1,10}})")


def name_of(policy_version: int) -> str:
    """Return the name of the adapters of this version."""
    return f"{PREFIX}{policy_version}"


def span_of(name: str, num_tokens: int) -> list[WeightSpan]:
    """Return the versions of an answer's tokens: all are of the adapters with this name."""
    return [WeightSpan(version=name.removeprefix(PREFIX), start=0, end=num_tokens)]


class ServedAdapters:
    """The adapters that one server holds."""

    def __init__(self, url: str, session: HttpSession, *, prefix: str = "") -> None:
        """`prefix`: of the paths of the engine's routes for adapters."""
        self._url, self._session, self._prefix = url, session, prefix

    async def held(self) -> list[int]:
        """Return the versions that the server holds, the oldest first."""
        listed = await self._session.call("GET", self._url, "/v1/models", None, ListedModels)
        names = (NAME.fullmatch(model.id) for model in listed.data)
        return sorted(int(name[1]) for name in names if name)

    async def load(self, handle: WeightsHandle) -> None:
        """Load the adapters of a version, unless the server holds them."""
        if handle.policy_version not in await self.held():
            body = {"lora_name": name_of(handle.policy_version), "lora_path": str(Path(handle.path).parent)}
            await self._session.send("POST", self._url, f"{self._prefix}/load_lora_adapter", body, timeout_s=LOAD_S)

    async def unload(self, policy_version: int) -> None:
        """Unload the adapters of a version, which no running request uses."""
        body = {"lora_name": name_of(policy_version)}
        await self._session.send("POST", self._url, f"{self._prefix}/unload_lora_adapter", body)
