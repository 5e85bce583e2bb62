"""Makes the samples of an evaluation's cells: in this process, in several, or by a live run's workers.

Every sample is appended to a file of its cell as soon as it is graded, so that a process may be killed at any
time and the same command goes on. Which process makes a sample follows from its place alone. A cell whose
samples are all there is written anew, in order, and its figures follow from that file.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from ...common.errors import ConfigError, TandemError
from ...common.plain import read_object
from ...common.run_folder import try_lock, write_atomic
from ...replay.evaluating.evaluated import (
    PARQUET,
    Cell,
    EvaluatedSample,
    EvaluationFolder,
    Plan,
    write_parquet,
    write_samples,
)
from ..plan.hardware import GpuName, machine
from ..progress import Progress
from ..run.processes.parts import seeing
from .parts import Samples
from .plan import Prepared

if TYPE_CHECKING:
    from ...rollout.engine import Engine
    from ...rollout.environments.own_server import OwnServer
    from ...rollout.evaluate.answering import Place
    from ...rollout.evaluate.elsewhere import Elsewhere
    from ...rollout.evaluate.evaluation import Evaluation

Keep = Callable[[list[EvaluatedSample]], None]
"""Takes samples as they are graded."""
ROWS = 256
"""Greatest number of responses that an engine generates at a time; also the samples of a block, see
``run.deterministic``."""
FAILURES = 5
"""Times in a row that a worker may end without having made a sample."""
LOOK_SECONDS = 0.5
END_SECONDS = 15.0
"""Time in which workers end their engines when they are asked to, and in which killed ones are gone."""


def begin(folder: EvaluationFolder, plan: Plan) -> None:
    """Writes the plan, or checks that the folder's is the same.

    Raises:
        ConfigError: the folder is another evaluation's.
    """
    if not folder.plan_json.exists():
        if folder.path.exists() and any(
            one.name not in ("models", "lock") for one in folder.path.iterdir()
        ):
            raise ConfigError(f"{folder.path} has other files: name another folder with --to")
        folder.path.mkdir(parents=True, exist_ok=True)
        content = json.dumps(structs.asdict(plan), indent=1, default=structs.asdict)
        write_atomic(folder.plan_json, content + "\n")
        return
    before = folder.plan()
    if before != plan:
        raise ConfigError(
            f"{folder.path} is an evaluation of {_differing(before, plan)}: name another folder with --to, "
            f"or ask for the same"
        )


def _differing(before: Plan, now: Plan) -> str:
    names = [cell.name for cell in before.cells], [cell.name for cell in now.cells]
    if names[0] != names[1]:
        return f"other cells ({', '.join(sorted(set(names[0]) ^ set(names[1]))[:4]) or 'in another order'})"
    for old, new in zip(before.cells, now.cells, strict=True):
        for key in structs.asdict(old):
            if getattr(old, key) != getattr(new, key):
                return (
                    f"another {key} ({new.name}: {getattr(old, key)!r}, not {getattr(new, key)!r})"
                )
    for key in sorted(before.settings.keys() | now.settings.keys()):
        kept, asked = before.settings.get(key), now.settings.get(key)
        if kept != asked:
            named = f"; model.dtype={kept} names it" if key == "dtype" else ""
            return f"another {key} ({kept!r:.80}, not {asked!r:.80}{named})"
    return "other settings"


@contextmanager
def owned(folder: Path) -> Iterator[None]:
    """Holds the folder, so that two commands don't write into it.

    Raises:
        TandemError: another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "ab") as lock:
        if not try_lock(lock.fileno()):
            raise TandemError(f"another process evaluates into {folder}: wait for it, or stop it")
        yield


# --- in this process -------------------------------------------------------------------------


def work(
    prepared: Prepared,
    folder: EvaluationFolder,
    *,
    worker: tuple[int, int] = (0, 1),
    progress: Progress | None = None,
    sampler: Callable[[str], Elsewhere] | None = None,
) -> None:
    """Makes the samples that are missing, model after model.

    Args:
        prepared: the cells.
        folder: where they go.
        worker: number of this process, and how many there are. The first alone asks live runs, for all samples.
        progress: is told of each sample.
        sampler: makes what answers for a model of that name, in the place of engines.

    Raises:
        SamplesRefusedError: samples can't be made; it comes when all others are.
        TandemError: a model can't be loaded, or an engine has failed.
    """
    from ...rollout.evaluate.answering import SamplesRefusedError

    refused: list[str] = []
    for _, of_model in itertools.groupby(prepared.plan.cells, key=lambda cell: cell.model):
        cells = list(of_model)
        model = prepared.cells[cells[0].name][0]
        # The run's own workers share the work, and the jobs of a cell belong to one process.
        if model.live is not None and worker[0] > 0:
            continue
        share = worker if model.live is None else (0, 1)
        wanted = {cell.name: _missing(prepared, folder, cell, share) for cell in cells}
        wanted = {cell: places for cell, places in wanted.items() if places}
        if not wanted:
            continue
        if model.live is not None:
            from .fleet import by_fleet

            flat = {
                cell: [p for batch in batches for p in batch] for cell, batches in wanted.items()
            }
            refused += by_fleet(model, prepared, folder, flat, progress)
            continue

        def keeping(name: str) -> AbstractContextManager[Keep]:
            return Samples(folder, name).adding(worker[0], progress)

        refused += asyncio.run(_by_engine(prepared, wanted, keeping, sampler))
    if refused:
        raise SamplesRefusedError(
            refused,
            ". All others are kept. Serve the model with a longer context and run the command again; or, into another "
            "folder, lower rollout.max_new_tokens or leave the problem out",
        )


def tell(
    prepared: Prepared, found: Callable[[Cell, list[EvaluatedSample], Evaluation], None]
) -> None:
    """Makes all samples of one model's cells, and keeps none.

    Args:
        prepared: the cells.
        found: gets a cell's samples and figures before the next one begins.

    Raises:
        TandemError: the model can't be loaded, its engine has failed, or a sample can't be made.
    """
    from ...rollout.evaluate.evaluation import summarise
    from ...rollout.evaluate.keeping import classified

    @contextmanager
    def keeping(name: str) -> Iterator[Keep]:
        start = time.perf_counter()
        made: list[EvaluatedSample] = []
        yield made.extend
        made = classified(made, prepared.benchmark(name).grader)
        figures = summarise(made, seconds=time.perf_counter() - start)
        found(prepared.plan_cell(name), made, figures)

    wanted = {
        cell.name: [prepared.benchmark(cell.name).places(cell)] for cell in prepared.plan.cells
    }
    asyncio.run(_by_engine(prepared, wanted, keeping, together=True))


def _missing(
    prepared: Prepared, folder: EvaluationFolder, cell: Cell, worker: tuple[int, int]
) -> list[list[Place]]:
    """The samples that this process is to make, in batches that are answered together."""
    if folder.samples_file(cell.name).exists():
        return []
    places = prepared.benchmark(cell.name).places(cell)
    found = Samples(folder, cell.name).found()
    number, count = worker
    if not prepared.plan.settings["deterministic"]:
        mine = [place for place in places[number::count] if place not in found]
        return [mine] if mine else []
    blocks = [places[start : start + ROWS] for start in range(0, len(places), ROWS)]
    # A block that is not whole is made again as a whole: the last bits of log-probs depend on the batch.
    return [block for block in blocks[number::count] if any(place not in found for place in block)]


async def _by_engine(
    prepared: Prepared,
    wanted: dict[str, list[list[Place]]],
    keeping: Callable[[str], AbstractContextManager[Keep]],
    sampler: Callable[[str], Elsewhere] | None = None,
    *,
    together: bool = False,
) -> list[str]:
    """Makes one model's samples; returns of those that can't be made, why.

    Args:
        prepared: the cells.
        wanted: by the cell's name what is to be made, in batches that are answered together.
        keeping: by the cell's name what its samples are given to, while it is open.
        sampler: makes what answers, in the place of an engine.
        together: whether a problem's samples are graded as one group.
    """
    from ...rollout.engines import make_engine
    from ...rollout.evaluate.answering import (
        SILENCE_SECONDS,
        Sampler,
        SamplesRefusedError,
        answer,
    )
    from ...rollout.evaluate.episodes import playing, unless_it_dies

    model, config, _ = prepared.cells[next(iter(wanted))]
    benchmarks = {name: prepared.benchmark(name) for name in wanted}
    engine: Engine | None = None
    server: OwnServer | None = None
    refused: list[str] = []
    async with AsyncExitStack() as stack:
        answers: Sampler
        if sampler is None:
            most = max(prepared.plan_cell(name).max_new_tokens for name in wanted)
            rollout = config.rollout.model_copy(update={"max_new_tokens": most})
            config = config.model_copy(update={"rollout": rollout})
            longest = max(len(p.prompt_tokens) for one in benchmarks.values() for p in one.problems)
            if config.environments.is_on:
                longest = max(longest, config.data.max_prompt_tokens)
            answers = engine = make_engine(
                config.model,
                config.rollout,
                max_rows=ROWS,
                max_prompt_tokens=longest,
            )
            stack.push_async_callback(engine.close)
            await engine.start()
            if config.environments.is_on:
                answers, server = await stack.enter_async_context(playing(engine, config))
        else:
            answers = elsewhere = sampler(model.name)
            stack.callback(elsewhere.close)
        for name, batches in wanted.items():
            with keeping(name) as keep:
                for batch in batches:
                    answering = answer(
                        answers,
                        benchmarks[name],
                        prepared.plan_cell(name),
                        batch,
                        keep,
                        token_ids=prepared.plan.token_ids,
                        together=together,
                        block=bool(prepared.plan.settings["deterministic"]),
                        # A server has --request-seconds for each.
                        silence=SILENCE_SECONDS if sampler is None else None,
                    )
                    try:
                        if server is None:
                            await answering
                        else:
                            await unless_it_dies(asyncio.create_task(answering), server)
                    except SamplesRefusedError as error:
                        refused += error.reasons
    return refused


# --- in several processes --------------------------------------------------------------------


def gpus_of(workers: int, each: int) -> list[list[GpuName]]:
    """The GPUs of each worker's engine; empty on a machine without any.

    Raises:
        ConfigError: there are too few for so many workers.
    """
    here = machine()
    names = [gpu.told for gpu in here.gpus]
    if names and workers * each > len(names):
        raise ConfigError(
            f"--workers {workers} needs {workers * each} GPUs (rollout.gpus_per_worker={each}) and this machine has "
            f"{len(names)} ({here}): lower --workers or rollout.gpus_per_worker"
        )
    return [names[n * each : (n + 1) * each] for n in range(workers)] if names else []


class Workers:
    """Processes that make the samples together, each with an engine of its own.

    Args:
        arguments: of this command, with which each is started.
        count: how many.
        gpus: those of each process's engine; empty on a machine without GPUs.
        folder: the evaluation's; their logs are in it.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        count: int,
        gpus: Sequence[Sequence[GpuName]],
        folder: EvaluationFolder,
    ) -> None:
        self._arguments = arguments
        self._count = count
        self._gpus = gpus
        self._folder = folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._failures = [0] * count
        self._counted: dict[Path, tuple[int, int]] = {}

    def run(self, progress: Progress) -> None:
        """Returns when all samples are made; a worker that dies is started again, and goes on.

        Raises:
            TandemError: a worker died too often without having made anything.
        """
        try:
            for number in range(self._count):
                self._start(number)
            known = self.lines()
            while self._processes:
                for number, process in list(self._processes.items()):
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(LOOK_SECONDS / len(self._processes))
                    lines = self.lines()
                    if lines != known:
                        progress.add(lines - known)
                        known, self._failures = lines, [0] * self._count
                    progress.turn()
                    if process.poll() is not None:
                        self._ended(number, process.returncode)
        finally:
            self.end()

    def lines(self) -> int:
        """Number of samples in all parts; reads only what is new."""
        total = 0
        for cell in self._folder.plan().cells:
            for part in self._folder.parts(cell.name):
                start, count = self._counted.get(part, (0, 0))
                with open(part, "rb") as file:
                    file.seek(start)
                    new = file.read()
                self._counted[part] = (start + len(new), count + new.count(b"\n"))
                total += self._counted[part][1]
        return total

    def end(self) -> None:
        """Ends those that run: first they are asked, so that engines end their own processes."""
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        self._wait()
        for process in self._processes.values():
            process.kill()
        # A killed one may still be in the kernel, as for a file system that doesn't answer.
        self._wait()
        self._processes.clear()

    def _wait(self) -> None:
        until = time.monotonic() + END_SECONDS
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))

    def _start(self, number: int) -> None:
        words = [sys.executable, "-P", "-m", "tandem.launch.lifeline", str(os.getpid()), "evaluate"]
        words += [*self._arguments, "--worker", f"{number}/{self._count}"]
        log = self._folder.path / "logs" / f"worker-{number}.log"
        log.parent.mkdir(exist_ok=True)
        environment = dict(os.environ)
        if self._gpus:
            environment |= seeing(self._gpus[number])
        with open(log, "ab") as out:
            self._processes[number] = subprocess.Popen(
                words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment
            )

    def _ended(self, number: int, code: int) -> None:
        del self._processes[number]
        if code == 0:
            return
        self._failures[number] += 1
        log = self._folder.path / "logs" / f"worker-{number}.log"
        last = log.read_text("utf-8", "replace").strip().rpartition("\n")[2]
        # A refusal would be the same again.
        if code == ConfigError.exit_code or self._failures[number] >= FAILURES:
            raise TandemError(f"worker {number} ended with status {code} ({log}): {last[:400]}")
        self._start(number)


# --- afterwards ------------------------------------------------------------------------------


def finish(folder: EvaluationFolder, prepared: Prepared, *, parquet: bool) -> None:
    """Writes the samples of each cell in order, with the classes of their answers, and removes the parts.

    Raises:
        TandemError: samples are missing.
    """
    from ...rollout.evaluate.keeping import classified

    for cell in prepared.plan.cells:
        file = folder.samples_file(cell.name)
        if not file.exists():
            benchmark = prepared.benchmark(cell.name)
            found = Samples(folder, cell.name).found()
            places = benchmark.places(cell)
            if missing := [place for place in places if place not in found]:
                raise TandemError(
                    f"{cell.name} lacks {len(missing)} samples: run the command again"
                )
            write_samples(file, classified([found[place] for place in places], benchmark.grader))
        for part in folder.parts(cell.name):
            part.unlink()
        table = folder.cell(cell.name) / PARQUET
        if parquet and not table.exists():
            write_parquet(table, list(folder.samples(cell.name)))


def add_times(folder: EvaluationFolder, seconds: float, samples: int) -> None:
    """Adds the time of one attempt, and the samples that it made."""
    known = {"seconds": 0.0, "samples": 0, "attempts": 0}
    if folder.times.exists():
        known |= read_object(folder.times.read_bytes(), str(folder.times), TandemError)
    known["seconds"] += seconds
    known["samples"] += samples
    known["attempts"] += 1
    write_atomic(folder.times, json.dumps(known, indent=1) + "\n")


def left(folder: EvaluationFolder, prepared: Prepared) -> tuple[int, int]:
    """(all samples, samples that are there)."""
    total = done = 0
    for cell in prepared.plan.cells:
        count = len(prepared.benchmark(cell.name).places(cell))
        total += count
        whole = folder.samples_file(cell.name).exists()
        done += count if whole else len(Samples(folder, cell.name).found())
    return total, done
