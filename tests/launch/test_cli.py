"""The command line: what a user sees of commands, presets, settings and errors."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.common.config import Config, Section, build, switched_off_keys, unread_keys
from tandem.common.errors import ConfigError
from tandem.launch import cli
from tandem.launch.cli import main
from tandem.launch.run.opened import presets
from tandem.launch.run.several.placing import of_preset


def tandem(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of a command in this process."""
    code = main(arguments)
    out, err = capsys.readouterr()
    return code, out, err


def test_every_command_has_a_file_with_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = tandem(capsys, "--help")
    assert code == 0
    for name in cli.COMMANDS:
        assert name in out
        with pytest.raises(SystemExit) as left:
            main([name, "--help"])
        assert left.value.code == 0


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = tandem(capsys, "strat")
    assert (code, out) == (2, "")
    assert err == "tandem: unknown command 'strat' (did you mean start?)\n"


def test_an_unknown_preset_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = tandem(capsys, "start", "minature")
    assert code == 2
    assert "(did you mean miniature?)" in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.group_sise=4", "did you mean rollout.group_size?"),
        ("rollout.group_size=many", "rollout.group_size='many'"),
        ("learner.optimizer.learning_rate=1", "learner.optimizer.learning_rate"),
        ("learner.objective.name=lufy", "did you mean luffy?"),
        ("replay.window=9", "replay.window=9 is over replay.max_staleness + 1 = 2"),
    ],
)
def test_a_bad_setting_is_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str], override: str, said: str
) -> None:
    code, _, err = tandem(capsys, "config", "miniature", override)
    assert code == 2
    assert said in err
    assert len(err.splitlines()) == 1


def test_an_unknown_option_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = tandem(capsys, "presets", "--loud")
    assert code == 2
    assert err.startswith("tandem: unrecognized arguments: --loud")
    assert len(err.splitlines()) == 1


def test_options_may_stand_between_settings(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = tandem(capsys, "config", "miniature", "--json", "run.steps=7")
    assert code == 0
    assert json.loads(out)["run"]["steps"] == 7


@pytest.mark.parametrize("name", presets.names())
def test_every_preset_is_valid_and_has_a_line_about_it(name: str) -> None:
    preset = presets.load(name)
    folders = [run.resolve(own).run.dir for _, run, own in of_preset(preset, [])]
    stages = [f"runs/{name}/{label}" for label, _, _ in of_preset(preset, [])]
    assert folders == (stages if preset.stages else [f"runs/{name}"])
    assert preset.about


def test_the_printed_settings_read_back_as_the_same_tree(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, _ = tandem(capsys, "config", "miniature-easy", "run.seed=3")
    assert code == 0
    assert "# γ of the shaping." in out
    assert build(yaml.safe_load(out)) == presets.load("miniature-easy").resolve(["run.seed=3"])


def test_only_what_the_objective_and_the_engine_read_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    code, out, err = tandem(capsys, "config", "miniature", "learner.objective.name=cpo")
    assert code == 0
    printed = yaml.safe_load(out)
    assert list(printed["learner"]["objective"]) == [
        *("name", "truncation", "stragglers", "beta", "sft_coefficient")
    ]
    assert printed["rollout"]["vllm"] is None
    assert "left out of preset miniature" in err
    for key in ("advantage", "aggregation", "clip_low", "shaping", "gamma"):
        assert f"learner.objective.{key}" in err
    assert len(err.splitlines()) == 1
    assert tandem(capsys, "config", "miniature")[2] == ""


@pytest.mark.parametrize("name", presets.names())
def test_no_preset_holds_what_its_objective_and_engine_do_not_read(name: str) -> None:
    assert unread_keys(presets.load(name).tree) == []
    assert switched_off_keys(presets.load(name).tree) == []


def test_settings_that_others_switch_off_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    key = "learner.objective.kl_form"
    code, out, err = tandem(capsys, "config", "miniature", f"{key}=k2")
    assert (code, yaml.safe_load(out)["learner"]["objective"]["kl_form"]) == (0, "k2")
    assert f"others switch them off: {key} (kl_coefficient=0.0)" in err
    coefficient = "learner.objective.kl_coefficient=0.1"
    assert tandem(capsys, "config", "miniature", f"{key}=k2", coefficient)[2] == ""


def test_the_miniature_has_the_measured_setting() -> None:
    config = presets.load("miniature").resolve([])
    assert config.run.steps == 250
    assert (config.replay.groups_per_step, config.rollout.group_size) == (8, 8)
    assert (config.data.miniature, config.data.miniature_traces) == ("hard", 4)
    assert [source.weight for source in config.data.train] == [1, 1]
    assert config.expert.per_group == 1
    objective = config.learner.objective
    assert (objective.name, objective.gamma, objective.advantage) == ("luffy", 0.1, "group_mean")
    assert (objective.clip_low, objective.dual_clip) == (0.2, 3.0)
    assert config.learner.optimizer.lr == 5e-4


def test_the_format_gate_of_the_miniature_takes_its_right_responses_only() -> None:
    import re
    from random import Random

    from tandem.launch.miniature.problems import draw

    config = presets.load("miniature").resolve([])
    component = next(c for c in config.reward.components if c.name == "format")
    assert component.gate
    pattern = re.compile(component.params["pattern"])
    response = draw(Random(0), 8).response
    assert pattern.fullmatch(response)
    assert not pattern.fullmatch(response + " ")
    assert not pattern.fullmatch(response.replace("</think> ", "</think>"))


def test_a_users_preset_inherits_key_by_key(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: miniature\nlearner: {optimizer: {lr: 1e-3}}\n")
    preset = presets.load(str(path))
    config = preset.resolve([])
    assert config.run.dir == "runs/mine"
    assert config.learner.optimizer.lr == 1e-3
    assert config.learner.optimizer.warmup_steps == 5


def test_a_users_preset_that_names_another_objective_has_that_ones_settings(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: miniature\nlearner: {objective: {name: dapo, clip_low: 0.1}}\n")
    objective = presets.load(str(path)).resolve([]).learner.objective
    assert (objective.advantage, objective.clip_high) == ("group_mean_std", 0.28)
    assert (objective.clip_low, objective.gamma) == (0.1, 0.1)


REFUSED = [
    (["start", "miniature-easy", "rollout.group_size=1"], "raise rollout.group_size to 2"),
    (["offline", "miniature-sft", "learner.objective.name=grpo"], "choose one of"),
    (["offline", "miniature-sft", "learner.objective.name=dpo"], "choose one of"),
    (["start", "miniature", "learner.objective.name=ppo"], "set expert.per_group=0"),
    (["start", "miniature-easy", "learner.objective.name=exgrpo"], "expert.per_group=0: set it to 1"),
    (["start", "miniature", "learner.micro_batch_tokens=84"], "raise it to at least 85"),
    (
        ["start", "miniature-easy", "learner.objective.name=reinforce", "replay.max_staleness=0",
         "learner.minibatches=2"],
        "set learner.minibatches=1",
    ),
    (["start", "miniature", "model.dtype=bfloat16", "learner.zero_stage=0",
      "learner.micro_batch_tokens=512"], "set learner.zero_stage=1"),
    (["start", "miniature", "reward.mode=boxd"], "did you mean boxed"),
    (["start", "miniature", "reward.components.0.name=acuracy"], "did you mean accuracy"),
    (["start", "miniature", "learner.objective.name=nonesuch:loss"], "put its folder on PYTHONPATH"),
    (["start", "miniature", "rollout.engine=nonesuch:engine"], "put its folder on PYTHONPATH"),
    (["start", "miniature", "replay.redis_url=localhost"], "write it as redis://"),
]  # fmt: skip


EACH = """
import contextlib, io, json, os, sys
from tandem.launch.cli import main

for words, folder in json.load(sys.stdin):
    os.makedirs(folder)
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        code = main(words)
    loaded = sorted({"torch", "transformers", "pyarrow"} & set(sys.modules))
    print(json.dumps([code, loaded, out.getvalue(), err.getvalue(), os.listdir(folder)]), flush=True)
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], list[Any]]:
    """What the commands of ``REFUSED`` say, one after the other in one process that has loaded nothing else."""
    here = tmp_path_factory.mktemp("refused")
    cases = [(words, dry) for words, _ in REFUSED for dry in (False, True)]
    asked = [
        ([*words, "--dry-run"] if dry else words, str(here / str(number)))
        for number, (words, dry) in enumerate(cases)
    ]
    done = subprocess.run(
        [sys.executable, "-P", "-c", EACH],
        input=json.dumps(asked),
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    said = [json.loads(line) for line in done.stdout.splitlines()]
    return {(" ".join(words), dry): found for (words, dry), found in zip(cases, said, strict=True)}


@pytest.mark.parametrize("dry", [False, True], ids=["start", "dry run"])
@pytest.mark.parametrize(("words", "way_out"), REFUSED, ids=lambda v: " ".join(v)[-50:])
def test_what_can_not_work_is_refused_before_anything_is_loaded_or_written(
    words: list[str], way_out: str, dry: bool, refusals: dict[tuple[str, bool], list[Any]]
) -> None:
    code, loaded, out, err, written = refusals[" ".join(words), dry]
    assert (code, loaded, out) == (2, [], ""), err
    assert way_out in err
    assert len(err.splitlines()) == 1
    assert written == []


def test_a_preset_that_inherits_from_itself_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("base: b.yaml\n")
    (tmp_path / "b.yaml").write_text("base: a.yaml\n")
    with pytest.raises(ConfigError, match="inherits from itself"):
        presets.load(str(tmp_path / "a.yaml"))


def test_an_error_in_a_users_preset_names_its_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("base: miniature\nrollout: {temprature: 1}\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml: .*rollout\.temperature"):
        presets.load(str(path)).resolve([])


def test_two_presets_at_once_are_refused_with_how_to_lay_one_over_another() -> None:
    with pytest.raises(ConfigError, match=r"only one preset .* with miniature\+miniature-easy"):
        presets.split(["miniature", "miniature-easy"], "miniature")


def test_several_bases_are_laid_one_over_another(tmp_path: Path) -> None:
    (tmp_path / "low.yaml").write_text("base: miniature\nrun: {steps: 7, seed: 1}\n")
    (tmp_path / "high.yaml").write_text("run: {seed: 2}\ndata: {train: [{path: b}]}\n")
    (tmp_path / "mine.yaml").write_text(
        "base: [low.yaml, high.yaml]\nrollout: {group_size: 3}\nuntested: true\n"
    )
    for name in ("mine.yaml", "low.yaml+high.yaml+mine.yaml"):
        config = presets.load(name, beside=tmp_path).resolve([])
        assert (config.run.steps, config.run.seed, config.rollout.group_size) == (7, 2, 3)
        assert [source.path for source in config.data.train] == ["b"]
        assert config.data.evaluate[0].name == "heldout"


def test_a_base_is_laid_over_another_with_what_its_objective_reads(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text(
        "learner: {objective: {name: sft}, optimizer: {name: rmsprop}}\n"
    )
    (tmp_path / "mine.yaml").write_text("base: [miniature, sft.yaml]\n")
    preset = presets.load(str(tmp_path / "mine.yaml"))
    assert preset.resolve([]).learner.objective.name == "sft"
    assert unread_keys(preset.tree) == []


def test_presets_on_the_command_line_are_laid_over_one_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("more.yaml").write_text("run: {steps: 9}\n")
    code, out, _ = tandem(capsys, "config", "miniature-easy+more.yaml", "--json", "run.seed=4")
    assert code == 0
    config = json.loads(out)
    assert config["run"] == {
        **config["run"],
        "steps": 9,
        "seed": 4,
        "dir": "runs/miniature-easy+more",
    }
    assert config["data"]["miniature"] == "easy"
    # The path, as a run shows it, is what resumes it.
    path = presets.load("miniature-easy+more.yaml").path
    again = presets.load(str(path.relative_to(Path.cwd()))).resolve([])
    assert again.run.steps == 9


def test_a_plus_in_a_files_name_is_part_of_it(tmp_path: Path) -> None:
    (tmp_path / "a+b.yaml").write_text("base: miniature\n")
    assert presets.load(str(tmp_path / "a+b.yaml")).name == "a+b"


def test_help_and_list_answer_without_the_libraries() -> None:
    code = (
        "import sys; from tandem.launch.cli import main; main(['--help']); "
        "print(sorted({'pydantic', 'torch', 'pyarrow', 'redis', 'zmq', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_reader_that_goes_away_is_no_error() -> None:
    done = subprocess.run(
        [
            "bash",
            "-c",
            f"{sys.executable} -P -m tandem.launch.cli config | head -n 1; exit ${{PIPESTATUS[0]}}",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_make_miniature_writes_parquet(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = tandem(
        capsys, "make-miniature", str(tmp_path / "d"), "--fresh", "20", "--traces", "2"
    )
    assert code == 0
    assert "expert.parquet: 2 problems of 8 operations" in out
    assert (tmp_path / "d" / "fresh.parquet").exists()


@pytest.mark.parametrize("role", ["rollout", "reward", "learner", "status"])
def test_a_run_that_is_not_there_is_one_line(
    capsys: pytest.CaptureFixture[str], role: str, tmp_path: Path
) -> None:
    code, _, err = tandem(capsys, role, "--run", str(tmp_path))
    assert code == 2
    assert "isn't a run's folder" in err
    assert len(err.splitlines()) == 1


def test_every_setting_has_a_meaning() -> None:
    from tandem.launch.commands.settings import meanings

    for name, info in Config.model_fields.items():
        section = info.annotation
        assert isinstance(section, type)
        assert issubclass(section, Section)
        plain = {
            key
            for key, field in section.model_fields.items()
            if not (isinstance(field.annotation, type) and issubclass(field.annotation, Section))
        }
        assert plain <= set(meanings(section)), name


def test_a_place_that_cannot_be_written_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    # The kernel's own file system takes no folders, not even root's.
    code, _, error = tandem(
        capsys, "make-miniature", "/sys/tandem", "--fresh", "2", "--traces", "2"
    )
    assert code == 1
    assert error.startswith("tandem: /sys/tandem: ")
    assert len(error.splitlines()) == 1
    assert "name another place" in error


def test_an_output_that_takes_nothing_more_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "tandem.launch.cli", "presets"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert done.returncode == 1
    assert done.stderr == "tandem: the output can't be written: No space left on device\n"
