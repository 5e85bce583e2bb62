"""Logs in the form of Inspect's viewer (``.eval``), written without Inspect.

A log is a zip: ``header.json`` with everything but the samples, ``samples/ID_epoch_N.json`` for each sample, and
``summaries.json`` with a short form of all of them. What is written is the least that Inspect 0.3 reads and shows.
"""

from __future__ import annotations

import math
import os
import time
import zipfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import xxhash

RIGHT, WRONG, NO_ANSWER = "C", "I", "N"
"""Inspect's values of a score that isn't a number."""
MAIN = "answer"
"""Name of the score with these values; the others are numbers."""
LEVEL = 1
"""Of zip's compression: higher ones take several times as long for a tenth of the size."""
SHORT = 500
"""Characters of a text in the summaries."""
MOST_ID = 128
"""Characters of a sample's id."""
_UNSAFE = {ord(one): ":" for one in "/\\"} | dict.fromkeys(range(32), "_")
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class LogHead:
    """What a log is about."""

    task: str
    """Name of the set or the run."""
    model: str
    created: float
    """Seconds since 1970."""
    dataset: str = ""
    """Where the problems are from; empty = the task's name."""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """Inspect's ``GenerateConfig``: temperature, top_p, max_tokens, seed, stop_seqs."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Plain values."""


@dataclass(slots=True, kw_only=True)
class LogSample:
    """One sample. Those of one id, in their order, are Inspect's epochs."""

    id: str
    """Any text; what a file's name can't hold is replaced."""
    input: str
    """The prompt."""
    target: str
    """The gold answer."""
    messages: list[dict[str, Any]]
    """The conversation in Inspect's form, prompt included; the last one of the assistant is the output."""
    stop_reason: str
    """``stop``, ``max_tokens`` or ``unknown``."""
    is_right: bool | None
    """None = it wasn't graded."""
    answer: str | None = None
    """What the grader read."""
    explanation: str | None = None
    """What the grader says."""
    numbers: Mapping[str, float | None] = field(default_factory=dict)
    """Other scores by name. None and numbers that JSON can't hold are left out."""
    tokens: int = 0
    """Tokens of the response."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Plain values."""


def write_log(path: Path, head: LogHead, samples: Iterable[LogSample]) -> int:
    """Writes a log, so that a reader sees the old file, none or the whole new one; returns how many samples it has.

    Args:
        path: its name should end in ``.eval``.
        head: what it is about.
        samples: read once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=LEVEL) as log:
                count = _write(log, head, samples)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    return count


def _write(log: zipfile.ZipFile, head: LogHead, samples: Iterable[LogSample]) -> int:
    ids, epochs, summaries, totals = _Ids(), dict[str, int](), [], _Totals()
    for sample in samples:
        name = ids.safe(sample.id)
        epoch = epochs[name] = epochs.get(name, 0) + 1
        scores = _scores(sample)
        totals.add(scores, sample.tokens)
        key = {"id": name, "epoch": epoch}
        usage = {head.model: _usage(sample.tokens)}
        content = {
            **key,
            "input": sample.input,
            "target": sample.target,
            "messages": sample.messages,
            "output": _output(head.model, sample),
            "scores": scores,
            "metadata": sample.metadata,
            "model_usage": usage,
        }
        log.writestr(zipfile.ZipInfo(f"samples/{name}_epoch_{epoch}.json"), _json(content), **_WAY)
        summaries.append(
            {
                **key,
                "input": sample.input[:SHORT],
                "target": sample.target[:SHORT],
                "scores": {k: {**v, "explanation": None} for k, v in scores.items()},
                "metadata": {k: _short(v) for k, v in sample.metadata.items()},
                "model_usage": usage,
                "completed": True,
                "message_count": len(sample.messages),
            }
        )
    log.writestr(zipfile.ZipInfo("summaries.json"), _json(summaries), **_WAY)
    header = _header(head, epochs, totals)
    log.writestr(zipfile.ZipInfo("header.json"), _json(header), **_WAY)
    return len(summaries)


_WAY: Any = {"compress_type": zipfile.ZIP_DEFLATED, "compresslevel": LEVEL}


class _Ids:
    """Ids as a file's name can hold them: viewers look for a sample by its id in the file's name."""

    def __init__(self) -> None:
        self._safe: dict[str, str] = {}
        self._used: set[str] = set()

    def safe(self, name: str) -> str:
        known = self._safe.get(name)
        if known is not None:
            return known
        made = unique = name.translate(_UNSAFE)[:MOST_ID].strip(". ") or "sample"
        number = 1
        while unique in self._used:
            number += 1
            unique = f"{made}~{number}"
        self._used.add(unique)
        self._safe[name] = unique
        return unique


class _Totals:
    """Sums over samples."""

    def __init__(self) -> None:
        self.sums: dict[str, tuple[float, int]] = {}
        self.tokens = 0
        self.samples = 0

    def add(self, scores: Mapping[str, Mapping[str, Any]], tokens: int) -> None:
        self.tokens += tokens
        self.samples += 1
        for name, score in scores.items():
            value = score["value"]
            number = float(value == RIGHT) if isinstance(value, str) else float(value)
            total, count = self.sums.get(name, (0.0, 0))
            self.sums[name] = (total + number, count + 1)


def _scores(sample: LogSample) -> dict[str, dict[str, Any]]:
    value = NO_ANSWER if sample.is_right is None else RIGHT if sample.is_right else WRONG
    main = {"value": value, "answer": sample.answer, "explanation": sample.explanation}
    numbers = {
        name if name != MAIN else f"{MAIN}_": {"value": float(number)}
        for name, number in sample.numbers.items()
        if number is not None and math.isfinite(number)
    }
    return {MAIN: main, **numbers}


def _output(model: str, sample: LogSample) -> dict[str, Any]:
    said = [one for one in sample.messages if one["role"] == "assistant"]
    last = said[-1] if said else {"role": "assistant", "content": ""}
    return {
        "model": model,
        "choices": [{"message": last, "stop_reason": sample.stop_reason}],
        "usage": _usage(sample.tokens),
    }


def _usage(tokens: int) -> dict[str, int]:
    return {"input_tokens": 0, "output_tokens": tokens, "total_tokens": tokens}


def _header(head: LogHead, epochs: Mapping[str, int], totals: _Totals) -> dict[str, Any]:
    created = time.strftime("%Y-%m-%dT%H:%M:%S+00:00", time.gmtime(head.created))
    name = xxhash.xxh3_128_hexdigest(f"{head.task} {head.model} {head.created!r}".encode())[:22]
    scores = []
    for score, (total, count) in totals.sums.items():
        metric = "accuracy" if score == MAIN else "mean"
        scores.append(
            {
                "name": score,
                "scorer": score,
                "metrics": {metric: {"name": metric, "value": total / count}},
            }
        )
    return {
        "version": 2,
        "status": "success",
        "eval": {
            "eval_id": name,
            "run_id": name,
            "task_id": name,
            "created": created,
            "task": head.task,
            "dataset": {
                "name": head.dataset or head.task,
                "samples": len(epochs),
                "sample_ids": list(epochs),
            },
            "model": head.model,
            "config": {"epochs": max(epochs.values(), default=1)},
            "metadata": head.metadata,
        },
        "plan": {"name": "plan", "config": head.sampling},
        "results": {
            "total_samples": totals.samples,
            "completed_samples": totals.samples,
            "scores": scores,
        },
        "stats": {
            "started_at": created,
            "completed_at": created,
            "model_usage": {head.model: _usage(totals.tokens)},
        },
    }


def _short(value: Any) -> Any:
    if isinstance(value, str):
        return value[:SHORT]
    return value if value is None or isinstance(value, bool | int | float) else str(value)[:SHORT]


def _json(value: Any) -> bytes:
    """JSON, with null for numbers that it can't hold."""
    try:
        return _encode(value)
    except UnicodeEncodeError:
        # Lone surrogates, which a tokenizer's bytes may decode to.
        return _encode(_whole_letters(value))


def _whole_letters(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {_whole_letters(key): _whole_letters(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_whole_letters(one) for one in value]
    return value
