"""LUFFY's and verl's columns.

==============  =================================  ==========================================
column          type                               meaning
==============  =================================  ==========================================
data_source     string                             where the row is from
prompt          list of {role, content}            the messages before the answer
target          list of {role, content}, or null   one assistant message: the expert's trace
ability         string (may be absent)             what it exercises; ``math`` without it
reward_model    {style, ground_truth}              the gold answer
extra_info      struct (may be absent)             anything: split, index, …
*probs*         list of float (may be absent)      the expert's probability of each token of the
                                                   target and of its end token
==============  =================================  ==========================================

The columns are those of Yan et al., "Learning to Reason under Off-Policy Guidance" (arXiv 2504.14945).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ...common.records import Float32Array
from .form import Form
from .row import (
    Content,
    RowError,
    ability,
    as_messages,
    gold,
    is_deeper,
    is_missing,
    needed,
    plain,
    prompt,
    response,
    text,
    unread,
)

REQUIRED = ("data_source", "prompt", "reward_model")
PROBABILITY_COLUMNS = ("target_probs", "target_ds_qwen_7b_probs")
"""Column names for per-token teacher probabilities; the second is LUFFY's."""


def read(row: Mapping[str, Any]) -> Content:
    target, extra = _target(row), _extra(row)
    return Content(
        data_source=text(row, "data_source"),
        prompt=prompt(row, "prompt"),
        gold=_gold(row),
        target=target,
        ability=ability(row),
        extra=extra,
        kept_whole=tuple(extra),
        target_logprobs=_logprobs(row) if target is not None else None,
        unread=unread(row, "target") if target is not None else None,
    )


def _target(row: Mapping[str, Any]) -> str | None:
    # Some writers store an empty list or an empty text for "no target".
    target = row.get("target")
    if is_missing(target) or target in ([], ""):
        return None
    return response(row, "target")


def _gold(row: Mapping[str, Any]) -> str:
    model = row.get("reward_model")
    value = model.get("ground_truth") if isinstance(model, dict) else None
    if is_missing(value):
        raise RowError(
            "reward_model.ground_truth",
            value,
            "is missing",
            "give every row an answer to grade by, or leave the row out",
        )
    return gold(value, "reward_model.ground_truth")


def _extra(row: Mapping[str, Any]) -> dict[str, Any]:
    value = row.get("extra_info")
    if is_missing(value):
        return {}
    if not isinstance(value, dict):
        raise RowError("extra_info", value, "isn't a struct", "store named values")
    return {
        str(name): plain(inner)
        for name, inner in value.items()
        if not is_missing(inner) and not is_deeper(inner)
    }


def _logprobs(row: Mapping[str, Any]) -> Float32Array | None:
    column = next((name for name in PROBABILITY_COLUMNS if name in row), None)
    value = row.get(column) if column else None
    if not column or is_missing(value) or not value:
        return None
    way_out = "store one probability in (0, 1] for each token, or null for the whole row"
    if not isinstance(value, list):
        raise RowError(column, value, "isn't a list of probabilities", way_out)
    for probability in value:
        if (
            not isinstance(probability, int | float)
            or not math.isfinite(probability)
            or not 0 < probability <= 1 + 1e-6
        ):
            raise RowError(column, probability, "isn't a probability", way_out)
    return np.log(np.minimum(np.asarray(value, np.float64), 1.0)).astype(np.float32)


def write(content: Content) -> dict[str, Any]:
    target, logprobs = content.target, content.target_logprobs
    row = {
        "data_source": content.data_source or "unknown",
        "prompt": as_messages(content.prompt),
        "target": None if target is None else [{"role": "assistant", "content": target}],
        "ability": content.ability,
        "reward_model": {"style": "rule", "ground_truth": needed(content.gold, "gold", "luffy")},
        # Parquet can't hold a struct without fields.
        "extra_info": dict(content.extra) or None,
    }
    if logprobs is not None:
        row[PROBABILITY_COLUMNS[0]] = np.exp(logprobs.astype(np.float64)).tolist()
    return row


def _reads(present: Collection[str]) -> list[str]:
    # The longest columns by far: those that don't count aren't read.
    unused = [name for name in PROBABILITY_COLUMNS if name in present][1:]
    return [name for name in present if name not in unused]


FORM = Form(
    name="luffy",
    about="LUFFY, verl",
    columns=(REQUIRED,),
    also=("target", "ability", "extra_info"),
    read=read,
    write=write,
    of_extra=None,
    reads=_reads,
)
