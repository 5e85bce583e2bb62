"""YAML as Tandem reads and writes it: presets, overrides and the settings of stored runs.

It is PyYAML's safe YAML with one difference: numbers with an exponent are read as in YAML 1.2, so
that ``1e-6`` is a number as it is everywhere else. Text is quoted by the same rule when written.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from ...errors import ConfigError
from ...plain import one_line
from ...printable import printable

_FLOAT = "tag:yaml.org,2002:float"
_FLOAT_1_2 = re.compile(
    r"""^(?:[-+]?(?:\.[0-9]+|[0-9]+\.[0-9]*)(?:[eE][-+]?[0-9]+)?
    |[-+]?[0-9]+[eE][-+]?[0-9]+
    |[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$""",
    re.VERBOSE,
)
_RESOLVERS = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _FLOAT]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _first in "-+.0123456789":
    _RESOLVERS[_first].append((_FLOAT, _FLOAT_1_2))

_MARKS = (yaml.DocumentStartToken, yaml.DocumentEndToken)

MOST_NODES = 100_000
MOST_LEVELS = 32


class _Loader(yaml.SafeLoader):
    yaml_implicit_resolvers = _RESOLVERS

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """PyYAML would take the last value of a key that a mapping has twice, without a word."""
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.value == "<<":
                continue
            line = key.start_mark.line + 1
            if (first := lines.get((key.tag, key.value))) is not None:
                raise yaml.YAMLError(
                    f"the key {key.value} is in line {first} and again in line {line}: put both into one"
                )
            lines[key.tag, key.value] = line
        return node


class _Dumper(yaml.SafeDumper):
    yaml_implicit_resolvers = _RESOLVERS


def parse_yaml(text: str, what: str) -> Any:
    """Reads a YAML document as plain dicts, lists and scalars that share nothing.

    Args:
        text: the document.
        what: names it in the error.

    Raises:
        ConfigError: it can't be read, or is larger than any config.

    >>> parse_yaml("{lr: 1e-6, name: '007'}", "it")
    {'lr': 1e-06, 'name': '007'}
    """
    try:
        tree = yaml.load(text, _Loader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{what} can't be read as YAML: {one_line(error)}") from None
    return copied(tree)


def parse_value(text: str, what: str) -> Any:
    """Reads a value that was typed on a command line as YAML, of which nothing may be left out.

    Raises:
        ConfigError: see :func:`parse_yaml`, or YAML would take a part of it for a comment or for the mark of a document, or
            it is Python's None, which YAML would take for a text.
    """
    value = parse_yaml(text, what)
    if text.strip() == "None":
        raise ConfigError(
            f"{what} would be a text: write null for no value, or \"'None'\" for that text"
        )
    end, lost = 0, ""
    for token in yaml.scan(text, _Loader):
        if not isinstance(token, _MARKS):
            lost += text[end : token.start_mark.index]
            end = token.end_mark.index
    if lost := (lost + text[end:]).strip():
        raise ConfigError(
            f"{what} loses {lost!r}, which YAML takes for a comment or for the mark of a document: put text in quotes, "
            f"{json.dumps(text.strip(), ensure_ascii=False)}, or leave that part out"
        )
    return value


def copied(node: Any, counted: Iterator[int] | None = None, depth: int = 0) -> Any:
    """A deep copy of a tree.

    Raises:
        ConfigError: it has more than :data:`MOST_NODES` values or :data:`MOST_LEVELS` levels.
    """
    counted = itertools.count() if counted is None else counted
    # YAML's anchors can turn a small file into an endless tree.
    if next(counted) > MOST_NODES or depth > MOST_LEVELS:
        raise ConfigError(
            f"a config of more than {MOST_NODES:,} values or {MOST_LEVELS} levels: do its YAML "
            f"anchors refer to themselves?"
        )
    if isinstance(node, Mapping):
        return {k: copied(v, counted, depth + 1) for k, v in node.items()}
    if isinstance(node, list | tuple):
        return [copied(v, counted, depth + 1) for v in node]
    return node


def yaml_text(tree: Any, *, width: int | None = None) -> str:
    """A tree as YAML that is safe to display and reads back unchanged.

    If it holds invisible characters, everything outside ASCII is written as escapes.
    """
    text = _dumped(tree, width, allow_unicode=True)
    return text if printable(text) == text else _dumped(tree, width, allow_unicode=False)


def _dumped(tree: Any, width: int | None, *, allow_unicode: bool) -> str:
    text: str = yaml.dump(
        tree, Dumper=_Dumper, sort_keys=False, allow_unicode=allow_unicode, width=width
    )
    return text
