"""Presets with several runs: how their settings are put together, and which are refused."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

from tandem.common.config import to_yaml
from tandem.common.errors import ConfigError, DataError
from tandem.common.run_folder import RunFolder, newest_stage
from tandem.launch.board.terminal import Terminal
from tandem.launch.cli import main
from tandem.launch.run.job import Job, command_again
from tandem.launch.run.opened.opening import Opening
from tandem.launch.run.opened.presets import Preset, load
from tandem.launch.run.running import Running
from tandem.launch.run.several import stages
from tandem.launch.run.several.placing import folder_of, of_preset, placed, words_of
from tandem.launch.run.several.stages import run_words

TWO = """
base: miniature
run: {seed: 5}
stages:
  - {name: sft, base: miniature-sft, run: {steps: 3}}
  - {name: rl, model: {path: "{sft}/model"}, run: {steps: 4}}
"""
ROUNDS = """
base: miniature
rounds: 2
stages:
  - {name: sample, model: {path: "{sft}/model"}, run: {seed: "{round}"}}
  - {name: sft, base: miniature-sft, data: {train: [{path: "{sample}/archive"}]}}
"""


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def written(text: str, name: str = "mine.yaml") -> str:
    Path(name).write_text(text)
    return f"./{name}"


def test_a_stage_inherits_from_the_file_its_base_and_itself() -> None:
    runs = {label: preset.resolve(own) for label, preset, own in of_preset(load(written(TWO)), [])}
    assert list(runs) == ["sft", "rl"]
    assert [runs[name].run.seed for name in runs] == [5, 5]
    assert [runs[name].run.steps for name in runs] == [3, 4]
    assert (runs["sft"].learner.objective.name, runs["rl"].learner.objective.name) == (
        "sft",
        "luffy",
    )
    assert runs["rl"].model.path == "runs/mine/sft/model"
    assert runs["rl"].run.dir == "runs/mine/rl"


def test_a_file_inherits_its_bases_stages_and_goes_over_what_they_inherit() -> None:
    written(TWO, "below.yaml")
    preset = load(written("base: ./below.yaml\nrun: {seed: 8, steps: 50}\n", "above.yaml"))
    runs = {label: stage.resolve(own) for label, stage, own in of_preset(preset, [])}
    assert [runs[name].run.seed for name in runs] == [8, 8]
    # What a stage says itself stays.
    assert [runs[name].run.steps for name in runs] == [3, 4]


def test_a_preset_that_is_laid_over_stages_is_below_what_they_say_themselves() -> None:
    written("run: {seed: 8, steps: 9}\nrollout: {group_size: 6}\n", "more.yaml")
    preset = load(written(TWO) + "+./more.yaml")
    runs = [one.preset.resolve([]) for one in placed(preset, [])]
    assert [run.run.seed for run in runs] == [8, 8]
    assert [run.run.steps for run in runs] == [3, 4]
    assert [run.rollout.group_size for run in runs] == [6, 6]
    assert runs[1].model.path.endswith("/sft/model")


def test_stages_are_those_of_the_last_base_that_has_any() -> None:
    written(TWO, "low.yaml")
    text = "base: [low.yaml, high.yaml]\nrun: {seed: 3}\n"
    written("stages: [{name: only, run: {steps: 2}}]\n", "high.yaml")
    runs = [one.preset.resolve([]) for one in placed(load(written(text)), [])]
    assert [(run.run.steps, run.run.seed) for run in runs] == [(2, 3)]
    assert runs[0].data.miniature == "hard"


def test_overrides_are_for_all_stages_or_for_the_one_that_they_name() -> None:
    words = ["run.seed=2", "rl.run.steps=9", "run.dir=here"]
    preset = load(written(TWO))
    stages = placed(preset, words)
    assert [words_of(stage, words, stages) for stage in stages] == [
        ["run.seed=2"],
        ["run.seed=2", "run.steps=9"],
    ]
    assert folder_of(preset, words) == Path("here")
    assert [stage.folder for stage in stages] == [Path("here/sft"), Path("here/rl")]


@pytest.mark.parametrize(
    ("word", "folder"),
    [
        ('run.dir="runs/ä"', "runs/ä"),
        ("run.dir='a \"b\"'", 'a "b"'),
        ("run.dir=null", "runs/mine"),
        ("run.dir = runs/x", "runs/x"),
    ],
)
def test_the_folder_of_stages_is_read_as_every_setting_is(word: str, folder: str) -> None:
    preset = load(written(TWO))
    stages = placed(preset, [word])
    assert [stage.folder for stage in stages] == [Path(folder, "sft"), Path(folder, "rl")]
    assert [words_of(stage, [word], stages) for stage in stages] == [[], []]


@pytest.mark.parametrize("folder", ["[mine]/x", "a: b", "1e3", "plain/ä"])
def test_the_command_that_goes_on_names_the_same_folder(folder: str) -> None:
    preset = load("miniature-sft-rl")
    again = command_again(preset, "start", RunFolder(folder).path)
    assert folder_of(preset, shlex.split(again)[3:]) == Path(folder)


def test_a_folder_of_stages_that_is_no_text_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"run\.dir=7 should be a folder's path"):
        placed(load(written(TWO)), ["run.dir=7"])


@pytest.mark.parametrize(
    "word",
    [
        "sft.run.dir=there",
        "rl.run.dir=null",
        "sft.run={dir: there, steps: 3}",
        "run={dir: there}",
        "sft.run.dir =there",
    ],
)
def test_a_stage_has_no_folder_elsewhere(
    word: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["start", written(TWO), word, "--plain"]) == 2
    said = capsys.readouterr().err
    assert f"{word}: the folders of the stages lie below run.dir" in said
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


def test_a_stage_may_take_settings_of_a_section_only_by_its_name() -> None:
    words = ["learner.objective.name=kto", "samples.learner.optimizer.lr=1e-4", "run.seed=2"]
    preset = load("miniature-dpo")
    stages = placed(preset, words)
    assert [words_of(stage, words, stages) for stage in stages] == [
        ["learner.optimizer.lr=1e-4", "run.seed=2"],
        ["learner.objective.name=kto", "run.seed=2"],
    ]


def test_rounds_go_on_from_the_round_before() -> None:
    runs = [
        (label, preset.resolve(own))
        for label, preset, own in of_preset(
            load(written(ROUNDS)), ["rounds=3", "sft-2.run.steps=7"]
        )
    ]
    labels = ["sample-1", "sft-1", "sample-2", "sft-2", "sample-3", "sft-3"]
    assert [label for label, _ in runs] == labels
    configs = dict(runs)
    # There is no model of an earlier round yet, so that the first begins with the preset's.
    assert configs["sample-1"].model.path == "miniature"
    assert configs["sample-2"].model.path == "runs/mine/sft-1/model"
    assert [configs[f"sample-{n}"].run.seed for n in (1, 2, 3)] == [1, 2, 3]
    assert configs["sft-3"].data.train[0].path == "runs/mine/sample-3/archive"
    assert [configs[f"sft-{n}"].run.steps for n in (1, 2, 3)] == [80, 7, 80]


@pytest.mark.parametrize(
    ("word", "seeds"),
    [
        ("run.seed=0", [1, 2, 3]),
        ("run.seed=2", [2001, 2002, 2003]),
        ("sample.run.seed=2", [2001, 2002, 2003]),
        ("sample-2.run.seed=2", [1, 2, 3]),
    ],
)
def test_a_seed_for_all_rounds_gives_each_one_of_its_own(word: str, seeds: list[int]) -> None:
    runs = of_preset(load(written(ROUNDS)), ["rounds=3", word])
    found = {label: preset.resolve(own).run.seed for label, preset, own in runs}
    assert [found[f"sample-{n}"] for n in (1, 2, 3)] == seeds


def test_an_item_that_names_a_stage_without_a_run_is_left_out_of_its_list() -> None:
    lists = 'data: {train: [{path: a.jsonl}, {path: "{sft}/archive"}]}'
    text = ROUNDS.replace("name: sample,", f"name: sample, {lists},")
    configs = {
        label: preset.resolve(own) for label, preset, own in of_preset(load(written(text)), [])
    }
    assert [one.path for one in configs["sample-1"].data.train] == ["a.jsonl"]
    assert [one.path for one in configs["sample-2"].data.train] == [
        "a.jsonl",
        "runs/mine/sft-1/archive",
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("stages: {sft: {}}", "stages should be a list of mappings"),
        ("stages: [{run: {steps: 1}}]", "a stage's name is None"),
        ("stages: [{name: Sft}]", "a stage's name is 'Sft'"),
        ("stages: [{name: learner}]", "a stage can't be named learner"),
        ("stages: [{name: a}, {name: a}]", "two stages are named a"),
        (
            "stages: [{name: a, by_name: [lerner]}]",
            "by_name=['lerner'] should be a list of sections",
        ),
        ("rounds: 2", "rounds=2 should be a number from 1, beside stages"),
        ("rounds: 0\nstages: [{name: a}]", "rounds=0 should be a number from 1"),
        (
            'stages: [{name: a, model: {path: "{b}/model"}}, {name: b}]',
            "stage a names the folder of stage b",
        ),
        ("stages: [{name: a, base: miniature-sft-rl}]", "which has stages"),
    ],
)
def test_a_list_that_means_nothing_is_refused(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"mine\.yaml") as caught:
        placed(load(written(f"base: miniature\n{text}\n")), [])
    assert said in str(caught.value)


def test_a_later_stage_is_refused_before_the_first_begins() -> None:
    path = written(TWO)
    for word, said in (
        ("rl.rollout.group_size=1", "stage rl: expert.per_group=1 leaves no own sample"),
        ("rl.learner.lr=1", "stage rl: unknown config key learner.lr"),
        ("rounds=x", "rounds=x should be a number"),
    ):
        with pytest.raises(ConfigError) as caught:
            run_words([path, word], fresh=False, offline=False, plain=True)
        assert said in str(caught.value)
    assert not Path("runs").exists()


LATER = """
base: miniature-sft
run: {{steps: 1}}
evaluate: {{at_start: false, at_end: false, every: 0}}
stages:
  - {{name: warm}}
  - {{name: own, {section}}}
"""
OWN_DATA = "data: {{miniature: null, evaluate: [], {}}}"


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ('model: {path: "{wram}/model"}', "stage own names {wram}: the stages are warm, own"),
        ("model: {path: nosuch/folder/of/mine}", "stage own: model.path=nosuch/folder/of/mine"),
        (
            "base: miniature-on-policy, learner: {objective: {name: distill}, teacher: nosuch/folder/of/mine}",
            "stage own: learner.teacher=nosuch/folder",
        ),
        (OWN_DATA.format("train: [{path: nosuch.jsonl}]"), "stage own: nosuch.jsonl is missing"),
        (
            "data: {evaluate: [{path: nosuch.jsonl, name: q}]}",
            "nosuch.jsonl is missing",
        ),
        ("learner: {objective: {name: 'my_own:nothere'}}", "has no attribute 'nothere'"),
        ("reward: {components: [{name: 'my_own:nothere'}]}", "has no attribute 'nothere'"),
    ],
)
def test_what_a_later_stage_names_is_looked_for_before_the_first_begins(
    section: str,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("my_own.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    path = written(LATER.format(section=section))
    assert main(["start", path]) == 2
    assert said in capsys.readouterr().err
    assert not Path("runs").exists()


def test_what_an_earlier_stage_will_make_is_not_looked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("q.jsonl").write_text('{"question": "1+1=?", "answer": "2"}\n')
    train = 'train: [{path: "{warm}/archive"}, {path: q.jsonl}, {path: org/set:train, name: hub}]'
    section = f'model: {{path: "{{warm}}/model"}}, {OWN_DATA.format(train)}'
    monkeypatch.setattr(stages, "run_job", lambda *_, **__: 3)
    path = written(LATER.format(section=section))
    assert run_words([path], fresh=False, offline=False, plain=True) == 3


def test_a_folder_of_something_else_is_left_alone() -> None:
    path = written(TWO)
    Path("runs/mine").mkdir(parents=True)
    Path("runs/mine/note.txt").write_text("mine")
    with pytest.raises(DataError, match="holds something other than the stages of mine"):
        run_words([path], fresh=False, offline=False, plain=True)
    Path("runs/mine/stages.json").write_text(json.dumps({"preset": "other", "stages": []}))
    with pytest.raises(DataError, match="holds something other than the stages of mine"):
        run_words([path], fresh=True, offline=False, plain=True)


def test_a_folder_of_which_a_killed_command_had_only_the_lock_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = written(TWO)
    top = Path("runs/mine")
    (top / "head").mkdir(parents=True)
    for name in ("lock", ".stages.json.7"):
        (top / name).touch()
    monkeypatch.setattr(stages, "run_job", lambda *_, **__: 3)
    assert run_words([path], fresh=False, offline=False, plain=True) == 3
    assert json.loads((top / "stages.json").read_text())["stages"] == ["sft", "rl"]


def test_one_round_of_a_preset_with_several_is_numbered_and_goes_on_with_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    preset = load(written(ROUNDS))
    assert [one.label for one in placed(preset, ["rounds=1"])] == ["sample-1", "sft-1"]
    # Of a preset with one round, the folders have no numbers.
    path = written(TWO, "two.yaml")
    assert [one.label for one in placed(load(path), [])] == ["sft", "rl"]
    monkeypatch.setattr(stages, "run_job", lambda *_, **__: 3)
    assert run_words([path], fresh=False, offline=False, plain=True) == 3
    # Nothing has begun that would be lost.
    assert run_words([path, "rounds=2"], fresh=False, offline=False, plain=True) == 3
    assert run_words([path, "rounds=1"], fresh=False, offline=False, plain=True) == 3
    Path("runs/two/sft").mkdir()
    Path("runs/two/sft/run.json").write_text(json.dumps({"run_id": "a", "preset": "mine"}))
    with pytest.raises(ConfigError, match=r"runs/two .*would begin anew: give rounds=.*--fresh"):
        run_words([path, "rounds=3"], fresh=False, offline=False, plain=True)
    assert run_words([path, "rounds=3"], fresh=True, offline=False, plain=True) == 3


def test_fresh_stages_ask_nothing_of_the_old_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(TWO)
    top = Path("runs/mine")
    (top / "sft").mkdir(parents=True)
    (top / "stages.json").write_text(
        json.dumps({"preset": "mine", "overrides": [], "stages": ["sft", "rl"]})
    )
    # Its settings are gone.
    (top / "sft" / "run.json").write_text(json.dumps({"run_id": "a", "preset": "mine"}))
    with pytest.raises(DataError, match="start over with --fresh"):
        run_words([path], fresh=False, offline=False, plain=True)
    begun = []
    monkeypatch.setattr(stages, "run_job", lambda preset, *_, **__: begun.append(preset) or 3)
    assert run_words([path, "run.seed=6"], fresh=True, offline=False, plain=True) == 3
    assert len(begun) == 1
    assert not (top / "sft").exists()
    (aside,) = (folder for folder in top.parent.iterdir() if folder != top)
    assert (aside / "sft" / "run.json").exists()


def test_commands_about_a_run_take_the_stage_that_was_begun_last() -> None:
    top = Path("runs/mine")
    for name in ("sft", "rl"):
        (top / name).mkdir(parents=True)
    assert newest_stage(top) == top
    (top / "stages.json").write_text(json.dumps({"preset": "mine", "stages": ["sft", "rl"]}))
    assert newest_stage(top) == top
    (top / "sft" / "run.json").write_text("{}")
    assert newest_stage(top) == top / "sft"
    (top / "rl" / "run.json").write_text("{}")
    assert newest_stage(top) == top / "rl"
    (top / "stages.json").write_text(json.dumps({"preset": "mine", "stages": 3}))
    with pytest.raises(DataError, match="doesn't name its stages"):
        newest_stage(top)


@pytest.mark.timeout(300)
@pytest.mark.byhand
def test_a_command_that_ended_before_the_sum_up_makes_up_for_it() -> None:
    path = written("""
base: miniature-sft
evaluate: {at_start: false, at_end: false, every: 0}
run: {steps: 1}
stages:
  - {name: one}
  - {name: two, model: {path: "{one}/model"}}
""")
    assert run_words([path], fresh=False, offline=False, plain=True) == 0
    summary, report = Path("runs/mine/summary.json"), Path("runs/mine/report.png")
    made = summary.read_text()
    assert [stage["name"] for stage in json.loads(made)["stages"]] == ["one", "two"]
    summary.unlink()
    report.unlink()
    assert run_words([path], fresh=False, offline=False, plain=True) == 0
    assert summary.read_text() == made
    assert report.exists()


def finish(preset: Preset, opening: Opening, *_: object, **__: object) -> int:
    """Leaves a folder as a run does that has finished."""
    opening.folder.make()
    opening.folder.write_config(to_yaml(opening.config))
    record = {"preset_path": str(preset.path), "overrides": opening.overrides, "state": "finished"}
    opening.folder.write_run({**opening.run, **record})
    return 0


def test_stages_that_went_on_are_summed_up_though_the_command_was_killed_before_it_could(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, summary = written(TWO), Path("runs/mine/summary.json")
    monkeypatch.setattr(stages, "run_job", finish)

    def sum_up(*_: object) -> int:
        summary.write_text("{}")
        return 0

    def killed(*_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(stages, "_sum_up", sum_up)
    assert run_words([path], fresh=False, offline=False, plain=True) == 0
    assert summary.exists()
    monkeypatch.setattr(stages, "_sum_up", killed)
    with pytest.raises(KeyboardInterrupt):
        run_words([path, "rl.run.steps=9"], fresh=False, offline=False, plain=True)
    # The earlier summary tells of fewer steps.
    assert not summary.exists()
    monkeypatch.setattr(stages, "_sum_up", sum_up)
    assert run_words([path], fresh=False, offline=False, plain=True) == 0
    assert summary.exists()


class Interrupted:
    """A drawing during which Ctrl-C comes."""

    interrupted = True

    def __init__(self, folder: RunFolder) -> None: ...

    def wait(self) -> str:
        return "interrupted"


def test_ctrl_c_while_a_report_is_drawn_ends_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tandem.launch.board.report.Drawing", Interrupted)
    monkeypatch.setattr("tandem.launch.run.job.summary.make", lambda **_: {})
    monkeypatch.setattr("tandem.launch.run.job.summary.table", lambda *_: [])
    monkeypatch.setattr("tandem.launch.run.running.Running.step", lambda _: 3)
    begun = []

    def job(preset: Preset, opening: Opening, terminal: Terminal, *, again: str) -> int:
        begun.append(opening.folder.path.name)
        finish(preset, opening)
        made = Job(preset, opening, terminal, began=0.0, again=again)
        running = Running(opening.config, opening.folder, preset.name, made._record, terminal)
        return made._finished(running)

    monkeypatch.setattr(stages, "run_job", job)
    preset = written(TWO.replace("base: miniature-sft", "base: miniature-on-policy"))
    assert run_words([preset], fresh=False, offline=False, plain=True) == 130
    assert begun == ["sft"]
    assert json.loads(Path("runs/mine/sft/run.json").read_text())["state"] == "finished"


def test_what_was_said_of_a_later_round_is_kept_while_there_are_fewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path, word = written(ROUNDS), "sft-3.run.steps=7"
    monkeypatch.setattr(stages, "run_job", lambda *_, **__: 3)
    for words in (["rounds=3", word], ["rounds=2"], [], ["rounds=3"]):
        assert run_words([path, *words], fresh=False, offline=False, plain=True) == 3
    assert word in json.loads(Path("runs/mine/stages.json").read_text())["overrides"]
    # One that is given now must mean something.
    with pytest.raises(ConfigError, match="unknown config key sft-3"):
        run_words([path, "rounds=2", word], fresh=False, offline=False, plain=True)
