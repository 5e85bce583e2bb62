"""Rows that share their prompts have the log-probs and gradients of padded rows."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from tandem.common.agreement import Probe
from tandem.learner.forward import layouts, shared_prompts
from tandem.learner.forward import policy as policies
from tandem.learner.forward.policy import Policy
from tandem.learner.rows.microbatch import micro_batch


def scored(policy: Policy, rows: Any, which: list[int], share: bool) -> tuple[Any, Any]:
    micro = micro_batch(rows.select(torch.tensor(which)), "shared" if share else "padded")
    # A single row has nothing to share.
    assert (micro.layout is not None) == (share and len(which) > 1)
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
    rows = made_up.random_rows(7, temperature=0.7)
    padded_policy = Policy(made_up.tiny_model(kv_heads=kv_heads))
    padded, expected = scored(padded_policy, rows, which, False)
    policy = Policy(made_up.tiny_model(kv_heads=kv_heads))
    assert policy.choose_layout() == "shared"
    shared, found = scored(policy, rows, which, True)
    assert torch.equal(shared.targets, padded.targets)
    if len(which) == 16:
        assert shared.forward_tokens < 0.7 * padded.forward_tokens
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-4)


def test_gradient_checkpointing_recomputes_with_the_same_layout(made_up: ModuleType) -> None:
    rows = made_up.random_rows(7)
    results = []
    for checkpointing in (False, True):
        model = made_up.tiny_model()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        policy = Policy(model).train()
        assert policy.choose_layout() == "shared"
        results.append(scored(policy, rows, [0, 1, 2, 3, 5], True)[1])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def mistral(window: int) -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = MistralConfig(
        vocab_size=32,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=32,
        sliding_window=window,
    )
    torch.manual_seed(0)
    model = MistralForCausalLM(sizes)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.5)
    return model


@pytest.mark.parametrize("window", [2, 5, 9])
def test_a_sliding_window_is_kept(window: int, made_up: ModuleType) -> None:
    rows = made_up.random_rows(7)
    which = [0, 1, 2, 5, 9]
    assert max(rows.forward_lengths[which]) > window
    _, expected = scored(Policy(mistral(window)), rows, which, False)
    policy = Policy(mistral(window))
    assert policy.choose_layout() == "shared"
    _, found = scored(policy, rows, which, True)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-4)
    # Nor is it lost where rows come without a layout.
    ids = torch.arange(3, 23)[None]
    own = mistral(window)(input_ids=ids).logits
    torch.testing.assert_close(policy.model(input_ids=ids).logits, own, atol=1e-5, rtol=1e-4)


def test_a_model_whose_attention_is_its_own_keeps_padded_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One whose window only a row beyond it shows; short rows agree."""
    model = mistral(20)
    plain = shared_prompts.attention

    def without_window(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs | {"sliding_window": None})

    monkeypatch.setattr(shared_prompts, "attention", without_window)
    policy = Policy(model)
    assert policy.choose_layout(Probe.of(model, 20)) == "shared"
    model = mistral(20)
    policy = Policy(model)
    assert policy.choose_layout(Probe.of(model, 40)) == "padded"
    assert model.config._attn_implementation == "sdpa"


def test_without_a_layout_the_model_works_as_ever(made_up: ModuleType) -> None:
    model = made_up.tiny_model()
    ids = torch.arange(3, 12)[None]
    expected = model(input_ids=ids).logits
    assert Policy(model).choose_layout() == "shared"
    torch.testing.assert_close(model(input_ids=ids).logits, expected)


def test_rows_that_would_share_too_little_are_padded(made_up: ModuleType) -> None:
    rows = made_up.random_rows(7)
    lengths, group = rows.forward_lengths.tolist(), rows.group.tolist()
    # Two rows of different groups share no prompt, and have as little padding as their lengths differ.
    pairs = sorted(
        (abs(lengths[i] - lengths[j]), i, j)
        for i in range(rows.count)
        for j in range(i)
        if group[i] != group[j]
    )
    assert pairs[0][0] == 0
    for pair, name in ((pairs[0], "padded"), (pairs[-1], "shared")):
        micro = micro_batch(rows.select(torch.tensor(pair[1:])), "shared")
        assert micro.layout_name == name
    # Rows of one group share enough.
    assert micro_batch(rows.select(torch.tensor([0, 1, 2, 3])), "shared").layout_name == "shared"


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 3), (4, 1)])
def test_short_rows_in_bfloat16_attend_as_in_float64(
    heads: int, kv_heads: int, window: int | None
) -> None:
    """Values and gradients, as near to float64 as torch's own attention is."""
    rng = torch.Generator().manual_seed(0)
    rows, width, size = 3, 17, 8

    def normal(count: int) -> torch.Tensor:
        made = torch.randn(rows, width, count, size, generator=rng).bfloat16()
        return made.transpose(1, 2).requires_grad_()

    inputs = [normal(heads), normal(kv_heads), normal(kv_heads)]
    gradient = normal(heads).detach()

    def plainly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (shared_prompts.repeated(one, heads // kv_heads) for one in (k, v))
        seen = shared_prompts.band(width, window or width, q.device)
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=0.3)

    def results(way: Any, given: list[torch.Tensor]) -> list[torch.Tensor]:
        found = way(*given)
        return [found, *torch.autograd.grad(found, given, gradient.to(found.dtype))]

    exact = results(plainly, [one.detach().double().requires_grad_() for one in inputs])
    theirs = results(plainly, inputs)
    ours = results(lambda q, k, v: shared_prompts.short(q, k, v, window, 0.3), inputs)

    def error(found: torch.Tensor, of: torch.Tensor) -> float:
        return float((found.detach().double() - of).norm() / of.norm())

    for mine, other, of in zip(ours, theirs, exact, strict=True):
        assert mine.dtype == torch.bfloat16
        assert error(mine, of) < 2 * error(other, of) < 0.02


@pytest.mark.parametrize("short", [0, shared_prompts.SHORT])
def test_a_policy_in_bfloat16_scores_shared_prompts_as_padded_rows(
    short: int, made_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_prompts, "SHORT", short)
    monkeypatch.setattr(shared_prompts, "has_fast_bfloat16", lambda: True)
    rows = made_up.random_rows(7, temperature=0.7)
    which = list(range(16))
    results = []
    for share in (False, True):
        policy = Policy(made_up.tiny_model(kv_heads=2).bfloat16())
        if share:
            assert policy.choose_layout() == "shared"
        results.append(scored(policy, rows, which, share)[1])
    for ours, theirs in zip(results[1], results[0], strict=True):
        assert (ours - theirs).float().norm() < 0.03 * theirs.float().norm()


@pytest.mark.parametrize("share", [False, True])
def test_a_few_tokens_more_change_no_log_prob_and_no_gradient(
    share: bool, made_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "_round_up", lambda size: -(-size // 16) * 16 + 16)
    rows = made_up.random_rows(7, temperature=0.7)
    policy = Policy(made_up.tiny_model(kv_heads=2))
    policy.choose_layout()
    micro, plain = scored(policy, rows, list(range(16)), share)
    ids, index, layout = layouts.rounded(micro.input_ids, micro.index, micro.layout)
    assert ids.numel() >= micro.forward_tokens + 16
    assert len(index) >= len(micro.index) + 16
    count, more = len(micro.index), len(index) - len(micro.index)
    pad = torch.nn.functional.pad
    found, entropy = policy(
        *(ids, index, pad(micro.targets, (0, more))),
        *(pad(micro.temperature, (0, more), value=1.0), False, layout),
    )
    (found[:count] * torch.linspace(-1, 1, count)).sum().backward()
    gradients = [p.grad for p in policy.parameters() if p.grad is not None]
    for ours, theirs in zip((found[:count], entropy[:count], *gradients), plain, strict=True):
        torch.testing.assert_close(ours.detach(), theirs, atol=5e-6, rtol=1e-4)


def test_sizes_of_products_in_bfloat16_are_among_few() -> None:
    sizes = [layouts._round_up(size) for size in range(4096, 8192)]
    assert len(set(sizes)) == 33
    assert all(n <= size <= n * 33 / 32 for n, size in enumerate(sizes, 4096))
    assert [layouts._round_up(size) for size in range(64)] == list(range(64))


def test_no_row_is_rounded_past_the_models_positions() -> None:
    """One of 65 tokens would become one of 66."""
    settings = GPT2Config(vocab_size=32, n_positions=65, n_embd=16, n_layer=1, n_head=2)
    policy = Policy(GPT2LMHeadModel(settings).bfloat16())
    ids = torch.arange(130).reshape(2, 65) % 32
    logprobs, _ = policy(ids, torch.arange(129), ids.flatten()[1:], None)
    assert logprobs.shape == (129,)
    assert logprobs.isfinite().all()


def test_a_policy_in_bfloat16_multiplies_few_sizes(
    made_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: set[tuple[int, int]] = set()
    rounded = policies.rounded

    def told(*given: Any) -> Any:
        ids, index, layout = rounded(*given)
        seen.add((ids.numel(), len(index)))
        return ids, index, layout

    monkeypatch.setattr(policies, "rounded", told)
    rows = made_up.random_rows(7)
    policy = Policy(made_up.tiny_model(kv_heads=2).bfloat16())
    policy.choose_layout()
    chosen = [list(range(first, 16)) for first in range(8)]
    lengths = []
    for which in chosen:
        micro = micro_batch(rows.select(torch.tensor(which)), "shared")
        logprobs, _ = policy.score(micro)
        lengths.append((len(logprobs), len(micro.targets)))
    assert all(scored == asked for scored, asked in lengths)
    assert all(layouts._round_up(size) == size for pair in seen for size in pair)
