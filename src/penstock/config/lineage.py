"""Settings that stay fixed for the whole life of a run, because its weights and its pool depend on them.

All other settings (training length, speed, number of servers and workers, paths, monitoring) may change whenever a run
is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.config.invalid_settings import ConfigError
from penstock.config.run_settings import Config
from penstock.redaction import redacted

FIXED = (
    *("pipeline", "seed", "run_id", "model", "policy", "data", "env"),
    *("validation.mixture", "validation.tasks", "scheduler.mode", "dump.columns"),
    *("trainer.objective", "trainer.critic", "trainer.lora"),
)
FREE = (
    *("model.device", "policy.api_key_variable", "policy.timeout_s", "policy.max_retries"),
    *("env.workers", "env.reward_workers", "env.episode_timeout_s", "env.max_attempts"),
)
"""Settings within the fixed sections that may change."""
FREE_OF_EACH = ("turn_timeout_s", "reward_timeout_s")
"""Settings of `env`, and of every entry of a mixture, that may change."""


def lineage(config: Config) -> dict[str, Any]:
    """Return the settings that must not change, as plain values by dotted name."""
    settings = _flat(redacted(config.model_dump(mode="json")))
    keys = {"env", *config.environments.by_key}
    free = (*FREE, *(f"{key}.{name}" for key in keys for name in FREE_OF_EACH))
    return {name: value for name, value in settings.items() if _is_in(name, FIXED) and not _is_in(name, free)}


def check_lineage(begun_with: Mapping[str, Any], config: Config, *, before: Config) -> None:
    """Raise `ConfigError` naming every fixed setting of `config` that differs from those the run was `begun_with`.
    `before`: the run's configuration so far; it has the defaults of settings that an earlier release did not know."""
    changed = _differences(lineage(before) | dict(begun_with), lineage(config))
    if changed:
        lines = [f"{name} was {old!r} and cannot become {new!r}" for name, (old, new) in changed.items()]
        lines.append("the data and weights of a run depend on these settings: resume it without this, or begin another")
        raise ConfigError("\n".join(lines))


def changes(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ, by dotted name: (before, after)."""
    return _differences(_flat(redacted(before.model_dump(mode="json"))), _flat(redacted(after.model_dump(mode="json"))))


def _differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    pairs = {name: (old.get(name), new.get(name)) for name in sorted(old.keys() | new.keys())}
    return {name: (before, after) for name, (before, after) in pairs.items() if before != after}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found


def _is_in(name: str, sections: tuple[str, ...]) -> bool:
    return any(name == section or name.startswith(f"{section}.") for section in sections)
