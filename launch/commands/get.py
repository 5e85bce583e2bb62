"""Downloads a model or a data set from the Hugging Face hub into a local folder, and verifies it.

An interrupted download goes on where it was. HF_ENDPOINT names a mirror, HF_TOKEN a key for gated
repositories.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from ...common import evaluation_sets, hub
from ...common.errors import ConfigError, DataError
from ...common.printable import printable, raw
from ..wording import human, shown


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=("model", "data", "benchmarks"), help="what to download")
    parser.add_argument(
        "name",
        metavar="NAME",
        nargs="*",
        help="org/model; or org/set, org/set:split, org/set/config:split; or names of benchmarks (default: all)",
    )
    parser.add_argument(
        "--to",
        metavar="DIR",
        help="(default: models/NAME, data/NAME-CONFIG-SPLIT or benchmarks, here)",
    )
    parser.add_argument("--revision", metavar="NAME", help="a branch, tag or commit")


def run(arguments: argparse.Namespace) -> int:
    if arguments.kind == "benchmarks":
        return _benchmarks(arguments)
    if len(arguments.name) != 1:
        raise ConfigError(f"tandem get {arguments.kind} takes one NAME")
    (name,) = arguments.name
    if "/" not in name:
        raise ConfigError(f"{name} isn't a name on the hub: write org/name")
    tell, end = _progress(sys.stderr)
    # A folder is read with all that is in it, so each configuration and split has its own.
    short = "-".join(re.split("[/:]", name)[1:])
    if arguments.kind == "model":
        to = Path(arguments.to or Path("models") / short).expanduser()
        hub.get_model(name, to, arguments.revision, tell)
    else:
        to = Path(arguments.to or Path("data") / short).expanduser()
        hub.get_data(name, to, arguments.revision, tell)
    end()
    files = [file for file in to.rglob("*") if file.is_file()]
    total = sum(file.stat().st_size for file in files)
    print(f"{shown(to.absolute())}: {len(files)} files, {human(total)}, verified")
    key = "model.path" if arguments.kind == "model" else "data.train.0.path"
    print(f"use it as {key}={shown(to.absolute())}")
    return 0


def _benchmarks(arguments: argparse.Namespace) -> int:
    """Fetches benchmarks, each into a folder of its name, where `tandem evaluate` and data.evaluate find it."""
    try:
        wanted = evaluation_sets.fetchable(arguments.name)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    to = Path(arguments.to or evaluation_sets.home()).expanduser()
    failed = []
    for name, on_hub in wanted.items():
        tell, end = _progress(sys.stderr)
        folder = to / name
        # Not under its name until it is whole, since whatever is there is taken for the set.
        part = to / f".{name}.part"
        if not folder.is_dir():
            try:
                hub.get_data(on_hub, part, arguments.revision, tell)
            except DataError as error:
                failed.append(name)
                print(f"{name}: {error}", file=sys.stderr)
                continue
            finally:
                end()
            part.rename(folder)
        print(f"{shown(folder.absolute())}: {on_hub}")
    if failed:
        raise DataError(
            f"{len(failed)} of {len(wanted)} benchmarks can't be fetched: {', '.join(failed)}"
        )
    return 0


def _progress(stream: TextIO) -> tuple[Callable[[str], None], Callable[[], None]]:
    """On a terminal, a line that is drawn anew; nothing elsewhere."""
    if not stream.isatty():
        return lambda text: None, lambda: None
    line = raw(stream)

    def tell(text: str) -> None:
        line.write(f"\r\033[K{printable(text)[:100]}")
        line.flush()

    def end() -> None:
        line.write("\r\033[K")
        line.flush()

    return tell, end
