"""Evaluation: answers, grades and figures of a held-out set."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.common.config import EvalSetConfig, RewardConfig, build
from tandem.common.errors import DataError, TandemError
from tandem.common.records import FinishReason, Problem, Sample, SamplingParams, Verdict
from tandem.launch import cli
from tandem.launch.evaluation.asked import Asked
from tandem.launch.evaluation.plan import prepare
from tandem.launch.evaluation.run import tell
from tandem.replay.evaluating.evaluated import Cell, EvaluatedSample, EvaluationFolder
from tandem.replay.evaluating.evaluations import result_of
from tandem.reward.grading import Grade, Grader
from tandem.rollout.engine import FinishedGroup, GroupRequest
from tandem.rollout.evaluate.answering import Benchmark, answer
from tandem.rollout.evaluate.evaluation import Evaluation, summarise
from tandem.rollout.evaluate.keeping import kept


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


def figures_of(
    problems: Sequence[Problem], responses: Sequence[Sequence[Sample]], grades: Sequence[Grade]
) -> Evaluation:
    """The figures of responses, whose grades are by problem, then response."""
    of = [(p, n, s) for p, group in enumerate(responses) for n, s in enumerate(group)]
    samples = [
        kept(problems[place], one, of_one, place=place, number=number, grader="")
        for (place, number, one), of_one in zip(of, grades, strict=True)
    ]
    return summarise(samples, seconds=1.0)


def test_figures_are_those_of_the_grades() -> None:
    tokens = np.array([3], dtype=np.int32)
    problems = [problem(0, tokens), problem(1, tokens), problem(2, tokens, "b")]
    responses = [[sample(4), sample(6)], [sample(2), sample(2)], [sample(9), sample(1)]]
    responses[2][0] = sample(9, FinishReason.LENGTH)
    right, wrong, crashed = Verdict.CORRECT, Verdict.WRONG, Verdict.CRASHED
    grades = [grade(v) for v in (right, wrong, wrong, wrong, right)] + [grade(crashed, 0.0)]
    found = figures_of(problems, responses, grades)
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
    found = figures_of(problems, responses, grades)
    result = result_of(found.to_dict(), id_="set@1", set_name="set", step=1, member="rollout-0")
    figures = result.all_figures()
    # One of four is right: two of them hold it in half of all draws.
    assert figures["source/a/pass@2"] == pytest.approx(0.5)
    assert figures["source/a/pass@4"] == 1.0
    assert figures["source/b/pass@2"] == 0.0
    assert figures["pass@2"] == pytest.approx(0.25)


def test_without_a_format_component_its_share_is_unknown() -> None:
    tokens = np.array([3], dtype=np.int32)
    found = figures_of([problem(0, tokens)], [[sample(1)]], [grade(Verdict.WRONG, None)])
    assert np.isnan(found.format_share)
    assert found.to_dict()["format_share"] is None
    assert found.classes == {}


def cell(temperature: float = 0.0, samples: int = 1, seed: int = 0) -> Cell:
    return Cell(
        name="set", model="", benchmark="set", template="own", temperature=temperature, top_p=1.0,
        samples=samples, max_new_tokens=8, stop=(), mode="boxed", seed=seed,
    )  # fmt: skip


async def answered(
    sampler: Any, problems: Sequence[Problem], of: Cell, **more: Any
) -> list[EvaluatedSample]:
    """All samples, by problem, then number."""
    found: list[EvaluatedSample] = []
    with Grader(RewardConfig()) as grader:
        benchmark = Benchmark(problems=problems, grader=grader)
        await answer(sampler, benchmark, of, benchmark.places(of), found.extend, **more)
    return sorted(found, key=lambda one: (one.place, one.sample))


def in_engine(
    tiny: Any, problems: Sequence[Problem], of: Cell | None = None
) -> list[EvaluatedSample]:
    from tandem.rollout.decoding.torch_engine import TorchEngine

    async def run() -> list[EvaluatedSample]:
        engine = TorchEngine(tiny.model(), tiny.tokenizer())
        await engine.start()
        try:
            return await answered(engine, problems, of or cell(), token_ids=True)
        finally:
            await engine.close()

    return asyncio.run(run())


def test_responses_stand_in_the_order_of_the_problems(tiny: Any) -> None:
    prompts = [np.arange(3, 5 + i, dtype=np.int32) for i in range(6)]
    problems = [problem(i, tokens) for i, tokens in enumerate(prompts)]
    together = in_engine(tiny, problems)
    for index in (0, 5):
        alone = in_engine(tiny, [problems[index]])
        assert alone[0].token_ids == together[index].token_ids


def test_sampling_k_times_gives_k_responses_and_greedy_one(tiny: Any) -> None:
    problems = [problem(0, np.array([3, 4], dtype=np.int32))]
    sampled = in_engine(tiny, problems, cell(temperature=1.0, samples=5))
    assert (summarise(sampled, seconds=1.0).samples, len(sampled)) == (5, 5)
    greedy = in_engine(tiny, problems, cell(samples=5))
    assert (summarise(greedy, seconds=1.0).samples, len(greedy)) == (1, 1)


def test_the_same_seed_and_name_give_the_same_responses(tiny: Any) -> None:
    problems = [problem(i, np.array([3, 4 + i], dtype=np.int32)) for i in range(3)]
    first, again, other = (
        [one.token_ids for one in in_engine(tiny, problems, cell(1.0, samples=2, seed=n))]
        for n in (0, 0, 1)
    )
    assert first == again
    assert first != other


def test_an_empty_set_is_an_error(tiny: Any) -> None:
    with pytest.raises(DataError, match="empty"):
        summarise(in_engine(tiny, []), seconds=1.0)


def test_a_problem_that_cannot_be_answered_is_named(tiny: Any) -> None:
    problems = [problem(0, np.array([3], dtype=np.int32)), problem(1, np.full(999, 3, np.int32))]
    with pytest.raises(TandemError, match="set/1"):
        in_engine(tiny, problems)


class Mixed:
    """Finishes the last sample of every problem first; the number of each is its length, less one."""

    async def generate(self, requests: Sequence[GroupRequest]) -> AsyncIterator[FinishedGroup]:
        def number(request: GroupRequest) -> int:
            return int(request.group_id.rpartition(":")[2])

        for request in sorted(requests, key=number, reverse=True):
            yield FinishedGroup(group_id=request.group_id, samples=(sample(number(request) + 1),))
            await asyncio.sleep(0)


def test_samples_of_a_problem_are_compared_with_one_another_if_they_are_graded_together() -> None:
    problems = [problem(i, np.array([3], dtype=np.int32)) for i in range(2)]
    parts = [{"name": "length_kimi", "params": {"unit": "tokens"}}]
    reward = RewardConfig.model_validate({"components": parts})

    async def rewards(together: bool) -> list[list[float | None]]:
        batches: list[list[EvaluatedSample]] = []
        of = cell(temperature=1.0, samples=3)
        with Grader(reward) as grader:
            benchmark = Benchmark(problems=problems, grader=grader)
            await answer(
                Mixed(), benchmark, of, benchmark.places(of), batches.append, together=together
            )
        found = sorted((one.place, one.sample, one.reward) for batch in batches for one in batch)
        return [[reward for place, _, reward in found if place == p] for p in range(2)]

    # A wrong response that is longer than the others costs something, and alone none is longer.
    assert asyncio.run(rewards(together=True)) == [[0.0, 0.0, -0.5]] * 2
    assert asyncio.run(rewards(together=False)) == [[0.0, 0.0, 0.0]] * 2


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

    def samples(stuck: int) -> list[EvaluatedSample]:
        engine: Any = SlowEngine(1000.0, stuck)
        return asyncio.run(answered(engine, problems, cell(), silence=1500.0))

    assert len(samples(stuck=9)) == 6
    with pytest.raises(TandemError, match=r"answered 4 of 6 samples, and then none in 1500 s"):
        samples(stuck=4)


def test_the_shipped_model_does_short_chains_and_no_long_ones(tmp_path: Path) -> None:
    from random import Random

    import pyarrow.parquet as pq

    from tandem.launch.miniature.parquet import table
    from tandem.launch.miniature.problems import distinct

    sizes = {"engine": "torch", "max_new_tokens": 70}
    config = build({"run": {"steps": 1}, "data": {"train": [{"path": ""}]}, "rollout": sizes}, ())
    sets = []
    for k in (2, 8):
        path = tmp_path / f"k{k}.parquet"
        rows = table(distinct(Random(k), k, 60), split="heldout", with_target=False)
        pq.write_table(rows, path)
        # The second set has shorter responses of its own.
        longest = None if k == 2 else 40
        held_out = EvalSetConfig(path=str(path), name=path.stem, limit=50, max_new_tokens=longest)
        sets.append(held_out)
    asked = Asked(models=("miniature",), benchmarks=tuple(sets))
    found: dict[str, tuple[list[EvaluatedSample], Evaluation]] = {}

    def add(of: Cell, samples: list[EvaluatedSample], result: Evaluation) -> None:
        found[of.benchmark] = samples, result

    with prepare(asked, config, tmp_path, None) as prepared:
        for cell, name in zip(prepared.plan.cells, ("k2", "k8"), strict=True):
            problems = prepared.benchmark(cell.name).problems
            assert [p.problem_id for p in problems[:2]] == [f"{name}/0", f"{name}/1"]
        tell(prepared, add)
    assert list(found) == ["k2", "k8"]
    (_, short), (responses, long) = found.values()
    assert short.accuracy > 0.9
    assert long.accuracy < 0.05
    assert max(one.tokens for one in responses) <= 40
    assert short.by_source == {"miniature": short.accuracy}
    assert short.step is None


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


def test_samples_are_the_same_whether_they_are_kept_or_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = str(_chains(tmp_path / "chains.parquet", 6))
    words = ["evaluate", "miniature", "--model", "miniature", "--temperature", "1.5", "--json"]
    words += ["--samples", "4", "rollout.engine=torch"]

    def figures(*more: str) -> dict[str, Any]:
        assert cli.main([*words, *more]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    told = figures("--data", data)
    (of_kept,) = figures("--benchmark", data, "--to", str(tmp_path / "out"))["cells"]
    samples = EvaluationFolder(tmp_path / "out").samples(of_kept["name"])
    assert told["tokens"] == sum(one.tokens for one in samples)
    assert 0 < told["accuracy"] < 1
    for ours, theirs in (("accuracy", "accuracy"), ("mean_length", "length"), ("reward", "reward")):
        assert told[ours] == of_kept["figures"][theirs]
    assert told["figures"]["maj@4"] == of_kept["figures"]["maj@4"]


def test_a_nucleus_that_is_none_is_refused_with_its_setting(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["evaluate", "--model", "miniature", "--data", "x", "--top-p", "1.5"]
    assert cli.main(words) == 2
    assert "evaluate.top_p" in capsys.readouterr().err
