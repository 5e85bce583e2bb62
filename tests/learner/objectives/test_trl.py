"""Losses and gradients of the preference objectives are those of TRL's trainers.

The numbers stand in ``trl_preferences.json``, which ``tests/benchmarks/trl_preferences.py`` has written in an
environment with TRL. Where ``trl`` is installed here too, they are made anew and compared with the file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tandem.common.records import ExpertTrace, Group, Verdict
from tandem.learner.forward.policy import Policy
from tandem.learner.objectives import make
from tandem.learner.rows.groups import MixedGroup, rows_of
from tandem.learner.rows.microbatch import micro_batch
from tandem.learner.rows.rows import Rows

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import trl_preferences as theirs

FROZEN = json.loads(theirs.FROZEN.read_text(encoding="utf-8"))


def group_of(number: int, pair: theirs.Pair) -> MixedGroup:
    prompt, *responses = pair
    traces = tuple(
        ExpertTrace(
            trace_id=f"a/{number}#{place}",
            problem_id=f"a/{number}",
            tokens=np.array(tokens, np.int32),
            logprobs=None,
            text="",
            tokenizer_digest="",
            reward=float(place == 0),
            verdict=Verdict.CORRECT if place == 0 else Verdict.WRONG,
            components={},
            grader=None,
        )
        for place, tokens in enumerate(responses)
    )
    group = Group(
        group_id=str(number),
        attempt=1,
        worker="",
        problem_id=f"a/{number}",
        prompt_tokens=np.array(prompt, np.int32),
        prompt_text="",
        gold="",
        data_source="",
        samples=(),
        trace_ids=(),
        extra={},
    )
    return MixedGroup(group=group, traces=traces)


def scored(policy: Policy, rows: Rows) -> torch.Tensor:
    return policy.score(micro_batch(rows))[0]


def ours(name: str) -> dict[str, Any]:
    """Loss and gradients of all pairs as one update."""
    policy = Policy(theirs.tiny_model(theirs.POLICY))
    reference = Policy(theirs.tiny_model(theirs.REFERENCE))
    objective = make(name, beta=theirs.BETA)
    groups = [group_of(number, pair) for number, pair in enumerate(theirs.pairs_for(name))]
    rows = rows_of(groups, step=1, temperature=1.0, baseline="group_mean")
    rows = rows.with_columns(reference=scored(reference, rows))
    scalars = {key: float(value) for key, value in objective.statistics(rows).items()}
    if objective.mismatched:
        other = rows.mismatched()
        assert other is not None
        gain = scored(policy, other).double() - scored(reference, other).double()
        scalars |= {"mismatched_gain": float(gain.sum()), "mismatched_rows": float(other.count)}
    micro = micro_batch(rows)
    logprobs, _ = policy(micro.input_ids, micro.index, micro.targets, micro.temperature)
    loss, sums = objective.loss(rows.with_columns(logprobs=logprobs), scalars)
    loss.backward()
    found = theirs.figures(loss, policy.model)
    plain = {key: float(value) for key, value in sums.items()}
    found["z0"] = objective.report(plain, scalars).get("kto_z0")
    return found


def compare(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["loss"] == pytest.approx(wanted["loss"], rel=1e-5)
    if "z0" in wanted:
        assert wanted["z0"] > 0
        assert found["z0"] == pytest.approx(wanted["z0"], rel=1e-5)
    assert found["gradients"].keys() == wanted["gradients"].keys()
    for name, (norm, along) in wanted["gradients"].items():
        assert norm > 0
        assert found["gradients"][name] == pytest.approx([norm, along], rel=1e-5, abs=1e-5), name


@pytest.mark.parametrize("name", theirs.NAMES)
def test_losses_and_gradients_are_those_of_trl(name: str) -> None:
    compare(ours(name), FROZEN[name])


@pytest.mark.byhand
def test_trl_still_computes_them() -> None:
    pytest.importorskip("trl", reason="trl isn't installed: pip install trl==1.16.0")
    made = theirs.from_trl()
    for name in theirs.NAMES:
        compare(made[name], FROZEN[name])
