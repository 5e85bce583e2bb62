"""The ratio check, end to end: what the engine reports is what the learner computes.

The shipped miniature samples with the real engine, its answers are graded, the learner trains on
them, and its weights go back: at each step's first update |log π_θ/μ| of fresh tokens is at most
1e-4 in float32. Each of four faults, planted where it would come about, trips that check, and is an
alarm of the learner's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from tandem.common import models
from tandem.common.config import Config, build
from tandem.common.ratio_check import alarm_of
from tandem.common.records import Group, SamplingParams, Version
from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine
from tandem.learner.forward.policy import Policy
from tandem.learner.rows.groups import MixedGroup
from tandem.learner.updates.updates import Updates
from tandem.rollout.decoding.torch_engine import TorchEngine
from tandem.rollout.engine import GroupRequest, NamedWeights

pytestmark = pytest.mark.usefixtures("group")
BOUND = 1e-4
CPU = torch.device("cpu")
PROMPTS = ("49-6+8-3+5-2+7-9=?<think>", "12+7-9+4-3+8-6+1=?<think>")
STEPS = 2


def a_config(dtype: str = "float32") -> Config:
    return build(
        {
            "run": {"steps": STEPS},
            "data": {"train": [{"path": "unused.parquet", "name": "a"}]},
            "rollout": {
                "group_size": 4,
                "max_new_tokens": 54,
                "temperature": 1.3,
                "dtype": dtype,
            },
            "replay": {"groups_per_step": len(PROMPTS), "max_staleness": 0},
            "learner": {"objective": {"name": "grpo"}, "optimizer": {"lr": 1e-3}},
        }
    )


def load(dtype: str = "float32") -> Any:
    return models.load_model("miniature", dtype=dtype, attention="sdpa", device=CPU)


def graded(group: Group) -> Group:
    """With rewards that differ, so that every group trains."""
    from tandem.common.records import Verdict

    samples = tuple(
        replace(sample, reward=float(n % 2), verdict=(Verdict.WRONG, Verdict.CORRECT)[n % 2])
        for n, sample in enumerate(group.samples)
    )
    return replace(group, samples=samples)


async def trained_on_samples(
    updates: Updates,
    sampler: TorchEngine,
    *,
    temperature: float | None = None,
    loads: bool = True,
) -> list[dict[str, float]]:
    """Each step's metrics: sample, grade, train, load. A fault may sample at another temperature than
    the records say, or restamp old weights."""
    config = updates.config
    tokenizer = models.load_tokenizer("miniature")
    told = SamplingParams(
        temperature=config.rollout.temperature,
        top_p=1.0,
        top_k=0,
        max_new_tokens=config.rollout.max_new_tokens,
    )
    used = told if temperature is None else replace(told, temperature=temperature)
    found = []
    await sampler.start()
    for step in range(1, STEPS + 1):
        requests = [
            GroupRequest(
                group_id=f"{step}-{number}",
                prompt_tokens=torch.tensor(tokenizer(text)["input_ids"]).int().numpy(),
                count=config.rollout.group_size,
                sampling=used,
                seed=0,
            )
            for number, text in enumerate(PROMPTS)
        ]
        finished = {f.group_id: f async for f in sampler.generate(requests)}
        groups = [
            graded(
                Group(
                    group_id=request.group_id,
                    attempt=1,
                    worker="test",
                    problem_id=request.group_id,
                    prompt_tokens=request.prompt_tokens,
                    prompt_text="",
                    gold="",
                    data_source="test",
                    samples=tuple(
                        replace(sample, sampling=told)
                        for sample in finished[request.group_id].samples
                    ),
                    trace_ids=(),
                    extra={},
                )
            )
            for request in requests
        ]
        outcome = updates.train(step, [MixedGroup(group=group) for group in groups], lr=1e-3)
        assert outcome.applied
        assert outcome.metrics["train/lag"] == 0
        found.append(outcome.metrics)
        version = Version(term=1, step=step)
        if loads:
            dtype = getattr(torch, config.engine_dtype)
            weights = {n: p.detach().to(dtype, copy=True) for n, p in updates.engine.parameters()}
            await sampler.load(NamedWeights(weights), version)
        else:
            await sampler.restamp(version)
    await sampler.close()
    return found


Check = Callable[..., list[dict[str, float]]]


@pytest.fixture
def check() -> Check:
    """Runs the loop, with a fault planted in the sampler's or the learner's model."""

    def run(
        plant: Callable[[Any, Updates], None] = lambda sampling, updates: None,
        dtype: str = "float32",
        **faults: Any,
    ) -> list[dict[str, float]]:
        config = a_config(dtype)
        updates = Updates(DeepSpeedEngine(load(), config, CPU), config)
        sampling = load(dtype)
        plant(sampling, updates)
        sampler = TorchEngine(
            sampling, models.load_tokenizer("miniature"), version=Version(term=1, step=0)
        )
        return asyncio.run(trained_on_samples(updates, sampler, **faults))

    return run


def is_silent(metrics: dict[str, float]) -> bool:
    """Whether engine and learner agree."""
    assert metrics["ratio/lag"] == 0
    assert metrics["ratio/tokens"] > 100
    assert bool(alarm_of(metrics)) == bool(metrics["ratio/alarm"])
    return metrics["train/log_ratio_max_lag0"] <= BOUND and not metrics["ratio/alarm"]


def is_found(metrics: dict[str, float]) -> bool:
    """Whether the fault is, by the greatest log-ratio as well as by the alarm."""
    return metrics["train/log_ratio_max_lag0"] > BOUND and metrics["ratio/alarm"] == 1


def test_engine_and_learner_agree_at_every_step(check: Check) -> None:
    found = check()
    assert len(found) == STEPS
    assert all(map(is_silent, found))


def test_an_engine_in_bfloat16_is_held_against_wider_bounds(check: Check) -> None:
    for metrics in check(dtype="bfloat16"):
        # Far over those of float32, and no alarm.
        assert metrics["ratio/log_ratio"] > 1e-4
        assert metrics["ratio/alarm"] == 0


def test_a_wrong_temperature_trips_the_check(check: Check) -> None:
    assert all(map(is_found, check(temperature=1.0)))


def test_labels_shifted_by_one_trip_the_check(
    check: Check, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Policy.forward

    def shifted(self: Policy, input_ids: Any, index: Any, *rest: Any) -> Any:
        return forward(self, input_ids, (index - 1).clamp(min=0), *rest)

    # At start the learner would be refused.
    assert all(map(is_found, check(lambda *_: monkeypatch.setattr(Policy, "forward", shifted))))


def test_weights_one_version_old_trip_the_check(check: Check) -> None:
    found = check(loads=False)
    assert is_silent(found[0])
    assert is_found(found[1])


def test_a_dropped_final_norm_trips_the_check(check: Check) -> None:
    def drop(sampling: Any, updates: Updates) -> None:
        # Its weight stays, so that the engine still knows all parameters.
        updates.engine.policy.model.model.norm.forward = lambda hidden: hidden

    assert all(map(is_found, check(drop)))
