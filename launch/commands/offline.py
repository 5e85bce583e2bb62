"""Train on what is stored: expert traces, pairs or an archive; no rollout workers."""

from __future__ import annotations

import argparse
import logging

from ...common.errors import ConfigError, DataError
from ...common.parts import read_parts
from ...common.run_folder import RunFolder
from .options import add_start_options

log = logging.getLogger("tandem.launch")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_start_options(parser, default="miniature-sft")
    parser.add_argument(
        "--step",
        type=int,
        metavar="N",
        help="run again up to step N only and print its figures, in runs/<preset>-step-N unless "
        "run.dir says otherwise; nothing is evaluated",
    )


def run(arguments: argparse.Namespace) -> int:
    words, fresh = arguments.words, arguments.fresh
    if arguments.step is not None:
        words = _of_step(words, arguments.step)
    if arguments.dry_run:
        from ..run.dry_run import dry_run

        return dry_run(words, fresh=fresh, offline=True)
    from ..run.several.stages import run_words

    code = run_words(words, fresh=fresh, offline=True, plain=arguments.plain)
    if arguments.step is not None and code == 0:
        from ..run.opened.opening import open_preset
        from ..run.several.placing import folder_of

        _print(RunFolder(folder_of(*open_preset(words, offline=True))), arguments.step)
    return code


def _of_step(words: list[str], step: int) -> list[str]:
    from ..run.opened.opening import open_preset

    preset, _ = open_preset(words, offline=True)
    if preset.stages:
        raise ConfigError(
            f"--step {step}: {preset.name} is a run of several stages: name the preset of one of them"
        )
    return [
        *(f"run.dir=runs/{preset.name}-step-{step}", *words),
        *(f"run.last_step={step}", "evaluate.every=0"),
        *("evaluate.at_start=false", "evaluate.at_end=false"),
    ]


def _print(folder: RunFolder, step: int) -> None:
    """Prints the step's figures, with every digit."""
    for record in read_parts(folder.metrics, log.warning):
        if record.get("step") == step and "train/lr" in record:
            width = max(map(len, record)) + 2
            print("\n".join(f"{name:<{width}}{record[name]!r}" for name in sorted(record)))
            return
    raise DataError(f"{folder.metrics} has no step {step}: the run ended before it")
