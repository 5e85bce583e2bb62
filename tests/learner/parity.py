"""Steps of DeepSpeed in every cell that it offers, held against the same steps in float64 without it.

A cell is a ZeRO stage, what is offloaded, a layout and what is trained. The optimizer has no momentum and so great
an ε that a step is nearly linear in its gradient: an error of the gradient is one of the step. Each step is compared
from the weights at its own start.

python tests/learner/parity.py RANK RANKS PORT OUT CELL...     (a cell is written as in 3-parameters-padded-critic)
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

sys.path.insert(0, str(Path(__file__).parent))

import in_float64
import made_up

from tandem.common.config import Config
from tandem.learner.engine.critic import CriticEngine
from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine
from tandem.learner.rendezvous import Seat, process_group
from tandem.learner.resume.state_files import POLICY, StateFiles
from tandem.learner.updates.updates import Updates

RATES = (20.0, 20.0, 1e6)
"""Learning rates of the steps. The last one takes the weights so far away that their own rounding is nothing beside
the step, which is 10,000 times its gradient."""
BUDGET = 45
EPS = 100.0
SMOOTH: dict[str, Any] = {"lr": 1.0, "eps": EPS, "betas": [0.0, 0.0]}
CLIP = {"policy": 0.0, "adapters": 0.3, "critic": 0.2}
"""Greatest norm of the gradient, by what is trained; 0 = none."""
PPO: dict[str, Any] = {
    "discount": 0.97,
    "gae_lambda": 0.9,
    "value_clip": 0.1,
    "value_coefficient": 0.7,
}
LORA = {"rank": 2, "alpha": 8.0}
SCALE = 4.0


OVERLAY: dict[str, Any] = {
    "communication_data_type": "fp32",
    "disable_python_gc": True,
    "wall_clock_breakdown": False,
    "memory_breakdown": False,
    "zero_optimization": {
        "contiguous_gradients": False,
        "reduce_scatter": False,
        "reduce_bucket_size": 3000,
        "use_multi_rank_bucket_allreduce": False,
        "allgather_partitions": False,
        "allgather_bucket_size": 3000,
        "sub_group_size": 5000,
        "ignore_unused_parameters": False,
        "memory_efficient_linear": False,
        "enable_sanity_checks": True,
        "stage3_prefetch_bucket_size": 2000,
        "stage3_param_persistence_threshold": 40,
        "stage3_model_persistence_threshold": 4000,
        "stage3_max_live_parameters": 6000,
        "stage3_max_reuse_distance": 6000,
        "stage3_gather_16bit_weights_on_model_save": False,
    },
}
"""What a user may set of ZeRO, each key with another value than its default."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A way to train."""

    stage: int
    offload: str
    layout: str
    trained: str
    overlaid: bool
    """Whether :data:`OVERLAY` is laid over the learner's settings of DeepSpeed."""

    @classmethod
    def of(cls, text: str) -> Cell:
        """The cell that is written as in ``3-parameters-padded-critic``, or so with ``-overlaid`` after it."""
        stage, offload, layout, trained, *further = text.split("-")
        return cls(int(stage), offload, layout, trained, further == ["overlaid"])


class AdaptersInFloat64(in_float64.Plain):
    """A frozen model whose layers' weights are W + s B A."""

    def __init__(self, model: Any, tensors: dict[str, Tensor], **settings: Any) -> None:
        super().__init__(model, **settings)
        self.tensors = {name: t.detach().clone().double() for name, t in tensors.items()}
        for tensor in self.tensors.values():
            tensor.requires_grad_()

    def parameters(self, *, critic: bool) -> dict[str, Tensor]:
        return self.tensors

    def hidden(self, mixed: Any, tokens: Any) -> Tensor:
        prompt = mixed.group.prompt_tokens
        ids = torch.tensor([*prompt.tolist(), *tokens.tolist()])[None]
        weights = dict(self.model.named_parameters())
        changed = {
            f"{layer}.weight".removeprefix("model."): weights[f"{layer}.weight"].detach()
            + SCALE
            * self.tensors[f"{layer}.lora_B.weight"]
            @ self.tensors[f"{layer}.lora_A.weight"]
            for layer in {name.rpartition(".lora_")[0] for name in self.tensors}
        }
        found = functional_call(self.model.model, changed, kwargs={"input_ids": ids})
        states: Tensor = found.last_hidden_state[0]
        return states[len(prompt) - 1 : -1]


def config_of(cell: Cell, ranks: int) -> Config:
    optimizer = SMOOTH | {"grad_clip": CLIP[cell.trained]}
    learner: dict[str, Any] = {
        "ranks": ranks,
        "zero_stage": cell.stage,
        "offload": cell.offload,
        "micro_batch_tokens": BUDGET,
        "optimizer": optimizer,
    }
    if cell.trained == "critic":
        learner |= {
            "objective": {"name": "ppo", "truncation": "mask", **PPO},
            "critic": {"optimizer": optimizer},
        }
    if cell.trained == "adapters":
        learner["lora"] = LORA
    if cell.overlaid:
        overlap = {"overlap_comm": cell.stage > 1}
        learner["deepspeed"] = OVERLAY | {
            "zero_optimization": OVERLAY["zero_optimization"] | overlap
        }
    config: Config = made_up.config_of(
        learner=learner, replay={"groups_per_step": 4, "max_staleness": 0}
    )
    return config


def started(cell: Cell, ranks: int) -> Updates:
    """A rank that trains in a cell."""

    def model(seed: int) -> Any:
        made = made_up.tiny_model(seed)
        if cell.layout == "padded":
            made.set_attn_implementation("eager")
        return made

    config, cpu = config_of(cell, ranks), torch.device("cpu")
    critic = CriticEngine(model(7), config, cpu) if cell.trained == "critic" else None
    return Updates(DeepSpeedEngine(model(0), config, cpu, critic), config)


def weights(updates: Updates) -> dict[str, Tensor]:
    """Everything that is trained, in float64; the critic's names begin with ``critic.``. Collective."""
    engine = updates.engine
    found = {name: tensor.double().clone() for name, tensor in engine.parameters()}
    if engine.critic is not None:
        for name, parameter in engine.critic.model.named_parameters():
            with engine._gathered([parameter]):
                found[f"critic.{name}"] = parameter.detach().double().clone()
    return found


def in_float64_step(
    trained: str, start: dict[str, Tensor], groups: Any, lr: float
) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Weights after one step from a start, as :func:`weights` names them, and the norms of its gradients."""
    settings: Any = {"lr": lr, "eps": EPS, "betas": (0.0, 0.0), "clip": CLIP[trained]}
    whole = range(len(groups))
    if trained == "adapters":
        policy: in_float64.Plain = AdaptersInFloat64(made_up.tiny_model(), start, **settings)
    else:
        policy = in_float64.Plain(made_up.tiny_model(), **settings)
        _put(policy.parameters(critic=False), start)
    if trained != "critic":
        norms: list[float] = []
        step = policy.step
        policy.step = lambda loss, **given: norms.append(step(loss, **given))  # type: ignore
        in_float64.grpo_step(policy, groups, iter([list(whole)]), longest=12)
        after = {name: tensor.detach() for name, tensor in policy.parameters(critic=False).items()}
        return after, {"grad_norm": norms[0]}
    critic = in_float64.Plain(made_up.tiny_model(seed=7), **settings)
    body = critic.parameters(critic=True)
    head = body.pop("head")
    named = {name.replace("model.", "critic.body.", 1): tensor for name, tensor in body.items()}
    _put(named, start)
    with torch.no_grad():
        head[:-1], head[-1] = start["critic.head.weight"][0], start["critic.head.bias"][0]
    one = in_float64.PpoStep(policy, critic, groups, **PPO)
    of_policy, of_critic = one.update(list(whole))
    found = {**policy.parameters(critic=False), **named}
    head = head.detach()
    found |= {"critic.head.weight": head[:-1][None], "critic.head.bias": head[-1:]}
    after = {name: tensor.detach() for name, tensor in found.items()}
    return after, {"grad_norm": of_policy, "critic_grad_norm": of_critic}


@torch.no_grad()
def _put(parameters: dict[str, Tensor], values: dict[str, Tensor]) -> None:
    for name, parameter in parameters.items():
        parameter.copy_(values[name])


def measured(cell: Cell, ranks: int) -> dict[str, Any]:
    """A cell's greatest relative errors of gradients' norms, of the last gradient and of its worst tensor; the greatest
    difference of what a checkpoint holds; what DeepSpeed says is offloaded; and the fewest micro-batches of an update
    on one rank. Collective."""
    updates = started(cell, ranks)
    engine = updates.engine
    assert engine.policy.layout == cell.layout
    assert engine.stage == cell.stage
    groups = in_float64.sampled_by(made_up.tiny_model(), made_up.groups_of(4))
    start = weights(updates)
    norms, fewest = [], math.inf
    for number, lr in enumerate(RATES, 1):
        # The other ranks get their rows from rank 0.
        given = None if engine.rank else groups
        outcome = updates.train(number, given, lr=lr, critic_lr=lr)
        assert outcome.applied
        after = weights(updates)
        expected, known = in_float64_step(cell.trained, start, groups, lr)
        norms += [abs(outcome.metrics[f"train/{name}"] / norm - 1) for name, norm in known.items()]
        fewest = min(fewest, outcome.metrics["train/micro_batches"])
        before, start = start, after
    assert after.keys() == expected.keys()
    errors, tensors = [], {}
    for critic in (False, True):
        names = [name for name in after if name.startswith("critic.") == critic]
        if names:
            ours = [(after[name] - before[name]).flatten() for name in names]
            theirs = [(expected[name] - before[name]).flatten() for name in names]
            errors.append(_error(torch.cat(ours), torch.cat(theirs)))
            tensors |= {n: _error(a, b) for n, a, b in zip(names, ours, theirs, strict=True)}
    return {
        "norm": max(norms),
        "gradient": max(errors),
        "tensor": max(tensors.values()),
        "saved": saved(engine),
        "micro_batches": fewest,
        "offloaded": offloaded(engine),
    }


def saved(engine: DeepSpeedEngine) -> float:
    """The greatest difference between the policy's parameters and what a checkpoint has under their names. Collective."""
    folder = [tempfile.mkdtemp()]
    torch.distributed.broadcast_object_list(folder)
    engine.save(Path(folder[0]))
    engine.barrier()
    files = StateFiles(Path(folder[0]) / POLICY)
    found = [float((files.whole(name) - held).abs().max()) for name, held in engine.parameters()]
    engine.barrier()
    if not engine.rank:
        shutil.rmtree(folder[0])
    return max(found)


def _error(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / theirs.norm())


def offloaded(engine: DeepSpeedEngine) -> str:
    """What DeepSpeed itself says is offloaded, of the policy and of the critic."""

    def of(one: Any) -> str:
        wrapper = one.optimizer
        states = getattr(wrapper, "cpu_offload", False) or getattr(
            wrapper, "offload_optimizer", False
        )
        whole = getattr(wrapper, "offload_param", False)
        return "parameters" if whole else "optimizer" if states else "none"

    found = {of(engine._engine)}
    if engine.critic is not None:
        found.add(of(engine.critic._engine))
    return "/".join(sorted(found))


@contextmanager
def stages_as_set() -> Iterator[None]:
    """Within it one float32 rank runs the stage that is set, see :meth:`Config.zero_stage`."""
    before = Config.zero_stage
    Config.zero_stage = lambda self, ranks=None: self.learner.zero_stage  # type: ignore[method-assign]
    try:
        yield
    finally:
        Config.zero_stage = before  # type: ignore[method-assign]


def main() -> None:
    rank, ranks, port, out, *cells = sys.argv[1:]
    torch.set_num_threads(1)
    seat = Seat(rank=int(rank), world_size=int(ranks), local_rank=int(rank), port=int(port) or None)
    with process_group(seat):
        found = {cell: measured(Cell.of(cell), int(ranks)) for cell in cells}
    if rank == "0":
        Path(out).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
