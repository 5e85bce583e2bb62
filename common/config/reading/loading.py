"""Turns trees of presets, overrides and stored runs into a config, and a config back into YAML."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from ... import evaluation_sets
from ...errors import ConfigError
from ...objectives import DEFAULT, KEYS, OwnObjective, check_name, kind_of, reads, renamed
from ...objectives.keys import switched_off
from ..checks.choices import why_refused
from ..checks.deepspeed import content_of
from ..environments import FORMS
from ..learner import unread_by
from ..rollout import may_be_vllm
from ..tree import DETERMINISTIC, Config
from .text import copied, parse_value, parse_yaml, yaml_text


def valid_keys(section: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every key that an override or a preset may name, whichever objective and engine it has; ``N`` stands
    for the index of an entry of a list."""
    keys: list[str] = []
    for name, info in section.model_fields.items():
        if prefix + name == "learner.objective":
            keys.extend(f"{prefix}{name}.{key}" for key in ("name", *KEYS))
            continue
        nested, entry = _section_in(info.annotation), _entry_in(info.annotation)
        keys.extend(valid_keys(nested, f"{prefix}{name}.") if nested else [f"{prefix}{name}"])
        if entry is not None and (section_of_entry := _section_in(entry)):
            keys.extend(valid_keys(section_of_entry, f"{prefix}{name}.N."))
    return keys


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The section class of a field that holds one, or may be null instead."""
    return next(
        (p for p in _parts(annotation) if isinstance(p, type) and issubclass(p, BaseModel)), None
    )


def _entry_in(annotation: Any) -> Any:
    """The type of the entries of a field that holds a list; None for another field."""
    return next((get_args(p)[0] for p in _parts(annotation) if get_origin(p) is tuple), None)


def _parts(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)


def nearest_key(key: str) -> str:
    """`` — did you mean …?`` for a mistyped key, or the keys that the section holds."""
    number = next((part for part in key.split(".") if part.isdecimal()), "N")
    keys = [number.join(k.split("N")) if ".N." in k else k for k in valid_keys()]
    sections = sorted({k.rpartition(".")[0] for k in keys} - {""})
    # The right name in the wrong place (learner.lr) says more than similar letters.
    last = key.rpartition(".")[2]
    close = [k for k in keys if k.rpartition(".")[2] == last]
    close = [k for k in close if k.partition(".")[0] == key.partition(".")[0]] or close
    # The optimizer's before the critic's optimizer's.
    depth = min((k.count(".") for k in close), default=0)
    close = [k for k in close if k.count(".") == depth]
    if len(close) != 1:
        close = difflib.get_close_matches(key, [*keys, *sections], n=1, cutoff=0.6) or close[:1]
    if close:
        return f" (did you mean {close[0]}?)"
    section = key.rpartition(".")[0]
    siblings = [k for k in keys if k.rpartition(".")[0] == section]
    return f" (valid there: {', '.join(siblings)})" if siblings else ""


def parse_override(text: str) -> tuple[str, Any]:
    """Splits ``a.b=c`` into key and value; the value is read as YAML."""
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise ConfigError(f"{text!r} is not an override: write it as section.key=value")
    return key, parse_value(raw, f"the value of {key}, {raw!r},")


_IN_SHORT: dict[str, Callable[[Any], Any]] = {
    "data.evaluate": evaluation_sets.entries,
    "learner.deepspeed": content_of,
}
"""Settings that may name what they hold, and what writes it out before a part of it is set."""


def _set(tree: dict[str, Any], key: str, value: Any) -> None:
    parts = key.split(".")
    whole = ".".join(parts[:2])
    if len(parts) > 2 and whole in _IN_SHORT:
        section, name = _part(tree, parts[0]), parts[1]
        if name in section:
            try:
                section[name] = _IN_SHORT[whole](section[name])
            except ValueError as error:
                raise ConfigError(f"{whole}: {error}") from None
    node: Any = tree
    for place, part in enumerate(parts[:-1]):
        if isinstance(node, list):
            node = _item(node, parts, place)
            continue
        below = node.get(part)
        if not isinstance(below, dict | list):
            below = node[part] = _default_list(parts[: place + 1], key) or {}
        node = below
    if isinstance(node, list):
        _item(node, parts, len(parts) - 1)
        node[int(parts[-1])] = value
    else:
        node[parts[-1]] = value


def _item(node: list[Any], parts: list[str], place: int) -> Any:
    """The entry of a list that the key's part at this place names."""
    part = parts[place]
    if part.isdecimal() and int(part) < len(node):
        return node[int(part)]
    key, whole, count = ".".join(parts), ".".join(parts[:place]), len(node)
    if not count:
        raise ConfigError(f"{key}: {whole} is an empty list: set all of it, {whole}=[…]")
    raise ConfigError(
        f"{key}: {part!r} is not an index of {whole}, which has {count} entr{'ies' if count > 1 else 'y'}: "
        f"name one, {' or '.join(f'{whole}.{number}' for number in sorted({0, count - 1}))}"
    )


def _default_list(parts: list[str], key: str) -> list[Any]:
    """The entries that a list has if a preset doesn't name it; empty if the key is that of no list.

    Raises:
        ConfigError: the list has no entries by default.
    """
    section: type[BaseModel] | None = Config
    for part in parts[:-1]:
        info = None if section is None else section.model_fields.get(part)
        section = None if info is None else _section_in(info.annotation)
    if section is None or (info := section.model_fields.get(parts[-1])) is None:
        return []
    if _entry_in(info.annotation) is None:
        return []
    entries = [
        entry.model_dump(mode="json") if isinstance(entry, BaseModel) else entry
        for entry in info.get_default(call_default_factory=True) or ()
    ]
    if not entries:
        name = ".".join(parts)
        raise ConfigError(f"{key}: {name} has no entries: set all of it, {name}=[…]")
    return entries


def build(
    tree: Mapping[str, Any], overrides: Iterable[str] = (), *, stored: bool = False
) -> Config:
    """Validates a preset's tree with overrides put over it.

    Keys of the tree that belong to another objective, optimizer or engine than the config's are left out
    (:func:`unread_keys`); as overrides they are refused.

    Args:
        tree: sections of a preset.
        overrides: ``a.b=c``; later ones win.
        stored: whether the tree is from a run that was begun before, maybe by a version that refused
            less (:mod:`tandem.common.config.checks.choices`).

    Raises:
        ConfigError: an unknown key, a wrong type or values that don't go together; the
            message names the key, the value and the nearest valid key.
    """
    merged, _ = _merged(tree, overrides)
    try:
        config = Config.model_validate(merged)
    except ValidationError as error:
        raise ConfigError(_explain(error, _objective(merged).get("name", DEFAULT))) from None
    if not stored:
        check_name(config.learner.objective.name)
        if refusal := why_refused(config):
            raise ConfigError(refusal)
    return config


def unread_keys(tree: Mapping[str, Any], overrides: Iterable[str] = ()) -> list[str]:
    """Keys of a preset that :func:`build` leaves out, because the config's objective, optimizer or engine
    doesn't read them."""
    return _merged(tree, overrides)[1]


def switched_off_keys(tree: Mapping[str, Any], overrides: Iterable[str] = ()) -> list[str]:
    """Keys of the objective that a valid preset or its overrides set, and that nothing reads beside the others of its
    settings, each with those that are why."""
    section = _objective(_merged(tree, overrides)[0])
    kind = kind_of(str(section.get("name", DEFAULT)))
    if kind is OwnObjective:
        return []  # Its own code may read them.
    plain = kind()
    return [
        f"learner.objective.{key} ({why})"
        for key, why in switched_off(kind(**section)).items()
        # A preset may be what `tandem config` has printed.
        if section.get(key, getattr(plain, key)) != getattr(plain, key)
    ]


def with_overrides(tree: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A preset's tree with overrides put over it, not yet validated.

    Raises:
        ConfigError: something isn't an override, or names an item of a list that doesn't exist.
    """
    return _merged(tree, overrides)[0]


def _merged(tree: Mapping[str, Any], overrides: Iterable[str]) -> tuple[dict[str, Any], list[str]]:
    given = [parse_override(text) for text in overrides]
    # Done before any override is applied, so that their order doesn't matter.
    below, left_out = _of_kinds(tree, _put(copied(tree), given))
    return _put(below, given), left_out


def _put(tree: dict[str, Any], given: list[tuple[str, Any]]) -> dict[str, Any]:
    for key, value in given:
        _set(tree, key, copied(value))
    if _part(tree, "run").get("deterministic") is True:
        for key, value in DETERMINISTIC.items():
            _set(tree, key, value)
        if tree["rollout"].get("engine", "auto") == "auto":
            _set(tree, "rollout.engine", "torch")
    return tree


def of_kinds(tree: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a tree that the objective, the optimizer and the engine named by another tree read."""
    return _of_kinds(tree, other)[0]


def _of_kinds(
    tree: Mapping[str, Any], other: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The same tree, and the keys that were left out."""
    kept, left_out = copied(tree), []
    name = str(_objective(other).get("name", DEFAULT))
    if section := _objective(kept):
        unread = KEYS.difference(reads(kind_of(name))).intersection(section)
        left_out += [f"learner.objective.{key}" for key in unread]
        read = {key: value for key, value in section.items() if key not in unread}
        kept["learner"]["objective"] = renamed(read, name)
    learner, kind = _part(kept, "learner"), kind_of(name)
    if "values" not in kind.needs and kind is not OwnObjective and _part(learner, "critic"):
        left_out += [f"learner.critic.{key}" for key in learner.pop("critic")]
    if "divergence" not in kind.needs and kind is not OwnObjective and learner.get("teacher"):
        del learner["teacher"]
        left_out.append("learner.teacher")
    optimizer = _part(learner, "optimizer")
    named = _part(_part(other, "learner"), "optimizer").get("name", "adamw")
    for key in unread_by(str(named)):
        if optimizer.pop(key, None) is not None:
            left_out.append(f"learner.optimizer.{key}")
    rollout = _part(kept, "rollout")
    if not may_be_vllm(_part(other, "rollout").get("engine", "auto")):
        left_out += [f"rollout.vllm.{key}" for key in _part(rollout, "vllm")]
        rollout.pop("vllm", None)
    return kept, sorted(left_out)


def _part(tree: Mapping[str, Any], name: str) -> dict[str, Any]:
    part = tree.get(name)
    return part if isinstance(part, dict) else {}


def _objective(tree: Mapping[str, Any]) -> dict[str, Any]:
    return _part(_part(tree, "learner"), "objective")


def _explain(error: ValidationError, objective: Any) -> str:
    lines = []
    for problem in error.errors():
        place = [str(part) for part in problem["loc"]]
        form = None
        if place[:2] == ["learner", "objective"]:
            # The name of the objective's class isn't part of the key.
            del place[2:3]
        elif place[:2] == ["environments", "use"] and len(place) > 3:
            # Nor is the form of an environment.
            form = place.pop(3)
        key, value = ".".join(place), problem.get("input")
        if problem["type"].startswith("union_tag"):
            named = problem.get("ctx", {}).get("tag")
            said = f"{key}.form={named!r}: " if named is not None else f"{key} has no form: "
            lines.append(f"{said}it should be one of {', '.join(FORMS)}")
        elif problem["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            lines.append(_unknown(key, objective) if form is None else _unknown_of(key, form))
        elif problem["type"] == "value_error":
            message = str(problem.get("ctx", {}).get("error", problem["msg"]))
            shown = f"{key}: " if isinstance(value, Mapping) else f"{key}={value!r}: "
            lines.append(f"{shown}{message}" if key else message)
        else:
            lines.append(f"{key}={value!r}: {problem['msg'][0].lower()}{problem['msg'][1:]}")
    return "; ".join(lines)


def _unknown(key: str, objective: Any) -> str:
    section, _, last = key.rpartition(".")
    if section == "learner.objective" and last in KEYS:
        return (
            f"{key} isn't read by learner.objective.name={objective}: leave it out (`tandem config` "
            f"prints what is read)"
        )
    return f"unknown config key {key}{nearest_key(key)}"


def _unknown_of(key: str, form: str) -> str:
    """What is said of an unknown key of an environment of that form."""
    place, _, last = key.rpartition(".")
    valid = FORMS[form].model_fields
    near = difflib.get_close_matches(last, valid, n=1, cutoff=0.6)
    meant = f"did you mean {place}.{near[0]}?" if near else f"form {form} has {', '.join(valid)}"
    return f"unknown config key {key} ({meant})"


def read_yaml(path: Path) -> dict[str, Any]:
    """Reads a preset file as a tree.

    Raises:
        ConfigError: it can't be read, or isn't a YAML mapping.
    """
    if (path / "run.json").exists():
        raise ConfigError(
            f"{path} is a run's folder: to resume it, name its preset and run.dir={path}"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"there is no preset file {path}") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read as a preset: {error.strerror}") from None
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
    """The resolved tree with all defaults written out, as it is saved in the run's folder."""
    return yaml_text(config.model_dump(mode="json"))
