"""Liger's kernels are taken where they give the model's own log-probs, and leave no trace where they don't."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import MethodType, ModuleType
from typing import Any

import families
import pytest
import torch
from transformers.integrations import liger

from tandem.common.agreement import Probe
from tandem.common.errors import ConfigError
from tandem.learner.forward import fused
from tandem.learner.forward.policy import Policy
from tandem.learner.rows.microbatch import micro_batch

NO_MLP = ("Qwen3 MoE", "Mixtral", "gpt-oss")
"""Families whose MLPs Liger doesn't have, or whose experts are all the MLPs that they have."""
NONE = ("Nemotron",)
"""Families of which Liger has only what isn't taken."""
AGREE = [family.name for family in families.FAMILIES if not family.learner]


def stand_in(factor: float, seen: list[dict[str, bool]]) -> Callable[[Any, dict[str, bool]], None]:
    """Replaces what Liger replaces (a class and a function of transformers' module, methods of modules) by
    other operations, whose norms are right if the factor is 1."""

    def apply(model: Any, which: dict[str, bool]) -> None:
        seen.append(which)
        source = sys.modules[type(model).__module__]
        plain = source.apply_rotary_pos_emb

        def rotary(*given: Any, **others: Any) -> Any:
            raise RuntimeError("a CPU's tensors are none of Liger's")

        source.apply_rotary_pos_emb = rotary
        source.Qwen2RMSNorm = type("LigerRMSNorm", (torch.nn.Module,), {})
        assert plain is not rotary

        def norm(module: Any, hidden: torch.Tensor) -> torch.Tensor:
            if not factor:
                raise RuntimeError("0 active drivers ([]). There should only be one.\nand more")
            size = hidden.square().mean(-1, keepdim=True) + module.variance_epsilon
            return factor * module.weight * hidden * size.rsqrt()

        for module in model.modules():
            if type(module).__name__ == "Qwen2RMSNorm":
                module.__dict__["forward"] = MethodType(norm, module)

    return apply


@pytest.mark.parametrize(
    ("factor", "reason"),
    [(1.0, ""), (1.1, "log-probs are off by"), (0.0, "There should only be one")],
)
def test_kernels_are_kept_if_they_give_the_models_own_log_probs(
    factor: float,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    made_up: ModuleType,
) -> None:
    """Otherwise every module and every name of transformers' is what it was."""
    seen: list[dict[str, bool]] = []
    monkeypatch.setattr(fused, "refusal", lambda _: None)
    monkeypatch.setattr(liger, "apply_liger_kernel", stand_in(factor, seen))
    model = families.model(families.family("Qwen2"))
    source = sys.modules[type(model).__module__]
    names = dict(vars(source))
    policy = Policy(model)
    modules = [dict(vars(module)) for module in model.modules()]
    probe = Probe.of(model, families.LONGEST)
    micro = micro_batch(made_up.random_rows(3), "padded")
    before = policy.score(micro)
    policy.choose_kernels(probe)
    try:
        assert seen == [fused.WHICH]
        assert ("forward" in vars(model.model.norm)) == (not reason)
        changed = [name for name, value in names.items() if getattr(source, name) is not value]
        assert changed == ([] if reason else ["apply_rotary_pos_emb"])
        for found, own in zip(policy.score(micro), before, strict=True):
            torch.testing.assert_close(found, own, atol=0 if reason else 1e-5, rtol=0)
        if reason:
            assert [dict(vars(module)) for module in model.modules()] == modules
            with pytest.raises(ConfigError, match=rf"model\.kernels=liger: .*{reason}"):
                policy.choose_kernels(probe, "liger")
        # Another model of the kind is loaded as it was, and computes on a CPU.
        other = families.model(families.family("Qwen2"))
        assert type(other.model.norm) is names["Qwen2RMSNorm"]
        assert other(input_ids=micro.input_ids).logits.isfinite().all()
    finally:
        source.apply_rotary_pos_emb = names["apply_rotary_pos_emb"]
    assert not caplog.records


def test_without_a_gpu_there_are_none() -> None:
    model = families.model(families.family("Qwen2"))
    assert fused.refusal(model) == "they need a GPU"
    policy = Policy(model)
    policy.choose_kernels()
    policy.choose_kernels(kernels="plain")
    with pytest.raises(ConfigError, match=r"they need a GPU: set model\.kernels=auto"):
        policy.choose_kernels(kernels="liger")


@pytest.mark.parametrize("name", AGREE)
def test_ligers_own_patch_leaves_experts_alone_and_is_undone(name: str) -> None:
    pytest.importorskip("liger_kernel")
    model = families.model(families.family(name))
    if model.config.model_type not in monkey_patch().MODEL_TYPE_TO_APPLY_LIGER_FN:
        pytest.skip(f"Liger has none for {model.config.model_type!r}")
    source = sys.modules[type(model).__module__]
    names = dict(vars(source))
    before = [dict(vars(module)) for module in model.modules()]
    if name in NONE:
        with pytest.raises(ValueError, match="none of its layers has one"):
            fused.fuse(model)
        assert [dict(vars(module)) for module in model.modules()] == before
        return
    put_back = fused.fuse(model)
    taken = {
        type(module).__name__: vars(module)["forward"].__func__.__qualname__
        for module in model.modules()
        if "forward" in vars(module)
    }
    assert not any("Experts" in kind for kind in (*taken, *taken.values()))
    assert any("RMSNorm" in kind for kind in taken)
    assert any("MLP" in kind for kind in taken) == (name not in NO_MLP)
    classes = {key: value for key, value in names.items() if isinstance(value, type)}
    assert {key: getattr(source, key) for key in classes} == classes
    put_back()
    assert [dict(vars(module)) for module in model.modules()] == before
    assert {key: getattr(source, key) for key in names} == names


def monkey_patch() -> ModuleType:
    from liger_kernel.transformers import monkey_patch

    return monkey_patch


@pytest.mark.gpu
@pytest.mark.parametrize("name", AGREE)
def test_on_a_gpu_they_have_the_models_gradient(
    name: str, caplog: pytest.LogCaptureFixture, made_up: ModuleType
) -> None:
    """In float32, of every family for which Liger has some."""
    pytest.importorskip("liger_kernel")
    model = families.model(families.family(name)).cuda()
    if (reason := fused.refusal(model)) is not None:
        pytest.skip(reason)
    if name in NONE:
        pytest.skip("Liger has none that is taken")
    policy = Policy(model)
    micro = micro_batch(made_up.random_rows(3, temperature=0.7), "padded").to(model.device)

    def scored() -> list[torch.Tensor]:
        found, entropy = policy(micro.input_ids, micro.index, micro.targets, micro.temperature)
        (found * torch.linspace(-1, 1, len(found), device=found.device)).sum().backward()
        gradients = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
        policy.zero_grad()
        return [found.detach(), entropy.detach(), *gradients]

    expected = scored()
    with caplog.at_level(logging.INFO, "tandem.learner"):
        policy.choose_kernels(Probe.of(model, families.LONGEST), "liger")
    assert "are Liger's" in caplog.text
    for ours, theirs in zip(scored(), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)
