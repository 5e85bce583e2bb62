"""Write the model of a run's checkpoint as a Hugging Face folder, also while the run goes on; changes nothing else."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...common.telemetry import start_log
from .options import add_folder, named_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_folder(parser)
    parser.add_argument("--out", metavar="DIR", help="default: DIR/model-of-step-N")
    which = parser.add_mutually_exclusive_group()
    which.add_argument(
        "--step", type=int, help="step whose checkpoint is wanted (default: the newest one)"
    )
    which.add_argument(
        "--best",
        metavar="METRIC",
        help="among the steps kept, the one with the best value of a metric, as heldout/accuracy or train/loss:min; "
        "with evaluate.best it is the model that the run keeps",
    )


def run(arguments: argparse.Namespace) -> int:
    """Uses neither Redis nor the journal, so that it works even if the run can't go on."""
    from ...common.config import build, read_yaml
    from ...learner.exporting import export
    from ..wording import shown

    start_log("export", "WARNING")
    folder = named_folder(arguments)
    folder.check_config()
    config = build(read_yaml(folder.config), stored=True)
    out = Path(arguments.out).absolute() if arguments.out else None
    found = export(folder, config, out, step=arguments.step, best=arguments.best)
    print(f"the model of step {found.step} is in {shown(found.place)}")
    if found.note:
        print(found.note)
    return 0
