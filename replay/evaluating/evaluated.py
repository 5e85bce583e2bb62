"""What ``tandem evaluate`` keeps: every sample of every cell, and what a cell is.

A cell is one model on one benchmark with one temperature, top-p and template. The folder of an evaluation::

    plan.json                    the cells, as they were asked for; see :class:`Plan`
    cells/CELL/samples.jsonl     a finished cell's samples, one :class:`EvaluatedSample` a line, by problem,
                                 then sample
    cells/CELL/samples.parquet   the same, if it was asked for
    cells/CELL/part-N.jsonl      an unfinished cell's samples so far, in the order in which they came
    summary.json                 every figure, computed from the samples alone
    times.json                   what may differ between equal evaluations: seconds, tokens a second

Nothing in ``samples.jsonl`` depends on when, where or in how many attempts a sample was made.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ...common.errors import DataError
from ...common.plain import UNREADABLE, Count, Record, damaged, read_record, reason
from ...common.records import FinishReason, Verdict, Version
from ...common.run_folder import write_atomic

if TYPE_CHECKING:
    from ...common.config import Config

PLAN, SUMMARY, TIMES = "plan.json", "summary.json", "times.json"
SAMPLES, PARQUET, PARTS = "samples.jsonl", "samples.parquet", "part-*.jsonl"
_FAILURES = (Verdict.TIMEOUT, Verdict.MEMORY, Verdict.CRASHED, Verdict.JUDGE_FAILED)
"""Verdicts with which a component of the reward may have failed, whatever the answer is."""


class EvaluatedSample(Record, frozen=True, kw_only=True):
    """One response to a problem of a benchmark, graded."""

    problem_id: str
    """``<benchmark>/<row>``."""
    place: Count
    """Place of the problem in the benchmark, from 0."""
    sample: Count
    """Number of the response to this problem, from 0."""
    source: str
    """The data set's own name for where the row is from."""
    prompt: str
    """The prompt as the model got it."""
    response: str
    """The response without special tokens."""
    gold: str
    """The gold answer as the data set states it."""
    finish_reason: FinishReason
    """Why it ended."""
    verdict: Verdict
    """What the grader says."""
    answer: Verdict
    """What it says of the answer alone: ``verdict`` may be the failure of a component instead."""
    components: dict[str, float | None]
    """Every reward component by name, unweighted."""
    reward: float | None
    """The composed reward; None if there is no verdict to reward."""
    grader: str
    """``name@version`` of the grader."""
    tokens: Count
    """Number of tokens, the end token included."""
    logprob: float | None
    """Sum of the tokens' log-probs in nats, under the distribution that they were drawn from; None if it
    isn't known."""
    version: str = ""
    """Weights that sampled it, ``term.step``, oldest first; empty for a model without versions."""
    extracted: str | None = None
    """The answer that the grader read."""
    answer_class: Count | None = None
    """Number of the problem's first response whose answer is the same by the grader; None without an answer.
    What a majority is counted of."""
    subject: str | None = None
    """What the problem is about, if the data set says so."""
    level: str | None = None
    """How hard it is, if the data set says so."""
    second: Verdict | None = None
    """A second grader's verdict, if one was asked for."""
    question: str | None = None
    """What was asked, without the template; None if it is the prompt, or isn't one message."""
    token_ids: list[int] | None = None
    """The response's tokens, if they were asked for."""
    turns: Count | None = None
    """Number of the policy's turns, if it is an episode."""

    @property
    def asked(self) -> str:
        """What was asked, as people read it."""
        return self.prompt if self.question is None else self.question

    @property
    def versions(self) -> list[Version]:
        """The weights that sampled it, oldest first."""
        pairs = (one.split(".") for one in self.version.split())
        return [Version(term=int(term), step=int(step)) for term, step in pairs]

    @property
    def correctness(self) -> Verdict:
        """The verdict that the accuracy is counted by; a component that fails costs the reward, not the accuracy."""
        return self.answer if self.verdict in _FAILURES else self.verdict

    @property
    def correct(self) -> bool:
        """Whether the answer is right."""
        return self.correctness is Verdict.CORRECT

    @property
    def ungraded(self) -> bool:
        """Whether it isn't known, by no fault of its own, if the answer is right; it counts as not correct."""
        return self.correctness.leaves_baseline

    @property
    def formed(self) -> bool | None:
        """Whether it has the right form; None if no component says so."""
        value = self.components.get("format")
        return None if value is None else value > 0


class Cell(Record, frozen=True, kw_only=True):
    """One model on one benchmark with one way of sampling."""

    name: str
    """Unique in its evaluation, and the name of its folder."""
    model: str
    """The model as it was named."""
    benchmark: str
    """Name of the set."""
    template: str
    """``data.template``."""
    temperature: float
    """0 = greedy."""
    top_p: float
    """Share of the probability that is sampled from."""
    samples: int
    """Responses to each problem; one if they are greedy. A problem whose row is repeated has so many more."""
    max_new_tokens: int
    """Greatest length of a response in tokens."""
    stop: tuple[str, ...]
    """Strings that end a response."""
    mode: str
    """``reward.mode``."""
    seed: int
    """Seed of the noise."""
    second_mode: str | None = None
    """Mode of a second grader."""
    problems: int = 0
    """Number of problems."""
    data: str = ""
    """Digest of the problems as the model gets them."""
    weights: str = ""
    """Digest by which the model's weights are told from others; empty if they aren't in a folder."""

    @classmethod
    def of(
        cls, own: Config, *, name: str, model: str, benchmark: str, second_mode: str | None = None
    ) -> Cell:
        """The cell of a model on a set, by the config with the set's own settings in it."""
        sampling = own.evaluate
        return cls(
            name=name,
            model=model,
            benchmark=benchmark,
            template=own.data.template,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            samples=1 if sampling.temperature == 0 else sampling.samples,
            max_new_tokens=own.rollout.max_new_tokens,
            stop=own.data.stops,
            mode=own.reward.mode,
            seed=own.run.seed,
            second_mode=second_mode,
        )


class Plan(Record, frozen=True, kw_only=True):
    """What an evaluation is."""

    cells: tuple[Cell, ...]
    """All of its cells, those of a model after one another."""
    settings: dict[str, Any] = msgspec.field(default_factory=dict)
    """The config's other sections that the samples depend on."""
    token_ids: bool = False
    """Whether samples keep their tokens."""


class EvaluationFolder:
    """An evaluation's folder.

    Args:
        path: the folder; it may be missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan_json = path / PLAN
        self.summary = path / SUMMARY
        self.times = path / TIMES

    def cell(self, name: str) -> Path:
        """A cell's folder."""
        return self.path / "cells" / name

    def samples_file(self, name: str) -> Path:
        """A finished cell's samples; missing until then."""
        return self.cell(name) / SAMPLES

    def parts(self, name: str) -> list[Path]:
        """The files of an unfinished cell."""
        return sorted(self.cell(name).glob(PARTS))

    def plan(self) -> Plan:
        """What was asked for.

        Raises:
            DataError: the folder isn't an evaluation's.
        """
        try:
            content = self.plan_json.read_bytes()
        except OSError:
            raise DataError(
                f"{self.path} isn't an evaluation's folder: it has no {PLAN}; name one that "
                f"`tandem evaluate --to` has made"
            ) from None
        return read_record(Plan, content, str(self.plan_json), DataError)

    def finished(self) -> list[Cell]:
        """Cells whose samples are all there."""
        return [cell for cell in self.plan().cells if self.samples_file(cell.name).exists()]

    def samples(self, name: str) -> Iterator[EvaluatedSample]:
        """A finished cell's samples, by problem, then sample."""
        return read_samples(self.samples_file(name))


def line_of(sample: EvaluatedSample) -> bytes:
    """A sample as a line of JSON; absent values are left out."""
    return (
        msgspec.json.encode(
            {
                name: value
                for name in sample.__struct_fields__
                if (value := getattr(sample, name)) is not None or name in _SAID
            }
        )
        + b"\n"
    )


_SAID = ("reward", "logprob")
"""Fields without a default, whose None is written."""


def read_samples(path: Path) -> Iterator[EvaluatedSample]:
    """The samples of a file; a last line that a crash has cut is left out.

    Raises:
        DataError: the file is missing, or another line isn't a sample.
    """
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as error:
        raise DataError(f"{path} can't be read: {error.strerror}") from None
    with file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                yield _DECODER.decode(line)
            except UNREADABLE as error:
                why = f"can't be read: {reason(error, 'EvaluatedSample')}"
                raise damaged(f"line {number} of {path}", why, DataError) from None


_DECODER = msgspec.json.Decoder(EvaluatedSample)


def write_samples(path: Path, samples: Iterable[EvaluatedSample]) -> None:
    """Writes a cell's samples, as a whole or not at all, by problem, then sample."""
    ordered = sorted(samples, key=lambda one: (one.place, one.sample))
    write_atomic(path, b"".join(map(line_of, ordered)))


def write_parquet(path: Path, samples: Sequence[EvaluatedSample]) -> None:
    """Writes a cell's samples as parquet, with the components as JSON text."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rows = [
        {
            **{name: getattr(one, name) for name in one.__struct_fields__},
            "components": json.dumps(one.components),
        }
        for one in samples
    ]
    kinds: Mapping[str, Any] = {
        **dict.fromkeys(EvaluatedSample.__struct_fields__, pa.string()),
        **dict.fromkeys(("place", "sample", "tokens", "answer_class", "turns"), pa.int64()),
        **dict.fromkeys(("reward", "logprob"), pa.float64()),
        "token_ids": pa.list_(pa.int32()),
    }
    table = pa.Table.from_pylist(rows, schema=pa.schema(list(kinds.items())))
    part = path.with_name(f".{path.name}.part")
    pq.write_table(table, part)
    part.replace(path)
