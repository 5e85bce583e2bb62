"""Grades completions in a file through the graders of the reward pool.

Every row of IN (JSON lines: id, completion, gold) is written to OUT with verdict, reward,
components, extracted and seconds. A run that was stopped continues where OUT ends.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from ...common.errors import DataError
from ...common.plain import for_json
from ...common.run_folder import existing
from ..progress import Progress
from ..wording import shown

if TYPE_CHECKING:
    from ...common.config import Config
    from ...reward.grading import Grade, Grader
    from .grade_rows import Reader, Row

IN_FLIGHT = 2_048
"""Rows that may be read ahead of the first ungraded one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("input", metavar="IN.jsonl", help="rows to grade; - reads standard input")
    parser.add_argument(
        "words",
        nargs="*",
        metavar="PRESET or KEY=VALUE",
        help="settings, such as reward.graders=8 (default: those of --run, else the defaults)",
    )
    parser.add_argument(
        "--out", default="-", metavar="OUT.jsonl", help="graded rows (default: standard output)"
    )
    parser.add_argument("--mode", help="how an answer is read and compared (reward.mode)")
    parser.add_argument(
        "--reward",
        action="append",
        metavar="NAME",
        help="a component, in place of the configured ones: its name, the import path of a "
        "function of your own, or YAML as in {name: format, weight: 0.5, params: {style: tags}}; "
        "repeat it for several",
    )
    parser.add_argument("--run", metavar="DIR", help="the reward of this run")
    parser.add_argument(
        "--fresh", action="store_true", help="grade all rows again; OUT is moved aside"
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns 130 if interrupted; OUT then has the rows graded so far."""
    from ...common.config import reward_digest
    from ...reward.grading import Grader
    from ..host.servers import check_servers

    config = _config(arguments)
    check_servers(config.reward)
    with ExitStack() as stack:
        grader = stack.enter_context(Grader(config.reward))
        source = _Source(arguments.input, grader, config)
        out = _Out(arguments.out, grader, reward_digest(config), fresh=arguments.fresh)
        stack.callback(out.close)
        total = source.check()
        lines = stack.enter_context(source.open())
        tally = _Tally()
        done = out.resume(source.reader(), lines, tally) if out.path is not None else 0
        if grader.works_outside and done != total:
            grader.canary()
        progress = Progress(sys.stderr, "graded", total, done)
        try:
            for row, grade in _graded(grader, source.reader().rows(lines), done, progress):
                out.write(row, grade)
                tally.add(row.has_gold, grade.verdict.value, grade.reward, grade.components)
        except KeyboardInterrupt:
            progress.end()
            print(_stopped(arguments, tally.rows), file=sys.stderr)
            return 130
        progress.end()
        table = sys.stderr if out.path is None else sys.stdout
        if done:
            print(f"{done:,} of the rows were graded before", file=table)
        print(tally.table(), file=table)
        print(_work(grader.stats(), tally.rows - done, progress.seconds), file=table)
    return 0


def _work(stats: dict[str, float], rows: int, seconds: float) -> str:
    cached = stats.get("cache_hits", 0) + stats.get("coalesced", 0)
    judged = ""
    if asked := stats.get("judge_asked"):
        judged = (
            f", {asked:,.0f} asked of a judge ({stats['judge_failures']:,.0f} without an answer)"
        )
    return (
        f"{rows:,} rows in {seconds:.1f} s; {stats.get('to_process', 0):,.0f} answers compared in "
        f"a grader process, {cached:,.0f} like one of these, "
        f"{stats.get('restarts', 0):,.0f} graders replaced{judged}"
    )


def _stopped(arguments: argparse.Namespace, rows: int) -> str:
    if arguments.out == "-":
        return f"stopped after {rows:,} rows"
    return f"stopped: {arguments.out} has {rows:,} rows; the same command goes on from there"


def _config(arguments: argparse.Namespace) -> Config:
    """The config of the run, preset or options that were named."""

    from ...common.config import build, parse_yaml, read_yaml, yaml_text
    from ..run.opened.presets import load, split

    name, overrides = split(arguments.words, "")
    if arguments.mode:
        overrides = [*overrides, f"reward.mode={arguments.mode}"]
    if arguments.reward:
        parts = []
        for given in arguments.reward:
            named = given.lstrip().startswith("{")
            parts.append(parse_yaml(given, f"--reward {given}") if named else {"name": given})
        overrides = [*overrides, f"reward.components={yaml_text(parts)}"]
    if name:
        return load(name).resolve(overrides)
    if arguments.run:
        return build(read_yaml(existing(arguments.run).config), overrides, stored=True)
    plain = {"run": {"steps": 1}, "data": {"train": [{"path": ""}]}}
    return build(plain, overrides)


class _Source:
    """The input: a file, which is checked first, or standard input."""

    def __init__(self, name: str, grader: Grader, config: Config) -> None:
        self._name = name
        self._grader = grader
        self._config = config

    def reader(self) -> Reader:
        from .grade_rows import Reader

        name = "standard input" if self._name == "-" else self._name
        return Reader(
            name,
            needs_gold=self._grader.needs_verdict,
            has_tests=self._grader.has_tests,
            opener=self._config.data.opener,
        )

    def check(self) -> int | None:
        """Number of rows in a file; None for standard input, whose rows are checked as they arrive."""
        if self._name == "-":
            return None
        with self.open() as lines:
            return sum(1 for _ in self.reader().rows(lines))

    def open(self) -> IO[bytes]:
        if self._name == "-":
            return sys.stdin.buffer
        try:
            return open(Path(self._name).expanduser(), "rb")
        except OSError as error:
            raise DataError(f"{self._name} can't be read: {error.strerror}") from None


class _Out:
    """The output: rows in the order of the input, one whole row per line."""

    def __init__(self, name: str, grader: Grader, digest: str, *, fresh: bool) -> None:
        from ...common.telemetry import JsonLines
        from ..run.opened.opening import free_name

        self._grader = grader
        self._digest = digest
        self.path = None if name == "-" else Path(name).expanduser()
        if self.path is None:
            self._lines = JsonLines.on(sys.stdout)
            return
        if fresh and self.path.exists():
            aside = free_name(self.path)
            self.path.replace(aside)
            print(f"{shown(self.path)} is now {shown(aside)}", file=sys.stderr)
        try:
            self._lines = JsonLines(self.path)
        except OSError as error:
            raise DataError(f"{name} can't be written: {error.strerror}") from None

    def resume(self, reader: Reader, lines: IO[bytes], tally: _Tally) -> int:
        """Counts the rows that are there already, which must match the beginning of the input."""
        from ...common.telemetry import read_json_lines
        from .grade_rows import ADDED

        assert self.path is not None
        if not self.path.stat().st_size:
            return 0
        if not lines.seekable():
            raise DataError(f"{self.path} already exists: --fresh moves it aside")
        count = 0
        rows = reader.rows(lines)
        for count, old in enumerate(read_json_lines(self.path), 1):
            row = next(rows, None)
            same = row is not None and all(
                old.get(k) == v for k, v in for_json(row.raw).items() if k not in ADDED
            )
            by = (old.get("grader"), old.get("reward_digest")) == (self._grader.name, self._digest)
            if not same or not by or list(old.get("components") or ()) != self._grader.components:
                raise DataError(
                    f"{self.path} line {count} isn't a row of this input graded by this reward: "
                    f"name another --out, or --fresh moves it aside"
                )
            tally.add(old["verdict"] is not None, old["verdict"], old["reward"], old["components"])
        lines.seek(0)
        return count

    def write(self, row: Row, grade: Grade) -> None:
        from .grade_rows import graded

        self._lines.write(graded(row, grade, self._grader.name, self._digest))

    def close(self) -> None:
        if self.path is not None:
            self._lines.close()


def _graded(
    grader: Grader, rows: Iterator[Row], skip: int, progress: Progress
) -> Iterator[tuple[Row, Grade]]:
    """Yields rows with their grades, in order; reads ahead so that all graders have work."""
    from .grade_rows import batches

    waiting: deque[tuple[list[Row], list[Grade]]] = deque()
    count = 0
    done = skip

    def finished() -> Iterator[tuple[Row, Grade]]:
        nonlocal count, done
        while waiting and waiting[0][1]:
            finished_rows, grades = waiting.popleft()
            count -= len(finished_rows)
            for row, grade in list(zip(finished_rows, grades, strict=True))[done:]:
                progress.add()
                yield row, grade
            done = 0

    for batch in batches(rows):
        if not waiting and done >= len(batch):
            done -= len(batch)
            continue
        # A group of which some rows are there is graded whole again.
        grades: list[Grade] = []
        waiting.append((batch, grades))
        count += len(batch)
        grader.begin_items([row.item for row in batch], grades.extend)
        while count > IN_FLIGHT and not waiting[0][1]:
            grader.wait(lambda: progress.turn() or bool(waiting[0][1]), "rows")
        yield from finished()
        grader.pump()
    while waiting:
        grader.wait(lambda: progress.turn() or bool(waiting[0][1]), "rows")
        yield from finished()


class _Tally:
    """Counts and reward sums by verdict."""

    def __init__(self) -> None:
        self.rows = 0
        self._verdicts: Counter[str] = Counter()
        self._rewards: dict[str, list[float]] = {}
        self._components: dict[str, list[float]] = {}

    def add(
        self,
        has_gold: bool,
        verdict: str | None,
        reward: float | None,
        components: Mapping[str, float | None],
    ) -> None:
        self.rows += 1
        kind = verdict if has_gold and verdict else "no gold"
        self._verdicts[kind] += 1
        if reward is not None:
            self._rewards.setdefault(kind, []).append(reward)
        for name, value in components.items():
            values = self._components.setdefault(name, [])
            if value is not None:
                values.append(value)

    def table(self) -> str:
        """Rows, share and mean reward by verdict, and the means of the components."""
        lines = [f"{'verdict':<17}{'rows':>10}{'share':>8}{'mean reward':>14}"]
        for verdict, count in self._verdicts.most_common():
            mean = _mean(self._rewards.get(verdict, ()))
            lines.append(f"{verdict:<17}{count:>10,}{count / self.rows:>8.1%}{mean:>14}")
        everything = [value for values in self._rewards.values() for value in values]
        lines.append(f"{'all':<17}{self.rows:>10,}{'':>8}{_mean(everything):>14}")
        lines += [
            f"mean of {name}: {_mean(values)}" for name, values in sorted(self._components.items())
        ]
        return "\n".join(lines)


def _mean(values: Sequence[Any]) -> str:
    return f"{sum(values) / len(values):.4f}" if values else "-"
