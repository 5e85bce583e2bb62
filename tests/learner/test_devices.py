"""Whole updates with the model on another device than the host: no tensor of one meets one of the other."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from elsewhere import DeviceMixError, Elsewhere, move, played

from tandem.learner.engine import critic
from tandem.learner.engine import deepspeed_engine as engine
from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine
from tandem.learner.rows.groups import MixedGroup
from tandem.learner.scored import fixed_rows, score
from tandem.learner.updates import reference
from tandem.learner.updates.updates import Updates

VOCABULARY = 32
"""Of the tiny model."""

pytestmark = pytest.mark.usefixtures("group")


class PlainEngine:
    """In DeepSpeed's place, which puts other tensors into parameters, as the played device doesn't allow."""

    def __init__(self, module: Any, optimizer: Any, *rest: Any, **others: Any) -> None:
        self.module, self.optimizer = module, optimizer.optimizer
        for group in self.optimizer.param_groups:
            group.update(fused=False, foreach=False)

    def __call__(self, *inputs: Any) -> Any:
        return self.module(*inputs)

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    def eval(self) -> None:
        self.module.eval()

    def backward(self, loss: torch.Tensor, scale_wrt_gas: bool) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def was_step_applied(self) -> bool:
        return True


def test_the_played_device_refuses_what_a_gpu_refuses() -> None:
    with played() as device:
        there = torch.arange(4.0).to(device)
        assert isinstance(there, Elsewhere)
        assert (there * 2 + torch.ones(())).sum().item() == 16
        assert there[torch.tensor([1, 2])].tolist() == [1, 2]
        with pytest.raises(DeviceMixError):
            there + torch.ones(4)
        with pytest.raises(DeviceMixError):
            there.numpy()
        weight = torch.nn.Parameter(Elsewhere(torch.ones(4)))
        ((weight * there) ** 2).sum().backward()
        assert isinstance(weight.grad, Elsewhere)
        assert weight.grad.cpu().tolist() == [0, 2, 8, 18]


@pytest.mark.parametrize(
    ("name", "attention", "learner"),
    [
        ("grpo", "varlen", {"update_epochs": 2, "stop_kl": 100.0}),
        ("luffy", "auto", {"lora": {"rank": 2}}),
        ("ppo", "auto", {}),
        ("dpo", "auto", {}),
        ("distill", "varlen", {}),
        ("srft", "auto", {"gradient_checkpointing": True}),
    ],
)
def test_an_update_keeps_to_the_models_device(
    name: str,
    attention: str,
    learner: dict[str, Any],
    made_up: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (engine, critic):
        monkeypatch.setattr(module, "initialise", PlainEngine)
    config = made_up.config_of(
        model={"attention": attention},
        learner={"objective": {"name": name}, **learner},
        replay={"max_staleness": 0},
    )
    groups = made_up.groups_of(3)
    groups[0] = MixedGroup(group=groups[0].group, traces=(made_up.trace(0),))
    if name == "dpo":
        groups = [made_up.pair_of(one) for one in groups]
    found = []
    with played() as elsewhere:
        for device in (torch.device("cpu"), elsewhere):

            def made(*_: Any, device: torch.device = device, **options: Any) -> Any:
                # Reference, critic and teacher are others than the policy.
                model = made_up.tiny_model(5 if "key" in options else 0)
                return model if device.type == "cpu" else move(model)

            for module in (reference, critic):
                monkeypatch.setattr(module, "load_model", made)
            trained = DeepSpeedEngine(
                made(), config, device, critic.load_critic(config, device, VOCABULARY)
            )
            outcome = Updates(trained, config).train(1, groups, lr=1e-3)
            assert outcome.applied
            assert attention != "varlen" or trained.policy.layout == "packed"
            rows = fixed_rows(VOCABULARY, 12, seed=0)
            found.append((outcome.metrics["train/loss"], score(trained, rows, torch.bfloat16)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-4, abs=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], atol=1e-3, rtol=1e-3)
