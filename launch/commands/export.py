"""Write the model of a run's newest whole checkpoint as a Hugging Face folder; changes nothing else."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...common.telemetry import start_log
from .options import existing, newest_run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", nargs="?", help="default: the newest in runs/")
    parser.add_argument("--run", metavar="DIR", help="the same")
    parser.add_argument("--out", metavar="DIR", help="default: DIR/model-of-step-N")
    parser.add_argument("--step", type=int, help="newest checkpoint up to this step")


def run(arguments: argparse.Namespace) -> int:
    """Uses neither Redis nor the journal, so that it works even if the run can't go on."""
    from ...common.config import build, read_yaml
    from ...learner.exporting import export
    from ..host.redis_server import choose_port
    from ..wording import shown

    start_log("export", "WARNING")
    path = arguments.dir or arguments.run
    folder = existing(path) if path else newest_run()
    folder.check_config()
    config = build(read_yaml(folder.config), stored=True)
    out = Path(arguments.out).absolute() if arguments.out else None
    port = choose_port("127.0.0.1", None)
    step, place = export(folder, config, out, port, arguments.step)
    print(f"the model of step {step} is in {shown(place)}")
    return 0
