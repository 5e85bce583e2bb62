"""What a client reads out of an environment server's answers: failures before rewards, and nothing invalid."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from tandem.common.errors import WireError
from tandem.common.records import Verdict
from tandem.rollout.environments import requests, wire
from tandem.rollout.environments.pipes import Doing, Done
from tandem.rollout.environments.process import (
    read_said,
)
from tandem.rollout.environments.wire import (
    Played,
    failed,
    result_of,
)

pack = msgspec.msgpack.encode


def theirs(trace: dict[str, Any], head: dict[str, Any] | None = None, **reply: Any) -> Played:
    """What becomes of an episode that verifiers' server tells in its own words."""
    first = {"trace": "t", "open": {"id": "t", "version": 1, "task": {"data": {1: 2}}}}
    node = {"token_ids": [1, 2], "sampled": True, "message": {"role": "assistant"}}
    second = {
        "trace": "t",
        "nodes": [node, node],
        "calls": [{"node": 1}],
        "links": {0: [{"parent": 0}]},
        "routing_repairs": {1: {"__nd__": True}},
        "pending": [],
        "errors": trace.pop("errors", []),
        "set": {"agent": {"config": {}}, "num_total_tokens": 2, **trace},
    }
    full = {
        "success": True,
        "error": None,
        "head": {
            "id": "e",
            "env": {},
            "ok": True,
            "is_timeout": False,
            "errors": [],
            **(head or {}),
        },
        "traces": [{"id": "t", "nodes": 2, "calls": 1}],
        **reply,
    }
    return result_of([pack(first), pack(second)], pack(full))


FINE = {
    "ok": True,
    "stop_condition": "agent_completed",
    "is_timeout": False,
    "rewards": {"right": {"score": 0.5, "weight": 2.0}, "form": {"score": 1.0, "weight": 0.25}},
    "metrics": {"tries": 3, "none": None, "nan": math.nan},
    "timing": {
        "setup": {"start": 10.0, "end": 11.0},
        "agent": {"start": 11.0, "end": 15.0, "model": {"duration": 3.0}},
        "scoring": {"start": 15.0, "end": 15.5},
    },
}


def test_the_reward_is_the_weighted_sum_and_the_models_time_is_not_the_environments() -> None:
    played = theirs(dict(FINE))
    assert played.failure is None
    assert played.reward == 1.25
    assert dict(played.metrics) == {"tries": 3.0}
    assert played.seconds == 2.5
    assert played.detail == "agent_completed"


ERROR = {"type": "HarnessError", "message": "it died", "traceback": "…"}


@pytest.mark.parametrize(
    ("trace", "head", "verdict", "words"),
    [
        ({"ok": False, "errors": [ERROR]}, {}, Verdict.ENV_FAILED, "HarnessError: it died"),
        ({"stop_condition": "harness_error"}, {}, Verdict.ENV_FAILED, "harness_error"),
        ({}, {"ok": False}, Verdict.ENV_FAILED, "isn't ok"),
        ({}, {"errors": [ERROR]}, Verdict.ENV_FAILED, "it died"),
        ({"is_timeout": True, "stop_condition": "agent_timeout"}, {}, Verdict.ENV_TIMEOUT, "agent"),
        ({}, {"is_timeout": True}, Verdict.ENV_TIMEOUT, ""),
        ({"rewards": {"r": {"score": math.nan}}}, {}, Verdict.ENV_FAILED, "nan isn't finite"),
        ({"rewards": {"r": {"score": math.inf}}}, {}, Verdict.ENV_FAILED, "inf isn't finite"),
    ],
)
def test_a_failed_episode_is_no_reward_of_zero_although_success_is_true(
    trace: dict[str, Any], head: dict[str, Any], verdict: Verdict, words: str
) -> None:
    zero = {"rewards": {"r": {"score": 0.0, "weight": 1.0}}}
    played = theirs({**FINE, **zero, **trace}, head)
    assert (played.reward, played.failure) == (None, verdict)
    assert words in played.detail


def test_rewards_that_were_not_computed_are_none() -> None:
    assert theirs({**FINE, "rewards": {"r": None}}).reward is None


def test_a_refused_run_says_why() -> None:
    played = result_of([], wire.refused_reply("1 validation error\nfor Task"))
    assert (played.failure, played.detail) == (Verdict.ENV_FAILED, "1 validation error for Task")


def test_a_lost_delta_is_noticed() -> None:
    with pytest.raises(WireError, match="incomplete"):
        theirs(dict(FINE), traces=[{"id": "t", "nodes": 3, "calls": 1}])
    with pytest.raises(WireError, match="incomplete"):
        theirs(dict(FINE), traces=[{"id": "other", "nodes": 0, "calls": 0}])


def test_a_discarded_attempt_is_forgotten() -> None:
    deltas = [
        pack({"trace": "a", "open": {}, "set": {"ok": False}}),
        pack({"trace": "a", "discard": True}),
        wire.opened("t", "e"),
    ]
    fine = Played(
        reward=1.0, turn_rewards=(None, 1.0), failure=None, detail="done", metrics={}, seconds=2.0
    )
    deltas.append(wire.played_delta("t", fine))
    assert result_of(deltas, wire.played_reply("t", "e", fine)) == fine


@pytest.mark.parametrize(
    "played",
    [
        Played(
            reward=-0.5,
            turn_rewards=(),
            failure=None,
            detail="done",
            metrics={"a": 1.0},
            seconds=0.5,
        ),
        Played(reward=None, turn_rewards=(None,), failure=None, detail="", metrics={}, seconds=0.0),
        failed(Verdict.ENV_RESET, "it fell over", 0.25),
        failed(Verdict.ENV_TIMEOUT, "too slow", 1.5),
        failed(Verdict.ENV_FAILED, "it broke", 1.0),
    ],
)
def test_what_our_servers_say_is_read_as_it_was(played: Played) -> None:
    deltas = [wire.opened("t", "e"), wire.played_delta("t", played)]
    assert result_of(deltas, wire.played_reply("t", "e", played)) == played


def test_two_agents_are_refused_by_name() -> None:
    deltas = [pack({"trace": name, "open": {}, "set": {"ok": True}}) for name in "ab"]
    reply = {
        "success": True,
        "head": {"ok": True},
        "traces": [{"id": name, "nodes": 0, "calls": 0} for name in "ab"],
    }
    played = result_of(deltas, pack(reply))
    assert played.failure is Verdict.ENV_FAILED
    assert "2 agents" in played.detail


def test_a_request_keeps_its_key_to_itself() -> None:
    client = requests.ModelClient(type="train", base_url="http://x/sessions/k3y/v1", api_key="k3y")
    assert "k3y" not in repr(client)


def test_a_row_that_is_too_long_is_refused_before_it_is_sent() -> None:
    run = requests.RunRequest(
        task_data=requests.EnvironmentTask(environment="e", row={"text": "x" * (33 << 20)}),
        client=requests.ModelClient(type="train", base_url="u", api_key="k"),
        model="m",
        limits=requests.Limits(turns=1, calls=1, observation_tokens=1),
    )
    with pytest.raises(WireError, match="leave columns"):
        requests.request_frames("1", run)


@pytest.mark.parametrize(
    "done",
    [
        Done(math.nan, [], {}, ""),
        Done(1.0, [None, math.inf], {}, ""),
        Done(1.0, [], {"a": -math.inf}, ""),
    ],
)
def test_a_process_cannot_pay_what_is_no_number(done: Done) -> None:
    with pytest.raises(WireError, match="isn't finite"):
        read_said(done.pack()[4:])


def test_a_process_can_only_say_what_is_declared() -> None:
    assert read_said(Doing("model").pack()[4:]) == Doing("model")
    for data in (
        pack(["doing", "dance"]),
        pack(["done", "1.0", [], {}, ""]),
        pack(["play"]),
        b"\xc1",
    ):
        with pytest.raises(WireError, match="refused message"):
            read_said(data)
