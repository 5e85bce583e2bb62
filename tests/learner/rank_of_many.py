"""One rank that trains every objective for two steps on a tiny model; rank 0 writes what came of it.

python tests/learner/rank_of_many.py RANK RANKS PORT OUT STAGE[,STAGE...] NAME...
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))

import made_up
import numpy as np
from safetensors.torch import save_file

import tandem.learner.updates.reference as reference_module
from tandem.common.config import LoraConfig
from tandem.common.objectives import OBJECTIVES, reads
from tandem.learner.engine.critic import CriticEngine
from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine
from tandem.learner.rendezvous import Seat, process_group
from tandem.learner.rows.groups import MixedGroup
from tandem.learner.rows.microbatch import micro_batch
from tandem.learner.scored import score
from tandem.learner.updates.updates import Updates

STEPS = 2
# With so large an ε the update is as smooth in the gradient as SGD's. Adam's own blows rounding up
# where a gradient is 0 but for rounding.
SMOOTH = {"lr": 0.1, "eps": 1.0, "betas": [0.5, 0.9]}
KEPT = (
    *("train/loss", "train/grad_norm", "train/tokens_own", "train/k1_reference", "train/k3_p99"),
    *("ratio/tokens", "ratio/log_ratio", "ratio/log_ratio_p99", "ratio/k3", "ratio/k3_p99"),
    *("ratio/ess", "ratio/k3_bound"),
    *("train/value_mean", "train/explained_variance", "train/critic_loss"),
    *("train/critic_grad_norm", "train/kl_start", "train/update_epochs"),
    *("train/divergence", "train/kto_z0", "train/reference_computed", "train/reference_found"),
)
STORED = "-stored"
"""Ends the name of an objective that learns from pairs of stored responses instead of samples."""
LORA = "-lora"
"""Comes after that, where adapters are trained."""
PASSES = "-passes"
"""Ends the name of an objective that goes over each batch twice."""


def config_of(name: str, ranks: int, stage: int, passes: int) -> Any:
    objective: dict[str, Any] = {"name": name}
    if "kl_reward_coefficient" in reads(OBJECTIVES[name]):
        # Everything that ranks have to agree on.
        objective |= {
            "entropy_coefficient": 0.01,
            "entropy_target": 2.0,
            "entropy_adapt": "stepped",
            "kl_coefficient": 0.01,
            "kl_reward_coefficient": 0.01,
            "kl_target": 0.05,
        }
    if name == "ppo":
        objective["truncation"] = "mask"
    return made_up.config_of(
        learner={
            "objective": objective,
            "update_epochs": passes,
            # Never reached, and yet measured over all ranks.
            "stop_kl": 1e3 if passes > 1 else None,
            "ranks": ranks,
            "zero_stage": stage,
            "minibatches": 2,
            "micro_batch_tokens": 90,
            "optimizer": SMOOTH,
            **({"critic": {"optimizer": SMOOTH}} if name == "ppo" else {}),
        },
        replay={"groups_per_step": 4, "max_staleness": 0},
    )


def train(name: str, ranks: int, stage: int, out: str) -> tuple[dict[str, torch.Tensor], list[Any]]:
    """Parameters after the steps, and metrics of each."""
    plain = name.removesuffix(LORA)
    stored = plain.endswith(STORED)
    passes = 2 if plain.endswith(PASSES) else 1
    config = config_of(plain.removesuffix(STORED).removesuffix(PASSES), ranks, stage, passes)
    changed: dict[str, Any] = {"source": "offline"} if stored else {}
    if plain != name:
        changed["lora"] = LoraConfig(rank=2, alpha=8.0)
    learner = config.learner.model_copy(update=changed)
    config = config.model_copy(update={"learner": learner})
    critic = None
    if config.learner.critic is not None:
        critic = CriticEngine(made_up.tiny_model(seed=7), config, torch.device("cpu"))
    engine = DeepSpeedEngine(made_up.tiny_model(), config, torch.device("cpu"), critic)
    folder = Path(f"{out}.{name}.{stage}.reference")
    updates = Updates(engine, config, reference_folder=folder)
    traces = [made_up.trace(number) for number in range(2)]
    told = []
    for step in range(1, STEPS + 1):
        groups = [
            MixedGroup(group=mixed.group, traces=tuple(traces[number : number + 1]))
            for number, mixed in enumerate(made_up.groups_of(4, size=3))
        ]
        if stored:
            groups = [made_up.pair_of(mixed) for mixed in made_up.groups_of(4, size=2)]
        # The other ranks get their rows from rank 0.
        outcome = updates.train(step, None if engine.rank else groups, lr=0.1)
        assert outcome.applied
        told.append({key: outcome.metrics[key] for key in KEPT if key in outcome.metrics})
    return {
        # With ZeRO-3 by all ranks together, else by each alone.
        "scored": score(engine, np.arange(24).reshape(2, 12) % 32, torch.float32),
        **(
            {}
            if critic is None
            else {"values": torch.cat(critic.score([micro_batch(made_up.random_rows(3))]))}
        ),
        **{key: tensor.clone() for key, tensor in engine.parameters()},
    }, told


def load_other(path: str, **options: Any) -> Any:
    """A reference, or a teacher."""
    taught = options["key"] == "learner.teacher"
    return made_up.tiny_teacher() if taught else made_up.tiny_model(seed=5)


def main() -> None:
    rank, ranks, port, out, stages, *names = sys.argv[1:]
    several = "," in stages
    torch.set_num_threads(1)
    # A reference that isn't the start, so that the KL has a gradient from the first step on.
    reference_module.load_model = load_other  # type: ignore[assignment]
    tensors: dict[str, torch.Tensor] = {}
    metrics = {}
    seat = Seat(rank=int(rank), world_size=int(ranks), local_rank=int(rank), port=int(port) or None)
    with process_group(seat):
        for name, stage in itertools.product(names, stages.split(",")):
            found, told = train(name, int(ranks), int(stage), out)
            if several:
                name = f"{name}@{stage}"
            metrics[name] = told
            tensors |= {f"{name}/{key}": tensor for key, tensor in found.items()}
    if rank == "0":
        save_file(tensors, out)
        Path(f"{out}.json").write_text(json.dumps(metrics), encoding="utf-8")


if __name__ == "__main__":
    main()
