"""The whole configuration tree, as frozen pydantic models. An unknown key is an error. The package imports without
torch."""

from penstock.config.environments import DataConfig as DataConfig
from penstock.config.environments import EnvConfig as EnvConfig
from penstock.config.environments import EnvironmentConfig as EnvironmentConfig
from penstock.config.environments import Environments as Environments
from penstock.config.environments import TagConfig as TagConfig
from penstock.config.invalid_settings import ConfigError as ConfigError
from penstock.config.run_settings import Config as Config
from penstock.config.run_settings import ModelConfig as ModelConfig
from penstock.config.run_settings import SupervisorConfig as SupervisorConfig
from penstock.config.run_settings import TinyModelConfig as TinyModelConfig
from penstock.config.scheduling import DispatchConfig as DispatchConfig
from penstock.config.scheduling import GroupFilterConfig as GroupFilterConfig
from penstock.config.scheduling import LengthConfig as LengthConfig
from penstock.config.scheduling import SchedulerConfig as SchedulerConfig
from penstock.config.scheduling import TriggerConfig as TriggerConfig
from penstock.config.simulated_cluster import EngineModelConfig as EngineModelConfig
from penstock.config.simulated_cluster import SimulatorConfig as SimulatorConfig
from penstock.config.simulated_cluster import TrainerModelConfig as TrainerModelConfig
from penstock.config.simulated_cluster import WorkloadConfig as WorkloadConfig
from penstock.config.trainer_settings import CanaryConfig as CanaryConfig
from penstock.config.trainer_settings import CriticConfig as CriticConfig
from penstock.config.trainer_settings import LoraConfig as LoraConfig
from penstock.config.trainer_settings import MasteredConfig as MasteredConfig
from penstock.config.trainer_settings import ObjectiveConfig as ObjectiveConfig
from penstock.config.trainer_settings import TrainerConfig as TrainerConfig
from penstock.config.trajectory_dump import Column as Column
from penstock.config.trajectory_dump import DumpConfig as DumpConfig
from penstock.config.yaml_file import default_config as default_config
from penstock.config.yaml_file import load_config as load_config
from penstock.config.yaml_file import parse_overrides as parse_overrides
