"""Writes every group that a run has trained on as parquet files, which read back to equal records.

The run must have kept them (log.archive=true). docs/data.md describes the columns. With --regrade all
responses are graded anew, by the reward of the preset and settings that follow; expert traces that these wouldn't
let in are left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from msgspec.structs import replace

from ...common.errors import ConfigError, DataError
from ...common.records import ExpertTrace, Group, Sample
from ...common.run_folder import RunFolder, existing
from ...replay import archive
from ...replay.archive_columns import ArchivedGroup
from ...reward.grading import Grader
from ..host.servers import check_servers
from ..ingest import regrading
from ..ingest.accepting import accepted, item_of
from ..ingest.counts import SourceCounts
from ..progress import Progress
from ..wording import human, shown
from .options import newest_run

Change = Callable[[list[ArchivedGroup]], list[ArchivedGroup]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "run",
        metavar="DIR",
        nargs="?",
        help="a run's folder (default: the newest run in runs/), or an archive",
    )
    parser.add_argument("--out", metavar="DIR", required=True, help="a folder that is made")
    parser.add_argument(
        "--regrade",
        metavar="WORD",
        nargs="+",
        help="grade anew: a preset's name or file, and any settings, e.g. reward.mode=math_verify",
    )


def run(arguments: argparse.Namespace) -> int:
    files, missing = _files(arguments.run)
    out = Path(arguments.out).expanduser().absolute()
    progress = Progress(sys.stderr, "archived groups:", None)
    with ExitStack() as stack:
        counts = SourceCounts()
        change = _regrade(arguments.regrade, files, counts, stack) if arguments.regrade else None
        groups, written = archive.join(files, out, progress.add, change)
    progress.end()
    size = sum(file.stat().st_size for file in out.iterdir())
    steps = len(list(archive.steps(out)))
    print(f"{groups:,} groups of {steps:,} steps in {shown(out)}: {written} file(s), {human(size)}")
    for number, what in counts.left_out():
        if number:
            print(f"{number:,} {what}, left out")
    if missing:
        why = "log.archive was off then, or their files are gone"
        print(f"{missing:,} steps are missing: {why}", file=sys.stderr)
    return 0


def _files(given: str | None) -> tuple[list[Path], int]:
    """The files to be joined, and the number of trained steps that no file has."""
    from ...learner.resume.journal import trained

    if given is not None and not RunFolder(given).run_json.exists():
        files = sorted(Path(given).expanduser().glob("*.parquet"))
        if files:
            return files, 0
    folder = existing(given) if given else newest_run()
    steps = sorted(trained(folder.journal)) if folder.journal.exists() else []
    if not steps:
        raise DataError(f"{shown(folder.path)} has trained no step yet")
    files = [folder.archive / archive.file_name(step) for step in steps]
    there = [file for file in files if file.exists()]
    if not there:
        raise DataError(
            f"{shown(folder.path)} has kept none of its groups: set log.archive=true when it starts"
        )
    return there, len(files) - len(there)


def _regrade(words: list[str], files: list[Path], counts: SourceCounts, stack: ExitStack) -> Change:
    """Grades all responses by the reward that these words name, and counts the expert traces that it leaves out."""
    from ..run.opened.presets import load, split

    name, overrides = split(words, "")
    if not name:
        raise ConfigError(
            "--regrade names a preset first, e.g. --regrade miniature reward.mode=math_verify"
        )
    config = load(name).resolve(overrides)
    reward = config.reward
    for line in regrading.check(reward, files):
        print(line, file=sys.stderr)
    check_servers(reward)
    grader = stack.enter_context(Grader(reward))
    experts = grader
    if reward.own_reward is not None:
        # What own samples are paid whatever they say isn't paid to the expert's.
        experts = stack.enter_context(Grader(reward.model_copy(update={"own_reward": None})))

    def graded(group: Group, samples: tuple[Sample, ...]) -> tuple[Sample, ...]:
        return grader.grade_group(replace(group, samples=samples)).samples

    def traces(one: ArchivedGroup) -> Iterator[ExpertTrace]:
        alone = len(one.traces) + len(one.group.samples) == 1
        for trace in one.traces:
            # What the data have judged themselves stays.
            if trace.grader is None:
                yield trace
                continue
            (grade,) = experts.grade_texts([item_of(trace, one.group)])
            kept = accepted(trace, grade, experts.name, config, counts, alone=alone)
            if kept is not None:
                yield kept

    def regraded(one: ArchivedGroup) -> ArchivedGroup:
        samples = graded(one.group, (*one.group.samples, *one.replaced))
        count = len(one.group.samples)
        return dataclasses.replace(
            one,
            group=replace(one.group, samples=samples[:count]),
            replaced=samples[count:],
            traces=tuple(traces(one)),
        )

    return lambda groups: [regraded(one) for one in groups]
