"""`tandem sweep`: what it would run, what it refuses before the first run, and its table."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from held_folder import held

from tandem.common import disk
from tandem.common.config import to_yaml
from tandem.common.errors import ConfigError, DataError, HeldError
from tandem.common.run_folder import RunFolder
from tandem.launch.cli import main
from tandem.launch.host import surroundings
from tandem.launch.host.folder_lock import supervisor_of
from tandem.launch.ingest.prepare import prepare
from tandem.launch.run.opened.opening import open_folder
from tandem.launch.run.opened.presets import load
from tandem.launch.run.several import sweep, sweep_runs

SFT = ("miniature-sft", "run.steps=4")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def plan(*words: str, seeds: str = "1", out: str | None = None) -> sweep.Sweep:
    return sweep.plan(words, seeds=seeds, out=out)


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("1", ["1"]),
        ("1, 2,3", ["1", "2", "3"]),
        ("[a,b]", ["[a,b]"]),
        ("[a,b],[c]", ["[a,b]", "[c]"]),
        ("{a: 1, b: [2, 3]},null", ["{a: 1, b: [2, 3]}", "null"]),
        ("'1,2',3", ["'1,2'", "3"]),
        ("[',]',a],b", ["[',]',a]", "b"]),
        ("it's,so", ["it's", "so"]),
        ("1,", ["1", ""]),
    ],
)
def test_commas_outside_brackets_and_quotes_part_values(text: str, values: list[str]) -> None:
    assert sweep.cut(text) == values


def test_every_combination_runs_with_every_seed_in_a_folder_of_its_own(here: Path) -> None:
    made = plan(*SFT, "learner.optimizer.lr=1e-3,3e-4", "data.train.0.limit=2,3", seeds="0,7,")
    assert [(one.values["learner.optimizer.lr"], one.values["data.train.0.limit"], one.seed)
            for one in made.members] == [
        (lr, limit, seed) for lr in ("1e-3", "3e-4") for limit in ("2", "3") for seed in (0, 7)
    ]  # fmt: skip
    first = made.members[1]
    assert first.folder.path == here / "runs/sweep-miniature-sft/lr-1e-3-limit-2-seed-7"
    assert first.words[:3] == ("offline", "miniature-sft", "run.steps=4")
    config = load("miniature-sft").resolve(first.words[2:])
    assert (config.run.steps, config.run.seed, config.data.train[0].limit) == (4, 7, 2)
    assert config.learner.optimizer.lr == 1e-3
    assert len({one.name for one in made.members}) == 8
    assert list(here.iterdir()) == []


def test_the_presets_source_says_by_which_command_a_run_goes() -> None:
    made = plan("miniature", "learner.objective.name=luffy,grpo")
    assert [one.words[0] for one in made.members] == ["start", "start"]


def test_lists_are_values() -> None:
    made = plan(*SFT, "expert.accept=[correct],[correct,wrong]")
    configs = [load("miniature-sft").resolve(one.words[2:]) for one in made.members]
    assert [one.expert.accept for one in configs] == [("correct",), ("correct", "wrong")]


def test_names_of_long_and_strange_values_are_readable_and_differ() -> None:
    data = "{path: '{run}/data/expert.parquet', limit: 2}"
    made = plan(*SFT, f"data.train=[{data}],[{data[:-2]}3}}]", "data.system_prompt='a?','a!'")
    stem = "train-path_run_data_expert.parquet_limit_{}-system_prompt-a{}-seed-0"
    assert [one.name for one in made.members] == [
        stem.format(limit, number) for limit in (2, 3) for number in ("", "-2")
    ]


@pytest.mark.parametrize(
    ("words", "seeds", "said"),
    [
        (["a.b=1,2"], "1", "a.b=1, seed 0: unknown config key a"),
        (["run.passes=1,2"], "1", "run.passes=1, seed 0: "),
        (["learner.objective.name=sft,gpro"], "1", "learner.objective.name=gpro, seed 0: .*did you"),
        (["learner.objective.name=sft,grpo"], "1", "learner.objective.name=grpo, seed 0: .*alone in"),
        (["model.path=miniature,nowhere"], "1", "model.path=nowhere, seed 0: .*no such folder"),
        (["data.train.0.limit=2,3", "data.train.1.limit=1"], "1", "'1' is not an index of data.train"),
        (["data.train.0.limit=2,3", "data.train.².limit=1"], "1", "'²' is not an index of data.train"),
        (["learner.optimizer.lr=1e-3,0.001"], "1", "lr=1e-3 and learner.optimizer.lr=0.001 are the same"),
        (["log.level=INFO"], "1", "nothing varies"),
        (["log.every=5,"], "1", "'log.every=5,' has an empty value"),
        (["log.every=5,6", "log.every=7"], "1", "log.every is given twice"),
        (["run.seed=1,2"], "1", "use --seeds"),
        (["replay.redis_url=redis://:a,b@h:1/0"], "1", "replay.redis_url varies.*TANDEM_REDIS_PASSWORD"),
        (["replay={redis_url: 'redis://:a@h:1/0'},{window: 2}"], "1", "replay varies.*TANDEM_REDIS_PASSWORD"),
        (["run.dir=a,b"], "1", "use --out"),
        (["log.every=5,6"], "0", "--seeds 0: give at least one seed"),
        (["log.every=5,6"], "1,1", "none twice"),
        (["log.every=5,6", "--jobs", "0"], "1", "--jobs 0: at least 1 run"),
        (["log.every=5,6", "launch.ports=21000-21040", "--jobs", "2"], "1", "--jobs 2: .* Redis of 2 runs on port 21000"),
        (["log.every=5,6"], "x", "--seeds x: give a number of seeds"),
        (["log.every=5,6"], "²", "--seeds ²: give a number of seeds"),
        (["log.every=5,6", "miniature"], "1", "only one preset"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_before_anything_runs(
    words: list[str], seeds: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *SFT, *words, "--seeds", seeds]) == 2
    assert re.search(said, capsys.readouterr().err)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("out", ["[exp]/s", "{a}/s", "a: b", "007", "ä #1", "'q'"])
def test_the_folder_may_have_any_name(out: str, here: Path) -> None:
    made = plan(*SFT, "log.every=3,4", out=out)
    assert [one.folder.path.parent for one in made.members] == [here / out] * 2
    for one in made.members:
        assert load("miniature-sft").resolve(one.words[2:]).run.dir == f"{out}/{one.name}"


def test_a_preset_with_stages_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "miniature-sft-rl", "learner.optimizer.lr=1e-3,1e-4"]) == 2
    assert "preset miniature-sft-rl has stages" in capsys.readouterr().err


def test_a_dry_run_lists_the_runs_and_writes_nothing(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *SFT, "data.train.0.limit=2,3", "--seeds", "2", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "4 runs of miniature-sft (2 combinations x 2 seeds)" in said
    assert said.count("offline miniature-sft run.steps=4 data.train.0.limit=") == 4
    assert "run.dir=runs/sweep-miniature-sft/limit-3-seed-1  (new)" in said
    assert list(here.iterdir()) == []


@pytest.mark.timeout(300)
def test_runs_side_by_side_have_gpus_of_their_own_and_wait_for_them(
    here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = here / "asked"
    program = here / "bin" / "nvidia-smi"
    program.parent.mkdir()
    rows = "\n".join(f"{i}, NVIDIA H100, 81559, GPU-{i}{i}57f032-34ab" for i in range(3))
    program.write_text(f'#!/bin/sh\necho "$PPID $CUDA_VISIBLE_DEVICES" >> {asked}\necho "{rows}"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:/usr/bin:/bin")
    # The third GPU is another's.
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-00,GPU-11")
    # torch itself may be built for CPUs here. The runs fail once they have their GPUs, since no disk has room for so
    # many checkpoints.
    monkeypatch.setattr(surroundings, "cuda_of_torch", lambda: "13.0")
    words = ("launch.gpus=required", "evaluate.every=0", "learner.checkpoints_kept=1000000000")
    command = ("sweep", "miniature-sft", *words, "run.steps=1,2,3", "--seeds", "1", "--jobs", "3")
    assert main(command) == 1
    lines = [
        line
        for line in capfd.readouterr().out.splitlines()
        if line.startswith(("1/", "2/", "3/", "steps-"))
    ]
    # The third waits for the end of one, which may be the end of both.
    starts = [line.endswith("starts") for line in lines]
    assert starts[:3] == [True, True, False], lines
    assert sum(starts) == 3, lines
    looks = [line.split() for line in asked.read_text().splitlines()]
    seen = {pid: mask for pid, mask in looks if pid != str(os.getpid())}
    assert len(seen) == 3
    assert set(seen.values()) == {"GPU-0057f032-34ab", "GPU-1157f032-34ab"}


def finish(member: sweep.Member, steps: int, before: float | None, after: float | None) -> None:
    """A folder as a run leaves it that has finished."""
    opening = open_folder(load("miniature-sft"), member.words[2:], fresh=False)
    opening.folder.make()
    opening.folder.write_config(to_yaml(opening.config))
    preset = load("miniature-sft")
    opening.folder.write_run(
        {
            "run_id": "a",
            "preset": preset.name,
            "preset_path": str(preset.path),
            "overrides": list(member.words[2:]),
            "state": "finished",
        }
    )
    figures = {
        "steps": steps,
        "epochs": steps / 4,
        "samples_trained": 4 * steps,
        "tokens_trained": 1000 * steps,
        "accuracy_before": before,
        "accuracy_after": after,
        "wall_seconds": 61.0,
    }
    opening.folder.summary.write_text(json.dumps(figures))


WORDS = (*SFT, "data.train.0.limit=2,3")


def test_the_table_has_mean_and_deviation_over_the_seeds() -> None:
    made = plan(*WORDS, seeds="3")
    made.out.mkdir(parents=True)
    sweep.write(made)
    for member, after in zip(made.members, (0.1, 0.2, 0.3, 0.5, None, None), strict=True):
        if after is not None:
            finish(member, 4, 0.002, after)
    made = plan(*WORDS, seeds="3")
    assert [one.state for one in made.members] == ["finished"] * 4 + ["waiting"] * 2
    head, _, two, three = [
        [cell.strip() for cell in line.strip("|").split(" | ")] for line in sweep.table(made)
    ]
    assert head[:2] == ["data.train.0.limit", "runs"]
    assert two == ["2", "3", "4", "1", "16", "4,000", "0.2 ± 0.0 → 20.0 ± 10.0 (n = 3)", "1:01"]
    assert three == ["3", "1 of 3", "4", "1", "16", "4,000", "0.2 → 50.0 (n = 1)", "1:01"]
    sweep.write(made)
    content = json.loads((made.out / "sweep.json").read_text())
    assert content["table"][0]["values"] == {"data.train.0.limit": 2}
    assert content["table"][0]["accuracy_after"] == pytest.approx([0.2, 0.1])
    assert [run["state"] for run in content["runs"]] == ["finished"] * 4 + ["waiting"] * 2
    assert "0.2 ± 0.0 → 20.0 ± 10.0 (n = 3)" in (made.out / "sweep.md").read_text()


def test_another_sweep_in_the_folder_is_refused_and_more_seeds_are_not(here: Path) -> None:
    made = plan(*WORDS, seeds="2")
    made.out.mkdir(parents=True)
    sweep.write(made)
    assert len(plan(*WORDS, seeds="3").members) == 6
    assert plan(*reversed(WORDS), seeds="2").definition == made.definition
    # Settings that vary may come in another order, and name the same folders.
    two = (*WORDS, "log.every=3,4")
    made_of_two = plan(*two, seeds="2", out="two")
    made_of_two.out.mkdir()
    sweep.write(made_of_two)
    again = plan(*SFT, "log.every=3,4", "data.train.0.limit=2,3", seeds="2", out="two")
    assert [one.name for one in again.members] == [one.name for one in made_of_two.members]
    for words, seeds in (
        ((*SFT, "data.train.0.limit=2,4"), "2"),
        ((*WORDS, "log.every=3"), "2"),
        (("miniature", "run.steps=4", "expert.per_group=1,2"), "2"),
        (WORDS, "1"),
    ):
        with pytest.raises(DataError, match=r"holds another sweep .*another folder with --out"):
            plan(*words, seeds=seeds, out=str(made.out))
    (here / "other").mkdir()
    (here / "other" / "file").touch()
    with pytest.raises(DataError, match="other holds something other than a sweep"):
        plan(*WORDS, out="other")


def test_runs_of_another_version_of_the_preset_are_not_compared_with_new_ones() -> None:
    made = plan(*SFT, "learner.optimizer.lr=1e-3,3e-4")
    made.out.mkdir(parents=True)
    sweep.write(made)
    begun = made.members[0]
    begun.folder.make()
    preset = load("miniature-sft")
    opening = open_folder(preset, begun.words[2:], fresh=False)
    saved = opening.config.model_dump(mode="json")
    saved["data"]["system_prompt"] = "Think."
    begun.folder.write_config(json.dumps(saved))
    begun.folder.write_run(
        {
            **opening.run,
            "preset_path": str(preset.path),
            "overrides": list(opening.overrides),
            "state": "stopped",
        }
    )
    assert open_folder(preset, begun.words[2:], fresh=False).kept == ("data.system_prompt",)
    with pytest.raises(ConfigError, match=r"has another data\.system_prompt .* --out"):
        plan(*SFT, "learner.optimizer.lr=1e-3,3e-4")


def test_the_examples_of_the_preset_for_sft_are_parts_of_one_another(here: Path) -> None:
    chosen = []
    for limit in (4, 16, 256):
        config = load("miniature-sft-examples").resolve([f"data.train.0.limit={limit}"])
        assert config.run.dir is not None
        found = prepare(config, RunFolder(config.run.dir))
        chosen.append({trace.trace_id for trace in found.traces})
    assert [len(ids) for ids in chosen] == [4, 16, 256]
    assert chosen[0] < chosen[1] < chosen[2]
    # Drawn, not the first ones.
    assert chosen[1] != {f"expert/{row}#0" for row in range(16)}


class Heard:
    """What a sweep says, and what is done when it says something."""

    def __init__(self, heard: Callable[[str], None]) -> None:
        self.say = heard


def test_what_a_killed_sweep_has_left_ends_before_anything_is_started_beside_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = plan(*WORDS)
    made.out.mkdir(parents=True)
    left = made.members[1].folder
    left.make()
    said: list[str] = []
    started: list[tuple[str, int | None]] = []
    with held(left.path) as process:

        def hear(line: str) -> None:
            said.append(line)
            if line.startswith("waiting for the end of what an earlier start has left"):
                process.kill()

        def start(_: sweep_runs._Runs, member: sweep.Member) -> None:
            started.append((member.name, supervisor_of(left)))

        monkeypatch.setattr(sweep_runs._Runs, "_start", start)
        assert sweep_runs._Runs(made, 2, Heard(hear)).run() == 0
    assert "for at most 300 s" in said[-1]
    assert f"{left.path.name} (process {process.pid})" in said[-1]
    assert f"`tandem stop runs/sweep-miniature-sft/{left.path.name}`" in said[-1]
    assert started == [(one.name, None) for one in made.members]


def test_a_sweep_is_stopped_by_its_folder_and_a_second_one_names_another(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = plan(*WORDS)
    made.out.mkdir(parents=True)
    sweep.write(made)
    command = ["stop", "runs/sweep-miniature-sft"]
    assert main(command) == 0
    assert "no `tandem sweep` on this host" in capsys.readouterr().out
    with held(made.out) as process:
        with pytest.raises(HeldError, match="or name another folder: --out DIR"):
            sweep_runs.run_sweep(made, jobs=1)
        assert main(command) == 0
        assert process.wait(30) == -signal.SIGTERM
    assert "the same `sweep` resumes" in capsys.readouterr().out


def test_a_stop_ends_the_wait_for_space_and_not_the_runs(
    here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(disk, "_stop", threading.Event())
    monkeypatch.setattr(disk, "_patience", 3.0)
    made = plan(*WORDS)
    made.out.mkdir(parents=True)
    ended: list[int] = []

    def start(runs: sweep_runs._Runs, member: sweep.Member) -> None:
        # The second one goes on until it is asked to end, and then takes a while.
        waits = "trap 'sleep 1; exit 143' TERM; while :; do sleep 0.05; done"
        member.process = subprocess.Popen(["sh", "-c", waits if runs._running else "exit 1"])
        runs._running.append(member)

    def write_on_a_full_disk(_: sweep.Sweep) -> None:
        def write() -> None:
            if ended:
                os.kill(os.getpid(), signal.SIGINT)
            ended.append(1)
            with open("/dev/full", "wb", buffering=0) as file:
                file.write(b"x")

        if any(one.state in ("failed", "stopped") for one in made.members):
            disk.persist(made.out / "sweep.json", write)

    monkeypatch.setattr(sweep_runs._Runs, "_start", start)
    monkeypatch.setattr(sweep_runs, "write", write_on_a_full_disk)
    assert sweep_runs.run_sweep(made, jobs=2) == 128 + signal.SIGINT
    assert made.members[1].process is not None
    assert made.members[1].process.poll() == 143
    said = capsys.readouterr().out
    assert said.count("can't be written, its disk is full") == 1
    assert "written to" not in said


@pytest.mark.parametrize("ended", ["exit 143", "exit 130", "kill -TERM $$"])
def test_a_run_of_a_sweep_that_was_stopped_has_not_failed(
    ended: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(runs: sweep_runs._Runs, member: sweep.Member) -> None:
        member.process = subprocess.Popen(["sh", "-c", ended])
        runs._running.append(member)

    monkeypatch.setattr(sweep_runs._Runs, "_start", start)
    made = plan(*WORDS)
    assert sweep_runs.run_sweep(made, jobs=1) == 1
    assert [one.state for one in made.members] == ["stopped", "stopped"]
    said = capsys.readouterr().out
    assert f"{made.members[0].name} was stopped" in said
    assert "2 of 2 runs were stopped; the same command resumes them" in said


def test_a_run_of_a_sweep_whose_report_was_cut_short_has_finished(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def start(runs: sweep_runs._Runs, member: sweep.Member) -> None:
        finish(member, 4, 0.0, 0.5)
        member.process = subprocess.Popen(["sh", "-c", "exit 130"])
        runs._running.append(member)

    monkeypatch.setattr(sweep_runs._Runs, "_start", start)
    made = plan(*WORDS)
    assert sweep_runs.run_sweep(made, jobs=1) == 0
    assert [one.state for one in made.members] == ["finished", "finished"]
    assert f"{made.members[0].name} 0.0 → 50.0 (n = 1), 1:01" in capsys.readouterr().out
