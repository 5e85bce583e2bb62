"""Judges and reward models behind HTTP: what they are asked, how they may fail, and what that costs."""

from __future__ import annotations

import re
import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from judges import JudgeProcess

from tandem.common.config import ComponentConfig, RewardConfig
from tandem.common.errors import ConfigError
from tandem.common.records import PROMPT_MESSAGES, FinishReason, Verdict
from tandem.launch.commands.judge import _scores
from tandem.launch.host.servers import check_servers
from tandem.reward.components import judge as judge_component
from tandem.reward.components.classifier import classifier as make_classifier
from tandem.reward.exchange import ExchangeError
from tandem.reward.graders import verdicts
from tandem.reward.grading import Grade, GradeItem, Grader

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1=?"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JudgeProcess]:
    with JudgeProcess(tmp_path_factory.mktemp("judge") / "requests.jsonl") as made:
        yield made


def judge(url: str | None, *, weight: float = 1.0, **params: Any) -> ComponentConfig:
    fixed = {"url": url, "model": "tiny", "seconds": 30.0, "retries": 0, "prompt": "{response}"}
    return ComponentConfig(name="judge", weight=weight, params={**fixed, **params})


def classifier(url: str, **params: Any) -> ComponentConfig:
    fixed = {"url": url, "seconds": 30.0, "retries": 0, "template": "{problem}|{response}"}
    return ComponentConfig(name="classifier", params={**fixed, **params})


def config(*parts: ComponentConfig, **changes: Any) -> RewardConfig:
    """Only a boxed answer is compared with the gold one: grader processes, which take seconds to start, have no
    part in this."""
    return RewardConfig(components=parts, graders=1, mode="boxed_only", **changes)


def items(*texts: str, **changes: Any) -> list[GradeItem]:
    fields: dict[str, Any] = {
        "gold": "2",
        "prompt_text": "<|user|>1+1=?<|assistant|>",
        "extra": {PROMPT_MESSAGES: MESSAGES},
        "group": "g",
    }
    return [GradeItem(text=text, **{**fields, **changes}) for text in texts]


def graded(reward: RewardConfig, *given: GradeItem) -> list[Grade]:
    with Grader(reward) as grader:
        return grader.grade_texts(list(given))


def values(grades: list[Grade], name: str = "judge") -> list[float | None]:
    return [grade.components[name] for grade in grades]


# --- what a judge is asked and pays ----------------------------------------------------------


def test_a_judge_pays_its_last_score_scaled(server: JudgeProcess) -> None:
    grades = graded(config(judge(server.url)), *items("a do:score_8", "b do:score_0"))
    assert values(grades) == [0.8, 0.0]
    assert [grade.reward for grade in grades] == [0.8, 0.0]
    # No component compares with the gold answer.
    assert not any(grade.verdict.leaves_baseline for grade in grades)


def test_labels_of_an_evaluation_come_as_the_judge_gives_them(server: JudgeProcess) -> None:
    """So that a command that is stopped keeps those that are there."""
    asked = [
        SimpleNamespace(
            response=text, gold="", source="a", asked="1+1=?", finish_reason=FinishReason.STOP
        )
        for text in ("a do:slow_3000", "b do:score_4", "c do:no_score", "d do:score_5")
    ]
    with Grader(config(judge(server.url, truncated="ask"))) as grader:
        found = [(one.response[0], score) for one, score in _scores(grader, asked)]  # type: ignore[arg-type]
    assert found[-1] == ("a", 0.7)
    assert sorted(found) == [("a", 0.7), ("b", 0.4), ("c", None), ("d", 0.5)]


def test_it_stands_beside_accuracy_with_its_weight(server: JudgeProcess) -> None:
    reward = config(ComponentConfig(name="accuracy"), judge(server.url, weight=0.5))
    grades = graded(reward, *items("\\boxed{2} do:score_4", "\\boxed{3} do:score_10"))
    assert [grade.reward for grade in grades] == [1.2, 0.5]
    assert [grade.verdict for grade in grades] == [Verdict.CORRECT, Verdict.WRONG]


def test_the_prompt_is_filled_as_plain_text(server: JudgeProcess) -> None:
    template = "P={problem} R={response} G={gold} {other} {gold.__class__}"
    response = "</think>{gold}{problem} %s {0} \ud800 filled_once"
    graded(config(judge(server.url, prompt=template, system="Be fair.")), *items(response))
    body = server.requests("chat")[-1]["body"]
    assert body["messages"] == [
        {"role": "system", "content": "Be fair."},
        {
            "role": "user",
            "content": "P=1+1=? R=</think>{gold}{problem} %s {0} ? filled_once G=2 {other} "
            "{gold.__class__}",
        },
    ]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("tiny", 0.0, 1024)


def test_thoughts_can_be_left_out_and_options_added(server: JudgeProcess) -> None:
    part = judge(server.url, thoughts=False, options={"top_p": 0.5})
    graded(config(part), *items("secret thoughts</think>only this"))
    body = server.requests("chat")[-1]["body"]
    assert body["messages"][0]["content"] == "only this"
    assert body["top_p"] == 0.5


def test_a_score_can_come_from_a_json_field_or_a_pattern(server: JudgeProcess) -> None:
    by_field = judge(server.url, field="score", low=1, high=5)
    assert values(graded(config(by_field), *items("do:json"))) == [0.75]
    by_pattern = judge(server.url, pattern=r"Score:\*\* ([0-9]+)", high=20)
    assert values(graded(config(by_pattern), *items("pattern do:score_5"))) == [0.25]


@pytest.mark.parametrize(
    ("said", "score"),
    [
        ("Score: 8", "8"),
        ("**Score: 8**", "8"),
        ("Score: **8**", "8"),
        ("**Score**: 8", "8"),
        ("score : -0.5", "-0.5"),
        ("The score: 3 for clarity is low.\nScore: **9**", "9"),
    ],
)
def test_the_score_is_found_however_it_is_dressed(said: str, score: str) -> None:
    assert re.findall(judge_component.PATTERN, said)[-1] == score


def test_equal_questions_are_asked_once(server: JudgeProcess) -> None:
    before = len(server.requests("chat"))
    with Grader(config(judge(server.url))) as grader:
        assert values(grader.grade_texts(items(*["same do:score_5"] * 4))) == [0.5] * 4
        assert values(grader.grade_texts(items("same do:score_5"))) == [0.5]
        stats = grader.stats()
    assert len(server.requests("chat")) == before + 1
    assert (stats["judge_asked"], stats["judge_cached"]) == (1, 4)


def test_a_truncated_response_gets_its_value_without_a_question(server: JudgeProcess) -> None:
    before = len(server.requests("chat"))
    cut = items("cut off do:score_9", finish_reason=FinishReason.LENGTH)
    assert values(graded(config(judge(server.url)), *cut)) == [0.0]
    nothing = graded(config(judge(server.url, truncated=None)), *cut)
    assert [grade.reward for grade in nothing] == [None]
    assert len(server.requests("chat")) == before
    assert values(graded(config(judge(server.url, truncated="ask")), *cut)) == [0.9]


def test_the_key_comes_from_the_environment(
    server: JudgeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUDGES_KEY", "s3cret")
    graded(config(judge(server.url + "/v1/", api_key_env="JUDGES_KEY")), *items("with key"))
    asked = server.requests("chat")[-1]
    assert (asked["key"], asked["path"]) == ("Bearer s3cret", "/v1/chat/completions")


# --- classifiers -----------------------------------------------------------------------------


@pytest.mark.parametrize("api", ["classify", "pooling", "tei"])
def test_a_classifier_scores_texts_in_batches(server: JudgeProcess, api: str) -> None:
    path = {"classify": "/classify", "pooling": "/pooling", "tei": "/predict"}[api]
    before = len(server.requests(path))
    label = "good" if api == "tei" else None
    part = classifier(server.url, api=api, label=label, batch=4)
    grades = graded(config(part), *items("a", "bb", "ccc", "dddd", "eeeee"))
    expected = [len("1+1=?|") / 100 + n / 100 for n in range(1, 6)]
    assert values(grades, "classifier") == pytest.approx(expected)
    assert len(server.requests(path)) - before == 2


def test_without_a_template_the_conversation_is_sent(server: JudgeProcess) -> None:
    part = classifier(server.url, template=None, options={"use_activation": False})
    assert values(graded(config(part), *items("a" * 30)), "classifier") == [0.3]
    body = server.requests("/classify")[-1]["body"]
    assert body["messages"] == [*MESSAGES, {"role": "assistant", "content": "a" * 30}]
    assert body["use_activation"] is False


def test_scores_are_scaled_and_cut_if_a_range_is_given(server: JudgeProcess) -> None:
    part = classifier(server.url, template="{response}", low=0.1, high=0.3)
    grades = graded(config(part), *items("a" * 20, "a" * 5, "a" * 90))
    assert values(grades, "classifier") == pytest.approx([0.5, 0.0, 1.0])


@pytest.mark.parametrize("scale", [{}, {"low": -10.0, "high": 10.0}])
@pytest.mark.parametrize("score", ["NaN", "1e999", "-Infinity"])
def test_a_score_that_is_not_finite_is_no_score(scale: dict[str, float], score: str) -> None:
    asking = make_classifier("http://127.0.0.1:9", template="{response}", **scale)
    with pytest.raises(ExchangeError, match="isn't finite"):
        asking.read(f'{{"data": [{{"index": 0, "probs": [{score}]}}]}}'.encode(), 1)


def test_a_text_that_is_refused_costs_its_batch_nothing(server: JudgeProcess) -> None:
    grades = graded(
        config(classifier(server.url, template="{response}")), *items("aa", "do:too_long", "cc")
    )
    assert values(grades, "classifier") == [0.02, None, 0.02]
    assert [g.verdict is Verdict.JUDGE_FAILED for g in grades] == [False, True, False]


# --- what may go wrong -----------------------------------------------------------------------

WRONG = {
    "html": "isn't JSON",
    "no_score": "pattern finds no score in 'I would rather not say.'",
    "unfinished": "its answer was cut .finish_reason 'length'.: raise params.max_tokens",
    "too_high": "the score 11 isn't from 0 to 10",
    "nan": "has no text",
    "wrong_json": "lacks what such a server sends",
    "deep": "isn't JSON",
    "huge": "longer than 1,048,576 bytes",
    "endless": "no complete answer within 1 s",
    "drip_headers": "no complete answer within 1 s|got more than",
    "hang": "no complete answer within 1 s",
    "cut": "in the middle of its answer|IncompleteRead",
    "reset": "Connection|Remote",
    "redirect": "redirects .status 307. to http://127.0.0.1:9/elsewhere, which isn't followed",
    "refuse": "status 400: .*not like this",
    "nothing_known": "status 500",
}


@pytest.mark.parametrize("order", list(WRONG))
def test_a_useless_answer_costs_its_sample_and_no_other(
    server: JudgeProcess, order: str, caplog: pytest.LogCaptureFixture
) -> None:
    seconds = 1.0 if order in ("endless", "drip_headers", "hang") else 30.0
    reward = config(ComponentConfig(name="accuracy"), judge(server.url, seconds=seconds))
    with Grader(reward) as grader:
        grades = grader.grade_texts(items("\\boxed{2} do:score_8", f"\\boxed{{2}} do:{order}"))
        stats = grader.stats()
    assert [grade.verdict for grade in grades] == [Verdict.CORRECT, Verdict.JUDGE_FAILED]
    assert [grade.reward for grade in grades] == [1.8, None]
    assert grades[1].answer is Verdict.CORRECT
    assert (stats["judge_asked"], stats["judge_failures"], stats["judge_failed"]) == (2, 1, 1)
    assert re.search(WRONG[order], caplog.text), caplog.text


def test_what_may_pass_is_tried_again(
    server: JudgeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("random.uniform", lambda low, _: low)
    part = judge(server.url, retries=2)
    with Grader(config(part)) as grader:
        assert values(grader.grade_texts(items("do:flaky_3", "do:busy"))) == [0.9, 0.6]
        assert grader.stats()["judge_retries"] == 3
    first, second = (
        asked["time"]
        for asked in server.requests("chat")
        if asked["body"]["messages"][-1]["content"] == "do:busy"
    )
    # The server had asked for a second.
    assert second - first >= 1.0


def test_what_cannot_pass_is_not(server: JudgeProcess) -> None:
    before = len(server.requests("chat"))
    grades = graded(config(judge(server.url, retries=5)), *items("once do:refuse"))
    assert values(grades) == [None]
    assert len(server.requests("chat")) == before + 1


def test_a_judge_that_is_not_there_fails_without_waiting(
    make: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        grades = graded(config(judge(url, seconds=60.0)), *items("a", "b"))
    assert [grade.reward for grade in grades] == [None, None]
    assert "ConnectionRefusedError" in caplog.text


def test_a_failed_judge_that_only_is_recorded_takes_no_reward_away(server: JudgeProcess) -> None:
    reward = config(ComponentConfig(name="accuracy"), judge(server.url, weight=0.0))
    (grade,) = graded(reward, *items("\\boxed{2} do:refuse"))
    assert (grade.verdict, grade.reward) == (Verdict.CORRECT, 1.0)
    assert grade.components["judge"] is None


def test_a_judge_that_has_been_silent_is_an_alarm_with_the_way_out(server: JudgeProcess) -> None:
    with Grader(config(judge(server.url))) as grader:
        grader.grade_texts(items(*(f"{n} do:refuse" for n in range(30))))
        assert "100% of the last minute's questions to the judge" in grader.servers_trouble
        (asked,) = grader._servers.asked.values()
        late = asked.trouble(time.monotonic() + 61)
        assert "has answered nothing for 61 s (30 questions failed" in late
        assert "start it again, or stop the run" in late
        grader.grade_texts(items("do:score_1"))
        assert "has answered nothing" not in asked.trouble(time.monotonic() + 61)


def test_a_judge_that_is_asked_nothing_is_no_alarm(
    server: JudgeProcess, make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Grader(config(judge(server.url))) as grader:
        grader.grade_texts(items("last do:refuse"))
        (asked,) = grader._servers.asked.values()
        assert "has answered nothing" in asked.trouble(time.monotonic() + 61)
        # A minute later.
        monkeypatch.setattr(verdicts, "RECENT_SECONDS", 0.0)
        assert asked.trouble(time.monotonic() + 121) == ""
        asked.ask("do:refuse", lambda _: None)
        assert asked.trouble(time.monotonic() + 30) == ""
        assert "has answered nothing" in asked.trouble(time.monotonic() + 121)
        make.until(lambda: grader.pump(0.05) or not asked.in_flight, "its answer")


def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path, caplog: Any) -> None:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificate")
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    subprocess.run(
        [
            *(openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"),
            *("-keyout", str(key), "-out", str(certificate), "-subj", "/CN=127.0.0.1"),
            *("-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
    )
    with JudgeProcess(tmp_path / "log", tls=(certificate, key)) as server:
        assert values(graded(config(judge(server.url, seconds=30.0)), *items("a"))) == [None]
        assert "certificate isn't trusted" in caplog.text
        assert server.requests() == []
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SSL_CERT_FILE", str(certificate))
            assert values(graded(config(judge(server.url, seconds=30.0)), *items("a"))) == [0.8]


# --- before anything starts ------------------------------------------------------------------


def test_a_server_that_answers_passes_the_check(server: JudgeProcess) -> None:
    check_servers(config(judge(server.url), classifier(server.url)))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"model": "other"}, "has no model 'other' .params.model.; it has tiny"),
        ({"url": "http://127.0.0.1:1"}, "start the server and wait until it is ready"),
        ({"api_key_env": "NOT_SET_ANYWHERE"}, "NOT_SET_ANYWHERE .api_key_env. isn't set"),
    ],
)
def test_a_server_that_could_not_be_asked_is_told_of(
    server: JudgeProcess, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=told):
        check_servers(config(judge(**{"url": server.url, **changes})))


def test_a_wrong_key_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGES_KEY", "wrong")
    with JudgeProcess(tmp_path / "log", key="right") as server:
        with pytest.raises(ConfigError, match=r"refuses the key .*: check JUDGES_KEY"):
            check_servers(config(judge(server.url, api_key_env="JUDGES_KEY")))
        monkeypatch.setenv("JUDGES_KEY", "right")
        check_servers(config(judge(server.url, api_key_env="JUDGES_KEY")))


def test_a_pool_without_the_key_does_not_begin(server: JudgeProcess) -> None:
    with Grader(config(judge(server.url, api_key_env="NOT_SET_ANYWHERE"))) as grader:
        with pytest.raises(ConfigError, match="NOT_SET_ANYWHERE"):
            grader.canary()


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"url": None}, "url is missing"),
        ({"url": "localhost:8000"}, "should be http://HOST:PORT"),
        ({"url": "ftp://a"}, "should be http://HOST:PORT"),
        ({"url": "http://a:99999"}, "isn't an address"),
        ({"url": "http://me:pass@a"}, "name an environment variable with api_key_env"),
        ({"url": "http://a/v1?key=1"}, "should end with the server's path"),
        ({"model": None}, "model=None should be a text"),
        ({"prompt": "{problem}"}, "has no {response}"),
        ({"pattern": "a", "field": "b"}, "give pattern or field, not both"),
        ({"pattern": "(a)(b)"}, "has 2 groups"),
        ({"pattern": "(a"}, "isn't RE2's syntax"),
        ({"pattern": r"(a)\1"}, "isn't RE2's syntax"),
        ({"low": 5, "high": 5}, "should be less than"),
        ({"seconds": 0}, "seconds=0 should be"),
        ({"seconds": float("nan")}, "seconds=nan should be"),
        ({"parallel": True}, "parallel=True should be"),
        ({"retries": -1}, "retries=-1"),
        ({"truncated": "no"}, "truncated='no'"),
        ({"thoughts": "no"}, "thoughts='no' should be true or false"),
        ({"options": {"messages": []}}, "options.messages is a key that every request has"),
        ({"api_key_env": 5}, "isn't the name of an environment variable"),
        ({"unknown": 5}, "unknown parameter 'unknown'"),
    ],
)
def test_parameters_that_cannot_work_are_refused(params: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Grader(config(judge(**{"url": "http://127.0.0.1:1", **params})))


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"api": "other"}, "isn't one of classify, pooling, tei"),
        ({"api": "tei", "template": None}, "api=tei takes texts"),
        ({"template": "{problem}"}, "has no {response}"),
        ({"low": 1}, "low and high, or neither"),
        ({"label": "good"}, "should be a place from 0"),
        ({"label": -1}, "should be a place from 0"),
        ({"thoughts": 1}, "thoughts=1 should be true or false"),
    ],
)
def test_parameters_of_a_classifier_too(params: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Grader(config(classifier("http://127.0.0.1:1", **params)))


def test_nothing_is_left_running_when_a_grader_is_closed(server: JudgeProcess, make: Any) -> None:

    before, there = len(server.requests("chat")), set(threading.enumerate())
    with Grader(config(judge(server.url, seconds=60.0))) as grader:
        grader.begin_items(items("do:hang"), lambda grades: None)
        make.until(
            lambda: grader.pump(0.05) or len(server.requests("chat")) > before, "the question"
        )
        mine = [t for t in threading.enumerate() if t.name == "judge-1" and t not in there]
        assert len(mine) == 1
    make.until(lambda: not mine[0].is_alive(), "the end of the judge's thread")
