"""The cells of an evaluation: where each model is, how it is sampled, and its problems as the model gets them."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from msgspec import structs

from ...common import hub, templates, wire
from ...common.config import Config, EvalSetConfig, of_set
from ...common.errors import ConfigError, DataError
from ...common.printable import printable
from ...common.records import REPEATS
from ...common.run_folder import RunFolder, existing
from ...replay.evaluating.evaluated import Cell, EvaluationFolder, Plan
from .asked import Asked, slug

if TYPE_CHECKING:
    from ...common.records import Problem
    from ...reward.grading import Grader
    from ...rollout.evaluate.answering import Benchmark

LIVE = "live"
"""In the place of a checkpoint's step: the newest weights that a run's workers have."""
NEWEST = "newest"
UNLIMITED = 10**9
FIRST_BYTES = 1 << 20
"""Bytes of a file of weights that tell it from another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """One model, where it is."""

    name: str
    """As it was named, with a checkpoint's step in the place of ``newest``."""
    path: str
    """Folder or hub name; of a live run that of the model that it trains. Empty for an endpoint's."""
    live: RunFolder | None = None
    """The run whose workers answer."""
    digest: str = ""
    """Of the first bytes of its weights; empty for what isn't a folder."""


def find_model(name: str, exports: Path, *, elsewhere: bool = False) -> Model:
    """Where a model is. A checkpoint (``RUN@STEP``) is exported into the evaluation's folder.

    Args:
        name: a folder, a hub name, ``RUN@STEP``, ``RUN@newest`` or ``RUN@live``.
        exports: folder for the models of checkpoints.
        elsewhere: whether a server has it, under this name.

    Raises:
        DataError: there is no such run or checkpoint.
    """
    if elsewhere:
        return Model(name=name, path="")
    run, at, step = name.rpartition("@")
    if at and not Path(name).exists() and (step.isdecimal() or step in (LIVE, NEWEST)):
        folder = existing(run)
        if step == LIVE:
            return Model(name=name, path="", live=folder)
        path, number = _exported(folder, None if step == NEWEST else int(step), exports)
        return Model(name=f"{run}@{number}", path=str(path), digest=model_digest(path))
    path = Path(name).expanduser()
    return Model(name=name, path=name, digest=model_digest(path) if path.is_dir() else "")


def same_models(asked: Asked, folder: EvaluationFolder) -> Asked:
    """With the steps that ``newest`` stood for when the evaluation was begun."""
    if not folder.plan_json.exists():
        return asked
    known = dict.fromkeys(cell.model for cell in folder.plan().cells)

    def same(name: str) -> str:
        run, at, step = name.rpartition("@")
        if not at or step != NEWEST:
            return name
        begun = (
            one for one in known if one.startswith(f"{run}@") and one[len(run) + 1 :].isdecimal()
        )
        return next(begun, name)

    return replace(asked, models=tuple(map(same, asked.models)))


def _exported(folder: RunFolder, step: int | None, exports: Path) -> tuple[Path, int]:
    from ...learner.exporting import export
    from ...learner.resume.checkpoints import Checkpoints

    if step is None:
        with Checkpoints(folder.checkpoints).hold(None) as checkpoint:
            if checkpoint is None:
                raise DataError(f"{folder.path} has no checkpoint yet: name {folder.path}@{LIVE}")
            step = checkpoint.version.step
    # Other runs' folders may have this name, and this one's earlier run had.
    out = exports / f"{folder.path.name}@{step}-{folder.read_run()['run_id']}"
    if not out.exists():
        exports.mkdir(parents=True, exist_ok=True)
        export(folder, _config_of_run(folder), out, step=step)
    return out, step


def model_digest(folder: Path) -> str:
    """Tells a model from another in the same folder: a digest of the beginning of its weights, and their sizes."""
    digest = xxhash.xxh3_64()
    for file in sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin")):
        digest.update(f"{file.name} {file.stat().st_size}\n".encode())
        with open(file, "rb") as content:
            digest.update(content.read(FIRST_BYTES))
            # The end has other layers than the beginning.
            content.seek(max(0, file.stat().st_size - FIRST_BYTES))
            digest.update(content.read(FIRST_BYTES))
    return digest.hexdigest()


@dataclass(slots=True)
class Prepared:
    """The cells, with what each is made of. Close it to end its graders."""

    plan: Plan
    cells: dict[str, tuple[Model, Config, EvalSetConfig]]
    """By the cell's name."""
    _reading: _Reading

    def benchmark(self, name: str) -> Benchmark:
        """A cell's problems and graders."""
        model, own, held_out = self.cells[name]
        return self._reading.benchmark(model, own, held_out, self.plan_cell(name).second_mode)

    def plan_cell(self, name: str) -> Cell:
        """A cell by its name."""
        return next(cell for cell in self.plan.cells if cell.name == name)

    def __enter__(self) -> Prepared:
        return self

    def __exit__(self, *_: object) -> None:
        self._reading.close()


def prepare(asked: Asked, config: Config, exports: Path, run: RunFolder | None) -> Prepared:
    """Finds the models, reads every benchmark for each, and settles the cells.

    Args:
        asked: what is wanted.
        config: settings of everything else.
        exports: folder for the models of checkpoints.
        run: the run to whose folder paths may be relative.

    Raises:
        ConfigError: two cells would be the same, or a setting can't be.
        DataError: a model or a benchmark can't be read.
    """
    reading = _Reading(run, chat=asked.endpoint is not None)
    cells: list[Cell] = []
    parts: dict[str, tuple[Model, Config, EvalSetConfig]] = {}
    try:
        for name in asked.models:
            model = find_model(name, exports, elsewhere=asked.endpoint is not None)
            live = None if model.live is None else _config_of_run(model.live)
            path = model.path or (live or config).model.path
            base = config.model_copy(
                update={"model": config.model.model_copy(update={"path": path})}
            )
            if asked.endpoint is not None:
                # Its tokens aren't known here; the server refuses what is too long.
                data = base.data.model_copy(update={"max_prompt_tokens": UNLIMITED})
                base = base.model_copy(update={"data": data})
            for held_out in asked.benchmarks:
                own = of_set(base, held_out)
                if asked.endpoint is not None:
                    _refuse_prefill(own)
                if live is not None:
                    _require_room(model, held_out, own, live)
                cell = _cell(model, own, held_out, asked)
                if (
                    twin := next((one for one in cells if one.name == cell.name), None)
                ) is not None:
                    if (twin.model, twin.benchmark) == (cell.model, cell.benchmark):
                        raise ConfigError(
                            f"two cells are named {cell.name}: give each benchmark its own name"
                        )
                    # Only what a folder's name can't hold tells them apart.
                    cell = structs.replace(cell, name=f"{cell.name}-{len(cells)}")
                parts[cell.name] = (model, own, held_out)
                problems = reading.benchmark(model, own, held_out, cell.second_mode).problems
                cells.append(_with_data(cell, problems, model.digest))
    except BaseException:
        reading.close()
        raise
    settings = {
        "engine": config.rollout.engine,
        "dtype": config.engine_dtype,
        "deterministic": config.run.deterministic,
        "reward": config.reward.model_dump(mode="json", exclude={"graders", "pools", "mode"}),
        "endpoint": asked.endpoint,
    }
    if config.environments.is_on:
        if asked.endpoint is not None:
            raise ConfigError(
                "--endpoint answers prompts, and episodes of environments.use are played by a model that is loaded "
                "here: leave --endpoint out, or set environments.use={}"
            )
        settings["environments"] = config.environments.model_dump(
            mode="json", exclude={"servers", "episodes", "port"}
        )
    plan = Plan(cells=tuple(cells), settings=settings, token_ids=asked.token_ids)
    return Prepared(plan=plan, cells=parts, _reading=reading)


def short_name(plan: Plan) -> str:
    """A folder's name that is the same for the same plan."""
    content = json.dumps(structs.asdict(plan), default=structs.asdict, sort_keys=True)
    first, digest = plan.cells[0], xxhash.xxh3_64_hexdigest(content.encode())
    return f"{slug(first.model)}.{slug(first.benchmark)}-{digest[:8]}"


def place_of(held_out: EvalSetConfig, run: RunFolder | None) -> Path:
    """Where a set's rows are.

    Args:
        held_out: the set; one of the hub is fetched if it isn't here.
        run: the run to whose folder its path may be relative.
    """
    place = Path(held_out.path).expanduser() if run is None else run.resolve(held_out.path)
    return hub.local(held_out.path, place, held_out.revision)


def note_greedy(prepared: Prepared) -> None:
    """Says what changes nothing, since a set is answered with the most likely tokens alone."""
    cells = prepared.plan.cells
    sampled = {cell.benchmark for cell in cells if cell.temperature > 0}
    idle: dict[str, None] = {}
    for cell in cells:
        if cell.benchmark in sampled:
            continue
        sampling = prepared.cells[cell.name][1].evaluate
        if sampling.top_p < 1:
            idle[f"{cell.benchmark}: top_p={sampling.top_p:g}"] = None
        if sampling.samples > 1:
            idle[f"{cell.benchmark}: samples={sampling.samples}"] = None
        problems = prepared.benchmark(cell.name).problems
        if any(problem.extra.get(REPEATS, 1) > 1 for problem in problems):
            idle[f"{cell.benchmark}: the repetition of its rows"] = None
    for what in idle:
        print(
            f"note: {what} changes nothing at temperature 0, which takes the most likely token: give --temperature too",
            file=sys.stderr,
        )


def _config_of_run(folder: RunFolder) -> Config:
    from ...common.config import build, read_yaml

    return build(read_yaml(folder.config), stored=True)


def _require_room(model: Model, held_out: EvalSetConfig, own: Config, live: Config) -> None:
    """Refuses what a live run's engines would cut: their context is that of the run's own samples."""
    for key, wanted, room in (
        ("rollout.max_new_tokens", own.rollout.max_new_tokens, live.rollout.max_new_tokens),
        ("data.max_prompt_tokens", own.data.max_prompt_tokens, live.data.max_prompt_tokens),
    ):
        if wanted > room:
            newest = f"{model.name.removesuffix(LIVE)}{NEWEST}"
            raise ConfigError(
                f"{model.name}: {held_out.name} has {key}={wanted:,}, and the engines of this run have room for "
                f"{room:,}: lower it, or evaluate {newest}, which gets an engine of its own"
            )


def _refuse_prefill(own: Config) -> None:
    """Refuses a prefill of what goes to a server as messages, which it renders itself."""
    if own.data.template == templates.OWN and own.data.prefill:
        raise ConfigError(
            f"--endpoint: with data.template={templates.OWN} the server renders the messages, and "
            f"data.prefill={own.data.prefill!r} can't be put after them: set data.prefill='', or name another template "
            f"with --template"
        )


def _cell(model: Model, own: Config, held_out: EvalSetConfig, asked: Asked) -> Cell:
    sampling = own.evaluate
    name = ".".join(
        (
            slug(model.name),
            slug(held_out.name),
            slug(own.data.template),
            f"t{sampling.temperature:g}",
            f"p{sampling.top_p:g}",
        )
    )
    return Cell.of(
        own,
        name=name,
        model=model.name,
        benchmark=held_out.name,
        second_mode=asked.second_mode,
    )


def _with_data(cell: Cell, problems: Sequence[Problem], model: str) -> Cell:
    digest = xxhash.xxh3_64()
    for problem in problems:
        digest.update(wire.encode(problem))
    return structs.replace(cell, problems=len(problems), data=digest.hexdigest(), weights=model)


class _Reading:
    """Reads benchmarks for models, each once, and holds the graders.

    Args:
        run: the run to whose folder paths may be relative.
        chat: whether a server has the models, which gets texts or messages.
    """

    def __init__(self, run: RunFolder | None, *, chat: bool) -> None:
        self._run = run
        self._chat = chat
        self._graders: dict[str, Grader] = {}
        self._tokenizers: dict[str, Any] = {}
        self._problems: dict[str, list[Problem]] = {}

    def benchmark(
        self, model: Model, own: Config, held_out: EvalSetConfig, second_mode: str | None
    ) -> Benchmark:
        """A benchmark as a model gets it."""
        from ...rollout.evaluate.answering import Benchmark

        grader = self._grader(own)
        # Ways of sampling have the same problems.
        read = held_out.model_dump(exclude={"temperature", "top_p", "samples"})
        key = f"{own.model.path}\n{read!r}\n{own.data!r}\n{own.reward!r}"
        if key not in self._problems:
            self._problems[key] = self._read(own, held_out, grader)
        second = None
        if second_mode is not None:
            reward = own.reward.model_copy(update={"mode": second_mode})
            second = self._grader(own.model_copy(update={"reward": reward}))
        return Benchmark(
            problems=self._problems[key],
            grader=grader,
            second=second,
            subject=held_out.subject,
            level=held_out.level,
        )

    def close(self) -> None:
        """Ends the graders."""
        for grader in self._graders.values():
            grader.close()

    def _grader(self, own: Config) -> Grader:
        from ...reward.grading import Grader

        key = own.reward.model_dump_json()
        if key not in self._graders:
            self._graders[key] = Grader(own.reward)
        return self._graders[key]

    def _read(self, own: Config, held_out: EvalSetConfig, grader: Grader) -> list[Problem]:
        from ..ingest.prepare import load_tokenizer
        from ..ingest.rows import SourceReader
        from ..ingest.texts import Texts

        path = own.model.path
        if path not in self._tokenizers:
            self._tokenizers[path] = Texts() if self._chat else load_tokenizer(path)
        data = place_of(held_out, self._run)
        reader = SourceReader(own, self._tokenizers[path], grader, lambda text: None, messages=True)
        problems, _, counts = reader.read(held_out, data)
        if any(number for number, _ in counts.left_out()):
            print(f"note: {data.name}: {printable(str(counts))}", file=sys.stderr)
        return problems
