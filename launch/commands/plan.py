"""What a preset needs of a node: memory on every GPU, time of a step, processes. Starts nothing."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .options import add_preset_words

if TYPE_CHECKING:
    from ...common.config import Config
    from ..plan.comparison import Comparison
    from ..plan.planning import Plan
    from ..run.opened.presets import Preset


MOST_SPREAD = 5.0
"""Greatest spread of lengths: two thirds of them between a 150th of the median and 150 times of it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_preset_words(parser, default="miniature")
    parser.add_argument(
        "--gpus",
        type=int,
        metavar="N",
        help="GPUs of the node (default: what the preset needs, or this machine's if it has more)",
    )
    parser.add_argument(
        "--gpu",
        metavar="KIND",
        help="H100 (default where this machine has none), H200, A100, A100-40, L40S, L40, A10, A10G, L4, "
        "RTX4090",
    )
    parser.add_argument(
        "--gpu-memory", type=float, metavar="GB", help="of one GPU (default: by its kind)"
    )
    parser.add_argument(
        "--prompt-tokens",
        type=float,
        metavar="N",
        help="mean prompt (default: a quarter of data.max_prompt_tokens)",
    )
    parser.add_argument(
        "--response-tokens",
        type=float,
        metavar="N",
        help="mean response (default: a third of rollout.max_new_tokens)",
    )
    parser.add_argument(
        "--spread",
        type=float,
        metavar="S",
        help="standard deviation of the logarithm of a response's length; 0: all have the same length (default: 0.75)",
    )
    parser.add_argument(
        "--splits",
        action="store_true",
        help="every split of the GPUs between learner and engines, at every staleness bound from 0 to 8 that the preset allows",
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="make the learner's longest step on this machine, and show its memory beside the plan's",
    )
    parser.add_argument(
        "--json",
        action="store_true",
        help="as JSON, in bytes and seconds; of a preset with stages, an object with each by its name",
    )


def run(arguments: argparse.Namespace) -> int:
    from ..run.opened.presets import load, split
    from ..run.several.placing import of_plan

    name, overrides = split(arguments.words, "miniature")
    runs = [(*one, one[1].resolve(one[2])) for one in of_plan(load(name), overrides)]
    _check_lengths(arguments, {label: config for label, _, _, config in runs})
    trees: dict[str, Any] = {}
    for label, preset, own, config in runs:
        if label and not arguments.json:
            print(f"# ---- stage {label}")
        preset.tell_unread(own)
        found = _plan(preset, config, arguments, is_stage=bool(label))
        if arguments.json:
            trees[label] = found
        else:
            print("\n".join(found))
    if arguments.json:
        print(json.dumps(trees.get("", trees), indent=1))
    return 0


def _plan(preset: Preset, config: Config, arguments: argparse.Namespace, *, is_stage: bool) -> Any:
    """The plan of one run, or its splits: lines for a person, or with ``--json`` plain data."""
    from ...common.config.checks.choices import why_not_started
    from ...common.run_folder import RunFolder
    from ..plan import planning, text
    from ..plan.hardware import machine
    from ..plan.node import node
    from ..plan.placement import gpus_needed
    from ..plan.splits import splits
    from ..run import dry_run
    from ..run.processes.parts import command_of, environment_of

    assert config.run.dir is not None
    folder = RunFolder(config.run.dir)
    planned_for = node(
        machine(),
        needed=gpus_needed(config),
        gpus=arguments.gpus,
        kind=arguments.gpu,
        memory_gb=arguments.gpu_memory,
    )
    lengths = {
        "prompt_tokens": arguments.prompt_tokens,
        "response_tokens": arguments.response_tokens,
        "spread": arguments.spread,
    }
    if arguments.splits and is_stage and config.learner.source == "offline":
        said = "no splits: offline nothing is generated, and the learner has all GPUs"
        return None if arguments.json else [said]
    tried = None
    if arguments.splits:
        tried = splits(preset.name, config, planned_for, **lengths)
        if arguments.json:
            return [split.as_dict() for split in tried]
        placement = planning.on_paper(config, machine(), planned_for)
    else:
        placement = planning.for_node(config, planned_for)
    plan = planning.make(preset.name, config, planned_for, placement, **lengths)
    if refusal := why_not_started(config):
        plan = replace(plan, problems=(refusal, *plan.problems))
    if tried is not None:
        return text.splits(plan, tried)
    comparison = _measured(plan) if arguments.measure else None
    if arguments.json:
        as_json = {**plan.as_dict(), "run": str(folder.path)}
        if comparison is not None:
            as_json["measured"] = comparison.as_dict()
        specs = dry_run.specs(config, folder, placement)
        for process, spec in zip(as_json["processes"], specs, strict=True):
            process["threads"] = spec.threads
            process["command"] = command_of(spec, dry_run.PARENT)
            process["environment"] = environment_of(spec)
            process["log"] = str(spec.log)
        return as_json
    lines = [*text.whole(plan), "", *dry_run.processes(plan, folder, placement)]
    return lines if comparison is None else [*lines, "", *comparison.lines()]


def _check_lengths(arguments: argparse.Namespace, configs: Mapping[str, Config]) -> None:
    """Refuses numbers of the options about lengths that can't be in any of these runs, stages by their labels. Each run
    cuts what is over its own limits."""
    from ...common.errors import ConfigError

    for option, tokens, section, name in (
        ("--prompt-tokens", arguments.prompt_tokens, "data", "max_prompt_tokens"),
        ("--response-tokens", arguments.response_tokens, "rollout", "max_new_tokens"),
    ):
        limits = {
            f"{label}.{section}.{name}".removeprefix("."): getattr(getattr(config, section), name)
            for label, config in configs.items()
        }
        key, limit = max(limits.items(), key=lambda one: one[1])
        if tokens is not None and not 0 < tokens <= limit:
            raise ConfigError(
                f"{option} {tokens:g} should be a number of tokens above 0, and at most {key}={limit}"
            )
    if arguments.spread is not None and not 0 <= arguments.spread <= MOST_SPREAD:
        raise ConfigError(f"--spread {arguments.spread:g} should be from 0 to {MOST_SPREAD:g}")


def _measured(plan: Plan) -> Comparison:
    """Measures the learner of a plan on this machine.

    Raises:
        ConfigError: the model's sizes aren't known, so that there is nothing to compare with, or nothing is trained.
        TandemError: the step couldn't be made.
    """
    from ...common.errors import ConfigError
    from ..plan import comparison
    from ..plan.hardware import machine
    from ..plan.node import node
    from ..plan.placement import gpus_needed
    from ..run.measuring import measure

    if plan.shape is None:
        raise ConfigError(
            f"--measure compares with figures on paper, and the sizes of {plan.config.model.path} aren't "
            f"known: name a model folder on this machine"
        )
    if not plan.config.learner.train:
        raise ConfigError(
            "--measure makes steps of the learner, and with learner.train=false it makes none: leave out --measure"
        )
    here = machine()
    own = node(here, needed=gpus_needed(plan.config)) if here.gpus else None
    return comparison.compare(plan.config, plan.shape, measure(plan.config), own)
