"""The learner's log-probs, entropies and gradients are those of each model family's own logits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import families
import numpy as np
import pytest
import torch

from tandem.common.agreement import BOUNDS, Probe
from tandem.common.errors import ConfigError
from tandem.common.records import (
    FinishReason,
    Group,
    Sample,
    SamplingParams,
    Source,
    Verdict,
    VersionSpan,
)
from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine
from tandem.learner.forward import shared_prompts
from tandem.learner.forward.head import Head, head_of
from tandem.learner.forward.policy import Policy
from tandem.learner.objectives import make
from tandem.learner.rows.groups import MixedGroup, rows_of
from tandem.learner.rows.microbatch import micro_batch
from tandem.learner.rows.rows import Rows
from tandem.learner.updates.reference import frozen_policy

CPU = torch.device("cpu")
BOUND = 1e-4
AGREE = [family.name for family in families.FAMILIES if not family.learner]
REFUSED = [family.name for family in families.FAMILIES if family.learner]
FEW = ["Gemma 2", "Phi", "Mistral", "OPT"]
"""A cap, a bias, a window and dropout."""


def some_rows() -> Rows:
    """Groups of unlike lengths, of which rows go far beyond every window."""
    rng = np.random.default_rng(11)
    groups = []
    for number, (length, responses) in enumerate([(5, (3, 30)), (2, (6,)), (20, (4, 9))]):
        prompt = rng.integers(3, families.VOCABULARY, length).astype(np.int32)
        samples = tuple(
            Sample(
                tokens=rng.integers(3, families.VOCABULARY, count).astype(np.int32),
                source=np.full(count, Source.OWN, np.uint8),
                logprobs=np.full(count, -1, np.float32),
                spans=(VersionSpan(term=1, step=5, start=0, end=count),),
                finish_reason=FinishReason.STOP,
                sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=64),
                text="",
                reward=1.0,
                verdict=Verdict.CORRECT,
                components={},
                extracted=None,
                grader=None,
            )
            for count in responses
        )
        group = Group(
            group_id=f"0-{number}",
            attempt=1,
            worker="rollout-0",
            problem_id=f"a/{number}",
            prompt_tokens=prompt,
            prompt_text="",
            gold="",
            data_source="",
            samples=samples,
            trace_ids=(),
            extra={},
        )
        groups.append(MixedGroup(group=group))
    return rows_of(groups, step=6, temperature=1.0, baseline="none")


def own(model: Any, rows: Rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of every response token, by the whole logits of each row alone."""
    logprobs, entropies = [], []
    for row in range(rows.count):
        one = rows.select(torch.tensor([row]))
        ids, prompt = one.ids, int(one.prompt_lengths)
        logits = model.eval()(input_ids=ids[None], use_cache=False).logits[0].float()
        every = torch.log_softmax(logits[prompt - 1 : -1], -1)
        answer = ids[prompt:]
        logprobs.append(every.gather(1, answer[:, None]).squeeze(1))
        entropies.append(-(every.exp() * every).sum(-1))
    return torch.cat(logprobs), torch.cat(entropies)


def gradients(model: Any, logprobs: torch.Tensor, entropies: torch.Tensor) -> list[Any]:
    ramp = torch.linspace(-1, 1, len(logprobs))
    ((logprobs + 0.1 * entropies) * ramp).mean().backward()
    found = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    return found


@pytest.mark.parametrize("attention", ["auto", "varlen"])
@pytest.mark.parametrize("name", AGREE)
def test_a_family_is_trained_by_its_own_log_probs(name: str, attention: str) -> None:
    model = families.model(families.family(name))
    rows = some_rows()
    expected = own(model, rows)
    slope = gradients(model, *expected)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    policy = Policy(model).train()
    policy.choose_layout(Probe.of(model, families.LONGEST), attention)
    # Whatever can share prompts can be packed, and the rest can do neither.
    line = "shared" if attention == "auto" else "packed"
    assert policy.layout == (line if families.family(name).shares else "padded")
    for layout in {"padded", policy.layout}:
        micro = micro_batch(rows, layout)
        found = policy(
            micro.input_ids, micro.index, micro.targets, micro.temperature, True, micro.layout
        )
        for ours, theirs in zip(found, expected, strict=True):
            assert float((ours - theirs).abs().max().detach()) <= BOUND
        for ours, theirs in zip(gradients(model, *found), slope, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-3)


def config_for(made_up: Any, stage: int = 0, dtype: str = "float32", longest: int = 24) -> Any:
    return made_up.config_of(
        learner={"zero_stage": stage},
        model={"dtype": dtype},
        data={"max_prompt_tokens": longest - 12},
    )


def started(made_up: Any, name: str, stage: int = 0, dtype: str = "float32") -> DeepSpeedEngine:
    model = families.model(families.family(name), dtype=getattr(torch, dtype))
    return DeepSpeedEngine(model, config_for(made_up, stage, dtype), CPU)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", FEW)
def test_a_learner_starts_and_scores_as_the_model_does(
    name: str, stage: int, made_up: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_start(made_up, name, stage, monkeypatch)


@pytest.mark.byhand
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("name", AGREE)
def test_every_family_starts(
    name: str, stage: int, dtype: str, made_up: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_start(made_up, name, stage, monkeypatch, dtype)


def check_start(
    made_up: Any, name: str, stage: int, monkeypatch: pytest.MonkeyPatch, dtype: str = "float32"
) -> None:
    monkeypatch.setattr(
        "tandem.learner.engine.deepspeed_engine.stage_of", lambda config, ranks: stage
    )
    engine = started(made_up, name, stage, dtype)
    rows = some_rows()
    micro = micro_batch(rows, engine.policy.layout)
    ((logprobs, entropies),) = engine.score([micro])
    model = families.model(families.family(name), dtype=getattr(torch, dtype))
    bound = BOUNDS[model.dtype]
    for ours, theirs in zip((logprobs, entropies), own(model, rows), strict=True):
        assert float((ours - theirs).abs().max().detach()) <= bound
    # It trains, too.
    scalars = {"constant": 100.0, "tokens": 1.0, "width": 30.0}
    result = engine.update([micro], make("reinforce"), scalars, lr=1e-3)
    assert result.applied


NO_ADAPTERS = {
    "GPT-2": "no linear layer that could have an adapter",
    "Falcon": "no linear layer that could have an adapter",
    "Falcon-H1": "Module 'out_proj' is incompatible with Mamba-based models",
    "DeepSeek V3": "as it does in mixtures of experts",
    "Qwen3-Next": "as it does in mixtures of experts",
}
"""Families whose linear layers PEFT can't all adapt, and what is said then."""


def check_adapters(made_up: Any, name: str, **lora: Any) -> None:
    """Every adapter learns, and merged into the base they give the same log-probs."""
    lora = {"rank": 2, "alpha": 4.0, **lora}
    config = made_up.config_of(
        learner={"lora": lora, "zero_stage": 0}, data={"max_prompt_tokens": 12}
    )
    engine = DeepSpeedEngine(families.model(families.family(name)), config, CPU)
    micro = micro_batch(some_rows(), engine.policy.layout)
    scalars = {"constant": 100.0, "tokens": 1.0, "width": 30.0}
    for _ in range(2):
        assert engine.update([micro], make("reinforce"), scalars, lr=1e-2).applied
    adapters = {name: tensor.clone() for name, tensor in engine.parameters()}
    assert all(tensor.any() for tensor in adapters.values())
    assert engine.adapters is not None
    merged = families.model(families.family(name))
    state = {n: engine.adapters.merged(n, t, adapters) for n, t in engine.base_tensors()}
    merged.load_state_dict(state)
    ((found, _),) = engine.score([micro])
    expected, _ = own(merged, some_rows())
    assert float((found - expected).abs().max().detach()) <= BOUND


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", FEW)
def test_adapters_are_those_of_the_merged_model(name: str, made_up: Any) -> None:
    check_adapters(made_up, name)


@pytest.mark.byhand
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", [name for name in AGREE if name not in NO_ADAPTERS])
def test_so_are_those_of_every_family(name: str, made_up: Any) -> None:
    check_adapters(made_up, name)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", NO_ADAPTERS)
def test_a_family_whose_layers_cannot_have_adapters_is_refused(name: str, made_up: Any) -> None:
    with pytest.raises(ConfigError, match=NO_ADAPTERS[name]):
        check_adapters(made_up, name)
    if name == "DeepSeek V3":
        check_adapters(made_up, name, targets=["o_proj", "kv_b_proj"])


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_differs_is_refused_with_the_figure(name: str, made_up: Any) -> None:
    with pytest.raises(
        ConfigError,
        match=r"the learner's log-probs are off .* by up to [0-9.]+ nats.* is 0\.0001.* within 16",
    ):
        started(made_up, name)


class Biasless(Head):
    bias = None


def without(**what: Any) -> Any:
    return lambda model: replace(head_of(model), **what)


def biasless(model: Any) -> Head:
    head = head_of(model)
    return Biasless(layer=head.layer, scale=head.scale, cap=head.cap)


def with_dropout(self: Policy, mode: bool = True) -> Policy:
    torch.nn.Module.train(self, mode)
    return self


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize(
    ("name", "place", "fault"),
    [
        ("Phi", "policy.head_of", biasless),
        ("Gemma 2", "policy.head_of", without(cap=None)),
        ("Cohere (Command R)", "policy.head_of", without(scale=1.0)),
        ("OPT", "policy.Policy.train", with_dropout),
        ("Mistral", "policy.Policy.choose_layout", lambda self, *_: shared_blindly(self)),
    ],
)
def test_what_is_left_out_is_found_at_start(
    name: str, place: str, fault: Any, made_up: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(f"tandem.learner.forward.{place}", fault)
    if name == "Mistral":
        monkeypatch.setattr("tandem.learner.forward.shared_prompts.band", lambda width, *_: None)
    with pytest.raises(ConfigError, match=r"the learner's log-probs are off"):
        started(made_up, name)


def shared_blindly(policy: Policy) -> None:
    shared_prompts.register()
    policy.model.set_attn_implementation(shared_prompts.IMPLEMENTATION)
    policy.layout = "shared"


@pytest.mark.usefixtures("group")
def test_a_window_that_no_row_reaches_is_not_asked_about(
    made_up: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"sliding_window": 4096, "max_position_embeddings": 32768, "head_dim": 8}
    model = families.model(replace(families.family("Mistral"), sizes=sizes))
    longest = []
    forward = type(model).forward

    def watched(self: Any, input_ids: Any, **rest: Any) -> Any:
        longest.append(input_ids.shape[-1])
        return forward(self, input_ids=input_ids, **rest)

    monkeypatch.setattr(type(model), "forward", watched)
    DeepSpeedEngine(model, config_for(made_up, longest=4096), CPU)
    assert max(longest) < 100


def test_the_whole_rows_logits_are_never_made(monkeypatch: pytest.MonkeyPatch) -> None:
    model = families.model(families.family("Mistral"))
    made = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: made.append(output.shape[1]))
    probe = Probe.of(model, families.LONGEST)
    assert max(len(row.ids) for row in probe.rows) >= 16
    assert max(made) <= 12


def test_the_reference_model_is_held_against_its_own_logits(
    made_up: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = families.model(families.family("Phi"))
    monkeypatch.setattr("tandem.learner.updates.reference.load_model", lambda path, **_: model)
    assert not frozen_policy(config_for(made_up), CPU).training
    monkeypatch.setattr("tandem.learner.forward.policy.head_of", biasless)
    with pytest.raises(ConfigError, match=r"the reference model's log-probs are off"):
        frozen_policy(config_for(made_up), CPU)


def test_a_change_of_the_logits_that_is_not_known_is_refused() -> None:
    model = families.model(families.family("Llama"))
    forward = model.forward

    def squared(*args: Any, **kwargs: Any) -> Any:
        found = forward(*args, **kwargs)
        found.logits = found.logits.sign() * found.logits.square()
        return found

    model.forward = squared
    with pytest.raises(ConfigError, match="changes its logits after the output matrix"):
        Policy(model)


@pytest.mark.usefixtures("group")
def test_what_a_models_own_code_raises_is_told_as_a_refusal(made_up: Any) -> None:
    model = families.model(families.family("Llama"))
    model.model.layers[1].forward = None
    with pytest.raises(ConfigError, match=r"'llama' fails in its own forward.* TypeError"):
        DeepSpeedEngine(model, config_for(made_up), CPU)
    model = families.model(families.family("Llama"))
    # A model whose head does more than the matrix that it names: as ELECTRA's, which narrows first.
    model.lm_head.register_forward_pre_hook(lambda module, inputs: (inputs[0][..., :16],))
    model.lm_head.weight = torch.nn.Parameter(torch.randn(families.VOCABULARY, 16))
    with pytest.raises(ConfigError, match=r"the learner's log-probs can't be computed: Runtime"):
        DeepSpeedEngine(model, config_for(made_up), CPU)
