"""Calls of actors that end: with what they return, with what they raise, or when their time is up."""

from __future__ import annotations

import re
from typing import Any

from ray.exceptions import RayError, RayTaskError

from penstock.deadline import deadline

WHY = [re.compile(rf"{words} (.*?)\.(?: |$)", re.M) for words in ("Worker exit detail:", "The actor is dead because")]
"""The more telling one first."""


async def call(method: Any, *arguments: Any, seconds: float, what: str, holder: str) -> Any:
    """Of an actor. Raises what it raised; `RayActorError` if it is gone, or cannot be reached; `Stalled`."""
    async with deadline(seconds, waiter="the run", resource=what, holder=holder):
        try:
            return await method.remote(*arguments)
        except RayTaskError as error:
            raise error.cause from None


def end_of(error: RayError) -> str:
    """How an actor ended, as far as Ray knows: the process, its machine, and the first sentence of why."""
    text = str(error)
    why = next((found for pattern in WHY if (found := pattern.search(text))), None)
    where = ", ".join(f"{name} {found[1]}" for name in ("pid", "ip") if (found := re.search(rf"{name}: (\S+)", text)))
    return f"its actor ({where}) is dead: {why[1] if why else text.splitlines()[0]}"
