"""What a preset will want of a node: memory on every GPU, time of a step, processes. Starts nothing."""

from __future__ import annotations

import argparse
import json

from ..options import add_preset_words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Preset, and the node to plan for."""
    add_preset_words(parser, default="miniature")
    parser.add_argument("--gpus", type=int, metavar="N", help="GPUs of the node")
    parser.add_argument(
        "--gpu",
        metavar="KIND",
        help="H100 (default where this machine has none), H200, A100, A100-40, L40S, A10, L4, "
        "RTX4090",
    )
    parser.add_argument("--gpu-memory", type=float, metavar="GB", help="of one GPU")
    parser.add_argument("--prompt-tokens", type=float, metavar="N", help="mean prompt")
    parser.add_argument("--response-tokens", type=float, metavar="N", help="mean response")
    parser.add_argument("--json", action="store_true", help="as JSON: bytes and seconds")


def run(arguments: argparse.Namespace) -> int:
    """Prints the plan."""
    from ..plan import planning, text
    from ..plan.hardware import machine
    from ..plan.node import node
    from ..preflight import gpus_needed
    from ..presets import load, split

    name, overrides = split(arguments.words, "miniature")
    preset = load(name)
    config = preset.resolve(overrides)
    planned_for = node(
        machine(),
        needed=gpus_needed(config),
        gpus=arguments.gpus,
        kind=arguments.gpu,
        memory_gb=arguments.gpu_memory,
    )
    plan = planning.make(
        preset.name,
        config,
        planned_for,
        planning.for_node(config, planned_for),
        prompt_tokens=arguments.prompt_tokens,
        response_tokens=arguments.response_tokens,
    )
    if arguments.json:
        print(json.dumps(plan.as_dict(), indent=1))
    else:
        print("\n".join(text.whole(plan)))
    return 0
