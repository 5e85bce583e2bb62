"""Rows packed on a line are computed as if each were alone, by every attention that is offered."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from transformers import modeling_flash_attention_utils

from tandem.common.agreement import Probe
from tandem.common.models import choose_attention
from tandem.learner.engine.critic import CriticEngine
from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine
from tandem.learner.forward import layouts, packed, shared_prompts
from tandem.learner.forward.policy import Policy
from tandem.learner.objectives import make
from tandem.learner.rows.microbatch import LayoutName, PackedLayout, dummy, laid_out, micro_batch
from tandem.learner.rows.rows import Rows, ragged

CPU = torch.device("cpu")
BOUND = 3e-5
"""Nats, and relative to the largest gradient: float32 sums in another order."""


def qwen(
    device: str = "cpu", dtype: torch.dtype = torch.float32, attention: str = "sdpa", **sizes: Any
) -> Any:
    """A small model with heads of 32 dimensions, which every kernel takes, two of them to a key-value head."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    settings = {
        "vocab_size": 32,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 64,
        "max_position_embeddings": 128,
        "bos_token_id": None,
        "attn_implementation": attention,
    }
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(Qwen2Config(**settings | sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0.0, 0.1)
    return model.to(device, dtype)


def windowed(window: int) -> Any:
    """One whose layers all have a sliding window."""
    return qwen(use_sliding_window=True, sliding_window=window, max_window_layers=0)


WAYS: dict[str, tuple[str, str, LayoutName]] = {
    "eager": ("eager", "eager", "padded"),
    "padded sdpa": ("sdpa", "sdpa", "padded"),
    "shared prompts": ("sdpa", shared_prompts.IMPLEMENTATION, "shared"),
    "varlen": ("sdpa", packed.VARLEN, "packed"),
    "flex": ("sdpa", packed.FLEX, "packed"),
    "flash_attention_2": ("flash_attention_2", packed.FLASH, "packed"),
}
"""What a model is loaded with, its attention then, and the layout."""
ON_CPUS = ["eager", "padded sdpa", "shared prompts", "varlen"]
"""Those that a CPU can train with; flex has no backward pass there."""
ON_GPUS = ["eager", "padded sdpa", "varlen", "flex", "flash_attention_2"]


def policy_of(
    way: str, device: str = "cpu", dtype: torch.dtype = torch.float32, **sizes: Any
) -> Policy:
    layouts.register()
    loaded, attention, layout = WAYS[way]
    if loaded == packed.FLASH:
        pytest.importorskip("flash_attn")
    model = qwen(device, dtype, loaded, **sizes)
    model.set_attn_implementation(attention)
    policy = Policy(model)
    policy.layout = layout
    return policy


@pytest.fixture
def uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Flex attention as it is written: to compile it takes a quarter of a minute for each shape."""
    flex_attention = sys.modules[create_block_mask.__module__]
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with torch.compiler.set_stance("force_eager"):
        yield


def replaced(rows: Rows, row: int, seed: int) -> Rows:
    """Rows whose tokens are others in all groups but that of this row."""
    generator = torch.Generator().manual_seed(seed)
    sizes = rows.prompt_lengths + rows.response_lengths
    owner = torch.repeat_interleave(torch.arange(rows.count), sizes)
    other = torch.randint(3, 24, rows.ids.shape, generator=generator)
    kept = (rows.group == rows.group[row])[owner]
    return rows.with_columns(ids=torch.where(kept, rows.ids, other))


def of_row(
    policy: Policy, rows: Rows, row: int, which: list[int], *, gradient: bool = True
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """``[2, n]`` log-probs and entropies of one row among others, and the gradient of a loss of these alone."""
    micro = micro_batch(rows.select(torch.tensor(which)), policy.layout).to(policy.model.device)
    # A single row has no prompt to share.
    alone = len(which) == 1 and policy.layout == "shared"
    assert micro.layout_name == ("padded" if alone else policy.layout)
    mine = (micro.rows.row == which.index(row)).nonzero().squeeze(1)
    with torch.enable_grad() if gradient else torch.no_grad():
        scored = policy(
            micro.input_ids, micro.index, micro.targets, micro.temperature, True, micro.layout
        )
        both = torch.stack(scored)[:, mine]
    if not gradient:
        return both, []
    ramp = torch.linspace(-1, 1, both.numel(), device=both.device).view_as(both)
    (both * ramp).sum().backward()
    gradients = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
    policy.zero_grad()
    return both.detach(), gradients


def apart(
    one: tuple[torch.Tensor, list[torch.Tensor]], other: tuple[torch.Tensor, list[torch.Tensor]]
) -> tuple[float, float]:
    """Greatest difference of the values in nats, and of the gradients relative to the largest one."""
    most = max([float(a.abs().max()) for a in one[1]], default=1.0)
    gradients = [float((a - b).abs().max()) for a, b in zip(one[1], other[1], strict=True)]
    return float((one[0] - other[0]).abs().max()), max(gradients, default=0.0) / most


OTHERS = {
    "in another order": [9, 14, 5, 3, 0],
    "other neighbours": [1, 2, 5, 6, 15, 12, 10],
    "longer ones before it": [9, 9, 9, 5],
    "alone": [5],
}
"""Rows, as indices, among which row 5 is scored; see ``NEIGHBOURS``."""
NEIGHBOURS = [0, 3, 5, 9, 14]


def check_isolation(policy: Policy, rows: Rows, bound: float, *, gradient: bool = True) -> None:
    expected = of_row(policy, rows, 5, NEIGHBOURS, gradient=gradient)
    other = replaced(rows, 5, seed=1)
    assert not torch.equal(other.ids, rows.ids)
    found = of_row(policy, other, 5, NEIGHBOURS, gradient=gradient)
    # With the same lengths all sums are taken in the same order, so that not a bit may differ.
    assert torch.equal(found[0], expected[0])
    if policy.model.device.type == "cpu":
        assert all(torch.equal(a, b) for a, b in zip(found[1], expected[1], strict=True))
    else:
        # Kernels on a GPU sum the queries' gradient by atomic additions.
        assert apart(expected, found)[1] <= bound
    for which in OTHERS.values():
        found = of_row(policy, rows, 5, which, gradient=gradient)
        for difference in apart(expected, found):
            assert difference <= bound


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("way", ON_CPUS)
def test_a_row_does_not_depend_on_its_neighbours(
    way: str, window: int | None, made_up: ModuleType
) -> None:
    sizes = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    policy = policy_of(way, **(sizes if window else {}))
    check_isolation(policy, made_up.random_rows(7, temperature=0.7), BOUND)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.usefixtures("uncompiled")
def test_nor_does_it_under_flex_attention(window: int | None, made_up: ModuleType) -> None:
    """On a CPU it has no backward pass."""
    rows = made_up.random_rows(7, temperature=0.7)
    sizes = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    policy = policy_of("flex", **(sizes if window else {}))
    expected = of_row(policy_of("eager", **(sizes if window else {})), rows, 5, [5], gradient=False)
    check_isolation(policy, rows, BOUND, gradient=False)
    found = of_row(policy, rows, 5, NEIGHBOURS, gradient=False)
    assert apart(expected, found)[0] <= BOUND


def torch_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    ends_q: torch.Tensor,
    ends_k: torch.Tensor,
    most_q: int,
    most_k: int,
    *,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
) -> torch.Tensor:
    """What torch's kernel computes, with its interface: ``[F, heads, d]`` each, of which some may share keys."""
    assert enable_gqa
    times = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(times, 1) for part in (key, value))
    assert ends_q.dtype == ends_k.dtype == torch.int32
    assert torch.equal(ends_q, ends_k)
    assert most_q == most_k == int(ends_q.diff().max())
    before, after = window_size
    assert after == 0
    found = []
    for start, end in zip(ends_q[:-1].tolist(), ends_q[1:].tolist(), strict=True):
        place = torch.arange(end - start)
        apart = place[:, None] - place
        hidden = (apart < 0) | (apart > before if before >= 0 else False)
        q, k, v = (part[start:end].transpose(0, 1) for part in (query, key, value))
        scores = (q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)).masked_fill(
            hidden, -torch.inf
        )
        found.append((scores.softmax(-1) @ v).transpose(0, 1))
    return torch.cat(found)


def test_a_kernel_is_called_so_that_it_computes_each_row_alone() -> None:
    lengths = (3, 1, 8)
    ends = torch.tensor([0, 3, 4, 12], dtype=torch.int32)
    layout = PackedLayout(lengths=lengths, ends=ends, positions=torch.zeros(1, 12))
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, 12, 16) for heads in (4, 2, 2))
    for window in (None, 4, 20):
        for scaling in (None, 0.3):
            expected = packed._by_row(query, key, value, layout, window, scaling)
            found = packed._by_kernel(torch_kernel, query, key, value, layout, window, scaling)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def flash_kernel(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    deterministic: bool = False,
) -> torch.Tensor:
    """What flash-attn's function for variable lengths computes, with its interface."""
    assert causal
    assert dropout_p == softcap == 0
    rest = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
    window = (window_size[0], 0)
    return torch_kernel(q, k, v, *rest, enable_gqa=True, scale=softmax_scale, window_size=window)


@pytest.mark.parametrize("window", [None, 4])
def test_transformers_hands_the_rows_to_flash_attention(
    window: int | None, made_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where flash-attn is missing it refuses the name, so it is told that the package is loaded."""
    flash = modeling_flash_attention_utils
    monkeypatch.setattr(flash, "_loaded_implementation", packed.FLASH)
    monkeypatch.setattr(flash, "_flash_varlen_fn", flash_kernel)
    process = flash._lazy_define_process_function(flash_kernel)
    monkeypatch.setattr(flash, "_process_flash_kwargs_fn", process)
    for other in ("_flash_fn", "_pad_fn", "_unpad_fn"):
        monkeypatch.setattr(flash, other, None)
    rows = made_up.random_rows(7, temperature=0.7)
    sizes = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    policy = policy_of("padded sdpa", **(sizes if window else {}))
    expected = scored(policy, rows, NEIGHBOURS)
    policy.model.config._attn_implementation_internal = packed.FLASH
    policy.layout = "packed"
    for ours, theirs in zip(scored(policy, rows, NEIGHBOURS), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("way", ON_GPUS)
def test_nor_does_it_on_a_gpu(way: str, window: int | None, made_up: ModuleType) -> None:
    """In bfloat16, whose rounding is 1/256: sums in another order may differ by several of these."""
    sizes = {"use_sliding_window": True, "sliding_window": window, "max_window_layers": 0}
    sizes = sizes if window else {}
    policy = policy_of(way, "cuda", torch.bfloat16, **sizes)
    rows = made_up.random_rows(7, temperature=0.7)
    check_isolation(policy, rows, 0.05)
    # And it is the model's own result.
    expected = of_row(policy_of("eager", "cuda", **sizes), rows, 5, [5])
    found = of_row(policy, rows, 5, NEIGHBOURS)
    assert max(apart(expected, found)) <= 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("attention", ["varlen", "flex", "flash_attention_2"])
def test_a_policy_on_a_gpu_packs_rows(attention: str, made_up: ModuleType) -> None:
    if attention == packed.FLASH:
        pytest.importorskip("flash_attn")
    loaded = choose_attention(attention, "cuda", torch.bfloat16)
    policy = Policy(qwen("cuda", torch.bfloat16, loaded))
    assert policy.choose_layout(Probe.of(policy.model, 40), attention) == "packed"


# Rows packed on a line are what padded rows are.


def scored(policy: Policy, rows: Any, which: list[int]) -> list[torch.Tensor]:
    micro = micro_batch(rows.select(torch.tensor(which)), policy.layout)
    found, entropy = policy(
        micro.input_ids, micro.index, micro.targets, micro.temperature, False, micro.layout
    )
    ramp = torch.linspace(-1, 1, len(found))
    (found * ramp).sum().backward()
    gradients = [p.grad.clone() for p in policy.parameters() if p.grad is not None]
    policy.zero_grad()
    return [found.detach(), entropy.detach(), *gradients]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("which", [list(range(16)), [14, 3, 9, 0, 8], [5]])
def test_log_probs_entropies_and_gradients_are_those_of_padded_rows(
    which: list[int], kv_heads: int, made_up: ModuleType
) -> None:
    rows = made_up.random_rows(7, temperature=0.7)
    expected = scored(Policy(made_up.tiny_model(kv_heads=kv_heads)), rows, which)
    policy = Policy(made_up.tiny_model(kv_heads=kv_heads))
    assert policy.choose_layout(attention="varlen") == "packed"
    for ours, theirs in zip(scored(policy, rows, which), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-4)


@pytest.mark.parametrize("window", [2, 5, 9])
def test_a_sliding_window_is_kept(window: int, made_up: ModuleType) -> None:
    rows = made_up.random_rows(7)
    which = [0, 1, 2, 5, 9]
    assert max(rows.forward_lengths[which]) > window
    expected = scored(Policy(windowed(window)), rows, which)
    policy = Policy(windowed(window))
    assert policy.choose_layout(attention="varlen") == "packed"
    for ours, theirs in zip(scored(policy, rows, which), expected, strict=True):
        torch.testing.assert_close(ours, theirs, atol=3e-5, rtol=1e-4)


def test_gradient_checkpointing_recomputes_with_the_same_layout(made_up: ModuleType) -> None:
    rows = made_up.random_rows(7)
    results = []
    for checkpointing in (False, True):
        model = made_up.tiny_model()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        policy = Policy(model).train()
        assert policy.choose_layout(attention="varlen") == "packed"
        results.append(scored(policy, rows, [0, 1, 2, 3, 5]))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_packed_line_has_every_row_once_and_no_padding(made_up: ModuleType) -> None:
    rows = made_up.random_rows(7).select(torch.tensor([14, 3, 9]))
    micro = micro_batch(rows, "packed")
    assert isinstance(micro.layout, PackedLayout)
    lengths = rows.forward_lengths.tolist()
    assert micro.forward_tokens == sum(lengths)
    assert micro.layout.lengths == tuple(lengths)
    assert micro.layout.ends.tolist() == [0, lengths[0], sum(lengths[:2]), sum(lengths)]
    starts = rows.starts.tolist()
    line = [rows.ids[s : s + n] for s, n in zip(starts, lengths, strict=True)]
    assert torch.equal(micro.input_ids[0], torch.cat(line))
    assert micro.layout.positions[0].tolist() == [p for n in lengths for p in range(n)]
    # What is predicted comes right after what predicts it.
    padded = micro_batch(rows)
    assert torch.equal(
        micro.input_ids.flatten()[micro.index], padded.input_ids.flatten()[padded.index]
    )
    assert laid_out(micro, "packed") is micro
    assert torch.equal(laid_out(micro, "padded").input_ids, padded.input_ids)


# The engine, the critic and adapters.


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("learner", [{}, {"lora": {"rank": 2, "alpha": 4.0}}])
@pytest.mark.parametrize("stage", [0, 3])
def test_an_update_is_that_of_padded_rows(
    stage: int, learner: dict[str, Any], made_up: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tandem.learner.engine.deepspeed_engine.stage_of", lambda config, ranks: stage
    )
    objective = make("luffy")
    rows = made_up.random_rows()
    scalars = {k: float(v) for k, v in objective.statistics(rows).items()} | {"constant": 192.0}
    trained = []
    for attention in ("eager", "varlen"):
        config = made_up.config_of(
            learner={"zero_stage": stage, "gradient_checkpointing": True, **learner},
            model={"attention": attention},
        )
        model = made_up.tiny_model()
        model.set_attn_implementation(choose_attention(attention, CPU, torch.float32))
        engine = DeepSpeedEngine(model, config, CPU)
        assert engine.policy.layout == ("packed" if attention == "varlen" else "padded")
        micro = micro_batch(rows, engine.policy.layout)
        for _ in range(2):
            # A rank with fewer rows than others has a dummy, which has no layout.
            result = engine.update([micro, dummy(rows)], objective, scalars, lr=1e-3)
            assert result.applied
        trained.append({name: p.clone() for name, p in engine.parameters()})
    for name, expected in trained[0].items():
        torch.testing.assert_close(trained[1][name], expected, atol=2e-5, rtol=1e-4, msg=name)


@pytest.mark.usefixtures("group")
def test_a_critic_packs_rows_too(made_up: ModuleType) -> None:
    values = []
    for attention in ("eager", "varlen"):
        config = made_up.config_of(
            learner={"critic": {}, "objective": {"name": "ppo"}}, model={"attention": attention}
        )
        model = made_up.tiny_model()
        model.set_attn_implementation(choose_attention(attention, CPU, torch.float32))
        critic = CriticEngine(model, config, CPU)
        with torch.no_grad():
            critic.model.head.weight.normal_(generator=torch.Generator().manual_seed(1))
        assert critic.layout == ("packed" if attention == "varlen" else "padded")
        # Micro-batches come as the policy has them.
        values.append(critic.score([micro_batch(made_up.random_rows(), "shared")])[0])
    torch.testing.assert_close(values[1], values[0], atol=1e-4, rtol=1e-4)


# Which attention is taken.


@pytest.mark.parametrize(
    ("setting", "loaded", "device", "dtype", "found"),
    [
        ("auto", "sdpa", "cpu", torch.float32, "sdpa, prompts shared on a line without padding"),
        ("sdpa", "sdpa", "cpu", torch.bfloat16, "sdpa, prompts shared on a line without padding"),
        ("auto", "eager", "cpu", torch.float32, "eager, padded rows"),
        ("varlen", "sdpa", "cpu", torch.float32, "varlen, rows packed on a line without padding"),
        ("auto", "sdpa", "cuda", torch.bfloat16, "varlen, rows packed on a line without padding"),
        ("auto", "sdpa", "cuda", torch.float32, "sdpa, padded rows"),
        ("auto", "eager", "cuda", torch.bfloat16, "eager, padded rows"),
        ("sdpa", "sdpa", "cuda", torch.bfloat16, "sdpa, padded rows"),
        ("flex", "eager", "cuda", torch.float32, "flex, rows packed on a line without padding"),
        (
            "auto",
            "flash_attention_2",
            "cuda",
            torch.bfloat16,
            "flash_attention_2, rows packed on a line without padding",
        ),
    ],
)
def test_the_fastest_attention_of_a_setting(
    setting: str, loaded: str, device: str, dtype: torch.dtype, found: str
) -> None:
    assert str(layouts.fastest(setting, loaded, device, dtype)) == found


def test_why_a_faster_one_is_not_taken() -> None:
    def reason(setting: str, loaded: str, device: str, dtype: torch.dtype) -> str:
        return layouts.fastest(setting, loaded, device, dtype).reason

    assert "flash-attn isn't installed" in reason("auto", "sdpa", "cuda", torch.bfloat16)
    assert "half precision" in reason("auto", "sdpa", "cuda", torch.float32)
    assert "cap or sinks" in reason("auto", "eager", "cuda", torch.bfloat16)
    assert "row by row" in reason("varlen", "sdpa", "cpu", torch.float32)
    assert reason("varlen", "sdpa", "cuda", torch.bfloat16) == ""
    assert reason("auto", "flash_attention_2", "cuda", torch.bfloat16) == ""


@pytest.mark.parametrize("setting", ["varlen", "flex"])
def test_they_begin_as_what_auto_takes_without_flash_attention(setting: str) -> None:
    assert choose_attention(setting, "cpu", torch.float32) == "sdpa"


def test_the_log_says_which_one_is_taken(
    made_up: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "tandem.learner"):
        Policy(made_up.tiny_model()).choose_layout(attention="varlen", whose="the critic's")
    (line,) = caplog.messages
    assert line == (
        "the critic's attention is varlen, rows packed on a line without padding "
        "(by sdpa, row by row: the kernel needs CUDA and half precision)"
    )


def test_a_model_whose_rows_would_see_each_other_keeps_padded_rows(
    made_up: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def leaking(layout: PackedLayout, implementation: str) -> dict[str, Any]:
        whole = PackedLayout(
            lengths=(sum(layout.lengths),),
            ends=layout.ends[[0, -1]],
            positions=layout.positions,
        )
        return arguments(whole, implementation)

    arguments = packed.arguments
    monkeypatch.setattr(packed, "arguments", leaking)
    policy = Policy(made_up.tiny_model())
    with caplog.at_level(logging.INFO, "tandem.learner"):
        assert policy.choose_layout(attention="varlen") == "padded"
    assert policy.model.config._attn_implementation == "sdpa"
    assert "sdpa, padded rows (not varlen, rows packed" in caplog.text
    assert "log-probs are off by" in caplog.text


def test_a_torch_without_the_kernel_keeps_padded_rows(
    made_up: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def older(*words: Any) -> Any:
        raise ModuleNotFoundError("No module named 'torch.nn.attention.varlen'")

    monkeypatch.setattr(packed, "_by_row", older)
    policy = Policy(made_up.tiny_model())
    with caplog.at_level(logging.INFO, "tandem.learner"):
        assert policy.choose_layout(attention="varlen") == "padded"
    assert policy.model.config._attn_implementation == "sdpa"
    assert "No module named 'torch.nn.attention.varlen'" in caplog.text


def test_a_cap_of_the_scores_keeps_padded_rows(caplog: pytest.LogCaptureFixture) -> None:
    import families

    model = families.model(families.family("Gemma 2"))
    policy = Policy(model)
    with caplog.at_level(logging.INFO, "tandem.learner"):
        assert policy.choose_layout(Probe.of(model, families.LONGEST), "varlen") == "padded"
    assert policy.model.config._attn_implementation == "eager"
    assert "varlen has no softcap" in caplog.text


@pytest.mark.usefixtures("uncompiled")
def test_flex_attention_can_cap_scores() -> None:
    import families

    model = families.model(families.family("Gemma 2"))
    policy = Policy(model)
    probe = Probe.of(model, families.LONGEST)
    assert policy.choose_layout(probe, "flex") == "packed"
    policy.require_own(probe)


# What transformers makes of a packed line.

LENGTHS = (9, 2, 14, 1, 5)
LEAKS = 0.1
"""A leak is far more than this, rounding far less: units of a logit."""


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("call", "isolated"),
    [
        ({"use_cache": False}, True),
        ({}, False),
        ({"use_cache": False, "attention_mask": "ones"}, False),
        ({"use_cache": False, "position_ids": None}, False),
    ],
    ids=["as the learner calls it", "with a cache", "with a mask of ones", "without positions"],
)
def test_what_keeps_rows_apart_without_a_layout_is_no_mask_no_cache_and_positions(
    call: dict[str, Any], isolated: bool, attention: str, training: bool
) -> None:
    model = qwen(attention=attention).train(training)
    lengths = torch.tensor(LENGTHS)
    ids = torch.randint(3, 32, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(0))
    settings = {"position_ids": ragged(torch.zeros_like(lengths), lengths)[None], **call}
    if call.get("attention_mask") == "ones":
        settings["attention_mask"] = torch.ones_like(ids)
    with torch.no_grad():
        found = model(input_ids=ids, **settings).logits[0]
        alone = [model(input_ids=one, use_cache=False).logits[0] for one in ids.split(LENGTHS, 1)]
    difference = float((found - torch.cat(alone)).abs().max())
    assert difference < BOUND if isolated else difference > LEAKS
