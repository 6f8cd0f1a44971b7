"""`penstock serve`: one rollout server without a run. Exit codes: 0 ended by a signal, 1 cannot serve, 2 wrong
settings."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.cli.refusal import refuse, refusing
from penstock.config import ConfigError, ModelConfig, default_config
from penstock.model.files import ModelError, read_json
from penstock.runtime.lasting_imports import lasting_imports

READ = (
    *("model.device", "model.dtype", "model.max_context", "model.tool_format"),
    *("rollout.host", "rollout.port", "rollout.slots", "rollout.torch_threads"),
)
"""Settings that a server without a run reads."""


@refusing
def serve(model: Path, overrides: Sequence[str], *, host: str, port: int, name: str | None) -> int:
    """Serve a model until a signal, and return the exit code."""
    try:
        longest = read_json(model, "config.json").get("max_position_embeddings") or ModelConfig().max_context
    except ModelError as error:
        return refuse(f"{error}{hint(model)}", 1)
    if not isinstance(longest, int):
        return refuse(f"{model / 'config.json'}: max_position_embeddings is no number, but {longest!r}: correct it", 1)
    words = [f"rollout.host={host}", f"rollout.port={port}", f"model.path={model}", f"model.max_context={longest}"]
    words.append("env.max_new_tokens=1")  # no environment runs here, so its answer length must not bound the context
    config = default_config([*words, *overrides])
    given = [override.partition("=")[0] for override in overrides]
    for key in given:
        if key not in READ:
            raise ConfigError(f"penstock serve does not read {key}: it reads {', '.join(READ)}")
    with lasting_imports():
        from penstock.processes.slot_server import serve_alone
        from penstock.rollout.generator import EngineDead
        from penstock.rollout.room import fitting
        from penstock.runtime.http_server import CannotListen

    try:
        config, limit = fitting(config, model, fixed=given)
        if limit:
            print(limit, file=sys.stderr, flush=True)
        serve_alone(config, model, model_name=name or str(model))
    except (CannotListen, EngineDead, ModelError, ValueError) as error:
        return refuse(error, 1)
    except OSError as error:
        return refuse(f"cannot read the model in {model}: {error}", 1)
    return 0


def hint(directory: Path) -> str:
    """Return a hint to a model directory if `directory` is a run, or `tiny`; empty otherwise."""
    if str(directory) == "tiny":
        return "; tiny is made by a run: serve one of its checkpoints"
    checkpoints = [path for path in (directory / "checkpoints").glob("step_*") if path.name[5:].isdigit()]
    newest = max(checkpoints, key=lambda path: int(path.name[5:]), default=None)
    return "" if newest is None else f"; did you mean {newest}?"
