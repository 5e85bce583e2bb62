"""Ingest: what comes out of data sets, and every bad input as one line before anything is written."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers.processors import TemplateProcessing

from tandem.common import prompts
from tandem.common.config import Config, to_yaml
from tandem.common.errors import ConfigError, DataError, StoreError, TandemError
from tandem.common.hub import TOKENIZER_FILES
from tandem.common.models import resolve
from tandem.common.records import Verdict
from tandem.common.run_folder import JoinInfo, RunFolder
from tandem.launch.cli import main
from tandem.launch.host import existing_redis, redis_server
from tandem.launch.host.preflight import check_model
from tandem.launch.ingest import prepare as ingest
from tandem.launch.ingest import process as ingest_process
from tandem.launch.ingest.columns import broken
from tandem.launch.ingest.load import load as load_data
from tandem.launch.ingest.load import reload, role_config
from tandem.launch.ingest.process import IngestFailed, IngestProcess
from tandem.launch.miniature.parquet import SCHEMA, write
from tandem.launch.run import job
from tandem.launch.run.opened.presets import load
from tandem.replay.connection import connect
from tandem.replay.ledger import Ledger
from tandem.replay.ledger_records import LedgerSettings
from tandem.replay.store import RunStore


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def made(here: Path) -> Path:
    """Parquet files of the hard miniature, in small."""
    write(here / "d", traces=3, fresh=6, held_out=5)
    return here / "d"


PLAIN = (
    "data.miniature=null",
    "data.train=[{path: d/expert.parquet},{path: d/fresh.parquet, weight: 2}]",
    "data.evaluate=[{path: d/heldout.parquet, name: heldout}]",
)


def prepared(*overrides: str) -> ingest.Prepared:
    config = load("miniature").resolve([*PLAIN, *overrides])
    assert config.run.dir is not None
    return ingest.prepare(config, RunFolder(config.run.dir))


def change(path: Path, edit: Callable[[list[dict]], None]) -> None:
    """Edits the rows of a parquet file."""
    rows = pq.read_table(path).to_pylist()
    edit(rows)
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path)


# --- what comes out ---


def untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tokenizer may be given a text which is surely too long."""
    encode_all = prompts.encode_all

    def checked(tokenizer: Any, texts: Sequence[str]) -> list[Any]:
        assert max(map(len, texts), default=0) <= 1_000_000
        return encode_all(tokenizer, texts)

    monkeypatch.setattr(prompts, "encode_all", checked)


def test_prompts_of_ten_megabytes_are_left_out_without_a_token(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(rows: list[dict]) -> None:
        for row in rows[:3]:
            row["prompt"][0]["content"] = "7+5-" * 2_500_000

    change(made / "fresh.parquet", edit)
    untouched(monkeypatch)
    found = prepared()
    assert found.counts["fresh"].long_prompts == 3
    assert found.counts["fresh"].problems == 3
    with pytest.raises(
        DataError, match=r"row 0: the prompt has 10,000,000 characters and data\.max"
    ):
        prepared("data.overlong=refuse")


def test_a_trace_of_ten_megabytes_is_left_out_without_a_token(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def edit(rows: list[dict]) -> None:
        rows[0]["target"][0]["content"] = "7+5-" * 2_500_000

    change(made / "expert.parquet", edit)
    untouched(monkeypatch)
    assert prepared().counts["expert"].long_traces == 1


def test_prompts_alone_begin_with_the_bos_token_that_the_tokenizer_adds(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = ingest.load_tokenizer("miniature")
    begin = "<bos>"
    tokenizer.add_special_tokens({"bos_token": begin})
    number = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, number)]
    )
    plain = prepared("data.template=none")
    monkeypatch.setattr(ingest, "load_tokenizer", lambda path: tokenizer)
    found = prepared("data.template=none")
    for sets in (
        (found.problems, plain.problems),
        (found.evaluate["heldout"], plain.evaluate["heldout"]),
    ):
        assert sets[0]
        for one, before in zip(*sets, strict=True):
            assert one.prompt_text == begin + before.prompt_text
            assert one.prompt_tokens.tolist() == [number, *before.prompt_tokens.tolist()]
    assert [t.tokens.tolist() for t in found.traces] == [t.tokens.tolist() for t in plain.traces]


def test_no_text_of_so_many_characters_has_fewer_tokens() -> None:
    tokenizer = ingest.load_tokenizer("miniature")
    longest = prompts.longest_token(tokenizer)
    for text in ("7+5-3=?", "<think>", "1+2-3\n" * 20):
        assert len(text) <= longest * max(1, len(prompts.encode(tokenizer, text)))


def test_a_slow_ingest_says_what_it_does(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load("miniature").resolve(PLAIN)
    assert config.run.dir is not None
    # So often that a line comes for certain while the child loads its tokenizer.
    monkeypatch.setattr(ingest_process, "TELL_SECONDS", 0.05)
    said: list[str] = []
    process = IngestProcess(config, RunFolder(config.run.dir), said.append)
    try:
        assert process.prepare().traces == 3
    finally:
        process.close()
    assert said
    assert all(line.startswith("data: ") for line in said)


def test_problems_traces_and_held_out_sets(made: Path) -> None:
    found = prepared()
    assert found.sources == (("expert", 3, 1), ("fresh", 6, 2))
    assert len(found.problems) == 9
    assert len(found.evaluate["heldout"]) == 5
    problem = found.problems[0]
    assert problem.problem_id == "expert/0"
    assert problem.trace_ids == ("expert/0#0",)
    assert problem.prompt_text.endswith("<think>")
    assert len(problem.prompt_tokens) == 21
    trace = found.traces[0]
    assert trace.verdict is Verdict.CORRECT
    assert trace.reward == 1.0
    assert trace.components["format"] == 1.0
    assert len(trace.tokens) == 53
    assert trace.grader is not None
    assert not [p for p in found.problems if p.problem_id.startswith("fresh") and p.trace_ids]


@pytest.mark.parametrize(
    ("expert", "fresh"),
    [
        ("luffy", "luffy"),
        ("conversation", "conversation"),
        ("prompt_response", "question_answer"),
        ("problem_solution", "gsm8k"),
    ],
)
def test_the_same_problems_in_another_form_are_the_same_data(
    made: Path, here: Path, expert: str, fresh: str
) -> None:
    plain = prepared()
    for name, into in (("expert", expert), ("fresh", fresh)):
        words = [f"d/{name}.parquet", "--write", f"d/{name}.jsonl", "--as", into]
        assert main(["ingest", *words]) == 0
    found = prepared("data.train=[{path: d/expert.jsonl},{path: d/fresh.jsonl, weight: 2}]")
    for before, after in zip(plain.problems, found.problems, strict=True):
        np.testing.assert_array_equal(after.prompt_tokens, before.prompt_tokens)
        assert (after.problem_id, after.gold) == (before.problem_id, before.gold)
    for trace, again in zip(plain.traces, found.traces, strict=True):
        np.testing.assert_array_equal(again.tokens, trace.tokens)
        assert (again.trace_id, again.reward) == (trace.trace_id, trace.reward)


def test_a_template_and_its_stop_string_reach_the_roles(made: Path, here: Path) -> None:
    (here / "t.txt").write_text("7-{question}")
    found = prepared("data.template=t.txt", "data.stop=[</think>]")
    assert all(problem.prompt_text.startswith("7-") for problem in found.problems)
    config = load("miniature").resolve([*PLAIN, "data.template=t.txt", "data.stop=[</think>]"])
    assert role_config(config).data.stops == ("</think>",)
    (here / "t.txt").unlink()
    assert role_config(load("miniature").resolve([*PLAIN, "data.template=r1_zero"])).data.stop == (
        "</answer>",
    )


@pytest.mark.usefixtures("in_this_process")
def test_a_template_that_is_not_there_is_told_before_anything_starts(
    made: Path, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "data.template=r1zero is neither" in refused(
        capsys, here, *PLAIN, "data.template=r1zero"
    )


def test_the_digest_names_the_data(made: Path) -> None:
    before = prepared().data_digest
    assert prepared().data_digest == before
    change(made / "fresh.parquet", lambda rows: rows[3]["reward_model"].update(ground_truth="1"))
    assert prepared().data_digest != before


def test_what_was_read_is_known_again_by_its_bytes(made: Path) -> None:
    def digest(*overrides: str) -> str:
        config = load("miniature").resolve([*PLAIN, *overrides])
        return ingest.inputs_digest(config, RunFolder("runs/x"))

    before = digest()
    assert digest("run.steps=9", "log.every=1", "expert.when=all_failed") == before
    assert digest("rollout.max_new_tokens=60") != before
    change(made / "heldout.parquet", lambda rows: rows.pop())
    assert digest() != before


@pytest.mark.parametrize("key", ["data.template", "data.evaluate.0.template"])
def test_a_template_is_known_again_by_its_text(made: Path, here: Path, key: str) -> None:
    def digest() -> str:
        config = load("miniature").resolve([*PLAIN, f"{key}=t.txt"])
        return ingest.inputs_digest(config, RunFolder("runs/x"))

    (here / "t.txt").write_text("7-{question}")
    before = digest()
    assert digest() == before
    (here / "t.txt").write_text("8-{question}")
    assert digest() != before


def test_the_miniature_is_read_before_its_folder_exists(here: Path) -> None:
    config = load("miniature").resolve(["data.miniature_fresh=5"])
    found = ingest.prepare(config, RunFolder("runs/x"))
    assert found.sources == (("expert", 4, 1), ("fresh", 5, 1))
    assert list(here.iterdir()) == []


def test_traces_that_nobody_uses_are_left_alone(made: Path) -> None:
    found = prepared("expert.per_group=0")
    assert found.traces == ()
    assert not any(problem.trace_ids for problem in found.problems)


def test_a_wrong_trace_does_not_enter_and_is_counted(made: Path) -> None:
    change(made / "expert.parquet", lambda rows: rows[1]["reward_model"].update(ground_truth="99"))
    found = prepared()
    assert [trace.trace_id for trace in found.traces] == ["expert/0#0", "expert/2#0"]
    assert found.counts["expert"].refused_traces == {"wrong": 1}
    assert "1 traces graded wrong" in str(found.counts["expert"])


def out_of_form(*which: int) -> Callable[[list[dict]], None]:
    """Right answers in a form that closes the preset's gate."""

    def edit(rows: list[dict]) -> None:
        for number in which:
            rows[number]["target"][0]["content"] = "So " + rows[number]["target"][0]["content"]

    return edit


def test_a_correct_trace_that_is_paid_nothing_does_not_enter_and_is_counted(made: Path) -> None:
    """With a reward of 0 its tokens would be pushed down as those of a wrong answer are."""
    change(made / "expert.parquet", out_of_form(1))
    found = prepared()
    assert [trace.trace_id for trace in found.traces] == ["expert/0#0", "expert/2#0"]
    assert [len(problem.trace_ids) for problem in found.problems[:3]] == [1, 0, 1]
    counts = found.counts["expert"]
    assert (counts.traces, counts.unpaid_traces, counts.refused_traces) == (2, 1, {})
    assert "left out: 1 traces graded correct and paid nothing" in str(counts)


@pytest.mark.usefixtures("in_this_process")
def test_without_a_trace_left_it_says_what_became_of_them(made: Path, here: Path, capsys) -> None:
    change(made / "expert.parquet", out_of_form(0, 1, 2))
    said = refused(capsys, here, *PLAIN)
    assert "3 traces graded correct and paid nothing" in said


def test_a_wrong_trace_that_is_let_in_enters_without_being_paid(made: Path) -> None:
    change(made / "expert.parquet", lambda rows: rows[1]["reward_model"].update(ground_truth="99"))
    found = prepared("expert.accept=[correct, wrong]")
    assert [trace.reward for trace in found.traces] == [1.0, 0.0, 1.0]


def test_a_reward_forced_upon_own_samples_leaves_the_experts_alone(made: Path) -> None:
    found = prepared("reward.own_reward=0", "expert.per_group=1")
    assert found.traces
    assert all(trace.reward == 1.0 for trace in found.traces)


def test_a_trace_over_the_limit_is_left_out_whole(made: Path) -> None:
    found = prepared("rollout.max_new_tokens=40", "expert.per_group=0", "learner.source=ledger")
    assert found.traces == ()
    made_sft = load("miniature-sft").resolve(["data.miniature_fresh=3"])
    assert len(ingest.prepare(made_sft, RunFolder("x")).traces) == 4


def test_the_opener_that_the_prompt_ends_with_is_taken_off_the_trace(made: Path) -> None:
    plain = prepared().traces[0]

    def reopen(rows: list[dict]) -> None:
        rows[0]["target"][0]["content"] = "<think>" + rows[0]["target"][0]["content"]

    change(made / "expert.parquet", reopen)
    np.testing.assert_array_equal(prepared().traces[0].tokens, plain.tokens)


@pytest.mark.parametrize(
    ("prefill", "written", "learned"),
    [
        ("Sum: ", "Sum: 7", "7"),
        ("Sum: ", "7", "7"),
        ("Sum: ", "Sum:\n7", "7"),
        ("Sum: ", " Sum: 7", "7"),
        ("Sum ", "Sums 7", "Sums 7"),
        ("Да", "Дай 7", "Дай 7"),
        ("答案是", "答案是7", "7"),
        ("答案是", "答案是七, 7", "七, 7"),
        ("1", "17", "17"),
        ("1", "1+7", "+7"),
        ("<think>\nSo ", "<think>\nSo 7", "7"),
        ("<think>\n", "<think>\n7", "7"),
        ("<think>\n", "<think>7", "7"),
        ("<think>\n", "<think> 7", "7"),
        ("<think>\n", " <think>\n7", "7"),
        ("<think>\n", "\n<think>\n\n7", "\n7"),
        ("<think>\n\n", "<think>\n7", "7"),
        ("<think>", "<think>\n7", "\n7"),
        ("<think>", " <think>7", "7"),
        ("<think>\n", "7<think>", "7<think>"),
        ("<think>\n", " 7", " 7"),
        ("\n", "\n\n7", "\n7"),
        ("\n", " 7", " 7"),
        ("", "\n7", "\n7"),
        ("", "<think>\n7", "<think>\n7"),
    ],
)
def test_an_opener_is_taken_off_whatever_space_is_about_it(
    made: Path, prefill: str, written: str, learned: str
) -> None:
    pair = {"prompt": "3+4=?", "chosen": written, "rejected": written.replace("7", "8")}
    own_rows(made, pair)
    found = offline("dpo", "data.template=none", f"data.prefill={json.dumps(prefill)}")
    assert found.problems[0].prompt_text == f"3+4=?{prefill}"
    assert [trace.text for trace in found.traces] == [learned, learned.replace("7", "8")]


def test_long_tests_stand_behind_a_problems_other_columns(made: Path) -> None:
    """As in older versions, whose runs go on with data of the same digest."""
    tests = [f"assert f({n}) == {n}" for n in range(200)]
    own_rows(made, {"prompt": "Write f", "tests": tests, "level": "easy", "text": "x" * 1_001})
    found = prepared(
        *("data.train=[{path: d/own.jsonl}]", "data.evaluate=[]", "expert.per_group=0"),
        "reward.components=[{name: code}]",
    )
    assert list(found.problems[0].extra) == ["level", "tests"]


def with_probabilities(made: Path, opener: str, more: int) -> ingest.Prepared:
    """The first row of the expert's with an opener before its trace, and a probability a token and ``more``."""
    (row, *_) = pq.read_table(made / "expert.parquet").to_pylist()
    said = opener + row["target"][0]["content"]
    row["target"][0]["content"] = said
    count = len(prompts.encode(ingest.load_tokenizer("miniature"), said)) + 1 + more
    (made / "own.jsonl").write_text(
        json.dumps({**row, "target_probs": [1 / (n + 1) for n in range(count)]}) + "\n"
    )
    return prepared("data.train=[{path: d/own.jsonl}]")


@pytest.mark.parametrize(("opener", "cut"), [("", 0), ("<think>", 1)])
def test_recorded_log_probs_lose_the_opener_with_the_trace(
    made: Path, opener: str, cut: int
) -> None:
    found = with_probabilities(made, opener, 0)
    (trace,) = found.traces
    expected = -np.log(np.arange(cut, cut + len(trace.tokens)) + 1)
    assert trace.logprobs is not None
    np.testing.assert_allclose(trace.logprobs, expected, rtol=1e-6)
    assert "log-probs" not in str(found.counts["own"])


@pytest.mark.parametrize("opener", ["", "<think>"])
def test_log_probs_of_another_length_are_taken_off_and_counted(made: Path, opener: str) -> None:
    found = with_probabilities(made, opener, 2)
    assert found.traces[0].logprobs is None
    assert "1 traces whose log-probs aren't one a token (taken off)" in str(found.counts["own"])


def test_long_prompts_are_dropped_and_counted(made: Path) -> None:
    def lengthen(rows: list[dict]) -> None:
        rows[2]["prompt"][0]["content"] = "1+1" * 20

    change(made / "fresh.parquet", lengthen)
    found = prepared()
    assert found.counts["fresh"].long_prompts == 1
    assert found.sources[1] == ("fresh", 5, 2)
    assert "fresh/2" not in {problem.problem_id for problem in found.problems}


def test_bad_golds_can_be_dropped(made: Path) -> None:
    change(
        made / "fresh.parquet", lambda rows: rows[4]["reward_model"].update(ground_truth="\\frac{")
    )
    found = prepared()
    assert found.counts["fresh"].bad_rows.counts == {"gold answers unreadable": 1}
    assert "fresh/4" not in {problem.problem_id for problem in found.problems}


def test_golds_that_are_whole_solutions_are_told(made: Path) -> None:
    solution = "He has " + "one more apple, and " * 12 + "so 13 in all."
    change(
        made / "fresh.parquet", lambda rows: rows[4]["reward_model"].update(ground_truth=solution)
    )
    found = prepared()
    assert "1 gold answers have over 40 words" in str(found.counts["fresh"])
    assert "gold answers" not in str(found.counts["expert"])


def test_a_gold_that_is_nan_is_none(
    made: Path, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "nan_forms.py").write_text(
        "def read(row):\n"
        "    return {**row, 'answer': float('nan') if row['answer'] > 3 else row['answer']}\n"
    )
    monkeypatch.syspath_prepend(here)
    rows = [{"question": f"1+{number}", "answer": number + 1.0} for number in range(4)]
    in_json = [
        row | ({"answer": float("nan")} if number else {}) for number, row in enumerate(rows)
    ]
    for name, some in (("own", rows), ("json", in_json)):
        (here / f"{name}.jsonl").write_text("\n".join(map(json.dumps, some)))
    sources = "{path: own.jsonl, name: own, form: nan_forms:read}, {path: json.jsonl, name: json}"
    found = prepared(f"data.train=[{{path: d/expert.parquet}}, {sources}]")
    assert found.counts["own"].bad_rows.counts == {"no gold answer": 1}
    assert found.counts["json"].bad_rows.counts == {"no gold answer": 3}
    assert "nan" not in {problem.gold for problem in found.problems}


@pytest.mark.parametrize("gold", ["\\frac{1}{", "}{", "???", "$$"])
def test_golds_that_nothing_can_equal_are_broken(gold: str) -> None:
    assert broken(gold)


@pytest.mark.parametrize(
    "gold", ["42", "[0, 1)", "\\{1, 2\\}", "∅", "x^{2}", "C", "Monday", "\\frac{1}{2}", "-∞"]
)
def test_golds_of_every_usual_kind_are_not(gold: str) -> None:
    assert not broken(gold)


# --- into Redis ---


@pytest.fixture
def join(here: Path) -> Iterator[JoinInfo]:
    folder = RunFolder(here / "server")
    folder.make()
    join = JoinInfo(
        run_id="r",
        host="127.0.0.1",
        port=redis_server.choose_port("127.0.0.1", None),
        password="right",
    )
    config = load("miniature").resolve([])
    conf = redis_server.write_conf(folder, join, config.replay, "127.0.0.1")
    server = subprocess.Popen([str(redis_server.find().path), str(conf)], stdout=subprocess.DEVNULL)
    try:
        redis_server.wait_ready(join, deadline=20)
        yield join
    finally:
        server.kill()
        server.wait()


def test_loading_may_be_repeated(made: Path, join: JoinInfo) -> None:
    config: Config = load("miniature").resolve(PLAIN)
    found = prepared()
    store = connect(join)
    runs, ledger = RunStore(store), Ledger(store, "test")
    for _ in range(2):
        load_data(ledger, runs, config, found)
    assert len(runs.all_trace_ids()) == 3
    assert len(runs.problems([f"fresh/{row}" for row in range(6)])) == 6
    with pytest.raises(StoreError):
        runs.problems(["fresh/6"])
    assert len(runs.eval_set("heldout")) == 5
    reload(ledger, runs, config, found.sources, found.data_digest)
    store.close()


def test_leases_count_the_largest_problem_of_the_data(made: Path, join: JoinInfo) -> None:
    def edit(rows: list[dict]) -> None:
        rows[1]["extra_info"]["split"] = "7" * 3_000_000

    change(made / "fresh.parquet", edit)
    config: Config = load("miniature").resolve(PLAIN)
    found = prepared()
    store = connect(join)
    runs, ledger = RunStore(store), Ledger(store, "test")
    load_data(ledger, runs, config, found)
    worst = ledger.settings.group_bytes
    assert 3_000_000 < worst < 3_100_000
    reload(ledger, runs, config, found.sources, found.data_digest, found.problem_bytes)
    assert ledger.settings.group_bytes == worst
    # A run of an older version counts what its config tells.
    reload(ledger, runs, config, found.sources, found.data_digest)
    assert 0 < ledger.settings.group_bytes < 100_000
    store.close()
    with pytest.raises(ConfigError, match=r"3 MiB, 2\.9 of them its problem: raise it to 4"):
        prepared("replay.maxmemory_mb=3")


@pytest.mark.parametrize(
    ("overrides", "way_out"),
    [
        (
            ["rollout.max_new_tokens=2"],
            r"traces too long.*: raise rollout\.max_new_tokens=2, add a",
        ),
        (["expert.accept=[]"], r"graded correct.*: let more verdicts in than expert\.accept=\[\]"),
    ],
)
def test_where_every_trace_is_left_out_the_setting_that_did_it_is_named(
    overrides: list[str], way_out: str, made: Path
) -> None:
    with pytest.raises(DataError, match=way_out):
        prepared(*overrides)


def test_a_file_that_the_miniature_does_not_write_is_named_with_those_it_does(
    tmp_path: Path,
) -> None:
    config = load("miniature").resolve([f"run.dir={tmp_path / 'run'}", "data.miniature=easy"])
    with pytest.raises(DataError, match=r"no file of data\.miniature=easy, which writes expert\."):
        ingest.prepare(config, RunFolder(tmp_path / "run"))


def test_a_ledger_that_rejects_groups_of_one_sample_is_not_gone_on_with(
    made: Path, join: JoinInfo
) -> None:
    """It was begun by a version that asked for two verdicts whatever the objective."""

    alone = ("rollout.group_size=1", "expert.per_group=0", "learner.objective.name=reinforce_pp")
    config: Config = load("miniature").resolve([*PLAIN, *alone])
    store = connect(join)
    runs, ledger = RunStore(store), Ledger(store, "test")
    sources = (("a", 6, 1),)
    ledger.create(LedgerSettings.of(config, sources, "digest"))
    reload(ledger, runs, config, sources, "digest")
    store.redis.hdel(store.key("meta"), "least_verdicts")
    with pytest.raises(StoreError, match="fewer than 2 own samples, and it asks for 1"):
        reload(ledger, runs, config, sources, "digest")
    store.close()


def test_an_empty_redis_is_never_taken_for_the_runs_ledger(
    made: Path, join: JoinInfo, capsys: pytest.CaptureFixture[str]
) -> None:
    from tandem.common.errors import StoreError

    store = connect(join)
    with pytest.raises(StoreError, match="holds no ledger of run r"):
        reload(
            Ledger(store, "test"), RunStore(store), load("miniature").resolve(PLAIN), [], "digest"
        )
    store.close()


# --- bad inputs ---


def refused(capsys: pytest.CaptureFixture[str], here: Path, *words: str) -> str:
    """The one line that a start with these words ends in; nothing was written or started."""
    before = sorted(here.rglob("*"))
    code = main(["start", *words])
    out, err = capsys.readouterr()
    assert code != 0
    assert out == ""
    assert err.startswith("tandem: ")
    assert len(err.splitlines()) == 1
    assert sorted(here.rglob("*")) == before
    return err


class InThisProcess:
    """The ingest without a process of its own, which takes seconds to load its libraries."""

    def __init__(self, config: Config, folder: RunFolder, say: Callable[[str], None]) -> None:
        self._config, self._folder = config, folder

    def prepare(self) -> ingest.Prepared:
        try:
            return ingest.prepare(self._config, self._folder)
        except TandemError as error:
            raise IngestFailed(str(error), error.exit_code) from None

    def close(self) -> None:
        pass


@pytest.fixture
def no_roles(monkeypatch: pytest.MonkeyPatch) -> None:
    """No role's process loads its libraries while the data are read."""
    monkeypatch.setattr(job, "EARLY", ())


@pytest.fixture
def in_this_process(no_roles: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start begins no other process while the data are read; the two tests that don't ask for this show them."""
    monkeypatch.setattr(job, "IngestProcess", InThisProcess)


@pytest.mark.usefixtures("no_roles")
def test_a_missing_column(made: Path, here: Path, capsys) -> None:
    table = pq.read_table(made / "fresh.parquet").drop_columns(["reward_model"])
    pq.write_table(table, made / "fresh.parquet")
    said = refused(capsys, here, *PLAIN)
    assert "fresh.parquet" in said
    assert "reward_model" in said


@pytest.mark.usefixtures("in_this_process")
def test_an_empty_data_set(made: Path, here: Path, capsys) -> None:
    change(made / "fresh.parquet", lambda rows: rows.clear())
    assert "holds no rows" in refused(capsys, here, *PLAIN)


def begun(here: Path, *overrides: str) -> tuple[str, ...]:
    """The folder of a run that has read its data and was stopped; returns the words that go on with it."""
    words = (*PLAIN, f"run.dir={here / 'run'}", *overrides)
    config = load("miniature").resolve(words)
    folder = RunFolder(here / "run")
    folder.make()
    folder.write_config(to_yaml(config))
    found = ingest.prepare(config, folder)
    known = {
        "inputs": ingest.inputs_digest(config, folder),
        "data_digest": found.data_digest,
        "other_digests": found.other_digests,
        "sources": found.sources,
        "traces": len(found.traces),
    }
    folder.write_run({"run_id": "r", "preset": "miniature", "port": 1, "ingest": known})
    return words


@pytest.mark.usefixtures("in_this_process")
def test_a_run_does_not_go_on_with_other_held_out_problems(made: Path, here: Path, capsys) -> None:
    words = begun(here)
    change(made / "heldout.parquet", lambda rows: rows[1]["reward_model"].update(ground_truth="1"))
    assert main(["start", *words]) != 0
    said = capsys.readouterr().err
    assert "have changed since" in said
    assert "(data.evaluate heldout): restore them" in said


@pytest.mark.usefixtures("in_this_process")
def test_a_run_does_not_go_on_with_other_log_probs_of_its_traces(
    made: Path, here: Path, capsys
) -> None:
    with_probabilities(made, "", 0)
    words = begun(here, "data.train=[{path: d/own.jsonl}]")
    row = json.loads((made / "own.jsonl").read_text())
    own_rows(made, {**row, "target_probs": [0.5 for _ in row["target_probs"]]})
    assert main(["start", *words]) != 0
    assert "(data.train's labels and log-probs): restore them" in capsys.readouterr().err


def test_a_file_that_is_not_there(made: Path, here: Path, capsys) -> None:
    assert "d/none.parquet is missing" in refused(
        capsys, here, *PLAIN, "data.train.1.path=d/none.parquet"
    )


@pytest.mark.usefixtures("in_this_process")
def test_a_file_that_is_no_parquet(made: Path, here: Path, capsys) -> None:
    (made / "fresh.parquet").write_text("prompt,answer\n")
    assert "neither parquet nor JSON" in refused(capsys, here, *PLAIN)


def test_a_gold_that_cannot_be_parsed(made: Path, here: Path, capsys) -> None:
    change(
        made / "fresh.parquet", lambda rows: rows[4]["reward_model"].update(ground_truth="\\frac{")
    )
    said = refused(capsys, here, *PLAIN, "data.bad_rows=refuse")
    assert "fresh.parquet row 4: the gold answer" in said
    assert "data.bad_rows=leave_out" in said


@pytest.mark.usefixtures("in_this_process")
def test_a_long_prompt_where_it_is_to_be_refused(made: Path, here: Path, capsys) -> None:
    said = refused(capsys, here, *PLAIN, "data.overlong=refuse", "data.max_prompt_tokens=20")
    assert "row 0: the prompt has 21 tokens" in said


@pytest.mark.usefixtures("in_this_process")
def test_no_expert_trace_where_the_preset_wants_some(made: Path, here: Path, capsys) -> None:
    said = refused(capsys, here, *PLAIN, "data.train=[{path: d/fresh.parquet}]")
    assert "expert.per_group=0" in said


@pytest.mark.parametrize(
    "name",
    [
        "chat_template.jinja",
        "additional_chat_templates/tools.jinja",
        "added_tokens.json",
        "special_tokens_map.json",
        "merges.txt",
    ],
)
@pytest.mark.usefixtures("made")
def test_what_prompts_are_rendered_by_is_known_again_by_its_bytes(name: str, model: Path) -> None:
    def digest() -> str:
        config = load("miniature").resolve([*PLAIN, "model.path=model"])
        return ingest.inputs_digest(config, RunFolder("runs/x"))

    before = digest()
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_text("{}")
    assert digest() != before


@pytest.mark.usefixtures("in_this_process")
def test_a_run_does_not_go_on_with_another_chat_template(
    made: Path, model: Path, here: Path, capsys
) -> None:
    words = begun(here, "model.path=model")
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}?")
    assert main(["start", *words]) != 0
    assert "have changed since" in capsys.readouterr().err


@pytest.fixture
def model(here: Path) -> Path:
    shutil.copytree(resolve("miniature"), here / "model")
    return here / "model"


def test_a_model_folder_without_a_tokenizer(model: Path, here: Path, capsys) -> None:
    for name in ("tokenizer.json", "vocab.json", "merges.txt"):
        (model / name).unlink(missing_ok=True)
    assert "model.path=model has no tokenizer" in refused(capsys, here, "model.path=model")


@pytest.mark.parametrize("name", TOKENIZER_FILES)
def test_a_model_folder_with_any_file_of_a_tokenizer_has_one(name: str, model: Path) -> None:
    for other in TOKENIZER_FILES:
        (model / other).unlink(missing_ok=True)
    (model / name).touch()
    assert check_model(load("miniature").resolve(["model.path=model"])) == Path("model")


@pytest.mark.usefixtures("in_this_process")
def test_a_model_folder_with_a_damaged_tokenizer(model: Path, here: Path, capsys) -> None:
    (model / "tokenizer.json").write_text("{}")
    assert "its tokenizer can't be read" in refused(capsys, here, "model.path=model")


def test_a_model_folder_without_weights(model: Path, here: Path, capsys) -> None:
    for file in model.glob("*.safetensors"):
        file.unlink()
    assert "has no weights" in refused(capsys, here, "model.path=model")


def test_a_model_folder_that_is_not_there(here: Path, capsys) -> None:
    assert "model.path=./none" in refused(capsys, here, "model.path=./none")


def test_more_tokens_than_the_models_context(here: Path, capsys) -> None:
    said = refused(capsys, here, "rollout.max_new_tokens=512")
    assert "over the model's context of 256 tokens" in said


def test_no_room_on_the_disk(here: Path, capsys) -> None:
    said = refused(capsys, here, "learner.checkpoints_kept=1000000000")
    assert "the run may need" in said
    assert "run.dir=" in said


def test_a_redis_that_refuses_the_password(here: Path, capsys, join: JoinInfo) -> None:
    url = f"replay.redis_url=redis://:wrong@127.0.0.1:{join.port}/0"
    said = refused(capsys, here, url)
    assert "refused the password" in said
    assert "wrong" not in said.replace("wrong one", "")


def test_a_redis_that_is_not_there(here: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(existing_redis, "ANSWER_SECONDS", 0.2)
    port = redis_server.choose_port("127.0.0.1", None)
    said = refused(capsys, here, f"replay.redis_url=redis://127.0.0.1:{port}/0")
    assert "nothing answers there" in said


def test_a_preset_for_gpus_on_a_machine_without(here: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    said = refused(capsys, here, "qwen2.5-math-7b-luffy-8gpu")
    assert "needs 8 GPUs" in said
    assert "tandem start miniature" in said


def test_offline_with_a_preset_for_rollouts(here: Path, capsys) -> None:
    assert main(["offline", "miniature"]) == 2
    assert "tandem start miniature" in capsys.readouterr().err


def test_two_sources_of_one_name(made: Path, here: Path, capsys) -> None:
    said = refused(capsys, here, *PLAIN, "data.train.1.name=expert")
    assert "two entries named 'expert'" in said


def test_a_finished_run_says_so(here: Path, capsys) -> None:
    from tandem.common.config import to_yaml

    preset = load("miniature")
    folder = RunFolder("runs/miniature")
    folder.make()
    folder.config.write_text(to_yaml(preset.resolve([])))
    folder.write_run(
        {"run_id": "x", "preset_path": str(preset.path), "overrides": [], "state": "finished"}
    )
    folder.summary.write_text(
        json.dumps({"steps": 250, "accuracy_before": 0.0, "accuracy_after": 0.85})
    )
    assert main(["start"]) == 0
    out = capsys.readouterr().out
    assert "runs/miniature is finished (250 steps, accuracy 0.0% -> 85.0%)" in out
    assert "--fresh" in out


def test_tests_that_the_reward_runs_are_kept_however_long(made: Path) -> None:
    tests = [f"assert double({n}) == {2 * n}" for n in range(200)]
    row = {"prompt": "Write double(n).<think>", "tests": json.dumps(tests), "notes": "x" * 3000}
    own_rows(made, row)
    pq.write_table(
        pa.Table.from_pylist(
            [{**row, "data_source": "own", "reward_model": {"ground_truth": "none"}}]
        ),
        made / "verl.parquet",
    )
    own = ["data.train=[{path: d/own.jsonl}, {path: d/verl.parquet}]", "data.evaluate=[]"]
    found = prepared(*own, "expert.per_group=0", "reward.components=[{name: code}]")
    assert [problem.extra for problem in found.problems] == [{"tests": row["tests"]}] * 2


def nested(levels: int) -> Any:
    return 1 if levels == 1 else [nested(levels - 1)]


def test_numbers_that_are_too_large_and_values_that_are_too_deep_keep_no_row_from_a_run(
    made: Path,
) -> None:
    more = {"id": 10**30, "least": -(1 << 63), "most": (1 << 64) - 1, "deep": nested(7)}
    more |= {"far": nested(700), "map": {"a": {"b": [-(10**30), nested(3)]}}}
    own_rows(made, {"question": "1+2=?<think>", "answer": "3", **more})
    verl = {"prompt": "1+2=?<think>", "data_source": "own", "reward_model": {"ground_truth": "3"}}
    (made / "verl.jsonl").write_text(json.dumps({**verl, "extra_info": more}) + "\n")
    own = ["data.train=[{path: d/own.jsonl}, {path: d/verl.jsonl}]", "data.evaluate=[]"]
    own.append("expert.per_group=0")
    reward = 'reward.components=[{name: accuracy}, {name: "my.module:function", form: text}]'
    for found in (prepared(*own), prepared(*own, reward)):
        for problem in found.problems:
            assert {name: problem.extra.get(name) for name in more} == {
                **more,
                "id": "1" + "0" * 30,
                "deep": None,
                "far": None,
                "map": {"a": {"b": ["-1" + "0" * 30, nested(3)]}},
            }


# --- responses that the data judge ---


def offline_config(objective: str, *overrides: str) -> Config:
    return load("miniature-sft").resolve(
        [
            *("data.miniature=null", "data.train=[{path: d/own.jsonl}]", "data.evaluate=[]"),
            *(f"learner.objective.name={objective}", *overrides),
        ]
    )


def offline(objective: str, *overrides: str) -> ingest.Prepared:
    config = offline_config(objective, *overrides)
    assert config.run.dir is not None
    return ingest.prepare(config, RunFolder(config.run.dir))


def own_rows(folder: Path, *rows: dict[str, Any]) -> None:
    (folder / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def judged(found: ingest.Prepared) -> list[tuple[str, str, str, float | None, str | None]]:
    return [(t.trace_id, t.text, t.verdict.value, t.reward, t.grader) for t in found.traces]


PAIR = {"prompt": "1+2=?<think>", "chosen": "3", "rejected": "4"}


def test_a_pair_is_two_traces_of_a_problem(made: Path) -> None:
    own_rows(made, PAIR, {**PAIR, "rejected": "9" * 400})
    found = offline("dpo")
    assert judged(found) == [
        ("own/0#0", "3", "correct", 1.0, None),
        ("own/0#1", "4", "wrong", -1.0, None),
    ]
    assert [problem.trace_ids for problem in found.problems] == [("own/0#0", "own/0#1"), ()]
    assert str(found.counts["own"]).startswith("2 problems, 2 expert traces (2 not graded)")
    # Whoever learns only from good responses gets only those.
    assert [text for _, text, *_ in judged(offline("sft"))] == ["3", "3"]
    # Of an objective of one's own, its user says what it learns from.
    mine = "my.module:Pairs"
    assert judged(offline(mine, "learner.objective.rejected=true")) == judged(found)
    assert [text for _, text, *_ in judged(offline(mine))] == ["3", "3"]


@pytest.mark.parametrize(("share", "trained"), [(0.0, 12), (0.3, 8)])
def test_the_run_is_told_of_as_many_traces_as_are_trained_on(
    made: Path, share: float, trained: int
) -> None:
    pairs = [{**PAIR, "prompt": f"{n}+2=?<think>"} for n in range(6)]
    # A pair that is too long leaves a problem without traces, which can't be held out.
    own_rows(made, *pairs, {**PAIR, "prompt": "7+7=?<think>", "rejected": "9" * 400})
    config = offline_config("dpo", f"data.heldout_pairs={share}")
    assert config.run.dir is not None
    process = IngestProcess(config, RunFolder(config.run.dir), print)
    try:
        assert process.prepare().traces == trained
    finally:
        process.close()


def test_labels_are_verdicts(made: Path) -> None:
    rows = [{"prompt": f"{n}+2=?<think>", "completion": str(n), "label": n == 1} for n in range(3)]
    own_rows(made, *rows)
    found = judged(offline("kto", "learner.objective.advantage=none"))
    assert [(verdict, reward) for _, _, verdict, reward, _ in found] == [
        ("wrong", -1.0),
        ("correct", 1.0),
        ("wrong", -1.0),
    ]
    assert [text for _, text, *_ in judged(offline("sft"))] == ["1"]


def test_other_labels_are_other_data(made: Path) -> None:
    digests = []
    for label in (True, False):
        rows = [{"prompt": f"{n}+2=?<think>", "completion": "3"} for n in range(2)]
        own_rows(made, {**rows[0], "label": label}, {**rows[1], "label": not label})
        digests.append(offline("kto", "learner.objective.advantage=none").other_digests)
    assert digests[0] != digests[1]


def test_where_wrong_responses_are_learned_from_those_that_are_graded_wrong_stay(
    made: Path,
) -> None:
    said = [("3", "\\boxed{3}"), ("4", "\\boxed{3}"), ("3", "\\boxed{}")]
    rows = [{"prompt": "1+2=?", "response": response, "gold": gold} for gold, response in said]
    own_rows(made, *rows)
    graded = ("reward.components=[{name: accuracy}]", "learner.objective.advantage=none")
    found = judged(offline("kto", *graded))
    assert [(verdict, paid) for _, _, verdict, paid, _ in found] == [
        ("correct", 1.0),
        ("wrong", 0.0),
        ("unparsable", 0.0),
    ]
    mine = "my.module:Mine"
    assert judged(offline(mine, *graded, "learner.objective.rejected=true")) == found
    # Whoever names other verdicts gets these.
    given = offline("kto", *graded, "expert.accept=[correct,wrong]")
    assert judged(given) == found[:2]
    assert given.counts["own"].refused_traces == {"unparsable": 1}
    # Whoever learns only from good responses gets only those.
    assert judged(offline(mine, *graded)) == judged(offline("sft", graded[0])) == found[:1]


def test_no_wrong_response_is_learned_from_as_a_good_one_because_its_form_is_paid(
    made: Path,
) -> None:
    said = [("3", "\\boxed{3}"), ("4", "\\boxed{3}"), ("4", "3")]
    own_rows(made, *({"prompt": "1+2=?", "response": text, "gold": gold} for gold, text in said))
    boxed = "{name: format, weight: 0.1, params: {style: boxed}}"
    graded = (
        f"reward.components=[{{name: accuracy}}, {boxed}]",
        "learner.objective.advantage=none",
    )
    found = offline("kto", *graded)
    assert [(verdict, paid) for _, _, verdict, paid, _ in judged(found)] == [
        ("correct", 1.1),
        ("wrong", 0.0),
    ]
    assert found.counts["own"].refused_traces == {"wrong and yet paid": 1}
    # Whoever names verdicts gets them, whatever they are paid.
    assert len(offline("kto", *graded, "expert.accept=[correct,wrong]").traces) == 3


def test_a_response_without_a_reward_is_no_trace(made: Path) -> None:
    """Its row would be left out of every step."""
    own_rows(made, {"prompt": "1+2=?", "response": "<answer>1+2</answer>", "gold": "3"})
    with pytest.raises(DataError, match=r"1 traces graded .* without a reward"):
        offline("kto", "learner.objective.advantage=none", "reward.components=[{name: equation}]")


def test_responses_that_are_graded_wrong_are_no_traces_where_pairs_are_learned_from(
    made: Path,
) -> None:
    """They are alone in their groups, and in no pair."""
    own_rows(made, {"prompt": "1+2=?", "response": "\\boxed{3}", "gold": "4"})
    (made / "pairs.jsonl").write_text(json.dumps(PAIR) + "\n")
    both = "data.train=[{path: d/own.jsonl}, {path: d/pairs.jsonl}]"
    found = offline("dpo", both, "reward.components=[{name: accuracy}]")
    assert [trace.trace_id for trace in found.traces] == ["pairs/0#0", "pairs/0#1"]
    assert found.counts["own"].refused_traces == {"wrong": 1}


def test_a_response_that_is_labelled_false_is_wrong_whatever_its_columns_are_called(
    made: Path,
) -> None:
    asked = "1+2=?<think>"
    said = [{"role": "user", "content": asked}, {"role": "assistant", "content": "4"}]
    for row in ({"instruction": asked, "output": "4"}, {"messages": said}):
        own_rows(made, {**row, "label": 0}, {**row, "label": True})
        found = judged(offline("kto", "learner.objective.advantage=none"))
        assert [verdict for _, _, verdict, _, _ in found] == ["wrong", "correct"]
        assert [place for place, *_ in judged(offline("sft"))] == ["own/1#0"]


def test_a_word_in_the_place_of_a_label_is_refused_where_labels_decide(made: Path) -> None:
    said = [{"role": "user", "content": "1+2=?<think>"}, {"role": "assistant", "content": "4"}]
    own_rows(made, {"messages": said, "label": "bad"}, {"messages": said, "label": "true"})
    found = offline("kto", "learner.objective.advantage=none")
    assert [(place, verdict) for place, _, verdict, *_ in judged(found)] == [("own/1#0", "correct")]
    assert found.counts["own"].bad_rows.counts == {"label isn't true or false": 1}
    with pytest.raises(
        DataError, match=r"column label: 'bad' isn't true or false: store a boolean"
    ):
        offline("kto", "learner.objective.advantage=none", "data.bad_rows=refuse")
    # Where no label is asked for, it is a column like any other.
    assert len(offline("sft").traces) == 2


CALL = {"tool_calls": [{"function": {"name": "add", "arguments": "{}"}}]}
THOUGHT = {"reasoning_content": "Why not?"}


@pytest.mark.parametrize(("key", "more"), [("tool_calls", CALL), ("reasoning_content", THOUGHT)])
@pytest.mark.parametrize("form", ["conversation", "preference", "prompt_response", "luffy"])
def test_an_answer_is_not_learned_without_what_its_message_says_beside_its_content(
    form: str, key: str, more: dict[str, Any], made: Path
) -> None:
    asked = {"role": "user", "content": "1+2=?<think>"}

    def row(more: dict[str, Any]) -> dict[str, Any]:
        said = [{"role": "assistant", "content": "3", **more}]
        return {
            "conversation": {"messages": [asked, *said], "gold": "3"},
            "preference": {
                "prompt": [asked],
                "chosen": [{**said[0], "content": "4"}],
                "rejected": said,
            },
            "prompt_response": {"prompt": [asked], "completion": said, "gold": "3"},
            "luffy": {
                "data_source": "own",
                "prompt": [asked],
                "target": said,
                "reward_model": {"ground_truth": "3"},
            },
        }[form]

    # Values that say nothing more.
    no_call = {"function_call": {"name": None, "arguments": None}}
    no_more = [{}, {"tool_calls": []}, no_call, {"reasoning_content": " "}]
    own_rows(made, row(more), *map(row, no_more))
    accepts = "expert.accept=[correct, unparsable]"
    found = offline("dpo" if form == "preference" else "sft", accepts)
    assert {trace.problem_id for trace in found.traces} == {f"own/{n}" for n in range(1, 5)}
    (reason,) = found.counts["own"].bad_rows.counts
    assert reason.endswith(f".{key} is a part of the answer that isn't read")
    way_out = "set turns=all" if form == "conversation" else "put it into the content"
    assert way_out in found.counts["own"].bad_rows.first[reason]
    if form != "preference":
        # Nothing is wrong with the question.
        unused = ["expert.per_group=0", "data.train=[{path: d/own.jsonl}]", "data.evaluate=[]"]
        assert len(prepared(*unused).problems) == 5


def test_thoughts_that_the_content_repeats_are_read(made: Path) -> None:
    said, thought = "Why\n\nnot?</think>3", {"reasoning_content": "Why\nnot? "}
    messages = [
        {"role": "user", "content": "1+2=?<think>"},
        {"role": "assistant", "content": said, **thought},
    ]
    shared = [{"from": "human", "value": "1+2=?<think>"}, {"from": "gpt", "value": said, **thought}]
    own_rows(made, {"messages": messages}, {"messages": shared})
    assert [trace.text for trace in offline("sft").traces] == [said] * 2


def test_a_labelled_row_among_pairs_needs_an_advantage_of_its_own(made: Path) -> None:
    """It is alone in its group, so a group's mean would give it the advantage 0."""
    own_rows(made, PAIR)
    label = {"prompt": "5+2=?<think>", "completion": "7", "label": True}
    (made / "labelled.jsonl").write_text(json.dumps(label) + "\n")
    both = "data.train=[{path: d/own.jsonl}, {path: d/labelled.jsonl}]"
    with pytest.raises(
        DataError,
        match=r"1 of 2 questions have only one: set learner\.objective\.advantage=none$",
    ):
        offline("kto", both)
    assert len(offline("kto", both, "learner.objective.advantage=none").traces) == 3
    # Pairs alone may be compared.
    assert len(offline("kto").traces) == 2


def test_without_a_gold_answer_a_response_is_taken_as_right_offline_only(made: Path) -> None:
    plain = {"prompt": "1+2=?<think>", "response": "3"}
    own_rows(made, plain, {**plain, "gold": "7"}, {**plain, "gold": "3", "response": "it's 3"})
    found = offline("sft", "expert.accept=[correct]", "reward.components=[{name: accuracy}]")
    first = judged(found)[0]
    assert (first[0], first[-1]) == ("own/0#0", None)
    assert found.counts["own"].ungraded_traces == 1
    with pytest.raises(DataError, match="has no gold answer"):
        prepared("data.train=[{path: d/own.jsonl, limit: 1}]", "data.bad_rows=refuse")


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_an_archive_of_responses_without_gold_answers_is_trained_on_with_the_same_data(
    made: Path, objective: str
) -> None:
    own_rows(made, PAIR if objective == "dpo" else {"prompt": "1+2=?<think>", "response": "3"})
    again = offline(objective, "data.archive=archive", "rollout.group_size=2")
    assert again.counts["own"].problems == offline(objective).counts["own"].problems == 1


def said(*roles: str) -> dict[str, Any]:
    """A conversation of one sum a message, which ends with an answer."""
    return {"messages": [{"role": role, "content": "1+2=?<think>"} for role in roles]}


REFUSING = (
    "{% for one in messages %}{% if (one.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate, from user on') }}{% endif %}{{ one.content }}{% endfor %}"
)


@pytest.mark.parametrize("template", ["own", "alpaca"])
def test_a_row_whose_prompt_the_template_refuses_is_left_out_and_counted(
    made: Path, here: Path, template: str
) -> None:
    shutil.copytree(resolve("miniature"), here / "model")
    (here / "model" / "chat_template.jinja").write_text(REFUSING)
    own_rows(
        made,
        said("user", "assistant"),
        said("assistant", "user", "assistant"),
        said("user", "user", "assistant"),
        said("system", "user", "user", "assistant"),
        said("user", "assistant"),
    )
    model = ("model.path=model", f"data.template={template}", "data.max_prompt_tokens=200")
    found = offline("sft", *model)
    assert [problem.problem_id for problem in found.problems] == ["own/0", "own/4"]
    bad = found.counts["own"].bad_rows
    reason, why, way_out = {
        "own": (
            "prompts that the template refuses",
            "the model's chat template refused the prompt: roles must alternate, from user on",
            "correct it",
        ),
        "alpaca": (
            "prompts with more messages than data.template=alpaca holds (own holds them)",
            "data.template=alpaca holds one question, and the prompt has 2 messages",
            "use data.template=own",
        ),
    }[template]
    assert bad.counts == {reason: 3}
    assert f"own.jsonl row 1: {why}" in bad.first[reason]
    ends = rf"row 1: {why}: {way_out}, or set data\.bad_rows=leave_out$"
    with pytest.raises(DataError, match=ends):
        offline("sft", *model, "data.bad_rows=refuse")
    # Where no row is left, the refusal says why.
    own_rows(made, said("user", "user", "assistant"))
    with pytest.raises(DataError, match=rf"not one of its rows can be used .*row 0: {why}"):
        offline("sft", *model)


def test_a_row_whose_prompt_has_no_token_is_left_out_and_counted(made: Path, here: Path) -> None:
    shutil.copytree(resolve("miniature"), here / "model")
    only_sums = "{% if '+' in messages[0].content %}{{ messages[0].content }}{% endif %}"
    (here / "model" / "chat_template.jinja").write_text(only_sums)
    own_rows(made, {"prompt": "7", "response": "7"}, {"prompt": "1+2=?", "response": "3"})
    found = offline("sft", "model.path=model")
    assert [problem.problem_id for problem in found.problems] == ["own/1"]
    assert found.counts["own"].bad_rows.counts == {"prompts without a token": 1}
    with pytest.raises(DataError, match=r"row 0: the prompt has no tokens after rendering"):
        offline("sft", "model.path=model", "data.bad_rows=refuse")


def test_an_objective_of_pairs_needs_some(made: Path) -> None:
    own_rows(made, {"prompt": "1+2=?<think>", "response": "3", "gold": "3"})
    said = r"orpo compares two responses to one question, and no source has pairs of them"
    with pytest.raises(DataError, match=said):
        offline(
            "orpo",
            "reward.components=[{name: accuracy}]",
            "expert.accept=[correct,unparsable,wrong]",
        )


# --- blocks of a constant length ---

PACKED = (
    *("learner.objective.name=sft", "learner.source=offline", "expert.per_group=0"),
    "data.train=[{path: d/expert.parquet}]",
)


def test_documents_are_joined_and_cut_to_blocks_in_which_every_token_is_trained_once(
    made: Path,
) -> None:
    apart = prepared(*PACKED)
    of = {problem.problem_id: problem for problem in apart.problems}
    documents = sorted(
        [*of[trace.problem_id].prompt_tokens.tolist(), *trace.tokens.tolist()]
        for trace in apart.traces
    )
    total = sum(map(len, documents))
    found = prepared(*PACKED, "data.pack_tokens=20")
    assert len(found.problems) == len(found.traces) == (total - 1) // 20
    assert found.sources == (("packed", len(found.problems), 1),)
    joined = [int(found.problems[0].prompt_tokens[0])]
    for problem, trace in zip(found.problems, found.traces, strict=True):
        # A block begins with the token that the one before it has ended with.
        assert problem.prompt_tokens.tolist() == joined[-1:]
        assert problem.trace_ids == (trace.trace_id,)
        assert (len(trace.tokens), trace.verdict, trace.reward) == (20, Verdict.CORRECT, 1.0)
        joined += trace.tokens.tolist()
    rest = total - len(joined)
    assert str(found.counts["packed"]).endswith(
        f"left out: {rest} tokens after the last whole block"
    )
    # Whole documents, each ending in the end token, in some order.
    ends = [index + 1 for index, token in enumerate(joined) if token == 1]
    starts = [0, *ends]
    whole = [joined[start:end] for start, end in zip(starts, ends, strict=False)]
    assert len(whole) == 2
    assert all(document in documents for document in whole)


def test_the_runs_seed_orders_the_documents(made: Path) -> None:
    def tokens(seed: int) -> list[int]:
        found = prepared(*PACKED, "data.pack_tokens=20", f"run.seed={seed}")
        return [token for trace in found.traces for token in trace.tokens.tolist()]

    assert tokens(0) == tokens(0)
    assert len({tuple(tokens(seed)) for seed in range(6)}) > 1


def test_fewer_tokens_than_one_block_are_refused(made: Path, here: Path, capsys) -> None:
    overrides = ("data.pack_tokens=900", "rollout.max_new_tokens=900", *PACKED)
    with pytest.raises(DataError, match=r"data\.pack_tokens=900 is more than the .* tokens"):
        prepared(*overrides)


# --- named sets ---


def test_a_set_with_another_number_of_rows_is_not_the_one_that_was_meant(made: Path) -> None:
    entry = "{{path: d/heldout.parquet, name: held, rows: {}}}"
    assert len(prepared(f"data.evaluate=[{entry.format(5)}]").evaluate["held"]) == 5
    with pytest.raises(DataError, match=r"held should have 6 rows and heldout\.parquet has 5"):
        prepared(f"data.evaluate=[{entry.format(6)}]")


def test_settings_that_older_runs_lack_leave_the_inputs_digest_as_it_was(made: Path) -> None:
    """Else a run that an older version began could not be gone on with."""
    tree = load("miniature").resolve(PLAIN).data.model_dump(mode="json")
    kept = ingest._without_new(tree)
    assert "pack_tokens" not in kept
    assert "rows" not in kept["evaluate"][0]
    assert set(tree) - set(kept) == {"pack_tokens"}
    packed = {**tree, "pack_tokens": 8}
    assert ingest._without_new(packed)["pack_tokens"] == 8


# --- what the reward asks for ---


def tutorial_row(number: int) -> dict[str, Any]:
    return {
        "problem": f"What is {number}+1?",
        "solution": f"It is $\\boxed{{\\frac{{{number}}}{{2}}}}$.",
        "level": number,
        "messages": [{"role": "user", "content": "not kept twice"}],
    }


def with_reward(here: Path, *components: dict[str, Any]) -> ingest.Prepared:
    (here / "rows.jsonl").write_text("".join(json.dumps(tutorial_row(n)) + "\n" for n in (1, 3)))
    config = load("miniature").resolve(
        [
            "data.miniature=null",
            "data.train=[{path: rows.jsonl}]",
            "data.evaluate=[]",
            "data.max_prompt_tokens=200",
            "expert.per_group=0",
            f"reward.components={json.dumps(components)}",
        ]
    )
    assert config.run.dir is not None
    return ingest.prepare(config, RunFolder(here / "runs" / "r"))


def test_a_function_gets_the_columns_as_they_are_in_the_file(here: Path) -> None:
    found = with_reward(here, {"name": "my.module:function"})
    first = found.problems[0]
    assert first.gold == "\\frac{1}{2}"
    assert first.extra == {
        "level": 1,
        "problem": "What is 1+1?",
        "solution": "It is $\\boxed{\\frac{1}{2}}$.",
        "prompt_messages": [{"role": "user", "content": "What is 1+1?"}],
    }


def test_a_function_for_texts_needs_no_messages(here: Path) -> None:
    (first, _) = with_reward(here, {"name": "my.module:function", "form": "text"}).problems
    assert set(first.extra) == {"level", "problem", "solution"}


def test_a_judge_gets_the_messages_and_no_columns(here: Path) -> None:
    params = {"url": "http://127.0.0.1:1", "model": "m"}
    (first, _) = with_reward(here, {"name": "judge", "params": params}).problems
    assert set(first.extra) == {"level", "prompt_messages"}


def test_other_rewards_keep_what_the_form_keeps(here: Path) -> None:
    (first, _) = with_reward(here, {"name": "accuracy"}).problems
    assert first.extra == {"level": 1}
