"""The base model: how it is made, and that the shipped one has the skill, the habit and the size."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen2ForCausalLM

from tandem.common.errors import TandemError
from tandem.launch.miniature import base_model
from tandem.launch.miniature.problems import distinct

SHIPPED = Path(base_model.__file__).parent / "base"


@pytest.fixture(scope="module")
def shipped() -> Qwen2ForCausalLM:
    return AutoModelForCausalLM.from_pretrained(SHIPPED)


def test_the_shipped_base_is_a_small_complete_folder(shipped: Qwen2ForCausalLM):
    assert sum(path.stat().st_size for path in SHIPPED.rglob("*")) < 1_000_000
    assert sum(p.numel() for p in shipped.parameters()) == 113_472
    assert shipped.dtype == torch.float32
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED)
    assert len(tokenizer) == shipped.config.vocab_size
    assert shipped.generation_config.eos_token_id == tokenizer.eos_token_id
    assert shipped.generation_config.pad_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_shipped_base_can_do_short_chains(shipped: Qwen2ForCausalLM, k: int):
    problems = distinct(Random(k), k, 64)
    assert base_model.accuracy(shipped, problems, sampled=False).right >= 0.9


@pytest.mark.parametrize("sampled", [False, True])
def test_the_shipped_base_fails_every_hard_chain_in_good_form(
    shipped: Qwen2ForCausalLM, sampled: bool
):
    found = base_model.accuracy(shipped, distinct(Random(0), 8, 256), sampled=sampled)
    # A slip in a short chain hits the answer by luck in about one of 1,000 samples.
    assert found.right <= 1 / 256
    assert found.well_formed >= 0.97


def test_making_a_base_runs_both_phases_and_writes_a_folder_that_loads(tmp_path: Path):
    lines: list[str] = []
    skill = base_model.Phase(updates=3, muon_lr=0.02, adamw_lr=2e-3, warmup=1, falls=True)
    habit = base_model.Phase(updates=2, muon_lr=0.005, adamw_lr=5e-4, warmup=1, falls=False)
    out = tmp_path / "new" / "base"
    base_model.make(out, seed=0, log=lines.append, skill=skill, habit=habit, problems_per_k=0)
    assert {path.name for path in out.iterdir()} == {path.name for path in SHIPPED.iterdir()}
    assert list(out.parent.iterdir()) == [out]
    AutoModelForCausalLM.from_pretrained(out)
    assert lines == [f"wrote {out}"]


def test_the_report_has_a_line_for_each_k(shipped: Qwen2ForCausalLM):
    lines: list[str] = []
    base_model.report(shipped, 32, lines.append, ks=(1, 4))
    header, one, four = (line.split() for line in lines)
    assert header[:3] == ["k", "greedy", "T=1"]
    assert one[0] == "1"
    assert float(one[1].rstrip("%")) >= 90
    assert four[:2] == ["4", "0.0%"]


def test_the_same_seed_makes_the_same_weights(tmp_path: Path):
    phase = base_model.Phase(updates=1, muon_lr=0.02, adamw_lr=2e-3, warmup=1, falls=True)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        torch.rand(1)  # the caller's generator stands elsewhere each time, and must not matter
        base_model.make(
            tmp_path / name,
            seed=seed,
            log=lambda line: None,
            skill=phase,
            habit=phase,
            problems_per_k=0,
        )
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def test_a_folder_with_something_in_it_is_refused_and_kept(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(TandemError, match="is not empty"):
        base_model.make(tmp_path, seed=0)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("batches", [base_model.skill_batch, base_model.habit_batch])
def test_either_phase_lowers_its_loss(batches):
    torch.manual_seed(0)
    model = Qwen2ForCausalLM(base_model.model_config())
    phase = base_model.Phase(updates=12, muon_lr=0.02, adamw_lr=2e-3, warmup=1, falls=True)
    # An untrained model is near the 3.47 nats of a uniform choice among 32 tokens.
    assert base_model.train(model, phase, batches, seed=0, log=print) < 3.0


def test_rates_rise_and_then_fall_or_stay():
    falling = base_model.Phase(updates=100, muon_lr=1.0, adamw_lr=1.0, warmup=10, falls=True)
    assert falling.rate(0) == pytest.approx(0.1)
    assert falling.rate(30) == 1.0
    assert falling.rate(75) == pytest.approx(0.5)
    staying = base_model.Phase(updates=100, muon_lr=1.0, adamw_lr=1.0, warmup=10, falls=False)
    assert staying.rate(0) == pytest.approx(0.1)
    assert staying.rate(75) == 1.0


def test_habit_batches_mostly_stop_after_three_steps_and_keep_short_chains_whole():
    rng = Random(0)
    long: list[int] = []
    for _ in range(400):
        chains = base_model.habit_batch(rng, size=4)
        for prompt, response in chains:
            k = sum(prompt.count(sign) for sign in "+-")
            steps = response.count("=")
            if k <= 3:
                assert steps == k
            else:
                long.append(steps)
    assert 0.6 < len(long) / 1600 < 0.8
    assert min(long) == 3
    assert 0.89 < long.count(3) / len(long) < 0.95


def test_muon_updates_are_near_orthogonal():
    torch.manual_seed(0)
    for shape in ((64, 128), (128, 64), (32, 64)):
        singular = torch.linalg.svdvals(base_model.orthogonalised(torch.randn(shape)))
        assert singular.min() > 0.3
        assert singular.max() < 1.3


def test_problems_parquet_and_tokenizer_import_neither_torch_nor_transformers():
    code = (
        "import sys\n"
        "from tandem.launch.miniature import parquet, problems, tokenizer\n"
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip() == "set()"
