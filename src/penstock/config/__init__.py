"""The whole configuration tree, as frozen pydantic models. An unknown key is an error. The package imports without
torch."""

from penstock.config.environments import DataConfig, EnvConfig, EnvironmentConfig, Environments, TagConfig
from penstock.config.invalid_settings import ConfigError
from penstock.config.policy import PolicyConfig
from penstock.config.run_settings import Config, ModelConfig, SupervisorConfig, TinyModelConfig
from penstock.config.scheduling import (
    DispatchConfig,
    EarlyStopConfig,
    GroupFilterConfig,
    LengthConfig,
    SchedulerConfig,
    TriggerConfig,
)
from penstock.config.simulated_cluster import EngineModelConfig, SimulatorConfig, TrainerModelConfig, WorkloadConfig
from penstock.config.trainer_settings import (
    AdvantagesConfig,
    CanaryConfig,
    DistributedConfig,
    LoraConfig,
    MasteredConfig,
    ObjectiveConfig,
    TrainerConfig,
)
from penstock.config.trajectory_dump import Column, DumpConfig
from penstock.config.yaml_file import default_config, load_config, parse_overrides

__all__ = ["DataConfig", "EnvConfig", "EnvironmentConfig", "Environments", "TagConfig"]
__all__ += ["Config", "ConfigError", "ModelConfig", "PolicyConfig", "SupervisorConfig", "TinyModelConfig"]
__all__ += [
    "DispatchConfig",
    "EarlyStopConfig",
    "GroupFilterConfig",
    "LengthConfig",
    "SchedulerConfig",
    "TriggerConfig",
]
__all__ += ["EngineModelConfig", "SimulatorConfig", "TrainerModelConfig", "WorkloadConfig"]
__all__ += ["AdvantagesConfig", "CanaryConfig", "DistributedConfig", "LoraConfig", "MasteredConfig", "ObjectiveConfig"]
__all__ += ["TrainerConfig"]
__all__ += ["Column", "DumpConfig", "default_config", "load_config", "parse_overrides"]
