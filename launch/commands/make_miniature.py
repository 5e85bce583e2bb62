"""Write the miniature's problems and expert traces as parquet, or make a base model of it again."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="DIR", nargs="?", help="folder for the parquet files")
    parser.add_argument(
        "--setting",
        choices=("hard", "easy", "tools"),
        default="hard",
        help="chains of 8, chains of 4, or products for a model with a tool",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the training problems")
    parser.add_argument("--traces", type=int, default=4, help="expert traces (hard)")
    parser.add_argument("--fresh", type=int, default=1200, help="problems without a trace")
    parser.add_argument(
        "--base",
        metavar="DIR",
        help="make the setting's base model in this folder (takes minutes)",
    )
    parser.add_argument(
        "--base-seed", type=int, default=1, help="seed of the base model; the shipped ones have 1"
    )


def run(arguments: argparse.Namespace) -> int:
    from ...common.errors import ConfigError

    if arguments.out is None and arguments.base is None:
        raise ConfigError("name a folder for the problems, or --base DIR for the base model")
    if arguments.out is not None:
        from ..miniature.parquet import write

        out = Path(arguments.out)
        made = write(
            out,
            arguments.setting,
            seed=arguments.seed,
            traces=arguments.traces,
            fresh=arguments.fresh,
            train=arguments.fresh,
        )
        for name, rows in made.rows.items():
            print(f"{out / name}: {rows} problems of {made.k} operation{'s' * (made.k > 1)}")
    if arguments.base is not None:
        from ..miniature import base_model
        from ..miniature.tools import base_model as with_a_tool

        maker = with_a_tool if arguments.setting == "tools" else base_model
        maker.make(
            Path(arguments.base),
            seed=arguments.base_seed,
            log=lambda line: print(line, file=sys.stderr, flush=True),
        )
        print(f"{arguments.base}: the base model (tandem start model.path={arguments.base})")
    return 0
