"""Accuracy of models on benchmarks, and every sample that it is made of; needs no Redis.

One model on one file prints its accuracy. With several of anything, or with --to, every combination is a cell:
its samples and all figures are kept in a folder, and the same command goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...common.errors import ConfigError
from ...common.run_folder import RunFolder, existing, write_atomic
from ..progress import Progress
from ..wording import shown
from .options import in_own_dtype, model_settings, output_file

if TYPE_CHECKING:
    from ...common.config import Config, EvalSetConfig
    from ...replay.evaluating.evaluated import Cell, EvaluatedSample
    from ...rollout.evaluate.elsewhere import Elsewhere
    from ...rollout.evaluate.evaluation import Evaluation
    from ..evaluation.asked import Asked

_SAMPLING = {
    "temperature": (float, "0 takes the most likely token"),
    "top_p": (float, "share of the probability that tokens are sampled from, in (0, 1]"),
}
"""Settings of the section ``evaluate`` that are also options; they may be given several times."""
OUT = Path("evaluations")
"""Where evaluations go by default."""
PARALLEL, REQUEST_SECONDS = 32, 600.0
"""Requests to a server at a time, and seconds that it has for an answer, by default."""
LONGEST_REQUEST = 1_000_000
"""Seconds; sockets take no endless time."""


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
        "--model",
        action="append",
        metavar="DIR",
        help="Hugging Face folder or hub name (default: RUN/model); RUN@50, RUN@newest: a checkpoint; "
        "RUN@live: the workers of a run that goes on answer. Repeat it for several",
    )
    parser.add_argument(
        "--data", action="append", metavar="FILE", help="problems (default: the run's held-out set)"
    )
    parser.add_argument(
        "--benchmark",
        action="append",
        metavar="NAME",
        help="a known set (`tandem get benchmarks` fetches them), a file or a name on the hub; as --data, and "
        "keeps the samples",
    )
    parser.add_argument(
        "--form", metavar="NAME", help="form of FILE's rows (default: by its columns)"
    )
    parser.add_argument("--run", metavar="DIR", help="a run's folder")
    parser.add_argument(
        "--set",
        action="append",
        metavar="NAME",
        help="which of the run's held-out sets (default: the first one, or with --to all); several",
    )
    parser.add_argument("--limit", type=int, metavar="N", help="the first N problems")
    for key, (kind, about) in _SAMPLING.items():
        name = key.replace("_", "-")
        parser.add_argument(
            f"--{name}", type=kind, action="append", help=f"{about} (evaluate.{key}); several"
        )
    parser.add_argument(
        "--samples",
        type=int,
        help="responses per problem; their mean accuracy is reported (evaluate.samples)",
    )
    parser.add_argument(
        "--template", action="append", metavar="NAME", help="data.template; several"
    )
    parser.add_argument(
        "--plan",
        metavar="FILE",
        help="YAML with models, benchmarks, temperatures, top_p, templates",
    )
    parser.add_argument(
        "--to", metavar="DIR", help=f"folder of samples and figures (default: {OUT}/… by the plan)"
    )
    parser.add_argument(
        "--workers", type=int, default=1, metavar="N", help="processes with an engine each"
    )
    parser.add_argument("--worker", metavar="I/N", help=argparse.SUPPRESS)
    # Where the command that has started a worker keeps the models of checkpoints.
    parser.add_argument("--exports", metavar="DIR", help=argparse.SUPPRESS)
    parser.add_argument(
        "--endpoint", metavar="URL", help="an OpenAI-compatible server that has the models"
    )
    parser.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the server's key"
    )
    parser.add_argument(
        "--parallel",
        type=int,
        metavar="N",
        help=f"requests to the server at a time (default: {PARALLEL})",
    )
    parser.add_argument(
        "--request-seconds",
        type=float,
        metavar="S",
        help=f"time that the server has for one answer (default: {REQUEST_SECONDS:g})",
    )
    parser.add_argument(
        "--second-grader", metavar="MODE", help="another reward.mode, whose verdicts stand beside"
    )
    parser.add_argument("--token-ids", action="store_true", help="keep the responses' tokens too")
    parser.add_argument("--parquet", action="store_true", help="write samples as parquet too")
    parser.add_argument(
        "--recompute", metavar="DIR", help="compute the figures of a folder's samples anew"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument(
        "--out",
        action="append",
        metavar="FILE",
        help="write the figures there, as JSON; once for each --set",
    )


def run(arguments: argparse.Namespace) -> int:
    """Returns 130 if it was interrupted and the same command goes on."""
    if arguments.limit is not None and arguments.limit < 1:
        raise ConfigError(f"--limit {arguments.limit}: at least 1 problem is needed")
    if arguments.workers < 1 or (arguments.parallel is not None and arguments.parallel < 1):
        raise ConfigError("--workers and --parallel are at least 1")
    seconds = arguments.request_seconds
    if seconds is not None and not 0 < seconds <= LONGEST_REQUEST:
        raise ConfigError(
            f"--request-seconds {seconds:g} should be above 0, and at most {LONGEST_REQUEST:,}"
        )
    for out in arguments.out or ():
        output_file(out)
    if arguments.recompute:
        return _recompute(arguments)
    arguments.before, arguments.by_plan = argparse.Namespace(**vars(arguments)), {}
    if arguments.plan:
        _read_plan(arguments)
    _refuse_idle(arguments)
    lists = ("model", "data", "temperature", "top_p", "template")
    if arguments.endpoint and (arguments.workers > 1 or arguments.token_ids):
        raise ConfigError(
            "--endpoint: a server's tokens aren't known, and --parallel says how many requests it gets at a "
            "time: leave out --token-ids and --workers"
        )
    kept = any(
        getattr(arguments, name)
        for name in ("benchmark", "plan", "to", "endpoint", "second_grader", "token_ids", "parquet")
    )
    several = any(len(getattr(arguments, name) or ()) > 1 for name in lists)
    live = any(name.endswith("@live") for name in arguments.model or ())
    if kept or several or live or arguments.workers > 1:
        return _cells(arguments)
    return _one(arguments)


def _refuse_idle(arguments: argparse.Namespace) -> None:
    """Refuses options that would change nothing beside the others."""
    named = arguments.data or arguments.benchmark
    if arguments.set and named:
        raise ConfigError(
            f"--set {arguments.set[0]} is a set of the run's, and --data, --benchmark or the plan names {named[0]}: "
            f"leave one of them out"
        )
    if arguments.form and not named:
        raise ConfigError(
            f"--form {arguments.form} is the form of a file's rows: name the file with --data or --benchmark"
        )
    for name in ("api_key_env", "parallel", "request_seconds"):
        if getattr(arguments, name) is not None and not arguments.endpoint:
            raise ConfigError(
                f"--{name.replace('_', '-')} {getattr(arguments, name)} is for a server: name it with --endpoint"
            )


# --- several cells, whose samples are kept ---------------------------------------------------


def _cells(arguments: argparse.Namespace) -> int:
    from ...replay.evaluating.evaluated import EvaluationFolder
    from ...replay.inspecting.rows import evaluation_logs
    from ..evaluation.plan import note_greedy, prepare, same_models, short_name
    from ..evaluation.report import summarise, table
    from ..evaluation.run import Workers, add_times, begin, finish, gpus_of, left, owned, work
    from ..host.environments import check_environments

    out = _only(arguments.out)
    config, run_folder = _config(arguments, every=True)
    check_environments(config)
    several = arguments.workers > 1
    gpus = gpus_of(arguments.workers, config.rollout.gpus_per_worker) if several else []
    asked = _asked(arguments, config, run_folder)
    if arguments.to:
        asked = same_models(asked, EvaluationFolder(Path(arguments.to).expanduser()))
    os.environ.setdefault("OMP_NUM_THREADS", str(config.rollout.threads))
    exports = Path(arguments.exports or Path(arguments.to or OUT) / "models").expanduser()
    with prepare(asked, config, exports, run_folder) as prepared:
        place = Path(arguments.to).expanduser() if arguments.to else OUT / short_name(prepared.plan)
        folder = EvaluationFolder(place)
        sampler = partial(_sampler, arguments) if arguments.endpoint else None
        if arguments.worker:
            _as_worker()
            number, _, count = arguments.worker.partition("/")
            work(prepared, folder, worker=(int(number), int(count)), sampler=sampler)
            return 0
        note_greedy(prepared)
        with owned(place):
            begin(folder, prepared.plan)
            total, done = left(folder, prepared)
            progress = Progress(sys.stderr, "evaluated", total, done)
            start = time.perf_counter()
            try:
                if done < total and several:
                    words = [*_again(arguments), "--to", str(place), "--exports", str(exports)]
                    Workers(words, arguments.workers, gpus, folder).run(progress)
                elif done < total:
                    work(prepared, folder, progress=progress, sampler=sampler)
                finish(folder, prepared, parquet=arguments.parquet)
            except KeyboardInterrupt:
                progress.end()
                print(
                    f"stopped: {shown(place)} has what was made; the same command goes on",
                    file=sys.stderr,
                )
                return 130
            progress.end()
            add_times(folder, time.perf_counter() - start, total - done)
            summary = summarise(folder)
            if config.log.inspect:
                for _ in evaluation_logs(folder):
                    pass
    said = f"{table(summary)}\nsamples and all figures: {shown(place.absolute())}"
    _print(arguments, summary, said, out)
    return 0


def _recompute(arguments: argparse.Namespace) -> int:
    from ...replay.evaluating.evaluated import EvaluationFolder
    from ..evaluation.report import summarise, table

    out = _only(arguments.out)
    summary = summarise(EvaluationFolder(Path(arguments.recompute).expanduser()))
    _print(arguments, summary, table(summary), out)
    return 0


def _only(outs: list[str] | None) -> str | None:
    """The file that the figures of all cells go to."""
    if outs and len(outs) > 1:
        raise ConfigError(f"--out comes {len(outs)} times, and there is one table of figures")
    return outs[0] if outs else None


def _print(
    arguments: argparse.Namespace, figures: dict[str, Any], text: str, out: str | None
) -> None:
    as_json = json.dumps(figures, indent=1)
    # First: whatever becomes of the file, the figures are not lost.
    print(as_json if arguments.json else text, flush=True)
    if out:
        write_atomic(Path(out).expanduser(), as_json + "\n")


def _read_plan(arguments: argparse.Namespace) -> None:
    """Adds the models, benchmarks and settings of the YAML to what the options name; ``by_plan`` is the rest."""
    from ...common.config import read_yaml
    from ..evaluation.asked import SEVERAL, from_yaml

    lists = from_yaml(read_yaml(Path(arguments.plan).expanduser()), arguments.plan)
    arguments.model = [*(arguments.model or ()), *map(str, lists["models"])]
    arguments.benchmark = [*(arguments.benchmark or ()), *lists["benchmarks"]]
    arguments.by_plan = {key: lists[name] for key, name in SEVERAL.items()}
    arguments.by_plan |= {"samples": lists["samples"], "limit": lists["limit"]}
    # First: of two values of a setting the later one counts, and what the command line says overrides the file.
    arguments.words = [*lists["settings"], *arguments.words]


def _asked(arguments: argparse.Namespace, config: Config, folder: RunFolder | None) -> Asked:
    from ..evaluation.asked import SEVERAL, Asked, benchmark, distinct, sets_of, ways

    models = list(arguments.model or ())
    if not models and folder is not None:
        models = [str(folder.model)]
    if not models:
        raise ConfigError("name the models with --model DIR, or a run with --run DIR")
    given = [*(arguments.benchmark or ()), *(arguments.data or ())]
    sets = [one for name in given for one in benchmark(name, form=arguments.form)]
    values = {key: getattr(arguments, key) or [] for key in SEVERAL}
    for key in ("samples", "limit"):
        values[key] = [] if getattr(arguments, key) is None else [getattr(arguments, key)]
    otherwise = arguments.by_plan
    if not sets:
        if folder is None:
            raise ConfigError(
                "name the problems with --benchmark NAME or --data FILE, or a run with --run DIR"
            )
        sets = sets_of(config, arguments.set)
        # A plan stands above what the run says of its own sets, as it stands above the run's other settings.
        values = {key: [*own, *otherwise.get(key, ())] for key, own in values.items()}
    return Asked(
        models=tuple(dict.fromkeys(models)),
        benchmarks=tuple(way for one in distinct(sets) for way in ways(one, values, otherwise)),
        second_mode=arguments.second_grader,
        token_ids=arguments.token_ids,
        endpoint=arguments.endpoint,
    )


def _again(arguments: argparse.Namespace) -> list[str]:
    """The words of this command for a worker, which is told its folder."""
    # Without what the plan's file has added: the worker reads it itself.
    arguments = arguments.before
    words = list(arguments.words)
    for name in ("model", "data", "benchmark", "temperature", "top_p", "template", "set"):
        for value in getattr(arguments, name) or ():
            words += [f"--{name.replace('_', '-')}", str(value)]
    for name in ("plan", "form", "run", "limit", "samples", "second_grader"):
        if (value := getattr(arguments, name)) is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return [*words, *(["--token-ids"] if arguments.token_ids else [])]


def _as_worker() -> None:
    """Ends as by Ctrl-C when the command that has started it says so."""
    import signal

    signal.signal(signal.SIGTERM, signal.default_int_handler)


def _sampler(arguments: argparse.Namespace, model: str) -> Elsewhere:
    from ...rollout.evaluate.elsewhere import Elsewhere

    return Elsewhere(
        model,
        arguments.endpoint,
        key_variable=arguments.api_key_env,
        parallel=arguments.parallel or PARALLEL,
        seconds=arguments.request_seconds or REQUEST_SECONDS,
    )


# --- one model on one file -------------------------------------------------------------------


def _one(arguments: argparse.Namespace) -> int:
    config, folder = _config(arguments)
    model = arguments.model[0] if arguments.model else str(folder.model) if folder else None
    if model is None:
        raise ConfigError("name the model with --model DIR, or a run with --run DIR")
    sets = _held_out(arguments, config, folder)
    outs = arguments.out or [None] * len(sets)
    if len(outs) != len(sets):
        raise ConfigError(
            f"--out comes {len(outs)} times, and {len(sets)} {'set is' if len(sets) == 1 else 'sets are'} evaluated"
        )
    # The environment is read when torch is loaded, below.
    os.environ.setdefault("OMP_NUM_THREADS", str(config.rollout.threads))
    from ...common.config import of_set
    from ..evaluation.asked import Asked
    from ..evaluation.plan import find_model, note_greedy, place_of, prepare
    from ..evaluation.report import told
    from ..evaluation.run import tell
    from ..host.environments import check_environments
    from ..host.preflight import check_model
    from ..host.servers import check_servers

    exports = OUT / "models"
    path = find_model(model, exports).path
    config = config.model_copy(update={"model": config.model.model_copy(update={"path": path})})
    for held_out in sets:
        own = of_set(config, held_out)
        check_model(own)
        check_environments(own)
        check_servers(own.reward)
    asked = Asked(models=(path,), benchmarks=tuple(sets))
    with prepare(asked, config, exports, folder) as prepared:
        note_greedy(prepared)
        cells = zip(prepared.plan.cells, sets, outs, strict=True)
        places = {cell.name: (place_of(held_out, folder), out) for cell, held_out, out in cells}

        def found(cell: Cell, samples: Sequence[EvaluatedSample], result: Evaluation) -> None:
            data, out = places[cell.name]
            figures = {"model": model, "data": str(data), **result.to_dict()}
            _print(arguments, figures, told(result, samples, data), out)

        tell(prepared, found)
    return 0


def _config(
    arguments: argparse.Namespace, *, every: bool = False
) -> tuple[Config, RunFolder | None]:
    """The settings to evaluate with, and the run's folder if there is a run.

    Args:
        every: whether sampling is settled for each cell.
    """
    from ...common.config import build, read_yaml
    from ..run.opened.presets import load, split

    models = arguments.model or []
    name, overrides = split(arguments.words, "")
    folder = existing(arguments.run) if arguments.run else _run_of(models, has_preset=bool(name))
    given = {} if every else {key: (getattr(arguments, key) or (None,))[0] for key in _SAMPLING}
    given["samples"] = None if every else arguments.samples
    overrides += [f"evaluate.{key}={value}" for key, value in given.items() if value is not None]
    if not every and arguments.template:
        overrides.append(f"data.template={arguments.template[0]}")
    if name:
        return load(name).resolve(overrides), folder
    if folder is not None:
        if len(models) > 1 and not arguments.run and not arguments.worker:
            print(f"note: the settings are those of {shown(folder.path)}", file=sys.stderr)
        return build(read_yaml(folder.config), overrides, stored=True), folder
    if "miniature" in models:
        return load("miniature").resolve(overrides), None
    data = arguments.data[0] if arguments.data else ""
    plain = {"run": {"steps": 1}, "data": {"train": [{"path": data}]}}
    config = build(plain, overrides)
    # An endpoint's models are in whatever it has loaded.
    if arguments.endpoint:
        return config, None
    return in_own_dtype(config, map(model_settings, models)), None


def _run_of(models: Sequence[str], *, has_preset: bool) -> RunFolder | None:
    """The run that models are from; None if none of them is of a run.

    Raises:
        ConfigError: they are of several, and no preset says which settings count.
    """
    found: dict[Path, tuple[str, RunFolder]] = {}
    for model in models:
        run, at, step = model.rpartition("@")
        of_run = at and (step.isdecimal() or step in ("live", "newest"))
        folder = RunFolder(Path(model).expanduser().absolute().parent)
        if of_run and not Path(model).exists():
            folder = existing(run)
        elif not (folder.run_json.exists() and folder.config.exists()):
            continue
        found.setdefault(folder.path.resolve(), (model, folder))
    if len(found) > 1 and not has_preset:
        (first, settings), (second, _), *_ = found.values()
        raise ConfigError(
            f"--model {first} and --model {second} are of different runs: name the one whose settings count for all "
            f"models, as in --run {shown(settings.path)}, or a preset"
        )
    return next((folder for _, folder in found.values()), None)


def _held_out(
    arguments: argparse.Namespace, config: Config, folder: RunFolder | None
) -> list[EvalSetConfig]:
    """The sets that one model is evaluated on."""
    from ..evaluation.asked import of_path, sets_of

    if arguments.data:
        named = of_path(arguments.data[0], arguments.form)
        return [named.model_copy(update={"limit": arguments.limit})]
    if folder is None:
        raise ConfigError("name the problems with --data FILE, or a run with --run DIR")
    sets = sets_of(config, arguments.set)
    # What the command line says stands above the set's own.
    given = {key: (getattr(arguments, key) or (None,))[0] for key in (*_SAMPLING, "template")}
    given |= {"limit": arguments.limit, "samples": arguments.samples}
    changes = {key: value for key, value in given.items() if value is not None}
    return [one.model_copy(update=changes) for one in (sets if arguments.set else sets[:1])]
