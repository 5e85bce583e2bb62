"""The settings with their meaning: the docstrings of the config's fields as YAML comments."""

from __future__ import annotations

import ast
import inspect
import textwrap

from pydantic import BaseModel

from ...common.config import yaml_text


def meanings(section: type[BaseModel]) -> dict[str, str]:
    """Field to the docstring that stands under it in the class, on one line."""
    body = ast.parse(textwrap.dedent(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    found: dict[str, str] = {}
    field = None
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            field = node.target.id
        elif field and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            found[field] = " ".join(str(node.value.value).split()).replace("``", "")
            field = None
        else:
            field = None
    return found


def commented(config: BaseModel, section: type[BaseModel], indent: str = "") -> str:
    """A config as YAML that reads back as the same tree, each key under its meaning."""
    lines: list[str] = []
    told = meanings(section)
    for name, info in section.model_fields.items():
        value = getattr(config, name)
        if isinstance(info.annotation, type) and issubclass(info.annotation, BaseModel):
            about = " ".join((info.annotation.__doc__ or "").split("\n\n")[0].split())
            about = about.replace("``", "").replace(":mod:", "").replace("`", "")
            lines.append(f"{indent}{name}:  # {about}")
            lines.append(commented(value, info.annotation, indent + "  ").rstrip("\n"))
            continue
        if name in told:
            lines += textwrap.wrap(
                told[name].replace(":mod:", "").replace("`", ""),
                width=96,
                initial_indent=f"{indent}# ",
                subsequent_indent=f"{indent}# ",
            )
        dumped = yaml_text({name: config.model_dump(mode="json")[name]}, width=10_000)
        lines.append(textwrap.indent(dumped, indent).rstrip("\n"))
    return "\n".join(lines) + "\n"
