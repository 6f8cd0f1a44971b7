"""`penstock serve`: one rollout server by itself. Exit codes: 0 ended by a signal, 1 cannot serve, 2 wrong settings."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.cli.refusal import refuse
from penstock.config import ConfigError, ModelConfig, default_config
from penstock.model.files import ModelError, read_json

READ = (
    *("model.device", "model.dtype", "model.max_context"),
    *("rollout.host", "rollout.port", "rollout.slots", "rollout.torch_threads"),
)
"""Settings that make a difference to a server by itself."""


def serve(model: Path, overrides: Sequence[str], *, host: str, port: int, name: str | None) -> int:
    """Returns the exit code."""
    try:
        longest = read_json(model, "config.json").get("max_position_embeddings") or ModelConfig().max_context
        words = [f"model.path={model}", f"model.max_context={min(longest, ModelConfig().max_context)}"]
        words.append("env.max_new_tokens=1")  # no environment plays here: its answers must not bound the context
        config = default_config([f"rollout.host={host}", f"rollout.port={port}", *words, *overrides])
        check_read(overrides)
    except ModelError as error:
        return refuse(f"{error}{hint(model)}", 1)
    except ConfigError as error:
        return refuse(error, 2)
    from penstock.processes.alone import CannotListen
    from penstock.processes.alone import serve as serve_alone
    from penstock.rollout.failures import EngineDead

    try:
        serve_alone(config, model, model_name=name or str(model))
    except (CannotListen, EngineDead, ModelError, ValueError) as error:
        return refuse(error, 1)
    except OSError as error:
        return refuse(f"cannot read the model in {model}: {error}", 1)
    return 0


def check_read(overrides: Sequence[str]) -> None:
    """Raises `ConfigError` for a setting that would change nothing."""
    for key in (override.partition("=")[0] for override in overrides):
        if key not in READ:
            raise ConfigError(f"penstock serve does not read {key}: it reads {', '.join(READ)}")


def hint(directory: Path) -> str:
    """Where there is a model, for somebody who named a run, or what a run makes."""
    if str(directory) == "tiny":
        return "; tiny is made by a run: serve one of its checkpoints"
    checkpoints = [path for path in (directory / "checkpoints").glob("step_*") if path.name[5:].isdigit()]
    newest = max(checkpoints, key=lambda path: int(path.name[5:]), default=None)
    return "" if newest is None else f"; did you mean {newest}?"
