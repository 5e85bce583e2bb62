"""What this machine has and lacks for a preset, and the command that fixes it. Changes nothing."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from .options import add_preset_words

if TYPE_CHECKING:
    from ..host.surroundings import Finding
    from ..plan.hardware import Machine
    from ..run.opened.presets import Preset

MARKS = {"ok": "ok", "note": "-", "missing": "MISSING"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_preset_words(parser, default="miniature")
    parser.add_argument("--json", action="store_true", help="as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Returns 0 if the preset could run here, else 1."""
    from ..host.requirements import missing
    from ..plan.hardware import machine
    from ..run.opened.presets import load, split

    name, overrides = split(arguments.words, "miniature")
    preset, here = load(name), machine()
    found = _findings(preset, overrides, here, beside=True)
    lacking = missing(found)
    others = _others(preset.name, here)
    if arguments.json:
        content = {
            "preset": preset.name,
            "could_run": not lacking,
            "machine": str(here),
            "findings": [finding.as_dict() for finding in found],
            "presets": {other: [f.as_dict() for f in short] for other, short in others.items()},
        }
        print(json.dumps(content, indent=1))
    else:
        print("\n".join(_lines(preset.name, found, others)))
    return 1 if lacking else 0


def _others(but: str, here: Machine) -> dict[str, list[Finding]]:
    """What this machine lacks for each of the other presets."""
    from ..host.requirements import missing
    from ..run.opened.presets import load, names

    return {
        name: missing(_findings(load(name), [], here, beside=False))
        for name in names()
        if name != but
    }


def _findings(
    preset: Preset, overrides: list[str], here: Machine, *, beside: bool
) -> list[Finding]:
    """What each run of a preset needs; stages mostly need the same."""
    from ..host.requirements import examine
    from ..run.several.placing import of_plan

    found: list[Finding] = []
    earlier: list[Path] = []
    for _, run, own in of_plan(preset, overrides):
        config = run.resolve(own)
        folder = Path(config.run.dir or "runs").absolute()
        needs = examine(config, here, folder, beside=beside, earlier=earlier)
        found += [one for one in needs if one not in found]
        earlier.append(folder)
    return found


def _lines(name: str, found: list[Finding], others: dict[str, list[Finding]]) -> list[str]:
    from ..host.requirements import missing

    width = max(len(finding.name) for finding in found)
    lines = []
    for finding in found:
        lines.append(f"{MARKS[finding.state]:<8} {finding.name:<{width}}  {finding.found}")
        indent = " " * (width + 11)
        if finding.why and finding.state != "ok":
            lines.append(f"{indent}{finding.why}")
        if finding.mend:
            lines.append(f"{indent}-> {finding.mend}")
    lacking = missing(found)
    names = ", ".join(dict.fromkeys(finding.name for finding in lacking))
    lines += ["", f"{name} could run here" if not lacking else f"{name} lacks: {names}"]
    for other, short in others.items():
        short_names = ", ".join(dict.fromkeys(finding.name for finding in short))
        lines.append(f"  {other}: {'lacks ' + short_names if short else 'could run here'}")
    return lines
