"""What the learner says of the rows by which workers check new weights."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from tandem.common.telemetry import Clock
from tandem.common.weights.manifest import ScoredRows
from tandem.learner.engine.deepspeed_engine import DeepSpeedEngine
from tandem.learner.loop.publishing import Publishing
from tandem.learner.ranks import Leader
from tandem.learner.scored import ROWS, fixed_rows
from tandem.learner.updates.updates import Updates

pytestmark = pytest.mark.usefixtures("group")
CPU = torch.device("cpu")


@pytest.fixture
def model(made_up: Any) -> Any:
    return made_up.tiny_model()


@pytest.fixture
def leader(model: Any, made_up: Any) -> Leader:
    config = made_up.config_of()
    engine = DeepSpeedEngine(copy.deepcopy(model), config, CPU)
    return Leader(engine, Updates(engine, config))


@pytest.fixture
def rows(model: Any) -> Any:
    return fixed_rows(model.config.vocab_size, 16, seed=3)


def forward(model: Any, rows: Any) -> torch.Tensor:
    tokens = torch.from_numpy(rows)
    with torch.no_grad():
        logits = model.eval()(input_ids=tokens).logits[:, :-1].float()
    return logits.log_softmax(-1).gather(2, tokens[:, 1:, None]).squeeze(2)


def test_the_rows_depend_on_vocabulary_and_seed_alone() -> None:
    rows = fixed_rows(32, 256, seed=3)
    assert np.array_equal(rows, fixed_rows(32, 256, seed=3))
    assert not np.array_equal(rows, fixed_rows(32, 256, seed=4))
    assert rows.min() >= 0
    assert rows.max() < 32
    assert fixed_rows(32, 7, seed=3).shape == (ROWS, 7)


def test_log_probs_are_those_of_the_models_own_forward(
    leader: Leader, model: Any, rows: Any
) -> None:
    found = leader.score(rows, torch.float32)
    torch.testing.assert_close(found, forward(model, rows), atol=1e-5, rtol=0)


def test_for_engines_in_bf16_they_are_those_of_rounded_weights(
    leader: Leader, model: Any, rows: Any
) -> None:
    before = {name: p.clone() for name, p in leader.engine.parameters()}
    found = leader.score(rows, torch.bfloat16)
    rounded = copy.deepcopy(model)
    for parameter in rounded.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)
    torch.testing.assert_close(found, forward(rounded, rows), atol=1e-5, rtol=0)
    assert float((found - forward(model, rows)).abs().max()) > 1e-3
    for name, parameter in leader.engine.parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, before[name])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_publishing_has_them_scored_as_the_engines_hold_the_weights(
    dtype: str, leader: Leader, rows: Any, made_up: Any
) -> None:
    publishing = object.__new__(Publishing)
    publishing._config = made_up.config_of(rollout={"dtype": dtype})
    publishing._clock, publishing._leader, publishing._rows = Clock(), leader, rows
    scored = publishing._scored(step=1)
    assert scored is not None
    wanted = leader.score(rows, getattr(torch, dtype))
    assert torch.equal(torch.tensor(scored.logprobs), wanted)


def test_they_follow_the_weights_and_leave_the_model_in_training(leader: Leader, rows: Any) -> None:
    before = leader.score(rows, torch.float32)
    with torch.no_grad():
        for _, parameter in leader.engine.parameters():
            parameter.mul_(1.01)
    assert not torch.equal(before, leader.score(rows, torch.float32))
    assert leader.engine.policy.training


@pytest.mark.parametrize(
    ("rows", "logprobs"),
    [
        ((), ()),
        (((1,),), ((),)),
        (((1, 2),), ((-0.5, -0.5),)),
        (((1, -2),), ((-0.5,),)),
        (((1, 2),), ((float("nan"),),)),
    ],
)
def test_rows_that_can_not_be_are_refused(rows: Any, logprobs: Any) -> None:
    with pytest.raises(ValueError, match="row"):
        ScoredRows(rows=rows, logprobs=logprobs)
