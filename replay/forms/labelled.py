"""A response with a label that says whether it is a wanted one: ``label``, and the columns of ``prompt_response``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from . import prompt_response
from .form import Form
from .row import Content, RowError, needed, truth


def read(row: Mapping[str, Any]) -> Content:
    label = truth(row.get("label"))
    if label is None:
        way_out = "store a boolean, or set the form to prompt_response, for which it says nothing"
        raise RowError("label", row.get("label"), "isn't true or false", way_out)
    rest = {name: value for name, value in row.items() if name != "label"}
    return replace(prompt_response.read(rest), label=label)


def write(content: Content) -> dict[str, Any]:
    row = prompt_response.write(content)
    label = needed(content.label, "label", "labelled")
    response = row.pop("response")
    return {**row, "completion": response, "label": label}


FORM = Form(
    name="labelled",
    about="prompt/completion/label, as for KTO",
    columns=tuple((*pair, "label") for pair in prompt_response.FORM.columns),
    also=prompt_response.FORM.also,
    read=read,
    write=write,
)
