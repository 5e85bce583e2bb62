"""Episodes and traces with a tool's results: what a whole update does at tokens that others wrote, which is nothing."""

from __future__ import annotations

from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from tandem.common.records import (
    ExpertTrace,
    FinishReason,
    Group,
    Sample,
    SamplingParams,
    Source,
    Verdict,
    VersionSpan,
)
from tandem.launch.miniature.tools.base_model import called, direct
from tandem.launch.miniature.tools.problems import Product, boxed
from tandem.launch.miniature.tools.tokenizer import EOS_ID, build
from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine
from tandem.learner.rows.groups import MixedGroup
from tandem.learner.updates.updates import Updates

pytestmark = pytest.mark.usefixtures("group")
PROBLEM = Product(a=137, b=258)
PLAYED = (
    (called(PROBLEM, PROBLEM.answer), 1.0),
    (called(PROBLEM, "12"), 0.0),
    (direct(PROBLEM, offered=True), 1.0),
    ((PROBLEM.prompt(), boxed("7")), 0.0),
)
"""Conversations, in which given text and the model's own turns take turns, and their rewards."""


def sample(policy: Any, pieces: tuple[str, ...], reward: float) -> Sample:
    """What follows the prompt, as the worker would have recorded it, with the policy's own log-probs."""
    tok = build()
    prompt = tok.encode(pieces[0])
    tokens: list[int] = []
    own: list[bool] = []
    for number, piece in enumerate(pieces[1:]):
        ids = [*tok.encode(piece), *([EOS_ID] if number % 2 == 0 else [])]
        tokens += ids
        own += [number % 2 == 0] * len(ids)
    with torch.no_grad():
        every = policy(torch.tensor([prompt + tokens])).logits[0].log_softmax(-1)
    known = every[len(prompt) - 1 : -1].gather(1, torch.tensor(tokens)[:, None])[:, 0].numpy()
    written = np.array(own)
    return Sample(
        tokens=np.array(tokens, np.int32),
        source=np.where(written, Source.OWN, Source.ENVIRONMENT).astype(np.uint8),
        logprobs=np.where(written, known, np.nan).astype(np.float32),
        spans=tuple(
            VersionSpan(term=1, step=0, start=at, end=at + 1)
            for at in np.flatnonzero(written).tolist()
        ),
        finish_reason=FinishReason.STOP,
        sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=96),
        text="",
        reward=reward,
        verdict=Verdict.CORRECT if reward else Verdict.WRONG,
        components={},
        extracted=None,
        grader=None,
    )


def episodes(policy: Any) -> Group:
    return Group(
        group_id="0-0",
        attempt=1,
        worker="rollout-0",
        problem_id="train/0",
        prompt_tokens=np.array(build().encode(PROBLEM.prompt()), np.int32),
        prompt_text=PROBLEM.prompt(),
        gold=PROBLEM.answer,
        data_source="miniature",
        samples=tuple(sample(policy, pieces, reward) for pieces, reward in PLAYED),
        trace_ids=(),
        extra={},
    )


def model() -> Any:
    from transformers import Qwen2ForCausalLM

    from tandem.launch.miniature.tools.base_model import model_config

    torch.manual_seed(0)
    return Qwen2ForCausalLM(model_config())


def learner(made_up: ModuleType, policy: Any, staleness: int = 1, **settings: Any) -> Updates:
    config = made_up.config_of(
        learner={"optimizer": {"lr": 0.01, "eps": 0.1}, **settings},
        rollout={"max_new_tokens": 96},
        replay={"groups_per_step": 1, "max_staleness": staleness},
    )
    return Updates(DeepSpeedEngine(policy, config, torch.device("cpu")), config)


def gradients(policy: Any, updates: Updates, mixed: MixedGroup) -> tuple[list[int], torch.Tensor]:
    """The tokens of the update's only forward pass, and the largest gradient of the state after each."""
    read: list[list[int]] = []
    found: list[torch.Tensor] = []

    def watch(module: Any, arguments: Any, keywords: Any, output: Any) -> None:
        if output.last_hidden_state.requires_grad:
            read.append(keywords["input_ids"].flatten().tolist())
            output.last_hidden_state.register_hook(
                lambda gradient: found.append(gradient.abs().amax(-1).flatten())
            )

    handle = policy.model.register_forward_hook(watch, with_kwargs=True)
    assert updates.train(1, [mixed], lr=0.01).applied
    handle.remove()
    ((tokens,), (largest,)) = (read, found)
    return tokens, largest


@pytest.mark.parametrize("objective", ["grpo", "gspo", "cispo", "dapo"])
def test_the_gradient_at_an_environment_s_tokens_is_exactly_zero(
    objective: str, made_up: ModuleType
) -> None:
    policy = model()
    group = episodes(policy)
    updates = learner(made_up, policy, objective={"name": objective})
    tokens, largest = gradients(policy, updates, MixedGroup(group=group))
    prompt = group.prompt_tokens.tolist()
    # One line: the prompt, which the episodes share, then each episode but for its last token, after which
    # nothing is predicted.
    assert tokens == prompt + [t for one in group.samples for t in one.tokens[:-1].tolist()]
    assert largest[: len(prompt) - 1].count_nonzero() == 0
    start = len(prompt)
    for one in group.samples:
        # The state after token i is what token i + 1 is predicted from.
        states = largest[start : start + len(one.tokens) - 1]
        own = torch.from_numpy(one.source == Source.OWN)[1:]
        # Exactly: not some small number.
        assert states[~own].count_nonzero() == 0
        assert (states[own] > 0).all()
        start += len(one.tokens) - 1
    assert sum(int((one.source == Source.ENVIRONMENT).sum()) for one in group.samples) >= 20


def test_what_is_recorded_at_an_environment_s_tokens_doesn_t_matter(made_up: ModuleType) -> None:
    def trained(recorded: float) -> dict[str, torch.Tensor]:
        policy = model()
        group = episodes(policy)
        samples = tuple(
            replace(
                one,
                logprobs=np.where(one.source == Source.OWN, one.logprobs, recorded).astype("f4"),
            )
            for one in group.samples
        )
        updates = learner(made_up, policy)
        mixed = MixedGroup(group=replace(group, samples=samples))
        assert updates.train(1, [mixed], lr=0.01).applied
        return {name: tensor.clone() for name, tensor in updates.engine.parameters()}

    first, second = trained(float("nan")), trained(-1.0)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def conversation(number: int) -> MixedGroup:
    """A trace of a conversation with a tool's result."""
    pieces, _ = PLAYED[number]
    tok = build()
    tokens: list[int] = []
    source: list[int] = []
    for place, piece in enumerate(pieces[1:]):
        ids = [*tok.encode(piece), *([EOS_ID] if place % 2 == 0 else [])]
        tokens += ids
        source += [Source.ENVIRONMENT if place % 2 else Source.EXPERT] * len(ids)
    trace = ExpertTrace(
        trace_id=f"train/{number}#0",
        problem_id=f"train/{number}",
        tokens=np.array(tokens, np.int32),
        logprobs=None,
        text="",
        tokenizer_digest="",
        reward=1.0,
        verdict=Verdict.CORRECT,
        components={},
        grader=None,
        source=np.array(source, np.uint8),
    )
    group = Group(
        group_id=f"offline:{number}",
        attempt=1,
        worker="",
        problem_id=trace.problem_id,
        prompt_tokens=np.array(tok.encode(pieces[0]), np.int32),
        prompt_text=pieces[0],
        gold="",
        data_source="",
        samples=(),
        trace_ids=(trace.trace_id,),
        extra={},
    )
    return MixedGroup(group=group, traces=(trace,))


@pytest.mark.parametrize(
    "objective", ["luffy", "luffy_code", "rl_sft_loss", "chord", "exgrpo", "srft"]
)
def test_beside_own_samples_the_gradient_at_what_others_wrote_in_a_trace_is_exactly_zero(
    objective: str, made_up: ModuleType
) -> None:
    policy = model()
    group = episodes(policy)
    (trace,) = conversation(0).traces
    mixed = MixedGroup(group=replace(group, samples=group.samples[1:3]), traces=(trace,))
    updates = learner(made_up, policy, objective={"name": objective}, staleness=0)
    tokens, largest = gradients(policy, updates, mixed)
    read, length = trace.tokens[:-1].tolist(), len(trace.tokens) - 1
    (start,) = (at for at in range(len(tokens)) if tokens[at : at + length] == read)
    theirs = torch.from_numpy(trace.source == Source.ENVIRONMENT)[1:]
    states = largest[start : start + length]
    assert states[theirs].count_nonzero() == 0
    assert states[~theirs].count_nonzero() == int((~theirs).sum())
    assert int(theirs.sum()) >= 10


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_sft_on_conversations_is_cross_entropy_of_the_assistants_tokens(
    aggregation: str, made_up: ModuleType
) -> None:
    """Its loss and its gradient are those of a computation that masks labels."""
    groups = [conversation(number) for number in (0, 2)]
    assert sum(int((one.traces[0].source == 2).sum()) for one in groups) >= 10
    expected = model()
    rows = []
    for one in groups:
        prompt, trace = torch.from_numpy(one.group.prompt_tokens), one.traces[0]
        ids = torch.cat([prompt, torch.from_numpy(trace.tokens)]).long()
        labels = ids.clone()
        labels[: len(prompt)] = -100
        labels[len(prompt) :][torch.from_numpy(trace.source == Source.ENVIRONMENT)] = -100
        logits = expected(ids[None]).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(logits, labels[1:], reduction="none")
        rows.append(losses[labels[1:] != -100])
    by_token = torch.cat(rows).mean()
    by_row = torch.stack([row.mean() for row in rows]).mean()
    loss = by_token if aggregation == "token_mean" else by_row
    loss.backward()
    norm = torch.cat([one.grad.flatten() for one in expected.parameters()]).norm()

    policy = model()
    found: dict[str, torch.Tensor] = {}
    updates = learner(made_up, policy, objective={"name": "sft", "aggregation": aggregation})

    def add(name: str, gradient: torch.Tensor) -> None:
        found[name] = found.get(name, 0) + gradient.detach()

    for name, tensor in policy.named_parameters():
        tensor.register_hook(partial(add, name))
    metrics = updates.train(1, groups, lr=0.01).metrics
    assert metrics["train/loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["train/nll"] == pytest.approx(by_token.item(), rel=1e-5)
    assert metrics["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    for name, tensor in expected.named_parameters():
        torch.testing.assert_close(found[name], tensor.grad, rtol=1e-3, atol=1e-6)
