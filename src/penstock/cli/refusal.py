"""How a command says no."""

from __future__ import annotations

import sys

REFUSAL = "error: "


def refuse(reason: object, code: int) -> int:
    """Say why, where errors belong."""
    print(f"{REFUSAL}{reason}", file=sys.stderr)
    return code
