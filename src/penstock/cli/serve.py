"""`penstock serve`: one rollout server by itself. Exit codes: 0 ended by a signal, 1 cannot serve, 2 wrong settings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.config import ConfigError, default_config
from penstock.model.files import ModelError


def serve(model: Path, overrides: Sequence[str], *, host: str, port: int, name: str | None) -> int:
    """Returns the exit code."""
    try:
        config = default_config([f"rollout.host={host}", f"rollout.port={port}", f"model.path={model}", *overrides])
    except ConfigError as error:
        return _refuse(error, 2)
    from penstock.processes.alone import serve as serve_alone

    try:
        serve_alone(config, model, model_name=name or str(model))
    except OSError as error:
        return _refuse(f"cannot listen on {host}:{port}: {error.strerror or error}", 1)
    except (ModelError, ValueError) as error:
        return _refuse(error, 1)
    return 0


def _refuse(error: object, code: int) -> int:
    print(f"error: {error}", file=sys.stderr)
    return code
