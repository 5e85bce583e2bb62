"""The engine that sleeps keeps the contract on which the fault tests rely."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scripted_engine import ScriptedEngine, make

from tandem.common.config import ModelConfig, RolloutConfig
from tandem.common.errors import WeightsError
from tandem.common.models import load_model, load_tokenizer
from tandem.common.records import FinishReason, SamplingParams, Version
from tandem.rollout.engine import Engine, FinishedGroup, GroupRequest, NamedWeights

V1, V2 = Version(term=1, step=1), Version(term=1, step=2)


def in_engine(scenario: Callable[[ScriptedEngine], Awaitable[Any]], seconds: float = 0.001) -> Any:
    async def run() -> Any:
        engine = make(ModelConfig(), RolloutConfig(), max_rows=8)
        engine._step_seconds = seconds
        await engine.start()
        try:
            return await asyncio.wait_for(scenario(engine), 30)
        finally:
            await engine.close()

    return asyncio.run(run())


def asks(group_id: str = "0-0", *, new: int = 60, count: int = 3) -> GroupRequest:
    prompt = load_tokenizer("miniature")("49-6+8-3=?<think>")["input_ids"]
    return GroupRequest(
        group_id=group_id,
        prompt_tokens=np.array(prompt, dtype=np.int32),
        count=count,
        sampling=SamplingParams(max_new_tokens=new, temperature=1.0, top_p=1.0, top_k=0),
        seed=0,
    )


async def collect(engine: Engine, *requests: GroupRequest) -> dict[str, FinishedGroup]:
    return {group.group_id: group async for group in engine.generate(requests)}


def weights() -> dict[str, torch.Tensor]:
    return dict(load_model("miniature").named_parameters())


async def steps(engine: ScriptedEngine, count: int) -> None:
    while engine.stats().decode_steps < count:
        await asyncio.sleep(0)


def test_it_is_an_engine_of_the_models_parameters() -> None:
    engine = make(ModelConfig(), RolloutConfig(), max_rows=8)
    assert isinstance(engine, Engine)
    expected = {
        (n, tuple(p.shape), "float32") for n, p in load_model("miniature").named_parameters()
    }
    assert {(s.name, s.shape, s.dtype) for s in engine.parameter_specs()} == expected


def test_lengths_can_be_drawn_from_a_distribution_and_the_time_of_a_step_is_told(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TANDEM_SCRIPTED_LENGTHS", "20:40:1.0")
    monkeypatch.setenv("TANDEM_SCRIPTED_TIMES", str(tmp_path))
    (group,) = in_engine(lambda e: collect(e, asks(count=60))).values()
    lengths = [len(sample.tokens) for sample in group.samples]
    assert 14 < np.mean(lengths) < 26
    assert (min(lengths) < 10, max(lengths)) == (True, 40)
    (told,) = tmp_path.iterdir()
    assert float(told.read_text()) >= 0.001


def test_responses_answer_the_prompt_and_depend_on_seed_and_group_alone() -> None:
    alone = in_engine(lambda e: collect(e, asks("0-1")))["0-1"]
    together = in_engine(lambda e: collect(e, asks("0-0"), asks("0-1"), asks("0-2")))["0-1"]
    assert [s.text for s in alone.samples] == [s.text for s in together.samples]
    for sample in alone.samples:
        assert sample.text.startswith("49-6=43+8=51-3=48</think> <answer> \\boxed{")
        assert sample.finish_reason is FinishReason.STOP
        assert (sample.logprobs < 0).all()


def test_spans_say_which_version_sampled_which_token() -> None:
    async def scenario(engine: ScriptedEngine) -> FinishedGroup:
        await engine.load(NamedWeights(weights()), V1)
        running = asyncio.create_task(collect(engine, asks()))
        await steps(engine, 5)
        await engine.load(NamedWeights(weights()), V2)
        return (await running)["0-0"]

    for sample in in_engine(scenario).samples:
        first, second = sample.spans
        assert ((first.step, first.start), second.step) == ((1, 0), 2)
        assert (first.end, second.end) == (second.start, len(sample.tokens))
        assert first.end >= 5


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_weights_that_are_not_the_models_change_nothing(change: str) -> None:
    bad = weights()
    if change == "missing":
        del bad["model.norm.weight"]
    elif change == "unknown":
        bad["extra"] = torch.zeros(1)
    else:
        bad["model.norm.weight"] = torch.zeros(3)

    async def scenario(engine: ScriptedEngine) -> Version | None:
        await engine.load(NamedWeights(weights()), V1)
        with pytest.raises(WeightsError):
            await engine.load(NamedWeights(bad), V2)
        return engine.version

    assert in_engine(scenario) == V1


def test_abort_yields_what_there_is() -> None:
    async def scenario(engine: ScriptedEngine) -> dict[str, FinishedGroup]:
        # The second group doesn't fit beside the first one: it waits.
        running = asyncio.create_task(collect(engine, asks("0-0", count=8), asks("0-1")))
        await steps(engine, 4)
        await engine.abort(["0-0", "0-1", "never heard of"])
        return await running

    groups = in_engine(scenario)
    assert all(s.finish_reason is FinishReason.ABORT for g in groups.values() for s in g.samples)
    assert {len(s.tokens) >= 4 for s in groups["0-0"].samples} == {True}
    assert {len(s.tokens) for s in groups["0-1"].samples} == {0}


def test_no_token_step_runs_while_it_is_paused() -> None:
    async def scenario(engine: ScriptedEngine) -> dict[str, FinishedGroup]:
        running = asyncio.create_task(collect(engine, asks()))
        await steps(engine, 2)
        await engine.pause()
        before = engine.stats().decode_steps
        await asyncio.sleep(0.02)
        assert engine.stats().decode_steps == before
        await engine.resume()
        return await running

    assert len(in_engine(scenario)["0-0"].samples) == 3


def test_a_group_id_runs_once_at_a_time() -> None:
    async def scenario(engine: ScriptedEngine) -> None:
        running = asyncio.create_task(collect(engine, asks()))
        await steps(engine, 1)
        with pytest.raises(ValueError, match="already running"):
            await collect(engine, asks())
        await engine.close()
        await running

    in_engine(scenario)
