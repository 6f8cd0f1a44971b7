"""Secrets in settings. They come from the environment only: others read the files of a run and the process list.

A literal secret in a file or on the command line is refused. A value in `options` and `reward_options` may name a
variable, `${NAME}`: the run's files hold the name, and the environment worker looks up the value.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from penstock.config.invalid_settings import ConfigError
from penstock.redaction import VARIABLE, redacted

VARIABLES = {"rollout.api_key": "PENSTOCK_API_KEY", "rollout.admin_api_key": "PENSTOCK_ADMIN_API_KEY"}
"""Settings that are secrets, and that no file of a run ever holds: setting -> the environment variable that gives it if
the user's file does not."""


def check_no_literal_secrets(tree: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for the first literal secret among the settings. The message does not show it."""
    for key in _literals(tree, redacted(tree), redacted(tree, keep_references=False)):
        where = "the files of the run and the process list would show it"
        raise ConfigError(f"{key} holds a secret, and {where}: {_remedy(key)}")


def resolved(options: Mapping[str, Any], key: str) -> dict[str, Any]:
    """Return options with the values of the variables that they name. `key`: the setting that holds the options. Raises
    `ConfigError` for a variable that is not set."""
    return {name: _resolved(value, f"{key}.{name}") for name, value in options.items()}


def _resolved(value: Any, key: str) -> Any:
    if isinstance(value, Mapping):
        return resolved(value, key)
    if isinstance(value, list):
        return [_resolved(each, key) for each in value]
    variable = VARIABLE.fullmatch(value) if isinstance(value, str) else None
    if variable is None:
        return value
    if variable[1] not in os.environ:
        raise ConfigError(f"{key} names the environment variable {variable[1]}, which is not set")
    return os.environ[variable[1]]


def _literals(given: Any, shown: Any, strictly: Any, key: str = "") -> Iterator[str]:
    """Yield the settings that hold a literal secret, or a reference to one where no reference is looked up. `shown`:
    the same without literal secrets; `strictly`: also without references."""
    if isinstance(given, Mapping):
        for part, each in given.items():
            where = f"{key}.{part}" if key else str(part)
            if where not in VARIABLES:
                yield from _literals(each, shown[part], strictly[part], where)
    elif given not in ([shown] if "options." in key else [strictly]):  # `in` also finds NaN, which is unlike itself
        yield key


def _remedy(key: str) -> str:
    if "options." in key:
        return f"set an environment variable, and write its name: {key.rpartition('.')[2]}: ${{NAME}}"
    if key == "rollout.args":
        return "give it to the engine through the engine's own environment variable, such as VLLM_API_KEY or HF_TOKEN"
    if key == "rollout.urls":
        return "set the environment variable PENSTOCK_API_KEY, and give the address alone"
    if key == "observe.opentelemetry":
        return "set the environment variable OTEL_EXPORTER_OTLP_HEADERS, and give the address alone"
    return "leave it out, and set the environment variable of the client that needs it, such as AWS_SECRET_ACCESS_KEY"
