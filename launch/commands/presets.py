"""List the presets that `tandem start` and `tandem offline` take."""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds nothing: the command has no arguments."""


def run(arguments: argparse.Namespace) -> int:
    from ..run.opened.presets import load, names

    width = max(map(len, names())) + 2
    for name in names():
        preset = load(name)
        print(f"{name:<{width}}{preset.about}{' (untested)' if preset.untested else ''}")
    return 0
