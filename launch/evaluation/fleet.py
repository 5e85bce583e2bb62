"""An evaluation by the workers of a run that goes on: as jobs in its ledger, between their own batches.

A job is a few samples. A worker claims it as it claims the run's own evaluations, keeps its weights meanwhile, and
leaves the samples in Redis; a job whose worker dies goes to another. Only a few jobs are open at a time, so that
neither Redis nor the run's own evaluations wait for the whole.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import xxhash

from ...common.errors import FencedError, TandemError
from ...common.run_folder import read_join
from ...replay.connection import connect
from ...replay.evaluating.evaluated import Cell, EvaluationFolder
from ...replay.evaluating.evaluations import JOB, EvaluationJob, EvaluationRequest
from ...replay.ledger import Ledger
from ...replay.members import Members
from ...replay.store import RunStore
from ..progress import Progress
from .parts import Samples
from .plan import Model, Prepared

if TYPE_CHECKING:
    from ...rollout.evaluate.answering import Place

JOB_SAMPLES = 64
"""Samples of a job."""
AHEAD = 2
"""Open jobs for each worker."""
ABANDONED_SECONDS = 60.0
"""Time without a rollout worker after which nobody is expected to answer."""
LOOK_SECONDS = 0.2


def by_fleet(
    model: Model,
    prepared: Prepared,
    folder: EvaluationFolder,
    wanted: Mapping[str, Sequence[Place]],
    progress: Progress | None,
) -> list[str]:
    """Makes the missing samples of a live run's cells; returns of those that can't be made, why.

    Args:
        model: the run.
        prepared: the cells.
        folder: where samples go.
        wanted: missing samples by cell.
        progress: is told of each sample.

    Raises:
        TandemError: the run has no worker, or a job failed too often.
    """
    assert model.live is not None
    store = connect(read_join(model.live.join), name="evaluate")
    refused: list[str] = []
    try:
        fleet = _Fleet(RunStore(store), Members(store), Ledger(store, "evaluate"))
        for name, places in wanted.items():
            refused += fleet.answer(prepared, folder, prepared.plan_cell(name), places, progress)
    finally:
        store.close()
    return refused


class _Fleet:
    def __init__(self, runs: RunStore, members: Members, ledger: Ledger) -> None:
        self._runs = runs
        self._members = members
        self._ledger = ledger
        self._seen = time.monotonic()

    def answer(
        self,
        prepared: Prepared,
        folder: EvaluationFolder,
        cell: Cell,
        places: Sequence[Place],
        progress: Progress | None,
    ) -> list[str]:
        """Makes one cell's samples; returns of those that can't be made, why."""
        benchmark = prepared.benchmark(cell.name)
        _, config, held_out = prepared.cells[cell.name]
        # Whoever holds the folder is alone with these jobs; a killed command may have left some.
        where = f"{socket.gethostname()} {folder.cell(cell.name).absolute()}"
        mark = f"{JOB}{xxhash.xxh3_64_hexdigest(where.encode())}"
        for id_ in self._runs.jobs():
            if id_.startswith(f"{mark}/"):
                self._runs.forget_job(id_)
        self._runs.put_eval_set(mark, benchmark.problems)
        chunks = [places[i : i + JOB_SAMPLES] for i in range(0, len(places), JOB_SAMPLES)]
        # A worker may still be at a job of the killed command: what it leaves is no answer to one of these.
        own = f"{mark}/{secrets.token_hex(4)}"
        waiting = {f"{own}/{number}": chunk for number, chunk in enumerate(chunks)}
        opened: list[str] = []
        refused: list[str] = []
        try:
            with Samples(folder, cell.name).adding(0, progress) as add:
                while waiting or opened:
                    workers = self._workers()
                    while waiting and len(opened) < AHEAD * max(1, len(workers)):
                        id_ = next(iter(waiting))
                        job = EvaluationJob(
                            cell=cell,
                            wanted=tuple(waiting.pop(id_)),
                            reward=config.reward.model_dump(mode="json"),
                            token_ids=prepared.plan.token_ids,
                            subject=held_out.subject,
                            level=held_out.level,
                        )
                        self._ask(id_, mark, job, min(workers.values(), default=0))
                        opened.append(id_)
                    for id_, result in self._runs.evaluation_results(opened).items():
                        refused += result.refused
                        add(self._runs.samples(id_))
                        self._runs.forget_job(id_)
                        opened.remove(id_)
                    for id_, reason in self._runs.given_up_evaluations().items():
                        if id_ in opened and self._runs.evaluation(id_) is None:
                            raise TandemError(
                                f"{cell.name}: a job failed too often; the last: {reason}"
                            )
                    if progress is not None:
                        progress.turn()
                    time.sleep(LOOK_SECONDS)
        finally:
            for id_ in opened:
                self._runs.forget_job(id_)
            self._runs.forget_set(mark)
        return refused

    def _ask(self, id_: str, set_name: str, job: EvaluationJob, step: int) -> None:
        while True:
            try:
                # Not before the run's own evaluations, which are due by older steps.
                request = EvaluationRequest(id=id_, set_name=set_name, step=step, job=job)
                self._runs.request_evaluation(request, self._ledger.term())
                return
            except FencedError:
                # A learner has just started: its term is the newest now.
                time.sleep(LOOK_SECONDS)

    def _workers(self) -> dict[str, int]:
        """The live workers, and the step of each one's weights.

        Raises:
            TandemError: there has been none for a minute.
        """
        found = {}
        for member in self._members.live("rollout"):
            version = member.info.get("version")
            if isinstance(version, list) and len(version) == 2 and isinstance(version[1], int):
                found[member.member] = version[1]
        now = time.monotonic()
        if found:
            self._seen = now
        if now - self._seen > ABANDONED_SECONDS:
            raise TandemError(
                f"the run has had no rollout worker with weights for {ABANDONED_SECONDS:.0f} s: is it still "
                f"going on? A checkpoint of it is evaluated as RUN@newest; the same command goes on"
            )
        return found
