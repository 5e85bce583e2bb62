"""Evaluations that a worker claims from the ledger between two batches."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from ...common.config import Config, RewardConfig, of_set
from ...common.errors import StoreError, TandemError
from ...common.records import Problem, Version
from ...replay.evaluating.evaluated import Cell, EvaluatedSample
from ...replay.evaluating.evaluations import EvaluationRequest, EvaluationResult, result_of
from ...replay.store import RunStore
from ..engine import Engine
from ..new_weights.commit_check import CommitCheck
from ..player import Player

if TYPE_CHECKING:
    from ...reward.grading import Grader
    from .answering import Benchmark, Place

log = logging.getLogger("tandem.rollout")


class ClaimedEvaluations:
    """Evaluates the weights in use, which are kept from changing meanwhile; for use in one loop.

    Args:
        name: the worker's member id.
        engine: samples the responses.
        runs: has the held-out sets, and takes the results.
        config: the run's config.
        check: the check of new weights, for which a result waits.
        steady: whoever holds it keeps the engine's weights from changing.
        in_redis: runs a call that blocks on Redis outside the loop.
        sampler: samples the responses; None = the engine. A player where problems have environments.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        runs: RunStore,
        config: Config,
        check: CommitCheck,
        steady: asyncio.Lock,
        in_redis: Callable[[Callable[[], Any]], Awaitable[Any]],
        sampler: Engine | Player | None = None,
    ) -> None:
        self._sampler = sampler or engine
        self._name = name
        self._engine = engine
        self._runs = runs
        self._config = config
        self._check = check
        self._steady = steady
        self._in_redis = in_redis
        # By the reward's settings.
        self._graders: dict[str, Grader] = {}
        self._task: asyncio.Task[Any] | None = None
        self._claimed: EvaluationRequest | None = None
        # Of the claimed evaluation, where it mustn't begin any more: why.
        self._cancelled = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self.done = 0
        """Number of evaluations whose results this worker has submitted."""

    def renew(self) -> None:
        """Keeps a claimed evaluation from other workers, or ends it if it is this one's no more; called from
        the keeper's thread.

        Raises:
            StoreError: Redis is away.
        """
        claimed, loop = self._claimed, self._loop
        if claimed is None or loop is None:
            return
        if not self._runs.renew_evaluation(claimed.id, self._name):
            loop.call_soon_threadsafe(self._lose, claimed)

    def _lose(self, lost: EvaluationRequest) -> None:
        # It may have been done meanwhile, and another one begun.
        if self._claimed is lost:
            self.cancel("it is claimed by another worker now, or done")

    def cancel(self, reason: str = "drained") -> None:
        """Ends the claimed evaluation, also one that waits for new weights; :meth:`run` gives it back."""
        self._cancelled = reason
        if self._task is not None:
            self._task.cancel()

    def close(self) -> None:
        """Ends the graders."""
        for grader in self._graders.values():
            grader.close()

    async def run(self, request: EvaluationRequest) -> None:
        """Does one claimed evaluation; submits its result, or gives it back.

        Raises:
            StoreError: Redis is away; the claim expires by itself.
        """
        self._loop = asyncio.get_running_loop()
        self._claimed, self._cancelled = request, ""
        try:
            result = await self._evaluate(request)
            if result is None:
                await self._give_back(request, self._why_ended(request), failed=False)
                return
            await self._in_redis(lambda: self._runs.finish_evaluation(request.id, result))
            self.done += 1
            if request.job is None:
                log.info(
                    f"{request.set_name} at step {result.step}: accuracy {result.accuracy:.1%} of "
                    f"{result.problems} problems in {result.seconds:.1f} s"
                )
        except StoreError:
            raise
        except (TandemError, ValueError) as error:
            # This or another worker tries again, unless it has failed too often.
            log.error(f"evaluation {request.id} failed: {error}")
            await self._give_back(request, str(error), failed=True)
        finally:
            self._claimed = None

    def _why_ended(self, request: EvaluationRequest) -> str:
        if self._check.suspect:
            return "the weights failed their check"
        if _is_older(self._engine.version, request):
            return "new weights weren't loaded"
        return self._cancelled

    def _grader(self, reward: RewardConfig) -> Grader:
        """Imported here, so that only a worker that evaluates pays for the graders' imports."""
        from ...reward.grading import Grader

        key = reward.model_dump_json()
        if key not in self._graders:
            self._graders[key] = Grader(reward)
        return self._graders[key]

    def _asked(
        self, request: EvaluationRequest, problems: Sequence[Problem]
    ) -> tuple[Cell, Benchmark, Sequence[Place]]:
        """How an evaluation is sampled, on what, and which samples are to be made."""
        from .answering import Benchmark

        if (job := request.job) is None:
            sets = {held.name: held for held in self._config.data.evaluate}
            # A set that the config doesn't name (any more) is evaluated as the run says.
            held = sets.get(request.set_name)
            own = self._config if held is None else of_set(self._config, held)
            name = request.set_name
            cell = replace(
                Cell.of(own, name=f"evaluate {name}", model="", benchmark=name),
                temperature=request.temperature,
                samples=request.samples,
            )
            benchmark = Benchmark(problems=problems, grader=self._grader(own.reward))
            return cell, benchmark, benchmark.places(cell)
        cell, reward = job.cell, RewardConfig.model_validate(job.reward)
        second = None
        if cell.second_mode is not None:
            second = self._grader(reward.model_copy(update={"mode": cell.second_mode}))
        benchmark = Benchmark(
            problems=problems,
            grader=self._grader(reward.model_copy(update={"mode": cell.mode})),
            second=second,
            subject=job.subject,
            level=job.level,
        )
        return cell, benchmark, job.wanted

    async def _evaluate(self, request: EvaluationRequest) -> EvaluationResult | None:
        """Makes the samples, and stores those of a job; None if it was ended or the weights failed their check."""
        from .answering import SamplesRefusedError, answer
        from .evaluation import Evaluation, summarise
        from .keeping import classified

        job = request.job
        problems = await self._in_redis(
            lambda: self._runs.eval_set(request.set_name, request.limit)
        )
        cell, benchmark, wanted = self._asked(request, problems)
        kept: list[EvaluatedSample] = []
        start = 0.0

        async def make() -> Evaluation | None:
            await answer(
                self._sampler,
                benchmark,
                cell,
                wanted,
                kept.extend,
                token_ids=job is not None and job.token_ids,
                together=job is None,
                block=job is None and self._config.run.deterministic,
            )
            if job is not None:
                return None
            samples = await asyncio.to_thread(classified, kept, benchmark.grader)
            return summarise(samples, seconds=time.perf_counter() - start)

        async with self._steady:
            version = self._engine.version
            if self._cancelled or _is_older(version, request):
                return None
            start = time.perf_counter()
            self._task = task = asyncio.create_task(make())
            await asyncio.wait([task])
        if task.cancelled():
            return None
        refused: tuple[str, ...] = ()
        found = None
        try:
            found = task.result()
        except SamplesRefusedError as error:
            refused = error.reasons
        held = [version] if version is not None else []
        used = (one for sample in kept for one in sample.versions)
        await self._check.settled(versions=[*held, *used])
        if self._check.suspect:
            return None
        step = version.step if version is not None else request.step
        if job is None:
            assert found is not None
            return result_of(
                found.to_dict(),
                id_=request.id,
                set_name=request.set_name,
                step=step if found.step is None else found.step,
                member=self._name,
            )
        await self._in_redis(lambda: self._runs.put_samples(request.id, kept))
        return EvaluationResult(
            id=request.id,
            set_name=request.set_name,
            step=step,
            accuracy=sum(one.correct for one in kept) / max(1, len(kept)),
            problems=len({one.place for one in kept}),
            format_share=0.0,
            mean_length=sum(one.tokens for one in kept) / max(1, len(kept)),
            seconds=time.perf_counter() - start,
            member=self._name,
            refused=refused,
        )

    async def _give_back(self, request: EvaluationRequest, reason: str, *, failed: bool) -> None:
        # It is no longer renewed, so another worker may claim it from here on.
        self._claimed = None
        await self._in_redis(
            lambda: self._runs.give_back_evaluation(
                request.id, self._name, reason=reason, failed=failed
            )
        )
        log.info(f"evaluation {request.id} was given back: {reason}")


def _is_older(version: Version | None, request: EvaluationRequest) -> bool:
    """Whether an evaluation that was claimed for weights to come has to do without them."""
    return version is not None and version.step < request.step
