"""What ``tandem sweep`` runs: every combination of values with every seed; and the table of them all.

Whatever is wrong with a combination is refused before the first run starts. :mod:`.sweep_runs` runs them.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
import statistics
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ....common import disk
from ....common.config import parse_yaml
from ....common.errors import ConfigError, DataError, TandemError
from ....common.plain import read_object
from ....common.run_folder import RunFolder, write_atomic
from ...host.preflight import check_host
from ...host.redis_server import PASSWORD_VARIABLE
from ...plan.hardware import GpuName, Machine, machine
from ...wording import duration, shown, shown_folder, shown_tandem
from ..opened.opening import Kind, open_folder
from ..opened.presets import Preset, load, split
from ..opened.record import apart

NAME_LETTERS = 40
"""Length of a value in a run's name at most."""


@dataclass(slots=True, kw_only=True)
class Member:
    """One run of a sweep."""

    name: str
    """Name of its folder."""
    values: dict[str, str]
    """The varied settings, as they were given."""
    seed: int
    folder: RunFolder
    words: tuple[str, ...]
    """The words of its ``tandem`` command."""
    gpus: int = 0
    """Number of GPUs that it needs; 0 if it is placed on CPUs."""
    redis_port: int | None = None
    """The port of its own Redis, if ``launch.ports`` settles it."""
    seen: tuple[GpuName, ...] = ()
    """The GPUs that it has while it is running."""
    state: str = "waiting"
    """``waiting``, ``running``, ``finished``, ``stopped`` or ``failed``."""
    error: str = ""
    """Why it failed."""
    process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        """The file with what the run says, beside its folder."""
        return self.folder.path.with_name(f"{self.name}.log")

    def figures(self) -> dict[str, Any]:
        """What the table needs of its ``summary.json``; empty before it has finished."""
        if self.state != "finished":
            return {}
        path = self.folder.summary
        try:
            found = read_object(path.read_bytes(), str(path), DataError)
        except (OSError, DataError):
            return {}  # The run is over all the same, and the others go on.
        return {key: found.get(key) for key in FIGURES}


FIGURES = (
    "steps",
    "epochs",
    "samples_trained",
    "tokens_trained",
    "accuracy_before",
    "accuracy_after",
    "wall_seconds",
)
"""Figures of a run's summary that a sweep keeps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """What a sweep runs. Nothing has been written yet."""

    preset: str
    out: Path
    settings: Mapping[str, str]
    """Settings that all runs have, as they were given, without a password."""
    varied: Mapping[str, Sequence[str]]
    """Settings that vary, with their values as they were given."""
    seeds: Sequence[int]
    members: Sequence[Member] = field(default_factory=list)
    gpus: Sequence[GpuName] = ()
    """This machine's GPUs, of which every run that needs some gets its own."""
    password: str | None = field(default=None, repr=False)
    """The password that ``replay.redis_url`` held."""

    @property
    def definition(self) -> dict[str, Any]:
        """What makes it the same sweep as an earlier one."""
        return {
            "preset": self.preset,
            "settings": dict(self.settings),
            "varied": {key: list(values) for key, values in self.varied.items()},
            "seeds": list(self.seeds),
        }


# -- what is to be run ------------------------------------------------------------------------------


def plan(words: Sequence[str], *, seeds: str, out: str | None, jobs: int = 1) -> Sweep:
    """Resolves every run of a sweep; writes nothing.

    Args:
        words: a preset and settings, of which at least one has several values.
        seeds: a number of seeds, or the seeds separated by commas.
        out: the sweep's folder; None = ``runs/sweep-<preset>``.
        jobs: number of runs that may be up at a time.

    Raises:
        ConfigError: nothing varies, a run would be refused, two combinations are the same, or so many runs can't be up
            at a time.
        DataError: the folder holds another sweep or something else.
    """
    if jobs < 1:
        raise ConfigError(f"--jobs {jobs}: at least 1 run is needed at a time")
    name, overrides = split(words, "miniature")
    preset = load(name)
    if preset.stages:
        raise ConfigError(
            f"preset {preset.name} has stages, and a sweep compares single runs: name a preset without stages"
        )
    settings, varied, password = _settings(overrides)
    sweep = Sweep(
        preset=name,
        out=Path(out or f"runs/sweep-{preset.name}").expanduser().absolute(),
        settings=settings,
        varied=varied,
        seeds=_seeds(seeds),
    )
    sweep = _as_begun(sweep)
    here = machine()
    members = list(_members(sweep, preset, here))
    if jobs > 1:
        _refuse_one_port(members, jobs)
    return Sweep(
        **sweep.definition,
        out=sweep.out,
        members=members,
        gpus=[gpu.told for gpu in here.gpus],
        password=password,
    )


def _settings(
    overrides: Sequence[str],
) -> tuple[dict[str, str], dict[str, list[str]], str | None]:
    """Settings with one value, settings with several, and the password that was among them."""
    settings: dict[str, str] = {}
    varied: dict[str, list[str]] = {}
    password: str | None = None
    for word in overrides:
        key, _, text = word.partition("=")
        key = key.strip()
        if key in ("run.seed", "run.dir"):
            instead = "--seeds" if key == "run.seed" else "--out"
            raise ConfigError(f"{word}: a sweep sets {key} of each run: use {instead}")
        if key in settings or key in varied:
            raise ConfigError(f"{key} is given twice: write all its values in one word, {key}=a,b")
        values = cut(text)
        if len(values) == 1:
            word, found = apart(word)
            settings[key] = word.partition("=")[2]
            password = found or password
            continue
        # Values that vary name the runs' folders.
        if any(apart(one)[1] for one in (word, *(f"{key}={value}" for value in values))):
            raise ConfigError(
                f"{key} varies, and there is a password in it: leave it out and put it into {PASSWORD_VARIABLE}, or "
                f"quote the value if the comma is part of the password"
            )
        if "" in values:
            raise ConfigError(f"{word!r} has an empty value: write null, or leave the comma out")
        varied[key] = values
    if not varied:
        raise ConfigError(
            "nothing varies: give a setting several values, as in learner.optimizer.lr=1e-4,3e-4 "
            "(one run alone: `tandem start` or `tandem offline`)"
        )
    return settings, varied, password


def cut(text: str) -> list[str]:
    """The values of ``a,b,c``; brackets and quotes hold a value together.

    >>> cut("[a, b],[c]")
    ['[a, b]', '[c]']
    >>> cut("'1,2',3")
    ["'1,2'", '3']
    """
    values, depth, quote, before = [""], 0, "", ","
    for letter in text:
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"" and before in ",[{:":
            # Elsewhere it is an apostrophe.
            quote = letter
        elif letter in "[{":
            depth += 1
        elif letter in "]}":
            depth -= 1
        elif letter == "," and depth == 0:
            values.append("")
            before = letter
            continue
        values[-1] += letter
        before = before if letter.isspace() else letter
    return [value.strip() for value in values]


def _seeds(text: str) -> list[int]:
    parts = [part.strip() for part in text.removesuffix(",").split(",")]
    if not all(part.isdecimal() for part in parts):
        raise ConfigError(f"--seeds {text}: give a number of seeds, or seeds such as 0,7,9")
    seeds = [int(part) for part in parts]
    if "," not in text:
        seeds = list(range(seeds[0]))
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds {text}: give at least one seed, and none twice")
    return seeds


def _members(sweep: Sweep, preset: Preset, here: Machine) -> Iterator[Member]:
    names: set[str] = set()
    same: dict[str, str] = {}
    for chosen in itertools.product(*sweep.varied.values()):
        values = dict(zip(sweep.varied, chosen, strict=True))
        overrides = [f"{key}={value}" for key, value in {**sweep.settings, **values}.items()]
        about = " ".join(f"{key}={value}" for key, value in values.items())
        stem = name = _name(values)
        number = 2
        while name in names:
            name, number = f"{stem}-{number}", number + 1
        names.add(name)
        gpus = 0
        for seed in sweep.seeds:
            path = sweep.out / f"{name}-seed-{seed}"
            try:
                words = (*overrides, f"run.seed={seed}", shown_folder(path))
                opening = open_folder(preset, words, fresh=False)
                if opening.kept:
                    # Runs that are compared are of one version of the preset.
                    raise ConfigError(
                        f"preset {preset.name} has another {', '.join(opening.kept)} than when this run began: name "
                        f"another folder for the sweep with --out"
                    )
                if seed == sweep.seeds[0]:
                    anew = opening.kind is Kind.NEW
                    placement, _ = check_host(opening.config, here, anew=anew)
                    gpus = placement.gpus
            except TandemError as error:
                raise type(error)(f"{about}, seed {seed}: {error}") from None
            if seed == sweep.seeds[0]:
                tree = opening.config.model_dump(mode="json", exclude={"run": {"dir"}})
                twin = same.setdefault(json.dumps(tree), about)
                if twin != about:
                    raise ConfigError(f"{twin} and {about} are the same run: leave one out")
            ports, url = opening.config.launch.port_range, opening.config.replay.redis_url
            offline = opening.config.learner.source == "offline"
            yield Member(
                name=path.name,
                values=values,
                seed=seed,
                folder=opening.folder,
                words=("offline" if offline else "start", sweep.preset, *words),
                gpus=gpus,
                redis_port=ports[0] if ports is not None and url is None else None,
                state={Kind.NEW: "waiting", Kind.RESUMED: "stopped"}.get(opening.kind, "finished"),
            )


def _refuse_one_port(members: Sequence[Member], jobs: int) -> None:
    """Refuses runs side by side of which each would have its Redis on the same port."""
    used = Counter(one.redis_port for one in members if one.state != "finished")
    del used[None]
    for port, runs in used.items():
        if runs > 1:
            raise ConfigError(
                f"--jobs {jobs}: launch.ports puts the Redis of {runs} runs on port {port}, so that only one of them can "
                f"be up at a time: give --jobs 1, leave launch.ports out, or name one Redis for all with replay.redis_url"
            )


def _name(values: Mapping[str, str]) -> str:
    """``limit-16-lr-1e-3``: the last part of each key that is enough to tell it, and its value."""
    ends = Counter(key.rpartition(".")[2] for key in values)
    parts = []
    for key, value in values.items():
        end = key.rpartition(".")[2]
        parts += [end if ends[end] == 1 else key, value]
    cleaned = [re.sub(r"[^\w.+-]+", "_", part).strip("_")[:NAME_LETTERS] for part in parts]
    return "-".join(cleaned)


def _as_begun(sweep: Sweep) -> Sweep:
    """The sweep with the varied settings in the order in which its folder has them, since they name the runs."""
    path = sweep.out / "sweep.json"
    try:
        found = read_object(path.read_bytes(), str(path), DataError)
    except FileNotFoundError:
        other = sweep.out.exists() and not sweep.out.is_dir()
        if other or any(entry.name not in ("lock", "head") for entry in sweep.out.glob("*")):
            raise DataError(
                f"{shown(sweep.out)} holds something other than a sweep: name another folder with --out"
            ) from None
        return sweep
    wanted = sweep.definition
    changed = [key for key in ("preset", "settings", "varied") if found.get(key) != wanted[key]]
    gone = set(found.get("seeds") or []).difference(sweep.seeds)
    if changed or gone:
        raise DataError(
            f"{shown(sweep.out)} holds another sweep ({', '.join(changed) or 'more seeds'}: `{found.get('command')}`): "
            f"give it as it was, or name another folder with --out"
        )
    return replace(sweep, varied={key: sweep.varied[key] for key in found["varied"]})


def dry_run(sweep: Sweep) -> int:
    """Prints the command of every run, and what would become of it."""
    says = {"waiting": "new", "stopped": "is resumed", "finished": "is finished: skipped"}
    combinations = len(sweep.members) // len(sweep.seeds)
    print(
        f"{len(sweep.members)} runs of {sweep.preset} ({combinations} combinations x {len(sweep.seeds)} "
        f"seeds) in {shown(sweep.out)}; nothing is started or written"
    )
    for member in sweep.members:
        print(f"  {shlex.join([shown_tandem(), *member.words])}  ({says[member.state]})")
    return 0


# -- the table --------------------------------------------------------------------------------------


def _spread(values: Sequence[float]) -> list[float] | None:
    """Mean and standard deviation (n - 1; 0 for one value); None without values."""
    if not values:
        return None
    return [statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0]


def rows(sweep: Sweep) -> list[dict[str, Any]]:
    """A row for each combination: its values, the number of its runs, and mean and standard deviation of
    each figure over the seeds."""
    made = []
    for group in _combinations(sweep):
        found = [figures for member in group if (figures := member.figures())]
        made.append(
            {
                "values": {key: parse_yaml(text, key) for key, text in group[0].values.items()},
                "runs": len(group),
                "finished": len(found),
                **{
                    key: _spread([one[key] for one in found if one[key] is not None])
                    for key in FIGURES
                },
            }
        )
    return made


def _combinations(sweep: Sweep) -> Iterator[Sequence[Member]]:
    size = len(sweep.seeds)
    for first in range(0, len(sweep.members), size):
        yield sweep.members[first : first + size]


def _mean(members: Sequence[Member], key: str, form: str) -> str:
    values = [v for one in members if (v := one.figures().get(key)) is not None]
    return form.format(statistics.mean(values)) if values else "—"


def wall_time(members: Sequence[Member]) -> str:
    values = [v for one in members if (v := one.figures().get("wall_seconds")) is not None]
    return duration(statistics.mean(values)) if values else "—"


def accuracy(members: Sequence[Member]) -> str:
    """``0.2 ± 0.0 → 73.5 ± 0.5 (n = 3)``, in percent."""
    shares = []
    count = 0
    for key in ("accuracy_before", "accuracy_after"):
        values = [v for one in members if (v := one.figures().get(key)) is not None]
        spread = _spread([100 * value for value in values])
        count = max(count, len(values))
        if spread is not None:
            about = f" ± {spread[1]:.1f}" if len(values) > 1 else ""
            shares.append(f"{spread[0]:.1f}{about}")
        else:
            shares.append("—")
    return f"{' → '.join(shares)} (n = {count})" if count else "—"


def table(sweep: Sweep) -> list[str]:
    """The sweep as a table of Markdown, whose columns are as wide as a terminal needs them."""
    heads = [*sweep.varied, "runs", "steps", "epochs", "samples", "tokens"]
    heads += ["held-out accuracy, %", "time of a run"]
    cells = [heads]
    for group in _combinations(sweep):
        done = sum(member.state == "finished" for member in group)
        cells.append(
            [
                *(value.replace("|", "\\|") for value in group[0].values.values()),
                str(done) if done == len(group) else f"{done} of {len(group)}",
                _mean(group, "steps", "{:,.0f}"),
                _mean(group, "epochs", "{:,.4g}"),
                _mean(group, "samples_trained", "{:,.0f}"),
                _mean(group, "tokens_trained", "{:,.0f}"),
                accuracy(group),
                wall_time(group),
            ]
        )
    widths = [max(len(row[column]) for row in cells) for column in range(len(heads))]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def write(sweep: Sweep) -> None:
    """Writes ``sweep.json`` and ``sweep.md``."""
    command = shlex.join(
        [
            *("tandem", "sweep", sweep.preset),
            *(f"{key}={value}" for key, value in sweep.settings.items()),
            *(f"{key}={','.join(values)}" for key, values in sweep.varied.items()),
            *("--seeds", f"{','.join(map(str, sweep.seeds))}{',' * (len(sweep.seeds) == 1)}"),
            *("--out", shown(sweep.out)),
        ]
    )
    runs = [
        {
            "folder": member.name,
            "values": {key: parse_yaml(text, key) for key, text in member.values.items()},
            "seed": member.seed,
            "state": member.state,
            "error": member.error or None,
            **member.figures(),
        }
        for member in sweep.members
    ]
    content = {"command": command, **sweep.definition, "runs": runs, "table": rows(sweep)}
    page = ["```bash", command, "```", "", *table(sweep), ""]
    disk.persist(
        sweep.out / "sweep.json",
        lambda: write_atomic(sweep.out / "sweep.json", json.dumps(content, indent=1) + "\n"),
    )
    disk.persist(
        sweep.out / "sweep.md", lambda: write_atomic(sweep.out / "sweep.md", "\n".join(page))
    )
