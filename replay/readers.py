"""Reads problems and expert traces from parquet with LUFFY's columns. Parses only: no tokenising.

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
Anything else raises a ``DataError`` that names file, row, column, value and way out.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ..common.errors import DataError
from ..common.records import Float32Array

REQUIRED = ("data_source", "prompt", "reward_model")
PROBABILITY_COLUMNS = ("target_probs", "target_ds_qwen_7b_probs")
"""Column names for per-token teacher probabilities; the second is LUFFY's."""
ROLES = ("system", "user", "assistant")
SHOWN = 60
BATCH_ROWS = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message of a prompt."""

    role: str
    """system, user or assistant."""
    content: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProblemRow:
    """One row of a data set, as stated there."""

    row: int
    """Row number from 0, counted over all files of the source, sorted by name."""
    data_source: str
    """The data set's own name for where the row is from."""
    prompt: tuple[Message, ...]
    """At least one message."""
    target: str | None
    """The expert's trace as text; None without one."""
    ability: str
    """What the row exercises."""
    gold: str
    """The gold answer, not empty."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """``extra_info`` as plain values; None for an absent value."""
    target_logprobs: Float32Array | None = None
    """``[tokens of the target + 1]`` nats, under the expert's own tokenizer; None if unknown."""


def read_rows(path: Path) -> list[ProblemRow]:
    """All rows of a parquet file, or of the ``.parquet`` files in a folder, sorted by name.

    Raises:
        DataError: a missing or unreadable file, a missing column, an empty data set, or a row
            with a value that doesn't belong in its column.
    """
    return list(iterate_rows(path))


def iterate_rows(path: Path) -> Iterator[ProblemRow]:
    """Like :func:`read_rows`, one row at a time."""
    number = 0
    for file in parquet_files(path):
        for row in _read_file(file, number):
            yield row
            number += 1
    if number == 0:
        raise DataError(f"{path} holds no rows: name a file with at least one problem")


def parquet_files(path: Path) -> list[Path]:
    """The files of a source; raises ``DataError`` if there are none."""
    if path.is_dir():
        files = sorted(p for p in path.glob("*.parquet") if not p.name.startswith("."))
        if not files:
            raise DataError(f"{path} is a folder without .parquet files")
        return files
    if not path.exists():
        raise DataError(
            f"{path} is missing: give the path of a parquet file or of a folder of them"
        )
    return [path]


def _read_file(path: Path, first: int) -> Iterator[ProblemRow]:
    try:
        file = pq.ParquetFile(path)
    except (OSError, pa.ArrowException) as error:
        raise DataError(f"{path} can't be read as parquet: {error}") from None
    with file:
        present = file.schema_arrow.names
        for column in REQUIRED:
            if column not in present:
                raise DataError(
                    f"{path} has no column {column!r} (it has {', '.join(present)}): rename or "
                    f"add it; the columns are those of LUFFY's data set"
                )
        probabilities = next((c for c in PROBABILITY_COLUMNS if c in present), None)
        wanted = [
            c
            for c in (*REQUIRED, "target", "ability", "extra_info", probabilities)
            if c is not None and c in present
        ]
        index = 0
        try:
            for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=wanted):
                for plain in batch.to_pylist():
                    yield _Row(path, index, plain).parse(first + index, probabilities)
                    index += 1
        except (OSError, pa.ArrowException) as error:
            raise DataError(f"{path} is damaged after row {index}: {error}") from None


class _Row:
    """One row while it is parsed; it knows its place, for the errors."""

    def __init__(self, path: Path, index: int, plain: dict[str, Any]) -> None:
        self.path = path
        self.index = index
        self.plain = plain

    def parse(self, number: int, probabilities: str | None) -> ProblemRow:
        target = self._target()
        return ProblemRow(
            row=number,
            data_source=self._text("data_source"),
            prompt=self._prompt(),
            target=target,
            ability=self._text("ability") if self.plain.get("ability") is not None else "math",
            gold=self._gold(),
            extra=self._extra(),
            target_logprobs=self._logprobs(probabilities) if target is not None else None,
        )

    def _wrong(self, column: str, value: Any, what: str, way_out: str) -> DataError:
        shown = repr(value)
        if len(shown) > SHOWN:
            shown = shown[:SHOWN] + "…"
        return DataError(
            f"{self.path} row {self.index}, column {column}: {shown} {what}: {way_out}"
        )

    def _text(self, column: str) -> str:
        value = self.plain.get(column)
        if not isinstance(value, str) or not value:
            raise self._wrong(column, value, "isn't a name", "give the row one, as text")
        return value

    def _messages(self, column: str) -> tuple[Message, ...]:
        value = self.plain.get(column)
        way_out = "store a list of {'role': …, 'content': …}"
        if not isinstance(value, list) or not value:
            raise self._wrong(column, value, "isn't a list of messages", way_out)
        messages = []
        for item in value:
            if not isinstance(item, dict) or not {"role", "content"} <= item.keys():
                raise self._wrong(column, item, "isn't a message", way_out)
            role, content = item["role"], item["content"]
            if role not in ROLES:
                raise self._wrong(column, role, "isn't a role", f"use one of {', '.join(ROLES)}")
            if not isinstance(content, str) or not content:
                raise self._wrong(
                    column, content, f"is the content of a {role} message", "it must be text"
                )
            messages.append(Message(role=role, content=content))
        return tuple(messages)

    def _prompt(self) -> tuple[Message, ...]:
        messages = self._messages("prompt")
        if messages[-1].role == "assistant":
            raise self._wrong(
                "prompt",
                messages[-1].content,
                "is an assistant's message at the end",
                "a prompt ends with what is asked; put the answer into target",
            )
        return messages

    def _target(self) -> str | None:
        # Some writers of parquet store an empty list for "no target".
        if not self.plain.get("target") and self.plain.get("target") in (None, []):
            return None
        messages = self._messages("target")
        if len(messages) != 1:
            raise self._wrong(
                "target",
                self.plain["target"],
                f"has {len(messages)} messages",
                "a trace is one assistant message; make a row of each",
            )
        if messages[0].role != "assistant":
            raise self._wrong(
                "target", messages[0].role, "is the role of the trace", "it must be assistant"
            )
        return messages[0].content

    def _gold(self) -> str:
        model = self.plain.get("reward_model")
        gold = model.get("ground_truth") if isinstance(model, dict) else None
        way_out = "give every row an answer to grade by, or leave the row out"
        if isinstance(gold, bool) or not isinstance(gold, str | int | float):
            what = "isn't a gold answer" if gold is not None else "is no gold answer"
            raise self._wrong("reward_model.ground_truth", gold, what, way_out)
        text = str(gold)
        if not text.strip():
            raise self._wrong("reward_model.ground_truth", gold, "is empty", way_out)
        return text

    def _extra(self) -> dict[str, Any]:
        value = self.plain.get("extra_info")
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise self._wrong("extra_info", value, "isn't a struct", "store named values")
        return {str(name): self._plain(inner) for name, inner in value.items()}

    def _plain(self, value: Any) -> Any:
        """Values that may travel; parquet's other types (dates, decimals) become text."""
        if isinstance(value, dict):
            return {str(name): self._plain(inner) for name, inner in value.items()}
        if isinstance(value, list | tuple):
            return [self._plain(inner) for inner in value]
        if value is None or isinstance(value, str | int | float | bool):
            return value
        return str(value)

    def _logprobs(self, column: str | None) -> Float32Array | None:
        value = self.plain.get(column) if column else None
        if not column or not value:
            return None
        way_out = "store one probability in (0, 1] for each token, or null for the whole row"
        if not isinstance(value, list):
            raise self._wrong(column, value, "isn't a list of probabilities", way_out)
        for probability in value:
            if (
                not isinstance(probability, int | float)
                or not math.isfinite(probability)
                or not 0 < probability <= 1 + 1e-6
            ):
                raise self._wrong(column, probability, "isn't a probability", way_out)
        return np.log(np.minimum(np.asarray(value, np.float64), 1.0)).astype(np.float32)
