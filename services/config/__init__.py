"""Configuration: the settings of a run as strict models, read from YAML, printed with comments, documented.

from services.config import MAACConfig, load_config

config = load_config("run.yaml", ["args.discount=0.9"])
"""

from services.config.algorithm import ActorCriticConfig, IACConfig, MAACConfig
from services.config.base import ConfigError
from services.config.common import CommonRun, WandbConfig
from services.config.load import explain, load_config, parse_config
from services.config.models import Dtype, EngineConfig, LearnerConfig, LoraConfig, ModelOptions
from services.config.placement import PlacementConfig, Strategy, TeamPlacementConfig
from services.config.registry import ALGORITHMS
from services.config.render import commented_config, config_reference, dump_config
from services.config.run import DataConfig, RunConfig
from services.config.smarl import EnvironmentConfig, SMARLConfig, SMARLRunConfig, WorkersConfig

__all__ = [
    "ALGORITHMS",
    "ActorCriticConfig",
    "CommonRun",
    "ConfigError",
    "DataConfig",
    "Dtype",
    "EngineConfig",
    "EnvironmentConfig",
    "IACConfig",
    "LearnerConfig",
    "LoraConfig",
    "MAACConfig",
    "ModelOptions",
    "PlacementConfig",
    "RunConfig",
    "SMARLConfig",
    "SMARLRunConfig",
    "Strategy",
    "TeamPlacementConfig",
    "WandbConfig",
    "WorkersConfig",
    "commented_config",
    "config_reference",
    "dump_config",
    "explain",
    "load_config",
    "parse_config",
]
