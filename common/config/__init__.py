"""The configuration tree: one typed, validated description of a run.

A run is a preset (YAML) plus overrides ``a.b=c``. Unknown keys and wrong types are refused with the
nearest valid key named. The resolved tree is saved in the run's folder, and a resumed run may change
only what :data:`CHANGEABLE` lists.

Each section has its file; :mod:`.tree` joins them, :mod:`.checks.choices` refuses what can't work,
:mod:`.reading.text` is its YAML, :mod:`.reading.loading` makes a config of trees and overrides, and
:mod:`.reading.resuming` compares two of them.
"""

from ..objectives import ObjectiveConfig
from .data import DataConfig, EvalSetConfig, PairsConfig, SourceConfig
from .environments import (
    AgentEnvironment,
    AppWorldEnvironment,
    EnvironmentsConfig,
    TextEnvironment,
    ToolsEnvironment,
    VerifiersEnvironment,
)
from .evaluate import EvaluateConfig
from .expert import ExpertConfig
from .launch import LaunchConfig
from .learner import (
    CriticConfig,
    CriticOptimizerConfig,
    LearnerConfig,
    LoraConfig,
    OptimizerConfig,
    RatioCheckConfig,
)
from .log import LogConfig
from .model import ModelConfig
from .reading.loading import (
    build,
    of_kinds,
    parse_override,
    read_config,
    read_yaml,
    switched_off_keys,
    to_yaml,
    unread_keys,
    valid_keys,
    with_overrides,
)
from .reading.of_set import of_set
from .reading.resuming import CHANGEABLE, differences, frozen_differences, leaves, reward_digest
from .reading.text import parse_value, parse_yaml, yaml_text
from .replay import ReplayConfig
from .reward import ComponentConfig, RewardConfig
from .rollout import (
    ENGINES,
    VLLM_FIXED,
    VLLM_RANKS,
    VLLM_SETTINGS,
    RolloutConfig,
    VllmConfig,
)
from .run import RunConfig
from .section import Section
from .tree import DETERMINISTIC, Config
from .weights import WeightsConfig

__all__ = [
    "Config",
    "Section",
    "RunConfig",
    "ModelConfig",
    "DataConfig",
    "PairsConfig",
    "SourceConfig",
    "EvalSetConfig",
    "ExpertConfig",
    "RolloutConfig",
    "VllmConfig",
    "ENGINES",
    "VLLM_SETTINGS",
    "VLLM_FIXED",
    "VLLM_RANKS",
    "RewardConfig",
    "ComponentConfig",
    "ReplayConfig",
    "LearnerConfig",
    "LoraConfig",
    "ObjectiveConfig",
    "OptimizerConfig",
    "CriticConfig",
    "CriticOptimizerConfig",
    "RatioCheckConfig",
    "WeightsConfig",
    "AgentEnvironment",
    "AppWorldEnvironment",
    "EnvironmentsConfig",
    "TextEnvironment",
    "ToolsEnvironment",
    "VerifiersEnvironment",
    "EvaluateConfig",
    "of_set",
    "LaunchConfig",
    "LogConfig",
    "DETERMINISTIC",
    "CHANGEABLE",
    "build",
    "unread_keys",
    "switched_off_keys",
    "with_overrides",
    "of_kinds",
    "parse_override",
    "parse_value",
    "parse_yaml",
    "read_yaml",
    "read_config",
    "to_yaml",
    "yaml_text",
    "valid_keys",
    "leaves",
    "differences",
    "frozen_differences",
    "reward_digest",
]
