"""A response with a label that says whether it is a wanted one: ``prompt``, ``completion``, ``label``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from . import prompt_response
from .form import Form
from .row import Content, RowError, needed


def read(row: Mapping[str, Any]) -> Content:
    label = row.get("label")
    if not isinstance(label, bool):
        raise RowError("label", label, "isn't true or false", "store a boolean")
    rest = {name: value for name, value in row.items() if name != "label"}
    return replace(prompt_response.read(rest), label=label)


def write(content: Content) -> dict[str, Any]:
    row = prompt_response.write(content)
    label = needed(content.label, "label", "labelled")
    return {"completion": row.pop("response"), "label": label, **row}


FORM = Form(
    name="labelled",
    about="prompt/completion/label, as for KTO",
    columns=(("prompt", "completion", "label"), ("prompt", "response", "label")),
    also=prompt_response.FORM.also,
    read=read,
    write=write,
)
