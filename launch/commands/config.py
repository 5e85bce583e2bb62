"""Print the resolved settings of a preset with their meaning; start nothing.

An override names an entry of a list by its place, from 0: data.train.0.limit=16.
"""

from __future__ import annotations

import argparse
import json

from .options import add_preset_words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_preset_words(parser, default="miniature")
    parser.add_argument("--plain", action="store_true", help="YAML without the comments")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    from ...common.config import to_yaml
    from ..run.opened.presets import load, split
    from ..run.several.placing import of_preset
    from .settings import commented

    name, overrides = split(arguments.words, "miniature")
    runs = {}
    for label, preset, own in of_preset(load(name), overrides):
        runs[label] = preset.resolve(own)
        preset.tell_unread(own)
    if arguments.json:
        trees = {label: config.model_dump(mode="json") for label, config in runs.items()}
        print(json.dumps(trees.get("", trees), indent=1))
        return 0
    for label, config in runs.items():
        if label:
            print(f"# ---- stage {label}")
        print(to_yaml(config) if arguments.plain else commented(config), end="")
    return 0
