"""A run's folder: new, resumed, finished, moved aside, and what a resumed run may not change."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from tandem.common.config import build, parse_override, to_yaml
from tandem.common.errors import ConfigError, DataError, TandemError
from tandem.common.run_folder import RunFolder
from tandem.launch.cli import main
from tandem.launch.host.folder_lock import FolderLock
from tandem.launch.run.opened.choices import own_code
from tandem.launch.run.opened.opening import Kind, Opening, make_folder, open_folder
from tandem.launch.run.opened.presets import load
from tandem.launch.run.opened.record import RunRecord, apart, as_kept
from tandem.launch.run.several.placing import folder_of, placed


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def start(*overrides: str, preset: str = "miniature", state: str = "stopped") -> RunFolder:
    """A folder as a started run leaves it."""
    opening = open_folder(load(preset), overrides, fresh=False)
    opening.folder.make()
    opening.folder.config.write_text(to_yaml(opening.config))
    opening.folder.write_run(
        {
            "run_id": opening.run_id,
            "preset": preset,
            "preset_path": str(load(preset).path),
            "overrides": list(opening.overrides),
            "state": state,
        }
    )
    return opening.folder


def again(*overrides: str, preset: str = "miniature", fresh: bool = False) -> Opening:
    return open_folder(load(preset), overrides, fresh=fresh)


def test_a_new_run_is_named_after_its_preset_and_nothing_is_written(here: Path) -> None:
    opening = again()
    assert opening.kind is Kind.NEW
    assert opening.folder.path == here / "runs" / "miniature"
    assert list(here.iterdir()) == []


def test_a_folder_in_the_home_folder_is_there(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = here / "home"
    monkeypatch.setenv("HOME", str(home))
    opening = again("run.dir=~/runs/x")
    assert (opening.folder.path, opening.config.run.dir) == (home / "runs/x", f"{home}/runs/x")
    assert folder_of(load("miniature"), ["run.dir=~/runs/x"]) == home / "runs/x"
    assert folder_of(load("miniature-sft-rl"), ["run.dir=~/runs/x"]) == home / "runs/x"


def test_two_new_runs_have_different_ids() -> None:
    assert again().run_id != again().run_id


def test_an_unfinished_run_is_resumed_with_what_it_was_started_with() -> None:
    folder = start("run.steps=20", "rollout.group_size=4")
    opening = again()
    assert opening.kind is Kind.RESUMED
    assert opening.run_id == folder.read_run()["run_id"]
    assert (opening.config.run.steps, opening.config.rollout.group_size) == (20, 4)
    assert opening.changed == {}


def test_a_run_of_an_older_version_keeps_what_its_objective_had_of_the_preset() -> None:
    folder = start("learner.objective.name=dapo")
    saved = yaml.safe_load(folder.config.read_text())
    assert saved["learner"]["objective"]["advantage"] == "group_mean_std"
    saved["learner"]["objective"] |= {"advantage": "group_mean", "dual_clip": 3.0}
    folder.config.write_text(yaml.safe_dump(saved))
    opening = again()
    assert opening.kind is Kind.RESUMED
    objective = opening.config.learner.objective
    assert (objective.advantage, objective.dual_clip) == ("group_mean", 3.0)
    assert objective.clip_high == 0.28
    assert opening.changed == {}


def saved_by_an_older_version(folder: RunFolder) -> None:
    """A run's settings as they would be if its preset had been another one when it began."""
    saved = yaml.safe_load(folder.config.read_text())
    saved["data"]["system_prompt"] = "Ä\n😀: 'yes'"
    saved["data"]["train"][1:] = []
    saved["data"]["train"][0]["path"] = "{run}/data/old.parquet"
    saved["evaluate"]["limit"] = 7
    folder.config.write_text(yaml.safe_dump(saved))


def test_a_run_goes_on_with_what_it_began_with_where_its_shipped_preset_has_changed() -> None:
    folder = start("run.steps=20", "data.train.0.limit=3")
    saved_by_an_older_version(folder)
    opening = again("log.every=5")
    assert opening.kind is Kind.RESUMED
    assert opening.kept == ("data.system_prompt", "data.train", "evaluate.limit")
    assert opening.config.data.system_prompt == "Ä\n😀: 'yes'"
    assert [(one.path, one.limit) for one in opening.config.data.train] == [
        ("{run}/data/old.parquet", 3)
    ]
    assert (opening.config.run.steps, opening.config.evaluate.limit) == (20, 7)
    assert opening.changed == {"log.every": (10, 5)}
    # The next start finds it among the overrides.
    folder.config.write_text(to_yaml(opening.config))
    folder.write_run({**folder.read_run(), "overrides": list(opening.overrides)})
    opening = again()
    assert (opening.kept, opening.changed) == ((), {})
    assert opening.config.data.system_prompt == "Ä\n😀: 'yes'"


def test_a_run_says_what_it_keeps_of_an_older_version_of_its_preset(
    capsys: pytest.CaptureFixture[str],
) -> None:
    saved_by_an_older_version(start())
    # Refused before anything is started: no host has these.
    assert main(["start", "miniature", "launch.bind=192.0.2.1", "--plain"]) == 2
    told = "preset miniature has other settings than when this run began; the run keeps its own"
    assert f"note: {told} data.system_prompt, data.train, evaluate.limit" in capsys.readouterr().out


def test_a_stage_goes_on_with_what_it_began_with_where_its_shipped_preset_has_changed() -> None:
    stage = placed(load("miniature-sft-rl"), [])[1]
    opening = open_folder(stage.preset, [], fresh=False)
    opening.folder.make()
    opening.folder.config.write_text(to_yaml(opening.config))
    opening.folder.write_run({**opening.run, "preset_path": str(stage.preset.path)})
    saved_by_an_older_version(opening.folder)
    opening = open_folder(stage.preset, [], fresh=False)
    assert (opening.kind, opening.changed) == (Kind.RESUMED, {})
    assert opening.kept == ("data.system_prompt", "data.train", "evaluate.limit")


def test_a_stage_whose_folder_was_moved_keeps_no_path_to_where_it_was(here: Path) -> None:
    stage = placed(load("miniature-sft-rl"), [])[1]
    opening = open_folder(stage.preset, [], fresh=False)
    opening.folder.make()
    opening.folder.config.write_text(to_yaml(opening.config))
    opening.folder.write_run({**opening.run, "preset_path": str(stage.preset.path)})
    (here / "runs/miniature-sft-rl").rename(here / "moved")
    stage = placed(load("miniature-sft-rl"), ["run.dir=moved"])[1]
    with pytest.raises(
        ConfigError, match=r"\(model\.path: 'runs/.*' -> 'moved/sft/model'\): leave"
    ):
        open_folder(stage.preset, [], fresh=False)


def test_what_the_objective_of_a_changed_preset_hid_is_kept_too() -> None:
    folder = start("learner.objective.name=sft", "run.steps=20", preset="miniature-sft")
    saved = yaml.safe_load(folder.config.read_text())
    saved["learner"]["objective"] = {"name": "rl_sft_loss", "advantage": "none", "clip_high": 0.3}
    folder.config.write_text(yaml.safe_dump(saved))
    folder.write_run({**folder.read_run(), "overrides": ["run.steps=20"]})
    opening = again(preset="miniature-sft")
    assert opening.kind is Kind.RESUMED
    assert opening.changed == {}
    assert opening.config.learner.objective.clip_high == 0.3


def test_of_a_run_whose_shipped_preset_has_changed_only_what_was_asked_for_is_refused() -> None:
    saved_by_an_older_version(start())
    with pytest.raises(ConfigError, match=r"shaped it \(rollout\.group_size: 8 -> 4\): leave"):
        again("rollout.group_size=4")
    with pytest.raises(ConfigError, match=r"shaped it \(data\.train\.0\.limit: None -> 4\): leave"):
        again("data.train.0.limit=4")


def test_a_preset_of_the_users_own_that_was_edited_is_refused(here: Path) -> None:
    (here / "mine.yaml").write_text("base: miniature\n")
    start(preset="./mine.yaml")
    (here / "mine.yaml").write_text("base: miniature\nrollout: {group_size: 4}\n")
    with pytest.raises(ConfigError, match=r"\(rollout\.group_size: 8 -> 4\): leave them as they"):
        again(preset="./mine.yaml")


EVERY_KEY = {
    "name": "luffy", "advantage": "group_mean", "aggregation": "constant", "clip_low": 0.2,
    "clip_high": 0.2, "dual_clip": 3.0, "own_shaping": "none", "correction": "none",
    "correction_level": "token", "correction_low": 0.5, "correction_high": 2.0,
    "max_probability": None, "own_advantage_weight": 1.0, "expert_advantage_weight": 1.0,
    "shaping": "ratio", "gamma": 0.1, "shaping_exponent": 0.5, "shaping_coefficient": 0.1,
    "expert_behaviour": "recorded", "expert_clip_low": None, "expert_clip_high": None,
    "sft_coefficient": 1.0, "entropy_coefficient": 0.0, "entropy_over": "own",
    "entropy_target": None, "entropy_adapt": "scaled", "entropy_step": 0.005,
    "kl_coefficient": 0.0, "kl_form": "k3", "kl_reward_coefficient": 0.0, "kl_target": None,
    "kl_gain": 0.1, "value_coefficient": 0.5, "value_clip": 0.2, "beta": 0.1,
    "label_smoothing": 0.0, "desirable_weight": 1.0, "undesirable_weight": 1.0,
    "replay_share": 0.5, "mu_peak": 0.9, "mu_valley": 0.05, "mu_warmup_steps": 0,
    "mu_decay_steps": 200, "exploration_power": 0.5, "entropy_share": 0.2,
    "truncation": "wrong", "stragglers": "mask", "params": {},
}  # fmt: skip
"""``learner.objective`` as versions saved it that had one section for all objectives."""


@pytest.mark.parametrize("preset", ["miniature", "miniature-easy", "miniature-sft"])
def test_a_run_whose_saved_settings_list_every_key_of_every_objective_is_resumed(
    preset: str,
) -> None:
    folder = start(preset=preset)
    saved = yaml.safe_load(folder.config.read_text())
    saved["learner"]["objective"] = EVERY_KEY | saved["learner"]["objective"]
    saved["rollout"]["vllm"] = {"max_num_seqs": 4, "start_seconds": 900.0, "args": {}}
    folder.config.write_text(yaml.safe_dump(saved))
    run = folder.read_run()
    # Such versions took these in silence.
    older = ["learner.objective.label_smoothing=0.1", "rollout.vllm.max_num_seqs=4"]
    folder.write_run({**run, "overrides": older})
    opening = again("log.every=7", preset=preset)
    assert opening.kind is Kind.RESUMED
    assert opening.changed == {"log.every": (10, 7)}
    with pytest.raises(ConfigError, match="label_smoothing isn't read"):
        again("learner.objective.label_smoothing=0.1", preset=preset)


def test_a_run_of_an_older_version_that_is_refused_today_can_be_mended() -> None:
    folder = start()
    saved = yaml.safe_load(folder.config.read_text())
    saved["learner"]["micro_batch_tokens"] = 80
    folder.config.write_text(yaml.safe_dump(saved))
    run = folder.read_run()
    folder.write_run({**run, "overrides": ["learner.micro_batch_tokens=80"]})
    with pytest.raises(ConfigError, match="at least 85"):
        again()
    assert again("learner.micro_batch_tokens=85").kind is Kind.RESUMED


def test_a_moved_run_is_resumed_where_it_is_and_nowhere_else(here: Path) -> None:
    start("run.dir=elsewhere", "run.steps=20")
    (here / "runs").mkdir()
    (here / "elsewhere").rename(here / "runs" / "miniature")
    opening = again()
    assert opening.kind is Kind.RESUMED
    assert (opening.config.run.dir, opening.config.run.steps) == ("runs/miniature", 20)
    assert opening.overrides == ("run.steps=20",)


def test_a_run_that_comes_from_another_machine_keeps_its_settings(here: Path) -> None:
    folder = start("run.steps=20")
    folder.write_run({**folder.read_run(), "preset_path": "/another/machine/miniature.yaml"})
    assert again().config.run.steps == 20
    # A preset of that name that is still there is another one.
    (here / "miniature.yaml").write_text("base: miniature\n")
    folder.write_run({**folder.read_run(), "preset_path": str(here / "miniature.yaml")})
    assert again().config.run.steps == 250


def test_what_may_change_is_listed() -> None:
    start("run.steps=20")
    opening = again("run.steps=40", "log.every=5")
    assert opening.changed == {"run.steps": (20, 40), "log.every": (10, 5)}
    assert opening.overrides == ("run.steps=20", "run.steps=40", "log.every=5")


def test_all_that_may_not_change_is_named_with_the_way_out() -> None:
    start()
    with pytest.raises(ConfigError) as told:
        again("rollout.group_size=4", "run.seed=1", "run.steps=9")
    message = str(told.value)
    assert "rollout.group_size: 8 -> 4" in message
    assert "run.seed: 0 -> 1" in message
    assert "run.steps" not in message
    assert "--fresh" in message


def test_another_preset_in_the_same_folder_is_refused() -> None:
    start()
    with pytest.raises(ConfigError, match=r"learner\.objective\.name: 'luffy' -> 'grpo'"):
        again("run.dir=runs/miniature", preset="miniature-on-policy")


def test_the_same_folder_by_another_path_is_the_same(here: Path) -> None:
    start()
    opening = again(f"run.dir={here}/runs/miniature")
    assert opening.kind is Kind.RESUMED
    assert opening.changed == {}


def test_a_finished_run_stays_finished() -> None:
    start("run.steps=20", state="finished")
    assert again().kind is Kind.FINISHED
    assert again("run.steps=10").kind is Kind.FINISHED


def test_a_finished_run_goes_on_with_more_steps() -> None:
    start("run.steps=20", state="finished")
    assert again("run.steps=30").kind is Kind.RESUMED


def test_fresh_moves_aside_to_the_first_free_name(here: Path) -> None:
    folder = start(state="finished")
    (here / "runs" / "miniature.1").mkdir()
    opening = again("rollout.group_size=4", fresh=True)
    assert opening.kind is Kind.NEW
    assert opening.set_aside == here / "runs" / "miniature.2"
    assert opening.run_id != folder.read_run()["run_id"]
    assert folder.path.exists()


def test_fresh_without_an_old_run_is_a_new_run() -> None:
    opening = again(fresh=True)
    assert (opening.kind, opening.set_aside) == (Kind.NEW, None)


def test_a_folder_with_other_things_in_it_is_refused(here: Path) -> None:
    (here / "thesis").mkdir()
    (here / "thesis" / "chapter.tex").touch()
    with pytest.raises(DataError, match=r"chapter\.tex"):
        again("run.dir=thesis")
    with pytest.raises(DataError, match="is a file"):
        again("run.dir=thesis/chapter.tex")


def test_a_run_without_its_run_json_is_not_taken_for_a_new_one() -> None:
    folder = start()
    folder.run_json.unlink()
    folder.journal.touch()
    with pytest.raises(DataError, match=r"run\.json is missing"):
        again()


def test_a_damaged_run_json_is_told() -> None:
    folder = start()
    folder.run_json.write_text("{")
    with pytest.raises(DataError, match=r"run\.json is damaged"):
        again()


def test_a_password_in_the_url_is_no_change_and_is_not_shown() -> None:
    start("replay.redis_url=redis://h:1/0")
    opening = again("replay.redis_url=redis://:secret@h:1/0")
    assert opening.changed == {}
    assert opening.config.replay.redis_url == "redis://:secret@h:1/0"


@pytest.fixture
def starts_over():
    """Opens the folder to start over in it; its locks are let go at the end."""
    made: list[FolderLock] = []

    def make() -> tuple[Opening, FolderLock]:
        opening = again(fresh=True)
        made.append(FolderLock(opening.folder))
        return opening, made[-1]

    yield make
    for lock in made:
        lock.release()


def test_of_two_that_start_over_at_once_one_is_refused(starts_over) -> None:
    old = start()
    (old.path / "mark").touch()
    (opening, first), (late, second) = starts_over(), starts_over()
    first.take()
    with pytest.raises(TandemError, match="in use by process"):
        second.take()
    make_folder(opening, first, print)
    assert (old.path.with_name("miniature.1") / "mark").exists()
    # Begun by now: the folder isn't the one that the second wanted to move.
    first.release()
    second.take()
    with pytest.raises(TandemError, match="started by another process just now"):
        make_folder(late, second, print)
    assert not old.path.with_name("miniature.2").exists()


def test_a_folder_that_another_process_has_moved_is_told(starts_over) -> None:
    old, (_, lock) = start(), starts_over()
    old.path.rename(old.path.with_name("elsewhere"))
    with pytest.raises(TandemError, match="was moved by another process just now: start again"):
        lock.take()


@pytest.mark.parametrize(
    "word",
    [
        "replay.redis_url=redis://:secret@h:1/0",
        "replay.redis_url='redis://:secret@h:1/0'",
        " replay.redis_url = redis://:secret@h:1/0 ",
        "replay={redis_url: 'redis://user:secret@h:1/0', window: 2}",
        'replay={"redis_url":"rediss://:secret@h:1/0"}',
    ],
)
def test_no_form_of_an_override_keeps_a_password(word: str) -> None:
    kept = as_kept(word)
    assert "secret" not in kept
    before, after = parse_override(word), parse_override(kept)
    assert before[0] == after[0]
    assert "@h:1/0" in str(after[1]) or "//h:1/0" in str(after[1])
    if isinstance(before[1], dict):
        assert {k: v for k, v in before[1].items() if k != "redis_url"} == {
            k: v for k, v in after[1].items() if k != "redis_url"
        }


@pytest.mark.parametrize(
    "url", ["redis://:secret@h:x/0", "redis://u:se/secret@h:1/0", "redis://:secret@h:1/0?x=1"]
)
def test_a_url_that_is_refused_is_kept_without_its_password(url: str) -> None:
    kept = as_kept(f"replay.redis_url={url}")
    assert "secret" not in kept
    assert "@h:" in kept


def test_a_password_is_parted_from_its_word() -> None:
    assert apart("replay.redis_url=redis://u:a%40b@h:1/0") == (
        'replay.redis_url="redis://u@h:1/0"',
        "a@b",
    )
    for word in ("replay.redis_url=redis://u@[::1]:1/0", "--out=a", "=", "miniature", "a=[b"):
        assert apart(word) == (word, None)


def test_a_start_that_is_killed_early_leaves_it_known_that_the_run_had_finished(
    tmp_path: Path,
) -> None:
    preset, words = load("miniature"), [f"run.dir={tmp_path / 'run'}"]
    opening = open_folder(preset, words, fresh=False)
    folder = opening.folder
    folder.make()
    folder.write_config(to_yaml(opening.config))
    folder.write_run({**opening.run, "state": "finished"})
    # What a callback has asked of a finished run is cleared once Redis is there.
    for _ in range(2):
        opening = open_folder(preset, [*words, "run.steps=999"], fresh=False)
        RunRecord(opening, began=0.0).begin(preset, opening, port=1)
        assert (folder.read_run()["state"], folder.read_run()["was_finished"]) == ("starting", True)


def test_a_start_names_the_modules_whose_code_has_changed_and_imports_none(here: Path) -> None:
    (here / "paying").mkdir()
    (here / "paying" / "__init__.py").touch()
    module, hooks = here / "paying" / "mine_to_change.py", here / "hooks_to_change.py"
    module.write_text("def pays(completions, **_):\n    return [1.0 for _ in completions]\n")
    hooks.write_text("def saw(step, metrics, handle):\n    pass\n")
    words = [
        "reward.components=[{name: paying.mine_to_change:pays}]",
        "run.callbacks=[hooks_to_change:saw]",
    ]
    preset = load("miniature")

    def changed() -> list[str]:
        opening = open_folder(preset, words, fresh=False)
        opening.folder.make()
        opening.folder.write_config(to_yaml(opening.config))
        return RunRecord(opening, began=0.0).begin(preset, opening, port=1)

    assert changed() == []
    assert changed() == []
    module.write_text(module.read_text().replace("1.0", "2.0"))
    assert changed() == ["paying.mine_to_change"]
    hooks.write_text(hooks.read_text() + "\n")
    assert changed() == ["hooks_to_change"]
    assert not {"paying", "paying.mine_to_change", "hooks_to_change"} & sys.modules.keys()


def test_the_code_of_every_setting_that_names_some_is_looked_at(here: Path) -> None:
    names = ["loss", "rate", "pace", "engine", "paid", "rows", "sets", "saw", "world"]
    for name in names:
        (here / f"own_{name}.py").touch()
    tree = {
        "learner": {
            "objective": {"name": "own_loss:f"},
            "optimizer": {"schedule": "own_rate:f"},
            "critic": {"optimizer": {"schedule": "own_pace:f"}},
        },
        "rollout": {"engine": "own_engine:f"},
        "reward": {"components": [{"name": "accuracy"}, {"name": "own_paid.f"}]},
        "data": {
            "train": [{"path": "x.jsonl", "form": "own_rows:f"}],
            "evaluate": [{"path": "y.jsonl", "name": "y", "form": "own_sets:f"}],
        },
        "run": {"steps": 9, "callbacks": ["own_saw:f", "gone:f"]},
        "environments": {"use": {"w": {"form": "text", "target": "own_world:F"}}},
    }
    assert sorted(own_code(build(tree))) == sorted(f"own_{name}" for name in names)


def test_the_code_of_a_module_in_an_archive_is_not_looked_at(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(here / "mine.zip", "w") as archive:
        archive.writestr("zipped.py", "")
    monkeypatch.syspath_prepend(here / "mine.zip")
    tree = {"rollout": {"engine": "zipped:f"}, "run": {"steps": 9}}
    tree["data"] = {"train": [{"path": "x.jsonl"}]}
    assert own_code(build(tree)) == {}


def test_a_run_that_0_2_0_was_given_none_as_a_text_goes_on_with_it(here: Path) -> None:
    preset = load("miniature")
    opening = open_folder(preset, ["data.system_prompt='None'"], fresh=False)
    opening.folder.make()
    opening.folder.write_config(to_yaml(opening.config))
    record = RunRecord(opening, began=0.0)
    record.begin(preset, opening, port=1)
    record.write(overrides=["data.system_prompt=None"])
    again = open_folder(preset, ["run.steps=99"], fresh=False)
    assert (again.kind, again.config.data.system_prompt) == (Kind.RESUMED, "None")


def test_the_record_of_a_run_keeps_no_password(tmp_path: Path) -> None:
    preset = load("miniature")
    words = [f"run.dir={tmp_path / 'run'}", "replay.redis_url=redis://:secret@h:1/0"]
    opening = open_folder(preset, words, fresh=False)
    opening.folder.make()
    RunRecord(opening, began=0.0).begin(preset, opening, port=1)
    kept = opening.folder.run_json.read_text()
    assert "h:1/0" in kept
    assert "secret" not in kept


@pytest.mark.parametrize(
    "word",
    ["learner.deepspeed=it.json", "learner={deepspeed: it.json}", "sft.learner.deepspeed=it.json"],
)
def test_a_deepspeed_file_is_kept_by_its_content(word: str, here: Path) -> None:
    (here / "it.json").write_text('{"memory_breakdown": true}')
    kept = as_kept(word)
    (here / "it.json").unlink()
    assert parse_override(kept)[0] == parse_override(word)[0]
    assert "it.json" not in kept
    assert "memory_breakdown" in kept
    assert as_kept(word) == word  # It is gone.


def test_a_run_goes_on_without_its_deepspeed_file_and_at_another_stage(here: Path) -> None:
    file = here / "it.json"
    file.write_text('{"zero_optimization": {"stage": 2, "overlap_comm": true}}')
    folder = start("learner.zero_stage=2", f"learner.deepspeed={file}")
    run = folder.read_run()
    folder.write_run(run | {"overrides": [as_kept(word) for word in run["overrides"]]})
    file.unlink()
    opening = again()
    assert opening.changed == {}
    assert opening.config.learner.deepspeed == {
        "zero_optimization": {"stage": 2, "overlap_comm": True}
    }
    with pytest.raises(ConfigError, match=r"zero_optimization\.stage=2 .*learner\.zero_stage"):
        again("learner.zero_stage=1")
    opening = again("learner.zero_stage=1", "learner.deepspeed=null")
    assert opening.kind is Kind.RESUMED
    assert opening.changed["learner.zero_stage"] == (2, 1)
    assert "learner.deepspeed.zero_optimization.overlap_comm" in opening.changed


def test_other_overrides_are_kept_as_they_are() -> None:
    for word in ("run.steps=3", "replay={window: 2}", "data.train=[{path: a}]"):
        assert as_kept(word) == word
