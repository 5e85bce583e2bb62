"""A few steps of the main job with vLLM as the engine, as a user runs it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from processes import Run, gone, listening, step, steps, summary

from tandem.common.weights import shared_memory as segment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(400)]

FEW = (
    "rollout.engine=vllm",
    # Some seconds, as a worker reports its checks once a second.
    "run.steps=20",
    "learner.checkpoint_every=10",
    "evaluate.limit=20",
    "data.evaluate.0.limit=60",
    "log.every=4",
)


class Finished:
    """A finished run, and what was seen meanwhile."""

    folder: Path
    code: int
    output: str
    addresses: set[str]
    children: list[int]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    here = tmp_path_factory.mktemp("vllm")
    seen = Finished()
    seen.folder = here / "runs" / "miniature"
    run = Run(here, "start", *FEW)
    try:
        run.wait_for(lambda: step(seen.folder) >= 4, "step 4")
        seen.addresses = listening(run.tree)
        seen.children = [process.pid for process in run.tree.children(recursive=True)]
        seen.code = run.wait()
        seen.output = run.said()
        yield seen
    finally:
        run.end()


def test_it_runs_to_its_end_without_a_restart(finished: Finished) -> None:
    assert finished.code == 0, finished.output
    assert summary(finished.folder)["restarts"] == []
    assert steps(finished.folder) == list(range(1, 21))


def test_it_is_vllm_that_samples(finished: Finished) -> None:
    log = (finished.folder / "logs" / "rollout-0.log").read_text()
    assert "vLLM started" in log
    assert "engine: vllm" in (finished.folder / "config.yaml").read_text()


def test_vllms_logprobs_are_the_learners(finished: Finished) -> None:
    records = map(json.loads, (finished.folder / "metrics.jsonl").read_text().splitlines())
    # Of tokens that were sampled by the very weights that the learner holds.
    fresh = [r["train/log_ratio_max_lag0"] for r in records if "train/log_ratio_max_lag0" in r]
    assert fresh
    assert max(fresh) < 1e-3


def test_new_weights_are_checked_and_pass(finished: Finished) -> None:
    lines = (finished.folder / "metrics.jsonl").read_text().splitlines()
    records = list(map(json.loads, lines))
    assert sum(r.get("weights/checks", 0) for r in records) > 0
    assert sum(r.get("weights/checks_failed", 0) for r in records) == 0
    assert all(r["time/score"] > 0 for r in records if "time/publish" in r)


def test_no_process_and_no_file_is_left(finished: Finished) -> None:
    assert gone(finished.children, 20)
    assert segment.remove_left_behind() == 0  # what a test beside this one uses is locked


def test_it_listens_on_loopback_only(finished: Finished) -> None:
    assert finished.addresses
    assert finished.addresses <= {"127.0.0.1", "::1"}
