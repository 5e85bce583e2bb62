"""Evaluation: answers, grades and figures of a held-out set."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.common.config import EvalSetConfig, RewardConfig, build
from tandem.common.errors import DataError, TandemError
from tandem.common.models import load_tokenizer
from tandem.common.records import FinishReason, Problem, Sample, SamplingParams, Verdict
from tandem.launch import cli
from tandem.launch.ingest.rows import SourceReader
from tandem.replay.evaluating.evaluations import EvaluationResult
from tandem.reward.grading import Grade, Grader
from tandem.rollout.engine import FinishedGroup, GroupRequest
from tandem.rollout.evaluate.evaluation import (
    Evaluation,
    HeldOut,
    evaluate,
    evaluate_folder,
    summarise,
)


def problem(number: int, tokens: np.ndarray, source: str = "a") -> Problem:
    return Problem(
        problem_id=f"set/{number}",
        prompt_text="",
        prompt_tokens=tokens,
        gold="7",
        data_source=source,
        ability="math",
        trace_ids=(),
        extra={},
    )


def sample(length: int, reason: FinishReason = FinishReason.STOP) -> Sample:
    return Sample(
        tokens=np.zeros(length, dtype=np.int32),
        source=np.zeros(length, dtype=np.uint8),
        logprobs=np.zeros(length, dtype=np.float32),
        spans=(),
        finish_reason=reason,
        sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=1024),
        text="",
        reward=None,
        verdict=None,
        components={},
        extracted=None,
        grader=None,
    )


def grade(verdict: Verdict, form: float | None = 1.0) -> Grade:
    return Grade(
        answer=verdict,
        verdict=verdict,
        reward=None if verdict.leaves_baseline else float(verdict is Verdict.CORRECT),
        components={"format": form},
        extracted=None,
        seconds=0.0,
        cached=False,
    )


def test_figures_are_those_of_the_grades() -> None:
    tokens = np.array([3], dtype=np.int32)
    problems = [problem(0, tokens), problem(1, tokens), problem(2, tokens, "b")]
    responses = [[sample(4), sample(6)], [sample(2), sample(2)], [sample(9), sample(1)]]
    responses[2][0] = sample(9, FinishReason.LENGTH)
    right, wrong, crashed = Verdict.CORRECT, Verdict.WRONG, Verdict.CRASHED
    grades = [grade(v) for v in (right, wrong, wrong, wrong, right)] + [grade(crashed, 0.0)]
    found = summarise(problems, responses, grades, seconds=1.0)
    assert found.accuracy == pytest.approx(2 / 6)
    assert found.pass_rate == pytest.approx(2 / 3)
    assert found.by_source == {"a": pytest.approx(0.25), "b": pytest.approx(0.5)}
    assert found.pass_by_source == {"a": pytest.approx(0.5), "b": pytest.approx(1.0)}
    assert found.problems_by_source == {"a": 2, "b": 1}
    assert found.format_share == pytest.approx(5 / 6)
    assert found.right_and_formed == pytest.approx(2 / 6)
    assert found.classes == pytest.approx({"11": 2 / 6, "10": 3 / 6, "01": 0.0, "00": 1 / 6})
    assert found.reward == pytest.approx(2 / 5)
    assert found.mean_length == pytest.approx(4.0)
    assert found.cut_share == pytest.approx(1 / 6)
    assert found.ungraded == 1
    assert found.tokens == 24


def test_pass_at_k_is_unbiased_where_some_problems_have_more_responses_than_others() -> None:
    tokens = np.array([3], dtype=np.int32)
    problems = [problem(0, tokens), problem(1, tokens, "b")]
    responses = [[sample(2)] * 4, [sample(2)] * 2]
    grades = [grade(Verdict.CORRECT), *[grade(Verdict.WRONG)] * 5]
    found = summarise(problems, responses, grades, seconds=1.0)
    result = EvaluationResult(
        id="set@1",
        set_name="set",
        step=1,
        accuracy=found.accuracy,
        problems=found.problems,
        format_share=found.format_share,
        mean_length=found.mean_length,
        seconds=found.seconds,
        member="rollout-0",
        samples=found.samples,
        pass_rate=found.pass_rate,
        accuracy_by_source=found.by_source,
        pass_by_source=found.pass_by_source,
        problems_by_source=found.problems_by_source,
        figures=found.figures,
    )
    figures = result.all_figures()
    # One of four is right: two of them hold it in half of all draws.
    assert figures["source/a/pass@2"] == pytest.approx(0.5)
    assert figures["source/a/pass@4"] == 1.0
    assert figures["source/b/pass@2"] == 0.0
    assert figures["pass@2"] == pytest.approx(0.25)


def test_without_a_format_component_its_share_is_unknown() -> None:
    tokens = np.array([3], dtype=np.int32)
    found = summarise([problem(0, tokens)], [[sample(1)]], [grade(Verdict.WRONG, None)], seconds=1)
    assert np.isnan(found.format_share)
    assert found.to_dict()["format_share"] is None
    assert found.classes == {}


def in_engine(tiny: Any, problems: list[Problem], **settings: Any) -> Evaluation:
    from tandem.rollout.decoding.torch_engine import TorchEngine

    async def run() -> Evaluation:
        engine = TorchEngine(tiny.model(), tiny.tokenizer())
        await engine.start()
        try:
            with Grader(RewardConfig()) as grader:
                return await evaluate(engine, problems, grader, **settings)
        finally:
            await engine.close()

    return asyncio.run(run())


def test_responses_stand_in_the_order_of_the_problems(tiny: Any) -> None:
    prompts = [np.arange(3, 5 + i, dtype=np.int32) for i in range(6)]
    problems = [problem(i, tokens) for i, tokens in enumerate(prompts)]
    together = in_engine(tiny, problems, max_new_tokens=8)
    for index in (0, 5):
        alone = in_engine(tiny, [problems[index]], max_new_tokens=8)
        assert alone.responses[0][0].tokens.tolist() == together.responses[index][0].tokens.tolist()


def test_sampling_k_times_gives_k_responses_and_greedy_one(tiny: Any) -> None:
    problems = [problem(0, np.array([3, 4], dtype=np.int32))]
    sampled = in_engine(tiny, problems, temperature=1.0, samples=5, max_new_tokens=8)
    assert (sampled.samples, len(sampled.responses)) == (5, 5)
    greedy = in_engine(tiny, problems, samples=5, max_new_tokens=8)
    assert (greedy.samples, len(greedy.responses)) == (1, 1)


def test_the_same_seed_and_name_give_the_same_responses(tiny: Any) -> None:
    problems = [problem(i, np.array([3, 4 + i], dtype=np.int32)) for i in range(3)]
    settings = {"temperature": 1.0, "samples": 2, "max_new_tokens": 8}
    first, again, other = (
        [s.tokens.tolist() for s, _ in in_engine(tiny, problems, seed=n, **settings).responses]
        for n in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_an_empty_set_is_an_error(tiny: Any) -> None:
    with pytest.raises(DataError, match="empty"):
        in_engine(tiny, [], max_new_tokens=8)


def test_a_problem_that_cannot_be_answered_is_named(tiny: Any) -> None:
    problems = [problem(0, np.array([3], dtype=np.int32)), problem(1, np.full(999, 3, np.int32))]
    with pytest.raises(TandemError, match="set/1"):
        in_engine(tiny, problems, max_new_tokens=8)


class SlowEngine:
    """Finishes a problem in every ``each`` seconds by the loop's clock, and is stuck from problem ``stuck`` on."""

    def __init__(self, each: float, stuck: int) -> None:
        self._each = each
        self._stuck = stuck

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[FinishedGroup]:
        loop = asyncio.get_running_loop()
        now = loop.time()
        loop.time = lambda: now  # type: ignore[method-assign]
        for number, request in enumerate(requests):
            now += self._each
            if number == self._stuck:
                now += self._each
                await asyncio.Event().wait()
            # The loop looks at its clock.
            for _ in range(3):
                await asyncio.sleep(0)
            yield FinishedGroup(group_id=request.group_id, samples=(sample(2),))


def test_an_evaluation_takes_as_long_as_its_engine_finishes_problems() -> None:
    problems = [problem(i, np.array([3], dtype=np.int32)) for i in range(6)]

    async def scenario(stuck: int) -> Evaluation:
        with Grader(RewardConfig()) as grader:
            engine: Any = SlowEngine(1000.0, stuck)
            return await evaluate(engine, problems, grader, max_new_tokens=8, silence=1500.0)

    assert asyncio.run(scenario(stuck=9)).problems == 6
    with pytest.raises(TandemError, match=r"answered 4 of 6 problems, and then none in 1500 s"):
        asyncio.run(scenario(stuck=4))


def test_the_shipped_model_does_short_chains_and_no_long_ones(tmp_path: Path) -> None:
    from random import Random

    import pyarrow.parquet as pq

    from tandem.launch.miniature.parquet import table
    from tandem.launch.miniature.problems import distinct

    sizes = {"engine": "torch", "max_new_tokens": 70}
    config = build({"run": {"steps": 1}, "data": {"train": [{"path": ""}]}, "rollout": sizes}, ())
    model = config.model.model_copy(update={"path": "miniature"})
    config = config.model_copy(update={"model": model})

    def read(path: Path, limit: int) -> list[Problem]:
        with Grader(config.reward) as grader:
            reader = SourceReader(config, load_tokenizer("miniature"), grader, lambda text: None)
            held_out = EvalSetConfig(path=str(path), name=path.stem, limit=limit)
            return reader.read(held_out, path)[0]

    found: dict[str, Evaluation] = {}
    sets = []
    for k in (2, 8):
        path = tmp_path / f"k{k}.parquet"
        rows = table(distinct(Random(k), k, 60), split="heldout", with_target=False)
        pq.write_table(rows, path)
        problems = read(path, limit=50)
        assert [p.problem_id for p in problems[:2]] == [f"k{k}/0", f"k{k}/1"]
        # The second set has shorter responses of its own.
        rollout = config.rollout.model_copy(update={"max_new_tokens": 70 if k == 2 else 40})
        own = config.model_copy(update={"rollout": rollout})
        sets.append(HeldOut(name=path.stem, problems=problems, config=own))
    evaluate_folder(sets, lambda one, result: found.__setitem__(one.name, result))
    assert list(found) == ["k2", "k8"]
    short, long = found.values()
    assert short.accuracy > 0.9
    assert long.accuracy < 0.05
    assert max(len(sample.tokens) for sample, _ in long.responses) <= 40
    assert short.by_source == {"miniature": short.accuracy}
    assert dataclasses.asdict(short)["step"] is None


def _chains(path: Path, count: int) -> Path:
    """Held-out problems that the shipped model answers nearly always, if it takes likely tokens."""
    from random import Random

    import pyarrow.parquet as pq

    from tandem.launch.miniature.parquet import table
    from tandem.launch.miniature.problems import distinct

    rows = table(distinct(Random(2), 2, count), split="heldout", with_target=False)
    pq.write_table(rows, path)
    return path


@pytest.mark.parametrize(
    "engine",
    [
        "torch",
        pytest.param(
            "vllm", marks=[pytest.mark.vllm, pytest.mark.byhand, pytest.mark.timeout(300)]
        ),
    ],
)
def test_the_command_samples_from_the_nucleus_that_it_is_told(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = _chains(tmp_path / "chains.parquet", 30)
    words = ["evaluate", "miniature", "--model", "miniature", "--data", str(data)]
    words += ["--json", f"rollout.engine={engine}", "--temperature", "2"]

    def accuracy(*more: str) -> float:
        assert cli.main([*words, *more]) == 0
        found: float = json.loads(capsys.readouterr().out)["accuracy"]
        return found

    # At temperature 2 the model is often wrong; a small nucleus holds one token.
    assert accuracy("--top-p", "0.01") > 0.9
    if engine == "torch":
        assert accuracy() < 0.8


def test_a_nucleus_that_is_none_is_refused_with_its_setting(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["evaluate", "--model", "miniature", "--data", "x", "--top-p", "1.5"]
    assert cli.main(words) == 2
    assert "evaluate.top_p" in capsys.readouterr().err
