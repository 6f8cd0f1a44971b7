"""Which settings make a run what it is: what it has learned and what lies in its pool rest on them.

All others (how long to train, how fast, with how many servers and workers, where and how it is watched) may change
whenever a run is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.config.errors import ConfigError
from penstock.config.schema import Config

FIXED = (
    "pipeline",
    "seed",
    "run_id",
    "model",
    "data",
    "env",
    "validation.mixture",
    "validation.tasks",
    "scheduler.mode",
    "trainer.objective",
    "trainer.critic",
    "trainer.lora",
    "dump.columns",
)
FREE = (
    "model.device",
    "env.workers",
    "env.reward_workers",
    "env.episode_timeout_s",
    "env.max_attempts",
)
"""Of the sections above."""
FREE_OF_EACH = ("turn_timeout_s", "reward_timeout_s")
"""Of `env`, and of every entry of a mixture."""


def lineage(config: Config) -> dict[str, Any]:
    """The settings that must not change, by their dotted names; plain values."""
    settings = _flat(config.model_dump(mode="json"))
    keys = {"env", *config.environments.by_key}
    free = (*FREE, *(f"{key}.{name}" for key in keys for name in FREE_OF_EACH))
    return {name: value for name, value in settings.items() if _is_in(name, FIXED) and not _is_in(name, free)}


def check_lineage(before: Mapping[str, Any], config: Config) -> None:
    """Raises `ConfigError` naming every setting that differs from what a run was begun with."""
    after = lineage(config)
    changed = [name for name in sorted(before.keys() | after.keys()) if before.get(name) != after.get(name)]
    if changed:
        lines = [f"{name} was {before.get(name)!r} and cannot become {after.get(name)!r}" for name in changed]
        lines.append("a run keeps what its data and weights rest on: resume it without this, or begin another")
        raise ConfigError("\n".join(lines))


def changes(before: Config, after: Config) -> dict[str, tuple[Any, Any]]:
    """Settings that differ, by their dotted names: (before, after)."""
    old, new = _flat(before.model_dump(mode="json")), _flat(after.model_dump(mode="json"))
    return {
        name: (old.get(name), new.get(name))
        for name in sorted(old.keys() | new.keys())
        if old.get(name) != new.get(name)
    }


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        found |= _flat(value, f"{name}.") if isinstance(value, dict) else {name: value}
    return found


def _is_in(name: str, sections: tuple[str, ...]) -> bool:
    return any(name == section or name.startswith(f"{section}.") for section in sections)
