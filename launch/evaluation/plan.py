"""What an evaluation of several cells is: models, benchmarks, ways of sampling, templates; and their problems."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash
from msgspec import structs
from pydantic import ValidationError

from ...common import evaluation_sets, hub, templates, wire
from ...common.config import Config, EvalSetConfig, of_set
from ...common.errors import ConfigError, DataError
from ...common.printable import printable
from ...common.run_folder import RunFolder, existing
from ...replay.evaluating.evaluated import Cell, EvaluationFolder, Plan

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
KEYS = ("models", "benchmarks", "temperatures", "top_p", "templates")
"""Keys of a plan's YAML that are lists."""
SEVERAL = {"template": "templates", "temperature": "temperatures", "top_p": "top_p"}
"""Settings of a set of which each value makes a cell, and their keys in a plan's YAML."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What the command line or the YAML asks for."""

    models: tuple[str, ...]
    benchmarks: tuple[EvalSetConfig, ...]
    """One for each way in which a benchmark is asked."""
    second_mode: str | None = None
    token_ids: bool = False
    endpoint: str | None = None
    """Address of a server that has the models."""


def benchmark(given: Any, *, form: str | None = None) -> list[EvalSetConfig]:
    """The sets that a name, a path or an entry stands for.

    Args:
        given: a known name, a path here or on the hub, or an entry of ``data.evaluate``.
        form: form of its rows, if it isn't to be found out.

    Raises:
        ConfigError: it is nothing of this.
    """
    try:
        if not isinstance(given, str):
            entries = evaluation_sets.entries([given])
        elif given in evaluation_sets.names():
            entries = evaluation_sets.named(given)
        else:
            place = Path(given).expanduser()
            if not place.exists() and hub.HubData.parse(given) is None:
                # It names the nearest.
                evaluation_sets.named(given)
            entries = [{"path": given, "name": _stem(given)}]
        given_here = {} if form is None else {"form": form}
        return [EvalSetConfig(**{**entry, **given_here}) for entry in entries]
    except (ValueError, TypeError) as error:
        raise ConfigError(f"benchmark {given}: {error}") from None


Values = Mapping[str, Sequence[Any]]
"""Of settings of a set, by their names."""


def ways(held_out: EvalSetConfig, given: Values, otherwise: Values) -> list[EvalSetConfig]:
    """The set with every combination of the values that are asked for.

    Args:
        held_out: a set, whose own value counts where none is given.
        given: what the command line says.
        otherwise: what a plan says for sets that say nothing themselves.

    Raises:
        ConfigError: a value can't be.
    """
    own = held_out.model_dump()
    names = (*SEVERAL, "samples", "limit")
    lists = []
    for name in names:
        values = [*given.get(name, ()), *(otherwise.get(name, ()) if own[name] is None else ())]
        every = list(dict.fromkeys(values)) or [own[name]]
        lists.append(every if name in SEVERAL else every[:1])
    try:
        return [
            EvalSetConfig(**{**own, **dict(zip(names, values, strict=True))})
            for values in product(*lists)
        ]
    except ValidationError as error:
        wrong = error.errors()[0]
        what = f"{wrong['loc'][0]} {wrong['input']!r}"
        raise ConfigError(f"{held_out.name}: {what}: {wrong['msg']}") from None


def _stem(path: str) -> str:
    parsed = hub.HubData.parse(path)
    return Path(path).stem if parsed is None else parsed.repo.rpartition("/")[2]


def distinct(sets: Sequence[EvalSetConfig]) -> list[EvalSetConfig]:
    """The sets, those with the same name named by their folders too."""
    names = [one.name for one in sets]
    return [
        one.model_copy(update={"name": slug(str(Path(one.path).with_suffix("")))})
        if names.count(one.name) > 1
        else one
        for one in sets
    ]


def from_yaml(content: Mapping[str, Any], name: str) -> dict[str, list[Any]]:
    """The lists of a plan's YAML; a single value stands for a list of one, and nothing for an empty one.

    Raises:
        ConfigError: it has another key, or a value of the wrong type.
    """
    unknown = sorted(content.keys() - {*KEYS, "samples", "limit", "settings"})
    if unknown:
        raise ConfigError(
            f"{name}: unknown key {unknown[0]!r}: it may have {', '.join(KEYS)}, samples, limit and settings"
        )
    found = {}
    for key in (*KEYS, "settings", "samples", "limit"):
        value = content.get(key)
        found[key] = value if isinstance(value, list) else [] if value is None else [value]
        if None in found[key]:
            raise ConfigError(f"{name}: {key} has an empty entry: leave it out")
    for key in ("temperatures", "top_p"):
        for value in found[key]:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise ConfigError(f"{name}: {key} has {value!r}, which isn't a number")
    for value in found["templates"]:
        if not isinstance(value, str):
            raise ConfigError(f"{name}: templates has {value!r}, which isn't a name or a path")
    for value in found["settings"]:
        if not isinstance(value, str) or "=" not in value:
            raise ConfigError(f"{name}: settings has {value!r}: write each as section.key=value")
    for key in ("samples", "limit"):
        value = content.get(key)
        if value is not None and (type(value) is not int or value < 1):
            raise ConfigError(f"{name}: {key} is {value!r}, and should be a whole number from 1")
    return found


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
    _stack: ExitStack = field(default_factory=ExitStack)

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
                if cell.name in parts:
                    raise ConfigError(
                        f"two cells are named {cell.name}: give each benchmark its own name"
                    )
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
    return Cell(
        name=name,
        model=model.name,
        benchmark=held_out.name,
        template=own.data.template,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        samples=1 if sampling.temperature == 0 else sampling.samples,
        max_new_tokens=own.rollout.max_new_tokens,
        stop=own.data.stops,
        mode=own.reward.mode,
        seed=own.run.seed,
        second_mode=asked.second_mode,
    )


def _with_data(cell: Cell, problems: Sequence[Problem], model: str) -> Cell:
    digest = xxhash.xxh3_64()
    for problem in problems:
        digest.update(wire.encode(problem))
    return structs.replace(cell, problems=len(problems), data=digest.hexdigest(), weights=model)


def slug(text: str) -> str:
    """A text as a part of a file's name: its last two folders' names, with hyphens for what can't be in one.

    >>> slug("runs/miniature@50"), slug("Qwen/Qwen2.5-Math-1.5B"), slug("/a/b/c/model/")
    ('runs-miniature@50', 'Qwen-Qwen2.5-Math-1.5B', 'c-model')
    """
    short = "/".join(text.rstrip("/").split("/")[-2:])
    return re.sub(r"[^\w@+.-]+", "-", short).strip("-.") or "-"


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
        place = Path(held_out.path).expanduser()
        if self._run is not None:
            place = self._run.resolve(held_out.path)
        data = hub.local(held_out.path, place, held_out.revision)
        reader = SourceReader(own, self._tokenizers[path], grader, lambda text: None, messages=True)
        problems, _, counts = reader.read(held_out, data)
        if any(number for number, _ in counts.left_out()):
            print(f"note: {data.name}: {printable(str(counts))}", file=sys.stderr)
        return problems
