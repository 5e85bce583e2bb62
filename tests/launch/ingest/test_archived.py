"""Archives as sources: the samples' own tokens, each problem once, and pairs by a named rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tandem.common.config import PairsConfig
from tandem.common.errors import ConfigError, DataError
from tandem.common.records import (
    FinishReason,
    Group,
    Problem,
    Sample,
    SamplingParams,
    Source,
    Verdict,
    VersionSpan,
)
from tandem.common.run_folder import RunFolder
from tandem.launch.cli import main
from tandem.launch.ingest import prepare as ingest
from tandem.launch.ingest.pairing import pairs_of
from tandem.launch.run.opened.presets import load
from tandem.replay import archive
from tandem.replay.archive_columns import ArchivedGroup
from tandem.replay.evaluating.held_out import held_out

RIGHT, WRONG = Verdict.CORRECT, Verdict.WRONG


@dataclass(frozen=True)
class Drawn:
    """A sample in short: its tokens, and what came of it."""

    tokens: tuple[int, ...]
    verdict: Verdict | None = RIGHT
    reward: float | None = None
    finish: FinishReason = FinishReason.STOP
    source: Source = Source.OWN
    text: str = "x"

    def made(self) -> Sample:
        length = len(self.tokens)
        reward = float(self.verdict is RIGHT) if self.reward is None else self.reward
        return Sample(
            tokens=np.array(self.tokens, np.int32),
            source=np.full(length, self.source, np.uint8),
            logprobs=np.full(length, -0.5, np.float32),
            spans=(VersionSpan(term=1, step=0, start=0, end=length),),
            finish_reason=self.finish,
            sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=54),
            text=self.text,
            reward=reward,
            verdict=self.verdict,
            components={"accuracy": reward},
            extracted=None,
            grader="math@1",
        )


def group(number: int, drawn: Sequence[Drawn], *, prompt: Sequence[int], gold: str = "7") -> Group:
    return Group(
        group_id=f"0-{number}",
        attempt=1,
        worker="rollout-0",
        problem_id=f"a/{number}",
        prompt_tokens=np.array(prompt, np.int32),
        prompt_text=f"prompt {prompt}",
        gold=gold,
        data_source="made_up",
        samples=tuple(one.made() for one in drawn),
        trace_ids=(),
        extra={"level": 3},
    )


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def archived(*groups: Group, replaced: Sequence[Drawn] = (), name: str = "kept") -> Path:
    """A folder with an archive of a step for each group."""
    folder = Path(name)
    folder.mkdir()
    for step, one in enumerate(groups, 1):
        kept = ArchivedGroup(
            step=step,
            place=0,
            group=one,
            traces=(),
            replaced=tuple(s.made() for s in replaced),
            row=None,
        )
        archive.write(folder / archive.file_name(step), [kept])
    return folder


def prepared(source: str = "{path: kept}", *words: str, objective: str = "sft") -> ingest.Prepared:
    config = load("miniature-sft").resolve(
        [
            *("data.miniature=null", "data.evaluate=[]", f"data.train=[{source}]"),
            *("evaluate.every=0", f"learner.objective.name={objective}", *words),
        ]
    )
    assert config.run.dir is not None
    return ingest.prepare(config, RunFolder(config.run.dir))


def told(made: ingest.Prepared, name: str = "kept") -> str:
    return str(made.counts[name])


def tokens_of(made: ingest.Prepared) -> list[tuple[int, ...]]:
    return [tuple(trace.tokens.tolist()) for trace in made.traces]


A, B, C, D = (3, 4, 5, 2), (3, 4, 6, 2), (3, 3, 3, 2), (6, 6, 2)


def test_right_samples_become_traces_of_their_very_tokens() -> None:
    """The miniature's tokenizer would make other tokens of the text."""
    archived(group(0, [Drawn(A), Drawn(C, WRONG), Drawn(D)], prompt=(5, 6)))
    made = prepared("{path: kept, correct_only: true}")
    assert tokens_of(made) == [A, D]
    problem, trace = made.problems[0], made.traces[0]
    assert problem.prompt_tokens.tolist() == [5, 6]
    assert (problem.gold, problem.data_source, problem.extra) == ("7", "made_up", {"level": 3})
    assert trace.logprobs is not None
    assert trace.logprobs.tolist() == [-0.5] * 4
    assert (trace.reward, trace.verdict, trace.grader) == (1.0, RIGHT, "math@1")
    assert trace.components == {"accuracy": 1.0}
    # Alone in their groups, as a file's are.
    assert [p.trace_ids for p in made.problems] == [("kept/0#0",), ("kept/1#0",)]


def test_without_a_filter_only_accepted_verdicts_are_learned() -> None:
    archived(group(0, [Drawn(A), Drawn(C, WRONG)], prompt=(5, 6)))
    made = prepared()
    assert tokens_of(made) == [A]
    assert "1 traces graded wrong" in told(made)
    both = prepared("{path: kept}", "expert.accept=[correct, wrong]")
    assert tokens_of(both) == [A, C]


def test_a_problem_of_several_groups_is_one_with_its_distinct_samples() -> None:
    archived(
        group(0, [Drawn(A), Drawn(B), Drawn(A)], prompt=(5, 6)),
        group(1, [Drawn(D)], prompt=(5, 6, 7)),
        group(2, [Drawn(B), Drawn(C)], prompt=(5, 6)),
        group(3, [Drawn(A)], prompt=(5, 6), gold="8"),
    )
    made = prepared("{path: kept}", "learner.source=ledger", "expert.per_group=1")
    assert [len(problem.trace_ids) for problem in made.problems] == [3, 1, 1]
    assert tokens_of(made) == [A, B, C, D, A]
    # A single file of it is an archive too.
    (file,) = Path("kept").glob("*1.parquet")
    assert tokens_of(prepared(f"{{path: {file}}}")) == [A, B]


def test_samples_without_a_use_are_counted_by_their_reason() -> None:
    unjudged = Drawn((8, 2), None)
    crashed = Drawn((9, 2), Verdict.CRASHED)
    late = Drawn((10, 2), WRONG, finish=FinishReason.DEADLINE)
    cut = Drawn((11, 2), finish=FinishReason.LENGTH)
    unpaid = Drawn((12, 2), reward=0.0)
    tool = Drawn((13, 2), source=Source.ENVIRONMENT)
    drawn = [Drawn(A), unjudged, crashed, late, cut, unpaid, tool, Drawn((3,) * 60)]
    archived(group(0, drawn, prompt=(5, 6)))
    made = prepared()
    assert tokens_of(made) == [A]
    for reason in (
        "2 samples without a verdict",
        "1 samples cut at a deadline",
        "1 right samples that were cut",
        "1 traces graded correct and paid nothing",
        "1 samples with an environment's text",
        "1 traces too long",
    ):
        assert reason in told(made)


def test_limits_and_lengths_cut_an_archive_down() -> None:
    drawn = [Drawn(A), Drawn(D)]
    archived(*(group(n, drawn, prompt=(5, 6, n)) for n in range(3, 9)))
    short = prepared("{path: kept, max_target_tokens: 3}")
    assert set(tokens_of(short)) == {D}
    assert "6 samples over 3 tokens" in told(short)

    def prompts(made: ingest.Prepared) -> list[int]:
        return sorted({int(problem.prompt_tokens[-1]) for problem in made.problems})

    # Problems, not samples: each has two.
    first = prepared("{path: kept, limit: 2}")
    assert prompts(first) == [3, 4]
    assert len(first.traces) == 4
    small, large = (prepared(f"{{path: kept, limit: {n}, seed: 4}}") for n in (2, 4))
    assert len(prompts(small)) == 2
    assert set(prompts(small)) < set(prompts(large))


@pytest.mark.parametrize(
    ("objective", "keys", "useless"),
    [
        ("dpo", "", [Drawn(A)]),
        ("dpo", ", pairs: {max_length_gap: 0}", [Drawn(A), Drawn(D, WRONG)]),
        ("sft", "", [Drawn(C, WRONG)]),
    ],
    ids=["no-wrong-sample", "no-pair-within-the-gap", "no-right-sample"],
)
def test_a_limit_counts_the_problems_that_can_be_used(
    objective: str, keys: str, useless: list[Drawn]
) -> None:
    usable = [Drawn(A), Drawn(C, WRONG)]
    archived(*(group(n, useless if n < 6 else usable, prompt=(5, n)) for n in range(3, 9)))

    def used(more: str) -> list[int]:
        made = prepared(f"{{path: kept{keys}{more}}}", objective=objective)
        if objective == "dpo":
            # Of the problems that are kept, and of no others.
            assert told(made).startswith(f"{len(made.problems)} pairs")
        return [int(problem.prompt_tokens[-1]) for problem in made.problems]

    assert used(", limit: 1") == [6]
    assert used(", limit: 3") == used("") == [6, 7, 8]
    sets = [{*used(f", limit: 2, seed: {seed}")} for seed in range(5)]
    assert all(len(drawn) == 2 for drawn in sets)
    assert len({frozenset(drawn) for drawn in sets}) > 1


@pytest.mark.parametrize("seed", [None, 1])
def test_what_is_left_out_is_counted_of_the_problems_that_a_limit_keeps(seed: int | None) -> None:
    samples = [Drawn(A), Drawn(C, WRONG), Drawn(D, WRONG, reward=1.0)]
    archived(*(group(n, samples, prompt=(5, n)) for n in range(3, 9)))
    limit = "limit: 2" if seed is None else f"limit: 2, seed: {seed}"
    made = prepared(f"{{path: kept, {limit}}}")
    assert (len(made.problems), made.counts["kept"].refused_traces) == (2, {"wrong": 4})
    made = prepared(f"{{path: kept, {limit}, pairs: {{rule: all}}}}", objective="dpo")
    assert told(made).startswith("2 pairs")
    assert "left out: 2 pairs whose wrong sample is paid as much" in told(made)


def test_samples_replaced_by_traces_are_samples_too() -> None:
    archived(group(0, [Drawn(A)], prompt=(5, 6)), replaced=[Drawn(C, WRONG)])
    made = prepared("{path: kept, pairs: {rule: all}}", objective="dpo")
    assert tokens_of(made) == [A, C]


@pytest.mark.parametrize("objective", ["dpo", "kto", "orpo", "cpo"])
def test_pairs_are_groups_of_a_right_and_a_wrong_sample(objective: str) -> None:
    archived(
        group(0, [Drawn(A), Drawn(C, WRONG)], prompt=(5, 6)),
        group(1, [Drawn(B), Drawn(D, WRONG)], prompt=(5, 6)),
        group(2, [Drawn(A)], prompt=(5, 7)),
    )
    made = prepared("{path: kept, pairs: {rule: all}}", objective=objective)
    assert len(made.problems) == 4
    assert all(len(problem.trace_ids) == 2 for problem in made.problems)
    pairs = list(zip(tokens_of(made)[::2], tokens_of(made)[1::2], strict=True))
    assert sorted(pairs) == sorted((r, w) for r in (A, B) for w in (C, D))
    assert [trace.verdict for trace in made.traces] == [RIGHT, WRONG] * 4
    assert [trace.reward for trace in made.traces] == [1.0, 0.0] * 4
    assert "4 pairs (chosen longer in 2, shorter in 0)" in told(made)
    # By default those nearest in length, each once.
    nearest = prepared(objective=objective)
    assert "2 pairs (chosen longer in 1, shorter in 0)" in told(nearest)
    equal = prepared("{path: kept, pairs: {max_length_gap: 0}}", objective=objective)
    assert "1 pairs (chosen longer in 0, shorter in 0)" in told(equal)


def test_a_wrong_sample_that_is_paid_as_much_is_no_rejected_one() -> None:
    archived(
        group(0, [Drawn(A), Drawn(C, WRONG, reward=1.0 - 1e-9), Drawn(D, WRONG)], prompt=(5, 6)),
    )
    made = prepared("{path: kept, pairs: {rule: all}}", objective="dpo")
    assert tokens_of(made) == [A, D]
    assert "1 pairs whose wrong sample is paid as much" in told(made)


def test_an_archive_that_is_trained_on_as_it_was_is_known_again_by_its_files() -> None:
    def digests() -> tuple[str, str]:
        words = ["learner.objective.name=grpo", "data.archive=trained", "data.miniature=null"]
        config = load("miniature-sft").resolve(
            [*words, "data.train=[{path: kept}]", "data.evaluate=[]", "evaluate.every=0"]
        )
        folder = RunFolder("run")
        made = ingest.prepare(config, folder).other_digests
        return made["data.archive"], ingest.inputs_digest(config, folder)

    archived(group(0, [Drawn(A)], prompt=(5, 6)))
    groups = [group(n, [Drawn(A), Drawn(C, WRONG)], prompt=(5, 6)) for n in range(2)]
    folder = archived(*groups, name="trained")
    before = digests()
    assert digests() == before
    # The same names and groups, of which one is paid something else.
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    groups[1] = group(1, [Drawn(A), Drawn(C, WRONG, reward=0.5)], prompt=(5, 6))
    archived(*groups, name="trained")
    assert all(new != old for new, old in zip(digests(), before, strict=True))


def test_samples_are_graded_anew_if_the_source_says_so() -> None:
    boxed = "1+6=07</think> <answer> \\boxed{07} </answer>"
    archived(group(0, [Drawn(A, WRONG, text=boxed), Drawn(C, text="none")], prompt=(5, 6)))
    assert tokens_of(prepared()) == [C]
    made = prepared("{path: kept, regrade: true}")
    assert tokens_of(made) == [A]
    assert made.traces[0].reward == 1.0
    assert made.traces[0].grader != "math@1"


def test_a_reward_that_needs_what_no_group_has_is_refused_as_by_tandem_archive() -> None:
    words = ("{path: kept, regrade: true}", "reward.components=[{name: code}]")
    folder = archived(group(0, [Drawn(A)], prompt=(5, 6)))
    with pytest.raises(DataError, match=r"code asks for tests \(tests\), and not one of the arch"):
        prepared(*words)
    # Where only some lack it, that is told.
    given = replace(group(1, [Drawn(C)], prompt=(6, 6)), extra={"tests": ["assert True"]})
    kept = ArchivedGroup(step=2, place=0, group=given, traces=(), replaced=(), row=None)
    archive.write(folder / archive.file_name(2), [kept])
    made = prepared(*words, "expert.accept=[correct, wrong, unparsable]")
    assert "code asks for tests (tests), and 1 of 2 groups have none" in told(made)


def test_tokens_beyond_the_vocabulary_are_refused() -> None:
    archived(group(0, [Drawn(A)], prompt=(5, 6)), group(1, [Drawn((3, 70_000))], prompt=(5, 6)))
    with pytest.raises(
        DataError, match=r"step-00000002\.parquet: group 0-1 of step 2 has token 70000"
    ):
        prepared()


@pytest.mark.parametrize(
    ("source", "words", "why"),
    [
        ("{path: kept, form: luffy}", {}, "kept is an archive, which has no form"),
        ("{path: kept}", {"objective": "dpo"}, "1 groups has a right and a wrong sample"),
        ("{path: kept}", {"objective": "kto"}, "1 groups has a right and a wrong sample"),
    ],
)
def test_what_an_archive_cannot_give_is_refused(source: str, words: Any, why: str) -> None:
    archived(group(0, [Drawn(A)], prompt=(5, 6)))
    with pytest.raises(DataError, match=why):
        prepared(source, **words)


def test_an_archive_without_a_usable_sample_is_refused() -> None:
    archived(group(0, [Drawn(C, WRONG)], prompt=(5, 6)))
    with pytest.raises(DataError, match=r"1 groups has a use here"):
        prepared("{path: kept, correct_only: true}")


def test_the_command_ingest_refuses_an_archive(capsys: pytest.CaptureFixture[str]) -> None:
    archived(group(0, [Drawn(A)], prompt=(5, 6)))
    assert main(["ingest", "kept"]) == 2
    assert "kept is an archive" in capsys.readouterr().err


def test_keys_of_an_archive_are_refused_for_other_files() -> None:
    Path("plain.jsonl").write_text('{"prompt": "1+1", "response": "2"}\n')
    with pytest.raises(DataError, match=r"pairs is about an archive's samples"):
        prepared("{path: plain.jsonl, pairs: {rule: all}}")


@pytest.mark.parametrize(
    "words", [[], ["learner.objective.name=dpo", "data.archive=kept"]], ids=["sft", "archive"]
)
def test_pairs_are_held_out_only_where_pairs_are_trained_on(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"data\.heldout_pairs=0\.2 measures pairs"):
        load("miniature-sft").resolve(["data.heldout_pairs=0.2", *words])


# The rules.


def chosen(right: list[int], wrong: list[int], seed: int = 0, **how: Any) -> list[tuple[int, int]]:
    """Lengths of the pairs."""
    found = pairs_of(right, wrong, PairsConfig(**how), np.random.default_rng(seed))
    return [(right[r], wrong[w]) for r, w in found]


def test_each_rule_pairs_as_it_says() -> None:
    right, wrong = [10, 20, 30], [11, 29, 40, 50]
    every = [(r, w) for r in right for w in wrong]
    assert sorted(chosen(right, wrong, rule="all")) == every
    assert sorted(chosen(right, wrong, rule="shortest")) == [(10, w) for w in wrong]
    assert sorted(chosen(right, wrong, rule="longest")) == [(30, w) for w in wrong]
    assert chosen(right, wrong, rule="nearest_length")[2] == (20, 40)
    assert sorted(chosen(right, wrong, rule="nearest_length")) == [(10, 11), (20, 40), (30, 29)]
    random = chosen(right, wrong, rule="random")
    assert len(random) == len({r for r, _ in random}) == len({w for _, w in random}) == 3
    assert chosen(right, wrong) == chosen(right, wrong, rule="nearest_length")


@pytest.mark.parametrize("rule", ["all", "random", "shortest", "longest", "nearest_length"])
def test_a_seed_settles_a_rule(rule: Any) -> None:
    right, wrong = [7] * 4, [7] * 5

    def drawn(seed: int) -> list[tuple[int, int]]:
        how = PairsConfig(rule=rule, per_problem=2)
        return pairs_of(right, wrong, how, np.random.default_rng(seed))

    assert drawn(1) == drawn(1)
    assert len(drawn(1)) == 2
    assert len({tuple(drawn(seed)) for seed in range(20)}) > 5


def test_the_gap_of_lengths_is_bounded_before_a_rule_chooses() -> None:
    # The longest right sample has no partner within the bound.
    assert chosen([10, 90], [11, 12], rule="longest", max_length_gap=1) == [(10, 11)]
    assert chosen([10], [12], max_length_gap=1) == []


def test_all_pairs_of_a_prompt_are_held_out_or_none() -> None:
    problems = [
        Problem(
            problem_id=f"a/{n}",
            prompt_text="",
            prompt_tokens=np.array([n // 3], np.int32),
            gold="",
            data_source="",
            ability="",
            trace_ids=(),
            extra={},
        )
        for n in range(60)
    ]
    few, more = held_out(problems, 0.1, 0), held_out(problems, 0.3, 0)
    assert len(few) == 2 * 3
    assert few < more
    assert {int(n.removeprefix("a/")) // 3 for n in few} == {
        int(n.removeprefix("a/")) // 3 for n in few if int(n.removeprefix("a/")) % 3 == 0
    }
    assert held_out(problems, 0.1, 1) != few
    assert held_out(problems, 0.0, 0) == frozenset()
    with pytest.raises(DataError, match="leaves none to train on"):
        held_out(problems[:3], 0.5, 0)
