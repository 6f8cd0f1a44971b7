"""The settings that a run may change by itself, by their short names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel

from penstock.config.run_settings import Config
from penstock.config.scheduling import Tunable

PATHS: Mapping[str, str] = {
    "dispatch": "scheduler.dispatch.policy",
    "look_ahead": "scheduler.dispatch.look_ahead",
    "entropy_gain": "scheduler.dispatch.entropy_gain",
    "max_running": "scheduler.max_running",
    "min_samples": "scheduler.trigger.min_samples",
    "max_wait": "scheduler.trigger.max_wait",
    "segment_length": "scheduler.segment_length",
    "redundancy": "env.redundancy",
    "max_staleness": "scheduler.max_staleness",
}
"""Short name -> name in the configuration."""
NAMES: tuple[Tunable, ...] = get_args(Tunable)

Settings = Mapping[str, Any]
"""Values by short name."""


def movable(config: Config) -> tuple[str, ...]:
    """Return the settings that may change by themselves in this run."""
    names = config.scheduler.tuning.may or NAMES
    return tuple(name for name in names if config.scheduler.why_fixed(name) is None)


def settings_of(config: Config) -> dict[str, Any]:
    """Return the values of all such settings, with the values that follow from others where they are not set."""
    found: dict[str, Any] = {}
    for name, path in PATHS.items():
        value: Any = config
        for part in path.split("."):
            value = getattr(value, part)
        found[name] = value
    return found | {
        "look_ahead": config.look_ahead,
        "max_running": config.max_running,
        "max_wait": config.scheduler.trigger.wait,
    }


def with_settings(config: Config, settings: Settings) -> Config:
    """Return the configuration with these settings. It does not check them again."""
    for name, value in settings.items():
        config = _replaced(config, PATHS[name].split("."), value)
    return config


def _replaced(section: Any, path: list[str], value: Any) -> Any:
    assert isinstance(section, BaseModel)
    first, *rest = path
    return section.model_copy(update={first: _replaced(getattr(section, first), rest, value) if rest else value})
