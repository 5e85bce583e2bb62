"""The keys of DeepSpeed that the config knows are DeepSpeed's own, and what a user sets reaches every engine."""

from __future__ import annotations

import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tandem.common.config.checks import deepspeed as known
from tandem.learner.engine.critic import CriticEngine
from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine

pytestmark = pytest.mark.usefixtures("group")


def test_every_field_of_zero_is_known() -> None:
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.runtime.zero.offload_config import (
        DeepSpeedZeroOffloadOptimizerConfig,
        DeepSpeedZeroOffloadParamConfig,
    )

    zero = known.TOP["zero_optimization"]
    for model, keys, prefix in (
        (DeepSpeedZeroConfig, zero, "zero_optimization"),
        (DeepSpeedZeroOffloadOptimizerConfig, zero["offload_optimizer"], "offload_optimizer"),
        (DeepSpeedZeroOffloadParamConfig, zero["offload_param"], "offload_param"),
    ):
        fields = {info.alias or name for name, info in model.model_fields.items()}
        owned = {key for key in fields if any(f"{prefix}.{key}" in one for one in known.OWNED)}
        assert keys.keys() <= fields
        assert fields - keys.keys() - owned <= known.ELSEWHERE.keys()


def test_every_key_at_the_top_is_in_deepspeeds_source() -> None:
    import deepspeed

    folder = Path(deepspeed.__file__).parent
    files = [
        *folder.glob("*/*config*.py"),
        *folder.glob("*/*constants.py"),
        *folder.glob("*/*/*config*.py"),
    ]
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    source = text + "\n".join(
        file.read_text(encoding="utf-8") for file in folder.glob("*/*/constants.py")
    )
    top = {*known.TOP, *(key for key in known.OWNED if "." not in key)}
    missing = [key for key in top if not re.search(rf"""["']{key}["']""", source)]
    assert not missing


def test_a_users_settings_reach_the_policys_engine_and_the_critics(made_up: ModuleType) -> None:
    config = made_up.config_of(
        learner={
            "objective": {"name": "ppo"},
            "zero_stage": 3,
            "deepspeed": {"zero_optimization": {"stage3_prefetch_bucket_size": 2000}},
        }
    )
    cpu = torch.device("cpu")
    critic = CriticEngine(made_up.tiny_model(seed=7), config, cpu)
    engine = DeepSpeedEngine(made_up.tiny_model(), config, cpu, critic)
    for one in (engine._engine, critic._engine):
        assert one._config.zero_config.prefetch_bucket_size == 2000
        assert one._config.zero_config.overlap_comm is False
