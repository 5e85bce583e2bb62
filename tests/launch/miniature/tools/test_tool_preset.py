"""The preset ``miniature-tools``: its data, its rewards, its controls, and that it can be started."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest

from tandem.common.config import Config
from tandem.common.import_path import is_import_path
from tandem.common.records import FinishReason
from tandem.launch.cli import main
from tandem.launch.miniature import parquet
from tandem.launch.miniature.tools import tokenizer
from tandem.launch.miniature.tools.problems import Product, boxed, result_message
from tandem.launch.run.opened.presets import load
from tandem.reward.grades import GradeItem
from tandem.reward.grading import Grader

ROOT = Path(__file__).parents[4]


def preset(*overrides: str) -> Config:
    return load("miniature-tools").resolve(list(overrides))


def rows(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = ROOT / "tests" / "benchmarks" / "tools.py"
    spec = importlib.util.spec_from_file_location("benchmark_of_tools", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_held_out_problems_are_apart_and_the_same_for_every_seed(tmp_path: Path):
    for seed in (0, 1):
        made = parquet.write(tmp_path / str(seed), "tools", seed=seed, train=300, held_out=100)
        assert made.rows == {"train.parquet": 300, "heldout.parquet": 100}
        assert made.k == 1
    questions = {
        (seed, split): {
            r["prompt"][0]["content"] for r in rows(tmp_path / seed / f"{split}.parquet")
        }
        for seed in "01"
        for split in ("train", "heldout")
    }
    assert questions["0", "heldout"] == questions["1", "heldout"]
    assert not questions["0", "train"] & questions["1", "train"]
    assert not questions["0", "train"] & questions["0", "heldout"]
    assert len(questions["0", "train"]) == 300


def test_training_products_are_drawn_around_the_held_out_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # 400 products in all: ignoring the held-out ones would certainly repeat some.
    monkeypatch.setattr("tandem.launch.miniature.tools.problems.LARGEST", 119)
    parquet.write(tmp_path, "tools", train=120, held_out=80)
    found = [
        r["prompt"][0]["content"]
        for name in ("train", "heldout")
        for r in rows(tmp_path / f"{name}.parquet")
    ]
    assert len(set(found)) == len(found) == 200


def test_rows_ask_for_a_product_and_hold_its_answer_and_no_target(tmp_path: Path):
    parquet.write(tmp_path, "tools", train=50, held_out=10)
    for row in rows(tmp_path / "train.parquet"):
        (message,) = row["prompt"]
        a, b = message["content"].removesuffix("=?").split("*")
        assert row["reward_model"]["ground_truth"] == str(int(a) * int(b))
        assert row["target"] is None


def test_a_whole_episode_of_the_longest_product_fits_into_the_preset_s_limits():
    tok, config, problem = tokenizer.build(), preset(), Product(a=999, b=999)
    prompt = len(tok.encode(problem.prompt()))
    rest = len(
        tok.encode(
            problem.call + "<|im_end|>" + result_message(problem.answer) + boxed(problem.answer)
        )
    )
    assert prompt <= config.data.max_prompt_tokens
    assert rest + 1 <= config.rollout.max_new_tokens
    assert prompt + config.rollout.max_new_tokens <= tokenizer.CONTEXT
    assert len(tok.encode(problem.answer)) <= config.environments.observation_tokens


def paid(config: Config, text: str) -> float | None:
    """What the run's own grader pays an episode whose last turn is this text."""
    item = GradeItem(text=text, gold="35346", finish_reason=FinishReason.STOP)
    with Grader(config.reward, processes=1) as grader:
        return grader.grade_texts([item])[0].reward


def test_the_final_answer_alone_is_paid():
    call = Product(a=137, b=258).call
    assert [paid(preset(), text) for text in (boxed("35346"), boxed("35347"), call)] == [1, 0, 0]


def test_arms_differ_from_the_job_in_one_thing_each(benchmark: ModuleType):
    used = {}
    for name, arm in benchmark.ARMS.items():
        config = preset(*arm.overrides)
        changed = {section for section, value in config if value != getattr(preset(), section)}
        environment = config.environments.use[config.environments.default]
        assert is_import_path(environment.target)
        used[name] = (changed, environment.target.rpartition(":")[2])
    assert used == {
        "job": (set(), "Calculator"),
        "no-tool": ({"environments"}, "NoCalculator"),
        "false-results": ({"environments"}, "FalseCalculator"),
        "no-rewards": ({"reward"}, "Calculator"),
    }
    assert paid(preset(*benchmark.ARMS["no-rewards"].overrides), boxed("35346")) == 0


def test_the_benchmark_says_what_is_amiss(benchmark: ModuleType):
    assert benchmark.amiss("job", [0.0], [0.7]) == []
    assert benchmark.amiss("no-tool", [0.1], [0.2]) == []
    assert len(benchmark.amiss("job", [0.11], [0.69])) == 2
    assert len(benchmark.amiss("false-results", [0.0, 0.0], [0.0, 0.21])) == 1


@pytest.mark.parametrize("arm", ["job", "no-tool", "false-results", "no-rewards"])
def test_every_arm_can_be_started(arm: str, benchmark: ModuleType, tmp_path: Path):
    done = subprocess.run(
        [
            *(sys.executable, "-P", "-m", "tandem.launch.cli", "start", "miniature-tools"),
            *("--dry-run", f"run.dir={tmp_path / 'run'}", *benchmark.ARMS[arm].overrides),
        ],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert "it could run this preset" in done.stdout
    assert "129,216 parameters" in done.stdout


def test_the_benchmark_makes_a_table_of_finished_runs_and_says_whether_it_shows_the_point(
    benchmark: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    for name in benchmark.ARMS:
        for seed, after in ((0, 0.9), (1, 1.0)):
            folder = tmp_path / f"{name}-seed{seed}"
            folder.mkdir()
            shares = {"accuracy_before": 0.0, "accuracy_after": after if name == "job" else 0.01}
            (folder / "summary.json").write_text(json.dumps(shares))
    monkeypatch.setattr(sys, "argv", ["tools.py", "--seeds", "0", "1", "--dir", str(tmp_path)])
    assert benchmark.main() == 0
    assert "| `miniature-tools` | 0.0 ± 0.0 | **95.0 ± 7.1** |" in capsys.readouterr().out
    worse = {"accuracy_before": 0.0, "accuracy_after": 0.3}
    (tmp_path / "no-tool-seed1" / "summary.json").write_text(json.dumps(worse))
    assert benchmark.main() == 1
    assert "the tool taken away: 30.0% is more than 20%" in capsys.readouterr().err


def test_the_command_writes_the_problems(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "data"
    assert main(["make-miniature", str(out), "--setting", "tools", "--fresh", "20"]) == 0
    assert f"{out / 'train.parquet'}: 20 problems of 1 operation\n" in capsys.readouterr().out
    assert len(rows(out / "train.parquet")) == 20
    assert not (out / "expert.parquet").exists()
