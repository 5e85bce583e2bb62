"""A user's settings of DeepSpeed: what is laid over the learner's, and what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.common.config import (
    Config,
    build,
    differences,
    frozen_differences,
    read_config,
    to_yaml,
)
from tandem.common.config.checks.deepspeed import settings_of, zero_setting
from tandem.common.errors import ConfigError

TREE = {"run": {"steps": 1}, "data": {"train": [{"path": "unused.parquet", "name": "a"}]}}


def config_of(given: Any, *overrides: str) -> Config:
    return build({**TREE, "learner": {"deepspeed": given}}, overrides)


def laid(config: Config, stage: int = 1) -> dict[str, Any]:
    return settings_of(config, stage=stage, trained=1000, clip=1.0, pinned=False)


def test_settings_are_laid_over_the_learners_own_key_by_key() -> None:
    given = {"zero_optimization": {"overlap_comm": True, "allgather_bucket_size": 2e8}}
    stage = "learner.zero_stage=2"
    plain, changed = laid(config_of(None, stage), 2), laid(config_of(given, stage), 2)
    zero = plain["zero_optimization"] | given["zero_optimization"]
    assert zero["reduce_bucket_size"] == 1000
    assert changed == {**plain, "zero_optimization": zero}


def test_a_file_written_for_hugging_faces_trainer_takes_the_runs_values(tmp_path: Path) -> None:
    given = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "steps_per_print": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale": 0, "initial_scale_power": 16},
        "zero_optimization": {
            "stage": "auto",
            "overlap_comm": "auto",
            "reduce_bucket_size": "auto",
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
        },
    }
    file = tmp_path / "settings.json"
    file.write_text(json.dumps(given), encoding="utf-8")
    config = config_of(str(file), "learner.offload=optimizer")
    expected = laid(config_of(None, "learner.offload=optimizer"))
    expected["zero_optimization"]["offload_optimizer"]["pin_memory"] = True
    assert laid(config) == expected


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a typo": ({"gradient_cliping": 1}, r"gradient_cliping .*did you mean gradient_clipping\?"),
    "a typo inside": (
        {"zero_optimization": {"overlap_com": True}},
        r"zero_optimization.overlap_com .*did you mean zero_optimization.overlap_comm\?",
    ),
    "batch size": ({"train_batch_size": 64}, "train_batch_size=64 .*learner.micro_batch_tokens"),
    "micro-batch": ({"train_micro_batch_size_per_gpu": 2}, "learner.micro_batch_tokens"),
    "accumulation": ({"gradient_accumulation_steps": 8}, "learner.micro_batch_tokens"),
    "managed accumulation": ({"managed_gradient_accumulation": True}, "=true .* false: leave"),
    "clipping": ({"gradient_clipping": 0.5}, "=0.5 .* 1.0: .*set learner.optimizer.grad_clip"),
    "optimizer": ({"optimizer": {"type": "AdamW"}}, "optimizer can't .*learner.optimizer"),
    "scheduler": ({"scheduler": {"type": "WarmupLR"}}, "learner.optimizer.schedule"),
    "bf16": ({"bf16": {"enabled": True}}, "bf16.enabled=true .*set model.dtype"),
    "fp16": ({"fp16": {"enabled": True}}, "fp16.enabled=true .*set model.dtype"),
    "bf16 sums": ({"data_types": {"grad_accum_dtype": "bf16"}}, "summed in float32"),
    "stage": ({"zero_optimization": {"stage": 3}}, "stage=3 .* 1: .*set learner.zero_stage"),
    "offload": (
        {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}},
        'offload_optimizer.device="cpu" .*"none": .*set learner.offload',
    ),
    "wrong names": (
        {"zero_optimization": {"round_robin_gradients": True}},
        "=true .* false: .*under another's name",
    ),
    "disk": (
        {"zero_optimization": {"offload_param": {"nvme_path": "/x"}}},
        "nvme_path can't .*never on a disk",
    ),
    "no norm": ({"zero_optimization": {"compute_grad_norm": False}}, "train/grad_norm"),
    "overflow": ({"bf16": {"check_grad_overflow": False}}, "isn't finite is never made"),
    "elasticity": ({"elasticity": {}}, "elasticity can't .*removed"),
    "curriculum": ({"curriculum_learning": {}}, "removed"),
    "sparse": ({"sparse_gradients": True}, "removed"),
    "pipeline": ({"pipeline": {}}, "data-parallel"),
    "auto without a value": (
        {"zero_optimization": {"stage3_prefetch_bucket_size": "auto"}},
        'stage3_prefetch_bucket_size="auto" .*leave it out',
    ),
    "overlap": ({"zero_optimization": {"overlap_comm": True}}, "set learner.zero_stage=2"),
    "no boolean": ({"zero_optimization": {"overlap_comm": 1}}, "should be true or false"),
    "no number": ({"zero_optimization": {"reduce_bucket_size": True}}, "should be a number"),
    "no section": ({"zero_optimization": 2}, "should be an object"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_laid_over_is_refused_with_the_way_out(what: str) -> None:
    given, why = REFUSED[what]
    with pytest.raises(ConfigError, match=f"learner.deepspeed: .*{why}"):
        config_of(given)


def test_the_learners_own_values_may_be_there_too() -> None:
    given = {
        "train_batch_size": 2,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.7,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "round_robin_gradients": None,
        },
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
    }
    config = config_of(
        given,
        *("learner.ranks=2", "learner.optimizer.grad_clip=0.7", "learner.zero_stage=3"),
        *("learner.offload=parameters", "model.dtype=bfloat16"),
    )
    # The critic has another clip, and keeps it.
    assert (
        settings_of(config, stage=3, trained=1, clip=0.3, pinned=False)["gradient_clipping"] == 0.3
    )
    assert "train_batch_size" not in laid(config, 3)


def test_the_run_keeps_the_files_content(tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    file.write_text('{"zero_optimization": {"overlap_comm": true}}', encoding="utf-8")
    also = ("learner.zero_stage=2", "learner.deepspeed.memory_breakdown=true")
    config = config_of(str(file), *also)
    kept = to_yaml(config)
    file.unlink()
    assert read_config(kept) == config
    assert config.learner.deepspeed == {
        "zero_optimization": {"overlap_comm": True},
        "memory_breakdown": True,
    }
    file.write_text('{"zero_optimization": {"overlap_comm": false}}', encoding="utf-8")
    other = config_of(str(file), *also)
    # A run may go on with others: where its stage is another one, it has to.
    assert list(differences(config, other)) == ["learner.deepspeed.zero_optimization.overlap_comm"]
    assert list(differences(config, config_of(None, also[0])))
    assert not frozen_differences(config, other) | frozen_differences(
        config, config_of(None, also[0])
    )


@pytest.mark.parametrize("given", [3, True, [{}]])
def test_what_is_neither_a_file_nor_settings_is_refused(given: Any) -> None:
    with pytest.raises(ConfigError, match=r"learner\.deepspeed=.*: name a JSON file, or"):
        config_of(given)


@pytest.mark.parametrize("text", ["{", "[1]", None])
def test_a_file_that_cannot_be_read_is_refused(text: str | None, tmp_path: Path) -> None:
    file = tmp_path / "settings.json"
    if text is not None:
        file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"learner\.deepspeed.*settings\.json"):
        config_of(str(file))
    with pytest.raises(ConfigError, match=r"learner\.deepspeed.*settings\.json"):
        config_of(str(file), "learner.deepspeed.memory_breakdown=true")


def test_the_plan_reads_the_users_numbers() -> None:
    given = {"zero_optimization": {"reduce_bucket_size": 1e6}}
    assert zero_setting(config_of(None), "reduce_bucket_size", 7) == 7
    assert zero_setting(config_of(given), "reduce_bucket_size", 7) == 10**6
