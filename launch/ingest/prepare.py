"""Problems, expert traces and held-out sets: from parquet, checked and tokenised, into Redis.

Two halves. :func:`prepare` reads, renders, tokenises and grades, and writes nothing, so that
whatever is wrong with the data is told before anything is started. :func:`load` puts the result
into Redis and creates the ledger; it may be repeated.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from ...common import models, prompts, wire
from ...common.config import Config, SourceConfig, to_yaml
from ...common.config.choices import own_rows
from ...common.errors import ConfigError, DataError, StoreError, TandemError
from ...common.records import ExpertTrace, FinishReason, Problem, Verdict
from ...common.run_folder import RunFolder
from ...replay.ledger import Ledger, LedgerSettings
from ...replay.readers import ProblemRow, parquet_files, read_rows
from ...replay.store import RunStore
from ...reward.grading import Grade, GradeItem, Grader
from ..host.preflight import TOKENIZER_FILES, check_model
from ..plan.placement import workers_of

OPENERS = ("<think>\n", "<think>")
"""A trace may repeat the opener that the rendered prompt ends with; it is taken off."""


@dataclass(slots=True, kw_only=True)
class SourceCounts:
    """What became of a source's rows."""

    problems: int = 0
    """Kept."""
    traces: int = 0
    """Kept."""
    long_prompts: int = 0
    """Dropped: over ``data.max_prompt_tokens``."""
    long_traces: int = 0
    """Left out: over ``rollout.max_new_tokens``; the problem stays."""
    bad_golds: int = 0
    """Dropped: the grader can't read the gold answer."""
    refused_traces: dict[str, int] = field(default_factory=dict)
    """Left out by verdict, where it isn't one of ``expert.accept``."""
    unpaid_traces: int = 0
    """Left out: the grader found them correct and the reward is 0, as where a gate is closed."""
    unknown_logprobs: int = 0
    """Traces whose recorded log-probs are of another tokenizer and were left out."""

    def __str__(self) -> str:
        parts = [f"{self.problems:,} problems"]
        if self.traces or self.refused_traces or self.unpaid_traces or self.long_traces:
            parts.append(f"{self.traces:,} expert traces")
        left_out = [
            (self.long_prompts, "prompts too long"),
            (self.bad_golds, "gold answers unreadable"),
            (self.long_traces, "traces too long"),
            (self.unknown_logprobs, "traces with log-probs of another tokenizer (taken off)"),
            *((n, f"traces graded {verdict}") for verdict, n in self.refused_traces.items()),
            (self.unpaid_traces, "traces graded correct and paid nothing (is a gate closed?)"),
        ]
        told = [f"{count:,} {what}" for count, what in left_out if count]
        return ", ".join(parts) + (f"; left out: {', '.join(told)}" if told else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """All that a run starts from, in memory."""

    problems: tuple[Problem, ...]
    """Of all sources."""
    traces: tuple[ExpertTrace, ...]
    """Accepted ones."""
    evaluate: dict[str, tuple[Problem, ...]]
    """Held-out problems by set."""
    sources: tuple[tuple[str, int, int], ...]
    """``(name, problems, weight)``."""
    data_digest: str
    """Of problems and traces."""
    counts: dict[str, SourceCounts]
    """By source or set."""


def source_name(source: SourceConfig) -> str:
    """A source's name: given, or the stem of its path."""
    return source.short_name


@contextmanager
def data_files(config: Config, folder: RunFolder) -> Iterator[Callable[[str], Path]]:
    """Resolves the config's data paths; the miniature's files are made in a temporary folder.

    They are the same whenever they are made, so that they can be read before the run's folder
    exists, and written there later (:func:`write_miniature`).
    """
    if config.data.miniature is None:
        yield folder.resolve
        return
    with tempfile.TemporaryDirectory(prefix="tandem-data-") as temporary:
        made = Path(temporary)
        _write_miniature(config, made)

        def resolve(path: str) -> Path:
            wanted = folder.resolve(path)
            if wanted.parent == folder.data and (made / wanted.name).exists():
                return made / wanted.name
            return wanted

        yield resolve


def write_miniature(config: Config, folder: RunFolder) -> None:
    """Writes the miniature's parquet files into the run's folder; the same ones change nothing."""
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
        DataError: it can't be loaded, or names no end token; in one line.
    """
    try:
        tokenizer = models.load_tokenizer(path)
    except TandemError:
        raise
    except Exception as error:  # noqa: BLE001 - the tokenizers library raises bare Exceptions
        raise DataError(
            f"model.path={path}: its tokenizer can't be read: {' '.join(str(error).split())[:200]}"
        ) from None
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"model.path={path}: its tokenizer names no end-of-sequence token: set eos_token in "
            f"tokenizer_config.json"
        )
    return tokenizer


def needs_traces(config: Config) -> bool:
    """Whether expert traces are used at all: ungraded ones cost nothing."""
    return config.expert.per_group > 0 or config.learner.source == "offline"


def inputs_digest(config: Config, folder: RunFolder) -> str:
    """Digest of everything that :func:`prepare` reads; equal means: Redis holds its result."""
    digest = hashlib.blake2b(digest_size=16)
    tree = config.model_dump(mode="json")
    # When a trace enters is nothing to what is read, and runs of earlier versions don't have it.
    expert = {name: value for name, value in tree["expert"].items() if name != "when"}
    digest.update(repr((tree["data"], expert, tree["model"]["path"])).encode())
    digest.update(repr((config.rollout.max_new_tokens, config.learner.source)).encode())
    model = check_model(config)
    files: list[Path] = []
    if model is not None:
        files += [model / name for name in (*TOKENIZER_FILES, "tokenizer_config.json")]
    with data_files(config, folder) as resolve:
        paths = [source.path for source in config.data.train]
        paths += [held_out.path for held_out in config.data.evaluate]
        for path in paths:
            files += parquet_files(resolve(path))
        for file in files:
            if file.exists():
                digest.update(f"{file.name}\n".encode())
                with open(file, "rb") as content:
                    while chunk := content.read(1 << 20):
                        digest.update(chunk)
    return digest.hexdigest()


def prepare(
    config: Config, folder: RunFolder, doing: Callable[[str], None] = lambda text: None
) -> Prepared:
    """Reads and checks everything; writes nothing into the run's folder.

    Args:
        config: of the run.
        folder: its, where paths may lie.
        doing: told what is being done, at every row.

    Raises:
        DataError: something is wrong with a data set; names file, row and what to do.
        ConfigError: two sources or sets of one name.
    """
    names = [source_name(source) for source in config.data.train]
    sets = [one.name for one in config.data.evaluate]
    for kind, given in (("data.train", names), ("data.evaluate", sets)):
        twice = sorted({name for name in given if given.count(name) > 1})
        if twice:
            raise ConfigError(f"{kind} has two entries named {twice[0]!r}: give each its own name")
    with data_files(config, folder) as resolve:
        # Reading is quick and most mistakes are found by it; the tokenizer takes seconds to load.
        doing("reading the data files")
        rows = {source_name(s): read_rows(resolve(s.path)) for s in config.data.train}
        held_out = {
            one.name: read_rows(resolve(one.path))[: one.limit] for one in config.data.evaluate
        }
        files = {source_name(s): resolve(s.path) for s in config.data.train}
        files |= {one.name: resolve(one.path) for one in config.data.evaluate}
    tokenizer = load_tokenizer(config.model.path)
    # The traces are the expert's: what is forced upon own samples isn't forced upon them.
    grader = Grader(config.reward.model_copy(update={"own_reward": None}))
    try:
        maker = _Maker(config, tokenizer, grader, doing)
        problems: list[Problem] = []
        traces: list[ExpertTrace] = []
        counts: dict[str, SourceCounts] = {}
        for name in names:
            made, with_traces, counts[name] = maker.source(name, rows[name], files[name])
            problems += made
            traces += with_traces
        evaluate: dict[str, tuple[Problem, ...]] = {}
        for name in sets:
            kept, _, counts[name] = maker.source(name, held_out[name], files[name], held_out=True)
            evaluate[name] = tuple(kept)
    finally:
        grader.close()
    if config.learner.source == "offline" and not traces:
        raise DataError(
            "learner.source=offline trains on expert traces, and no source has one that "
            f"expert.accept={list(config.expert.accept)} lets in{_told(counts, names)}"
        )
    if config.expert.per_group and not traces and config.learner.source == "ledger":
        raise DataError(
            f"expert.per_group={config.expert.per_group} wants expert traces, and no source has "
            f"one{_told(counts, names)}: add a source with targets, or set expert.per_group=0"
        )
    digest = hashlib.blake2b(digest_size=16)
    for problem in problems:
        digest.update(wire.encode(problem))
    for trace in traces:
        # Not the grades: a newer grader that accepts the same traces leaves the data the same.
        digest.update(f"{trace.trace_id} {trace.tokenizer_digest} ".encode())
        digest.update(trace.tokens.tobytes())
    return Prepared(
        problems=tuple(problems),
        traces=tuple(traces),
        evaluate=evaluate,
        sources=tuple(
            (name, counts[name].problems, source.weight)
            for name, source in zip(names, config.data.train, strict=True)
        ),
        data_digest=digest.hexdigest(),
        counts=counts,
    )


def _told(counts: dict[str, SourceCounts], names: Sequence[str]) -> str:
    """What became of each source's rows, in brackets; nothing where no trace was left out."""
    told = [f"{n}: {c}" for n in names if (c := counts[n]).refused_traces or c.unpaid_traces]
    return f" ({'; '.join(told)})" if told else ""


class _Maker:
    """Makes problems and traces of rows."""

    def __init__(
        self, config: Config, tokenizer: Any, grader: Grader, doing: Callable[[str], None]
    ) -> None:
        self._config = config
        self._doing = doing
        self._longest = prompts.longest_token(tokenizer)
        self._tokenizer = tokenizer
        self._grader = grader
        self._digest = prompts.tokenizer_digest(tokenizer)

    def source(
        self, name: str, rows: Sequence[ProblemRow], file: Path, *, held_out: bool = False
    ) -> tuple[list[Problem], list[ExpertTrace], SourceCounts]:
        """Problems and traces of one source, and what was left out."""
        counts = SourceCounts()
        self._doing(f"reading the gold answers of {file.name}")
        bad = self._bad_golds(rows)
        data = self._config.data
        if bad and data.bad_golds == "refuse":
            first = min(bad)
            more = f" (and {len(bad) - 1:,} more)" if len(bad) > 1 else ""
            gold = next(row.gold for row in rows if row.row == first)
            raise DataError(
                f"{file.name} row {first}: the gold answer {gold[:60]!r} can't be parsed{more}: "
                f"correct it, or set data.bad_golds=drop to leave such rows out"
            )
        counts.bad_golds = len(bad)
        problems: list[Problem] = []
        drafts: list[tuple[Problem, ExpertTrace]] = []
        wanted = needs_traces(self._config) and not held_out
        for place, row in enumerate(rows, 1):
            self._doing(f"{file.name}: row {place:,} of {len(rows):,}")
            if row.row in bad:
                continue
            # Ten million characters take a tokenizer many seconds.
            size = sum(len(message.content) for message in row.prompt)
            if size > data.max_prompt_tokens * self._longest:
                problem, told = None, f"{size:,} characters"
            else:
                problem = self._problem(name, row, file)
                told = f"{len(problem.prompt_tokens):,} tokens"
            if problem is None or len(problem.prompt_tokens) > data.max_prompt_tokens:
                if data.overlong == "refuse":
                    raise DataError(
                        f"{file.name} row {row.row}: the prompt has {told} and "
                        f"data.max_prompt_tokens is {data.max_prompt_tokens:,}: raise it, or set "
                        f"data.overlong=drop"
                    )
                counts.long_prompts += 1
                continue
            trace = self._trace(problem, row, file, counts) if wanted else None
            if trace is not None:
                drafts.append((problem, trace))
            problems.append(problem)
        if drafts:
            self._doing(f"grading {len(drafts):,} traces of {file.name}")
        traces = self._graded(drafts, counts)
        with_trace = {trace.problem_id: trace.trace_id for trace in traces}
        problems = [
            replace(problem, trace_ids=(with_trace[problem.problem_id],))
            if problem.problem_id in with_trace
            else problem
            for problem in problems
        ]
        counts.problems, counts.traces = len(problems), len(traces)
        if not problems:
            raise DataError(
                f"{file.name}: not one of its {len(rows):,} rows can be used ({counts}): raise "
                f"data.max_prompt_tokens, or name another file"
            )
        return problems, traces, counts

    def _problem(self, name: str, row: ProblemRow, file: Path) -> Problem:
        messages = [{"role": m.role, "content": m.content} for m in row.prompt]
        try:
            text, tokens = prompts.render(
                self._tokenizer, messages, self._config.data.system_prompt
            )
        except DataError as error:
            raise DataError(f"{file.name} row {row.row}: {error}") from None
        except Exception as error:  # noqa: BLE001 - a chat template may raise anything
            raise DataError(
                f"{file.name} row {row.row}: the model's chat template refused the prompt: "
                f"{' '.join(str(error).split())[:200]}"
            ) from None
        return Problem(
            problem_id=f"{name}/{row.row}",
            prompt_text=text,
            prompt_tokens=tokens,
            gold=row.gold,
            data_source=row.data_source,
            ability=row.ability,
            trace_ids=(),
            extra=row.extra,
        )

    def _trace(
        self, problem: Problem, row: ProblemRow, file: Path, counts: SourceCounts
    ) -> ExpertTrace | None:
        """The row's trace, ungraded; None without one or where it is too long."""
        if row.target is None:
            return None
        text = row.target
        for opener in OPENERS:
            if problem.prompt_text.endswith(opener) and text.startswith(opener):
                text = text.removeprefix(opener)
                break
        limit = self._config.rollout.max_new_tokens
        if len(text) > limit * self._longest:
            tokens, told = None, f"{len(text):,} characters"
        else:
            tokens = prompts.encode_response(self._tokenizer, text)
            told = f"{len(tokens):,} tokens"
        if tokens is None or len(tokens) > limit:
            if self._config.data.overlong == "refuse":
                raise DataError(
                    f"{file.name} row {row.row}: the trace has {told} and "
                    f"rollout.max_new_tokens is {limit:,}: raise it, or set data.overlong=drop"
                )
            counts.long_traces += 1
            return None
        logprobs = row.target_logprobs
        if logprobs is not None and len(logprobs) != len(tokens):
            counts.unknown_logprobs += 1
            logprobs = None
        return ExpertTrace(
            trace_id=f"{problem.problem_id}#0",
            problem_id=problem.problem_id,
            tokens=tokens,
            logprobs=None if logprobs is None else np.asarray(logprobs, np.float32),
            text=text,
            tokenizer_digest=self._digest,
            reward=None,
            verdict=Verdict.UNPARSABLE,
            components={},
            grader=None,
        )

    def _graded(
        self, drafts: Sequence[tuple[Problem, ExpertTrace]], counts: SourceCounts
    ) -> list[ExpertTrace]:
        accepted = []
        for (_, trace), grade in zip(drafts, self._grade(drafts), strict=True):
            if grade.verdict.value not in self._config.expert.accept:
                name = grade.verdict.value
                counts.refused_traces[name] = counts.refused_traces.get(name, 0) + 1
                continue
            if grade.verdict is Verdict.CORRECT and not grade.reward:
                # Its row would stand below the baseline, and the expert's tokens be unlearned.
                counts.unpaid_traces += 1
                continue
            accepted.append(
                replace(
                    trace,
                    reward=grade.reward,
                    verdict=grade.verdict,
                    components=grade.components,
                    grader=self._grader.name,
                )
            )
        return accepted

    def _grade(self, drafts: Sequence[tuple[Problem, ExpertTrace]]) -> list[Grade]:
        return self._grader.grade_texts(
            [
                GradeItem(
                    text=trace.text,
                    gold=problem.gold,
                    data_source=problem.data_source,
                    finish_reason=FinishReason.STOP,
                    prompt_text=problem.prompt_text,
                    tokens=trace.tokens,
                    extra=problem.extra,
                )
                for problem, trace in drafts
            ]
        )

    def _bad_golds(self, rows: Sequence[ProblemRow]) -> set[int]:
        """Rows whose gold answer the grader can't read, or not within its limits."""
        if not self._grader.needs_verdict:
            return set()  # Nothing that pays asks for the answer.
        rows = [row for row in rows if not self._grader.has_tests(row.extra)]
        unique = sorted({row.gold for row in rows})
        bad = self._grader.unreadable_golds(unique)
        if self._grader.mode.compare != "exact":
            bad |= {gold for gold in unique if broken(gold)}
        return {row.row for row in rows if row.gold in bad}


def broken(gold: str) -> bool:
    """True for a gold answer that is cut or holds nothing to compare.

    Parsers of mathematics take such a text for a name and compare it letter by letter, so that
    every answer would be wrong.

    >>> [broken(gold) for gold in ("\\\\frac{1}{", "??", "[0, 1)", "\\\\{1, 2\\\\}", "∅")]
    [True, True, False, False, False]
    """
    plain = gold.replace("\\\\", "").replace("\\{", "").replace("\\}", "")
    depth = 0
    for character in plain:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return True
    return depth != 0 or not any(c.isalnum() or c in "∅∞" for c in plain)


def role_config(config: Config) -> Config:
    """The config as roles read it.

    A model's folder is an absolute path; and where there is no worker to evaluate (offline), the
    learner must not wait for one: the job evaluates by itself.
    """
    if not workers_of(config):
        evaluate = config.evaluate.model_copy(update={"at_start": False, "at_end": False})
        if config.learner.source == "offline":
            config = config.model_copy(update={"evaluate": evaluate})
    folder = Path(config.model.path).expanduser()
    if config.model.path == models.MINIATURE or not folder.is_dir():
        return config
    model = config.model.model_copy(update={"path": str(folder.absolute())})
    return config.model_copy(update={"model": model})


def load(ledger: Ledger, runs: RunStore, config: Config, prepared: Prepared) -> None:
    """Puts everything into Redis and creates the ledger, whose existence says that all is there.

    Raises:
        StoreError: Redis holds a ledger of this run with other frozen settings.
    """
    runs.put_problems(prepared.problems)
    runs.put_traces(prepared.traces)
    for name, problems in prepared.evaluate.items():
        runs.put_eval_set(name, problems)
    runs.curve_client()
    runs.put_config(to_yaml(role_config(config)))
    ledger.create(LedgerSettings.of(config, prepared.sources, prepared.data_digest))


def reload(
    ledger: Ledger,
    runs: RunStore,
    config: Config,
    sources: Sequence[tuple[str, int, int]],
    data_digest: str,
) -> None:
    """Joins the ledger of a resumed run, whose data Redis holds; what may change is updated.

    Raises:
        StoreError: Redis holds no ledger of this run, or one with other frozen settings.
    """
    if not ledger.store.holds_run():
        raise StoreError(
            f"Redis at {ledger.store.address} holds no ledger of run {ledger.store.run_id}: its "
            f"append-only file is gone. Restore the run's redis/ folder, or start over with "
            f"--fresh (the old folder is moved aside)"
        )
    runs.put_config(to_yaml(role_config(config)))
    ledger.create(LedgerSettings.of(config, sources, data_digest))
    least = ledger.settings.least_verdicts
    if own_rows(config) < least and config.learner.source == "ledger":
        raise StoreError(
            f"run {ledger.store.run_id} was begun by an older version, whose ledger rejects every "
            f"group of fewer than {least} own samples, and it asks for {own_rows(config)}: start "
            f"over with --fresh (the old folder is moved aside)"
        )
