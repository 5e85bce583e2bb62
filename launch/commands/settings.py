"""A config as YAML with comments, which are the docstrings of its fields."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import fields, is_dataclass
from typing import Any

from pydantic import BaseModel

from ...common.config import yaml_text


def meanings(section: type) -> dict[str, str]:
    """Field to the docstring below it, in the class or in one that it derives from, on one line."""
    texts: dict[str, str] = {}
    for kind in reversed(section.__mro__):
        if not (is_dataclass(kind) or (issubclass(kind, BaseModel) and kind is not BaseModel)):
            continue
        body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
        assert isinstance(body, ast.ClassDef)
        field = None
        for node in body.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                field = node.target.id
            elif field and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                texts[field] = " ".join(str(node.value.value).split()).replace("``", "")
                field = None
            else:
                field = None
    return texts


def commented(section: Any, indent: str = "") -> str:
    """A config as YAML that reads back as the same tree, with each key below its meaning."""
    lines: list[str] = []
    texts = meanings(type(section))
    for name in _names(section):
        value = getattr(section, name)
        if isinstance(value, BaseModel) or is_dataclass(value):
            about = " ".join((type(value).__doc__ or "").split("\n\n")[0].split())
            about = about.replace("``", "").replace(":mod:", "").replace("`", "")
            lines.append(f"{indent}{name}:  # {about}")
            lines.append(commented(value, indent + "  ").rstrip("\n"))
            continue
        if name in texts:
            lines += textwrap.wrap(
                texts[name].replace(":mod:", "").replace("`", ""),
                width=96,
                initial_indent=f"{indent}# ",
                subsequent_indent=f"{indent}# ",
            )
        if isinstance(section, BaseModel):
            value = section.model_dump(mode="json", include={name})[name]
        dumped = yaml_text({name: value}, width=10_000)
        lines.append(textwrap.indent(dumped, indent).rstrip("\n"))
    return "\n".join(lines) + "\n"


def _names(section: Any) -> list[str]:
    if isinstance(section, BaseModel):
        return list(type(section).model_fields)
    return [field.name for field in fields(section)]
