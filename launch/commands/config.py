"""Print the resolved settings of a preset with their meaning; start nothing."""

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
    from ..run.presets import load, split
    from .settings import commented

    name, overrides = split(arguments.words, "miniature")
    preset = load(name)
    config = preset.resolve(overrides)
    preset.tell_unread(overrides)
    if arguments.json:
        print(json.dumps(config.model_dump(mode="json"), indent=1))
    elif arguments.plain:
        print(to_yaml(config), end="")
    else:
        print(commented(config), end="")
    return 0
