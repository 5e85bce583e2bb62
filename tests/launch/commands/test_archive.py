"""``tandem archive --regrade``: what becomes of samples and expert traces under another reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tandem.common.records import (
    PROMPT_MESSAGES,
    ExpertTrace,
    FinishReason,
    Group,
    Sample,
    SamplingParams,
    Source,
    Verdict,
    VersionSpan,
)
from tandem.launch.cli import main
from tandem.replay import archive
from tandem.replay.archive_columns import ArchivedGroup

RIGHT = "so \\boxed{7}"
WRONG = "so \\boxed{8}"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def sample(text: str) -> Sample:
    return Sample(
        tokens=np.array([3, 4], np.int32),
        source=np.full(2, Source.OWN, np.uint8),
        logprobs=np.full(2, -0.5, np.float32),
        spans=(VersionSpan(term=1, step=0, start=0, end=2),),
        finish_reason=FinishReason.STOP,
        sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=54),
        text=text,
        reward=1.0,
        verdict=Verdict.CORRECT,
        components={"accuracy": 1.0},
        extracted=None,
        grader="math@1",
    )


def trace(number: int, text: str, **more: Any) -> ExpertTrace:
    return ExpertTrace(
        **{
            "trace_id": f"a/0#{number}",
            "problem_id": "a/0",
            "tokens": np.array([5, 6, 7], np.int32),
            "logprobs": None,
            "text": text,
            "tokenizer_digest": "d",
            "reward": 1.0,
            "verdict": Verdict.CORRECT,
            "components": {},
            "grader": "math@1",
            **more,
        }
    )


def kept(
    *traces: ExpertTrace,
    extras: tuple[dict[str, Any], ...] = ({},),
    samples: tuple[Sample, ...] | None = None,
) -> None:
    """Writes an archive with a group for each of ``extras``, of which the first has the traces."""
    if samples is None:
        samples = sample(RIGHT), sample(WRONG)
    groups = [
        ArchivedGroup(
            step=1,
            place=place,
            group=Group(
                group_id=f"0-{place}",
                attempt=1,
                worker="rollout-0",
                problem_id="a/0",
                prompt_tokens=np.array([1, 2], np.int32),
                prompt_text="3+4?",
                gold="7",
                data_source="made_up",
                samples=samples,
                trace_ids=tuple(one.trace_id for one in traces),
                extra=extra,
            ),
            traces=() if place else traces,
            replaced=(),
            row={"step": 1} if not place else None,
        )
        for place, extra in enumerate(extras)
    ]
    Path("kept").mkdir()
    archive.write(Path("kept") / archive.file_name(1), groups)


def regraded(*settings: str, preset: str = "miniature") -> list[ArchivedGroup]:
    words = ["archive", "kept", "--out", "new", "--regrade", preset, "reward.mode=boxed"]
    assert main([*words, *settings]) == 0
    (file,) = Path("new").iterdir()
    return list(archive.read(file))


ACCURACY = "reward.components=[{name: accuracy}]"


def test_traces_that_the_new_reward_finds_wrong_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    judged = trace(2, WRONG, grader=None)
    kept(trace(0, WRONG), trace(1, RIGHT), judged)
    (one,) = regraded(ACCURACY)
    assert [made.trace_id for made in one.traces] == ["a/0#1", "a/0#2"]
    assert one.traces[0].grader != "math@1"
    assert (one.traces[1].verdict, one.traces[1].reward) == (judged.verdict, judged.reward)
    assert [made.reward for made in one.group.samples] == [1.0, 0.0]
    assert "1 traces graded wrong, left out" in capsys.readouterr().out


def test_so_are_right_traces_that_it_pays_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    kept(trace(0, RIGHT))
    gated = "{name: format, params: {style: tags}, gate: true}"
    (one,) = regraded(f"reward.components=[{{name: accuracy}}, {gated}]")
    assert one.traces == ()
    assert "1 traces graded correct and paid nothing" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("preset", "setting"),
    [
        ("miniature", "expert.accept=[correct, wrong]"),
        # It learns from both kinds.
        ("miniature-sft", "learner.objective={name: kto, advantage: none}"),
        ("miniature-sft", "learner.objective.name=dpo"),
        ("miniature", "learner.objective.name=dpo"),
    ],
)
def test_wrong_traces_stay_where_they_are_learned_from(preset: str, setting: str) -> None:
    kept(trace(0, WRONG))
    (one,) = regraded(ACCURACY, setting, preset=preset)
    assert [(made.verdict, made.reward) for made in one.traces] == [(Verdict.WRONG, 0.0)]


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_a_pair_stays_whatever_its_worse_one_is_paid(objective: str) -> None:
    kept(trace(0, RIGHT), trace(1, WRONG), samples=())
    boxed = "{name: format, weight: 0.1, params: {style: boxed}}"
    reward = f"reward.components=[{{name: accuracy}}, {boxed}]"
    (one,) = regraded(reward, f"learner.objective.name={objective}", preset="miniature-sft")
    assert [made.reward for made in one.traces] == [1.1, 0.1]


def test_a_wrong_trace_that_is_alone_stays_only_where_nothing_is_compared() -> None:
    kept(trace(0, WRONG), samples=())
    (one,) = regraded(ACCURACY, "learner.objective.name=dpo", preset="miniature-sft")
    assert one.traces == ()


def test_of_a_conversation_the_tokens_of_the_last_answer_are_graded() -> None:
    expert, context = Source.EXPERT, Source.ENVIRONMENT
    source = np.array([expert, expert, context, context, expert, expert, expert], np.uint8)
    tokens = np.arange(10, 17, dtype=np.int32)
    kept(trace(0, RIGHT, tokens=tokens, source=source), trace(1, RIGHT))
    length = "{name: dapo_overlong, weight: 0, params: {max_length: 1, buffer: 1}}"
    (one,) = regraded(f"reward.components=[{{name: accuracy}}, {length}]")
    assert [made.components["dapo_overlong"] for made in one.traces] == [-3.0, -3.0]
    assert one.traces[0].tokens.tolist() == tokens.tolist()


# --- what the run hasn't kept ---

MODULE = """
def hinted(completions, hint, **columns):
    return [float(len(one)) for one in hint]

def asked(prompts, completions: "list[list[dict[str, str]]]", log_extra, gold, start=1):
    return [float(len(prompt)) for prompt in prompts]
"""
TESTS = {"tests": ["assert x == 7"]}
CODE = "reward.components=[{name: code}]"


@pytest.fixture
def module(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "hints.py").write_text(MODULE)


def refused(*settings: str) -> None:
    words = ["archive", "kept", "--out", "new", "--regrade", "miniature", *settings]
    assert main(words) == 2
    assert not Path("new").exists()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        (CODE, "reward component code asks for tests (tests), and not one of the archive's 2"),
        ("reward.components=[{name: 'hints:hinted'}]", "hints:hinted asks for the column 'hint'"),
    ],
)
def test_a_reward_that_needs_what_no_group_has_is_refused(
    setting: str, said: str, module: None, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(extras=({}, {"level": 3}))
    refused(setting)
    error = capsys.readouterr().err
    assert said in error
    assert "archive a run whose reward has this component" in error


def test_groups_that_lack_it_are_counted(module: None, capsys: pytest.CaptureFixture[str]) -> None:
    kept(extras=(TESTS, {}, {}))
    regraded(CODE)
    said = capsys.readouterr().err
    assert "code asks for tests (tests), and 2 of 3 groups have none" in said
    assert "graded by their gold answers" in said


def test_a_parameter_takes_the_place_of_a_column(module: None) -> None:
    kept()
    (one,) = regraded("reward.components=[{name: 'hints:hinted', params: {hint: [ab, c]}}]")
    assert [made.reward for made in one.group.samples] == [2.0, 1.0]


def test_prompts_without_messages_are_warned_of(
    module: None, capsys: pytest.CaptureFixture[str]
) -> None:
    kept(extras=({}, {PROMPT_MESSAGES: [{"role": "user", "content": "3+4?"}] * 2}))
    groups = regraded("reward.components=[{name: 'hints:asked'}]")
    assert [one.group.samples[0].reward for one in groups] == [1.0, 2.0]
    said = capsys.readouterr().err
    assert "hints:asked asks for the messages of prompts, and 1 of 2 groups have none" in said


def test_an_archive_is_written_into_the_empty_folder_in_which_one_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    kept()
    Path("new").mkdir()
    monkeypatch.chdir("new")
    assert main(["archive", "../kept", "--out", "."]) == 0
    assert "1 groups of 1 steps" in capsys.readouterr().out
    assert [path.name for path in Path.cwd().iterdir()] == ["groups-00000.parquet"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "new"]
