"""What an evaluation and a run have kept, as samples of Inspect's logs.

A run's are those of ``samples.jsonl``, in logs of :data:`BLOCK` steps each: ``inspect/steps-000001-000020.eval``, …
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from ...common.config import Config
from ...common.parts import read_parts
from ...common.records import FinishReason, Verdict
from ...common.run_folder import RunFolder
from ..evaluating.evaluated import Cell, EvaluatedSample, EvaluationFolder
from .log import LogHead, LogSample, write_log

BLOCK = 20
"""Steps in one of a run's logs."""
LOGS = "*.eval"
_REASONS = {FinishReason.STOP.value: "stop", FinishReason.LENGTH.value: "max_tokens"}
_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_WRONG = frozenset(one.value for one in Verdict if not one.leaves_baseline) - {
    Verdict.CORRECT.value
}


# Evaluations.


def evaluation_logs(folder: EvaluationFolder) -> Iterator[Path]:
    """Writes a log for each finished cell that has none, beside its samples; yields those of all finished cells."""
    for cell in folder.finished():
        samples = folder.samples_file(cell.name)
        path = folder.cell(cell.name) / f"{cell.name}.eval"
        if not path.exists() or path.stat().st_mtime_ns < samples.stat().st_mtime_ns:
            head = head_of_cell(cell, created=samples.stat().st_mtime)
            write_log(path, head, map(of_evaluated, folder.samples(cell.name)))
        yield path


def head_of_cell(cell: Cell, *, created: float) -> LogHead:
    """What a cell's log is about."""
    return LogHead(
        task=cell.benchmark,
        model=cell.model,
        created=created,
        sampling={
            "temperature": cell.temperature,
            "top_p": cell.top_p,
            "max_tokens": cell.max_new_tokens,
            "seed": cell.seed,
            "stop_seqs": list(cell.stop),
        },
        metadata={"cell": cell.name, "template": cell.template, "mode": cell.mode},
    )


def of_evaluated(sample: EvaluatedSample) -> LogSample:
    """A response to a problem of a benchmark."""
    metadata = {
        "problem_id": sample.problem_id,
        "source": sample.source,
        "subject": sample.subject,
        "level": sample.level,
        "version": sample.version or None,
        "logprob": sample.logprob,
        "grader": sample.grader,
        "second": None if sample.second is None else sample.second.value,
    }
    return LogSample(
        id=sample.problem_id,
        input=sample.asked,
        target=sample.gold,
        messages=_exchange(sample.prompt, sample.response),
        stop_reason=_REASONS.get(sample.finish_reason.value, "unknown"),
        is_right=None if sample.ungraded else sample.correct,
        answer=sample.extracted,
        explanation=sample.verdict.value,
        numbers={"reward": sample.reward, **sample.components},
        tokens=sample.tokens,
        metadata={name: value for name, value in metadata.items() if value is not None},
    )


# Runs.


def run_logs(folder: RunFolder, config: Config) -> list[Path]:
    """Writes those of a run's logs that aren't there; returns all of them."""
    return [
        path if (path := log_path(folder, block)).exists() else write_run_log(folder, config, block)
        for block in _blocks(read_parts(folder.samples))
    ]


def _blocks(records: Iterable[Mapping[str, Any]]) -> Iterator[list[Mapping[str, Any]]]:
    for _, block in groupby(records, lambda record: block_of(record["step"])):
        yield list(block)


def write_run_log(folder: RunFolder, config: Config, block: Sequence[Mapping[str, Any]]) -> Path:
    """Writes a block's log in place of those that had fewer steps.

    Args:
        folder: the run's.
        config: its settings.
        block: records of ``samples.jsonl``, by step.
    """
    path = log_path(folder, block)
    head = LogHead(
        task=f"{folder.path.name} steps {block[0]['step']}-{block[-1]['step']}",
        model=config.model.path,
        created=time.time(),
        dataset=folder.path.name,
        sampling={
            "temperature": config.rollout.temperature,
            "max_tokens": config.rollout.max_new_tokens,
        },
        metadata={"template": config.data.template, "mode": config.reward.mode},
    )
    write_log(path, head, (sample for record in block for sample in of_record(record)))
    for other in path.parent.glob(f"steps-{block_of(block[0]['step']):06d}-{LOGS}"):
        if _last_step(other) < block[-1]["step"]:
            other.unlink(missing_ok=True)
    return path


def block_of(step: int) -> int:
    """The first step of a step's block."""
    return max(0, step - 1) // BLOCK * BLOCK + 1


def log_path(folder: RunFolder, block: Sequence[Mapping[str, Any]]) -> Path:
    """The log of some steps of one block."""
    first, last = block_of(block[0]["step"]), block[-1]["step"]
    return folder.inspect / f"steps-{first:06d}-{last:06d}.eval"


def _last_step(path: Path) -> int:
    """The last step of a log, by its name; 0 where that is no run's."""
    last = path.stem.rpartition("-")[2]
    return int(last) if last.isdecimal() else 0


def cut_logs(folder: RunFolder, step: int) -> list[Mapping[str, Any]]:
    """Removes the logs of steps above one, which are trained again, and returns what was kept of its block."""
    for path in folder.inspect.glob(LOGS):
        if _last_step(path) > step:
            path.unlink(missing_ok=True)
    block = block_of(step)
    return [one for one in read_parts(folder.samples) if block <= one["step"] <= step]


def of_record(record: Mapping[str, Any]) -> Iterator[LogSample]:
    """The rows of a group in ``samples.jsonl``."""
    step = record["step"]
    for row in record["rows"]:
        steps = [int(version.rpartition(".")[2]) for version in row.get("versions") or ()]
        metadata = {
            "step": step,
            "group_id": record.get("group_id"),
            "problem_id": record.get("problem_id"),
            "data_source": record.get("data_source"),
            "source": row.get("source"),
            "versions": " ".join(row.get("versions") or ()) or None,
            "staleness": step - 1 - record.get("later", 0) - min(steps) if steps else None,
            "replaced": row.get("replaced"),
            "trace_id": row.get("trace_id"),
            "worker": record.get("worker"),
            "environment": row.get("environment"),
            "failure": row.get("failure"),
            "detail": row.get("detail"),
            **{f"figure/{name}": value for name, value in (row.get("figures") or {}).items()},
        }
        verdict = row.get("verdict")
        yield LogSample(
            id=f"{step} {record.get('problem_id')}",
            input=record.get("prompt") or "",
            target=record.get("gold") or "",
            messages=_conversation(record.get("prompt") or "", row),
            stop_reason=_REASONS.get(row.get("finish_reason") or "", "unknown"),
            is_right=True
            if verdict == Verdict.CORRECT.value
            else False
            if verdict in _WRONG
            else None,
            answer=row.get("extracted"),
            explanation=verdict,
            numbers={"reward": row.get("reward"), **(row.get("components") or {})},
            tokens=row.get("tokens") or 0,
            metadata={name: value for name, value in metadata.items() if value is not None},
        )


# Messages.


def _exchange(prompt: str, response: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": response}]


def _conversation(prompt: str, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A response, or an episode's turns with what the environment said between them."""
    turns: Iterable[Mapping[str, Any]] = row.get("turns") or ()
    if not any("text" in turn for turn in turns):
        return _exchange(prompt, row.get("text") or "")
    messages: list[dict[str, Any]] = [{"role": "user", "content": prompt}]
    call = ""
    for number, turn in enumerate(turns):
        if turn.get("shown"):
            said: dict[str, Any] = {"role": "user", "content": turn["shown"]}
            if call:
                said = {**said, "role": "tool", "tool_call_id": call}
            messages.append(said)
        if "text" in turn:
            calls = _calls(turn["text"], number)
            call = calls[0]["id"] if calls else ""
            answer = {"role": "assistant", "content": turn["text"]}
            messages.append({**answer, **({"tool_calls": calls} if calls else {})})
    return messages


def _calls(text: str, turn: int) -> list[dict[str, Any]]:
    """Tool calls in a turn, where they are marked; in other forms they stay a part of its text."""
    found = []
    for number, one in enumerate(_CALL.findall(text)):
        try:
            value = json.loads(one)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and isinstance(value.get("name"), str):
            arguments = value.get("arguments")
            found.append(
                {
                    "id": f"call_{turn}_{number}",
                    "function": value["name"],
                    "arguments": arguments if isinstance(arguments, dict) else {},
                    "type": "function",
                }
            )
    return found
