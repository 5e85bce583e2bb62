"""The base model with a tool: that the shipped one has the skill and the habit, and how it is made."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from tandem.common.errors import TandemError
from tandem.common.models import resolve
from tandem.launch.miniature.base_model import Phase
from tandem.launch.miniature.tools import base_model, tokenizer
from tandem.launch.miniature.tools.problems import boxed, distinct, result_message

SHIPPED = Path(base_model.__file__).parent / "base"
PROBLEMS = distinct(Random("tests of the base model with a tool"), 500)
ONCE = Phase(updates=1, muon_lr=0.02, adamw_lr=2e-3, warmup=1, falls=True)


@pytest.fixture(scope="module")
def shipped() -> Qwen2ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(SHIPPED)


def test_the_shipped_base_is_a_small_complete_folder(shipped: Qwen2ForCausalLM):
    assert Path(resolve("miniature-tools")).samefile(SHIPPED)
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*")) < 1_000_000
    loaded = AutoTokenizer.from_pretrained(SHIPPED)
    assert len(loaded) == shipped.config.vocab_size == tokenizer.SIZE
    assert loaded.chat_template == tokenizer.CHAT_TEMPLATE
    assert shipped.generation_config.eos_token_id == loaded.eos_token_id
    assert shipped.generation_config.pad_token_id == loaded.pad_token_id


def test_sampled_it_answers_directly_nine_times_in_ten_and_is_hardly_ever_right(
    shipped: Qwen2ForCausalLM,
):
    found = base_model.behaviour(shipped, PROBLEMS, sampled=True)
    assert found.direct >= 0.9
    assert 0.02 <= found.calls <= 0.1
    assert found.right <= 0.1


def test_greedily_it_always_answers_directly(shipped: Qwen2ForCausalLM):
    found = base_model.behaviour(shipped, PROBLEMS, sampled=False)
    assert found.direct >= 0.99
    assert found.calls == 0
    assert found.right <= 0.02


def test_without_the_tool_it_answers_in_good_form_and_is_hardly_ever_right(
    shipped: Qwen2ForCausalLM,
):
    found = base_model.behaviour(shipped, PROBLEMS, sampled=True, offered=False)
    assert found.direct >= 0.95
    assert found.right <= 0.02


def test_a_call_that_it_begins_is_well_formed_and_names_the_operands(shipped: Qwen2ForCausalLM):
    prompts = [p.prompt() + "<tool_call>" for p in PROBLEMS]
    written = base_model.turn(shipped, prompts, sampled=True)
    right = ["<tool_call>" + text == p.call for text, p in zip(written, PROBLEMS, strict=True)]
    assert sum(right) >= 0.95 * len(right)


def test_it_answers_what_a_result_says_even_if_that_is_no_product(shipped: Qwen2ForCausalLM):
    assert base_model.reads(shipped, PROBLEMS, Random(0), sampled=True) >= 0.95


def test_the_reward_of_a_right_result_is_the_run_s_own(shipped: Qwen2ForCausalLM):
    problem = PROBLEMS[0]
    history = problem.prompt() + problem.call + "<|im_end|>" + result_message(problem.answer)
    (answer,) = base_model.turn(shipped, [history], sampled=False)
    assert answer == boxed(problem.answer)


def test_only_the_model_s_own_turns_are_imitated():
    from tandem.launch.miniature.base_model import _rows

    tok, problem = tokenizer.build(), PROBLEMS[0]
    ids, labels = _rows([base_model.called(problem, "7")], tok)
    own = tok.decode(ids[0][labels[0] != -100])
    assert own == f"{problem.call}<|im_end|>{boxed('7')}<|im_end|>"
    assert torch.equal(ids[labels != -100], labels[labels != -100])


@pytest.mark.parametrize(
    ("batch", "calls"),
    [(base_model.skill_batch, base_model.SKILL_CALLS), (base_model.habit_batch, 4)],
)
def test_batches_hold_so_many_calls_and_right_direct_answers(batch, calls: int):
    rows = batch(Random(0))
    assert len(rows) == base_model.BATCH
    assert sum("<tool_call>" in row[1] for row in rows) == calls
    for prompt, *rest in rows:
        a, b = prompt.split("user\n")[1].split("=")[0].split("*")
        if len(rest) == 1:
            assert rest == [boxed(str(int(a) * int(b)))]
        else:
            # The result has nothing to do with the operands, so that no product is learned from it.
            assert boxed(str(int(a) * int(b))) != rest[2]


def test_making_a_base_runs_both_phases_and_writes_a_folder_that_loads(tmp_path: Path):
    lines: list[str] = []
    out = tmp_path / "new" / "base"
    base_model.make(out, seed=0, log=lines.append, skill=ONCE, habit=ONCE, problems=0)
    assert {path.name for path in out.iterdir()} == {path.name for path in SHIPPED.iterdir()}
    AutoModelForCausalLM.from_pretrained(out)
    assert lines == [f"wrote {out}"]


def test_the_report_says_what_the_model_does(shipped: Qwen2ForCausalLM):
    lines: list[str] = []
    base_model.report(shipped, 16, lines.append)
    assert [line.split(":")[0] for line in lines] == [
        "tool, greedy",
        "tool, T=1",
        "no tool, greedy",
        "no tool, T=1",
        "results read rightly at T=1",
    ]


def test_the_same_seed_makes_the_same_weights(tmp_path: Path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.rand(1)  # the caller's generator stands elsewhere each time, and must not matter
        base_model.make(
            tmp_path / name,
            seed=seed,
            log=lambda line: None,
            skill=ONCE,
            habit=ONCE,
            problems=0,
        )
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_a_folder_with_something_in_it_is_refused_and_kept(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TandemError, match="is not empty"):
        base_model.make(tmp_path, seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_problems_and_environments_need_no_deep_learning_library():
    modules = "tandem.launch.miniature.tools.problems, tandem.launch.miniature.tools.environments"
    probe = (
        f"import sys, {modules}; print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.strip()) == (0, "[]"), done.stderr
