"""Environments that can't be played or can't pay, as a config refuses them."""

from __future__ import annotations

from typing import Any

import pytest

from tandem.common.config import build
from tandem.common.config.environments import file_name
from tandem.common.errors import ConfigError

TREE: dict[str, Any] = {"run": {"steps": 10}, "data": {"train": [{"path": "a.parquet"}]}}
USE = "environments.use={one: {form: text, target: 'a.b:C'}}"
PAID = "reward.components=[{name: environment}]"


def test_what_can_be_played_is_accepted() -> None:
    build(TREE, [USE, PAID, "environments.mask_malformed=true"])
    build(TREE, [USE, PAID, "environments.port=8000"])


def test_environments_with_names_that_are_nearly_alike_have_files_of_their_own() -> None:
    names = ["a/b", "a-b", "a%2Fb", "a%b"]
    files = [file_name(name) for name in names]
    assert len(set(files)) == len(names)
    assert not any("/" in file for file in files)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([PAID], "environments.use is empty"),
        (["environments.mask_malformed=true"], "environments.use is empty"),
        (["learner.objective.turn_discount=0.9"], "environments.use is empty"),
        ([USE, "learner.source=offline"], "played by rollout workers"),
        ([USE, "expert.per_group=1"], "begins with what its environment shows"),
        ([USE, "data.template=r1_zero"], "rendered by the model's own chat template"),
        (
            [USE, "data.evaluate=[{path: x.parquet, template: r1_zero}]"],
            "data.evaluate.0.template=r1_zero is about prompts that are answered once",
        ),
        ([USE, "data.prefill=<think>"], "rendered by the model's own chat template"),
        ([USE, "rollout.min_new_tokens=4"], "responses of one turn"),
        (
            [USE, "environments.port=8000", "rollout.workers=2"],
            "only one can listen there: set environments.port=0, which takes free ones, or rollout.workers=1",
        ),
        ([USE, "environments.default=two"], "isn't one of environments.use: one"),
        (
            ["environments.use={one: {form: text, target: a b}}"],
            "environments.use.one.target='a b': should be an import path",
        ),
        (
            ["environments.use={one: {form: game, target: 'a:b'}}"],
            "environments.use.one.form='game': it should be one of tools, agent, text, verifiers, appworld",
        ),
        (
            ["environments.use={one: {target: 'a:b'}}"],
            "environments.use.one has no form: it should be one of tools, agent, text, verifiers, appworld",
        ),
        (
            ["environments.use={one: {form: text, target: 'a:b', parms: {}}}"],
            "config key environments.use.one.parms .did you mean environments.use.one.params",
        ),
        (
            ["environments.use={one: {form: text, target: 'a:b', python: x}}"],
            "config key environments.use.one.python .form text has form, target, params",
        ),
        (["environments.use={one: {form: text}}"], "environments.use.one.target"),
        ([USE, "environments.tools=xml"], "environments.tools"),
        (["environments.use={'': {form: text, target: 'a:b'}}"], "the name '' of 0 bytes"),
        ([f"environments.use={{{'n' * 201}: {{form: text, target: 'a:b'}}}}"], "of 201 bytes"),
        ([f"environments.use={{{'a/' * 51}: {{form: text, target: 'a:b'}}}}"], "of 204 bytes"),
        ([USE, "environments.max_turns=0"], "environments.max_turns"),
        ([USE, "environments.max_turns=10001"], "environments.max_turns"),
        ([USE, "environments.step_seconds=0"], "environments.step_seconds"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cant_be_played_is_refused_with_the_way_out(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words.replace("(", r"\(")):
        build(TREE, overrides)
