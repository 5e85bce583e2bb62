"""Reads and checks all data of a run, and writes nothing into Redis.

So whatever is wrong with the data is reported before anything is started.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...common import hub, models, templates, wire
from ...common.config import Config, EvalSetConfig, SourceConfig, of_set
from ...common.config.checks.choices import memory_refusal
from ...common.errors import ConfigError, DataError, TandemError
from ...common.objectives import WITHOUT_GROUP
from ...common.plain import one_line
from ...common.records import ExpertTrace, Problem
from ...common.run_folder import RunFolder
from ...replay import archive
from ...replay.evaluating.held_out import held_out
from ...replay.forms import check_form
from ...replay.forms import data_files as files_of
from ...reward.grading import Grader
from ..host.preflight import TOKENIZER_SETTINGS, check_model
from .accepting import admitted, trains_on_traces
from .archived import of_archive
from .counts import SourceCounts
from .pack import NAME as PACKED
from .pack import packed
from .rows import SourceReader
from .traces import needs_traces


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """All data that a run starts from, in memory."""

    problems: tuple[Problem, ...]
    """Problems of all sources."""
    traces: tuple[ExpertTrace, ...]
    """Accepted traces."""
    evaluate: dict[str, tuple[Problem, ...]]
    """Held-out problems by set."""
    sources: tuple[tuple[str, int, int], ...]
    """``(name, problems, weight)`` of each source."""
    data_digest: str
    """Digest of problems and traces."""
    problem_bytes: int
    """Bytes of the largest problem, which travels with each of its groups."""
    other_digests: dict[str, str]
    """Digests of whatever else a run goes on with, by what the user calls it: each held-out set, and the archive."""
    counts: dict[str, SourceCounts]
    """What became of the rows, by source or set."""


@contextmanager
def data_files(
    config: Config, folder: RunFolder
) -> Iterator[Callable[[SourceConfig | EvalSetConfig], Path]]:
    """Finds the files of the config's sources and sets; the miniature's files are made in a temporary folder.

    These files are the same whenever they are made, so that they can be read before the run's folder
    exists, and written there later (:func:`write_miniature`).
    """
    if config.data.miniature is None:
        yield lambda source: hub.local(
            source.path, folder.resolve(source.path), getattr(source, "revision", None)
        )
        return
    with tempfile.TemporaryDirectory(prefix="tandem-data-") as temporary:
        made = Path(temporary)
        _write_miniature(config, made)

        def resolve(source: SourceConfig | EvalSetConfig) -> Path:
            wanted = folder.resolve(source.path)
            if wanted.parent != folder.data:
                return wanted
            if (made / wanted.name).exists():
                return made / wanted.name
            if not wanted.exists():
                written = ", ".join(sorted(path.name for path in made.glob("*.parquet")))
                raise DataError(
                    f"{source.path} is no file of data.miniature={config.data.miniature}, which writes "
                    f"{written}: give the path of one of these, or the data.miniature that writes it"
                )
            return wanted

        yield resolve


def write_miniature(config: Config, folder: RunFolder) -> None:
    """Writes the miniature's parquet files into the run's folder; files that are there already stay."""
    if config.data.miniature is not None:
        _write_miniature(config, folder.data)


def _write_miniature(config: Config, out: Path) -> None:
    from ..miniature.parquet import write

    write(
        out,
        config.data.miniature,  # type: ignore[arg-type]
        seed=config.run.seed,
        traces=config.data.miniature_traces,
        fresh=config.data.miniature_fresh,
        train=config.data.miniature_fresh,
    )


def load_tokenizer(path: str) -> Any:
    """The model's tokenizer.

    Raises:
        DataError: it can't be loaded, or names no end token; the message is one line.
    """
    try:
        tokenizer = models.load_tokenizer(path)
    except TandemError:
        raise
    except Exception as error:  # noqa: BLE001 - the tokenizers library raises bare Exceptions
        raise DataError(
            f"model.path={path}: its tokenizer can't be read: {one_line(error)}"
        ) from None
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"model.path={path}: its tokenizer names no end-of-sequence token: set eos_token in "
            f"tokenizer_config.json"
        )
    return tokenizer


def inputs_digest(config: Config, folder: RunFolder) -> str:
    """Digest of everything that :func:`prepare` reads; if it is unchanged, Redis holds the result.

    Args:
        config: the run's settings.
        folder: the run's folder, to which data paths may be relative.
    """
    digest = hashlib.blake2b(b"whole tokenizer", digest_size=16)
    tree = config.model_dump(mode="json")
    # Data are the same whenever a trace enters a group, and older runs lack this setting.
    expert = {name: value for name, value in tree["expert"].items() if name != "when"}
    digest.update(repr((_without_new(tree["data"]), expert, tree["model"]["path"])).encode())
    digest.update(repr((config.rollout.max_new_tokens, config.learner.source)).encode())
    model = check_model(config)
    files: list[Path] = []
    if config.data.archive is not None:
        digest.update(_archive_digest(config.data.archive).encode())
    if model is not None:
        files += _tokenizer_files(model)
    with data_files(config, folder) as resolve:
        sources: list[SourceConfig | EvalSetConfig] = [*config.data.train, *config.data.evaluate]
        for source in sources:
            files += files_of(resolve(source))
        files += _template_files(config)
        for file in files:
            if file.exists():
                digest.update(f"{file.name}\n".encode())
                with open(file, "rb") as content:
                    while chunk := content.read(1 << 20):
                        digest.update(chunk)
    return digest.hexdigest()


def _tokenizer_files(model: Path) -> list[Path]:
    """What prompts may be rendered and encoded by, chat templates included."""
    names = (*hub.TOKENIZER_FILES, *TOKENIZER_SETTINGS, "chat_template.jinja")
    further = sorted((model / "additional_chat_templates").glob("*.jinja"))
    return [*(model / name for name in names), *further]


def _archive_digest(path: str) -> str:
    return archive.digest(Path(path).expanduser())


def _template_files(config: Config) -> list[Path]:
    """Templates that are files of the user's; the published ones come with the package."""
    given = {config.data.template, *(one.template for one in config.data.evaluate)}
    own = given - {None, *templates.names()}
    return sorted(Path(str(name)).expanduser() for name in own)


_OLD_OF_SET = ("path", "name", "form", "limit")
"""Settings of a held-out set that all runs have."""


def _without_new(data: Mapping[str, Any]) -> dict[str, Any]:
    """The section ``data`` without settings at their defaults that older runs lack."""
    evaluate = [
        {
            k: v
            for k, v in one.items()
            if k in _OLD_OF_SET or (v is not None and (k, v) != ("graded", True))
        }
        for one in data["evaluate"]
    ]
    train = [{k: v for k, v in one.items() if (k, v) != ("turns", "last")} for one in data["train"]]
    kept = {key: value for key, value in data.items() if (key, value) != ("pack_tokens", None)}
    return {**kept, "train": train, "evaluate": evaluate}


def prepare(
    config: Config, folder: RunFolder, doing: Callable[[str], None] = lambda text: None
) -> Prepared:
    """Reads and checks everything; writes nothing into the run's folder.

    Args:
        folder: the run's folder, to which data paths may be relative.
        doing: called for every row with what is being done.

    Raises:
        DataError: something is wrong with a data set; the message names file, row and way out.
        ConfigError: two sources or sets have the same name.
    """
    names = [source.short_name for source in config.data.train]
    sets = [one.name for one in config.data.evaluate]
    for kind, given in (("data.train", names), ("data.evaluate", sets)):
        twice = sorted({name for name in given if given.count(name) > 1})
        if twice:
            raise ConfigError(f"{kind} has two entries named {twice[0]!r}: give each its own name")
    with data_files(config, folder) as resolve:
        all_sources: list[SourceConfig | EvalSetConfig] = [
            *config.data.train,
            *config.data.evaluate,
        ]
        for source in all_sources:
            # Finds most mistakes before the tokenizer is loaded, which takes seconds.
            _check_source(source, resolve(source))
        tokenizer = load_tokenizer(config.model.path)
        # The traces are the expert's: a prefix that is forced on own samples isn't forced on them.
        grader = Grader(config.reward.model_copy(update={"own_reward": None}))
        try:
            reader = SourceReader(config, tokenizer, grader, doing)
            problems: list[Problem] = []
            traces: list[ExpertTrace] = []
            counts: dict[str, SourceCounts] = {}
            evaluate: dict[str, tuple[Problem, ...]] = {}
            for source in all_sources:
                name = source.short_name
                if isinstance(source, SourceConfig):
                    made, with_traces, counts[name] = reader.read(source, resolve(source))
                    problems += made
                    traces += with_traces
                    continue
                own = of_set(config, source)
                with (
                    closing(Grader(own.reward))
                    if own.reward != config.reward
                    else nullcontext(grader) as by
                ):
                    of_it = SourceReader(own, tokenizer, by, doing) if own is not config else reader
                    made, _, counts[name] = of_it.read(source, resolve(source))
                evaluate[name] = tuple(made)
        finally:
            grader.close()
    if trains_on_traces(config) and not traces:
        raise DataError(
            "learner.source=offline trains on expert traces, and no source has one that "
            f"expert.accept={list(admitted(config))} admits{_left_out(counts, names)}"
        )
    if trains_on_traces(config) and config.learner.objective.rejects:
        _check_pairs(config, problems)
    if needs_traces(config) and not traces and config.learner.source == "ledger":
        ways = ["add a source with targets"]
        if any(counts[name].long_traces for name in names):
            ways.insert(0, f"raise rollout.max_new_tokens={config.rollout.max_new_tokens}")
        if any(counts[name].refused_traces for name in names):
            ways.insert(0, f"let more verdicts in than expert.accept={list(admitted(config))}")
        raise DataError(
            f"expert.per_group={config.expert.per_group} needs expert traces, and no source has "
            f"one{_left_out(counts, names)}: {', '.join(ways)}, or set expert.per_group=0"
        )
    sources = [(source.short_name, source.weight) for source in config.data.train]
    if config.data.pack_tokens is not None:
        problems, traces, counts[PACKED] = packed(
            problems, traces, tokenizer, tokens=config.data.pack_tokens, seed=config.run.seed
        )
        sources = [(PACKED, 1)]
    others = {f"data.evaluate {name}": _digest_of(held) for name, held in evaluate.items()}
    if config.data.archive is not None:
        others["data.archive"] = _archive_digest(config.data.archive)
    # Apart from the digest of problems and traces, which runs of older versions have without them.
    others["data.train's labels and log-probs"] = _digest_of_given(traces)
    digest = hashlib.blake2b(digest_size=16)
    problem_bytes = 0
    for problem in problems:
        encoded = wire.encode(problem)
        problem_bytes = max(problem_bytes, len(encoded))
        digest.update(encoded)
    if why := memory_refusal(config, problem_bytes):
        raise ConfigError(why)
    for trace in traces:
        # Grades are left out: a newer grader that accepts the same traces leaves the data unchanged.
        digest.update(f"{trace.trace_id} {trace.tokenizer_digest} ".encode())
        digest.update(trace.tokens.tobytes())
        if trace.source is not None:
            digest.update(trace.source.tobytes())
    return Prepared(
        problems=tuple(problems),
        traces=tuple(traces),
        evaluate=evaluate,
        sources=tuple((name, counts[name].problems, weight) for name, weight in sources),
        data_digest=digest.hexdigest(),
        problem_bytes=problem_bytes,
        other_digests=others,
        counts=counts,
    )


def _digest_of(problems: Sequence[Problem]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for problem in problems:
        digest.update(wire.encode(problem))
    return digest.hexdigest()


def _digest_of_given(traces: Sequence[ExpertTrace]) -> str:
    """Digest of what the data say of traces: their own verdicts, and the recorded log-probs."""
    digest = hashlib.blake2b(digest_size=16)
    for trace in traces:
        if trace.grader is None or trace.logprobs is not None:
            verdict = trace.verdict.value if trace.grader is None else ""
            digest.update(f"{trace.trace_id} {verdict} ".encode())
        if trace.logprobs is not None:
            digest.update(trace.logprobs.tobytes())
    return digest.hexdigest()


def trained_traces(config: Config, prepared: Prepared) -> int:
    """Number of the traces that are trained on: all but those of held-out pairs (``data.heldout_pairs``)."""
    share = config.data.heldout_pairs
    if not share:
        return len(prepared.traces)
    away = held_out((p for p in prepared.problems if p.trace_ids), share, config.run.seed)
    return sum(trace.problem_id not in away for trace in prepared.traces)


def _check_source(source: SourceConfig | EvalSetConfig, path: Path) -> None:
    """Refuses a source of no known form; the rows of an archive have none."""
    turns = getattr(source, "turns", "last")
    if not of_archive(path):
        check_form(path, source.form, whole=turns == "all")
    elif source.form is not None:
        raise DataError(f"{path} is an archive, which has no form: leave out form={source.form}")
    elif turns == "all":
        raise DataError(
            f"{path} is an archive, whose samples are learned from as they were sampled: leave out turns=all"
        )


def _check_pairs(config: Config, problems: Sequence[Problem]) -> None:
    """Refuses data without the pairs that the objective or the settings ask for."""
    objective, share = config.learner.objective, config.data.heldout_pairs
    none = "no source has pairs of them (chosen and rejected)"
    if any(len(problem.trace_ids) > 1 for problem in problems):
        held_out(problems, share, config.run.seed)
    elif objective.unit == "group":
        raise DataError(
            f"learner.objective.name={objective.name} compares two responses to one question, and {none}: "
            f"name one that has, or choose sft"
        )
    elif share:
        raise DataError(f"data.heldout_pairs={share:g} holds out pairs, and {none}: set it to 0")
    single = sum(len(problem.trace_ids) == 1 for problem in problems)
    if single and objective.unit == "row" and objective.baseline not in WITHOUT_GROUP:
        raise DataError(
            f"learner.objective.name={objective.name} with advantage={objective.baseline} compares the "
            f"responses to one question, and {single:,} of {len(problems):,} questions have only one: set "
            f"learner.objective.advantage=none"
        )


def _left_out(counts: dict[str, SourceCounts], names: Sequence[str]) -> str:
    """What became of each source's rows, in brackets; empty if no trace was left out."""
    sources = [
        f"{n}: {c}"
        for n in names
        if (c := counts[n]).refused_traces or c.unpaid_traces or c.long_traces
    ]
    return f" ({'; '.join(sources)})" if sources else ""
