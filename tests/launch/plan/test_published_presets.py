"""Presets with published settings, held against their published tables.

The tables are written by hand from papers, hand-outs and configs, in their own terms, and not from the YAML. Where
a preset differs, ``DEVIATIONS`` lists what it has instead: a table that agrees with everything else says so.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tandem.common.config import Config, of_set
from tandem.common.config.checks.choices import why_not_started
from tandem.common.config.groups import rows_of_group
from tandem.common.prompts import render_text
from tandem.launch.miniature import tokenizer as miniature
from tandem.launch.run.opened.presets import FOLDER, load, names
from tandem.launch.run.several.placing import placed
from tandem.replay.forms import DataRow, read_rows

Table = dict[str, Any]


def settings(config: Config) -> Table:
    """What a config has, in the terms of published tables."""
    optimizer, objective = config.learner.optimizer, config.learner.objective
    offline = config.learner.source == "offline"
    warmup = optimizer.warmup_share
    lora, critic = config.learner.lora, config.learner.critic
    updates = config.learner.minibatches * config.learner.update_epochs
    return {
        "model": config.model.path,
        "dtype": config.model.dtype,
        "seed": config.run.seed,
        "steps": config.run.steps,
        "epochs": config.run.passes,
        "stored": offline,
        "optimizer": optimizer.name,
        "lr": optimizer.lr,
        "betas": optimizer.betas,
        "eps": optimizer.eps,
        "weight_decay": optimizer.weight_decay,
        "grad_clip": optimizer.grad_clip,
        "schedule": optimizer.schedule,
        "final_lr_share": optimizer.final_lr_share,
        "warmup": optimizer.warmup_steps if warmup is None else warmup,
        # A batch is what is generated, or read, for a step; an update's rows are its share.
        "problems": config.replay.groups_per_step,
        "group": config.rollout.group_size,
        "batch": config.replay.groups_per_step * rows_of_group(config),
        "updates": updates,
        # TRL's max_steps counts updates.
        "max_steps": None if config.run.steps is None else config.run.steps * updates,
        "lora": None if lora is None else (lora.rank, lora.alpha, lora.dropout),
        "lora_targets": None if lora is None else lora.targets,
        "discount": getattr(objective, "discount", None),
        "gae_lambda": getattr(objective, "gae_lambda", None),
        "value_clip": getattr(objective, "value_clip", None),
        "value_coefficient": getattr(objective, "value_coefficient", None),
        "critic_lr": None if critic is None else critic.optimizer.lr,
        "critic_eps": None if critic is None else critic.optimizer.eps,
        "critic_weight_decay": None if critic is None else critic.optimizer.weight_decay,
        "critic_grad_clip": None if critic is None else critic.optimizer.grad_clip,
        "kl_reward": getattr(objective, "kl_reward_coefficient", 0.0),
        "stale": config.replay.max_staleness,
        "traces": config.expert.per_group,
        "temperature": config.rollout.temperature,
        "prompt_tokens": config.data.max_prompt_tokens,
        "tokens": config.rollout.max_new_tokens,
        "block": config.data.pack_tokens,
        "template": config.data.template,
        "loss": objective.name,
        "advantage": objective.baseline,
        "aggregation": getattr(objective, "aggregation", None),
        "clip": (getattr(objective, "clip_low", None), getattr(objective, "clip_high", None)),
        "dual_clip": getattr(objective, "dual_clip", None),
        "kl": getattr(objective, "kl_coefficient", 0.0),
        "entropy": getattr(objective, "entropy_coefficient", 0.0),
        "beta": getattr(objective, "beta", None),
        "sft_coefficient": getattr(objective, "sft_coefficient", None),
        "rewards": [c.name for c in config.reward.components if c.weight],
        "grading": config.reward.mode,
        "train_limits": [source.limit for source in config.data.train],
        "target_tokens": [source.max_target_tokens for source in config.data.train],
        "accept": config.expert.accept,
        "correct_only": [source.correct_only for source in config.data.train],
        "evaluate_every": config.evaluate.every,
        "evaluate_limit": config.evaluate.limit,
        "evaluate_limits": [held.limit for held in config.data.evaluate],
        "heldout_pairs": config.data.heldout_pairs,
        "evaluate_temperature": config.evaluate.temperature,
        "evaluate_top_p": config.evaluate.top_p,
        "save_every": config.learner.checkpoint_every,
    }


EVERY = ("correct", "wrong", "unparsable", "timeout", "memory")
"""Verdicts of traces where all rows are trained on."""

# LUFFY, arXiv 2504.14945 and its scripts at 01f4ae0: common settings of the four modes.
LUFFY: Table = {
    "model": "Elliott/Qwen2.5-Math-7B-16k-think",
    "steps": 500,
    "problems": 128,
    "group": 8,
    "batch": 1024,
    "updates": 2,
    "stale": 0,
    "optimizer": "adamw",
    "lr": 1e-6,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.01,
    "grad_clip": 1.0,
    "schedule": "constant",
    "warmup": 0,
    "prompt_tokens": 1024,
    "tokens": 8192,
    "temperature": 1.0,
    "advantage": "group_mean",
    "aggregation": "constant",
    "kl": 0.0,
    "entropy": 0.001,
    "evaluate_every": 10,
    "evaluate_limit": None,
    "evaluate_temperature": 0.6,
    "save_every": 50,
}
# Gradients are 64 times smaller here, and entropies are summed over 7 micro-batches there.
SCALED: Table = {
    "eps": 1e-8 / 64,
    "grad_clip": 1 / 64,
    "entropy": 1.1e-4,
    "evaluate_limit": 100,
}

# github.com/jashvira/policy-gradient-experiments, branch math_posttrain.
UNIQUE: Table = {
    "model": "Qwen/Qwen2.5-Math-1.5B-Instruct",
    "stored": True,
    "loss": "sft",
    # The sum of a row's tokens.
    "aggregation": "constant",
    "eps": 1e-8,
    "seed": 42,
    "optimizer": "adamw",
    "lr": 5e-5,
    "betas": (0.9, 0.999),
    "weight_decay": 0.0,
    "grad_clip": 1.0,
    "schedule": "cosine",
    "final_lr_share": 0.0,
    "warmup": 0,
    "epochs": 20,
    "batch": 16 * 8,
    "tokens": 1024,
    "evaluate_temperature": 0.0,
    "accept": EVERY,
    "correct_only": [False],
}
GRPO_DEFAULT: Table = {
    "model": "Qwen/Qwen2.5-Math-1.5B",
    "seed": 42,
    "steps": 200,
    "batch": 256,
    "group": 16,
    "updates": 1,
    "stale": 0,
    "temperature": 1.0,
    "tokens": 512,
    "loss": "reinforce_baseline",
    "advantage": "group_mean_std",
    "aggregation": "sequence_mean",
    "kl": 0.0,
    "optimizer": "adamw",
    "lr": 2e-5,
    "betas": (0.9, 0.95),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "grad_clip": 1.0,
    # Its YAML's cosine is read by no code; the same in EI_SFT.
    "schedule": "constant",
    "warmup": 0,
    "template": "r1_zero",
    "grading": "r1_zero",
    "evaluate_every": 10,
    "evaluate_limit": 1024,
    "evaluate_temperature": 0.0,
    "save_every": 50,
}
GRPO_CLIP: Table = {
    **GRPO_DEFAULT,
    "steps": 50,
    "group": 8,
    "tokens": 1024,
    # 256 / 128 mini-batches x 3 epochs.
    "updates": 6,
    "loss": "grpo",
    "clip": (0.2, 0.2),
    "dual_clip": None,
    "aggregation": "constant",
    "lr": 1e-5,
    "evaluate_every": 5,
}
EI_SAMPLE: Table = {
    "model": "Qwen/Qwen2.5-Math-1.5B",
    "problems": 1024,
    "group": 8,
    "tokens": 1024,
    "temperature": 1.0,
    "evaluate_limit": 500,
    "evaluate_every": 10,
    "seed": 42,
    "steps": 1,
}
EI_SFT: Table = {
    "model": "Qwen/Qwen2.5-Math-1.5B",
    "seed": 42,
    "stored": True,
    "epochs": 2,
    "batch": 16 * 8,
    "tokens": 1024,
    "optimizer": "adamw",
    "lr": 5e-5,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "grad_clip": 1.0,
    "schedule": "constant",
    "warmup": 0,
    "loss": "sft",
    "aggregation": "constant",
    "correct_only": [True],
    "evaluate_limit": 500,
    "evaluate_every": 10,
}

# Stanford CS336, assignment 5.
CS336_2025: Table = {
    "model": "Qwen/Qwen2.5-Math-1.5B",
    "steps": 200,
    "lr": 1e-5,
    "optimizer": "adamw",
    "betas": (0.9, 0.95),
    "weight_decay": 0.0,
    "grad_clip": 1.0,
    "batch": 256,
    "group": 8,
    "updates": 1,
    "stale": 0,
    "temperature": 1.0,
    "tokens": 1024,
    "loss": "reinforce_baseline",
    "advantage": "group_mean_std",
    "aggregation": "sequence_mean",
    "template": "r1_zero",
}
CS336_2026: Table = {
    "model": "allenai/OLMo-2-0425-1B",
    "steps": 200,
    "lr": 1e-5,
    "batch": 256,
    "group": 8,
    "updates": 1,
    "tokens": 512,
    "evaluate_every": 10,
    "evaluate_limit": 1024,
    "evaluate_limits": [1024],
    "train_limits": [6400],
    "advantage": "group_mean_std",
    "aggregation": "sequence_mean",
    "loss": "reinforce_baseline",
}
OFF_POLICY: Table = {**CS336_2026, "updates": 4}
SUPPLEMENT_SFT: Table = {
    "model": "meta-llama/Meta-Llama-3-8B",
    "stored": True,
    "loss": "sft",
    "aggregation": "token_mean",
    "block": 512,
    "batch": 2 * 16,
    "lr": 2e-5,
    "schedule": "cosine",
    "warmup": 0.03,
    "epochs": 1,
    "template": "alpaca",
}
SUPPLEMENT_DPO: Table = {
    "stored": True,
    "loss": "dpo",
    "beta": 0.1,
    "optimizer": "rmsprop",
    "lr": 1e-6,
    "problems": 64,
    "epochs": 1,
    "block": None,
    "template": "alpaca",
    # 0.5% of the prompts, for "a small number of examples (e.g., 200)".
    "heldout_pairs": 0.005,
}

# github.com/donglinkang2021/cs336-assignment5-alignment, conf/.
OMR: Table = {
    "model": "Qwen/Qwen2.5-Math-1.5B",
    "dtype": "bfloat16",
    "stored": True,
    "loss": "sft",
    # Each micro-batch's sum over rows and tokens by its rows times its mean length.
    "aggregation": "token_mean",
    "epochs": 1,
    "lr": 5e-6,
    "eps": 1e-8,
    "weight_decay": 0.01,
    "grad_clip": 1.0,
    "warmup": 0.1,
    "schedule": "cosine",
    "seed": 42,
    "template": "r1_zero",
    "evaluate_limits": [100, 100, 100],
    "evaluate_every": 10,
    "save_every": 50,
    "evaluate_temperature": 0.6,
    "evaluate_top_p": 0.95,
    "batch": 16 * 4,
    "target_tokens": [2048],
    "accept": EVERY,
    "tokens": 4096,
}
# github.com/realwenlongwang/deepseek_r1_zero_reproduce, src/config/grpo_config.py, with TRL's defaults.
R1_ZERO: Table = {
    "model": "Qwen/Qwen2.5-0.5B-Instruct",
    "dtype": "bfloat16",
    "seed": 42,
    "epochs": 1,
    "lr": 5e-5,
    "warmup": 0.1,
    "weight_decay": 0.01,
    "betas": (0.9, 0.999),
    "schedule": "linear",
    "batch": 32,
    "updates": 2,
    "group": 8,
    "tokens": 512,
    "temperature": 1.0,
    "kl": 0.0,
    "loss": "dapo",
    "advantage": "group_mean_std",
    "aggregation": "token_mean",
    "clip": (0.2, 0.2),
    "rewards": [
        "accuracy",
        "format_tutorial",
        "reasoning_steps_tutorial",
        "cosine_tutorial",
        "repetition_tutorial",
    ],
    "save_every": 50,
}
TRL: Table = {
    "model": "Qwen/Qwen3-0.6B",
    "dtype": "bfloat16",
    "lr": 1e-6,
    "betas": (0.9, 0.999),
    "weight_decay": 0.0,
    "grad_clip": 1.0,
    "schedule": "linear",
    "warmup": 0,
    "group": 8,
    "tokens": 512,
    "temperature": 1.0,
    "kl": 0.0,
    "loss": "dapo",
    "advantage": "group_mean_std",
    "aggregation": "token_mean",
    "clip": (0.2, 0.2),
}
# github.com/fatu/finetune, finetune/grpo_math_trainer.py.
GRPO_MATH: Table = {
    **TRL,
    "lr": 1e-5,
    "epochs": 1,
    "group": 4,
    # TRL's 8 samples a device, 16 accumulations.
    "batch": 8 * 16,
    "prompt_tokens": 128,
    "tokens": 64,
    "rewards": ["accuracy", "format_tutorial"],
}

# The same repository's finetune/grpo_appworld.py.
APPWORLD: Table = {
    **TRL,
    "lr": 5e-7,
    "warmup": 0.1,
    "epochs": 1,
    "group": 2,
    # One sample a device, two accumulations.
    "batch": 2,
    "prompt_tokens": 2048,
    "tokens": 256,
    "temperature": 0.8,
    "lora": (16, 32.0, 0.05),
    "lora_targets": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "rewards": ["environment", "python_syntax", "mentions"],
}


# github.com/realwenlongwang/deepseek_r1_zero_reproduce, config.yaml.
COUNTDOWN: Table = {
    **R1_ZERO,
    "model": "Qwen/Qwen2.5-7B",
    "max_steps": 20_000,
    "epochs": None,
    # 16 samples a device, one accumulation, and TRL generates no more at a time.
    "batch": 16,
    "updates": 1,
    "lr": 1e-5,
    "prompt_tokens": 256,
    "tokens": 1024,
    "evaluate_limits": [128],
    "lora": (32, 32.0, 0.0),
    "lora_targets": (
        *("q_proj", "k_proj", "v_proj", "o_proj"),
        *("gate_proj", "up_proj", "down_proj"),
    ),
    "optimizer": "adamw_8bit",
    "grad_clip": 1.0,
    "rewards": ["format", "equation"],
}
# verl's ppo_trainer.yaml and examples/ppo_trainer/run_deepseek7b_llm.sh.
PPO_VERL: Table = {
    "model": "deepseek-ai/deepseek-llm-7b-chat",
    "loss": "ppo",
    "epochs": 15,
    "batch": 1024,
    "group": 1,
    "updates": 4,
    "prompt_tokens": 512,
    "tokens": 512,
    "temperature": 1.0,
    "optimizer": "adamw",
    "lr": 1e-6,
    "critic_lr": 1e-5,
    "betas": (0.9, 0.999),
    "weight_decay": 0.01,
    "grad_clip": 1.0,
    "schedule": "constant",
    "warmup": 0,
    "clip": (0.2, 0.2),
    "dual_clip": 3.0,
    "aggregation": "token_mean",
    "entropy": 0.0,
    "kl": 0.0,
    "kl_reward": 0.0,
    "discount": 1.0,
    "gae_lambda": 1.0,
    "value_clip": 0.5,
    "value_coefficient": 1.0,
}
# trl/experimental/ppo, PPOConfig and PPOTrainer, v1.0.0 to v1.9.0, with transformers' TrainingArguments.
PPO_TRL: Table = {
    "loss": "ppo",
    "updates": 4,
    "group": 1,
    "tokens": 53,
    "temperature": 0.7,
    "optimizer": "adamw",
    "lr": 3e-6,
    "critic_lr": 3e-6,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    # Nothing in trl/experimental/ppo clips gradients.
    "grad_clip": 0.0,
    "critic_grad_clip": 0.0,
    "schedule": "linear",
    "final_lr_share": 0.0,
    "warmup": 0,
    "clip": (0.2, 0.2),
    "dual_clip": None,
    "aggregation": "token_mean",
    "entropy": 0.0,
    "kl": 0.0,
    "kl_reward": 0.05,
    "discount": 1.0,
    "gae_lambda": 0.95,
    "value_clip": 0.2,
    "value_coefficient": 0.1,
}
# github.com/fatu/finetune, scripts/train/ppo_only.sh and the defaults of finetune/ppo_only.py.
PPO_ONLY: Table = {
    **PPO_TRL,
    "model": "EleutherAI/pythia-14m",
    "seed": 3,
    "steps": 32 // 4,
    "batch": 4,
    "lr": 3e-7,
    "critic_lr": 3e-7,
    # torch.optim.AdamW(params, lr=...), twice: the argument eps (1e-5) is used nowhere.
    "eps": 1e-8,
    "critic_eps": 1e-8,
    "weight_decay": 0.01,
    "critic_weight_decay": 0.01,
    # max_norm of get_train_ds_config, which both models get.
    "grad_clip": 1.0,
    "critic_grad_clip": 1.0,
    "prompt_tokens": 512,
}


def unique(count: int, **own: Any) -> Table:
    return {**UNIQUE, "train_limits": [count], **own}


PUBLISHED: dict[str, Table] = {
    "qwen2.5-math-7b-luffy-published": {
        **LUFFY,
        "loss": "luffy",
        "traces": 1,
        "clip": (None, None),
    },
    "qwen2.5-math-7b-on-policy-8gpu": {
        **LUFFY,
        "loss": "grpo",
        "traces": 0,
        "clip": (0.2, 0.2),
        "dual_clip": None,
    },
    "qwen2.5-math-7b-rl-sft-loss-8gpu": {
        **LUFFY,
        "loss": "rl_sft_loss",
        "traces": 1,
        "advantage": "own_mean",
        "clip": (None, None),
        "sft_coefficient": 1.0,
    },
    "qwen2.5-math-7b-sft-8gpu": {
        "model": "Elliott/Qwen2.5-Math-7B-16k-think",
        "stored": True,
        "loss": "sft",
        "batch": 64,
        "epochs": 3,
        "lr": 5e-5,
        "warmup": 0.1,
        # The command is openrlhf.cli.train_sft, whose defaults (OpenRLHF at 6d500d14) are the rest.
        "optimizer": "adamw",
        "betas": (0.9, 0.95),
        "eps": 1e-8,
        "weight_decay": 0.0,
        "grad_clip": 1.0,
        "schedule": "cosine",
        "final_lr_share": 0.1,
    },
    "qwen2.5-math-7b-sft-rl-8gpu": {
        **LUFFY,
        "model": "Elliott/Qwen2.5-Math-7B-SFT",
        "loss": "grpo",
        "traces": 0,
        "clip": (0.2, 0.2),
        "dual_clip": None,
    },
    "qwen2.5-math-1.5b-sft-128-1gpu": unique(128),
    "qwen2.5-math-1.5b-sft-256-1gpu": unique(256, batch=32 * 4),
    "qwen2.5-math-1.5b-sft-512-1gpu": unique(512),
    "qwen2.5-math-1.5b-sft-1024-1gpu": unique(1024, batch=48 * 4),
    "qwen2.5-math-1.5b-sft-all-1gpu": {**UNIQUE, "epochs": 10, "train_limits": [None]},
    "qwen2.5-math-1.5b-sft-correct-1gpu": {
        **UNIQUE,
        "epochs": 10,
        "accept": ("correct",),
        "correct_only": [True],
    },
    "qwen2.5-math-1.5b-grpo-default-2gpu": GRPO_DEFAULT,
    "qwen2.5-math-1.5b-grpo-clip-2gpu": GRPO_CLIP,
    "qwen2.5-math-1.5b-expert-iteration-sample-2gpu": EI_SAMPLE,
    "qwen2.5-math-1.5b-expert-iteration-sft-1gpu": EI_SFT,
    "qwen2.5-math-1.5b-cs336-grpo-2gpu": CS336_2025,
    "olmo2-1b-cs336-standard-2gpu": CS336_2026,
    "olmo2-1b-cs336-grpo-constant-2gpu": {**CS336_2026, "aggregation": "constant"},
    "olmo2-1b-cs336-dr-grpo-2gpu": {
        **CS336_2026,
        "advantage": "group_mean",
        "aggregation": "constant",
    },
    "olmo2-1b-cs336-rft-2gpu": {
        **CS336_2026,
        "loss": "reinforce",
        "advantage": "none",
        "aggregation": "constant",
    },
    "olmo2-1b-cs336-maxrl-2gpu": {
        **CS336_2026,
        "advantage": "max_rl",
        "aggregation": "constant",
    },
    "olmo2-1b-cs336-off-policy-naive-2gpu": OFF_POLICY,
    "olmo2-1b-cs336-off-policy-noclip-2gpu": {
        **OFF_POLICY,
        "loss": "grpo",
        "clip": (None, None),
        "dual_clip": None,
    },
    "olmo2-1b-cs336-off-policy-grpo-2gpu": {
        **OFF_POLICY,
        "loss": "grpo",
        "clip": (0.2, 0.2),
        "dual_clip": None,
    },
    "olmo2-1b-cs336-off-policy-gspo-2gpu": {
        **OFF_POLICY,
        "loss": "gspo",
        "clip": (3e-4, 4e-4),
        "dual_clip": None,
    },
    "olmo2-1b-cs336-off-policy-cispo-2gpu": {**OFF_POLICY, "loss": "cispo", "clip": (None, 4.0)},
    "llama3-8b-cs336-sft-4gpu": SUPPLEMENT_SFT,
    "llama3-8b-cs336-dpo-4gpu": SUPPLEMENT_DPO,
    "qwen2.5-math-1.5b-omr-2048-1gpu": OMR,
    "qwen2.5-math-1.5b-omr-4096-1gpu": {**OMR, "batch": 8 * 4, "target_tokens": [4096]},
    "qwen2.5-0.5b-r1-zero-1gpu": R1_ZERO,
    "qwen2.5-7b-countdown-lora-1gpu": COUNTDOWN,
    "qwen2.5-0.5b-ppo-verl-1gpu": PPO_VERL,
    "qwen2.5-0.5b-ppo-trl-1gpu": PPO_TRL,
    "pythia-14m-ppo-only-1gpu": PPO_ONLY,
    "qwen3-0.6b-grpo-gsm8k-1gpu": TRL,
    "qwen3-0.6b-grpo-math-1gpu": GRPO_MATH,
    "qwen3-0.6b-appworld-1gpu": APPWORLD,
}

NOT_DURING: Table = {"evaluate_every": 0}
WITHOUT_WEIGHTS: Table = {"loss": "cispo"}
VALIDATION: Table = {"evaluate_limit": 500}


def over(longest: int) -> Table:
    """Losses that are sums over a row's tokens there are divided by the longest response here."""
    return {
        "grad_clip": pytest.approx(1 / longest, rel=1e-6),
        "eps": pytest.approx(1e-8 / longest, rel=1e-6),
    }


DEVIATIONS: dict[str, Table] = {
    "qwen2.5-math-7b-luffy-published": SCALED,
    "qwen2.5-math-7b-on-policy-8gpu": SCALED,
    "qwen2.5-math-7b-rl-sft-loss-8gpu": {**SCALED, "sft_coefficient": 7 / 64},
    "qwen2.5-math-7b-sft-rl-8gpu": SCALED,
    **{f"qwen2.5-math-1.5b-sft-{which}-1gpu": over(1024) for which in (128, 256, 512, 1024)},
    "qwen2.5-math-1.5b-sft-all-1gpu": over(1024),
    "qwen2.5-math-1.5b-sft-correct-1gpu": over(1024),
    "qwen2.5-math-1.5b-grpo-default-2gpu": VALIDATION,
    "qwen2.5-math-1.5b-grpo-clip-2gpu": {**VALIDATION, **over(1024)},
    # A model for one GPU.
    "qwen2.5-0.5b-ppo-verl-1gpu": {"model": "Qwen/Qwen2.5-0.5B-Instruct"},
    "qwen2.5-math-1.5b-expert-iteration-sample-2gpu": NOT_DURING,
    "qwen2.5-math-1.5b-expert-iteration-sft-1gpu": {**NOT_DURING, **over(1024)},
    # Prompts are cut there, and left out here.
    "qwen3-0.6b-grpo-math-1gpu": {"prompt_tokens": 512},
    # The plain gradient for several updates is a weight that is held at 1.
    "olmo2-1b-cs336-off-policy-naive-2gpu": WITHOUT_WEIGHTS,
    # A trace and its prompt fit the model's context, and so do evaluations.
    "qwen2.5-math-1.5b-omr-2048-1gpu": {**NOT_DURING, "tokens": 2048},
    "qwen2.5-math-1.5b-omr-4096-1gpu": {
        **NOT_DURING,
        "tokens": 3584,
        "target_tokens": [3584],
    },
}
STAGED = {
    "qwen2.5-math-1.5b-expert-iteration-2gpu": 10,
    "qwen2.5-math-7b-sft-then-rl-8gpu": 2,
    "llama3-8b-cs336-sft-then-dpo-4gpu": 2,
}
"""Presets that are made of others, with the number of their runs."""
UNPUBLISHED = (
    "qwen2.5-math-7b-luffy-8gpu",
    "qwen2.5-math-7b-exgrpo-8gpu",
    "qwen2.5-math-1.5b-grpo-2gpu",
    "qwen2.5-0.5b-grpo-1gpu",
    "qwen2.5-1.5b-lora-1gpu",
)
"""Presets for GPUs whose settings are Tandem's own."""


def test_every_preset_for_gpus_is_held_against_a_table_or_is_tandems_own() -> None:
    for_gpus = [name for name in names() if not name.startswith("miniature")]
    assert sorted([*PUBLISHED, *UNPUBLISHED, *STAGED]) == sorted(for_gpus)


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_its_published_settings_but_for_the_deviations_that_are_listed(
    name: str,
) -> None:
    found = settings(load(name).resolve([]))
    published, deviating = PUBLISHED[name], DEVIATIONS.get(name, {})
    differs = {key: found[key] for key, value in published.items() if found[key] != value}
    assert differs == deviating


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_preset_may_be_started_names_its_source_and_says_that_nobody_has_run_it(
    name: str,
) -> None:
    preset = load(name)
    assert why_not_started(preset.resolve([])) is None
    assert preset.untested
    first = (FOLDER / f"{name}.yaml").read_text().split("\n", 1)[0]
    assert first.startswith("# Source: ")


@pytest.mark.parametrize("which", ["128", "256", "512", "1024", "all", "correct"])
def test_held_out_problems_get_the_template_that_the_training_prompts_hold(
    which: str, tmp_path: Path
) -> None:
    config = load(f"qwen2.5-math-1.5b-sft-{which}-1gpu").resolve([])
    (held_out,) = config.data.evaluate
    file = tmp_path / "validation.jsonl"
    # As a row of the source's MATH/validation.jsonl.
    row = {"problem": "What is 2+2?", "level": "Level 1", "subject": "Algebra", "answer": "4"}
    file.write_text(json.dumps(row))
    (read,) = read_rows(file, held_out.form)
    assert isinstance(read, DataRow)
    own = of_set(config, held_out)
    messages = [{"role": turn.role, "content": turn.content} for turn in read.content.prompt]
    text = render_text(miniature.build(), messages, own.data)
    assert text.endswith("User: What is 2+2?\nAssistant: <think>")
    assert own.data.stops == ("</answer>",)


@pytest.mark.parametrize("name", STAGED)
def test_the_stages_of_a_preset_are_runs_of_published_settings(name: str) -> None:
    """Each differs from its published preset in what it takes from the stage before."""
    runs = placed(load(name), [])
    assert len(runs) == STAGED[name]
    own = ("model", "data", "run")
    for run in runs:
        found = run.preset.resolve([])
        assert why_not_started(found) is None
        base = {
            "sample": "qwen2.5-math-1.5b-expert-iteration-sample-2gpu",
            "sft": "qwen2.5-math-1.5b-expert-iteration-sft-1gpu",
            "rl": "qwen2.5-math-7b-sft-rl-8gpu",
            "dpo": "llama3-8b-cs336-dpo-4gpu",
        }[run.name]
        if run.name == "sft":
            base = {
                "qwen2.5-math-7b-sft-then-rl-8gpu": "qwen2.5-math-7b-sft-8gpu",
                "llama3-8b-cs336-sft-then-dpo-4gpu": "llama3-8b-cs336-sft-4gpu",
            }.get(name, base)
        expected = load(base).resolve([])
        for section in type(found).model_fields:
            if section not in own and (run.name, section) != ("sft", "rollout"):
                assert getattr(found, section) == getattr(expected, section), (run.label, section)
    last = runs[-1].preset.resolve([])
    assert last.model.path.endswith("/sft-4/model" if "iteration" in name else "/sft/model")
