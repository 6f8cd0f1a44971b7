"""The whole configuration tree: frozen pydantic models, unknown keys fail, importable without torch."""

from penstock.config.dump import Column, DumpConfig, SynthesisConfig
from penstock.config.environments import (
    DataConfig,
    EnvConfig,
    EnvironmentConfig,
    Environments,
    MixedConfig,
    TagConfig,
    ValidationConfig,
)
from penstock.config.errors import ConfigError
from penstock.config.load import default_config, load_config, parse_overrides
from penstock.config.objective import (
    CanaryConfig,
    CriticConfig,
    DistributedConfig,
    LoraConfig,
    MasteredConfig,
    ObjectiveConfig,
)
from penstock.config.scheduling import (
    DispatchConfig,
    FeedbackConfig,
    GroupFilterConfig,
    LengthConfig,
    SchedulerConfig,
    TriggerConfig,
)
from penstock.config.schema import (
    Config,
    ModelConfig,
    ObserveConfig,
    RolloutConfig,
    SupervisorConfig,
    TinyModelConfig,
    TrainerConfig,
    WarmStartConfig,
)
from penstock.config.simulation import (
    EngineModelConfig,
    SimulatorConfig,
    TrainerModelConfig,
    WorkloadConfig,
)

__all__ = [
    "CanaryConfig",
    "Column",
    "Config",
    "ConfigError",
    "CriticConfig",
    "DataConfig",
    "DispatchConfig",
    "DistributedConfig",
    "DumpConfig",
    "EngineModelConfig",
    "EnvConfig",
    "EnvironmentConfig",
    "Environments",
    "FeedbackConfig",
    "GroupFilterConfig",
    "LengthConfig",
    "LoraConfig",
    "MasteredConfig",
    "MixedConfig",
    "ModelConfig",
    "ObjectiveConfig",
    "ObserveConfig",
    "RolloutConfig",
    "SchedulerConfig",
    "SimulatorConfig",
    "SupervisorConfig",
    "SynthesisConfig",
    "TagConfig",
    "TinyModelConfig",
    "TrainerConfig",
    "TrainerModelConfig",
    "TriggerConfig",
    "ValidationConfig",
    "WarmStartConfig",
    "WorkloadConfig",
    "default_config",
    "load_config",
    "parse_overrides",
]
