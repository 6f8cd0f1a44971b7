"""The whole configuration tree: frozen pydantic models, unknown keys fail, importable without torch."""

from penstock.config.errors import ConfigError
from penstock.config.load import load_config, parse_overrides
from penstock.config.schema import (
    Config,
    DataConfig,
    EnvConfig,
    ModelConfig,
    ObserveConfig,
    RolloutConfig,
    SchedulerConfig,
    SupervisorConfig,
    TinyModelConfig,
    TrainerConfig,
    TriggerConfig,
    WarmStartConfig,
)

__all__ = [
    "Config",
    "ConfigError",
    "DataConfig",
    "EnvConfig",
    "ModelConfig",
    "ObserveConfig",
    "RolloutConfig",
    "SchedulerConfig",
    "SupervisorConfig",
    "TinyModelConfig",
    "TrainerConfig",
    "TriggerConfig",
    "WarmStartConfig",
    "load_config",
    "parse_overrides",
]
