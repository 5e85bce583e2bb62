"""What a problem keeps of its row for the run's reward and its environment: columns, and the prompt's messages.

Most rewards ask for neither, and then a problem has what its form keeps. A function of the user's own may
name any column of the data set, also one that the form reads itself (``solution``, ``answer``), and is then
given it as it is in the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from ...common import prompts
from ...common.config import Config, DataConfig, EnvironmentsConfig
from ...common.errors import ConfigError, DataError
from ...common.records import ENVIRONMENT, PROMPT_MESSAGES
from ...replay.forms import DataRow, RowError
from ...replay.forms.row import DEEPEST, is_deeper, plain
from ...reward.grading import Grader
from ...rollout.endpoint.rendering import Renderer
from .texts import Characters

MAX_EXTRA = 1_000
"""Longest column that is kept for other rewards, in characters of its JSON."""
MAX_COLUMN = 20_000
"""Longest column that is kept for functions, in characters of its JSON."""
OWN_TO_TRAINING = frozenset(("prompt", "completion", "completion_ids", "messages", "conversations"))
"""Columns that functions get in another form, as ``prompts`` and ``completions``, or don't get, as in TRL."""
MAX_TASK = 1_000_000
"""Longest row that an environment is given, in characters of its JSON; every group of it carries it."""


def check_template(config: Config, tokenizer: Any) -> None:
    """Refuses environments whose messages this model's tokenizer can't render.

    Raises:
        ConfigError: it has no chat template, or one that has no place for tools.
    """
    forms = {spec.form for spec in config.environments.use.values()}
    # Agents may send tokens, and verifiers' renderers know some models' templates without a file.
    if forms - {"agent", "verifiers"} and not getattr(tokenizer, "chat_template", None):
        raise ConfigError(
            f"model.path={config.model.path} has no chat template, by which the messages of episodes become "
            f"tokens: put a chat_template.jinja into its folder, or name a model that has one"
        )
    if "tools" in forms and not isinstance(tokenizer, Characters):
        try:
            why = f"leaves out {lost}" if (lost := Renderer(tokenizer, 64).lost()) else ""
        except DataError as error:
            why = f"refuses a tool's result ({error})"
        if why:
            raise ConfigError(
                f"model.path={config.model.path} has a chat template that {why}, so no environment of form=tools can "
                f"be played: put another chat_template.jinja into its folder, name a model that was made for tools, "
                f"or set form=text, whose observations are messages of the user"
            )


def task_of(
    row: DataRow, environments: EnvironmentsConfig, data: DataConfig
) -> Mapping[str, Any] | None:
    """What an environment is given of a row: its name, and the row; None if the row is a prompt like any other.

    The row's ``prompt`` are the messages of its prompt, whatever the columns are that its form has for them, and
    with the config's system prompt.

    Raises:
        RowError: the row can't be played; the message says why.
    """
    column = environments.column
    named = row.raw.get(column)
    if not environments.is_on:
        if not row.content.prompt:
            raise RowError(
                column, named, "names an environment that isn't there", "set environments.use"
            )
        return None
    way_out = f"name one of {', '.join(environments.use)}"
    if named is not None and not isinstance(named, str):
        raise RowError(column, named, "isn't the name of an environment", way_out)
    try:
        name = environments.named(named)
    except ValueError as error:
        what = "isn't one of environments.use" if named else "names no environment"
        raise RowError(column, named, what, str(error)) from None
    given = {str(key): value for key, value in row.raw.items() if key != column}
    if is_deeper(given):
        raise RowError(
            column, named, f"has a row of over {DEEPEST} levels", "store deep values as JSON text"
        )
    task = plain(given)
    messages = [{"role": m.role, "content": m.content} for m in row.content.prompt]
    if messages and (
        not isinstance(task.get("prompt"), list)
        or data.remove_system
        or data.system_prompt is not None
    ):
        task["prompt"] = prompts.conversation(messages, data)
    if len(json.dumps(task)) > MAX_TASK:
        raise RowError(
            column,
            named,
            f"has a row of over {MAX_TASK:,} characters",
            "name a file in the row instead",
        )
    return {"name": name, "row": task}


def with_tests(row: DataRow, grader: Grader) -> DataRow:
    """The row with the tests that the reward runs: not every form keeps other columns."""
    extra = row.content.extra
    if grader.has_tests(extra):
        return row
    tests = {
        name: plain(of)
        for name, of in row.raw.items()
        if grader.has_tests({name: of}) and not is_deeper(of)
    }
    if not tests:
        return row
    return replace(row, content=replace(row.content, extra={**extra, **tests}))


def extra_of(
    row: DataRow,
    grader: Grader,
    data: DataConfig,
    task: Mapping[str, Any] | None,
    *,
    messages: bool = False,
) -> Mapping[str, Any]:
    """The problem's ``extra``: other columns as plain values, and what reward and environment ask for."""
    content = row.content
    extra: dict[str, Any] = {}
    if grader.wants_columns:
        extra |= _columns(row.raw)
    extra |= {
        name: value
        for name, value in content.extra.items()
        if name in content.kept_whole or _size(value) <= MAX_EXTRA
    }
    # Long tests stand last, as they did in 0.2.0: the digest of the data depends on the order.
    extra |= {name: of for name, of in content.extra.items() if grader.has_tests({name: of})}
    if grader.wants_messages or messages:
        prompt = [{"role": m.role, "content": m.content} for m in content.prompt]
        extra[PROMPT_MESSAGES] = prompts.conversation(prompt, data) if prompt else []
    if task is not None:
        extra[ENVIRONMENT] = task
    return extra


def _columns(raw: Mapping[str, Any]) -> dict[str, Any]:
    kept = {}
    for name, value in raw.items():
        if str(name) in OWN_TO_TRAINING or value is None or is_deeper(value):
            continue
        simple = plain(value)
        if _size(simple) <= MAX_COLUMN:
            kept[str(name)] = simple
    return kept


def _size(value: Any) -> int:
    """Characters of a plain value's JSON."""
    return len(value if isinstance(value, str) else json.dumps(value))


def broken(gold: str) -> bool:
    """Whether a gold answer is cut off or holds nothing to compare.

    Parsers of mathematics take such a text for a name and compare it letter by letter, so that
    every answer would be wrong.

    >>> [broken(gold) for gold in ("\\\\frac{1}{", "??", "[0, 1)", "\\\\{1, 2\\\\}", "∅")]
    [True, True, False, False, False]
    """
    plain = gold.replace("\\\\", "").replace("\\{", "").replace("\\}", "")
    depth = 0
    for character in plain:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return True
    return depth != 0 or not any(c.isalnum() or c in "∅∞" for c in plain)
