"""Trees of presets, overrides and stored runs made into a config, and back into YAML."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from ..errors import ConfigError
from ..objectives import renamed
from .choices import why_refused
from .text import copied, parse_yaml, yaml_text
from .tree import DETERMINISTIC, Config


def valid_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every key that an override or a preset may name."""
    keys: list[str] = []
    for name, info in section.model_fields.items():
        annotation = info.annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            keys.extend(valid_keys(annotation, f"{prefix}{name}."))
        else:
            keys.append(f"{prefix}{name}")
    return keys


def nearest_key(key: str) -> str:
    """`` — did you mean …?`` for a mistyped key, or what the section holds."""
    keys = valid_keys()
    sections = sorted({k.rpartition(".")[0] for k in keys} - {""})
    # The right name in the wrong place (learner.lr) says more than letters that look alike.
    last = key.rpartition(".")[2]
    close = [k for k in keys if k.rpartition(".")[2] == last]
    close = [k for k in close if k.partition(".")[0] == key.partition(".")[0]] or close
    if len(close) != 1:
        close = difflib.get_close_matches(key, [*keys, *sections], n=1, cutoff=0.6) or close[:1]
    if close:
        return f" (did you mean {close[0]}?)"
    section = key.rpartition(".")[0]
    siblings = [k for k in keys if k.rpartition(".")[0] == section]
    return f" (valid there: {', '.join(siblings)})" if siblings else ""


def parse_override(text: str) -> tuple[str, Any]:
    """``a.b=c`` as key and value; the value is read as YAML."""
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"{text!r} is not an override: write it as section.key=value")
    return key, parse_yaml(raw, f"the value of {key}, {raw!r},")


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    parts = key.split(".")
    node: Any = tree
    for part in parts[:-1]:
        if isinstance(node, list):
            node = _item(node, part, key)
            continue
        below = node.setdefault(part, {})
        if not isinstance(below, dict | list):
            below = node[part] = {}
        node = below
    if isinstance(node, list):
        _item(node, parts[-1], key)
        node[int(parts[-1])] = value
    else:
        node[parts[-1]] = value


def _item(node: list[Any], part: str, key: str) -> Any:
    if not part.isdigit() or int(part) >= len(node):
        raise ConfigError(f"{key}: {part!r} is not an index of a list of {len(node)}")
    return node[int(part)]


def build(
    tree: Mapping[str, Any], overrides: Iterable[str] = (), *, stored: bool = False
) -> Config:
    """Validates a preset's tree with overrides put over it.

    An override that names another objective than the tree takes that name's own settings
    (:func:`~tandem.common.objectives.renamed`).

    Args:
        tree: Sections of a preset.
        overrides: ``a.b=c``, later ones win.
        stored: The tree is of a run that was begun before, maybe by a version that refused less
            (:mod:`tandem.common.config.choices`).

    Raises:
        ConfigError: an unknown key, a wrong type or values that don't go together; the
            message names the key, the value and the nearest valid key.
    """
    merged = copied(tree)
    given = [parse_override(text) for text in overrides]
    _rename(merged, dict(given).get("learner.objective.name"))
    for key, value in given:
        _set(merged, key, value)
    _make_deterministic(merged)
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_explain(error)) from None
    if not stored and (refusal := why_refused(config)):
        raise ConfigError(refusal)
    return config


def _make_deterministic(tree: dict[str, Any]) -> None:
    run = tree.get("run")
    if not isinstance(run, Mapping) or run.get("deterministic") is not True:
        return
    for key, value in DETERMINISTIC.items():
        _set(tree, key, value)
    if tree["rollout"].get("engine", "auto") == "auto":
        _set(tree, "rollout.engine", "torch")


def _rename(tree: dict[str, Any], name: Any) -> None:
    learner = tree.get("learner")
    if name is not None and isinstance(learner, dict):
        section = learner.get("objective")
        if isinstance(section, dict):
            learner["objective"] = renamed(section, str(name))


def _explain(error: ValidationError) -> str:
    lines = []
    for problem in error.errors():
        key = ".".join(str(part) for part in problem["loc"])
        value = problem.get("input")
        if problem["type"] == "extra_forbidden":
            lines.append(f"unknown config key {key}{nearest_key(key)}")
        elif problem["type"] == "value_error" and not key:
            lines.append(str(problem.get("ctx", {}).get("error", problem["msg"])))
        else:
            lines.append(f"{key}={value!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}")
    return "; ".join(lines)


def read_yaml(path: Path) -> dict[str, Any]:
    """A preset file as a tree.

    Raises:
        ConfigError: it is missing, or isn't a YAML mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no preset file {path}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} can't be read as YAML: {error}") from None
    tree = parse_yaml(text, str(path))
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} should hold a mapping of sections, not {type(tree).__name__}")
    return tree


def read_config(text: str) -> Config:
    """The inverse of :func:`to_yaml`.

    Raises:
        ConfigError: it isn't a resolved config.
    """
    tree = parse_yaml(text, "the run's config")
    if not isinstance(tree, dict):
        raise ConfigError(f"the run's config should be a mapping, not {type(tree).__name__}")
    return build(tree, stored=True)


def to_yaml(config: Config) -> str:
    """The resolved tree, all defaults written out, as it is saved in the run's folder."""
    return yaml_text(config.model_dump(mode="json"))
