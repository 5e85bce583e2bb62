"""``tandem evaluate``: cells, samples that are kept, resumed and compared."""

from __future__ import annotations

import json
import math
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from random import Random
from statistics import mean
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from tandem.common.config import EvalSetConfig, to_yaml
from tandem.common.errors import ConfigError, TandemError
from tandem.common.models import resolve
from tandem.common.records import SamplingParams
from tandem.common.run_folder import RunFolder
from tandem.launch import cli
from tandem.launch.evaluation.asked import Asked, benchmark, ways
from tandem.launch.evaluation.plan import prepare
from tandem.launch.evaluation.run import Workers, begin
from tandem.launch.miniature.parquet import table
from tandem.launch.miniature.problems import distinct
from tandem.launch.plan import hardware
from tandem.launch.plan.hardware import Gpu
from tandem.launch.progress import Progress
from tandem.launch.run.opened.presets import load
from tandem.replay.evaluating.evaluated import EvaluatedSample, EvaluationFolder, Plan
from tandem.reward.exchange import ExchangeError
from tandem.rollout.engine import GroupRequest
from tandem.rollout.evaluate import elsewhere
from tandem.rollout.evaluate.elsewhere import sample_of

Samples = list[EvaluatedSample]


def chains(path: Path, k: int, count: int, copies: int = 1) -> Path:
    """Problems of the miniature's kind with k operations."""
    path.parent.mkdir(exist_ok=True)
    rows = table(distinct(Random(k), k, count), split="heldout", with_target=False)
    import pyarrow as pa

    pq.write_table(pa.concat_tables([rows] * copies), path)
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two sets, and a second model."""
    import torch
    from safetensors.torch import load_file, save_file

    folder = tmp_path_factory.mktemp("evaluate")
    chains(folder / "two.parquet", 2, 8)
    chains(folder / "three.parquet", 3, 8)
    shutil.copytree(resolve("miniature"), folder / "noisy")
    noise = torch.Generator().manual_seed(1)
    for file in (folder / "noisy").glob("*.safetensors"):
        weights = load_file(file)
        for name, value in weights.items():
            weights[name] = value + 0.02 * torch.randn(value.shape, generator=noise).to(value.dtype)
        save_file(weights, file, metadata={"format": "pt"})
    return folder


def grid(place: Path) -> list[str]:
    words = ["evaluate", "miniature", "run.deterministic=true", "--samples", "4"]
    words += ["--model", "miniature", "--model", str(place / "noisy")]
    words += [
        "--benchmark",
        str(place / "two.parquet"),
        "--benchmark",
        str(place / "three.parquet"),
    ]
    words += ["--temperature", "0.7", "--temperature", "1.3", "--top-p", "0.9", "--top-p", "1"]
    return words


@pytest.fixture(scope="module")
def whole(place: Path) -> Path:
    """16 cells, made without an interruption."""
    out = place / "whole"
    assert (
        cli.main([*grid(place), "--to", str(out), "--parquet", "--second-grader", "math_verify"])
        == 0
    )
    return out


def begun(folder: Path, *settings: str) -> RunFolder:
    """A run's folder, as far as an evaluation reads it."""
    run = RunFolder(folder)
    run.path.mkdir()
    run.run_json.write_text('{"run_id": "abc"}')
    run.config.write_text(to_yaml(load("miniature").resolve(settings)))
    return run


def files(folder: Path) -> dict[str, bytes]:
    """What must be the same: all but times, the lock and logs."""
    wanted = [*folder.glob("cells/*/samples.jsonl"), folder / "plan.json", folder / "summary.json"]
    return {str(file.relative_to(folder)): file.read_bytes() for file in wanted}


def until(holds: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 90
    while not holds():
        assert process.poll() is None, "it ended before it was killed"
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.timeout(240)
@pytest.mark.byhand
def test_killed_twice_it_ends_with_the_same_bytes(
    place: Path, whole: Path, tandem_command: str
) -> None:
    out = place / "killed"
    words = [tandem_command, *grid(place), "--to", str(out), "--second-grader", "math_verify"]
    for least, how in ((3, signal.SIGKILL), (6, signal.SIGINT), (10, signal.SIGKILL)):
        with subprocess.Popen(words, text=True, stderr=subprocess.PIPE) as process:
            until(lambda least=least: len(list(out.glob("cells/*/part-0.jsonl"))) >= least, process)
            process.send_signal(how)
            _, said = process.communicate(timeout=60)
        if how is signal.SIGINT:
            assert process.returncode == 130
            assert "the same command goes on" in said
        newest = max(out.glob("cells/*/part-0.jsonl"), key=lambda file: file.stat().st_mtime)
        # As if the last write had been cut in the middle of a line.
        content = newest.read_bytes()
        newest.write_bytes(content[: len(content) * 2 // 3])
    assert not (out / "summary.json").exists()
    assert cli.main(words[1:]) == 0
    assert files(out) == files(whole)
    assert json.loads((out / "times.json").read_text())["samples"] < 16 * 8 * 4


def test_deterministic_samples_are_made_in_whole_blocks_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandem.launch.evaluation import run as evaluate_run
    from tandem.rollout.evaluate import answering

    out, asked, real = place / "blocks", [], answering.answer

    async def answer(sampler: Any, benchmark: Any, cell: Any, wanted: Any, *rest: Any, **more: Any):
        if len(asked) == 2 and not (out / "again").exists():
            raise KeyboardInterrupt
        asked.append(list(wanted))
        await real(sampler, benchmark, cell, wanted, *rest, **more)

    monkeypatch.setattr(evaluate_run, "ROWS", 8)
    monkeypatch.setattr(answering, "answer", answer)
    words = [
        "evaluate",
        "miniature",
        "--model",
        "miniature",
        "--temperature",
        "1",
        "--samples",
        "4",
    ]
    words += ["--benchmark", str(place / "two.parquet"), "--to", str(out), "run.deterministic=true"]
    assert cli.main(words) == 130
    (part,) = out.glob("cells/*/part-0.jsonl")
    lines = part.read_bytes().splitlines(keepends=True)
    assert len(lines) == 16
    part.write_bytes(b"".join(lines[:13]))
    (out / "again").touch()
    assert cli.main(words) == 0
    # The second block, of which three samples were lost, and the two that hadn't begun.
    assert asked[2:] == [asked[1], asked[3], asked[4]]
    assert [len(block) for block in asked] == [8] * 5
    places = sorted(place for block in (asked[0], *asked[2:]) for place in block)
    assert places == [(problem, number) for problem in range(8) for number in range(4)]


def brute(samples: Samples) -> dict[str, Any]:
    """Figures of a cell, each counted in the plainest way."""
    problems: dict[str, Samples] = {}
    for sample in samples:
        problems.setdefault(sample.problem_id, []).append(sample)
    rights = [[s.verdict == "correct" for s in group] for group in problems.values()]
    won = []
    for group in problems.values():
        votes = Counter(s.answer_class for s in group if s.answer_class is not None)
        best = max(votes.values(), default=0)
        first = next((s for s in group if votes[s.answer_class] == best), None)
        won.append(first is not None and first.verdict == "correct")
    kinds = Counter(
        f"{int(s.components['format'] == 1.0)}{int(s.verdict == 'correct')}" for s in samples
    )
    rng = np.random.Generator(np.random.Philox(0))
    each = np.array([mean(row) for row in rights])
    drawn = each[rng.integers(0, len(each), (2000, len(each)))].mean(axis=1)

    def passes(k: int) -> float:
        return mean(1 - math.comb(4 - sum(r), k) / math.comb(4, k) for r in rights)

    return {
        "problems": 8,
        "samples": 32,
        "accuracy": mean(map(mean, rights)),
        "interval": np.percentile(drawn, [2.5, 97.5]).tolist(),
        "pass@2": passes(2),
        "pass@4": passes(4),
        "maj@4": mean(won),
        "classes": {name: kinds[name] / 32 for name in ("11", "10", "01", "00")},
        "length": mean(s.tokens for s in samples),
        "truncated": mean(s.finish_reason == "length" for s in samples),
        "reward": mean(s.reward or 0.0 for s in samples),
    }


def test_every_figure_follows_from_the_samples(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = EvaluationFolder(whole)
    summary = json.loads(folder.summary.read_text())
    assert len(summary["cells"]) == 16
    accuracies = set()
    for cell in summary["cells"]:
        samples = list(folder.samples(cell["name"]))
        figures = cell["figures"]
        for name, value in brute(samples).items():
            assert figures[name] == pytest.approx(value, abs=1e-12), (cell["name"], name)
        assert figures["by_source"]["miniature"]["accuracy"] == figures["accuracy"]
        agree = [s.correct == (s.second == "correct") for s in samples]
        assert figures["second"]["agree"] == mean(agree)
        assert [s.sample for s in samples] == list(range(4)) * 8
        accuracies.add(figures["accuracy"])
        rows = pq.read_table(folder.cell(cell["name"]) / "samples.parquet").to_pylist()
        assert [row["response"] for row in rows] == [s.response for s in samples]
    assert len(accuracies) > 4
    before = folder.summary.read_bytes()
    folder.summary.unlink()
    assert cli.main(["evaluate", "--recompute", str(whole)]) == 0
    assert folder.summary.read_bytes() == before
    assert "pass" in capsys.readouterr().out


@pytest.mark.byhand
@pytest.mark.timeout(240)
def test_workers_share_the_samples_and_a_killed_one_costs_nothing(
    place: Path, whole: Path, tandem_command: str
) -> None:
    out = place / "shared"
    name = "miniature.two.own.t0.7.p1"
    words = [
        "evaluate",
        "miniature",
        "--model",
        "miniature",
        "--samples",
        "4",
        "--temperature",
        "0.7",
    ]
    words += ["--benchmark", str(place / "two.parquet"), "--to", str(out), "--workers", "2"]
    with subprocess.Popen([tandem_command, *words], text=True, stderr=subprocess.PIPE) as process:
        import psutil

        victims: list[psutil.Process] = []

        def begun() -> bool:
            # Its log is there before it is the program that it will be.
            if list(out.glob("logs/worker-1.log")):
                children = psutil.Process(process.pid).children()
                victims[:] = [one for one in children if "1/2" in one.cmdline()]
            return bool(victims)

        until(begun, process)
        assert len(victims) == 1
        victims[0].send_signal(signal.SIGKILL)
        _, said = process.communicate(timeout=120)
        assert process.returncode == 0, said
    ours, theirs = (
        [
            (s.problem_id, s.sample, s.response, s.verdict)
            for s in EvaluationFolder(one).samples(name)
        ]
        for one in (out, whole)
    )
    # Which process makes a sample changes nothing about it.
    assert ours == theirs


def test_workers_use_the_model_that_the_command_has_exported(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tandem.launch.commands import evaluate
    from tandem.launch.evaluation import run as evaluate_run
    from tandem.learner import exporting

    exported: list[Path] = []

    def export(folder: RunFolder, config: Any, out: Path, *, step: int) -> None:
        exported.append(out)
        shutil.copytree(resolve("miniature"), out)

    class HereAndNow:
        """Workers in this process, one after the other."""

        def __init__(self, arguments: list[str], count: int, *rest: Any) -> None:
            self.commands = [
                ["evaluate", *arguments, "--worker", f"{n}/{count}"] for n in range(count)
            ]

        def run(self, progress: Any) -> None:
            assert [cli.main(command) for command in self.commands] == [0, 0]

    monkeypatch.setattr(exporting, "export", export)
    monkeypatch.setattr(evaluate_run, "Workers", HereAndNow)
    monkeypatch.setattr(evaluate, "_as_worker", lambda: None)
    monkeypatch.chdir(tmp_path)
    begun(tmp_path / "run", "rollout.max_new_tokens=4")
    words = ["evaluate", "--model", "run@5", "--benchmark", str(place / "two.parquet")]
    assert cli.main([*words, "--limit", "4", "--workers", "2"]) == 0
    assert exported == [Path("evaluations/models/run@5-abc")]


def test_each_worker_sees_gpus_of_its_own_and_more_workers_than_gpus_are_refused(
    place: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    gpus = tuple(Gpu(index=n, name="H100", memory_mb=81559) for n in (4, 6))
    monkeypatch.setattr(hardware, "gpus", lambda: gpus)
    seen: dict[str, tuple[str, str]] = {}
    start = subprocess.Popen

    def begin(words: list[str], **options: Any) -> Any:
        if "--worker" in words:
            environment = options["env"]
            order = environment["CUDA_DEVICE_ORDER"]
            seen[words[-1]] = environment["CUDA_VISIBLE_DEVICES"], order
        return start(words, **options)

    monkeypatch.setattr(subprocess, "Popen", begin)
    words = ["evaluate", "miniature", "rollout.max_new_tokens=4", "--model", "miniature"]
    words += ["--benchmark", str(place / "two.parquet"), "--limit", "2"]
    assert cli.main([*words, "--to", str(tmp_path / "out"), "--workers", "2"]) == 0
    assert seen == {"0/2": ("4", "PCI_BUS_ID"), "1/2": ("6", "PCI_BUS_ID")}
    capsys.readouterr()
    refused = tmp_path / "refused"
    assert cli.main([*words, "--to", str(refused), "--workers", "3"]) == 2
    assert "--workers 3 needs 3 GPUs" in capsys.readouterr().err
    wide = ["rollout.engine=vllm", "rollout.gpus_per_worker=2", "--workers", "2"]
    assert cli.main([*words, "--to", str(refused), *wide]) == 2
    assert "--workers 2 needs 4 GPUs" in capsys.readouterr().err
    assert not refused.exists()


class Stuck:
    """A process that no signal ends, as while it waits for a disk that doesn't answer."""

    def __init__(self) -> None:
        self.signals: list[int] = []

    def send_signal(self, number: int) -> None:
        self.signals.append(number)

    def kill(self) -> None:
        self.signals.append(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        assert timeout is not None, "it is waited for without end"
        raise subprocess.TimeoutExpired("worker", timeout)


def test_the_command_ends_without_a_worker_that_no_signal_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Progress):
        def turn(self) -> bool:
            raise KeyboardInterrupt

    stuck = Stuck()
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: stuck)
    folder = EvaluationFolder(tmp_path / "out")
    begin(folder, Plan(cells=()))
    with pytest.raises(KeyboardInterrupt):
        Workers([], 1, [], folder).run(Interrupted(StringIO(), "evaluated", None))
    assert stuck.signals == [signal.SIGTERM, signal.SIGKILL]


def test_two_evaluations_are_compared_by_problem(
    whole: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    cells = whole / "cells"
    first, second = cells / "miniature.two.own.t0.7.p1", next(cells.glob("*noisy.two.own.t0.7.p1"))
    assert cli.main(["compare", str(first), str(second), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    summary = json.loads((whole / "summary.json").read_text())
    accuracy = {cell["name"]: cell["figures"]["accuracy"] for cell in summary["cells"]}
    assert found["difference"] == pytest.approx(accuracy[second.name] - accuracy[first.name])
    assert found["interval"][0] <= found["difference"] <= found["interval"][1]
    assert cli.main(["compare", str(first), str(cells / "miniature.three.own.t0.7.p1")]) == 2
    assert "aren't of the same problems" in capsys.readouterr().err
    assert cli.main(["compare", str(whole), str(whole)]) == 2
    assert "several models" in capsys.readouterr().err


def test_another_plan_is_refused_with_what_differs(
    place: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*grid(place), "--to", str(whole), "--second-grader", "math_verify"]
    assert cli.main([*words, "run.seed=9"]) == 2
    assert "another seed" in capsys.readouterr().err
    assert cli.main([*words, "--temperature", "0.1"]) == 2
    assert "other cells" in capsys.readouterr().err


def test_a_known_benchmark_may_have_settings_of_its_own() -> None:
    (found,) = benchmark({"name": "aime24", "samples": 32})
    (plain,) = benchmark("aime24")
    assert found == plain.model_copy(update={"samples": 32})


def test_sets_whose_names_differ_only_in_what_a_folder_cant_hold_are_cells_of_their_own(
    place: Path, tmp_path: Path
) -> None:
    two = str(place / "two.parquet")
    sets = [EvalSetConfig(path=two, name=name, limit=1) for name in ("hard/er", "hard-er")]
    config = load("miniature").resolve([])

    def cells(*asked: EvalSetConfig) -> list[tuple[str, str]]:
        asked_for = Asked(models=("miniature",), benchmarks=asked)
        with prepare(asked_for, config, tmp_path, None) as prepared:
            assert [*prepared.cells] == [cell.name for cell in prepared.plan.cells]
            return [(cell.benchmark, cell.name) for cell in prepared.plan.cells]

    assert cells(*sets) == [
        ("hard/er", "miniature.hard-er.own.t0.p1"),
        ("hard-er", "miniature.hard-er.own.t0.p1-1"),
    ]
    with pytest.raises(ConfigError, match=r"two cells are named miniature\.hard-er"):
        cells(*sets, sets[0])


def test_a_plans_values_are_for_the_benchmarks_that_say_nothing_and_options_for_all() -> None:
    own, plain = benchmark({"path": "a", "samples": 8, "temperature": 0.0}) + benchmark("aime24")
    plan = {"samples": [2], "limit": [5], "temperature": [0.6, 1.0], "top_p": [0.9]}

    def told(*found: EvalSetConfig) -> list[tuple[Any, ...]]:
        return [(one.samples, one.limit, one.temperature, one.top_p) for one in found]

    assert told(*ways(own, {}, plan)) == [(8, 5, 0.0, 0.9)]
    assert told(*ways(plain, {}, plan)) == [(2, 5, 0.6, 0.9), (2, 5, 1.0, 0.9)]
    given = {"samples": [4], "temperature": [1.3]}
    assert told(*ways(own, given, plan)) == [(4, 5, 1.3, 0.9)]
    assert [one.temperature for one in ways(plain, given, plan)] == [1.3, 0.6, 1.0]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--samples 0", "samples 0: Input should be greater than 0"),
        ("--temperature -1", "temperature -1.0: Input should be greater than or equal to 0"),
        ("--top-p 0", "top_p 0.0: Input should be greater than 0"),
    ],
)
def test_a_value_that_cant_be_is_refused_before_anything_is_written(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: str, said: str
) -> None:
    asked = ["evaluate", "--model", "miniature", "--benchmark", str(place / "two.parquet")]
    assert cli.main([*asked, "--to", str(tmp_path / "out"), *words.split()]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_a_plan_in_yaml_gives_benchmarks_their_own_settings(place: Path) -> None:
    plan = place / "plan.yaml"
    repeated = chains(place / "repeated.parquet", 2, 3, copies=2)
    plan.write_text(
        f"models: miniature\n"
        f"benchmarks:\n"
        f"  - {{path: {place / 'two.parquet'}, name: two, limit: 2, mode: exact, samples: 3, temperature: 1}}\n"
        f"  - {{path: {repeated}, name: twice, temperature: 0.5, max_new_tokens: 9}}\n"
        f"settings: [rollout.engine=torch]\n"
    )
    out = place / "by-plan"
    assert cli.main(["evaluate", "miniature", "--plan", str(plan), "--to", str(out)]) == 0
    two, twice = json.loads((out / "summary.json").read_text())["cells"]
    assert (two["mode"], two["figures"]["problems"], two["figures"]["per_problem"]) == (
        "exact",
        2,
        3,
    )
    # Each row was there twice: two samples of three problems.
    assert (twice["figures"]["problems"], twice["figures"]["per_problem"]) == (3, 2)
    assert twice["figures"]["truncated"] == 1.0
    plan.write_text("model: miniature\n")
    assert cli.main(["evaluate", "--plan", str(plan)]) == 2


def test_what_changes_nothing_about_greedy_answers_is_said(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, two = tmp_path / "plan.yaml", place / "two.parquet"
    repeated = chains(tmp_path / "repeated.parquet", 2, 3, copies=2)
    plan.write_text(
        f"models: miniature\n"
        f"benchmarks:\n"
        f"  - {{path: {two}, name: two, limit: 1, samples: 3}}\n"
        f"  - {{path: {repeated}, name: twice, top_p: 0.9}}\n"
        f"  - {{path: {two}, name: sampled, limit: 1, samples: 3, temperature: 1}}\n"
        f"settings: [rollout.max_new_tokens=4]\n"
    )
    words = ["evaluate", "miniature", "--plan", str(plan), "--to", str(tmp_path / "out")]
    assert cli.main(words) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "changes nothing" in line]
    assert [note.partition(" changes")[0] for note in notes] == [
        "note: two: samples=3",
        "note: twice: top_p=0.9",
        "note: twice: the repetition of its rows",
    ]
    assert all(note.endswith("give --temperature too") for note in notes)


def test_settings_are_those_of_the_one_run_that_models_are_from_whatever_their_order(
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tandem.launch.commands.evaluate._as_worker", lambda: None)
    run = begun(tmp_path / "run", "rollout.max_new_tokens=3")
    other = begun(tmp_path / "other", "rollout.max_new_tokens=5")
    for folder in (run, other):
        shutil.copytree(resolve("miniature"), folder.model)
    ours, theirs, noisy = str(run.model), str(other.model), str(place / "noisy")

    def evaluated(*words: str) -> int:
        asked = ["evaluate", "--benchmark", str(place / "two.parquet"), "--limit", "1"]
        return cli.main([*asked, "--to", str(tmp_path / "out"), *words])

    def lengths() -> set[int]:
        cells = EvaluationFolder(tmp_path / "out").plan().cells
        shutil.rmtree(tmp_path / "out")
        return {cell.max_new_tokens for cell in cells}

    for first, second in ((ours, noisy), (noisy, ours)):
        assert evaluated("--model", first, "--model", second) == 0
        assert f"note: the settings are those of {run.path}" in capsys.readouterr().err
        # A worker, whose log isn't looked at, doesn't repeat it.
        assert evaluated("--model", first, "--model", second, "--worker", "0/1") == 0
        assert "note:" not in capsys.readouterr().err
        assert lengths() == {3}
    both = "--model", ours, "--model", theirs
    assert evaluated(*both) == 2
    said = capsys.readouterr().err
    assert "are of different runs: name the one whose settings count for all models" in said
    assert f"as in --run {run.path}" in said
    assert evaluated(*both, "--run", str(other.path)) == 0
    assert lengths() == {5}
    assert evaluated("miniature", *both, "rollout.max_new_tokens=4") == 0
    assert lengths() == {4}


def test_a_live_run_is_asked_for_no_more_tokens_than_its_engines_have_room_for(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = begun(tmp_path / "run", "rollout.max_new_tokens=20", "data.max_prompt_tokens=100")
    plan = tmp_path / "plan.yaml"
    data = place / "two.parquet"
    plan.write_text(f"benchmarks: {{path: {data}, name: two, max_new_tokens: 2048}}\n")
    words = ["evaluate", "--model", f"{run.path}@live"]
    assert cli.main([*words, "--plan", str(plan)]) == 2
    said = capsys.readouterr().err
    assert (
        "two has rollout.max_new_tokens=2,048, and the engines of this run have room for 20" in said
    )
    assert f"evaluate {run.path}@newest" in said
    assert cli.main([*words, "--benchmark", str(data), "data.max_prompt_tokens=101"]) == 2
    assert "data.max_prompt_tokens=101" in capsys.readouterr().err


class Server(BaseHTTPRequestHandler):
    """Says what it was asked; refuses the first request of all."""

    asked: list[tuple[str, dict[str, Any]]]
    refuse: list[int]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        body["key"] = self.headers.get("Authorization")
        self.asked.append((self.path, body))
        status = self.refuse.pop() if self.refuse else 200
        said = "6*7=42</think> <answer> \\boxed{42} </answer>"
        usage = {"completion_tokens": 11}
        choice: dict[str, Any] = {"text": said, "finish_reason": "stop"}
        if "messages" in body:
            choice = {"message": {"content": said}, "finish_reason": "length"}
        content = json.dumps({"choices": [choice], "usage": usage}).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, type[Server]]]:
    """Its address, and what it was asked; the test runs in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    handler = type("Handler", (Server,), {"asked": [], "refuse": [503]})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}/v1", handler
        running.shutdown()
        thread.join()


def test_a_server_elsewhere_answers_and_is_asked_again(
    tmp_path: Path, server: tuple[str, type[Server]], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, handler = server
    data = tmp_path / "a.jsonl"
    rows = [{"question": f"{n}?", "answer": "42", "subject": f"s{n % 2}"} for n in range(3)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setenv("THE_KEY", "secret")
    words = ["evaluate", "--endpoint", url, "--api-key-env", "THE_KEY", "--model", "big"]
    words += ["--benchmark", str(data), "--template", "own", "--template", "r1_zero", "--to", "out"]
    words += ["--temperature", "0.6", "--samples", "2"]
    assert cli.main(words) == 0
    chats = [body for path, body in handler.asked if path == "/v1/chat/completions"]
    texts = [body for path, body in handler.asked if path == "/v1/completions"]
    # One more than the samples: the first was refused.
    assert sorted((len(chats), len(texts))) == [6, 7]
    assert {body["messages"][0]["content"] for body in chats} == {"0?", "1?", "2?"}
    assert all(body["prompt"].endswith("<think>") for body in texts)
    assert all(body["stop"] == ["</answer>"] for body in texts)
    assert {(body["model"], body["temperature"], body["key"]) for body in chats + texts} == {
        ("big", 0.6, "Bearer secret")
    }
    assert len({body["seed"] for body in chats}) == 6
    own, r1_zero = json.loads(Path("out/summary.json").read_text())["cells"]
    assert (own["figures"]["accuracy"], own["figures"]["truncated"]) == (1.0, 1.0)
    assert r1_zero["figures"]["length"] == 11
    assert sorted(own["figures"]["by_subject"]) == ["s0", "s1"]
    assert "secret" not in Path("out/plan.json").read_text()


def test_what_a_server_refuses_costs_nothing_else_and_is_asked_again(
    server: tuple[str, type[Server]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, handler = server
    handler.refuse[:] = [400, 400]
    for name in "ab":
        rows = [{"question": f"{name}{n}?", "answer": "42"} for n in range(3)]
        Path(f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["evaluate", "--endpoint", url, "--model", "big", "--parallel", "1", "--to", "out"]
    words += ["--benchmark", "a.jsonl", "--benchmark", "b.jsonl", "--temperature", "0.6"]
    words += ["--samples", "1"]
    assert cli.main(words) == 1
    said = capsys.readouterr().err
    assert "2 samples can't be made: big.a." in said
    assert "All others are kept." in said
    assert "status 400" in said
    assert "lower rollout.max_new_tokens" in said
    assert len(handler.asked) == 6
    assert cli.main(words) == 0
    assert len(handler.asked) == 8
    # Whoever isn't let in would be refused with every prompt.
    handler.refuse[:] = [401]
    assert cli.main([*words, "--to", "other"]) == 1
    assert "can't be made" not in capsys.readouterr().err


def test_a_server_is_asked_to_begin_no_answer_of_a_conversation_with_a_prefill(
    server: tuple[str, type[Server]], capsys: pytest.CaptureFixture[str]
) -> None:
    url, handler = server
    Path("a.jsonl").write_text('{"question": "6*7?", "answer": "42"}\n')
    words = ["evaluate", "--endpoint", url, "--model", "big", "--benchmark", "a.jsonl"]
    words += ["--to", "out", "data.prefill=So"]
    assert cli.main([*words, "--template", "own"]) == 2
    said = capsys.readouterr().err
    assert "data.prefill='So'" in said
    assert "set data.prefill='', or name another template with --template" in said
    assert handler.asked == []
    # The text of another template goes on with it.
    assert cli.main([*words, "--template", "r1_zero"]) == 0
    assert handler.asked[-1][1]["prompt"].endswith("<think>So")


def test_a_server_has_the_time_that_it_is_given_for_an_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text('{"question": "?", "answer": "42"}\n')
    monkeypatch.setattr(elsewhere, "RETRIES", 0)
    words = ["evaluate", "--model", "big", "--benchmark", str(data), "--to", str(tmp_path / "out")]
    with socket.create_server(("127.0.0.1", 0)) as silent:
        words += ["--endpoint", f"http://127.0.0.1:{silent.getsockname()[1]}", "--request-seconds"]
        assert cli.main([*words, "0.2"]) == 1
    assert "no answer in 0.2 s: raise --request-seconds" in capsys.readouterr().err
    assert cli.main([*words, "inf"]) == 2
    assert "--request-seconds inf should be" in capsys.readouterr().err


def asked_of(text: str) -> GroupRequest:
    """A request for one answer to a prompt."""
    return GroupRequest(
        group_id="g",
        prompt_tokens=np.zeros(0, np.int32),
        count=1,
        sampling=SamplingParams(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=8),
        seed=0,
        prompt_text=text,
    )


def test_a_chats_answer_without_a_text_is_an_empty_one_and_no_other_value_is() -> None:
    def read(choice: dict[str, Any]) -> str | None:
        return sample_of(asked_of("?"), json.dumps({"choices": [choice]}).encode()).text

    assert read({"message": {"content": None}, "finish_reason": "length"}) == ""
    refused: list[dict[str, Any]] = [{"message": {"content": 7}}, {"message": {}}, {"text": None}]
    for choice in refused:
        with pytest.raises(ExchangeError, match="its answer has no text"):
            read(choice)


def test_a_judges_labels_stand_beside_and_instructions_need_no_gold(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    judge = Path(__file__).parents[2] / "judge_server.py"
    folder = tmp_path / "benchmarks" / "simple-safety-tests"
    folder.mkdir(parents=True)
    lines = "".join(f"{n},area{n % 2},c,What is {n}?\n" for n in range(100))
    (folder / "simple_safety_tests.csv").write_text(f"id,harm_area,category,prompts_final\n{lines}")
    monkeypatch.chdir(tmp_path)
    words = ["evaluate", "miniature", "--model", "miniature", "--benchmark", "simple-safety-tests"]
    words += ["--limit", "6", "--to", "out", "rollout.max_new_tokens=8"]
    assert cli.main(words) == 0
    (cell,) = json.loads(Path("out/summary.json").read_text())["cells"]
    assert sorted(cell["figures"]["by_subject"]) == ["area0", "area1"]
    log = tmp_path / "asked"
    log.touch()
    process = subprocess.Popen(
        [sys.executable, str(judge), "0", str(log)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        words = ["judge", "out", "--url", f"http://127.0.0.1:{port}", "--model", "tiny", "--json"]
        for _ in range(2):
            capsys.readouterr()
            assert cli.main(words) == 0
            (found,) = json.loads(capsys.readouterr().out).values()
            assert found["score"] == pytest.approx(0.8)
            assert (found["judged"], found["failed"]) == (6, 0)
        # The second time all labels were there.
        posts = [json.loads(line) for line in log.read_text().splitlines()]
        assert len([one for one in posts if one["body"]]) <= 6
        assert "What is 0?" in log.read_text()
        assert cli.main([*words, "--safety"]) == 2
    finally:
        process.kill()
        process.communicate()
    assert cli.main(["judge", "out", "--alpaca", "outputs.json"]) == 0
    rows = json.loads(Path("outputs.json").read_text())
    assert [row["instruction"] for row in rows] == [f"What is {n}?" for n in range(6)]
    assert set(rows[0]) == {"instruction", "output", "generator", "dataset"}


@pytest.mark.vllm
@pytest.mark.timeout(400)
def test_both_engines_write_equal_samples(place: Path, tandem_command: str) -> None:
    found: dict[str, list[dict[str, Any]]] = {}
    figures = {}
    for engine in ("torch", "vllm"):
        out = place / engine
        words = [tandem_command, "evaluate", "miniature", "--model", "miniature", "--samples", "4"]
        words += ["--benchmark", str(place / "two.parquet"), "--token-ids", "--to", str(out)]
        words += ["--temperature", "0", "--temperature", "1", f"rollout.engine={engine}"]
        subprocess.run(words, check=True, timeout=300, capture_output=True)
        greedy, sampled = EvaluationFolder(out).finished()
        lines = (out / "cells" / greedy.name / "samples.jsonl").read_bytes().splitlines()
        found[engine] = [json.loads(line) for line in lines]
        cells = json.loads((out / "summary.json").read_text())["cells"]
        figures[engine] = next(c["figures"] for c in cells if c["name"] == sampled.name)
    logprobs = [[row.pop("logprob") for row in rows] for rows in found.values()]
    # Fields and their order, texts, verdicts, and every greedy token.
    assert [list(row) for row in found["torch"]] == [list(row) for row in found["vllm"]]
    assert found["torch"] == found["vllm"]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-2)
    (low, high), (vllm_low, vllm_high) = (figures[name]["interval"] for name in found)
    assert max(low, vllm_low) <= min(high, vllm_high)
    assert list(figures["torch"]) == list(figures["vllm"])


def test_a_model_that_cannot_answer_a_problem_is_said(place: Path, tmp_path: Path) -> None:
    words = ["evaluate", "miniature", "--model", "miniature", "--to", str(tmp_path / "o")]
    with pytest.raises(TandemError, match="no evaluation set 'mathh'"):
        cli.dispatch([*words, "--benchmark", "mathh"])
