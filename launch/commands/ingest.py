"""Checks data files without training on them: which rows can be used, and why the others can't.

A file's form is found by its columns, or named with --form. With --write the rows that can be used are
written in any form, one file for all that is read.
"""

from __future__ import annotations

import argparse
import json
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...common import hub
from ...common.errors import ConfigError, DataError
from ...common.printable import printable
from ..progress import Progress
from .options import output_file

if TYPE_CHECKING:
    from ...common.config import Config, SourceConfig
    from ...common.records import ExpertTrace, Problem
    from ...replay.forms import Content, DataRow
    from ...replay.forms.write import RowWriter
    from ..ingest.counts import SourceCounts
    from ..ingest.rows import SourceReader

UNLIMITED = 10**9
"""Limit of tokens where no preset names one."""
PERCENTILES = (50, 90, 99, 100)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "words",
        nargs="+",
        metavar="FILE or KEY=VALUE",
        help="data files, folders or names on the hub (org/set:split); settings",
    )
    parser.add_argument("--preset", metavar="NAME", help="count as a run of this preset does")
    parser.add_argument(
        "--model", metavar="DIR", help="whose tokenizer counts; without one, characters are counted"
    )
    parser.add_argument("--form", metavar="NAME", help="the files' form (data.train.N.form)")
    parser.add_argument(
        "--turns",
        choices=("last", "all"),
        default="last",
        help="answers of a conversation that are learned from (data.train.N.turns)",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="at most N rows of each file")
    parser.add_argument("--seed", type=int, metavar="N", help="draw them at random")
    parser.add_argument(
        "--correct", action="store_true", help="only rows whose response is graded correct"
    )
    parser.add_argument(
        "--except",
        dest="without",
        metavar="FILE",
        help="leave out rows whose question is in this file (the complement of a set)",
    )
    parser.add_argument("--write", metavar="OUT.parquet", help="write the rows that can be used")
    parser.add_argument("--as", dest="into", metavar="FORM", help="in this form (default: luffy)")
    parser.add_argument("--json", action="store_true", help="print the table as JSON")


@dataclass(slots=True)
class _Lengths:
    """Lengths in tokens, for percentiles."""

    prompts: array[int] = field(default_factory=lambda: array("i"))
    responses: array[int] = field(default_factory=lambda: array("i"))

    def add(self, problem: Problem, trace: ExpertTrace | None) -> None:
        """Counts one row."""
        self.prompts.append(len(problem.prompt_tokens))
        if trace is not None:
            self.responses.append(len(trace.tokens))

    def summary(self) -> dict[str, dict[str, int]]:
        """Percentiles of prompts and responses."""
        found = {}
        for name, lengths in (("prompt", self.prompts), ("response", self.responses)):
            if lengths:
                at = np.percentile(lengths, PERCENTILES, method="higher")
                found[name] = {f"p{p}": int(v) for p, v in zip(PERCENTILES, at, strict=True)}
                found[name]["rows"] = len(lengths)
        return found


def run(arguments: argparse.Namespace) -> int:
    from ...replay.forms.write import RowWriter
    from ...reward.grading import Grader
    from ..ingest.prepare import load_tokenizer
    from ..ingest.rows import SourceReader
    from ..ingest.texts import Characters

    if arguments.into is not None and arguments.write is None:
        raise ConfigError(f"--as {arguments.into} says what --write OUT writes: give that too")
    if arguments.seed is not None and arguments.limit is None:
        raise ConfigError(
            f"--seed {arguments.seed} draws as many rows as --limit N says: give that too"
        )
    if arguments.turns == "all" and arguments.write:
        raise ConfigError(
            "--turns all says what a run learns from, and --write writes rows as they are: leave one of them out"
        )
    if arguments.write:
        output_file(arguments.write)
    files, overrides = _split(arguments.words)
    config = _config(arguments, overrides)
    model = arguments.model or (config.model.path if arguments.preset else None)
    if arguments.turns == "all" and not model:
        raise ConfigError(
            "--turns all tells answers apart by a model's chat template: name the model with --model"
        )
    tokenizer = load_tokenizer(model) if model else Characters()
    writer = RowWriter(arguments.write, arguments.into or "luffy") if arguments.write else None
    without = _questions(arguments.without, arguments.form) if arguments.without else frozenset()
    reports = []
    try:
        # As a run grades traces.
        with Grader(config.reward.model_copy(update={"own_reward": None})) as grader:
            # Without a preset or a setting nobody says which environments there are.
            plays = bool(arguments.preset) or config.environments.is_on
            # Nor does anybody say whether gold answers are needed, and which traces are let in.
            grades = bool(arguments.preset)
            reader = SourceReader(
                config, tokenizer, grader, lambda text: None, grades=grades, plays=plays
            )
            for file in files:
                reports.append(_read(reader, file, arguments, without, writer))
        # Before the file is made: it says why there is none, if no row can be written.
        if arguments.json:
            print(json.dumps(reports, indent=1, ensure_ascii=False))
        else:
            unit = (
                "tokens" if model else "characters (name a tokenizer with --model to count tokens)"
            )
            print("\n\n".join(_table(report, unit) for report in reports))
        if writer is not None:
            writer.finish()
            if not arguments.json:
                print(f"\n{writer.rows:,} rows written to {writer.path} ({writer.form.name})")
    finally:
        if writer is not None:
            writer.discard()
    if not any(report["kept"] for report in reports):
        rows = sum(report["rows"] for report in reports)
        raise DataError(f"no row can be used, of {rows:,}: the table says what left them out")
    return 0


def _split(words: Sequence[str]) -> tuple[list[Path], list[str]]:
    """Data files, and settings."""
    files, overrides = [], []
    for word in words:
        path = Path(word).expanduser()
        if "=" in word and not path.exists():
            overrides.append(word)
        else:
            files.append(hub.local(word, path))
    if not files:
        raise ConfigError("name at least one data file")
    return files, overrides


def _config(arguments: argparse.Namespace, overrides: list[str]) -> Config:
    from ...common.config import build
    from ..run.opened.presets import load

    if arguments.preset:
        return load(arguments.preset).resolve(overrides)
    plain = {
        "run": {"steps": 1},
        "data": {"train": [{"path": ""}], "max_prompt_tokens": UNLIMITED},
        "rollout": {"max_new_tokens": UNLIMITED},
        "learner": {"micro_batch_tokens": 4 * UNLIMITED},
    }
    return build(plain, overrides, stored=True)


def _source(file: Path, arguments: argparse.Namespace) -> SourceConfig:
    from ...common.config import SourceConfig

    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"--limit {arguments.limit}: at least 1 row is needed")
    return SourceConfig(
        path=str(file),
        form=arguments.form,
        turns=arguments.turns,
        limit=arguments.limit,
        seed=arguments.seed,
        correct_only=arguments.correct,
    )


def _read(
    reader: SourceReader,
    file: Path,
    arguments: argparse.Namespace,
    without: frozenset[bytes],
    writer: RowWriter | None,
) -> dict[str, Any]:
    """What became of one file."""
    from ..ingest.archived import of_archive
    from ..ingest.counts import SourceCounts, drawn

    if of_archive(file):
        raise DataError(
            f"{file} is an archive, whose groups aren't rows of a form: name it in data.train of a run, "
            f"which says how many of its samples can be used"
        )
    source, chosen = _source(file, arguments), None

    def excluded(row: DataRow) -> str | None:
        return f"in {arguments.without}" if without and _question(row.content) in without else None

    if source.limit is not None and source.seed is not None:
        # Which rows are drawn is known once all are.
        chunks = reader.chunks(source, file, SourceCounts(), excluded=excluded)
        ids = [problem.problem_id for chunk in chunks for problem in chunk.problems]
        chosen = drawn(ids, source.limit, source.seed)
    counts, lengths, not_drawn, kept = SourceCounts(), _Lengths(), 0, 0
    progress = Progress(sys.stderr, f"read {file.name}:", _rows_of(file))
    seen = 0
    for chunk in reader.chunks(source, file, counts, excluded=excluded):
        for problem, row, trace in chunk.of_rows():
            if chosen is not None and problem.problem_id not in chosen:
                not_drawn += 1
            elif writer is None or _written(writer, row, counts):
                kept += 1
                lengths.add(problem, trace)
        progress.add(counts.seen - seen)
        seen = counts.seen
    progress.end()
    subset = [(not_drawn, "not drawn"), (counts.over_limit, "over --limit")]
    left_out = {reason: number for number, reason in [*counts.left_out(), *subset] if number}
    return {
        "file": str(file),
        "rows": counts.seen,
        "kept": kept,
        "left_out": left_out,
        "first": dict(counts.bad_rows.first),
        "lengths": lengths.summary(),
    }


def _written(writer: RowWriter, row: DataRow, counts: SourceCounts) -> bool:
    """Writes a row, or counts it as left out if the form can't hold it."""
    from ...replay.forms import RowError

    try:
        writer.add(row.content)
    except RowError as error:
        counts.bad_rows.add(error.reason, f"{row.place}, {error}")
        return False
    return True


def _table(report: dict[str, Any], unit: str) -> str:
    lines = [
        f"{printable(report['file'])}",
        f"  {'rows':<12}{report['rows']:>10,}",
        f"  {'kept':<12}{report['kept']:>10,}",
        f"  {'left out':<12}{report['rows'] - report['kept']:>10,}",
    ]
    for reason, number in report["left_out"].items():
        lines.append(f"    {number:>8,}  {printable(reason)}")
        if first := report["first"].get(reason):
            lines.append(f"              first: {printable(first)}")
    if report["lengths"]:
        heads = "".join(f"{f'p{p}' if p < 100 else 'longest':>10}" for p in PERCENTILES)
        lines.append(f"  {'':<12}{heads}   {unit}")
        for name, at in report["lengths"].items():
            lines.append(f"  {name:<12}" + "".join(f"{at[f'p{p}']:>10,}" for p in PERCENTILES))
    return "\n".join(lines)


def _rows_of(file: Path) -> int | None:
    """Number of rows of a source, if it is known without reading it."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from ...replay.forms import data_files

    try:
        return sum(pq.read_metadata(one).num_rows for one in data_files(file))
    except (OSError, pa.ArrowException):
        return None


def _question(content: Content) -> bytes:
    """Digest of what a row asks; without a prompt, of the task that its environment shows."""
    import hashlib

    contents = [m.content for m in content.prompt if m.role == "user"]
    contents += [one["content"] for one in content.turns if one["role"] == "user"]
    question = "\0".join(text.strip() for text in contents)
    if not content.prompt:
        question = json.dumps(content.extra.get("task"), sort_keys=True)
    return hashlib.blake2b(question.encode(), digest_size=16).digest()


def _questions(name: str, form: str | None) -> frozenset[bytes]:
    """Digests of what the rows of a file ask.

    Args:
        name: a file, a folder or a name on the hub.
        form: the form of the other files, which counts for this one if its columns show none.

    Raises:
        DataError: it can't be read, or not one of its rows.
    """
    from ...replay.forms import LeftOut, check_form, read_rows

    path = hub.local(name, Path(name).expanduser())
    try:
        check_form(path)
    except DataError:
        # Otherwise the error stands.
        check_form(path, form)
    else:
        form = None
    left_out = LeftOut()
    found = frozenset(_question(row.content) for row in read_rows(path, form, left_out))
    if not found:
        raise DataError(
            f"--except {name}: not one of its rows can be read: {next(iter(left_out.first.values()))}"
        )
    return found
