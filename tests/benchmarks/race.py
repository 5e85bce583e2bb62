"""Tandem beside TRL's ``GRPOTrainer`` on the same work, by turns, on this machine.

    .venv/bin/python tests/benchmarks/race.py                 # about 35 minutes on two cores
    .venv/bin/python tests/benchmarks/race.py --rounds 1 --no-search --page /tmp/race.md

It makes an environment for TRL (in ``runs/race/``), with the torch and transformers that Tandem has here, and runs two races:

- **sums**: samples a second, CPU-seconds a sample and memory, with a random model of 3.2M parameters, 8 prompts with 8
  samples of up to 64 tokens a step. Tandem runs as it comes (samples are at most one step old) and strictly on-policy.
- **chains**: seconds until 60% and 80% of held-out problems are answered, from the command and from the start of training, on
  the miniature's easy setting with its shipped base model.

Prompts, rewards, group size, limits, optimizer, loss and dtype are the same, and so is the learning rate of the sums. Each
side is first run with a few settings, and its fastest ones race: threads, workers and engine, by the samples a second of the sums, and
then the chains' learning rate, by the time to 80% with seeds that don't race (``--no-search`` takes the usual winners). What
other processes of the machine used meanwhile is printed beside every figure. ``--page`` also writes a page with a plot.

Samples a second and CPU-seconds are those between the ends of two steps, so that start-up counts only in the second
race. No side's evaluations are in its times: TRL's are subtracted, and Tandem's are made when its run has ended, from the
checkpoints that it wrote on the way.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import race_work as work
from peers import environment

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TRL = "1.16.0"
SKIPPED = 3
"""First steps that aren't timed: warm-up."""
HELD_OUT = 100
"""Held-out problems of an evaluation."""
EVERY = 4
"""Steps between two evaluations of the chains."""
GOALS = (0.6, 0.8)
SEARCH_STEPS = 9
CHAIN_RATES = (3e-4, 6e-4, 1e-3)
"""Learning rates of the chains among which each side's is searched."""
SEARCH_SEEDS = (101, 102, 103)
TWO_WORKERS = (
    "learner.threads=2",
    "rollout.workers=2",
    f"rollout.groups_per_batch={work.GROUPS // 2}",
)
"""Half of a step's groups for each of two workers."""
TANDEM_CHOICES: Sequence[tuple[str, ...]] = (
    (),
    ("learner.threads=2",),
    ("rollout.threads=2",),
    ("learner.threads=2", "rollout.threads=2"),
    TWO_WORKERS,
)
"""Settings among which Tandem's are searched; the first is how it comes."""
TRL_CHOICES: Sequence[dict[str, Any]] = (
    {"threads": 2, "continuous": False},
    {"threads": 1, "continuous": False},
    {"threads": 2, "continuous": True},
)
"""Settings among which TRL's are searched."""


@dataclass
class Used:
    """What a process and its children used of the machine, sampled while they ran."""

    times: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    """CPU-seconds so far of the process and everything below it."""
    all: list[float] = field(default_factory=list)
    """CPU-seconds so far of the whole machine, idle time left out."""
    memory: float = 0.0
    """Greatest sum of proportional set sizes, MiB."""

    def watch(self, process: subprocess.Popen[str]) -> None:
        """Samples until the process has ended."""
        seen: dict[int, float] = {}
        top = psutil.Process(process.pid)
        for turn in itertools.count():
            try:
                family = [top, *top.children(recursive=True)]
            except psutil.Error:
                return
            memory = 0.0
            for one in family:
                try:
                    times = one.cpu_times()
                    seen[one.pid] = times.user + times.system
                    if turn % 10 == 0:
                        memory += one.memory_full_info().pss / 2**20
                except psutil.Error:
                    continue
            machine = psutil.cpu_times()
            self.times.append(time.time())
            self.own.append(sum(seen.values()))
            self.all.append(machine.user + machine.system + machine.nice)
            self.memory = max(self.memory, memory)
            if process.poll() is not None:
                return
            time.sleep(0.1)

    def between(self, begin: float, end: float) -> tuple[float, float]:
        """CPU-seconds of the process, and cores used by others on average, between two times."""

        def at(values: Sequence[float], when: float) -> float:
            for k in range(1, len(self.times)):
                if self.times[k] >= when:
                    share = (when - self.times[k - 1]) / (self.times[k] - self.times[k - 1])
                    return values[k - 1] + share * (values[k] - values[k - 1])
            return values[-1]

        own = at(self.own, end) - at(self.own, begin)
        everything = at(self.all, end) - at(self.all, begin)
        return own, max(0.0, everything - own) / (end - begin)


@dataclass(frozen=True)
class Speed:
    """A run of the sums."""

    samples: float
    """Samples a second."""
    cpu: float
    """CPU-seconds a sample."""
    memory: float
    """MiB at most."""
    others: float
    """Cores that others used meanwhile."""
    length: float
    """Mean tokens of a response."""


@dataclass(frozen=True)
class Course:
    """A run of the chains."""

    began: float
    """Seconds from the command to the start of training."""
    first: float
    """Seconds from the command to the end of the first step."""
    others: float
    points: list[tuple[float, float]]
    """Seconds from the command, and accuracy, of each evaluation."""

    def to(self, goal: float) -> float:
        """Seconds from the command to this accuracy; infinite if it wasn't reached."""
        return next((when for when, accuracy in self.points if accuracy >= goal), math.inf)


class Track:
    """Where the race is run: the work's files, and TRL's environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.trl = folder / "trl"
        self.python = self.trl / "bin" / "python"
        self.model = folder / "model"

    def prepare(self, *, trl: bool) -> None:
        """Makes what isn't there yet."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if trl:
            packages = [f"trl=={TRL}", f"transformers=={version('transformers')}"]
            environment(self.trl, f"TRL {TRL}", packages)
        if not (self.model / "tokenizer.json").exists():
            work.write_model(self.model)
        train = work.sums(2048, 0)
        self._write("sums", train, [])
        chains = self.folder / "chains"
        if not chains.exists():
            command = [sys.executable, "-m", "tandem.launch.cli", "make-miniature", str(chains)]
            subprocess.run([*command, "--setting", "easy"], check=True, stdout=subprocess.DEVNULL)
        self._write("chains", self._texts("train"), self._texts("heldout")[:HELD_OUT])

    def _texts(self, name: str) -> list[dict[str, str]]:
        """Problems of the chains, with prompts as the policy reads them."""
        import pyarrow.parquet as parquet

        from tandem.common.models import load_tokenizer

        tokenizer = load_tokenizer("miniature")
        rows = parquet.read_table(self.folder / "chains" / f"{name}.parquet").to_pylist()
        return [
            {
                "question": tokenizer.apply_chat_template(
                    row["prompt"], tokenize=False, add_generation_prompt=True
                ),
                "answer": str(row["reward_model"]["ground_truth"]),
            }
            for row in rows
        ]

    def accuracy(self, run: Path, step: int) -> float:
        """Share of the held-out chains that the model of a run's checkpoint answers."""
        from tandem.common.config import build, read_yaml
        from tandem.common.models import load_model, load_tokenizer
        from tandem.common.run_folder import RunFolder
        from tandem.learner.exporting import export

        problems = json.loads((self.folder / "chains.json").read_text(encoding="utf-8"))["heldout"]
        folder, place = RunFolder(run), run / f"model-{step}"
        config = build(read_yaml(folder.config), stored=True)
        export(folder, config, place, step=step)
        model = load_model(str(place), dtype=config.model.dtype).eval()
        return work.accuracy(model, load_tokenizer(str(place)), problems)

    def _write(self, race: str, train: list[dict[str, str]], held: list[dict[str, str]]) -> None:
        rows = {"train": train, "heldout": held}
        (self.folder / f"{race}.json").write_text(json.dumps(rows), encoding="utf-8")
        lines = "".join(json.dumps(row) + "\n" for row in train)
        (self.folder / f"{race}.jsonl").write_text(lines, encoding="utf-8")


def run(command: Sequence[str], environment: Mapping[str, str]) -> tuple[float, str, Used]:
    """Runs a command; returns when it was given, what it printed, and what it used.

    Raises:
        SystemExit: it failed.
    """
    given = time.time()
    with subprocess.Popen(
        command,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        used = Used()
        watcher = threading.Thread(target=used.watch, args=(process,))
        watcher.start()
        out, errors = process.communicate(timeout=1800)
        watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command)[:200]} failed:\n{errors[-3000:]}")
    return given, out, used


def speed_of(ends: Sequence[float], lengths: Sequence[float], used: Used) -> Speed:
    """Figures of a run of the sums from the times at which its steps ended."""
    begin, end = ends[SKIPPED - 1], ends[-1]
    samples = (len(ends) - SKIPPED) * work.GROUPS * work.SAMPLES
    cpu, others = used.between(begin, end)
    return Speed(
        samples=samples / (end - begin),
        cpu=cpu / samples,
        memory=used.memory,
        others=others,
        length=statistics.mean(lengths[SKIPPED:]),
    )


def tandem(
    track: Track, race: str, steps: int, seed: int, dtype: str, overrides: Sequence[str]
) -> Any:
    """Runs Tandem; :class:`Speed` of the sums or :class:`Course` of the chains."""
    folder = track.folder / "run"
    shutil.rmtree(folder, ignore_errors=True)
    words = [f"run.dir={folder}", f"run.steps={steps}", f"run.seed={seed}", f"model.dtype={dtype}"]
    words += ["evaluate.every=0", "evaluate.at_start=false", "evaluate.at_end=false"]
    words += ["log.samples_per_step=0"]
    if race == "sums":
        words += [
            f"model.path={track.model}",
            "data.miniature=null",
            f"data.train=[{{path: {track.folder / 'sums.jsonl'}, name: sums}}]",
            "data.evaluate=[]",
            "data.max_prompt_tokens=40",
            f"rollout.max_new_tokens={work.SUMS_TOKENS}",
            "reward.components=[{name: 'race_work:digits'}]",
            f"learner.optimizer.lr={work.SUMS_RATE}",
            "learner.optimizer.schedule=constant",
            "learner.optimizer.warmup_steps=0",
        ]
    else:
        words += [f"learner.checkpoint_every={EVERY}", f"learner.checkpoints_kept={steps}"]
    given, _, used = run(
        [sys.executable, "-m", "tandem.launch.cli", "start", "miniature-easy", *words, *overrides],
        {"PYTHONPATH": str(HERE)},
    )
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [record for record in map(json.loads, lines) if "time/total" in record]
    ends = [record["time"] for record in records]
    if race == "sums":
        return speed_of(ends, [record["rollout/length_mean"] for record in records], used)
    scores = [
        (ends[step - 1], track.accuracy(folder, step)) for step in range(EVERY, steps + 1, EVERY)
    ]
    # The first record's time is the end of its step.
    began = ends[0] - records[0]["time/total"]
    return course_of(given, began, ends[0], scores, used)


def course_of(
    given: float, began: float, first: float, scores: Sequence[tuple[float, float]], used: Used
) -> Course:
    """Figures of a run of the chains from the times of its evaluations."""
    last = max((when for when, _ in scores), default=first)
    return Course(
        began=began - given,
        first=first - given,
        others=used.between(given, last)[1],
        points=[(when - given, accuracy) for when, accuracy in scores],
    )


def trl(
    track: Track, race: str, steps: int, seed: int, dtype: str, choice: Mapping[str, Any]
) -> Any:
    """Runs TRL; :class:`Speed` of the sums or :class:`Course` of the chains."""
    from tandem.common.models import resolve

    asked = {
        "race": race,
        "model": str(track.model) if race == "sums" else str(resolve("miniature")),
        "problems": str(track.folder / f"{race}.json"),
        "steps": steps,
        "seed": seed,
        "dtype": dtype,
        "every": EVERY,
        "rate": work.SUMS_RATE if race == "sums" else work.CHAINS_RATE,
        **choice,
    }
    given, out, used = run(
        [str(track.python), str(HERE / "race_trl.py"), json.dumps(asked)],
        {
            "OMP_NUM_THREADS": str(choice["threads"]),
            "OMP_WAIT_POLICY": "PASSIVE",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "PYTHONPATH": "",
        },
    )
    found = json.loads(out.splitlines()[-1])
    began, *ends = found["ends"]
    if race == "sums":
        return speed_of(ends, found["lengths"], used)
    scores, spent = [], 0.0
    for step, accuracy, seconds in found["scores"]:
        # Each step's time counts as if no evaluation had been before it.
        scores.append((ends[step - 1] - spent, accuracy))
        spent += seconds
    return course_of(given, began, ends[0], scores, used)


def bare_imports() -> float:
    """Seconds in which one process imports what the learner can't do without, and nothing else."""
    given = time.monotonic()
    subprocess.run(
        [sys.executable, "-c", BARE_IMPORTS],
        env={**os.environ, "DS_ACCELERATOR": "cpu"},
        capture_output=True,
        check=True,
        timeout=300,
    )
    return time.monotonic() - given


def search(
    track: Track, dtype: str
) -> tuple[dict[str, tuple[str, ...]], dict[str, Any], list[str]]:
    """Tries each side's settings on the sums; returns the fastest of each arm, and what was found."""
    notes, tandems = [], {}
    for arm, staleness in ARMS.items():
        tried = {}
        for choice in TANDEM_CHOICES:
            words = (f"replay.max_staleness={staleness}", *choice)
            tried[words] = tandem(track, "sums", SEARCH_STEPS, 0, dtype, words).samples
            notes.append(f"{arm}, {' '.join(choice) or 'as it comes'}: {tried[words]:.1f}")
            print("  ", notes[-1], flush=True)
        tandems[arm] = max(tried, key=tried.__getitem__)
    others = []
    for choice in TRL_CHOICES:
        speed = trl(track, "sums", SEARCH_STEPS, 0, dtype, choice).samples
        others.append((speed, choice))
        notes.append(f"TRL, {json.dumps(choice)}: {speed:.1f}")
        print("  ", notes[-1], flush=True)
    return tandems, max(others, key=lambda pair: pair[0])[1], notes


def search_rate(
    track: Track, dtype: str, steps: int, tandem_words: Sequence[str], choice: Mapping[str, Any]
) -> tuple[dict[str, float], list[str]]:
    """Tries the chains' learning rates; returns each side's fastest to the last goal, and what was found."""

    def median_time(go: Callable[[int, float], Course], rate: float) -> float:
        courses = [go(seed, rate) for seed in SEARCH_SEEDS]
        return statistics.median(one.to(GOALS[-1]) - one.began for one in courses)

    def of_tandem(seed: int, rate: float) -> Course:
        words = (*tandem_words, f"learner.optimizer.lr={rate}")
        found: Course = tandem(track, "chains", steps, seed, dtype, words)
        return found

    def of_trl(seed: int, rate: float) -> Course:
        found: Course = trl(track, "chains", steps, seed, dtype, {**choice, "rate": rate})
        return found

    rates, notes = {}, []
    for name, go in (("Tandem", of_tandem), ("TRL", of_trl)):
        tried = {rate: median_time(go, rate) for rate in CHAIN_RATES}
        rates[name] = min(tried, key=tried.__getitem__)
        notes += [f"{name}, {rate:g}: {seconds:.1f}" for rate, seconds in tried.items()]
        print("  ", "; ".join(notes[-len(tried) :]), flush=True)
    return rates, notes


BARE_IMPORTS = "import torch, deepspeed; from transformers import Qwen2ForCausalLM"
ARMS = {"Tandem": 1, "Tandem, on-policy": 0}
"""Tandem's arms with the greatest age of their samples, in steps."""


def main() -> None:
    """Runs the races and prints what came of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="steps of the sums")
    parser.add_argument("--chain-steps", type=int, default=60)
    parser.add_argument(
        "--races", nargs="*", choices=["sums", "chains"], default=["sums", "chains"]
    )
    parser.add_argument("--arms", nargs="*", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--no-search", action="store_true")
    parser.add_argument("--no-trl", action="store_true", help="Tandem's figures alone")
    parser.add_argument("--dir", type=Path, default=ROOT / "runs" / "race")
    parser.add_argument("--page", type=Path, help="write a page with a plot there")
    options = parser.parse_args()
    track = Track(options.dir.absolute())
    track.prepare(trl=not options.no_trl)
    tandems = {
        arm: (
            f"replay.max_staleness={staleness}",
            *(("learner.threads=2",) if staleness else TWO_WORKERS),
        )
        for arm, staleness in ARMS.items()
    }
    choice, rates = dict(TRL_CHOICES[0]), dict.fromkeys(("Tandem", "TRL"), work.CHAINS_RATE)
    searched: dict[str, list[str]] = {}
    if not options.no_search and not options.no_trl:
        print(f"search, samples/s of {SEARCH_STEPS} steps of the sums:", flush=True)
        tandems, choice, searched["samples/s of the sums"] = search(track, options.dtype)
    chain_words = ("replay.max_staleness=1",)
    if "chains" in options.races and not options.no_search and not options.no_trl:
        print(f"search, seconds of training to {GOALS[-1]:.0%} of the chains:", flush=True)
        rates, searched[f"seconds of training to {GOALS[-1]:.0%} of the chains"] = search_rate(
            track, options.dtype, options.chain_steps, chain_words, choice
        )
    results: dict[str, dict[str, list[Any]]] = {}
    imports = []
    for race, round_ in itertools.product(options.races, range(options.rounds)):
        steps = options.steps if race == "sums" else options.chain_steps
        sides: list[tuple[str, Any]] = [(arm, tandems[arm]) for arm in options.arms]
        sides.append(("TRL", choice))
        if race == "chains":
            words = (*chain_words, f"learner.optimizer.lr={rates['Tandem']}")
            sides = [("Tandem", words), ("TRL", {**choice, "rate": rates["TRL"]})]
            imports.append(bare_imports())
        if options.no_trl:
            sides.pop()
        # The order alternates, so that a drift of the machine falls on all.
        for name, settings in sides if round_ % 2 == 0 else reversed(sides):
            go = trl if name == "TRL" else tandem
            found = go(track, race, steps, round_, options.dtype, settings)
            results.setdefault(race, {}).setdefault(name, []).append(found)
            print(f"{race} {round_} {name}: {_told(found)}", flush=True)
    told = report(results, options.dtype, tandems, choice, rates, searched, imports)
    print(told)
    raw = {
        race: {n: [asdict(f) for f in found] for n, found in sides.items()}
        for race, sides in results.items()
    }
    (track.folder / "race.json").write_text(json.dumps(raw, indent=1), encoding="utf-8")
    if options.page is not None:
        write_page(options.page, told, results)


def _told(found: Speed | Course) -> str:
    figures = asdict(found)
    figures.pop("points", None)
    if isinstance(found, Course):
        figures |= {f"{goal:.0%}": found.to(goal) for goal in GOALS}
    return ", ".join(f"{name} {value:.3g}" for name, value in figures.items())


def median(found: Sequence[Any], name: str) -> float:
    """Median of one figure."""
    return statistics.median(getattr(one, name) for one in found)


def report(
    results: Mapping[str, Mapping[str, Sequence[Any]]],
    dtype: str,
    tandems: Mapping[str, Sequence[str]],
    choice: Mapping[str, Any],
    rates: Mapping[str, float],
    searched: Mapping[str, Sequence[str]],
    imports: Sequence[float],
) -> str:
    """The tables, in Markdown."""
    import torch
    import transformers

    lines = [
        (
            f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}, TRL {TRL}, {dtype}. Medians, with each round in brackets."
        ),
        "",
    ]
    if sums := results.get("sums"):
        base = sums.get("TRL") or next(iter(sums.values()))
        lines += [
            "| sums | samples/s | times TRL's | CPU-s a sample | of TRL's | memory, MiB | tokens | cores of others |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for name, found in sums.items():
            each = " ".join(f"{one.samples:.1f}" for one in found)
            lines.append(
                f"| {name} | **{median(found, 'samples'):.1f}** ({each}) "
                f"| **{median(found, 'samples') / median(base, 'samples'):.2f}** "
                f"| {median(found, 'cpu'):.4f} | {median(found, 'cpu') / median(base, 'cpu'):.2f} "
                f"| {median(found, 'memory'):.0f} | {median(found, 'length'):.0f} "
                f"| {median(found, 'others'):.2f} |"
            )
        lines.append("")
    if chains := results.get("chains"):
        base = chains.get("TRL") or next(iter(chains.values()))
        lines += [
            "| chains | to | s from the command | TRL's by it | s from the start of training | TRL's by it | first step, s | cores of others |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for goal in GOALS:
            command = statistics.median(one.to(goal) for one in base)
            training = statistics.median(one.to(goal) - one.began for one in base)
            for name, found in chains.items():
                whole = [one.to(goal) for one in found]
                alone = [one.to(goal) - one.began for one in found]
                lines.append(
                    f"| {name} | {goal:.0%} | **{statistics.median(whole):.1f}** ({' '.join(f'{s:.1f}' for s in whole)}) "
                    f"| **{command / statistics.median(whole):.2f}** "
                    f"| {statistics.median(alone):.1f} ({' '.join(f'{s:.1f}' for s in alone)}) "
                    f"| **{training / statistics.median(alone):.2f}** "
                    f"| {median(found, 'first'):.1f} | {median(found, 'others'):.2f} |"
                )
        bare = statistics.median(imports)
        first = median(chains["Tandem"], "first")
        lines += [
            "",
            (
                f"`{BARE_IMPORTS}` alone takes {bare:.1f} s ({' '.join(f'{s:.1f}' for s in imports)}); "
                f"Tandem's first step is done after {first / bare:.2f} times that."
            ),
            "",
        ]
    lines += [
        "Settings: " + "; ".join(f"{arm}: `{' '.join(words)}`" for arm, words in tandems.items())
    ]
    lines[-1] += f"; TRL: `{json.dumps(choice)}`; learning rates of the chains: "
    lines[-1] += ", ".join(f"{name} {rate:g}" for name, rate in rates.items()) + "."
    for what, notes in searched.items():
        lines += ["", f"The search, {what}: " + "; ".join(notes) + "."]
    return "\n".join(lines)


def write_page(page: Path, told: str, results: Mapping[str, Mapping[str, Sequence[Any]]]) -> None:
    """Writes the page, and beside it the plot of the chains' courses."""
    picture = ""
    if chains := results.get("chains"):
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 3.6), layout="constrained")
        for (name, found), colour in zip(chains.items(), ("tab:blue", "tab:orange"), strict=False):
            for number, one in enumerate(found):
                seconds, accuracy = zip(*one.points, strict=True) if one.points else ((), ())
                axes.plot(
                    seconds, accuracy, color=colour, alpha=0.7, label=name if not number else None
                )
        for goal in GOALS:
            axes.axhline(goal, color="grey", linewidth=0.8)
        axes.set_xlabel("seconds from the command")
        axes.set_ylabel("held-out accuracy, greedy")
        axes.set_ylim(0, 1)
        axes.legend()
        folder = page.parent / "images"
        folder.mkdir(parents=True, exist_ok=True)
        figure.savefig(folder / "race.png", dpi=110)
        picture = "![held-out accuracy by time](images/race.png)\n"
    what = (__doc__ or "").split("\n\n", 2)[2]
    page.write_text(
        f"# The race\n\n```bash\n.venv/bin/python tests/benchmarks/race.py {shlex.join(sys.argv[1:])}\n```\n\n{what}\n"
        f"## What came of it\n\n{told}\n\n{picture}",
        encoding="utf-8",
    )


if __name__ == "__main__":
    main()
