"""What the run shares in Redis: config, problems, traces, evaluations, reports."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from tandem.common.errors import DataError, FencedError, StoreError
from tandem.common.records import ExpertTrace, Verdict, Version
from tandem.replay.callback_requests import CallbackRequests, Requested
from tandem.replay.connection import Store, connect
from tandem.replay.evaluating.evaluations import (
    EVALUATION_FAILURES,
    EvaluationRequest,
    EvaluationResult,
)
from tandem.replay.hosts import Hosts, Meeting
from tandem.replay.problems import ProblemIds
from tandem.replay.store import RunStore


@pytest.fixture
def run(store: Store) -> RunStore:
    return RunStore(store)


def trace(trace_id: str) -> ExpertTrace:
    return ExpertTrace(
        trace_id=trace_id,
        problem_id=trace_id.rpartition("#")[0],
        tokens=np.arange(4, dtype=np.int32),
        logprobs=None,
        text="t",
        tokenizer_digest="x",
        reward=1.0,
        verdict=Verdict.CORRECT,
        components={},
        grader=None,
    )


def result(id_: str, step: int, **changes: Any) -> EvaluationResult:
    values: dict[str, Any] = {
        "id": id_,
        "set_name": "heldout",
        "step": step,
        "accuracy": 0.5,
        "problems": 10,
        "format_share": 1.0,
        "mean_length": 53.0,
        "seconds": 0.1,
        "member": "rollout-0",
    }
    return EvaluationResult(**{**values, **changes})


def request(id_: str, step: int) -> EvaluationRequest:
    return EvaluationRequest(id=id_, set_name="heldout", step=step)


def test_a_result_keeps_a_share_that_is_not_known(run: RunStore):
    run.request_evaluation(request("a", 1), 1)
    run.finish_evaluation("a", result("a", 1, format_share=math.nan))
    found = run.evaluation("a")
    assert found is not None
    assert math.isnan(found.format_share)


def test_the_config_is_read_back(run: RunStore):
    run.put_config("run:\n  seed: 3\n")
    assert run.config_yaml() == "run:\n  seed: 3\n"


def test_a_redis_without_the_config_is_told(run: RunStore):
    with pytest.raises(StoreError, match="holds no config of run"):
        run.config_yaml()


def test_the_client_key_is_made_once(run: RunStore):
    assert run.curve_client() == RunStore(run.store).curve_client()


def test_the_state_is_running_until_it_is_set(run: RunStore):
    assert run.state() == "running"
    run.set_state("draining")
    assert run.state() == "draining"


def test_the_state_set_before_the_ledger_is_made_stays(run: RunStore, make: Any):
    run.set_state("draining")
    assert not run.store.holds_run()
    world = make.world(run.store)
    assert world.wait() == "run is draining"


def test_problems_come_back_in_the_order_asked_for(run: RunStore, make: Any):
    run.put_problems(make.problem(f"a/{i}", gold=str(i)) for i in range(20))
    assert [p.gold for p in run.problems(["a/7", "a/0", "a/7"])] == ["7", "0", "7"]
    assert [p.problem_id for p in run.problems(["a/3"])] == ["a/3"]


def ids_of(run: RunStore, source: str, count: int) -> list[str]:
    return ProblemIds(run.store, [(source, count, 1)]).at([(0, place) for place in range(count)])


def test_a_source_is_ordered_by_row_however_often_it_is_put(run: RunStore, make: Any):
    for _ in range(2):
        run.put_problems(make.problem(f"a/{i}") for i in (10, 2, 0))
    run.put_problems([make.problem("b/1")])
    assert ids_of(run, "a", 3) == ["a/0", "a/2", "a/10"]


def test_problems_of_large_sets_are_put_in_several_batches(
    run: RunStore, make: Any, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tandem.replay.store.PUT_BYTES", 1000)
    run.put_problems(make.problem(f"a/{i}") for i in range(50))
    assert len(ids_of(run, "a", 50)) == 50


def test_a_problem_that_is_not_there_is_named(run: RunStore):
    with pytest.raises(StoreError, match="a/99"):
        run.problems(["a/99"])


def test_a_problem_id_without_a_row_is_refused(run: RunStore, make: Any):
    with pytest.raises(StoreError, match="<source>/<row>"):
        run.put_problems([make.problem("nonsense")])


def test_trace_ids_are_in_ledger_order(run: RunStore):
    run.put_traces(trace(i) for i in ("b/1#0", "a/10#0", "a/2#1", "a/2#0"))
    # The cut of a row asks for their rewards alone.
    assert run.store.redis.hget(run.store.key("trace_rewards"), "a/2#1") == b"1.0"
    assert run.all_trace_ids() == ["a/2#0", "a/2#1", "a/10#0", "b/1#0"]
    assert run.traces(["a/10#0"])[0].problem_id == "a/10"


def test_a_held_out_set_keeps_its_order_and_can_be_cut(run: RunStore, make: Any):
    for _ in range(2):
        run.put_eval_set("heldout", [make.problem(f"h/{i}") for i in range(5)])
    assert [p.problem_id for p in run.eval_set("heldout", 2)] == ["h/0", "h/1"]
    assert len(run.eval_set("heldout", None)) == 5
    assert run.eval_set_names() == ["heldout"]


def test_a_held_out_set_that_is_not_there_is_named(run: RunStore):
    with pytest.raises(DataError, match="'other'"):
        run.eval_set("other", None)


def test_an_evaluation_is_claimed_by_one_worker_with_new_enough_weights(run: RunStore):
    run.request_evaluation(request("e5", 5), 1)
    assert run.claim_evaluation("rollout-0", Version(term=1, step=4)) is None
    assert run.claim_evaluation("rollout-0", Version(term=1, step=5)) == request("e5", 5)
    assert run.claim_evaluation("rollout-1", Version(term=1, step=9)) is None


def test_the_earliest_due_evaluation_comes_first(run: RunStore):
    run.request_evaluation(request("late", 9), 1)
    run.request_evaluation(request("early", 0), 1)
    claimed = run.claim_evaluation("rollout-0", Version(term=1, step=9))
    assert claimed is not None
    assert claimed.id == "early"


def test_a_restarted_worker_claims_its_evaluation_again(run: RunStore):
    run.request_evaluation(request("e", 0), 1)
    for _ in range(2):
        assert run.claim_evaluation("rollout-0", Version(term=1, step=0)) == request("e", 0)


def test_an_expired_claim_goes_to_another_worker(run: RunStore):
    run.request_evaluation(request("e", 0), 1)
    run.claim_evaluation("rollout-0", Version(term=1, step=0))
    run.store.redis.hset(run.store.key("evaluation_claims"), "e", "1 rollout-0")
    assert run.claim_evaluation("rollout-1", Version(term=1, step=0)) is not None
    assert not run.renew_evaluation("e", "rollout-0")
    assert run.renew_evaluation("e", "rollout-1")


def test_a_renewed_claim_lives_on(run: RunStore):
    run.request_evaluation(request("e", 0), 1)
    run.claim_evaluation("rollout-0", Version(term=1, step=0))
    run.store.redis.hset(run.store.key("evaluation_claims"), "e", "1 rollout-0")
    assert run.renew_evaluation("e", "rollout-0")
    assert run.claim_evaluation("rollout-1", Version(term=1, step=0)) is None


def test_the_first_result_stands_and_closes_the_evaluation(run: RunStore):
    run.request_evaluation(request("e", 0), 1)
    assert run.open_evaluations() == ["e"]
    assert run.finish_evaluation("e", result("e", 0))
    assert not run.finish_evaluation("e", result("e", 3, accuracy=0.9))
    assert run.evaluation("e") == result("e", 0)
    assert run.open_evaluations() == []
    assert run.claim_evaluation("rollout-0", Version(term=1, step=9)) is None


def test_an_evaluation_asked_for_again_is_not_made_again(run: RunStore):
    run.request_evaluation(request("e", 0), 1)
    run.finish_evaluation("e", result("e", 0))
    run.request_evaluation(request("e", 0), 1)
    assert run.open_evaluations() == []


def test_an_evaluation_that_is_given_back_is_due_for_everybody(run: RunStore):
    run.request_evaluation(request("e", 0), 1)
    run.claim_evaluation("rollout-0", Version(term=1, step=0))
    assert not run.give_back_evaluation("e", "rollout-1", reason="not its own", failed=False)
    assert run.give_back_evaluation("e", "rollout-0", reason="drained", failed=False)
    assert run.claim_evaluation("rollout-1", Version(term=1, step=0)) == request("e", 0)


def test_an_evaluation_that_keeps_failing_is_given_up_until_it_is_asked_for_again(run: RunStore):
    run.request_evaluation(request("e", 0), 1)
    for attempt in range(EVALUATION_FAILURES):
        assert run.given_up_evaluations() == {}
        # Its failures leave a pause in which nobody claims it.
        assert (run.claim_evaluation("rollout-0", Version(term=1, step=0)) is None) == (attempt > 0)
        claims = run.store.key("evaluation_claims")
        run.store.redis.hset(claims, "e", "1 rollout-0")
        run.claim_evaluation("rollout-0", Version(term=1, step=0))
        assert run.give_back_evaluation("e", "rollout-0", reason=f"no {attempt}", failed=True)
    assert run.given_up_evaluations() == {"e": f"no {EVALUATION_FAILURES - 1}"}
    assert run.open_evaluations() == []
    run.request_evaluation(request("e", 0), 1)
    assert run.given_up_evaluations() == {}
    assert run.claim_evaluation("rollout-0", Version(term=1, step=0)) == request("e", 0)


def test_a_result_forgets_the_failures_before_it(run: RunStore):
    run.request_evaluation(request("e", 0), 1)
    run.claim_evaluation("rollout-0", Version(term=1, step=0))
    run.give_back_evaluation("e", "rollout-0", reason="broke", failed=True)
    run.finish_evaluation("e", result("e", 0))
    assert run.given_up_evaluations() == {}
    assert list(run.evaluation_results(["e", "other"])) == ["e"]


def test_a_result_that_comes_while_failures_are_looked_at_gives_nothing_up(
    run: RunStore, monkeypatch: pytest.MonkeyPatch
):
    run.request_evaluation(request("e", 0), 1)
    run.claim_evaluation("rollout-0", Version(term=1, step=0))
    run.give_back_evaluation("e", "rollout-0", reason="broke", failed=True)
    read = run.store.call

    def finished_after(*words: Any) -> Any:
        found = read(*words)
        run.finish_evaluation("e", result("e", 0))
        return found

    monkeypatch.setattr(run.store, "call", finished_after)
    assert run.given_up_evaluations() == {}


def test_an_older_learner_asks_for_no_evaluation(world: Any):
    w = world()
    run = RunStore(w.store)
    w.ledger.new_term()
    with pytest.raises(FencedError):
        run.request_evaluation(request("e", 0), w.term)
    assert run.open_evaluations() == []


def test_of_a_job_that_was_forgotten_while_a_worker_was_at_it_nothing_is_kept(run: RunStore):
    run.request_evaluation(request("job:x/0", 0), 1)
    assert run.claim_evaluation("rollout-0", Version(term=1, step=0)) is not None
    run.forget_job("job:x/0")
    run.put_samples("job:x/0", [])
    assert not run.finish_evaluation("job:x/0", result("job:x/0", 0))
    for name in ("evaluation_results", "evaluation_samples"):
        assert run.store.redis.hkeys(run.store.key(name)) == []


def test_a_result_with_figures_by_source_is_read_back(run: RunStore):
    figures = {"samples": 4, "pass_rate": 0.75, "version": "2.5"}
    by_source = {"accuracy_by_source": {"a/b": 0.5}, "pass_by_source": {"a/b": 1.0}}
    made = result("e", 5, **figures, **by_source, problems_by_source={"a/b": 2})
    run.request_evaluation(request("e", 5), 1)
    run.finish_evaluation("e", made)
    assert run.evaluation("e") == made


def test_results_are_listed_by_step(run: RunStore):
    for step in (50, 0, 100):
        run.request_evaluation(request(f"e{step}", step), 1)
        run.finish_evaluation(f"e{step}", result(f"e{step}", step))
    assert [r.step for r in run.evaluations()] == [0, 50, 100]
    assert run.evaluation("other") is None


def test_reports_are_the_newest_of_each_member(run: RunStore):
    run.report("rollout-0", {"tokens": 1})
    run.report("rollout-0", {"tokens": 2})
    run.report("learner-0", {"step": 7})
    assert run.reports() == {"learner-0": {"step": 7}, "rollout-0": {"tokens": 2}}


def test_restarts_are_listed_in_order(run: RunStore):
    run.count_restart("rollout-0", "killed by signal 9")
    run.count_restart("grader", "past its deadline")
    assert [entry["name"] for entry in run.restarts()] == ["rollout-0", "grader"]
    assert run.restarts()[0]["detail"] == "killed by signal 9"


def test_a_full_redis_takes_what_processes_need_to_start_and_to_be_seen(own_server: Any):
    store = connect(own_server.join())
    run, requests = RunStore(store), CallbackRequests(store)
    run.put_config("run:\n  seed: 3\n")
    keys, endpoint = run.curve_client(), run.endpoint_key()
    store.redis.config_set("maxmemory", 1)
    assert (run.curve_client(), run.endpoint_key()) == (keys, endpoint)
    run.put_config("run:\n  seed: 3\nreplay:\n  maxmemory_mb: 4096\n")
    assert "4096" in run.config_yaml()
    run.report("learner-0", {"step": 7, "alarm": "é \x7f"})
    assert run.reports() == {"learner-0": {"step": 7, "alarm": "é \x7f"}}
    run.count_restart("reward-0", "grader 7: deadline")
    assert run.restart_count() == 1
    requests.put(Requested(checkpoint=2))
    requests.put_served(2)
    assert (requests.read().checkpoint, requests.served()) == (2, 2)
    Hosts(store).call(Meeting(attempt=1, address="h", port=1, hosts=[], ranks=1), 1.0)
    store.close()


def test_on_a_full_redis_an_evaluation_is_made_all_the_same(own_server: Any):
    store = connect(own_server.join())
    run = RunStore(store)
    run.request_evaluation(request("e", 0), 1)
    store.redis.config_set("maxmemory", 1)
    assert run.claim_evaluation("rollout-0", Version(term=1, step=0)) == request("e", 0)
    assert run.finish_evaluation("e", result("e", 0))
    assert run.evaluation("e") == result("e", 0)
    store.close()
