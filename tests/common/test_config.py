"""The configuration: what is refused, what is told, and what a resumed run may change."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tandem.common import config as c
from tandem.common.config.checks.choices import why_not_started
from tandem.common.errors import ConfigError
from tandem.common.objectives import OBJECTIVES

TREE: dict[str, Any] = {"run": {"steps": 10}, "data": {"train": [{"path": "a.parquet"}]}}


def build(*overrides: str, **sections: Any) -> c.Config:
    return c.build({**TREE, **sections}, overrides)


def test_overrides_win_over_the_preset():
    config = build("run.seed=3", "learner.optimizer.lr=1e-4", run={"steps": 5, "seed": 1})
    assert (config.run.seed, config.run.steps, config.learner.optimizer.lr) == (3, 5, 1e-4)


def test_the_preset_is_not_changed_by_an_override():
    tree = {"run": {"steps": 5}, "data": {"train": [{"path": "a"}]}}
    c.build(tree, ["run.steps=9", "data.train.0.path=b"])
    assert tree == {"run": {"steps": 5}, "data": {"train": [{"path": "a"}]}}


def test_items_of_a_list_are_named_by_index():
    assert build("data.train.0.weight=3").data.train[0].weight == 3
    for part in ("4", "-1", "x"):
        with pytest.raises(
            ConfigError, match=f"'{part}' is not an index of data.train, which has 1"
        ):
            build(f"data.train.{part}.weight=3")


def test_items_of_a_list_that_no_preset_names_are_those_of_the_default():
    assert build("learner.optimizer.betas.1=0.5").learner.optimizer.betas == (0.9, 0.5)
    assert build("expert.accept.0=wrong").expert.accept == ("wrong",)
    component, *_ = build("reward.components.0.weight=0.5").reward.components
    assert (component.name, component.weight) == ("accuracy", 0.5)
    assert build("data.evaluate=[{path: b}]", "data.evaluate.0.limit=2").data.evaluate[0].limit == 2
    with pytest.raises(
        ConfigError, match=r"data\.stop has no entries: set all of it, data\.stop=\["
    ):
        build("data.stop.0=a")
    with pytest.raises(
        ConfigError, match=r"data\.evaluate\.0\.limit: data\.evaluate has no entries"
    ):
        build("data.evaluate.0.limit=2")
    with pytest.raises(ConfigError, match=r"data\.train is an empty list: set all of it"):
        build("data.train=[]", "data.train.0.limit=2")


def test_a_key_of_an_item_that_changed_is_named_by_itself():
    found = c.differences(build("data.train.0.limit=2"), build("data.train.0.limit=3"))
    assert found == {"data.train.0.limit": (2, 3)}


def test_none_is_an_override():
    assert build("learner.objective.clip_low=null").learner.objective.clip_low is None
    assert build("run.steps=", "run.passes=1").run.steps is None
    with pytest.raises(ConfigError, match=r"run\.dir, 'None', would be a text: write null"):
        build("run.dir=None")
    assert build("run.dir='None'").run.dir == "None"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        *[("1e-6", 1e-6), ("1E3", 1000.0), ("-2.5e3", -2500.0), (".5", 0.5), ("3", 3), (".inf", float("inf"))],
        *[("'007'", "007"), ('"1e-6"', "1e-6"), ("1.2.3", "1.2.3"), ("e5", "e5"), ("1e", "1e"), ("inf", "inf")],
        *[("nan", "nan"), ("1_0e2", "1_0e2"), ("true", True), ("", None), ("[1e-3, x]", [1e-3, "x"])],
    ],
)  # fmt: skip
def test_an_override_is_yaml_whose_numbers_may_have_an_exponent(written: str, read: Any):
    key, value = c.parse_override(f"a.b={written}")
    assert (key, value, type(value)) == ("a.b", read, type(read))


@pytest.mark.parametrize(
    ("written", "lost"),
    [("Answer #1 first", "#1 first"), ("###", "###"), ("---", "---"), ("[a, b] # c", "# c")],
)  # fmt: skip
def test_an_override_of_which_yaml_leaves_out_a_part_is_refused(written: str, lost: str):
    with pytest.raises(ConfigError, match=rf"a\.b.* loses '{re.escape(lost)}'.*in quotes"):
        c.parse_override(f"a.b={written}")
    quoted = json.dumps(written)
    assert c.parse_override(f"a.b={quoted}") == ("a.b", written)
    assert c.parse_override(f"a.b=[x#y, {quoted}]") == ("a.b", ["x#y", written])


def test_a_preset_that_has_a_key_twice_is_refused(tmp_path: Path):
    file = tmp_path / "mine.yaml"
    file.write_text("run:\n  steps: 1\nlog: {}\nrun:\n  seed: 7\n")
    with pytest.raises(
        ConfigError, match=r"mine\.yaml .* the key run is in line 1 and again in line 4"
    ):
        c.read_yaml(file)
    with pytest.raises(ConfigError, match=r"the key steps is in line 1 and again in line 1"):
        c.parse_override("run={steps: 1, steps: 2}")
    # What an anchor gives may be set again.
    merged = "{a: &a {x: 1, y: 1}, b: &b {z: 1}, c: {<<: *a, <<: *b, x: 2}}"
    assert c.parse_yaml(merged, "it")["c"] == {"x": 2, "y": 1, "z": 1}


@pytest.mark.parametrize("value", ["1e5", "-2.5e3", "007", ".5", "on", "1.0", "2026-11-22"])
def test_text_that_looks_like_a_number_is_saved_as_text(value: str):
    config = build(run={"steps": 1, "dir": value})
    assert c.read_config(c.to_yaml(config)).run.dir == value


@pytest.mark.parametrize("text", ["run.seed", "=3", ""])
def test_what_is_no_override_is_told(text: str):
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        build(text)


@pytest.mark.parametrize(
    ("text", "nearest"),
    [
        ("replay.max_stalenes=1", "replay.max_staleness"),
        ("learner.lr=1", "learner.optimizer.lr"),
        ("data.train.0.limt=1", "data.train.0.limit"),
        ("rollouts.workers=1", "rollout"),
    ],
)
def test_an_unknown_key_is_named_with_the_nearest_valid_one(text: str, nearest: str):
    key = text.partition("=")[0]
    with pytest.raises(ConfigError, match="unknown config key") as error:
        build(text)
    assert key.partition(".")[0] in str(error.value)
    assert f"did you mean {nearest}" in str(error.value)


@pytest.mark.parametrize(
    "text",
    [
        "run.steps=many",
        "replay.late=perhaps",
        "replay.window=0",
        "rollout.top_p=1.5",
        "learner.optimizer.name={}",
        "learner.optimizer.name=[1]",
        "rollout.engine=[1]",
    ],
)
def test_a_wrong_value_is_named_with_its_key(text: str):
    key, _, value = text.partition("=")
    with pytest.raises(ConfigError, match=rf"{key}='?{re.escape(value)}"):
        build(text)


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["run.passes=1"], r"exactly one of run\.steps and run\.passes"),
        (["run.steps=null"], r"exactly one of run\.steps and run\.passes"),
        (["run.steps=0"], r"run\.steps=0: .*`tandem evaluate` measures a model"),
        (["data.train=[]"], r"data\.train is empty"),
        (["rollout.top_p=0.9"], r"rollout\.top_p must be 1"),
        (["rollout.temperature=0"], r"rollout\.temperature above 0"),
        (["expert.per_group=8"], r"expert\.per_group=8 leaves no own sample"),
        (["weights.every=4"], r"weights\.every=4 needs replay\.max_staleness >= 3, and it is 1"),
        (["replay.window=3"], r"replay\.window=3 is over replay\.max_staleness \+ 1 = 2"),
        (["learner.minibatches=3"], r"learner\.minibatches=3 doesn't divide"),
    ],
)
def test_values_that_do_not_go_together_are_told(overrides: list[str], named: str):
    with pytest.raises(ConfigError, match=named):
        build(*overrides)


def test_offline_training_does_not_mind_the_sampling():
    build("learner.source=offline", "rollout.top_p=0.9")
    build("learner.source=offline", "rollout.group_size=1", "expert.per_group=1")


def test_a_config_can_not_be_changed_once_read():
    with pytest.raises(ValueError, match="frozen"):
        build().run.seed = 3  # type: ignore[misc]


def test_the_saved_tree_is_read_back_as_the_same_config(tmp_path: Path):
    config = build("learner.optimizer.lr=5e-7", "run.seed=4")
    path = tmp_path / "config.yaml"
    path.write_text(c.to_yaml(config))
    assert c.build(c.read_yaml(path)) == config


def test_numbers_without_a_dot_are_numbers_in_a_preset(tmp_path: Path):
    path = tmp_path / "p.yaml"
    path.write_text("learner: {optimizer: {lr: 5e-4}}\n")
    assert c.build({**TREE, **c.read_yaml(path)}).learner.optimizer.lr == 5e-4


@pytest.mark.parametrize(
    ("text", "told"),
    [("a: [", "can't be read as YAML"), ("- 1\n", "mapping of sections, not list")],
)
def test_what_is_no_preset_is_told(tmp_path: Path, text: str, told: str):
    path = tmp_path / "p.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=told):
        c.read_yaml(path)


def test_a_missing_preset_is_told(tmp_path: Path):
    with pytest.raises(ConfigError, match="there is no preset file"):
        c.read_yaml(tmp_path / "no.yaml")


def test_differences_name_key_old_and_new():
    assert c.differences(build(), build("run.seed=5")) == {"run.seed": (0, 5)}


@pytest.mark.parametrize(
    "text",
    ["run.steps=99", "log.every=1", "learner.optimizer.lr=1", "launch.bind=::1", "rollout.workers=9",
     "replay.lease_seconds=3", "weights.stage_seconds=9", "learner.ratio_check.on_alarm=quarantine",
     "rollout.vllm.gpu_memory_utilization=0.3", "rollout.gpus_per_worker=2",
     "learner.gradient_checkpointing=true", "weights.topology=broadcast", "weights.bucket_mb=8",
     "weights.snapshot_every=4", "weights.snapshot_folder=/mnt/weights"],
)  # fmt: skip
def test_a_resumed_run_may_change_schedule_logging_and_counts(text: str):
    assert c.differences(build(), build(text))
    assert c.frozen_differences(build(), build(text)) == {}


@pytest.mark.parametrize(
    "text",
    ["run.seed=9", "rollout.group_size=4", "replay.max_staleness=3", "model.path=x",
     "learner.objective.gamma=0.2", "data.train.0.path=b", "reward.mode=x",
     "learner.optimizer.name=rmsprop"],
)  # fmt: skip
def test_a_resumed_run_may_change_nothing_else(text: str):
    assert len(c.frozen_differences(build(), build(text))) == 1


def test_every_changeable_pattern_names_a_key():
    from fnmatch import fnmatchcase

    keys = c.valid_keys()
    # A component's parameters are its own.
    patterns = [pattern for pattern in c.CHANGEABLE if ".params." not in pattern]
    assert [p for p in patterns if not any(fnmatchcase(k, p) for k in keys)] == []


def test_the_page_lists_what_a_resumed_run_may_change():
    page = Path(__file__).parents[2] / "docs" / "checkpoints.md"
    section = (
        page.read_text(encoding="utf-8")
        .split("## What a resumed run may change")[1]
        .split("\n## ")[0]
    )
    rows = re.findall(r"^\| (`.*?) \|", section, re.MULTILINE)
    assert sorted(re.findall("`(.*?)`", " ".join(rows))) == sorted(c.CHANGEABLE)


def test_every_field_of_the_config_is_explained():
    files = sorted(Path(c.__file__).parent.glob("*.py"))
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    sections = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    assert len(sections) > 15
    unexplained = []
    for section in sections:
        cls = getattr(c, section.name, None)
        if cls is None:
            assert section.name.startswith("_")
            continue
        for field, after in zip(section.body, [*section.body[1:], None], strict=True):
            if not isinstance(field, ast.AnnAssign) or not isinstance(field.target, ast.Name):
                continue
            annotation = cls.model_fields[field.target.id].annotation
            explains_itself = isinstance(annotation, type) and issubclass(annotation, c.Section)
            explained = (
                isinstance(after, ast.Expr)
                and isinstance(after.value, ast.Constant)
                and isinstance(after.value.value, str)
            )
            if not explained and not explains_itself:
                unexplained.append(f"{section.name}.{field.target.id}")
    assert unexplained == []


def test_config_records_and_wire_load_without_a_deep_learning_library():
    code = (
        "import sys, tandem.common.config, tandem.common.records, tandem.common.wire, "
        "tandem.replay.ledger, tandem.replay.forms, tandem.replay.store;"
        "print([m for m in ('torch', 'transformers', 'vllm', 'deepspeed') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_deterministic_run_has_the_settings_that_make_it_so():
    preset = {"replay": {"max_staleness": 3}, "rollout": {"groups_ahead": 2}}
    config = c.build({**TREE, **preset}, ["run.deterministic=true"])
    values = c.leaves(config.model_dump())
    assert {key: values[key] for key in c.DETERMINISTIC} == c.DETERMINISTIC
    assert config.rollout.engine == "torch"
    assert build("replay.max_staleness=3").replay.max_staleness == 3


def test_a_deterministic_run_refuses_an_engine_that_is_not():
    with pytest.raises(ConfigError, match=r"run\.deterministic=true needs rollout\.engine=torch"):
        build("run.deterministic=true", "rollout.engine=vllm")


@pytest.mark.parametrize("value", ["1", "'true'", "'yes'"])
def test_a_deterministic_run_is_asked_for_by_true_alone(value: str):
    with pytest.raises(
        ConfigError, match=r"run\.deterministic=\S+: input should be a valid boolean"
    ):
        build(f"run.deterministic={value}")


def test_an_objective_sets_what_the_config_does_not():
    dapo = build("learner.objective.name=dapo").learner.objective
    assert (dapo.clip_high, dapo.aggregation, dapo.dual_clip) == (0.28, "token_mean", None)
    own = build("learner.objective.name=dapo", "learner.objective.clip_high=0.3").learner.objective
    assert (own.clip_high, own.aggregation) == (0.3, "token_mean")


def test_a_saved_config_is_read_back_as_it_was():
    config = build("learner.objective.name=gspo", "learner.objective.dual_clip=3")
    assert config.learner.objective.dual_clip == 3.0
    assert c.build(yaml.safe_load(c.to_yaml(config))) == config


def test_an_objective_without_a_hold_on_stale_samples_needs_fresh_ones():
    with pytest.raises(ConfigError, match="luffy_code neither clips nor weights own tokens"):
        build("learner.objective.name=luffy_code", "replay.max_staleness=1")
    build("learner.objective.name=luffy_code", "replay.max_staleness=0")
    clips = ("learner.objective.clip_low=0.2", "learner.objective.clip_high=0.2")
    build("learner.objective.name=luffy_code", "replay.max_staleness=1", *clips)


def test_every_objective_is_a_config():
    for name, kind in OBJECTIVES.items():
        found = build(f"learner.objective.name={name}", "replay.max_staleness=0")
        assert type(found.learner.objective) is kind


@pytest.mark.parametrize(
    ("overrides", "way_out"),
    [
        (["entropy_adapt=stepped"], "set entropy_target"),
        (["entropy_adapt=learned", "entropy_target=0.3"], "set entropy_coefficient"),
        (["kl_target=0.1"], "set kl_coefficient or kl_reward_coefficient"),
        (["name=dpo", "kl_reward_coefficient=0.1"], "isn't read by learner.objective.name=dpo"),
    ],
)
def test_a_coefficient_that_would_follow_nothing_is_refused(overrides, way_out):
    with pytest.raises(ConfigError, match=way_out):
        build(*(f"learner.objective.{one}" for one in overrides))


def test_the_least_length_of_a_response_is_within_the_greatest():
    with pytest.raises(ConfigError, match="min_new_tokens=9 is over max_new_tokens=8: lower"):
        build("rollout.min_new_tokens=9", "rollout.max_new_tokens=8")
    build("rollout.min_new_tokens=8", "rollout.max_new_tokens=8")


@pytest.mark.parametrize(
    ("overrides", "way_out"),
    [
        (["expert.per_group=0"], "no trace to cut"),
        (["expert.prefix_low=0.9", "expert.prefix_high=0.5"], "prefix_low=0.9 is over"),
        (["run.steps=null", "run.passes=1", "expert.prefix=linear"], "set expert.prefix_steps"),
        (["learner.source=offline"], "learner.source=ledger"),
    ],
)
def test_a_prefix_that_nothing_would_be_cut_for_is_refused(overrides, way_out):
    with pytest.raises(ConfigError, match=way_out):
        build("expert.per_group=1", "expert.prefix=fixed", *overrides)
    build("expert.per_group=1", "expert.prefix=cosine")


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("gsm8k", ["gsm8k"]),
        (["aime24", {"path": "a", "name": "own"}], ["aime24", "own"]),
        (
            "luffy-math",
            ["aime24", "aime25", "amc23", "math-500", "minerva", "olympiad-bench-675"],
        ),
        ([{"name": "luffy-other", "limit": 5}], ["arc-c", "gpqa-diamond", "mmlu-pro"]),
    ],
)
def test_evaluation_sets_may_be_named(given: Any, names: list[str]):
    config = build(data={"train": [{"path": "a"}], "evaluate": given})
    assert [one.name for one in config.data.evaluate] == names
    assert config.data.evaluate[0].path.count("/") >= 1
    assert c.read_config(c.to_yaml(config)) == config


@pytest.mark.parametrize("given", ["gsm8k", ["gsm8k"]])
def test_items_of_a_named_evaluation_set_are_named_by_index(given: Any):
    tree = {**TREE, "data": {"train": [{"path": "a"}], "evaluate": given}}
    (found,) = c.build(tree, ["data.evaluate.0.limit=5"]).data.evaluate
    assert (found.name, found.limit) == ("gsm8k", 5)
    (found,) = c.build(TREE, ["data.evaluate=gsm8k", "data.evaluate.0.limit=5"]).data.evaluate
    assert (found.name, found.limit) == ("gsm8k", 5)


def test_a_named_evaluation_set_may_have_settings_of_its_own():
    given = ["math-500", {"name": "aime24", "samples": 32, "temperature": 0.6}]
    config = build(data={"train": [{"path": "a"}], "evaluate": given})
    plain = build(data={"train": [{"path": "a"}], "evaluate": ["math-500", "aime24"]})
    assert config.data.evaluate[0] == plain.data.evaluate[0]
    own = {"samples": 32, "temperature": 0.6}
    assert config.data.evaluate[1] == plain.data.evaluate[1].model_copy(update=own)
    with pytest.raises(ConfigError, match=r"no evaluation set 'aime2' \(did you mean aime2"):
        build(data={"train": [{"path": "a"}], "evaluate": [{"name": "aime2", "samples": 32}]})


def test_a_system_prompt_may_be_a_file_whose_text_the_config_then_holds(tmp_path: Path):
    file = tmp_path / "system.txt"
    file.write_bytes(b"Think: first,\r\nthen answer: once.\n")
    config = build(f"data.system_prompt=file:{file}")
    assert config.data.system_prompt == "Think: first,\r\nthen answer: once."
    file.unlink()
    assert c.read_config(c.to_yaml(config)) == config
    with pytest.raises(ConfigError, match=r"system\.txt can't be read: No such file"):
        build(f"data.system_prompt=file:{file}")
    for content, said in ((b"file:a", "begins with file:"), (b"\xff", "isn't UTF-8")):
        file.write_bytes(content)
        with pytest.raises(ConfigError, match=said):
            build(f"data.system_prompt=file:{file}")


def test_an_unknown_evaluation_set_names_the_nearest():
    with pytest.raises(
        ConfigError, match=r"no evaluation set 'mat-500' \(did you mean math-500\?\)"
    ):
        build(data={"train": [{"path": "a"}], "evaluate": ["mat-500"]})


def test_every_named_evaluation_set_is_one_of_the_hub_or_a_file_with_a_known_form_and_rows():
    from tandem.common import evaluation_sets
    from tandem.common.hub import HubData
    from tandem.replay.forms import named_form

    on_the_hub = evaluation_sets.fetchable()
    for name in evaluation_sets.names():
        for entry in evaluation_sets.named(name):
            held_out = c.EvalSetConfig(**entry)
            assert held_out.rows is not None
            assert held_out.form is not None
            assert named_form(held_out.form)
            found = HubData.parse(held_out.path)
            if held_out.name in on_the_hub:
                assert found is not None
                assert found.split is not None
            else:
                assert held_out.path.startswith(f"benchmarks/{held_out.name}/")


def test_a_set_in_the_benchmarks_folder_is_read_from_there(tmp_path: Path):
    from tandem.common import evaluation_sets

    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "luffy-valid").mkdir()
    paths = [
        evaluation_sets.named(name, tmp_path)[0]["path"]
        for name in ("gsm8k", "luffy-valid", "math")
    ]
    assert paths == [
        str(tmp_path / "gsm8k"),
        str(tmp_path / "luffy-valid" / "valid.parquet"),
        "EleutherAI/hendrycks_math:test",
    ]


def test_sets_that_are_not_on_the_hub_are_not_fetched():
    from tandem.common import evaluation_sets

    assert list(evaluation_sets.fetchable(["luffy-other", "arc-c"])) == [
        *("arc-c", "gpqa-diamond", "mmlu-pro")
    ]
    with pytest.raises(ValueError, match=r"alpaca-eval isn't on the hub.*alpaca_eval\.json"):
        evaluation_sets.fetchable(["alpaca-eval"])


def test_a_held_out_set_may_have_its_own_way_of_sampling_and_grading():
    held = {"path": "b", "name": "b", "template": "r1_zero", "mode": "r1_zero", "top_p": 0.9}
    held |= {"samples": 4, "temperature": 0.6, "max_new_tokens": 7}
    config = build(
        data={"train": [{"path": "a"}], "evaluate": [held, {"path": "c"}], "stop": ["x"]}
    )
    own = c.of_set(config, config.data.evaluate[0])
    assert own.data.stops == ("</answer>",)
    assert own.reward.mode == "r1_zero"
    assert (own.evaluate.samples, own.evaluate.temperature, own.evaluate.top_p) == (4, 0.6, 0.9)
    assert own.rollout.max_new_tokens == 7
    assert c.of_set(config, config.data.evaluate[1]) is config


def test_a_set_that_is_not_graded_needs_no_gold_answer():
    config = build(data={"train": [{"path": "a"}], "evaluate": [{"path": "b", "graded": False}]})
    own = c.of_set(config, config.data.evaluate[0])
    assert [part.weight for part in own.reward.components] == [0.0]


def test_the_learners_hosts_share_its_ranks_evenly():
    assert build("learner.ranks=6", "learner.hosts=3").ranks_per_host == 2
    with pytest.raises(ConfigError, match=r"learner.hosts=4 doesn't divide learner.ranks=6"):
        build("learner.ranks=6", "learner.hosts=4")
    with pytest.raises(ConfigError, match=r"without credentials: set launch.bind to one private"):
        build("learner.ranks=2", "learner.hosts=2", "launch.bind=0.0.0.0")


def test_the_weight_channel_follows_the_runs_address_unless_it_is_told_otherwise():
    assert build().weights_interface == "127.0.0.1"
    assert build("launch.bind=10.0.0.1").weights_interface == "10.0.0.1"
    assert build("launch.bind=10.0.0.1").weights_bound.interface == "10.0.0.1"
    own = build("launch.bind=10.0.0.1", "weights.interface=ib0")
    assert own.weights_interface == "ib0"
    assert build("launch.bind=0.0.0.0").weights_interface == "127.0.0.1"


def test_a_learner_that_is_started_from_outside_leaves_something_to_start():
    offline = build("launch.learner=outside", learner={"source": "offline"})
    assert "launch.learner=outside leaves nothing to start" in str(why_not_started(offline))
