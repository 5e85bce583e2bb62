"""Accuracy of a model on a held-out set, in this process: needs no Redis."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from ...common import hub
from ...common.errors import ConfigError
from ...common.printable import printable
from ...common.run_folder import RunFolder, write_atomic
from .options import existing

if TYPE_CHECKING:
    from ...common.config import Config, EvalSetConfig


_SAMPLING = {
    "temperature": (float, "0 takes the most likely token"),
    "top_p": (float, "share of the probability that tokens are sampled from, in (0, 1]"),
    "samples": (int, "responses per problem; their mean accuracy is reported"),
}
"""Settings of the section ``evaluate`` that are also options."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options; a run provides model and data if they aren't given."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="PRESET or KEY=VALUE",
        help="settings: sampling, reward and prompt are those of a run's config.yaml, else of "
        "the preset named here",
    )
    parser.add_argument(
        "--model", metavar="DIR", help="Hugging Face folder or hub name (default: RUN/model)"
    )
    parser.add_argument("--data", metavar="FILE", help="problems (default: the run's held-out set)")
    parser.add_argument(
        "--form", metavar="NAME", help="form of FILE's rows (default: by its columns)"
    )
    parser.add_argument("--run", metavar="DIR", help="a run's folder")
    parser.add_argument("--set", metavar="NAME", help="which of the run's held-out sets")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N problems")
    for key, (kind, about) in _SAMPLING.items():
        name = key.replace("_", "-")
        parser.add_argument(f"--{name}", type=kind, help=f"{about} (evaluate.{key})")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--out", metavar="FILE", help="write the figures there, as JSON")


def run(arguments: argparse.Namespace) -> int:
    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"--limit {arguments.limit}: at least 1 problem is needed")
    config, folder = _config(arguments)
    if config.evaluate.top_p < 1 and config.evaluate.temperature == 0:
        print(
            f"note: temperature 0 takes the most likely token, so that top_p="
            f"{config.evaluate.top_p:g} changes nothing: give --temperature too",
            file=sys.stderr,
        )
    model = arguments.model or (str(folder.model) if folder else None)
    if model is None:
        raise ConfigError("name the model with --model DIR, or a run with --run DIR")
    held_out, data = _held_out(arguments, config, folder)
    # The environment is read when torch is loaded, below.
    os.environ.setdefault("OMP_NUM_THREADS", str(config.rollout.threads))
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": model})})
    from ..host.environments import check_environments
    from ..host.preflight import check_model
    from ..host.servers import check_servers

    check_model(config)
    check_environments(config)
    check_servers(config.reward)
    from ...reward.grading import Grader
    from ...rollout.evaluate.evaluation import evaluate_folder
    from ..ingest.prepare import load_tokenizer
    from ..ingest.rows import SourceReader

    with Grader(config.reward) as grader:
        reader = SourceReader(config, load_tokenizer(model), grader, lambda text: None)
        problems, _, counts = reader.read(held_out, data)
    if any(number for number, _ in counts.left_out()):
        print(f"note: {data.name}: {printable(str(counts))}", file=sys.stderr)
    result = evaluate_folder(
        model,
        problems,
        model=config.model,
        rollout=config.rollout,
        reward=config.reward,
        settings=config.evaluate,
        stop=config.data.stops,
        seed=config.run.seed,
        name=held_out.name,
        played=config if config.environments.is_on else None,
    )
    figures = {"model": model, "data": str(data), **result.to_dict()}
    text = json.dumps(figures, indent=1)
    if arguments.out:
        write_atomic(Path(arguments.out), text + "\n")
    if arguments.json:
        print(text)
    else:
        form = "" if not result.classes else f"right form {100 * result.format_share:.1f}%, "
        print(
            f"accuracy {100 * result.accuracy:.1f}% on {result.problems} problems of {data}\n"
            f"{form}{result.mean_length:.0f} tokens a response, {result.seconds:.1f} s"
        )
        if episodes := [s.episode for s, _ in result.responses if s.episode is not None]:
            failed = sum(episode.failure is not None for episode in episodes)
            turns = sum(len(episode.turns) for episode in episodes) / len(episodes)
            print(
                f"reward {result.reward:.3f}, {turns:.1f} turns an episode, {failed} of {len(episodes)} "
                f"episodes failed by no fault of the model"
            )
        if result.classes:
            shares = ", ".join(f"{k} {100 * v:.1f}%" for k, v in result.classes.items())
            print(f"form and answer: {shares}")
    return 0


def _config(arguments: argparse.Namespace) -> tuple[Config, RunFolder | None]:
    """The settings to evaluate with, and the run's folder if there is a run."""
    from ...common.config import build, read_yaml
    from ..run.presets import load, split

    folder = existing(arguments.run) if arguments.run else None
    if folder is None and arguments.model:
        beside = RunFolder(Path(arguments.model).expanduser().absolute().parent)
        if beside.run_json.exists() and beside.config.exists():
            folder = beside
    name, overrides = split(arguments.words, "")
    given = {key: getattr(arguments, key) for key in _SAMPLING}
    overrides += [f"evaluate.{key}={value}" for key, value in given.items() if value is not None]
    if name:
        return load(name).resolve(overrides), folder
    if folder is not None:
        return build(read_yaml(folder.config), overrides), folder
    if arguments.model == "miniature":
        return load("miniature").resolve(overrides), None
    plain = {"run": {"steps": 1}, "data": {"train": [{"path": arguments.data or ""}]}}
    return build(plain, overrides), None


def _held_out(
    arguments: argparse.Namespace, config: Config, folder: RunFolder | None
) -> tuple[EvalSetConfig, Path]:
    """The set, and where it is."""
    from ...common.config import EvalSetConfig

    if arguments.data:
        place = hub.local(arguments.data, Path(arguments.data).expanduser())
        given = EvalSetConfig(
            path=arguments.data, name=place.stem, form=arguments.form, limit=arguments.limit
        )
        return given, place
    if folder is None:
        raise ConfigError("name the problems with --data FILE, or a run with --run DIR")
    sets = {one.name: one for one in config.data.evaluate}
    if not sets:
        raise ConfigError("the run has no held-out set: name problems with --data FILE")
    name = arguments.set or next(iter(sets))
    if name not in sets:
        raise ConfigError(f"--set {name}: the run has {', '.join(sets)}")
    chosen = sets[name].model_copy(update={"limit": arguments.limit or sets[name].limit})
    return chosen, hub.local(chosen.path, folder.resolve(chosen.path))
