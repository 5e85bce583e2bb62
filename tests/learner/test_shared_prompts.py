"""Rows that share their prompts have the log-probs and gradients of padded rows."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tandem.learner.microbatch import micro_batch, rows_of
from tandem.learner.objectives import ObjectiveSettings, make
from tandem.learner.policy import Policy

LUFFY = make("luffy", ObjectiveSettings())


def scored(policy: Policy, batch: Any, which: list[int], share: bool) -> tuple[Any, Any]:
    rows = rows_of(batch, step=6, baseline="group_mean", truncation="wrong", objective=LUFFY)
    micro = micro_batch(batch, rows, np.array(which), share_prompts=share)
    assert (micro.layout is not None) == share
    found, entropy = policy(
        micro.input_ids, micro.index, micro.targets, micro.temperature, False, micro.layout
    )
    ramp = torch.linspace(-1, 1, len(found))
    (found * ramp).sum().backward()
    gradients = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
    policy.zero_grad()
    return micro, (found.detach(), entropy.detach(), *gradients)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("which", [list(range(16)), [14, 3, 9, 0, 8], [5]])
def test_log_probs_entropies_and_gradients_are_those_of_padded_rows(
    which: list[int], kv_heads: int, made_up: ModuleType
) -> None:
    batch = made_up.random_rows(7, temperature=0.7)
    padded_policy = Policy(made_up.tiny_model(kv_heads=kv_heads))
    padded, expected = scored(padded_policy, batch, which, False)
    policy = Policy(made_up.tiny_model(kv_heads=kv_heads))
    assert policy.share_prompts()
    shared, found = scored(policy, batch, which, True)
    assert torch.equal(shared.targets, padded.targets)
    if len(which) == 16:
        assert shared.forward_tokens < 0.7 * padded.forward_tokens
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-4)


def test_gradient_checkpointing_recomputes_with_the_same_layout(made_up: ModuleType) -> None:
    batch = made_up.random_rows(7)
    results = []
    for checkpointing in (False, True):
        model = made_up.tiny_model()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        policy = Policy(model).train()
        assert policy.share_prompts()
        results.append(scored(policy, batch, [0, 1, 2, 3, 5], True)[1])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_model_whose_attention_is_its_own_keeps_padded_rows() -> None:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = MistralConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        sliding_window=2,
    )
    torch.manual_seed(0)
    model = MistralForCausalLM(sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5)
    policy = Policy(model)
    assert not policy.share_prompts()
    assert model.config._attn_implementation == "sdpa"


def test_without_a_layout_the_model_works_as_ever(made_up: ModuleType) -> None:
    model = made_up.tiny_model()
    ids = torch.arange(3, 12)[None]
    expected = model(input_ids=ids).logits
    assert Policy(model).share_prompts()
    torch.testing.assert_close(model(input_ids=ids).logits, expected)
